"""Batches of kept samples only: own order, users' samplers and workers, changes in the middle of an epoch."""

from __future__ import annotations

import math
import multiprocessing
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from egeria_lab.algorithms.sieving.settings import CirculantSieve
from egeria_lab.algorithms.sieving.sieve import Sieve
from egeria_lab.data.augment import Augment
from egeria_lab.data.datasets import ArrayDataset
from egeria_lab.data.labels import labels_of
from egeria_lab.data.loaders import BatchSource
from egeria_lab.data.sieved import KeptSampler
from egeria_lab.errors import DataError, InvalidSettingError


class Rows:
    """Map-style: sample `i` is (i, i mod 3), with noise from the global generator when asked."""

    def __init__(self, count: int, noisy: bool = False) -> None:
        self.count, self.noisy = count, noisy

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(1) / 2 if self.noisy else torch.zeros(1)
        return torch.tensor([float(index)]) + noise, index % 3


def arrays(count: int) -> ArrayDataset:
    return ArrayDataset(torch.arange(float(count))[:, None], torch.arange(count) % 3)


def loader(count: int = 100, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Rows(count), **{"batch_size": 8, **kwargs})  # type: ignore[arg-type]


def batches(source: BatchSource, number: int = 0, start: int = 0) -> list[list[int]]:
    return [batch.ids.tolist() for batch in source.epoch(number, start)]


def flat(source: BatchSource, number: int = 0, start: int = 0) -> list[int]:
    return [i for batch in batches(source, number, start) for i in batch]


def planned(source: BatchSource, number: int = 0, start: int = 0) -> list[list[int]]:
    return [ids.tolist() for ids, _ in source.coming(number, start)]


def some_of(count: int, kept: int, seed: int = 0) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:kept]


# --- our own order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [arrays, Rows, loader, lambda n: loader(n, shuffle=True)])
def test_only_kept_samples_come_and_each_comes_once(make: Any) -> None:
    source = BatchSource(make(100), 8, seed=1)
    ids = some_of(100, 63)
    source.keep(ids)
    for number in range(4):
        assert sorted(flat(source, number)) == sorted(ids.tolist())
        assert source.steps_in(number) == source.steps_per_epoch == math.ceil(63 / 8)
    assert source.plans.kept is not None
    assert source.plans.kept.tolist() == sorted(ids.tolist())
    for batch in source.epoch(1):
        assert torch.equal(batch.content[0][:, 0], batch.ids.float())
    source.keep(None)
    assert sorted(flat(source)) == list(range(100))
    assert source.steps_per_epoch == 13


@pytest.mark.parametrize("make", [arrays, loader, lambda n: loader(n, shuffle=True)])
def test_keeping_everything_changes_nothing(make: Any) -> None:
    plain, kept = BatchSource(make(50), 8, seed=1), BatchSource(make(50), 8, seed=1)
    kept.keep(torch.arange(50))
    kept.keep(None, after=3)
    assert [batches(plain, n) for n in range(3)] == [batches(kept, n) for n in range(3)]
    assert kept.plans.kept is None


def test_kept_samples_keep_the_order_they_had_among_all() -> None:
    plain, source = BatchSource(arrays(60), 8, seed=1), BatchSource(arrays(60), 8, seed=1)
    ids = set(some_of(60, 30).tolist())
    source.keep(torch.tensor(sorted(ids)))
    assert flat(source, 2) == [i for i in flat(plain, 2) if i in ids]


@pytest.mark.parametrize(("kept", "sizes"), [(16, [8, 8]), (17, [8, 9]), (18, [8, 8, 2]), (1, [1]), (9, [9])])
def test_a_last_batch_of_one_joins_the_one_before(kept: int, sizes: list[int]) -> None:
    for data in (arrays(40), loader(40, shuffle=True)):
        source = BatchSource(data, 8, seed=0)
        source.keep(some_of(40, kept))
        assert [len(ids) for ids in batches(source)] == sizes
        assert source.steps_per_epoch == len(sizes)


