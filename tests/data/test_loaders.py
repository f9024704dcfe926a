"""Batches with stable ids: each sample once an epoch, in an order that seed and epoch decide alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

from egeria_lab.data.datasets import ArrayDataset
from egeria_lab.data.loaders import Batch, BatchSource
from egeria_lab.errors import DataError


class Rows:
    """Map-style: sample `i` is (i, i mod 3), with noise from every global generator when asked."""

    def __init__(self, count: int, noisy: bool = False) -> None:
        self.count, self.noisy = count, noisy

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(1) + np.random.rand() + random.random() if self.noisy else torch.zeros(1)
        return torch.tensor([float(index)]) + noise.float(), index % 3


def arrays(count: int) -> ArrayDataset:
    return ArrayDataset(torch.arange(float(count))[:, None], torch.arange(count) % 3)


def ids(batches: Iterator[Batch]) -> list[list[int]]:
    return [batch.ids.tolist() for batch in batches]


def contents(batches: Iterator[Batch]) -> list[Tensor]:
    return [batch.content[0] for batch in batches]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("data", [arrays(23), Rows(23), TensorDataset(torch.arange(23.0)[:, None], torch.zeros(23))])
def test_every_sample_comes_once_an_epoch_with_its_own_id(data: Any) -> None:
    source = BatchSource(data, 5, seed=1)
    for epoch in range(3):
        batches = list(source.epoch(epoch))
        assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]
        assert sorted(int(i) for batch in batches for i in batch.ids) == list(range(23))
        for batch in batches:
            assert batch.ids.dtype == torch.int64
            assert torch.equal(batch.content[0][:, 0], batch.ids.float())
    assert source.steps_per_epoch == 5


def test_order_is_a_function_of_seed_and_epoch() -> None:
    one, two, other = (BatchSource(arrays(50), 8, seed=seed) for seed in (1, 1, 2))
    assert ids(one.epoch(3)) == ids(two.epoch(3))  # without the epochs in between
    assert ids(one.epoch(0)) != ids(one.epoch(1))
    assert ids(one.epoch(0)) != ids(other.epoch(0))
    torch.manual_seed(99)
    assert ids(one.epoch(3)) == ids(two.epoch(3))


def test_arrays_and_rows_have_the_same_order() -> None:
    a, b = BatchSource(arrays(50), 8, seed=1), BatchSource(Rows(50), 8, seed=1)
    assert ids(a.epoch(2)) == ids(b.epoch(2))
    assert same(contents(a.epoch(2)), contents(b.epoch(2)))


def test_an_epoch_can_be_taken_up_in_the_middle() -> None:
    for data in (arrays(50), Rows(50, noisy=True)):
        source = BatchSource(data, 8, seed=1)
        whole = contents(source.epoch(4))
        for start in (0, 1, 6, 7):
            assert same(contents(source.epoch(4, start)), whole[start:])


def test_a_last_batch_of_one_joins_the_one_before_when_training() -> None:
    assert [len(b) for b in BatchSource(arrays(9), 4, seed=0).epoch(0)] == [4, 5]
    assert [len(b) for b in BatchSource(arrays(10), 4, seed=0).epoch(0)] == [4, 4, 2]
    assert [len(b) for b in BatchSource(arrays(1), 1, seed=0).epoch(0)] == [1]
    assert [len(b) for b in BatchSource(arrays(3), 1, seed=0).epoch(0)] == [1, 1, 1]
    valid = BatchSource(arrays(9), 4, seed=0, shuffle=False, role="validation")
    assert ids(valid.epoch(0)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_validation_batch_may_be_larger_than_the_set() -> None:
    source = BatchSource(arrays(5), 256, seed=0, shuffle=False, role="validation")
    assert ids(source.epoch(0)) == [[0, 1, 2, 3, 4]]


def test_example_is_the_first_rows() -> None:
    for data in (arrays(9), Rows(9), DataLoader(Rows(9), 4)):
        batch = BatchSource(data, 4, seed=0).example(2)
        assert batch.ids.tolist() == [0, 1]
        assert batch.content[0][:, 0].tolist() == [0.0, 1.0]
        assert len(BatchSource(data, 4, seed=0).example(99)) == 9


# --- draws -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Rows, lambda n, noisy: DataLoader(Rows(n, noisy), 8, shuffle=True)])
def test_random_samples_repeat_and_no_global_generator_moves(make: Any) -> None:
    """What a data set draws is a function of seed, epoch and position of the batch."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    source = BatchSource(make(50, noisy=True), 8, seed=1)
    first = contents(source.epoch(2))
    source.example(2)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[2], strict=True))
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    again = BatchSource(make(50, noisy=True), 8, seed=1)
    assert same(contents(again.epoch(2)), first)
    assert not same(contents(again.epoch(3)), first)
    noise = torch.cat([batch.content[0][:, 0] - batch.ids for batch in again.epoch(2)])
    assert noise.unique().numel() == 50  # and not the same draw for every batch


