"""Which samples are kept, which wait in the queue, and which were discarded by hand.

Nothing here knows why a sample is moved; `egeria_lab.algorithms.sieving.sieve` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egeria_lab.algorithms.sieving.groups import apportion, first_of_each

KEPT, REMOVED, DISCARDED_KEPT, DISCARDED_REMOVED = range(4)
"""Where a sample is; a discarded one remembers where it was before."""


class Membership:
    """The kept set, the queue of removed samples and the discarded ones; up to 18 bytes a sample.

    Args:
        num_samples: samples in the training set; all are kept at first.
        generator: for draws of samples.
        groups: int64 class number of each sample, shape ``(num_samples,)``; None for one group.
        circulates: removed samples come back, so that the place of a discarded one can be filled.

    Attributes:
        status: int8, one of the constants above, shape ``(num_samples,)``.
        queue: int64 ids of removed samples, head first.
        target: size that the kept set should have.

    Example:
        >>> members = Membership(5, torch.Generator().manual_seed(0), circulates=True)
        >>> members.remove(torch.tensor([3, 1]))
        >>> members.kept_ids().tolist(), members.queue.tolist()
        ([0, 2, 4], [3, 1])
        >>> members.take(torch.tensor([True, False])).tolist()
        [3]
    """

    def __init__(
        self, num_samples: int, generator: torch.Generator, groups: Tensor | None = None, circulates: bool = False
    ) -> None:
        self.num_samples = num_samples
        self.generator = generator
        self.circulates = circulates
        self.status = torch.zeros(num_samples, dtype=torch.int8)
        self.queue = torch.empty(0, dtype=torch.int64)
        self.target = num_samples
        # Removed at the start, or put back by hand, and not taken since: these come before any shuffling.
        self._waiting = torch.zeros(num_samples, dtype=torch.bool)
        self._stand_ins: dict[int, int] = {}
        self._kept: Tensor | None = None
        self.use_groups(groups)

    def use_groups(self, groups: Tensor | None) -> None:
        """Follow the shares of these classes from now on, or of none."""
        self.groups = groups
        self.num_groups = 1 if groups is None else int(groups.max()) + 1

    def kept_ids(self) -> Tensor:
        """Ids of kept samples, ascending; not to be written to."""
        if self._kept is None:
            self._kept = (self.status == KEPT).nonzero().flatten()
        return self._kept

    def discarded_ids(self) -> Tensor:
        """Ids of samples discarded by hand, ascending."""
        return (self.status >= DISCARDED_KEPT).nonzero().flatten()

    @property
    def num_kept(self) -> int:
        """Samples that are trained on."""
        return len(self.kept_ids())

    @property
    def num_removed(self) -> int:
        """Samples in the queue."""
        return len(self.queue)

    @property
    def num_discarded(self) -> int:
        """Samples discarded by hand."""
        return self.num_samples - self.num_kept - self.num_removed

    @property
    def first_round_over(self) -> bool:
        """True once every initially removed sample was taken back."""
        return not bool(self._waiting[self.queue].any())

    def groups_of(self, ids: Tensor) -> Tensor:
        """Class number of some samples, all 0 without classes."""
        return torch.zeros_like(ids) if self.groups is None else self.groups[ids]

    def sizes_of(self, ids: Tensor) -> Tensor:
        """How many of some samples each class has, int64, shape ``(groups,)``."""
        return torch.bincount(self.groups_of(ids), minlength=self.num_groups)

    def remove_at_random(self, count: int) -> Tensor:
        """The start: `count` kept samples go to the queue in random order, each class giving its share."""
        shuffled = self._shuffled(self.kept_ids())
        counts = apportion(count, self.sizes_of(shuffled))
        ids = shuffled[first_of_each(self.groups_of(shuffled), counts)]
        self.remove(ids)
        self._waiting[ids] = True
        self.target = self.num_samples - count
        return ids

    def remove(self, ids: Tensor) -> None:
        """Kept samples go to the queue's tail, in this order."""
        self._set(ids, REMOVED)
        self.queue = torch.cat([self.queue, ids])

    def take(self, marked: Tensor) -> Tensor:
        """Keep the marked members of the queue again (bool, shape ``(num_removed,)``); returns their ids."""
        ids = self.queue[marked]
        self.queue = self.queue[~marked]
        self._waiting[ids] = False
        self._set(ids, KEPT)
        return ids

    def take_head(self, counts: Tensor) -> Tensor:
        """Keep the first so many of each class in the queue again; returns their ids."""
        return self.take(first_of_each(self.groups_of(self.queue), counts))

    def removed_instead(self, ids: Tensor) -> None:
        """Let these be the removed samples and keep all others that were not discarded."""
        self._set(self.queue, KEPT)
        self._set(ids, REMOVED)
        self.queue = ids

    def shuffle(self) -> None:
        """Bring the queue into random order."""
        self.queue = self._shuffled(self.queue)

    def fillers(self, ids: Tensor) -> int:
        """How many places that discarding these samples leaves in the kept set would be filled."""
        waiting = self.num_removed - int((self.status[ids] == REMOVED).sum())
        return min(int((self.status[ids] == KEPT).sum()), waiting) if self.circulates else 0

    def discard(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Put samples aside; the queue's head takes the places in the kept set.

        Returns:
            Ids that left the kept set and ids that entered it.
        """
        were_kept, were_removed = ids[self.status[ids] == KEPT], ids[self.status[ids] == REMOVED]
        self._set(were_kept, DISCARDED_KEPT)
        self._set(were_removed, DISCARDED_REMOVED)
        if len(were_removed):
            self.queue = self.queue[self.status[self.queue] == REMOVED]
        if not self.circulates:
            return were_kept, were_kept[:0]
        alike = torch.minimum(self.sizes_of(were_kept), self.sizes_of(self.queue))
        served = first_of_each(self.groups_of(were_kept), alike)
        came = self._stand_in(were_kept[served], self.take_head(alike))
        others = were_kept[~served]  # the queue holds no more of their class
        rest = self.take(torch.arange(self.num_removed) < len(others))
        return were_kept, torch.cat([came, self._stand_in(others[: len(rest)], rest)])

    def _stand_in(self, gone: Tensor, came: Tensor) -> Tensor:
        """Note who stands in for whom, class by class; returns the ids that came."""
        pairs = [x[self.groups_of(x).argsort(stable=True)].tolist() for x in (gone, came)]
        self._stand_ins.update(zip(*pairs, strict=True))
        return came

    def restore(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Take discarded samples up again: the inverse of `discard` when nothing was moved in between.

        One that had been kept is kept again; its stand-in, or else a random kept sample, makes room and goes to
        the queue's head. One that had been removed goes to the queue's head too.

        Returns:
            Ids that left the kept set and ids that entered it.
        """
        were_kept, were_removed = ids[self.status[ids] == DISCARDED_KEPT], ids[self.status[ids] == DISCARDED_REMOVED]
        excess = self.num_kept + len(were_kept) - self.target
        leaving = self._make_room(were_kept, min(excess, len(were_kept)))
        self._set(were_kept, KEPT)
        back = torch.cat([leaving, were_removed])
        self._set(back, REMOVED)
        self._waiting[back] = self.circulates
        self.queue = torch.cat([back, self.queue])
        return leaving, were_kept

    def _make_room(self, coming: Tensor, count: int) -> Tensor:
        stand_ins = dict.fromkeys(self._stand_ins.pop(i, None) for i in coming.tolist())
        if not self.circulates or count <= 0:
            return coming[:0]
        known = torch.tensor([i for i in stand_ins if i is not None], dtype=torch.int64)
        leaving = known[self.status[known] == KEPT][:count]
        missing = count - len(leaving)
        if missing == 0:
            return leaving
        others = self.kept_ids()[~torch.isin(self.kept_ids(), leaving)]
        shuffled = self._shuffled(others)
        counts = apportion(missing, self.sizes_of(coming), self.sizes_of(others))
        return torch.cat([leaving, shuffled[first_of_each(self.groups_of(shuffled), counts)]])

    def _set(self, ids: Tensor, status: int) -> None:
        self.status[ids] = status
        self._kept = None

    def _shuffled(self, ids: Tensor) -> Tensor:
        return ids[torch.randperm(len(ids), generator=self.generator)]

    def state_dict(self) -> dict[str, Any]:
        """Everything but the generator, as tensors of its own and plain values."""
        return {
            "status": self.status.clone(),
            "queue": self.queue.clone(),
            "waiting": self._waiting.clone(),
            "target": self.target,
            "stand_ins": torch.tensor(list(self._stand_ins.items()), dtype=torch.int64).reshape(-1, 2),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.status.copy_(state["status"])
        self._waiting.copy_(state["waiting"])
        self.queue = state["queue"].clone()
        self.target = int(state["target"])
        self._stand_ins = dict(state["stand_ins"].tolist())
        self._kept = None