def test_the_epoch_under_way_stays_as_it_was_planned() -> None:
    """A swap at the end of epoch 2, or a call by hand in it, is for epoch 3 on."""
    for data in (arrays(40), loader(40, shuffle=True)):
        source = BatchSource(data, 8, seed=0)
        before = batches(source, 2)
        source.steps_in(3)  # asked for ahead, and so planned
        source.keep(some_of(40, 20), after=2)
        assert batches(source, 2) == before
        assert sorted(flat(source, 3)) == sorted(some_of(40, 20).tolist())
        source.keep(some_of(40, 10, seed=5), after=3)
        assert sorted(flat(source, 3)) == sorted(some_of(40, 20).tolist())
        assert sorted(flat(source, 4)) == sorted(some_of(40, 10, seed=5).tolist())
        source.keep(some_of(40, 12, seed=6), after=3)  # the newest word on epoch 4
        assert sorted(flat(source, 3)) == sorted(some_of(40, 20).tolist())
        assert sorted(flat(source, 4)) == sorted(some_of(40, 12, seed=6).tolist())


def test_a_running_iterator_is_not_disturbed_by_a_set_for_later() -> None:
    source = BatchSource(arrays(40), 8, seed=0)
    expected = batches(source, 0)
    running = source.epoch(0)
    seen = [next(running).ids.tolist()]
    source.keep(some_of(40, 16), after=0)
    assert seen + [batch.ids.tolist() for batch in running] == expected
    assert source.steps_in(1) == 2


def test_views_and_random_samples_go_with_the_plan() -> None:
    augment = Augment(noise=0.1, views=4)
    source = BatchSource(arrays(40), 8, seed=0, augment=augment)
    source.keep(some_of(40, 20))
    for batch, (ids, views) in zip(source.epoch(3), source.coming(3), strict=True):
        assert batch.views is not None
        assert torch.equal(batch.ids, ids)
        assert torch.equal(batch.views, views)
        assert torch.equal(views, augment.view_of(3, ids))


def test_a_validation_source_goes_in_order() -> None:
    source = BatchSource(arrays(9), 4, seed=0, shuffle=False, role="validation")
    source.keep(torch.tensor([8, 1, 4, 2, 7]))
    assert batches(source) == [[1, 2, 4, 7], [8]]


def test_ids_beyond_what_a_float32_can_hold() -> None:
    """traps row 73: 2**24 + 3 rows."""

    class Huge(Rows):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(index), 0

    rows = 2**24 + 3
    source = BatchSource(Huge(rows), 2**20, seed=0, shuffle=False)
    last = torch.arange(rows - 6, rows)
    source.keep(last)
    got = list(source.epoch(0))
    assert [i for batch in got for i in batch.ids.tolist()] == last.tolist()
    assert [i for batch in got for i in batch.content[0].tolist()] == last.tolist()


# --- users' loaders ---------------------------------------------------------------------------------------


def test_drop_last_and_collate_stay_the_users() -> None:
    def collate(samples: list[Any]) -> Tensor:
        return torch.stack([x for x, _ in samples]) * 2

    source = BatchSource(loader(shuffle=True, drop_last=True, collate_fn=collate), 1, seed=0)
    source.keep(some_of(100, 63))
    assert [len(ids) for ids in batches(source)] == [8] * 7
    assert source.steps_per_epoch == 7
    for batch in source.epoch(1):
        assert torch.equal(batch.content[:, 0], 2 * batch.ids.float())
    with pytest.raises(DataError, match="with 7 of 100 samples kept, an epoch has no batch of 8; keep more"):
        source.keep(some_of(100, 7))
    assert len(flat(source, 2)) == 56  # as before


