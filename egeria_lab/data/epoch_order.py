"""Which ids come in which batch of an epoch; here our own order, in `loader_order.py` what a user's sampler draws.

A plan is made whole and in the main process, so that all workers follow it at once. Leaving samples out filters the
order and cuts it into batches anew.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from egeria_lab.config import derive_seed


class Order(Protocol):
    """An order of samples, cut into batches.

    Attributes:
        batch_size: samples a batch.
        counts_steps: the number of batches follows from the number of kept samples.
        repeats: a sample may come more than once a pass.
        is_shard: other processes draw the other part of the samples, and count on as many batches here.
        first_steps: batches in the first epoch of all samples.
    """

    batch_size: int
    counts_steps: bool
    repeats: bool
    is_shard: bool
    first_steps: int

    def learn(self, first: list[Tensor]) -> None:
        """See the plan of the first epoch."""

    def plan(self, number: int, kept: Tensor | None) -> list[Tensor]:
        """Ids of each batch of an epoch; `kept` is a mask over all samples, or None for all."""

    def steps(self, count: int) -> int:
        """Batches that so many samples make."""

    def batches(self, ids: Tensor, begun: bool = False) -> list[Tensor]:
        """Ids cut into batches; `begun` when batches of the epoch were handed out before."""

    def more(self, number: int, count: int, kept: Tensor | None, seed: int) -> Tensor:
        """So many further draws for an epoch, where samples repeat."""

    def merged(self, ids: Tensor, new: Tensor, generator: torch.Generator) -> Tensor:
        """Ids with new ones among them, or after them where the order is not random."""

    def expected_steps(self, count: int) -> int:
        """Batches that so many samples make, as far as it can be known before they are drawn."""

    def check_can_leave_out(self) -> None:
        """Raise unless samples can be left out."""

    def check_draws_all(self) -> None:
        """Raise when some samples are never drawn, so that a rule would exchange others for them."""


class OwnOrder:
    """All samples once an epoch, in an order that is a function of seed and epoch, or in order of their ids.

    Example:
        >>> order = OwnOrder(6, 2, seed=0, shuffle=False)
        >>> [ids.tolist() for ids in order.plan(0, torch.tensor([True, False, True, True, False, True]))]
        [[0, 2], [3, 5]]
    """

    counts_steps = True
    repeats = False
    is_shard = False

    def __init__(self, num_samples: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.first_steps = self.steps(num_samples)

    def learn(self, first: list[Tensor]) -> None:
        """Nothing to learn."""

    def plan(self, number: int, kept: Tensor | None) -> list[Tensor]:
        """Ids of each batch of an epoch."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", number))
            order = torch.randperm(self.num_samples, generator=generator)
        else:
            order = torch.arange(self.num_samples)
        return self.batches(order if kept is None else order[kept[order]])

    def steps(self, count: int) -> int:
        """Batches that so many samples make."""
        steps = math.ceil(count / self.batch_size)
        return steps - (self.shuffle and self.batch_size > 1 and steps > 1 and count % self.batch_size == 1)

    def batches(self, ids: Tensor, begun: bool = False) -> list[Tensor]:
        """Ids cut into batches."""
        return cut(ids, self.batch_size, join=self.shuffle, begun=begun)

    def more(self, number: int, count: int, kept: Tensor | None, seed: int) -> Tensor:
        """Never asked: no sample repeats."""
        raise AssertionError("no sample repeats")

    def merged(self, ids: Tensor, new: Tensor, generator: torch.Generator) -> Tensor:
        """Ids with new ones among them."""
        return mixed_in(ids, new, generator) if self.shuffle else torch.cat([ids, new]).sort().values

    def expected_steps(self, count: int) -> int:
        """Batches that so many samples make."""
        return self.steps(count)

    def check_can_leave_out(self) -> None:
        """Any sample can be left out."""

    def check_draws_all(self) -> None:
        """Every sample is drawn."""


def cut(ids: Tensor, size: int, join: bool, begun: bool = False) -> list[Tensor]:
    """Batches of `size`; with `join` a last one of a single sample joins the one before.

    Where that one is gone already (`begun`), the single sample is left out.

    Example:
        >>> [len(ids) for ids in cut(torch.arange(5), 2, join=True)]
        [2, 3]
    """
    chunks = list(torch.split(ids, size)) if len(ids) else []
    if join and size > 1 and chunks and len(chunks[-1]) == 1:
        if len(chunks) > 1:
            chunks[-2:] = [torch.cat(chunks[-2:])]  # batch norm cannot train on a single sample
        elif begun:
            chunks = []
    return chunks


def mixed_in(ids: Tensor, new: Tensor, generator: torch.Generator) -> Tensor:
    """Each new id at a random place; the others keep their order.

    Example:
        >>> mixed_in(torch.arange(4), torch.tensor([9]), torch.Generator().manual_seed(1)).numel()
        5
    """
    places = torch.randint(len(ids) + 1, (len(new),), generator=generator)
    order = torch.cat([places, torch.arange(len(ids))]).argsort(stable=True)
    return torch.cat([new, ids])[order]
