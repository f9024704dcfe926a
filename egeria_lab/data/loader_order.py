"""Which ids come in which batch of an epoch where the user's loader decides: its sampler draws, the rest is here."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from egeria_lab.config import derive_seed
from egeria_lab.data.epoch_order import cut, mixed_in
from egeria_lab.data.private_generator import private_generator
from egeria_lab.errors import DataError

_MOST_EMPTY_ROUNDS = 100
_ROUND_STRIDE = 1_000_003  # further rounds of a pass look to `set_epoch` like epochs that never come


class LoaderOrder:
    """What the user's own sampler draws; a function of seed and epoch for samplers without state of their own.

    Args:
        loader: whose batch sampler.
        num_samples: samples in its data set.
        seed: seeds the generators that samplers draw from.
        role: for error messages.

    Example:
        >>> order = LoaderOrder(DataLoader(range(5), batch_size=2), 5, seed=0, role="training")
        >>> [ids.tolist() for ids in order.plan(0, torch.tensor([True, True, False, True, True]))]
        [[0, 1], [3, 4]]
    """

    counts_steps = False

    def __init__(self, loader: DataLoader[Any], num_samples: int, seed: int, role: str) -> None:
        self.loader = loader
        self.num_samples = num_samples
        self.seed = seed
        self.role = role
        self.batch_size: int = getattr(loader.batch_sampler, "batch_size", 1)
        self.repeats = False
        self.is_shard = _is_shard(self._sampler)
        self.first_steps = 0
        self._first_ids = torch.empty(0, dtype=torch.int64)

    @property
    def _sampler(self) -> Any:
        """What draws single ids; a loader made from a batch sampler has another one beside it."""
        return getattr(self.loader.batch_sampler, "sampler", self.loader.sampler)

    def learn(self, first: list[Tensor]) -> None:
        """See the plan of the first epoch: how many batches, and whether the sampler draws an id twice."""
        self.first_steps, self._first_ids = len(first), torch.cat(first)
        sampler = self._sampler
        if type(self.loader.batch_sampler) is not BatchSampler or self.is_shard:
            return  # a shard repeats samples only to give every process as many
        if isinstance(sampler, (SequentialSampler, SubsetRandomSampler)):
            return
        if isinstance(sampler, RandomSampler):
            self.repeats = sampler.replacement or sampler.num_samples > self.num_samples
            return
        ids = torch.cat(first)
        self.repeats = bool(getattr(sampler, "replacement", False)) or len(torch.unique(ids)) < len(ids)

    def plan(self, number: int, kept: Tensor | None) -> list[Tensor]:
        """Ids of each batch of an epoch."""
        if kept is not None:
            return self.batches(self._kept_draws(number, kept))
        self._set_epoch(number)
        with private_generator(derive_seed(self.seed, "order", number), self._generators()):
            return [torch.as_tensor(list(ids), dtype=torch.int64) for ids in self.loader.batch_sampler]  # type: ignore[union-attr]

    def steps(self, count: int) -> int:
        """Never asked: how many samples a sampler draws is its own affair."""
        raise AssertionError("only a plan tells")

    def expected_steps(self, count: int) -> int:
        """Batches that so many samples make, when the sampler draws as many of each as it draws of all."""
        if count == self.num_samples or type(self.loader.batch_sampler) is not BatchSampler:
            return self.first_steps
        sampler = self._sampler
        draws = len(sampler) if hasattr(sampler, "__len__") else len(self._first_ids)
        return max(1, len(self.batches(torch.arange(round(draws * count / self.num_samples)))))

    def batches(self, ids: Tensor, begun: bool = False) -> list[Tensor]:
        """Ids cut into batches by the loader's batch size and `drop_last`."""
        size, drop_last = self.loader.batch_sampler.batch_size, self.loader.batch_sampler.drop_last  # type: ignore[union-attr]
        chunks = cut(ids, size, join=not drop_last, begun=begun)
        return chunks[:-1] if drop_last and chunks and len(chunks[-1]) < size else chunks

    def more(self, number: int, count: int, kept: Tensor | None, seed: int) -> Tensor:
        """So many further draws for an epoch."""
        return self._rounds(number, count, kept, derive_seed(seed, "more"), torch.empty(0, dtype=torch.int64))

    def merged(self, ids: Tensor, new: Tensor, generator: torch.Generator) -> Tensor:
        """Ids with new ones among them, or after them where the sampler goes in order."""
        if isinstance(self._sampler, SequentialSampler):
            return torch.cat([ids, new]).sort().values
        return mixed_in(ids, new, generator)

    def check_can_leave_out(self) -> None:
        """Raise unless the batches are cut by torch's own `BatchSampler`.

        Raises:
            DataError: with the reason.
        """
        batch_sampler = self.loader.batch_sampler
        if type(batch_sampler) is not BatchSampler:
            raise DataError(
                f"no sample can be left out of the {self.role} loader: its {type(batch_sampler).__name__} composes "
                "batches by a rule of its own, which smaller batches would break. Give the loader a sampler and a "
                "batch_size instead, or train without a sieve and without discarding."
            )

    def check_draws_all(self) -> None:
        """Raise when the sampler is one over a part of the data.

        Raises:
            DataError: with what to give instead.
        """
        reach = self._reach()
        if reach < self.num_samples:
            raise DataError(
                f"the {self.role} loader's {type(self._sampler).__name__} draws {reach} of {self.num_samples} samples, "
                "so a sieve would exchange samples for others that never come; give the loader a data set of those "
                "alone, torch.utils.data.Subset(dataset, indices), and a sampler over it."
            )

    def _reach(self) -> int:
        """How many samples can ever be drawn, as far as it can be known."""
        sampler = self._sampler
        if self.is_shard or type(self.loader.batch_sampler) is not BatchSampler:
            return self.num_samples
        if isinstance(sampler, RandomSampler):
            return min(self.num_samples, len(sampler.data_source))
        if isinstance(sampler, WeightedRandomSampler):
            return int((torch.as_tensor(sampler.weights) > 0).sum())
        if self.repeats:
            return self.num_samples
        dropped = self.batch_size - 1 if self.loader.drop_last else 0
        return min(self.num_samples, len(torch.unique(self._first_ids)) + dropped)

    def _kept_draws(self, number: int, kept: Tensor) -> Tensor:
        if self.is_shard:
            return self._own_shard(number, kept)
        drawn = self._draw(number, derive_seed(self.seed, "order", number))
        ids = drawn[kept[drawn]]
        if not self.repeats:
            return ids
        wanted = max(1, round(len(drawn) * int(kept.sum()) / self.num_samples))
        return self._rounds(number, wanted, kept, derive_seed(self.seed, "rounds", number), ids)

    def _rounds(self, number: int, count: int, kept: Tensor | None, seed: int, have: Tensor) -> Tensor:
        """The ids there are and further ones, from as many more rounds of the sampler as it takes."""
        parts, size, empty, turn = [have], len(have), 0, 0
        while size < count:
            turn += 1
            drawn = self._draw(number + turn * _ROUND_STRIDE, derive_seed(seed, turn))
            parts.append(drawn if kept is None else drawn[kept[drawn]])
            size += len(parts[-1])
            empty = 0 if len(parts[-1]) else empty + 1
            if empty > _MOST_EMPTY_ROUNDS:
                raise DataError(
                    f"the sampler of the {self.role} loader draws none of the kept samples; give them a weight "
                    "above 0, or keep other samples."
                )
        return torch.cat(parts)[:count]

    def _own_shard(self, number: int, kept: Tensor) -> Tensor:
        """The share of this process: the order of all processes is filtered first and dealt out afterwards.

        So each kept sample comes once over all processes, and all make as many steps.
        """
        sampler, seed, drawn = self._sampler, derive_seed(self.seed, "order", number), []
        for rank in range(sampler.num_replicas):
            one = copy.copy(sampler)
            one.rank = rank
            drawn.append(self._draw(number, seed, one))
        if len({len(ids) for ids in drawn}) > 1 or not torch.equal(drawn[sampler.rank], self._draw(number, seed)):
            raise self._no_shard()
        everybody = torch.stack(drawn, 1).flatten()
        first = _first_occurrences(everybody, self.num_samples)
        if len(everybody) - int(first.sum()) >= sampler.num_replicas:
            raise self._no_shard()
        ids = everybody[first]
        ids = ids[kept[ids]]
        share = len(ids) / sampler.num_replicas
        size = math.floor(share) if getattr(sampler, "drop_last", False) else math.ceil(share)
        dealt = ids.repeat(2)[: size * sampler.num_replicas] if len(ids) >= sampler.num_replicas else ids[:0]
        return dealt[sampler.rank :: sampler.num_replicas]

    def _no_shard(self) -> DataError:
        return DataError(
            f"no sample can be left out of the {self.role} loader: its {type(self._sampler).__name__} has a rank, but "
            "does not deal one order out to all processes as torch's DistributedSampler does; use that one."
        )

    def _draw(self, number: int, seed: int, sampler: Any = None) -> Tensor:
        """One pass of the sampler, uncut."""
        sampler = self._sampler if sampler is None else sampler
        self._set_epoch(number, sampler)
        with private_generator(seed, self._generators()):
            drawn = list(sampler)
        try:
            ids = torch.as_tensor(drawn, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"no sample can be left out of the {self.role} loader: its sampler yields "
                f"{type(drawn[0]).__name__} objects, no sample numbers."
            ) from error
        return ids

    def _set_epoch(self, number: int, sampler: Any = None) -> None:
        for one in self._samplers() if sampler is None else [sampler]:
            if hasattr(one, "set_epoch"):
                one.set_epoch(number)

    def _samplers(self) -> list[Any]:
        batch_sampler = self.loader.batch_sampler
        return [self.loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]

    def _generators(self) -> list[Any]:
        return [getattr(sampler, "generator", None) for sampler in self._samplers()]


def _is_shard(sampler: Any) -> bool:
    return isinstance(getattr(sampler, "num_replicas", None), int) and isinstance(getattr(sampler, "rank", None), int)


def _first_occurrences(ids: Tensor, num_samples: int) -> Tensor:
    """Mark each id where it comes first."""
    first = torch.full((num_samples,), len(ids))
    first.scatter_reduce_(0, ids, torch.arange(len(ids)), "amin")
    return first[ids] == torch.arange(len(ids))
