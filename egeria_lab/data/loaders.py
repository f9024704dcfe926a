"""Batches with stable sample ids, in an order that is a pure function of seed and epoch.

The file is one piece because ids, order and content of a batch are handed out in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from egeria_lab.config import derive_seed
from egeria_lab.data.datasets import ArrayDataset
from egeria_lab.data.epoch_order import Order, OwnOrder, cut
from egeria_lab.data.epoch_plans import EpochPlans
from egeria_lab.data.loader_order import LoaderOrder
from egeria_lab.data.private_generator import private_generator
from egeria_lab.data.worker_start import interrupts_blocked
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
        content: what the data set's collate made of the samples, usually ``(inputs, targets)``; that of the first
            part where the batch has parts.
        views: which of its finite set of augmentations each sample gets, int64, shape ``(b,)``; or None.
        parts: the batches that go through the model one after the other for one update (gradient accumulation), or
            none where the whole batch does.
        whole: ids of the global batch that this one is a part of, where several ranks train; or None.
    """

    ids: Tensor
    content: Any
    views: Tensor | None = None
    parts: tuple[Batch, ...] = ()
    whole: Tensor | None = None

    def __len__(self) -> int:
        return int(self.ids.numel())

    def split(self) -> list[Batch]:
        """The parts with their views; the batch itself where it has none."""
        if not self.parts:
            return [self]
        sizes = [len(part) for part in self.parts]
        views = [None] * len(sizes) if self.views is None else torch.split(self.views, sizes)
        return [Batch(part.ids, part.content, view) for part, view in zip(self.parts, views, strict=True)]


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
    part_size: int | None = None

    def __getitems__(self, place: tuple[int, list[int]]) -> Batch:
        position, ids = place
        with private_generator(derive_seed(self.seed, "samples", self.epoch, position)):
            return in_parts(torch.tensor(ids, dtype=torch.int64), self.part_size, self._collated)

    def _collated(self, ids: Tensor) -> Any:
        together, numbers = getattr(self.dataset, "__getitems__", None), ids.tolist()
        return self.collate(together(numbers) if together is not None else [self.dataset[i] for i in numbers])


