"""Batches with stable sample ids, in an order that is a pure function of seed and epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from egeria_lab.config import derive_seed
from egeria_lab.data.datasets import ArrayDataset
from egeria_lab.errors import DataError


class Views(Protocol):
    """An augmentation with a finite, replayable set of views."""

    views: int

    def view_of(self, epoch: int, ids: Tensor) -> Tensor:
        """The view that each sample gets in an epoch."""

    def __call__(self, inputs: Any, ids: Tensor, views: Tensor) -> Any:
        """The augmented inputs."""


@dataclass(slots=True)
class Batch:
    """One batch.

    Attributes:
        ids: int64 sample ids on the CPU, shape ``(b,)``; a sample keeps its id for the whole run.
        content: what the data set's collate made of the samples, usually ``(inputs, targets)``.
        views: which of its finite set of augmentations each sample gets, int64, shape ``(b,)``; or None.
    """

    ids: Tensor
    content: Any
    views: Tensor | None = None

    def __len__(self) -> int:
        return int(self.ids.numel())


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Gathers one batch; a class at the top of the file, so that workers can unpickle it.

    What data set and collate draw from the global generators is a function of seed, epoch and position of
    the batch, in the main process as in a worker: a random augmentation repeats exactly.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    seed: int
    epoch: int

    def __getitems__(self, place: tuple[int, list[int]]) -> Batch:
        position, ids = place
        with _private_generator(derive_seed(self.seed, "samples", self.epoch, position)):
            together = getattr(self.dataset, "__getitems__", None)
            samples = together(ids) if together is not None else [self.dataset[i] for i in ids]
            return Batch(torch.tensor(ids, dtype=torch.int64), self.collate(samples))


def _as_is(batch: Any) -> Any:
    return batch


class BatchSource:
    """Batches of one data set.

    Args:
        data: a map-style data set, or a `DataLoader` over one; a loader keeps its own batch size, sampler,
            collate and workers.
        batch_size: samples a batch, for a data set; a loader brings its own.
        seed: decides the order, together with the epoch.
        shuffle: False gives ids in order.
        role: ``"training"`` or ``"validation"``, for error messages.
        augment: decides the view of each sample in each epoch; applied by whoever trains.

    Raises:
        DataError: for empty or iterable-style data, a batch size larger than the data, or a loader without
            batches of its own (``batch_size=None``).

    Example:
        >>> source = BatchSource(ArrayDataset(torch.arange(5.0)[:, None], torch.zeros(5).long()), 2, seed=0)
        >>> [len(batch) for batch in source.epoch(0)]    # a last batch of one sample joins the one before
        [2, 3]
        >>> sorted(int(i) for batch in source.epoch(1) for i in batch.ids)
        [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        role: str = "training",
        augment: Views | None = None,
    ) -> None:
        self.loader = data if isinstance(data, DataLoader) else None
        self.dataset: Any = data.dataset if self.loader is not None else data
        self.seed = seed
        self.shuffle = shuffle
        self.role = role
        self.augment = augment
        _check_dataset(self.dataset, role)
        self.batch_size = self._loader_batch_size() if self.loader is not None else batch_size
        self.num_samples = len(self.dataset)
        if role == "training" and self.batch_size > self.num_samples:
            raise DataError(
                f"batch_size={self.batch_size} is larger than the {role} set ({self.num_samples} samples); "
                f"give a batch_size of at most {self.num_samples}."
            )
        self._newest_plan: tuple[int, list[Tensor]] | None = None
        self.steps_per_epoch = len(self._plan(0))
        """Batches in one epoch."""
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the {role} loader yields no batch in an epoch; check its sampler, batch_size and drop_last."
            )

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from position `start` on.

        Raises:
            DataError: when a loader's own sampler yields fewer batches than in the first epoch.
        """
        for batch in self._batches(number, start):
            if self.augment is not None:
                batch.views = self.augment.view_of(number, batch.ids)
            yield batch

    def coming(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and views of the batches of one epoch from position `start` on, without their content."""
        for ids in self._plan(number)[start:]:
            yield ids, self.augment.view_of(number, ids) if self.augment is not None else torch.zeros_like(ids)

    def _batches(self, number: int, start: int) -> Iterator[Batch]:
        plan = self._plan(number)
        if len(plan) < self.steps_per_epoch:
            raise DataError(
                f"the {self.role} loader yields {len(plan)} batches in epoch {number} and yielded "
                f"{self.steps_per_epoch} in the first; give a sampler with as many each epoch."
            )
        if isinstance(self.dataset, ArrayDataset) and self.loader is None:
            for ids in plan[start:]:
                yield Batch(ids, self.dataset.gather(ids))
            return
        places = [(position, ids.tolist()) for position, ids in enumerate(plan)][start:]
        fetch = _Fetch(self.dataset, self._collate(), self.seed, number)
        if self.loader is None or self.loader.num_workers == 0:
            for place in places:
                yield fetch.__getitems__(place)
            return
        with _private_generator(derive_seed(self.seed, "workers", number)):
            batches = iter(self._worker_loader(fetch, places))
        yield from batches

    def example(self, rows: int) -> Batch:
        """The first `rows` samples in order, for tracing and counting."""
        ids = torch.arange(min(rows, self.num_samples))
        if isinstance(self.dataset, ArrayDataset) and self.loader is None:
            return Batch(ids, self.dataset.gather(ids))
        return _Fetch(self.dataset, self._collate(), self.seed, -1).__getitems__((0, ids.tolist()))

    def _plan(self, number: int) -> list[Tensor]:
        """The ids of every batch of one epoch; asked again in the same epoch, the answer is the same."""
        if self._newest_plan is None or self._newest_plan[0] != number:
            plan = self._own_plan(number) if self.loader is None else self._loader_plan(number)
            self._newest_plan = (number, plan)
        return self._newest_plan[1]

    def _own_plan(self, number: int) -> list[Tensor]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", number))
            order = torch.randperm(self.num_samples, generator=generator)
        else:
            order = torch.arange(self.num_samples)
        chunks = list(torch.split(order, self.batch_size))
        if self.shuffle and self.batch_size > 1 and len(chunks) > 1 and len(chunks[-1]) == 1:
            chunks[-2:] = [torch.cat(chunks[-2:])]  # batch norm cannot train on a single sample
        return chunks

    def _loader_plan(self, number: int) -> list[Tensor]:
        """The user's own sampler decides; what it draws is a function of seed and epoch."""
        assert self.loader is not None
        batch_sampler: Any = self.loader.batch_sampler
        samplers = [self.loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number)
        own = [getattr(sampler, "generator", None) for sampler in samplers]
        with _private_generator(derive_seed(self.seed, "order", number), own):
            return [torch.as_tensor(list(ids), dtype=torch.int64) for ids in batch_sampler]

    def _loader_batch_size(self) -> int:
        assert self.loader is not None
        if self.loader.batch_sampler is None:
            raise DataError(
                f"the {self.role} loader has batch_size=None and hands out ready-made batches, whose samples "
                "have no ids; give it a batch_size, or give the data set of single samples."
            )
        return self.loader.batch_size or getattr(self.loader.batch_sampler, "batch_size", None) or 1

    def _collate(self) -> Callable[[list[Any]], Any]:
        return self.loader.collate_fn if self.loader is not None else default_collate

    def _worker_loader(self, fetch: _Fetch, places: list[tuple[int, list[int]]]) -> DataLoader[Any]:
        assert self.loader is not None
        dataset: Any = fetch
        batch_sampler: Any = places
        return DataLoader(
            dataset,
            batch_sampler=batch_sampler,
            collate_fn=_as_is,
            num_workers=self.loader.num_workers,
            prefetch_factor=self.loader.prefetch_factor,
            worker_init_fn=self.loader.worker_init_fn,
            multiprocessing_context=self.loader.multiprocessing_context,
            timeout=self.loader.timeout,
        )


class _private_generator:  # noqa: N801 - used like a function
    """Seed the global generators (torch, NumPy, random) for a block and give them back untouched.

    Generators in `own` (of a sampler) are treated alike.
    """

    def __init__(self, seed: int, own: Sequence[Any] = ()) -> None:
        self._seed = seed
        distinct = {id(generator): generator for generator in own if isinstance(generator, torch.Generator)}
        # torch.manual_seed would seed every accelerator's generator as well.
        self._generators = [torch.default_generator, *distinct.values()]

    def __enter__(self) -> None:
        self._states = [generator.get_state() for generator in self._generators]
        self._others = random.getstate(), np.random.get_state()
        for generator in self._generators:
            generator.manual_seed(self._seed)
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)

    def __exit__(self, *error: Any) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        random.setstate(self._others[0])
        np.random.set_state(self._others[1])


def _check_dataset(dataset: Any, role: str) -> None:
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"the {role} data must be map-style (with __len__ and __getitem__), so that each sample keeps "
            f"its id; got {type(dataset).__name__}."
        )
    if len(dataset) == 0:
        raise DataError(f"the {role} set is empty; give at least one sample.")
