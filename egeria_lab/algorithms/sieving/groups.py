"""Take so many of each class: exact counts, in a given order, without a loop over samples."""

from __future__ import annotations

import torch
from torch import Tensor


def apportion(total: int, weights: Tensor, limits: Tensor | None = None) -> Tensor:
    """Split a whole number in proportion to weights, exactly: largest remainders get what rounding leaves.

    Args:
        total: what to split, >= 0, at most the sum of `limits`.
        weights: int64, >= 0, shape ``(groups,)``.
        limits: int64, the most that each group can get; default: `weights`.

    Returns:
        int64, shape ``(groups,)``, with sum `total`.

    Example:
        >>> apportion(5, torch.tensor([10, 20, 30])).tolist()
        [1, 2, 2]
        >>> apportion(5, torch.tensor([10, 20, 30]), torch.tensor([9, 1, 9])).tolist()
        [1, 1, 3]
    """
    limits = weights if limits is None else limits
    given = torch.zeros_like(weights)
    while (left := total - int(given.sum())) > 0:
        room = given < limits
        assert bool(room.any()), "more was asked for than there is"
        share = torch.where(room, weights, 0).double()
        share = share if bool(share.any()) else room.double()
        quota = left * share / share.sum()
        more = quota.floor().long()
        largest = (quota - more).argsort(descending=True, stable=True)
        more[largest[: left - int(more.sum())]] += 1
        given = torch.minimum(given + more, limits)
    return given


def first_of_each(groups: Tensor, counts: Tensor) -> Tensor:
    """Mark the first `counts[g]` members of each group g, in the order in which they stand.

    Args:
        groups: int64 or int32, group of each member, shape ``(n,)``.
        counts: int64, shape ``(groups,)``.

    Returns:
        bool, shape ``(n,)``.

    Example:
        >>> first_of_each(torch.tensor([0, 1, 0, 1, 0]), torch.tensor([2, 1])).tolist()
        [True, True, True, False, False]
    """
    if len(counts) == 1:
        return torch.arange(len(groups)) < counts[0]
    order = groups.argsort(stable=True)
    lengths = torch.bincount(groups, minlength=len(counts))
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    marked = torch.empty(len(groups), dtype=torch.bool)
    marked[order] = torch.arange(len(groups)) - starts < counts.repeat_interleave(lengths)
    return marked
