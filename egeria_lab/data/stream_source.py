"""Batches of a stream, as `BatchSource` hands out those of a map-style set: same calls, but no sample can be looked up.

The file is one piece because it answers every call of `BatchSource`, a third of them by refusing. A pass is one reading
of the stream from its start to its end, after which it is read anew; of data that are cut into passes
(`steps_per_epoch`) the next pass reads on. The place in a stream is found again by reading on from the start of the
reading: to the bit where the data come again as they came, which a fingerprint of the last batch tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from egeria_lab.data.loaders import Batch, BatchSource, Views
from egeria_lab.data.streams import StreamReader, check_begins_anew, fingerprint, is_stream, length_of, rows_of
from egeria_lab.errors import DataError


class StreamSource(BatchSource):
    """Batches of one stream.

    Args:
        data: an `IterableDataset` of single samples, a `DataLoader` over one, an iterable of ready batches, or a
            function that returns a new iterator of batches.
        batch_size: samples a batch, for an `IterableDataset`; whatever yields batches brings its own.
        seed: decides what the data draw from the global generators.
        role: ``"training"`` or ``"validation"``; training data are opened at once, for an example.
        augment: decides the view of each sample; a sample goes by its number in the reading.
        accumulate: so many batches make one, in parts, for one update.
        steps_per_epoch: steps after which a pass is over although the data go on, or None.
        planned: steps of the plan, which stand for the length of a pass while nobody knows it.

    Attributes:
        tell: called with a sentence when the place in the stream is another one than before.

    Raises:
        DataError: for an iterator, which can be read only once, and for data that yield nothing.

    Example:
        >>> source = StreamSource(lambda: (torch.zeros(4, 1) for _ in range(3)), 4, seed=0)
        >>> [batch.ids.tolist() for batch in source.epoch(0)][-1], source.steps_in(0)
        ([8, 9, 10, 11], 3)
    """

    has_ids = False

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        seed: int,
        role: str = "training",
        augment: Views | None = None,
        accumulate: int = 1,
        steps_per_epoch: int | None = None,
        planned: int | None = None,
    ) -> None:
        check_begins_anew(data, f"the {role} stream")
        self.loader = data if isinstance(data, DataLoader) else None
        self.dataset = data if self.loader is None else self.loader.dataset
        self.seed, self.role, self.augment, self.accumulate = seed, role, augment, accumulate
        self.shuffle, self.share = False, None
        self.tell: Callable[[str], None] | None = None
        self._stream: Any = _read_by_us(data, batch_size)
        self._drop_single = isinstance(data, IterableDataset) and batch_size > 1 and role == "training"
        self._cut = steps_per_epoch
        self._planned = planned
        told = length_of(self._stream)
        lengths = [steps_per_epoch, None if told is None else -(-told // accumulate)]
        self._length = min((steps for steps in lengths if steps is not None), default=None)
        self._begins = {0: (0, 0)}  # pass -> reading, and batches of it that came before
        self._ends: dict[int, int] = {}  # pass -> its steps, as soon as its last batch was handed out
        self._newest = (0, -1)  # pass and position handed out last
        self._held: Batch | None = None  # the batch there, which comes again when its step could not be made
        self._known: str | None = None  # its fingerprint in the run that is gone on with
        self._reader: StreamReader | None = None
        self.part_size = batch_size
        if role == "training":
            self.part_size = rows_of(self._standing_at(0, 0).look(), role)
        self.batch_size = self.part_size * accumulate

    # --- length ----------------------------------------------------------------------------------------

    @property
    def knows_length(self) -> bool:
        """True when the data tell their length, or a pass has ended."""
        return self._length is not None

    @property
    def steps_per_epoch(self) -> int:
        """Steps in a pass: as told, or as in the pass before, or those of the plan while neither is known."""
        return self._length or self._planned or 1

    def steps_in(self, number: int) -> int:
        """Steps in a pass; at least one more than handed out, until its last batch is known."""
        handed = self._newest[1] + 1 if self._newest[0] == number else 0
        return self._ends.get(number, max(self.steps_per_epoch, handed + 1))

    def facts(self) -> dict[str, Any]:
        """What a checkpoint must have been trained on to be gone on with."""
        return {"samples": "an untold number of", "samples_a_batch": self.batch_size}

    # --- reading ---------------------------------------------------------------------------------------

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one pass from position `start` on; ids are numbers of samples in the reading.

        Raises:
            DataError: when the data yield nothing, or end before `start` where they did not before.
        """
        position = start
        try:
            while True:
                yield self._batch(number, position)
                position += 1
                if position == self._ends.get(number):
                    return
        finally:
            if self.role != "training":  # an evaluation is over, or was given up: the next one begins anew
                self.close()

    def example(self, rows: int) -> Batch:
        """The first batch, whole: nobody but its maker knows how to take some rows of it. It comes in training too."""
        content = self._standing_at(0, 0).look()
        return Batch(torch.arange(rows_of(content, self.role)), content)

    def close(self) -> None:
        """Let go of the data, and of the processes that read them."""
        self._reader, self._held = None, None

    def _batch(self, number: int, position: int) -> Batch:
        if self._newest == (number, position) and self._held is not None:
            return self._held
        try:
            reader = self._standing_at(number, position)
            parts = [self._part(reader)]
            while len(parts) < self.accumulate and reader.more():
                parts.append(self._part(reader))
            is_last = not reader.more()
        except BaseException:  # an iterator that has failed is at its end
            self._reader = None
            raise
        batch = parts[0]
        if self.accumulate > 1:
            batch = Batch(torch.cat([part.ids for part in parts]), parts[0].content, None, tuple(parts))
        if self.augment is not None:
            batch.views = self.augment.view_of(number, batch.ids)
        self._newest, self._held, self._known = (number, position), batch if self.role == "training" else None, None
        if is_last or position + 1 == self._cut:
            self._end(number, position + 1, reader, is_last)
        return batch

    def _part(self, reader: StreamReader) -> Batch:
        before, content = reader.rows, reader.take()
        return Batch(torch.arange(before, reader.rows), content)

    def _end(self, number: int, steps: int, reader: StreamReader, is_last: bool) -> None:
        whole = is_last and self._begins[number][1] == 0
        self._length = steps if self._cut is None or whole else self._cut
        begin = (reader.number + 1, 0) if is_last else (reader.number, reader.taken)
        self._ends = {number: steps}
        self._begins = {number: self._begins[number], number + 1: begin}

    def _standing_at(self, number: int, position: int) -> StreamReader:
        """A reader whose next batch is the one at this place."""
        reading, first = self._begins[number]
        wanted = first + position * self.accumulate
        reader = self._reader
        if reader is None or reader.number != reading or reader.taken > wanted:
            reader = self._reader = StreamReader(
                self._stream, seed=self.seed, number=reading, role=self.role, drop_single=self._drop_single
            )  # fmt: skip
            if not position:
                self._ends.pop(number, None)
        skipped: list[Any] = []
        while reader.taken < wanted and reader.more():
            skipped = [*skipped, reader.take()][-self.accumulate :]
        if not reader.more():
            raise DataError(self._why_nothing(reader, wanted))
        self._compare(skipped, (number, position - 1))
        return reader

    def _compare(self, skipped: list[Any], place: tuple[int, int]) -> None:
        if self._known is None or not skipped or place != self._newest:
            return
        same, self._known = fingerprint(skipped) == self._known, None
        if not same and self.tell is not None:
            self.tell(
                f"The training stream does not repeat: its batch {place[1] + 1} of pass {place[0] + 1} is another one "
                "than the batch that was trained on there. Training goes on with what comes, so it is not what it "
                "would have been without the interruption."
            )

    def _why_nothing(self, reader: StreamReader, wanted: int) -> str:
        if wanted:
            return (
                f"the {self.role} stream ended after {reader.taken} batches, and batch {wanted + 1} is next: the place "
                "in it cannot be found again. Give the data as they were."
            )
        if reader.number:
            return (
                f"the {self.role} stream yielded nothing when it was begun anew for pass {reader.number + 1}: give an "
                "object whose iter() begins anew, or a function that returns a new iterator each time."
            )
        return f"the {self.role} stream yielded no batch; give one with at least one."

    # --- state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where passes begin in the data, and what the batch handed out last was."""
        contents = [] if self._held is None else [part.content for part in self._held.split()]
        return {
            "begins": [[number, *begin] for number, begin in self._begins.items()],
            "ends": [list(entry) for entry in self._ends.items()],
            "newest": list(self._newest),
            "length": self._length,
            "fingerprint": fingerprint(contents) if contents else self._known,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; what must be read again for it is read when the next batch is asked for.

        Raises:
            DataError: when it is of data that are no stream.
        """
        if "begins" not in state:
            raise DataError("the state is one of a map-style data set, and the training data are a stream.")
        self._begins = {int(number): (int(reading), int(first)) for number, reading, first in state["begins"]}
        self._ends = {int(number): int(steps) for number, steps in state["ends"]}
        newest = int(state["newest"][0]), int(state["newest"][1])
        self._length = self._length if self._cut is not None else state["length"]
        self._newest, self._held, self._known = newest, None, state["fingerprint"]

    def place_notes(self, number: int, position: int) -> list[str]:
        """What has to be done to stand at a place again, in at most one sentence."""
        reading, first = self._begins[number]
        batches = first + position * self.accumulate
        if not batches:
            return []
        return [
            f"The place in the training stream is found by reading its first {batches:,} batches again, without "
            f"training on them (reading {reading + 1}): exact where the data come again as they came."
        ]

    # --- what needs ids --------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        """Nobody knows it.

        Raises:
            DataError: always; whoever asks wants to tell samples apart by their ids.
        """
        raise self._no_ids()

    def keep(self, ids: Tensor | None, *, after: int = -1) -> None:
        """Refused, as all that goes by ids.

        Raises:
            DataError: always.
        """
        raise self._no_ids()

    def amend(self, number: int, position: int, *, without: Tensor | None = None, adding: Tensor | None = None) -> int:
        """Refused, as all that goes by ids.

        Raises:
            DataError: always.
        """
        raise self._no_ids()

    def fetch(self, ids: Tensor) -> Batch:
        """Refused, as all that goes by ids.

        Raises:
            DataError: always.
        """
        raise self._no_ids()

    def coming(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Refused, as all that goes by ids.

        Raises:
            DataError: always.
        """
        raise self._no_ids()

    def expected_steps(self, count: int) -> int:
        """Refused, as all that goes by ids.

        Raises:
            DataError: always.
        """
        raise self._no_ids()

    def check_can_be_sieved(self) -> None:
        """Refused, as all that goes by ids.

        Raises:
            DataError: always.
        """
        raise self._no_ids()

    def _no_ids(self) -> DataError:
        return DataError(
            f"the {self.role} data are a stream, whose samples have no ids by which they could be chosen or found "
            "again; give a map-style data set (with __len__ and __getitem__) for that."
        )


def source_for(data: Any, batch_size: int, *, seed: int, role: str = "validation") -> BatchSource:
    """Batches to evaluate on, in order, of a map-style set, a loader or a stream.

    Example:
        >>> source = source_for([(torch.zeros(1), 0)] * 3, 2, seed=0)
        >>> [len(batch) for batch in source.epoch(0)]
        [2, 1]
    """
    if is_stream(data):
        return StreamSource(data, batch_size, seed=seed, role=role)
    return BatchSource(data, batch_size, seed=seed, shuffle=False, role=role)


def _read_by_us(data: Any, batch_size: int) -> Any:
    """What is iterated: single samples are put into batches, and no iterator is shared with anybody else."""
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=batch_size)
    if not isinstance(data, DataLoader) or not data.persistent_workers:
        return data
    return DataLoader(  # one that keeps its workers has one iterator for all who ask
        data.dataset, batch_size=data.batch_size, drop_last=data.drop_last, collate_fn=data.collate_fn,
        num_workers=data.num_workers, prefetch_factor=data.prefetch_factor, worker_init_fn=data.worker_init_fn,
        multiprocessing_context=data.multiprocessing_context, timeout=data.timeout,
    )  # fmt: skip