def in_parts(ids: Tensor, part_size: int | None, content_of: Callable[[Tensor], Any]) -> Batch:
    """One batch of some samples, in parts of a size where there is one.

    Example:
        >>> [len(part) for part in in_parts(torch.arange(5), 2, lambda ids: ids).split()]
        [2, 3]
    """
    if part_size is None:
        return Batch(ids, content_of(ids))
    parts = tuple(Batch(part, content_of(part)) for part in cut(ids, part_size, join=True))
    return Batch(ids, parts[0].content, None, parts)


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
        accumulate: so many batches make one, in parts, for one update; the last one of an epoch may have fewer. A
            loader with ``drop_last`` drops that one, so that all its parts are whole.

    Attributes:
        batch_size: samples for one update, all parts together.
        part_size: samples that go through the model at once.
        has_ids: a sample can be asked for by its id.

    Raises:
        DataError: for empty or iterable-style data, a batch size larger than the data, a loader without
            batches of its own (``batch_size=None``), or one that composes its batches and shall accumulate.

    Example:
        >>> source = BatchSource(ArrayDataset(torch.arange(5.0)[:, None], torch.zeros(5).long()), 2, seed=0)
        >>> [len(batch) for batch in source.epoch(0)]    # a last batch of one sample joins the one before
        [2, 3]
        >>> sorted(int(i) for batch in source.epoch(1) for i in batch.ids)
        [0, 1, 2, 3, 4]
    """

    has_ids = True

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        role: str = "training",
        augment: Views | None = None,
        accumulate: int = 1,
    ) -> None:
        self.loader = data if isinstance(data, DataLoader) else None
        self.dataset: Any = data.dataset if self.loader is not None else data
        self.seed = seed
        self.shuffle = shuffle
        self.role = role
        self.augment = augment
        self.share: Callable[[Tensor], Tensor] | None = None
        _check_dataset(self.dataset, role)
        self.part_size = self._loader_batch_size() if self.loader is not None else batch_size
        self.accumulate = accumulate
        self.batch_size = self.part_size * accumulate
        if role == "training" and self.batch_size > self.num_samples:
            times = f" × accumulate={accumulate}" if accumulate > 1 else ""
            fitting = self.num_samples // accumulate
            advice = f"a batch_size of at most {fitting}" if fitting else f"accumulate of at most {self.num_samples}"
            raise DataError(
                f"batch_size={self.part_size}{times} is larger than the {role} set ({self.num_samples} samples); "
                f"give {advice}."
            )
        order: Order = (
            OwnOrder(self.num_samples, self.batch_size, seed, shuffle)
            if self.loader is None
            else LoaderOrder(_windowed(self.loader, accumulate), self.num_samples, seed, role)
        )
        self.plans = EpochPlans(order, self.num_samples, seed, role)
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the {role} loader yields no batch in an epoch; check its sampler, batch_size and drop_last."
            )

    @property
    def num_samples(self) -> int:
        """Samples in the data set; their ids lie in ``[0, num_samples)``."""
        return len(self.dataset)

    @property
    def knows_length(self) -> bool:
        """True when `steps_per_epoch` is no guess."""
        return True

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch that is not amended, from the newest kept set."""
        return self.plans.steps_per_epoch

    def keep(self, ids: Tensor | None, *, after: int = -1) -> None:
        """Train on these samples only, from the epoch after `after` on; see `EpochPlans.keep`."""
        self.plans.keep(ids, after=after)

    def amend(self, number: int, position: int, *, without: Tensor | None = None, adding: Tensor | None = None) -> int:
        """Plan what is left of an epoch anew and return its number of batches; see `EpochPlans.amend`."""
        return self.plans.amend(number, position, without=without, adding=adding)

    def expected_steps(self, count: int) -> int:
        """Batches in a pass over so many of the samples."""
        return self.plans.order.expected_steps(count)

    def check_can_be_sieved(self) -> None:
        """Raise unless a rule can leave samples out and bring others back.

        Raises:
            DataError: for loaders that compose their batches by a rule of their own, or draw a part of the data only.
        """
        self.plans.order.check_can_leave_out()
        self.plans.order.check_draws_all()

    def steps_in(self, number: int) -> int:
        """Batches in the plan of one epoch, as it is now."""
        return len(self.plans[number])

    def facts(self) -> dict[str, Any]:
        """What a checkpoint must have been trained on to be gone on with."""
        return {"samples": self.num_samples, "samples_a_batch": self.batch_size}

    def place_notes(self, number: int, position: int) -> list[str]:
        """What has to be done to stand at a place again, in at most one sentence; here nothing."""
        return []

    def close(self) -> None:
        """Let go of what is held of the data; here nothing is between two batches."""

    def state_dict(self) -> dict[str, Any]:
        """Kept sets and plans; see `EpochPlans.state_dict`."""
        return self.plans.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly from a saved state; the data must be the same.

        Raises:
            DataError: when it is of a stream.
        """
        if "kept" not in state:
            raise DataError("the state is one of a stream, and the training data are a map-style data set.")
        self.plans.load_state_dict(state)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from position `start` on.

        Raises:
            DataError: when a loader's own sampler yields fewer batches than in the first epoch.
        """
        position = start
        while position < len(self.plans.complete(number)):
            changes = self.plans.changes
            with closing(self._batches(number, position)) as batches:
                for batch in batches:
                    if self.share is not None:
                        batch.whole = self.plans[number][position]
                    if self.augment is not None:
                        batch.views = self.augment.view_of(number, batch.ids)
                    yield batch
                    position += 1
                    if changes != self.plans.changes:
                        break  # amended: what was read ahead is dropped, with the workers that read it

    def coming(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and views of the batches of one epoch from position `start` on, without their content."""
        position = start
        while position < len(self.plans[number]):
            ids = self._own(self.plans[number][position])
            yield ids, self.augment.view_of(number, ids) if self.augment is not None else torch.zeros_like(ids)
            position += 1

    def _batches(self, number: int, start: int) -> Generator[Batch, None, None]:
        plan = self.plans[number]
        part_size = self.part_size if self.accumulate > 1 else None
        if isinstance(self.dataset, ArrayDataset) and self.loader is None:
            for ids in map(self._own, plan[start:]):
                yield in_parts(ids, part_size, self.dataset.gather)
            return
        places = [(position, self._own(ids).tolist()) for position, ids in enumerate(plan)][start:]
        fetch = _Fetch(self.dataset, self._collate(), self.seed, number, part_size)
        if self.loader is None or self.loader.num_workers == 0:
            for place in places:
                yield fetch.__getitems__(place)
            return
        with private_generator(derive_seed(self.seed, "workers", number)), interrupts_blocked():
            batches = iter(self._worker_loader(fetch, places))
        yield from batches

    @contextmanager
    def unshared(self) -> Iterator[None]:
        """Inside the block this rank reads every row."""
        share, self.share = self.share, None
        try:
            yield
        finally:
            self.share = share

    def _own(self, ids: Tensor) -> Tensor:
        """This rank's ids of a batch."""
        return ids if self.share is None else ids[self.share(ids)]

    def example(self, rows: int) -> Batch:
        """The first `rows` samples in order, for tracing and counting."""
        return self.fetch(torch.arange(min(rows, self.num_samples)))

    def fetch(self, ids: Tensor) -> Batch:
        """Some samples, collated, as they are before any augmentation; training notices nothing."""
        if isinstance(self.dataset, ArrayDataset) and self.loader is None:
            return Batch(ids, self.dataset.gather(ids))
        return _Fetch(self.dataset, self._collate(), self.seed, -1).__getitems__((0, ids.tolist()))

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


def _windowed(loader: DataLoader[Any], accumulate: int) -> DataLoader[Any]:
    """A loader of the same samples whose batches are so many of the given one's."""
    if accumulate == 1:
        return loader
    if type(loader.batch_sampler) is not BatchSampler:
        raise DataError(
            f"accumulate={accumulate} cannot be used with this loader: its {type(loader.batch_sampler).__name__} "
            "composes batches by a rule of its own, which windows would break; give it a sampler and a batch_size."
        )
    sampler, size = loader.batch_sampler.sampler, loader.batch_sampler.batch_size * accumulate
    wide = BatchSampler(sampler, size, loader.batch_sampler.drop_last)
    return DataLoader(loader.dataset, batch_sampler=wide, generator=loader.generator)


def _check_dataset(dataset: Any, role: str) -> None:
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"the {role} data must be map-style (with __len__ and __getitem__), so that each sample keeps "
            f"its id; got {type(dataset).__name__}."
        )
    if len(dataset) == 0:
        raise DataError(f"the {role} set is empty; give at least one sample.")