def test_a_weighted_sampler_is_filtered_and_drawn_from_until_the_pass_is_full() -> None:
    """traps row 71."""
    weights = [1.0] * 50 + [3.0] * 50
    sampler = WeightedRandomSampler(weights, num_samples=200, generator=torch.Generator().manual_seed(5))
    state = sampler.generator.get_state()
    source = BatchSource(DataLoader(Rows(100), batch_size=10, sampler=sampler), 1, seed=1)
    ids = torch.arange(0, 100, 2)[:40]  # 25 light ones, 15 heavy ones
    source.keep(ids)
    drawn: Counter[int] = Counter()
    for number in range(30):
        pass_ids = flat(source, number)
        assert len(pass_ids) == 80  # 200 draws × 40 %
        assert source.steps_in(number) == source.steps_per_epoch == 8
        drawn.update(pass_ids)
    assert set(drawn) == set(ids.tolist())
    heavy = sum(n for i, n in drawn.items() if i >= 50) / 2400
    assert heavy == pytest.approx(45 / 70, abs=0.05)  # 15 × 3 of 25 × 1 + 15 × 3
    assert torch.equal(sampler.generator.get_state(), state)
    again = BatchSource(DataLoader(Rows(100), batch_size=10, sampler=sampler), 1, seed=1)
    again.keep(ids)
    assert flat(again, 7) == flat(source, 7) != flat(source, 8)


def test_further_rounds_are_other_draws() -> None:
    sampler = WeightedRandomSampler([0.1] * 500 + [1.0] * 500, num_samples=100)  # about 9 of a round are kept
    source = BatchSource(DataLoader(Rows(1000), batch_size=10, sampler=sampler), 1, seed=1)
    source.keep(torch.arange(500))
    ids = flat(source)
    assert len(ids) == 50
    assert len(set(ids)) > 40  # a repeated round would have each twice


def test_weights_of_zero_on_all_kept_samples_are_named() -> None:
    sampler = WeightedRandomSampler([0.0] * 50 + [1.0] * 50, num_samples=100)
    source = BatchSource(DataLoader(Rows(100), batch_size=10, sampler=sampler), 1, seed=1)
    with pytest.raises(DataError, match="draws none of the kept samples; give them a weight above 0"):
        source.keep(torch.arange(50))
    assert len(flat(source)) == 100


@pytest.mark.parametrize(
    ("sampler", "size"),
    [
        (RandomSampler(range(100), replacement=True, num_samples=50), 30),
        (RandomSampler(range(100), num_samples=250), 150),  # two and a half rounds
        (WeightedRandomSampler([1.0] * 100, 100, replacement=False), 60),
        (SubsetRandomSampler(range(20, 70)), None),
        (range(99, -1, -1), 60),
    ],
)
def test_other_samplers_of_torch(sampler: Any, size: int | None) -> None:
    source = BatchSource(DataLoader(Rows(100), batch_size=8, sampler=sampler), 1, seed=1)
    ids = set(some_of(100, 60).tolist())
    source.keep(torch.tensor(sorted(ids)))
    for number in range(3):
        got = flat(source, number)
        assert set(got) <= ids
        if size is None:
            assert sorted(got) == [i for i in range(20, 70) if i in ids]
        else:
            assert len(got) == size
    if isinstance(sampler, range):
        assert flat(source) == [i for i in sampler if i in ids]


class Doubling(Sampler[int]):
    """A sampler of one's own that gives some samples twice, and says nothing about it."""

    def __iter__(self) -> Iterator[int]:
        for i in torch.randperm(40).tolist():
            yield from [i] * (1 + i % 2)

    def __len__(self) -> int:
        return 60


def test_a_sampler_of_ones_own_that_repeats_samples_keeps_the_share_of_its_length() -> None:
    source = BatchSource(DataLoader(Rows(40), batch_size=5, sampler=Doubling()), 1, seed=1)
    source.keep(torch.arange(10))  # a quarter
    for number in range(3):
        ids = flat(source, number)
        assert len(ids) == 15
        assert set(ids) <= set(range(10))


class Stateful(Sampler[int]):
    """Each pass is another order, out of a generator that nobody can seed."""

    def __init__(self, count: int) -> None:
        self.count, self.random = count, random.Random(0)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        self.random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.count


