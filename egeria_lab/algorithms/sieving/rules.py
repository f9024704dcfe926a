"""What each sieve does to the kept set when its time has come. When that is, `sieve.Sieve` knows.

Source: SpFDE (NeurIPS 2022), section 3.3; MEST (NeurIPS 2021) for the one shot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from egeria_lab.algorithms.sieving.forgetting import ForgettingLog
from egeria_lab.algorithms.sieving.groups import apportion, first_of_each
from egeria_lab.algorithms.sieving.losses import LossPruning
from egeria_lab.algorithms.sieving.membership import Membership
from egeria_lab.algorithms.sieving.settings import (
    CirculantSieve,
    LossSieve,
    OneShotSieve,
    RandomSieve,
    SieveSettings,
)

CIRCULATING = (CirculantSieve, RandomSieve)


class Move(NamedTuple):
    """What was moved: the raw material of a `SieveUpdate`."""

    kind: str
    reason: str
    removed: Tensor
    returned: Tensor
    forgetting: dict[str, int]


def histogram(settings: SieveSettings, members: Membership, log: ForgettingLog) -> dict[str, int]:
    """Number of kept samples by hardness, as the rule sees it."""
    return log.histogram(members.kept_ids(), _never_correct(settings), isinstance(settings, OneShotSieve))


def ranked(settings: SieveSettings, ids: Tensor, log: ForgettingLog, generator: torch.Generator) -> Tensor:
    """The ids, easiest first, or in random order under `RandomSieve`.

    By forgetting events; then by mean margin, large first; what is left of ties was shuffled before, so that it never
    goes by the id. Samples that were not presented come last: nothing says that they are easy.

    Example:
        >>> log = ForgettingLog(3)
        >>> for correct in ([True, False, True], [False, False, True]):
        ...     log.observe(torch.arange(3), torch.tensor(correct), torch.zeros(3))
        >>> ranked(CirculantSieve(), torch.arange(3), log, torch.Generator().manual_seed(0))
        tensor([2, 0, 1])
    """
    ids = ids[torch.randperm(len(ids), generator=generator)]
    if isinstance(settings, RandomSieve):
        return ids
    if "margin" in settings.needs:
        ids = ids[log.mean_margin(ids).argsort(descending=True, stable=True)]
    return ids[log.hardness(ids, _never_correct(settings), isinstance(settings, OneShotSieve)).argsort(stable=True)]


def swap(settings: CirculantSieve | RandomSieve, members: Membership, log: ForgettingLog) -> Move | None:
    """The easiest of the kept set go to the queue's tail, as many from its head come back; a new interval begins."""
    kept, before = members.kept_ids(), histogram(settings, members, log)
    leave, enter = _sizes_of_swap(settings.fraction, members)
    if int(leave.sum()) + int(enter.sum()) == 0:
        return None  # nothing is left in the queue
    easiest_first = ranked(settings, kept, log, members.generator)
    removed = easiest_first[first_of_each(members.groups_of(easiest_first), leave)]
    returned = members.take_head(enter)
    members.remove(removed)
    if members.first_round_over:
        members.shuffle()
    log.next_interval(settings.across_borders if isinstance(settings, CirculantSieve) else True)
    kind = "easiest" if isinstance(settings, CirculantSieve) else "random"
    reason = f"{len(removed)} {kind} of {len(kept)} kept samples exchanged for the {len(returned)} that waited longest"
    return Move("swap", reason, removed, returned, before)


def _sizes_of_swap(fraction: float, members: Membership) -> tuple[Tensor, Tensor]:
    """How many of each class leave and enter; as many, unless the kept set has not the size it should have.

    That happens when the fraction was changed, or when samples were discarded while the queue was empty.
    """
    sizes, waiting = members.sizes_of(members.kept_ids()), members.sizes_of(members.queue)
    num_kept, num_waiting = int(sizes.sum()), int(waiting.sum())
    grow = min(max(members.target - num_kept, 0), num_waiting)
    shrink = max(num_kept - members.target, 0)
    limits = torch.minimum(sizes, waiting)
    wanted = max(1, round(fraction * num_kept))
    number = min(wanted, num_waiting - grow, num_kept - shrink, int(limits.sum()))
    moved = apportion(number, sizes, limits)
    return moved + apportion(shrink, sizes, sizes - moved), moved + apportion(grow, waiting, waiting - moved)


def one_shot(settings: OneShotSieve, members: Membership, log: ForgettingLog, batch_size: int) -> Move:
    """The least forgotten samples leave for good."""
    before = histogram(settings, members, log)
    easiest_first = ranked(settings, members.kept_ids(), log, members.generator)
    leaving = count_leaving(settings.fraction, len(easiest_first), batch_size)
    counts = apportion(leaving, members.sizes_of(easiest_first))
    removed = easiest_first[first_of_each(members.groups_of(easiest_first), counts)]
    members.remove(removed)
    reason = f"{len(removed)} least forgotten of {len(easiest_first)} samples left out for good"
    return Move("one shot", reason, removed, removed[:0], before)


def redraw(
    settings: LossSieve, members: Membership, losses: LossPruning, batch_size: int, progress: float
) -> Move | None:
    """Other samples of small loss are left out; near the end of training, none."""
    before = members.kept_ids()
    if progress >= settings.full_after:
        losses.reset()
        if members.num_removed == 0:
            return None
        members.removed_instead(members.queue[:0])
        kind, reason = "all", f"from {settings.full_after:.1%} of training on all samples are trained on"
    else:
        candidates = torch.cat([before, members.queue]).sort().values
        count = count_leaving(settings.fraction, len(candidates), batch_size)
        members.removed_instead(losses.draw(candidates, count, members.generator))
        kind = "losses"
        reason = (
            f"{members.num_removed} of the {int(losses.in_group.sum())} samples of small loss left out at random, the "
            f"others of them weigh {losses.factor:.3f}"
        )
    after = members.kept_ids()
    return Move(kind, reason, before[~torch.isin(before, after)], after[~torch.isin(after, before)], {})


def count_leaving(fraction: float, available: int, batch_size: int) -> int:
    """How many of the available samples (discarded ones are not) leave; at least one batch stays."""
    return max(0, min(round(fraction * available), available - batch_size))


def _never_correct(settings: SieveSettings) -> str:
    return settings.never_correct if isinstance(settings, CirculantSieve) else "ever"
