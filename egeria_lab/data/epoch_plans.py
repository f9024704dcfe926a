"""The plan of each epoch: which samples are kept, and what is changed while an epoch is under way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egeria_lab.algorithms.sieving.ids import checked_ids
from egeria_lab.config import derive_seed
from egeria_lab.data.epoch_order import Order
from egeria_lab.errors import DataError

_MOST_PLANS = 2
_NO_IDS = torch.empty(0, dtype=torch.int64)


class EpochPlans:
    """Plans of epochs, made of kept samples only.

    Args:
        order: makes a plan of an epoch and of the samples that are kept.
        num_samples: samples in the data set.
        seed: decides where samples are put in that come into a running epoch.
        role: for error messages.

    Attributes:
        steps_per_epoch: batches in an epoch that is not amended, from the newest kept set.
        changes: how often a plan was amended; whoever reads ahead looks here.

    Example:
        >>> from egeria_lab.data.epoch_order import OwnOrder
        >>> plans = EpochPlans(OwnOrder(6, 2, seed=0, shuffle=False), 6, seed=0, role="training")
        >>> plans.keep(torch.tensor([0, 2, 3, 4, 5]), after=0)
        >>> [ids.tolist() for ids in plans[0]], [ids.tolist() for ids in plans[1]]
        ([[0, 1], [2, 3], [4, 5]], [[0, 2], [3, 4], [5]])
        >>> plans.amend(1, 1, without=torch.tensor([3]), adding=torch.tensor([1]))
        3
        >>> [ids.tolist() for ids in plans[1]]
        [[0, 2], [1, 4], [5]]
    """

    def __init__(self, order: Order, num_samples: int, seed: int, role: str) -> None:
        self.order = order
        self.num_samples = num_samples
        self.seed = seed
        self.role = role
        self.changes = 0
        self._kept: list[tuple[int, Tensor | None]] = [(0, None)]  # (first epoch, mask), of the last two at most
        self._plans: dict[int, list[Tensor]] = {}  # of the epochs asked for last
        self._amended: set[int] = set()
        first = self[0]
        self.steps_per_epoch = len(first)
        if first:
            order.learn(first)

    @property
    def kept(self) -> Tensor | None:
        """The newest kept set: int64 ids, ascending; None for all samples."""
        mask = self._kept[-1][1]
        return None if mask is None else mask.nonzero().flatten()

    def keep(self, ids: Tensor | None, *, after: int = -1) -> None:
        """Train on these samples only, from the epoch after this one on; workers see nothing else.

        Args:
            ids: int64 sample ids; None (or all ids) for every sample.
            after: the last epoch that is not affected, usually the one under way or just finished; what is left of
                it is changed by `amend`.

        Raises:
            DataError: when an epoch would have no batch, an id does not exist, or the loader composes its batches
                itself; then nothing is changed.
        """
        mask = None if ids is None else self._mask(ids)
        mask = None if mask is None or bool(mask.all()) else mask
        if mask is None and self._kept[-1][1] is None:
            return
        if mask is not None:
            self.order.check_can_leave_out()
        plan = None if self.order.counts_steps else self.order.plan(after + 1, mask)
        steps = self.order.steps(self.num_samples if mask is None else int(mask.sum())) if plan is None else len(plan)
        if steps == 0:
            raise DataError(
                f"with {0 if mask is None else int(mask.sum())} of {self.num_samples} samples kept, an epoch has no "
                f"batch of {self.order.batch_size}; keep more samples, or lower the batch size."
            )
        self._kept = [*[entry for entry in self._kept if entry[0] <= after][-1:], (after + 1, mask)]
        self._plans = {number: kept for number, kept in self._plans.items() if number <= after}
        self._amended = {number for number in self._amended if number <= after}
        if plan is not None:
            self._plans[after + 1] = plan
        self.steps_per_epoch = steps

    def amend(self, number: int, position: int, *, without: Tensor | None = None, adding: Tensor | None = None) -> int:
        """Plan what is left of an epoch anew; a function of seed, epoch, position and what was planned before.

        Iterators that `epoch` and `coming` gave out follow: they stop what they read ahead and go on by the new plan.
        A sample that had its turn in this epoch, or will have it, is not added a second time. Samplers that draw with
        replacement make up for what was left out by further draws from the newest kept set, so call `keep` first.
        A single sample that would be left for the last batch is left out, as batch norm cannot train on it.

        Args:
            number: the epoch.
            position: batches of it that were handed out already, >= 0.
            without: int64 ids that shall not come any more.
            adding: int64 ids that shall come.

        Returns:
            Batches that the epoch has now; `position` when nothing is left of it.

        Raises:
            DataError: for ids or a position that do not exist, or a loader that composes its batches itself.
        """
        plan = self[number]
        if not 0 <= position <= len(plan):
            raise DataError(f"epoch {number} has {len(plan)} batches, so it cannot be amended at position {position}.")
        self.order.check_can_leave_out()
        before, rest = (torch.cat([_NO_IDS, *part]) for part in (plan[:position], plan[position:]))
        unwanted = self._mask(_NO_IDS if without is None else without)
        left = rest[~unwanted[rest]]
        seed = derive_seed(self.seed, "amend", number, position)
        if self.order.repeats:
            kept = self._kept[-1][1]
            new = self.order.more(number, len(rest) - len(left), ~unwanted if kept is None else kept & ~unwanted, seed)
        else:
            fresh = self._mask(_NO_IDS if adding is None else adding) & ~self._mask(torch.cat([before, rest]))
            new = self._fitting(fresh.nonzero().flatten(), before, left, len(rest), unwanted)
        if len(left) == len(rest) and len(new) == 0:
            return len(plan)
        merged = self.order.merged(left, new, torch.Generator().manual_seed(seed))
        self._plans[number] = plan[:position] + self.order.batches(merged, begun=position > 0)
        self._amended.add(number)
        self.changes += 1
        return len(self._plans[number])

    def _fitting(self, new: Tensor, before: Tensor, left: Tensor, size: int, unwanted: Tensor) -> Tensor:
        """The new ids; just as many as places became free where the other processes count on so many batches."""
        if not self.order.is_shard:
            return new
        others = torch.cat([left, before[~unwanted[before]]])
        free = size - len(left)
        return torch.cat([new, others.repeat(free if len(others) else 0)])[:free]

    def complete(self, number: int) -> list[Tensor]:
        """The plan of an epoch; of all samples it has as many batches as the first.

        Raises:
            DataError: when a loader's own sampler yields fewer.
        """
        plan, first = self[number], self.order.first_steps
        everything = self._kept_in(number) is None and number not in self._amended
        if everything and len(plan) < first:
            raise DataError(
                f"the {self.role} loader yields {len(plan)} batches in epoch {number} and yielded {first} in the "
                "first; give a sampler with as many each epoch."
            )
        return plan

    def _mask(self, ids: Tensor) -> Tensor:
        checked = checked_ids(ids, self.num_samples)
        mask = torch.zeros(self.num_samples, dtype=torch.bool)
        mask[checked] = True
        return mask

    def _kept_in(self, number: int) -> Tensor | None:
        return next((mask for first, mask in reversed(self._kept) if first <= number), self._kept[0][1])

    def __getitem__(self, number: int) -> list[Tensor]:
        """Ids of every batch of one epoch; the answer for the epochs that were asked for last stays the same."""
        plan = self._plans.pop(number, None)
        self._plans[number] = plan if plan is not None else self.order.plan(number, self._kept_in(number))
        while len(self._plans) > _MOST_PLANS:
            oldest = next(iter(self._plans))
            del self._plans[oldest]
            self._amended.discard(oldest)
        return self._plans[number]

    def state_dict(self) -> dict[str, Any]:
        """What `keep` and `amend` changed, and the newest plans where a loader made them or they were amended.

        An epoch that is taken up from it goes on exactly.
        """
        return {
            "kept": [
                {"first_epoch": first, "ids": None if mask is None else mask.nonzero().flatten()}
                for first, mask in self._kept
            ],
            "plans": [
                {
                    "epoch": number,
                    "ids": torch.cat(plan) if plan else torch.empty(0, dtype=torch.int64),
                    "lengths": [len(ids) for ids in plan],
                    "amended": number in self._amended,
                }
                for number, plan in self._plans.items()
                if not self.order.counts_steps or number in self._amended
            ],
            "steps_per_epoch": self.steps_per_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; the data must be the same.

        Raises:
            DataError: when it is of other data.
        """
        kept = [(int(e["first_epoch"]), None if e["ids"] is None else self._mask(e["ids"])) for e in state["kept"]]
        plans = {int(p["epoch"]): list(torch.split(p["ids"], p["lengths"])) for p in state["plans"]}
        for plan in plans.values():
            self._mask(torch.cat(plan))
        self._kept, self._plans = kept, plans
        self._amended = {int(p["epoch"]) for p in state["plans"] if p["amended"]}
        self.steps_per_epoch = int(state["steps_per_epoch"])
        self.changes += 1