def test_a_sampler_with_state_of_its_own() -> None:
    source = BatchSource(DataLoader(Rows(30), batch_size=4, sampler=Stateful(30)), 1, seed=1)
    source.keep(torch.arange(15))
    running = source.epoch(0)
    seen = [i for _ in range(2) for i in next(running).ids.tolist()]
    assert sorted(seen + flat(source, 0, 2)) == list(range(15))
    assert flat(source, 0) != flat(source, 1)


class Pairs(BatchSampler):
    """Batches with a composition of their own: each sample stands beside its neighbour."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([i, i + 1] for i in range(0, 20, 2))


@pytest.mark.parametrize("batch_sampler", [Pairs(range(20), 2, False), [[0, 1], [2, 3]]])
def test_batches_with_a_composition_of_their_own_are_refused_with_the_reason(batch_sampler: Any) -> None:
    source = BatchSource(DataLoader(Rows(20), batch_sampler=batch_sampler), 1, seed=1)
    before = batches(source)
    for call in (lambda: source.keep(torch.arange(9)), lambda: source.amend(0, 0, without=torch.tensor([1]))):
        with pytest.raises(DataError, match=r"no sample can be left out.*(Pairs|list) composes batches by a rule"):
            call()
    assert batches(source) == before
    source.keep(None)
    source.keep(torch.arange(20))  # that is everything


def test_torchs_own_batch_sampler_is_fine() -> None:
    batch_sampler = BatchSampler(range(9, -1, -1), 3, drop_last=False)
    source = BatchSource(DataLoader(Rows(10), batch_sampler=batch_sampler), 1, seed=1)
    source.keep(torch.tensor([0, 2, 4, 6, 8]))
    assert batches(source) == [[8, 6, 4], [2, 0]]


def test_a_stream_is_refused_with_the_reason() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from range(3)

    with pytest.raises(DataError, match=r"must be map-style.*so that each sample keeps its id"):
        BatchSource(DataLoader(Stream(), 2), 2, seed=0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([3, 50]), "there is no sample 50; ids of this training set are 0 to 49"),
        (torch.tensor([-1]), "there is no sample -1"),
        (torch.tensor([1.0]), "must be whole numbers"),
        (torch.empty(0, dtype=torch.int64), "with 0 of 50 samples kept, an epoch has no batch"),
    ],
)
def test_kept_sets_are_checked(ids: Tensor, message: str) -> None:
    source = BatchSource(arrays(50), 8, seed=0)
    before = batches(source)
    with pytest.raises(DataError, match=message):
        source.keep(ids)
    assert batches(source) == before


# --- data parallel ----------------------------------------------------------------------------------------


def shard(rank: int, replicas: int, count: int = 101, **kwargs: Any) -> BatchSource:
    sampler: Any = DistributedSampler(range(count), replicas, rank, seed=3, **kwargs)  # type: ignore[arg-type]
    return BatchSource(DataLoader(Rows(count), batch_size=5, sampler=sampler), 1, seed=1)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_processes_share_the_kept_samples_and_make_as_many_steps(replicas: int, drop_last: bool) -> None:
    """traps row 71: torch's DistributedSampler."""
    sources = [shard(rank, replicas, drop_last=drop_last) for rank in range(replicas)]
    ids = some_of(101, 64)
    for source in sources:
        source.keep(ids)
    orders = set()
    for number in range(4):
        parts = [flat(source, number) for source in sources]
        assert len({len(part) for part in parts}) == 1
        assert len({source.steps_in(number) for source in sources}) == 1
        together = [i for part in parts for i in part]
        assert set(together) <= set(ids.tolist())
        assert len(together) - len(set(together)) < replicas  # the usual padding
        assert len(set(together)) >= 64 - (2 * replicas if drop_last else 0)
        orders.add(str(parts))
    assert len(orders) == 4


