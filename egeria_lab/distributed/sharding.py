"""Which rows of a global batch each rank trains on: by sample id, so that a sample stays where its cached row is."""

from __future__ import annotations

import torch
from torch import Tensor


def shard(ids: Tensor, size: int) -> list[Tensor]:
    """Positions in a global batch for each rank: every position once, the numbers differing by one at most.

    A sample's home is its id modulo the number of ranks. Homes are followed as far as the balance allows; the few
    rows beyond go to ranks that have room, and what a rank has cached is nearly always its own rows. A pure function:
    every rank computes the same answer without asking.

    Args:
        ids: sample ids of the global batch, int64, shape ``(b,)``.
        size: number of ranks, >= 1.

    Returns:
        For each rank its positions in ascending order, int64; empty where there are fewer rows than ranks.

    Example:
        >>> [own.tolist() for own in shard(torch.tensor([4, 7, 2, 9, 6, 8]), 2)]
        [[0, 2, 4], [1, 3, 5]]
        >>> [len(own) for own in shard(torch.tensor([0, 2, 4, 6, 8]), 2)]
        [3, 2]
    """
    count = int(ids.numel())
    quota = [count // size + (rank < count % size) for rank in range(size)]
    home = ids % size
    own, rest = [], []
    for rank in range(size):
        at_home = torch.nonzero(home == rank).flatten()
        own.append(at_home[: quota[rank]])
        rest.append(at_home[quota[rank] :])
    left = torch.cat(rest).sort().values
    shards = []
    for rank in range(size):
        room = quota[rank] - len(own[rank])
        shards.append(torch.cat([own[rank], left[:room]]).sort().values)
        left = left[room:]
    return shards


class Share:
    """What one rank takes of every batch.

    Args:
        rank: number of this process.
        size: number of all.
        always: take the first row where there are fewer rows than ranks, so that every rank has something to run;
            its weight is 0 then, see `weight`.

    Example:
        >>> Share(1, 2).of(torch.tensor([4, 7, 2, 9])).tolist()
        [1, 3]
        >>> share = Share(1, 2, always=True)
        >>> share.of(torch.tensor([4])).tolist(), share.weight(torch.tensor([4]))
        ([0], 0.0)
    """

    def __init__(self, rank: int, size: int, *, always: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.always = always

    def of(self, ids: Tensor) -> Tensor:
        """Positions of this rank's rows in a global batch."""
        own = shard(ids, self.size)[self.rank]
        return torch.zeros(1, dtype=torch.int64) if self.always and not len(own) else own

    def weight(self, ids: Tensor) -> float:
        """What the mean over this rank's rows counts, so that the mean over ranks is the mean over the global batch."""
        own = len(shard(ids, self.size)[self.rank])
        return own * self.size / int(ids.numel())
