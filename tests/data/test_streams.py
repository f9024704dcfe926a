"""Data that can only be read in order: passes, lengths, the place in them, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from egeria_lab.data.loaders import Batch, BatchSource
from egeria_lab.data.stream_source import StreamSource, source_for
from egeria_lab.data.streams import StreamReader, fingerprint, is_stream, length_of, rows_of
from egeria_lab.errors import DataError


class Samples(IterableDataset[Any]):
    """Numbers from 0 as single samples, shuffled by the global generator of torch where asked for."""

    def __init__(self, count: int, shuffled: bool = False) -> None:
        self.count, self.shuffled = count, shuffled
        self.epochs: list[int] = []

    def set_epoch(self, number: int) -> None:
        self.epochs.append(number)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.count) if self.shuffled else torch.arange(self.count)
        info = get_worker_info()
        for i in order.tolist()[0 if info is None else info.id :: 1 if info is None else info.num_workers]:
            yield torch.tensor([float(i), random.random(), np.random.rand()], dtype=torch.float64), i


class Told(Samples):
    def __len__(self) -> int:
        return self.count


class Plain(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        raise IndexError


def source(data: Any, batch_size: int = 4, **options: Any) -> StreamSource:
    return StreamSource(data, batch_size, seed=0, **options)


def numbers(batch: Batch) -> list[int]:
    return [int(i) for part in batch.split() for i in part.content[1]]


def one_pass(stream: StreamSource, number: int, start: int = 0) -> list[list[int]]:
    return [numbers(batch) for batch in stream.epoch(number, start)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (Samples(3), True), (DataLoader(Samples(3), 2), True), (lambda: iter([]), True), (iter([]), True),
        ([1], False), (DataLoader([1], 1), False), (Plain(), False), ({1}, False), ({"a": 1}, False), ("ab", False),
        (nn.Linear(1, 1), False), (5, False), (dict, False), (torch.zeros(2), False),
    ],
)  # fmt: skip
def test_what_is_a_stream(data: Any, expected: bool) -> None:
    assert is_stream(data) is expected


def test_lengths_are_taken_where_they_are_told() -> None:
    assert length_of(DataLoader(Told(9), 4)) == 3
    assert length_of(DataLoader(Samples(9), 4)) is None
    assert source(Told(9)).steps_per_epoch == 3
    assert source(DataLoader(Told(9), 4), accumulate=2).steps_per_epoch == 2
    assert not source(Samples(9)).knows_length
    assert source(Samples(9), planned=70).steps_per_epoch == 70
    assert source(Told(9), steps_per_epoch=2).steps_per_epoch == 2
    assert source(Told(9), steps_per_epoch=200).steps_per_epoch == 3


def test_a_pass_is_one_reading_and_the_next_begins_anew() -> None:
    data = Samples(10)
    stream = source(data, planned=50)
    assert one_pass(stream, 0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert stream.knows_length
    assert (stream.steps_per_epoch, stream.steps_in(0)) == (3, 3)
    assert one_pass(stream, 1) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert data.epochs == [0, 1]


def test_the_end_of_a_pass_is_known_with_its_last_batch() -> None:
    stream = source(Samples(6), 2, planned=2)  # the plan is too short a guess, and a pass is longer
    seen = []
    for position, _ in enumerate(stream.epoch(0)):
        seen.append(stream.steps_in(0) == position + 1)
    assert seen == [False, False, True]


def test_passes_can_be_cut_and_read_on() -> None:
    def endless() -> Iterator[Any]:
        for i in range(10**9):
            yield torch.zeros(1, 1), torch.tensor([i])

    stream = source(endless, steps_per_epoch=3)
    assert [one_pass(stream, number) for number in range(3)] == [
        [[0], [1], [2]], [[3], [4], [5]], [[6], [7], [8]]
    ]  # fmt: skip
    ending = source(Samples(10), 2, steps_per_epoch=3)
    assert [one_pass(ending, number) for number in range(3)] == [
        [[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]], [[0, 1], [2, 3], [4, 5]]
    ]  # fmt: skip


def test_batches_add_up_to_one_update() -> None:
    stream = source(Samples(10), 2, accumulate=2)
    batches = list(stream.epoch(0))
    assert [[numbers(part) for part in batch.split()] for batch in batches] == [
        [[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]
    ]  # fmt: skip
    assert batches[1].ids.tolist() == [4, 5, 6, 7]
    assert stream.batch_size == 4


def test_a_single_sample_at_the_end_is_left_out_of_training_only() -> None:
    assert one_pass(source(Samples(9)), 0)[-1] == [4, 5, 6, 7]
    assert one_pass(source(Samples(9), role="validation"), 0)[-1] == [8]
    assert one_pass(source(Samples(1)), 0) == [[0]]
    assert one_pass(source(Samples(2), 1), 0) == [[0], [1]]
    assert one_pass(source(DataLoader(Samples(9), 4)), 0)[-1] == [8]  # whoever brings batches decides


def test_draws_are_a_function_of_seed_and_place_and_move_no_generator() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    first = [batch.content[0] for batch in source(Samples(8, shuffled=True)).epoch(0)]
    torch.rand(3), random.random(), np.random.rand()
    again, other = source(Samples(8, shuffled=True)), StreamSource(Samples(8, shuffled=True), 4, seed=1)
    assert all(torch.equal(a, b.content[0]) for a, b in zip(first, again.epoch(0), strict=True))
    assert not all(torch.equal(a, b.content[0]) for a, b in zip(first, other.epoch(0), strict=True))
    later = [batch.content[0] for batch in again.epoch(1)]
    assert not all(torch.equal(a, b) for a, b in zip(first, later, strict=True))
    torch.set_rng_state(states[0]), random.setstate(states[1])
    one_pass(source(Samples(8, shuffled=True)), 0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_the_example_is_the_first_batch_and_is_not_lost() -> None:
    data = Samples(6)
    stream = source(data, 2)
    assert numbers(stream.example(2)) == numbers(stream.example(2)) == [0, 1]
    assert one_pass(stream, 0)[0] == [0, 1]
    assert data.epochs == [0], "it was read once"


def test_a_batch_whose_step_was_not_made_comes_again_without_reading() -> None:
    data = Samples(8)
    stream = source(data, 2)
    batches = stream.epoch(0)
    next(batches), next(batches)
    assert one_pass(stream, 0, 1) == [[2, 3], [4, 5], [6, 7]]
    assert data.epochs == [0]


def test_a_place_further_back_is_found_by_reading_again() -> None:
    data = Samples(8, shuffled=True)
    stream = source(data, 2)
    batches = one_pass(stream, 0)
    second = one_pass(stream, 1)
    assert one_pass(stream, 1, 2) == second[2:]
    assert data.epochs == [0, 1, 1]
    assert second != batches


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_leads_to_the_same_place(workers: int) -> None:
    loader = DataLoader(Samples(24, shuffled=True), 4, num_workers=workers, persistent_workers=workers > 0)
    first = source(loader, accumulate=2)
    one_pass(first, 0)
    batches = first.epoch(1)
    next(batches)
    state = first.state_dict()
    rest = [batch.content[0] for batch in batches]
    told: list[str] = []
    second = source(loader, accumulate=2)
    second.load_state_dict(state)
    second.tell = told.append
    assert second.place_notes(1, 1) == [
        "The place in the training stream is found by reading its first 2 batches again, without training on them "
        "(reading 2): exact where the data come again as they came."
    ]
    assert second.steps_in(1) == first.steps_in(1)
    assert all(torch.equal(a, b.content[0]) for a, b in zip(rest, second.epoch(1, 1), strict=True))
    assert told == []
    first.close(), second.close()


def test_a_stream_that_does_not_repeat_is_told() -> None:
    counter = iter(range(10**6))

    def moving() -> Iterator[Any]:
        return ((torch.zeros(2, 1), torch.tensor([next(counter)] * 2)) for _ in range(6))

    first, told = source(moving), list[str]()
    batches = first.epoch(0)
    next(batches), next(batches)
    second = source(moving)
    second.load_state_dict(first.state_dict())
    second.tell = told.append
    next(iter(second.epoch(0, 2)))
    assert len(told) == 1
    assert "does not repeat: its batch 2 of pass 1 is another one" in told[0]


def test_the_first_place_needs_no_note() -> None:
    stream = source(Samples(4))
    assert stream.place_notes(0, 0) == []
    one_pass(stream, 0)
    assert stream.place_notes(1, 0) == []


def test_an_error_of_the_data_comes_when_its_batch_is_due_and_reading_goes_on() -> None:
    failures = [True]

    def shaky() -> Iterator[Any]:
        for i in range(3):
            if i == 2 and failures:
                failures.clear()
                raise OSError("gone")
            yield torch.zeros(2, 1), torch.tensor([i, i])

    stream = source(shaky)
    batches = stream.epoch(0)
    assert [numbers(next(batches)), numbers(next(batches))] == [[0, 0], [1, 1]]
    with pytest.raises(OSError, match="gone"):
        next(batches)
    assert one_pass(stream, 0, 2) == [[2, 2]]


class Empty(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Empty(), "the training stream yielded no batch; give one with at least one."),
        (iter([1]), "is an iterator (list_iterator), which can be read only once"),
        (lambda: 5, "a function that must return an iterator of batches, got 5"),
        (lambda: iter(["text"]), "must yield batches that hold a tensor whose rows are the samples, got str"),
        (lambda: iter([torch.zeros(0, 3)]), "got one of 0 rows"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(data: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        source(data)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_twice_is_told_at_the_second_pass() -> None:
    only = iter([(torch.zeros(2, 1), torch.tensor([1, 2]))])
    stream = source(lambda: only)
    assert one_pass(stream, 0) == [[1, 2]]
    with pytest.raises(DataError, match=r"yielded nothing when it was begun anew for pass 2: give an object"):
        one_pass(stream, 1)


def test_a_place_that_is_not_there_any_more() -> None:
    first = source(Samples(20))
    batches = first.epoch(0)
    next(batches), next(batches), next(batches)
    second = source(Samples(8))
    second.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="ended after 2 batches, and batch 4 is next"):
        one_pass(second, 0, 3)


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.num_samples, lambda s: s.keep(torch.tensor([0])), lambda s: s.amend(0, 0), lambda s: s.fetch([0]),
        lambda s: s.coming(0), lambda s: s.expected_steps(3), lambda s: s.check_can_be_sieved(),
    ],
)  # fmt: skip
def test_what_goes_by_ids_is_refused_with_the_reason(ask: Any) -> None:
    with pytest.raises(DataError, match="are a stream, whose samples have no ids by which they could be chosen"):
        ask(source(Samples(4)))


def test_states_of_streams_and_of_sets_are_not_mixed_up() -> None:
    rows = [(torch.zeros(1), 0)] * 4
    a_set, stream = BatchSource(rows, 2, seed=0), source(Samples(4), 2)
    with pytest.raises(DataError, match="one of a stream, and the training data are a map-style data set"):
        a_set.load_state_dict(stream.state_dict())
    with pytest.raises(DataError, match="one of a map-style data set, and the training data are a stream"):
        stream.load_state_dict(a_set.state_dict())


def test_evaluation_reads_a_stream_from_its_start_each_time() -> None:
    data = Samples(3)
    valid = source_for(data, 2, seed=0)
    assert data.epochs == [], "not read before it is asked for"
    assert [len(batch) for batch in valid.epoch(0)] == [len(batch) for batch in valid.epoch(0)] == [2, 1]
    assert data.epochs == [0, 0]
    assert valid._reader is None, "nothing is held between two evaluations"  # type: ignore[attr-defined]
    given_up = valid.epoch(0)
    next(given_up), given_up.close()  # type: ignore[attr-defined]
    assert valid._reader is None  # type: ignore[attr-defined]
    one = source_for(Samples(1), 2, seed=0)
    assert [len(batch) for batch in one.epoch(0)] == [len(batch) for batch in one.epoch(0)] == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_fingerprints_see_numbers_shapes_and_texts(dtype: torch.dtype) -> None:
    def one(x: Tensor, text: str = "a") -> str:
        return fingerprint({"x": x, "more": [text, None]})

    base = torch.ones(2, 3).to(dtype)
    assert one(base) == one(base.clone())
    changed = base.clone()
    changed[1, 2] = 0
    assert len({one(base), one(changed), one(base.reshape(3, 2)), one(base, "b")}) == 4
    assert one(torch.tensor(1).to(dtype)) != one(torch.tensor(0).to(dtype))


def test_rows_are_those_of_the_first_tensor() -> None:
    assert rows_of([torch.tensor(1), {"a": torch.zeros(5, 2)}], "training") == 5


def test_a_reader_looks_without_taking() -> None:
    reader = StreamReader(Samples(2), seed=0, number=3, role="training")
    reader._items = iter([torch.zeros(2), torch.zeros(3)])
    assert len(reader.look()) == 2
    assert (reader.taken, reader.rows) == (0, 0)
    assert [len(reader.take()), len(reader.take())] == [2, 3]
    assert not reader.more()