def test_an_epoch_that_is_amended_keeps_its_length_on_every_process() -> None:
    sources = [shard(rank, 2) for rank in range(2)]
    ids = some_of(101, 64)
    gone, stand_in = ids[:3], torch.tensor(sorted(set(range(101)) - set(ids.tolist())))[:3]
    for source in sources:
        source.keep(ids)
    lengths = [source.steps_in(0) for source in sources]
    for source in sources:
        source.keep(torch.cat([ids[3:], stand_in]), after=0)
        assert source.amend(0, 2, without=gone, adding=stand_in) == lengths[0]
        assert not set(gone.tolist()) & set(flat(source, 0, 2))
    assert [source.steps_in(0) for source in sources] == lengths
    assert len({len(flat(source, 0)) for source in sources}) == 1


class OwnShard(Sampler[int]):
    """Has a rank, and draws at random what every process draws for itself."""

    num_replicas, rank = 2, 0

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(40, (20,)).tolist())

    def __len__(self) -> int:
        return 20


def test_a_rank_without_a_common_order_is_refused_with_the_reason() -> None:
    source = BatchSource(DataLoader(Rows(40), batch_size=5, sampler=OwnShard()), 1, seed=1)
    with pytest.raises(DataError, match="OwnShard has a rank, but does not deal one order out to all processes"):
        source.keep(torch.arange(20))


# --- workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_same_ids_on_any_number_of_workers_and_updates_reach_all_at_once(workers: int) -> None:
    """traps row 79: persistent workers too."""
    more = {"num_workers": workers, "persistent_workers": workers > 0}
    plain = BatchSource(DataLoader(Rows(60, noisy=True), 6, shuffle=True), 1, seed=1)
    source = BatchSource(DataLoader(Rows(60, noisy=True), 6, shuffle=True, **more), 1, seed=1)  # type: ignore[arg-type]
    sieve = Sieve(CirculantSieve(fraction=0.3, interval_epochs=1), 60, batch_size=6, seed=0)
    for number in range(3):
        for one in (plain, source):
            one.keep(sieve.kept_ids(), after=number - 1)
        expected, got = list(plain.epoch(number)), list(source.epoch(number))
        assert [b.ids.tolist() for b in got] == [b.ids.tolist() for b in expected]
        assert all(torch.equal(a.content[0], b.content[0]) for a, b in zip(got, expected, strict=True))
        assert sorted(i for b in got for i in b.ids.tolist()) == sieve.kept_ids().tolist()
        for batch in got:
            sieve.observe(batch.ids, correct=batch.ids % 2 == 0, margin=batch.ids.float())
        sieve.after_pass(steps_done=number + 1, planned_steps=100)


def test_what_workers_read_ahead_is_dropped_when_the_epoch_is_amended() -> None:
    source = BatchSource(loader(80, num_workers=2, persistent_workers=True, shuffle=True, prefetch_factor=4), 1, seed=1)
    rng = torch.get_rng_state()
    running = source.epoch(0)
    seen = [next(running).ids.tolist() for _ in range(2)]
    gone = torch.tensor(planned(source, 0, 2)[0])  # the very next batch, read long since
    source.amend(0, 2, without=gone)
    rest = [batch.ids.tolist() for batch in running]
    assert rest == planned(source, 0, 2)
    together = [i for ids in seen + rest for i in ids]
    assert sorted(together) == sorted(set(range(80)) - set(gone.tolist()))
    assert torch.equal(torch.get_rng_state(), rng)
    assert not [p for p in multiprocessing.active_children() if p.is_alive()]


# --- in the middle of an epoch ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [arrays, Rows, lambda n: loader(n, shuffle=True), loader])
def test_what_is_left_of_an_epoch_is_planned_anew(make: Any) -> None:
    source, same = (BatchSource(make(60), 8, seed=1) for _ in range(2))
    for one in (source, same):
        one.keep(torch.arange(48))
    whole = batches(source, 5)
    gone = torch.tensor([whole[0][0], whole[4][1], whole[5][2]])
    adding = torch.tensor([50, 55])
    assert source.amend(5, 2, without=gone, adding=adding) == 6
    assert source.steps_in(5) == 6
    got = batches(source, 5)
    assert got[:2] == whole[:2]  # what was handed out stays
    rest = [i for ids in got[2:] for i in ids]
    left = [i for ids in whole[2:] for i in ids if i not in gone.tolist()]
    assert sorted(rest) == sorted([*left, 50, 55])
    assert [i for i in rest if i < 50] == left  # the others keep their order
    assert planned(source, 5) == got
    same.amend(5, 2, without=gone, adding=adding)
    assert batches(same, 5) == got
    assert sorted(flat(source, 6)) == list(range(48))  # the next epoch goes by `keep`
    assert source.steps_per_epoch == 6