def test_interleaved_sources_do_not_disturb_each_other() -> None:
    """traps row 81: iterating another loader changes nothing."""
    source, other = BatchSource(Rows(40, noisy=True), 8, seed=1), BatchSource(Rows(40, noisy=True), 8, seed=2)
    alone = contents(source.epoch(0))
    mixed = []
    for batch in source.epoch(0):
        mixed.append(batch.content[0])
        next(other.epoch(0))
        torch.randn(3)
    assert same(alone, mixed)


# --- loaders ---------------------------------------------------------------------------------------------


def test_a_loader_keeps_batch_size_collate_and_drop_last() -> None:
    def collate(samples: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in samples]), "double": 2 * torch.stack([x for x, _ in samples])}

    loader = DataLoader(Rows(23), batch_size=5, shuffle=True, collate_fn=collate, drop_last=True)
    source = BatchSource(loader, 999, seed=1)
    batches = list(source.epoch(0))
    assert [len(batch) for batch in batches] == [5] * 4
    assert source.steps_per_epoch == 4
    for batch in batches:
        assert torch.equal(batch.content["double"][:, 0], 2 * batch.ids.float())


def test_a_loader_without_shuffling_keeps_its_order() -> None:
    source = BatchSource(DataLoader(Rows(10), batch_size=4), 999, seed=1)
    assert ids(source.epoch(0)) == ids(source.epoch(7)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_weighted_sampler_decides() -> None:
    """traps row 71."""
    sampler = WeightedRandomSampler([0.0] * 5 + [1.0] * 5, num_samples=20)
    source = BatchSource(DataLoader(Rows(10), batch_size=4, sampler=sampler), 999, seed=1)
    chosen = [i for batch in ids(source.epoch(0)) for i in batch]
    assert len(chosen) == 20
    assert set(chosen) == {5, 6, 7, 8, 9}
    assert ids(source.epoch(0)) == ids(BatchSource(DataLoader(Rows(10), 4, sampler=sampler), 1, seed=1).epoch(0))
    assert ids(source.epoch(1)) != ids(source.epoch(0))


def test_a_loader_with_a_generator_of_its_own_is_repeatable_and_leaves_it_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    loader = DataLoader(Rows(20), batch_size=4, shuffle=True, generator=generator)
    source = BatchSource(loader, 999, seed=1)
    first = ids(source.epoch(0))
    assert ids(source.epoch(0)) == first
    assert ids(source.epoch(1)) != first
    assert ids(source.epoch(0)) == first
    assert ids(source.epoch(0, 2)) == first[2:]
    assert torch.equal(generator.get_state(), before)
    assert sorted(i for batch in first for i in batch) == list(range(20))


class Stateful(Sampler[int]):
    """A sampler with state of its own: each pass is another order."""

    def __init__(self, count: int) -> None:
        self.count, self.random = count, random.Random(0)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        self.random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.count


def test_an_interrupted_epoch_of_a_stateful_sampler_goes_on_with_the_same_order() -> None:
    source = BatchSource(DataLoader(Rows(20), batch_size=4, sampler=Stateful(20)), 999, seed=1)
    batches = source.epoch(0)
    seen = [next(batches).ids.tolist(), next(batches).ids.tolist()]
    seen += ids(source.epoch(0, 2))
    assert sorted(i for batch in seen for i in batch) == list(range(20))


class ByEpoch(Stateful):
    """As distributed samplers have it."""

    def set_epoch(self, epoch: int) -> None:
        self.random = random.Random(epoch)


def test_set_epoch_is_called() -> None:
    source = BatchSource(DataLoader(Rows(20), batch_size=4, sampler=ByEpoch(20)), 999, seed=1)
    first = ids(source.epoch(0))
    assert ids(source.epoch(1)) != first
    assert ids(source.epoch(0)) == first


def test_a_batch_sampler_of_ones_own() -> None:
    loader = DataLoader(Rows(10), batch_sampler=BatchSampler(range(9, -1, -1), 3, drop_last=False))
    source = BatchSource(loader, 999, seed=1)
    assert source.batch_size == 3
    assert ids(source.epoch(0)) == [[9, 8, 7], [6, 5, 4], [3, 2, 1], [0]]


class Shrinking(Sampler[list[int]]):
    """Yields one batch less each time, whatever its length says."""

    def __init__(self) -> None:
        self.batches = 5

    def __iter__(self) -> Iterator[list[int]]:
        self.batches -= 1
        return iter([[0, 1]] * self.batches)

    def __len__(self) -> int:
        return 99


def test_a_sampler_that_yields_fewer_batches_than_before_is_named() -> None:
    source = BatchSource(DataLoader(Rows(10), batch_sampler=Shrinking()), 999, seed=1)
    assert source.steps_per_epoch == 4
    assert len(list(source.epoch(0))) == 4
    with pytest.raises(DataError, match=r"yields 3 batches in epoch 1 and yielded 4 in the first"):
        next(source.epoch(1))


def test_workers_give_the_same_batches_as_none() -> None:
    """Also random augmentation, also from the middle of an epoch, and no worker outlives the epoch."""
    plain = BatchSource(DataLoader(Rows(40, noisy=True), 8, shuffle=True), 999, seed=1)
    with_workers = BatchSource(DataLoader(Rows(40, noisy=True), 8, shuffle=True, num_workers=2), 999, seed=1)
    rng = torch.get_rng_state()
    expected = list(plain.epoch(1))
    got = list(with_workers.epoch(1))
    assert [b.ids.tolist() for b in got] == [b.ids.tolist() for b in expected]
    assert same([b.content[0] for b in got], [b.content[0] for b in expected])
    assert same(contents(with_workers.epoch(1, 3)), [b.content[0] for b in expected[3:]])
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_data_set_that_hands_out_many_at_once_is_asked_once_a_batch() -> None:
    class Together(Rows):
        asked = 0

        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.asked += 1
            return [self[i] for i in indices]

    data = Together(20)
    list(BatchSource(data, 5, seed=0).epoch(0))
    assert data.asked == 4


def test_a_sample_that_fails_leaves_generators_as_they_were() -> None:
    class Fails(Rows):
        def __getitem__(self, index: int) -> Any:
            random.random()
            raise OSError(f"cannot read {index}")

    state = random.getstate()
    with pytest.raises(OSError, match=r"cannot read"):
        next(BatchSource(Fails(5), 2, seed=0).epoch(0))
    assert random.getstate() == state


# --- refusals --------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from range(3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Rows(0), "the training set is empty; give at least one sample"),
        (Stream(), r"map-style \(with __len__ and __getitem__\).*got Stream"),
        (DataLoader(Stream(), 2), "map-style.*got Stream"),
        (5, "map-style.*got int"),
        ({1, 2}, "map-style.*got set"),
        (Rows(3), r"batch_size=4 is larger than the training set \(3 samples\).*at most 3"),
        (DataLoader(Rows(3), 5), r"batch_size=5 is larger than the training set \(3 samples\)"),
        (DataLoader(Rows(9), batch_size=None), "batch_size=None.*have no ids"),
        (DataLoader(Rows(9), batch_size=5, sampler=range(3), drop_last=True), "yields no batch in an epoch"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        BatchSource(data, 4, seed=0)