def test_added_samples_come_at_random_places_and_in_order_where_the_order_is_the_ids() -> None:
    places = []
    for seed in range(40):
        source = BatchSource(arrays(101), 10, seed=seed)
        source.keep(torch.arange(100))
        source.amend(0, 0, adding=torch.tensor([100]))
        places.append(flat(source).index(100))
    assert min(places) < 25
    assert max(places) > 75
    source = BatchSource(loader(20), 1, seed=0)
    source.keep(torch.tensor([1, 2, 3, 9, 10]))
    source.amend(0, 0, without=torch.tensor([2]), adding=torch.tensor([7, 0]))
    assert flat(source) == [0, 1, 3, 7, 9, 10]


def test_a_running_iterator_follows() -> None:
    for data in (arrays(40), Rows(40), loader(40, shuffle=True)):
        source = BatchSource(data, 8, seed=0)
        running, ahead = source.epoch(0), source.coming(0)
        seen = [next(running).ids.tolist()]
        assert next(ahead)[0].tolist() == seen[0]
        gone = torch.tensor(planned(source, 0, 1)[0][:3])
        source.amend(0, 1, without=gone)
        assert [ids.tolist() for ids, _ in ahead] == planned(source, 0, 1)
        seen += [batch.ids.tolist() for batch in running]
        assert seen == planned(source)
        assert sorted(i for ids in seen for i in ids) == sorted(set(range(40)) - set(gone.tolist()))


def test_epochs_get_shorter_and_longer() -> None:
    source = BatchSource(arrays(40), 8, seed=0)
    source.keep(torch.arange(32))
    first = batches(source)
    running = source.epoch(0)
    next(running)
    assert source.amend(0, 1, without=torch.tensor(first[1] + first[2])) == 2
    assert len(list(running)) == 1
    running = source.epoch(1)
    for _ in range(4):
        next(running)
    assert source.amend(1, 4, adding=torch.arange(32, 40)) == 5
    assert sorted(next(running).ids.tolist()) == list(range(32, 40))
    assert list(running) == []


def test_a_sample_that_had_its_turn_gets_no_second_one() -> None:
    source = BatchSource(arrays(40), 8, seed=0)
    before = batches(source)
    here, later = torch.tensor(before[0][:2]), torch.tensor(before[3][:2])
    assert source.amend(0, 1, adding=torch.cat([here, later])) == 5
    assert batches(source) == before
    source.amend(0, 1, without=torch.cat([here, later]))
    source.amend(0, 1, adding=torch.cat([here, later]))  # discarded and restored within the epoch
    assert sorted(flat(source)) == list(range(40))
    assert batches(source)[0] == before[0]


def test_an_amendment_without_effect_leaves_the_plan() -> None:
    source = BatchSource(arrays(40), 8, seed=0)
    before, changes = batches(source), source.plans.changes
    assert source.amend(0, 2, without=torch.tensor(before[0])) == 5  # they all had their turn
    assert source.amend(0, 5) == 5
    assert (batches(source), source.plans.changes) == (before, changes)


def test_a_single_sample_is_not_left_for_the_last_batch() -> None:
    source = BatchSource(arrays(10), 4, seed=0)
    plan = batches(source)
    assert [len(ids) for ids in plan] == [4, 4, 2]
    assert source.amend(0, 2, without=torch.tensor(plan[2][:1])) == 2
    source = BatchSource(arrays(10), 4, seed=0)
    assert source.amend(0, 1, without=torch.tensor(plan[2][:1])) == 2
    assert [len(ids) for ids in batches(source)] == [4, 5]
    source = BatchSource(arrays(10), 1, seed=0)
    assert source.amend(0, 8, without=torch.tensor([flat(source)[9]])) == 9  # batches of one are what was asked for


def test_weighted_draws_are_made_up_for() -> None:
    sampler = WeightedRandomSampler([1.0] * 30, num_samples=100)
    source = BatchSource(DataLoader(Rows(30), batch_size=10, sampler=sampler), 1, seed=1)
    first = batches(source)
    source.keep(torch.arange(1, 30), after=0)
    assert source.amend(0, 3, without=torch.tensor([0])) == 10
    got = batches(source)
    assert got[:3] == first[:3]
    rest = [i for ids in got[3:] for i in ids]
    assert len(rest) == 70
    assert 0 not in rest
    assert Counter(rest) != Counter(i for ids in first[3:] for i in ids)
    alone = BatchSource(DataLoader(Rows(30), batch_size=10, sampler=sampler), 1, seed=1)
    alone.amend(0, 3, without=torch.arange(20))  # also without `keep` they do not come back
    assert len(flat(alone, 0, 3)) == 70
    assert min(flat(alone, 0, 3)) >= 20


@pytest.mark.parametrize("position", [-1, 6])
def test_a_position_outside_the_epoch_is_refused(position: int) -> None:
    source = BatchSource(arrays(40), 8, seed=0)
    with pytest.raises(DataError, match=rf"epoch 0 has 5 batches.*at position {position}"):
        source.amend(0, position, without=torch.tensor([1]))
    with pytest.raises(DataError, match="there is no sample 40"):
        source.amend(0, 0, adding=torch.tensor([40]))


# --- checkpoint -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: arrays(60), lambda: DataLoader(Rows(60), 8, sampler=Stateful(60))])
@pytest.mark.parametrize("amended", [False, True])
def test_going_on_from_a_saved_state_is_exact(make: Any, amended: bool, tmp_path: Any) -> None:
    source = BatchSource(make(), 8, seed=1)
    source.keep(some_of(60, 40))
    if amended:
        list(source.epoch(0))
        source.amend(1, 2, without=torch.tensor(planned(source, 1)[3]), adding=torch.arange(60))
    whole = planned(source, 1)
    source.keep(some_of(60, 30, seed=2), after=1)
    torch.save(source.state_dict(), tmp_path / "state.pt")
    resumed = BatchSource(make(), 8, seed=1)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert batches(resumed, 1, 2) == whole[2:]
    assert resumed.steps_in(1) == len(whole)
    assert resumed.steps_per_epoch == source.steps_per_epoch == 4
    assert sorted(flat(resumed, 2)) == sorted(some_of(60, 30, seed=2).tolist())


def test_a_state_of_other_data_is_refused() -> None:
    source = BatchSource(arrays(60), 8, seed=1)
    source.keep(torch.arange(30, 60))
    with pytest.raises(DataError, match="there is no sample 40"):
        BatchSource(arrays(40), 8, seed=1).load_state_dict(source.state_dict())


# --- somebody's own loop ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_for_ones_own_loop_follows_the_sieve(workers: int) -> None:
    sieve = Sieve(CirculantSieve(fraction=0.25, interval_epochs=1), 40, batch_size=5, seed=0)
    sampler = KeptSampler(sieve, seed=3)
    mine = DataLoader(Rows(40), 5, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)  # type: ignore[arg-type]
    orders = []
    for number in range(3):
        assert len(mine) == 6
        ids = torch.cat([x[:, 0] for x, _ in mine]).long()
        assert sorted(ids.tolist()) == sieve.kept_ids().tolist()
        orders.append(ids.tolist())
        sieve.observe(ids, correct=ids % 2 == 0, margin=ids.float())
        assert sieve.after_pass(steps_done=6 * (number + 1), planned_steps=600) is not None
    again = KeptSampler(Sieve(CirculantSieve(fraction=0.25), 40, batch_size=5, seed=0), seed=3)
    assert list(again) == orders[0]
    sampler.set_epoch(0)
    assert list(sampler) == list(KeptSampler(sieve, seed=3))


def test_a_sampler_follows_a_sieve_and_not_settings() -> None:
    with pytest.raises(InvalidSettingError, match=r"KeptSampler\.sieve must be a Sieve over the data set"):
        KeptSampler(CirculantSieve())  # type: ignore[arg-type]


# --- how much a sampler draws -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "reach"),
    [
        (SubsetRandomSampler(range(20)), 20),
        (SequentialSampler(range(30)), 30),  # type: ignore[arg-type]
        (RandomSampler(range(10)), 10),  # type: ignore[arg-type]
        (WeightedRandomSampler([1.0] * 15 + [0.0] * 25, 40), 15),
    ],
)
def test_a_sampler_over_a_part_of_the_data_cannot_be_sieved(sampler: Any, reach: int) -> None:
    source = BatchSource(DataLoader(Rows(40), batch_size=5, sampler=sampler), 1, seed=1)
    with pytest.raises(DataError, match=rf"{type(sampler).__name__} draws {reach} of 40 samples.*Subset"):
        source.check_can_be_sieved()


@pytest.mark.parametrize(
    "sampler",
    [
        None, SequentialSampler(range(41)), RandomSampler(range(41)),  # type: ignore[arg-type]
        RandomSampler(range(41), num_samples=20), SubsetRandomSampler(range(41)),  # type: ignore[arg-type]
        WeightedRandomSampler([0.5] * 41, 41), DistributedSampler(range(41), 2, 0), Stateful(41),  # type: ignore[arg-type]
    ],
)  # fmt: skip
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_others_can_and_their_steps_are_foreseen(sampler: Any, drop_last: bool) -> None:
    source = BatchSource(DataLoader(Rows(41), batch_size=5, sampler=sampler, drop_last=drop_last), 1, seed=1)
    source.check_can_be_sieved()
    for count in (41, 24):
        source.keep(some_of(41, count))
        expected = source.expected_steps(count)
        chance = isinstance(sampler, RandomSampler) and sampler.num_samples < 41  # so many of the kept as it happens
        assert abs(source.steps_per_epoch - expected) <= chance, count


@pytest.mark.parametrize("count", [60, 48, 17])
def test_steps_of_own_orders_are_foreseen(count: int) -> None:
    source = BatchSource(arrays(60), 8, seed=0)
    source.keep(some_of(60, count))
    assert source.expected_steps(count) == source.steps_per_epoch == len(batches(source))


# --- labels -------------------------------------------------------------------------------------------------


class Pairs(Dataset[Any]):
    """Samples (inputs, label) without an attribute that holds the labels."""

    def __init__(self, labels: list[Any]) -> None:
        self.hidden = labels

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return torch.rand(2), self.hidden[index]


def test_labels_are_found_through_subsets_and_concatenations() -> None:
    one, two = arrays(6), arrays(4)
    first, second = labels_of(one), labels_of(two)
    assert first is not None
    assert second is not None
    part = Subset(one, [5, 0, 3])
    assert torch.equal(labels_of(part), first[[5, 0, 3]])  # type: ignore[arg-type]
    assert torch.equal(labels_of(Subset(part, [2])), first[[3]])  # type: ignore[arg-type]
    both: ConcatDataset[Any] = ConcatDataset([two, part])
    assert torch.equal(labels_of(both), torch.cat([second, first[[5, 0, 3]]]))  # type: ignore[arg-type]
    assert labels_of(ConcatDataset([two, Pairs([1])])) is None


def test_labels_are_read_when_that_is_asked_for_and_no_generator_moves() -> None:
    data = Pairs([3, torch.tensor(1), 2])
    before = torch.get_rng_state()
    assert labels_of(data) is None
    assert labels_of(data, read=True).tolist() == [3, 1, 2]  # type: ignore[union-attr]
    assert labels_of(Subset(data, [2, 0]), read=True).tolist() == [2, 3]  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), before)
    for labels in ([1, 0.5], [True, False], [torch.tensor([1, 2])], ["a"]):
        assert labels_of(Pairs(labels), read=True) is None
