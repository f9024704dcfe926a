"""The queue rule with the papers' sizes, ranking, controls, class shares, samples by hand, and exact continuation."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from egeria_lab.algorithms.sieving.export import read_ids, write_kept
from egeria_lab.algorithms.sieving.groups import apportion, first_of_each
from egeria_lab.algorithms.sieving.membership import Membership
from egeria_lab.algorithms.sieving.settings import (
    CirculantSieve,
    LossSieve,
    ManualSieve,
    OneShotSieve,
    RandomSieve,
    SieveSettings,
)
from egeria_lab.algorithms.sieving.sieve import Sieve
from egeria_lab.algorithms.sieving.update import SieveUpdate
from egeria_lab.errors import DataError, InvalidSettingError

EVERY_PASS = {"interval_epochs": 1}
LONG = 10**6  # planned steps: no stop in sight


def sieve(settings: SieveSettings | None = None, samples: int = 100, *, seed: int = 0, **kwargs: Any) -> Sieve:
    settings = CirculantSieve(interval_epochs=1) if settings is None else settings
    return Sieve(settings, samples, batch_size=kwargs.pop("batch_size", 1), seed=seed, **kwargs)


def present(one: Sieve, *, correct: Tensor | None = None, margin: Tensor | None = None) -> None:
    """One pass over the kept samples; `correct` and `margin` are over all samples."""
    ids = one.kept_ids()
    right = torch.ones(one.num_samples, dtype=torch.bool) if correct is None else correct
    by = torch.zeros(one.num_samples) if margin is None else margin
    one.observe(ids, correct=right[ids], margin=by[ids], loss=torch.rand(len(ids), generator=torch.Generator()))


def swapped(one: Sieve, steps_done: int = 1) -> SieveUpdate:
    update = one.after_pass(steps_done=steps_done, planned_steps=LONG)
    assert update is not None
    return update


def partition(one: Sieve) -> None:
    """Every sample is in exactly one place."""
    parts = torch.cat([one.kept_ids(), one.removed_ids(), one.discarded_ids()])
    assert sorted(parts.tolist()) == list(range(one.num_samples))


# --- the queue --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "kept", "removed", "swap"),
    [(0.2, 40_000, 10_000, 8_000), (0.15, 42_500, 7_500, 6_375), (0.25, 37_500, 12_500, 9_375)],
)
@pytest.mark.parametrize("kind", [CirculantSieve, RandomSieve])
def test_the_papers_sizes(kind: Any, fraction: float, kept: int, removed: int, swap: int) -> None:
    one = sieve(kind(fraction=fraction, interval_epochs=5), 50_000, batch_size=128)
    assert (len(one.kept_ids()), len(one.removed_ids())) == (kept, removed)
    for number in range(1, 11):
        present(one)
        update = one.after_pass(steps_done=number, planned_steps=LONG)
        assert (update is not None) == (number % 5 == 0)
        if update is not None:
            assert len(update.removed) == len(update.returned) == swap
            assert (update.num_kept, update.num_removed) == (kept, removed)


def test_sizes_stay_over_50_updates_and_every_sample_is_used() -> None:
    generator = torch.Generator().manual_seed(7)
    one = sieve(CirculantSieve(fraction=0.25, interval_epochs=1), 400, batch_size=16)
    used, rounds = torch.zeros(400, dtype=torch.bool), 0
    for number in range(50):
        used[one.kept_ids()] = True
        rounds = rounds or (number if bool(used.all()) else 0)
        present(one, correct=torch.rand(400, generator=generator) < 0.7, margin=torch.randn(400, generator=generator))
        swapped(one, number)
        assert (len(one.kept_ids()), len(one.removed_ids())) == (300, 100)
        partition(one)
    assert rounds == 2  # 100 removed, 75 come back at a time


def test_the_queue_is_first_in_first_out_until_everything_was_taken_once_and_shuffled_after() -> None:
    one = sieve(CirculantSieve(fraction=0.2, interval_epochs=1), 100)
    queue = one.removed_ids().tolist()
    assert len(queue) == 20
    assert queue != sorted(queue)
    present(one)
    first = swapped(one)
    assert first.returned.tolist() == queue[:16]
    assert one.removed_ids().tolist() == queue[16:] + first.removed.tolist()
    present(one)
    second = swapped(one)
    assert second.returned.tolist() == queue[16:] + first.removed.tolist()[:12]
    unshuffled = first.removed.tolist()[12:] + second.removed.tolist()
    assert sorted(one.removed_ids().tolist()) == sorted(unshuffled)
    assert one.removed_ids().tolist() != unshuffled
    before = one.removed_ids().tolist()
    present(one)
    third = swapped(one)
    assert third.returned.tolist() == before[:16]  # the head is the head, also of a shuffled queue
    assert one.removed_ids().tolist() != before[16:] + third.removed.tolist()


def test_a_swap_never_takes_more_than_the_queue_has() -> None:
    one = sieve(CirculantSieve(fraction=0.2, interval_epochs=1), 100)
    one.discard(one.removed_ids()[:15])
    present(one)
    update = swapped(one)
    assert len(update.removed) == len(update.returned) == 5
    one.discard(one.removed_ids())
    present(one)
    assert one.after_pass(steps_done=2, planned_steps=LONG) is None
    assert len(one.kept_ids()) == 80


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("samples", [100, 101, 137])
def test_extreme_fractions(fraction: float, samples: int) -> None:
    one = sieve(CirculantSieve(fraction=fraction, interval_epochs=1), samples)
    kept = len(one.kept_ids())
    assert kept == samples - round(fraction * samples)
    for number in range(5):
        present(one)
        update = swapped(one, number)
        assert len(update.removed) == len(update.returned) >= 1
        assert len(one.kept_ids()) == kept
        partition(one)


# --- when -------------------------------------------------------------------------------------------------


def updates_at(one: Sieve, passes: int, planned: int, steps: int = 10) -> list[int]:
    found = []
    for number in range(1, passes + 1):
        present(one)
        if one.after_pass(steps_done=number * steps, planned_steps=planned) is not None:
            found.append(number)
    return found


@pytest.mark.parametrize(
    ("settings", "passes", "expected"),
    [
        (CirculantSieve(interval_epochs=5), 20, [5, 10, 15]),  # none at the very end: nobody would train on it
        (CirculantSieve(interval_epochs=5, stop_fraction=0.5), 20, [5]),
        (RandomSieve(interval_epochs=2, stop_fraction=0.75), 12, [2, 4, 6, 8]),
        (CirculantSieve(interval_steps=25), 10, [3, 6, 9]),  # the first end of a pass at or after the interval
        (CirculantSieve(), 160, list(range(5, 160, 5))),  # without an interval: the papers'
        (CirculantSieve(), 4, [1, 2, 3]),  # and each pass in a small budget
        (CirculantSieve(), 1, []),
        (OneShotSieve(at=0.5), 20, [10]),
        (OneShotSieve(at=0.51), 20, [11]),
        (OneShotSieve(at=0.5), 1, []),
        (LossSieve(full_after=1.0), 4, [1, 2, 3]),
        (LossSieve(), 8, [1, 2, 3, 4, 5, 6, 7]),
        (ManualSieve(), 8, []),
    ],
)
def test_when_it_happens(settings: SieveSettings, passes: int, expected: list[int]) -> None:
    assert updates_at(sieve(settings), passes, planned=passes * 10) == expected


def test_a_longer_plan_takes_the_swap_up_again() -> None:
    one = sieve(CirculantSieve(interval_epochs=2))
    assert updates_at(one, 2, planned=20) == []
    present(one)
    assert one.after_pass(steps_done=30, planned_steps=60) is not None


# --- ranking ----------------------------------------------------------------------------------------------


def test_the_easiest_go_first() -> None:
    """Sample i of the kept ones is forgotten i times; the last ten were never right."""
    one = sieve(CirculantSieve(fraction=0.5, interval_epochs=1), 80)
    kept = one.kept_ids()
    order = kept[torch.randperm(40, generator=torch.Generator().manual_seed(1))]
    for turn in range(30):
        for right in (True, False):
            forgets = torch.arange(40) >= turn
            correct = torch.where(forgets, torch.tensor(right), torch.tensor(True))
            correct[30:] = False
            one.observe(order, correct=correct, margin=torch.zeros(40))
    assert one.counts(order[:30]).events.tolist() == [min(i + 1, 30) for i in range(30)]
    update = swapped(one)
    assert update.removed.tolist() == order[:20].tolist()
    assert update.forgetting["never correct"] == 10
    assert update.forgetting["1"] == update.forgetting["30"] == 1


def test_ties_go_by_the_margin() -> None:
    one = sieve(CirculantSieve(fraction=0.2, interval_epochs=1), 100)
    margin = torch.randn(100, generator=torch.Generator().manual_seed(2))
    present(one, margin=margin)
    kept = one.kept_ids()
    expected = kept[margin[kept].argsort(descending=True)][:16]
    assert swapped(one).removed.tolist() == expected.tolist()


def test_events_count_more_than_margins() -> None:
    one = sieve(CirculantSieve(fraction=0.5, interval_epochs=1), 20)
    ids = one.kept_ids()
    right = torch.arange(10) < 5
    one.observe(ids, correct=torch.ones(10, dtype=torch.bool), margin=torch.zeros(10))
    one.observe(ids, correct=right, margin=torch.where(right, -9.0, 9.0))
    assert set(swapped(one).removed.tolist()) == set(ids[:5].tolist())


@pytest.mark.parametrize("ties", ["margin", "random"])
def test_what_is_left_of_ties_goes_by_the_generator_never_by_the_id(ties: str) -> None:
    chosen = torch.zeros(200)
    for seed in range(60):
        one = sieve(CirculantSieve(fraction=0.3, interval_epochs=1, ties=ties), 200, seed=seed)
        present(one)
        chosen[swapped(one).removed] += 1
    low, high = chosen[:100].sum(), chosen[100:].sum()
    assert low + high == 60 * 42
    assert abs(float(low - high)) < 200  # about 4 standard deviations; by the id it would be 2,520


def test_a_sample_that_was_not_presented_stays() -> None:
    """drop_last or a weighted sampler may pass it by; nothing says that it is easy."""
    one = sieve(CirculantSieve(fraction=0.2, interval_epochs=1), 100)
    ids = one.kept_ids()
    one.observe(ids[10:], correct=torch.zeros(70, dtype=torch.bool), margin=torch.zeros(70))  # all never correct
    update = swapped(one)
    assert not set(update.removed.tolist()) & set(ids[:10].tolist())
    assert update.forgetting == {"never correct": 70, "not presented": 10}


def test_only_the_last_interval_counts() -> None:
    one = sieve(CirculantSieve(fraction=0.5, interval_epochs=1), 20)
    ids = one.kept_ids()
    hard = torch.zeros(20, dtype=torch.bool)
    hard[ids[:5]] = True
    for correct in (torch.ones(20).bool(), ~hard, torch.ones(20).bool()):
        one.observe(ids, correct=correct[ids], margin=torch.zeros(10))
    first = swapped(one)
    assert set(first.removed.tolist()) == set(ids[5:].tolist())
    present(one, margin=hard.float())  # now the once forgotten ones are the easiest
    assert set(swapped(one).removed.tolist()) == set(ids[:5].tolist())


# --- seeds ------------------------------------------------------------------------------------------------


def trace(settings: SieveSettings, seed: int) -> list[list[int]]:
    one = sieve(settings, 200, seed=seed)
    generator = torch.Generator().manual_seed(11)
    found = [one.kept_ids().tolist()]
    for number in range(6):
        ids = one.kept_ids()
        values = torch.randn(200, generator=generator)[ids]
        one.observe(ids, correct=values > 0, margin=values, loss=values.exp())
        one.after_pass(steps_done=number + 2, planned_steps=100)
        found += [one.kept_ids().tolist(), one.removed_ids().tolist()]
    return found


@pytest.mark.parametrize(
    "settings",
    [
        CirculantSieve(fraction=0.9, interval_epochs=1), RandomSieve(fraction=0.9, interval_epochs=1),
        OneShotSieve(fraction=0.9, at=0.02), LossSieve(fraction=0.45),
    ],
)  # fmt: skip
def test_the_seed_decides_and_nothing_else(settings: SieveSettings) -> None:
    """traps row 75: 90 % left out, the same ids for the same seed."""
    first = trace(settings, 1)
    torch.manual_seed(99)
    assert trace(settings, 1) == first
    if not isinstance(settings, OneShotSieve):  # the margins decide it alone
        assert len({str(trace(settings, seed)) for seed in (1, 2, 3)}) == 3


# --- classes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CirculantSieve, RandomSieve])
def test_class_shares_stay(kind: Any) -> None:
    labels = torch.cat([torch.full((n,), c) for c, n in ((3, 500), (5, 300), (9, 100), (11, 7))])
    one = sieve(kind(fraction=0.2, class_shares=True, **EVERY_PASS), 907, labels=labels)
    shares = {3: 400, 5: 240, 9: 80, 11: 6}
    assert one.first_update is not None
    assert one.first_update.classes == shares
    assert one.first_update.removed_classes == {3: 100, 5: 60, 9: 20, 11: 1}
    used = torch.zeros(907, dtype=torch.bool)
    for number in range(12):
        used[one.kept_ids()] = True
        present(one, margin=labels.float())  # class 11 looks easiest
        update = swapped(one, number)
        assert update.classes == shares == dict(Counter(labels[one.kept_ids()].tolist()))
        assert update.removed_classes == update.returned_classes
        assert sum(update.removed_classes.values()) == round(0.2 * 726)
        partition(one)
    assert bool(used.all())


def test_without_class_shares_the_easiest_class_goes() -> None:
    labels = torch.arange(100) % 2
    one = sieve(CirculantSieve(fraction=0.2, interval_epochs=1), 100, labels=labels)
    present(one, margin=labels.float())
    assert swapped(one).removed_classes == {1: 16}


def test_one_shot_with_class_shares() -> None:
    labels = torch.tensor([0] * 60 + [1] * 40)
    one = sieve(OneShotSieve(fraction=0.25, at=0.1, class_shares=True), 100, labels=labels)
    present(one, margin=labels.float())
    update = one.after_pass(steps_done=5, planned_steps=10)
    assert update is not None
    assert update.removed_classes == {0: 15, 1: 10}


def test_class_shares_need_labels() -> None:
    with pytest.raises(InvalidSettingError, match="class_shares=True needs the label of every training sample"):
        sieve(CirculantSieve(class_shares=True))
    for labels in (torch.zeros(99).long(), torch.zeros(100), [[0]] * 100):
        with pytest.raises(DataError, match="labels must be one whole number for each of 100 samples"):
            sieve(CirculantSieve(class_shares=True), labels=labels)


@pytest.mark.parametrize("seed", range(20))
def test_apportion_is_exact_and_within_limits(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 50, (7,), generator=generator)
    limits = torch.randint(0, 30, (7,), generator=generator)
    total = int(torch.randint(0, int(limits.sum()) + 1, (1,), generator=generator))
    given = apportion(total, weights, limits)
    assert int(given.sum()) == total
    assert bool((given <= limits).all())
    plain = apportion(min(total, int(weights.sum())), weights)
    ideal = plain.sum() * weights / weights.sum()
    assert bool(((plain - ideal).abs() < 1).all())


def test_first_of_each() -> None:
    groups = torch.tensor([2, 0, 2, 1, 0, 2])
    assert first_of_each(groups, torch.tensor([1, 5, 2])).tolist() == [True, True, True, True, False, False]


# --- controls ---------------------------------------------------------------------------------------------


def test_the_random_control_does_not_look_at_what_was_learned() -> None:
    """traps row 76: of equal size, and blind."""
    kept = []
    for margin in (torch.arange(100.0), -torch.arange(100.0)):
        one = sieve(RandomSieve(**EVERY_PASS))  # type: ignore[arg-type]
        present(one, correct=margin > 0, margin=margin)
        assert len(swapped(one).removed) == 16
        kept.append(one.kept_ids().tolist())
    assert kept[0] == kept[1]
    blind = sieve(RandomSieve(**EVERY_PASS))  # type: ignore[arg-type]
    blind.observe(blind.kept_ids())
    assert swapped(blind).forgetting == {"0": 80}
    assert blind.kept_ids().tolist() == kept[0]


def test_one_shot_takes_the_least_forgotten_since_the_start_and_is_over() -> None:
    one = sieve(OneShotSieve(fraction=0.2, at=0.3), 100)
    assert len(one.kept_ids()) == 100
    easy = torch.arange(100) < 20
    for number, correct in enumerate((torch.ones(100).bool(), easy, torch.ones(100).bool()), start=1):
        present(one, correct=correct)
        update = one.after_pass(steps_done=number, planned_steps=10)
    assert update is not None
    assert sorted(update.removed.tolist()) == list(range(20))
    assert update.forgetting == {"0": 20, "1": 80}
    assert (update.num_kept, update.num_removed) == (80, 20)
    for number in range(4, 9):
        present(one)
        assert one.after_pass(steps_done=number, planned_steps=10) is None


def loss_sieve(losses: Tensor, fraction: float = 0.2, seed: int = 0, **kwargs: Any) -> Sieve:
    one = sieve(LossSieve(fraction=fraction, **kwargs), len(losses), seed=seed)
    one.observe(torch.arange(len(losses)), loss=losses)
    return one


def test_losses_below_the_mean_are_pruned_at_random_exactly_as_many_and_anew() -> None:
    losses = torch.cat([torch.rand(60, generator=torch.Generator().manual_seed(0)), torch.full((40,), 5.0)])
    one = loss_sieve(losses)
    assert len(one.kept_ids()) == 100  # no loss is known before the first pass
    assert one.weights(torch.arange(5)) is None
    seen = set()
    for number in range(1, 15):
        update = one.after_pass(steps_done=number, planned_steps=100)
        assert update is not None
        assert (update.num_kept, update.num_removed) == (80, 20)
        assert int(one.removed_ids().max()) < 60
        assert not set(update.returned.tolist()) & set(one.removed_ids().tolist())
        assert set(update.removed.tolist()) <= set(one.removed_ids().tolist())
        seen |= set(one.removed_ids().tolist())
        partition(one)
    assert len(seen) > 50  # not always the smallest


def test_weights_keep_the_expectation_of_the_gradient() -> None:
    generator = torch.Generator().manual_seed(5)
    losses = torch.rand(100, generator=generator).exp()
    gradients = 1 + torch.randn(100, 3, generator=generator).double()
    sums, unweighted = [], []
    for seed in range(400):
        one = loss_sieve(losses, seed=seed)
        one.after_pass(steps_done=1, planned_steps=100)
        kept = one.kept_ids()
        weights = one.weights(kept)
        assert weights is not None
        assert weights.dtype == torch.float32
        assert float(weights.sum()) == pytest.approx(100, abs=1e-3)
        assert float(weights.max()) <= 2
        sums.append((weights[:, None] * gradients[kept]).sum(0))
        unweighted.append(gradients[kept].sum(0))
    error = (torch.stack(sums).mean(0) - gradients.sum(0)).abs()
    spread = torch.stack(sums).std(0) / 400**0.5
    assert bool((error < 4 * spread).all())
    assert bool((torch.stack(unweighted).mean(0) - gradients.sum(0)).abs().max() > 10 * spread.max())


def test_samples_above_the_mean_keep_their_weight() -> None:
    losses = torch.cat([torch.zeros(60), torch.ones(40)])
    one = loss_sieve(losses)
    one.after_pass(steps_done=1, planned_steps=100)
    weights = one.weights(torch.arange(60, 100))
    assert weights is not None
    assert weights.tolist() == [1.0] * 40
    low = one.weights(one.kept_ids()[:5])
    assert low is not None
    assert low.tolist() == [1.5] * 5  # 60 samples, 40 survivors


@pytest.mark.parametrize("fraction", [0.2, 0.45, 0.8])
def test_the_count_is_exact_whatever_the_losses_are(fraction: float) -> None:
    for losses in (torch.ones(100), torch.cat([torch.full((98,), 9.0), torch.zeros(2)]), torch.arange(100.0)):
        one = loss_sieve(losses, fraction)
        one.after_pass(steps_done=1, planned_steps=100)
        assert len(one.removed_ids()) == round(100 * fraction)
        weights = one.weights(one.kept_ids())
        assert weights is not None
        assert float(weights.sum()) == pytest.approx(100, abs=1e-3)


def test_equal_losses_do_not_go_by_the_id() -> None:
    chosen = torch.zeros(100)
    for seed in range(100):
        one = loss_sieve(torch.ones(100), seed=seed)
        one.after_pass(steps_done=1, planned_steps=100)
        chosen[one.removed_ids()] += 1
    assert abs(float(chosen[:50].sum() - chosen[50:].sum())) < 200


def test_samples_of_unknown_loss_are_not_pruned() -> None:
    one = sieve(LossSieve(fraction=0.2), 100)
    one.observe(torch.arange(30), loss=torch.rand(30, generator=torch.Generator()))
    one.after_pass(steps_done=1, planned_steps=100)
    assert len(one.removed_ids()) == 15
    assert int(one.removed_ids().max()) < 30
    blank = sieve(LossSieve(fraction=0.2), 100)
    blank.after_pass(steps_done=1, planned_steps=100)
    assert len(blank.kept_ids()) == 100
    assert blank.weights(torch.arange(3)) is None


def test_the_last_part_of_training_is_on_everything() -> None:
    one = loss_sieve(torch.rand(100, generator=torch.Generator()))
    kinds = []
    for number in range(1, 9):
        update = one.after_pass(steps_done=number, planned_steps=8)
        kinds.append(None if update is None else (update.kind, update.num_kept))
    assert kinds == [("losses", 80)] * 6 + [("all", 100), None]
    assert one.weights(torch.arange(100)) is None
    never = loss_sieve(torch.rand(100, generator=torch.Generator()), full_after=1.0)
    assert [len(never.kept_ids()) for n in range(1, 8) if never.after_pass(steps_done=n, planned_steps=8)] == [80] * 7


# --- by hand ----------------------------------------------------------------------------------------------


def test_a_discarded_sample_never_comes_back_by_itself_and_the_size_stays() -> None:
    one = sieve(CirculantSieve(fraction=0.3, interval_epochs=1), 200)
    kept, queue = one.kept_ids(), one.removed_ids()
    update = one.discard([int(kept[3]), int(kept[0]), int(queue[1])])
    gone = {int(kept[3]), int(kept[0]), int(queue[1])}
    assert set(update.by_hand.tolist()) == gone
    assert set(update.removed.tolist()) == {int(kept[0]), int(kept[3])}
    assert update.returned.tolist() == [int(queue[0]), int(queue[2])]
    assert (update.num_kept, update.num_removed, update.num_discarded) == (140, 57, 3)
    assert update.reason == "3 samples discarded by hand, 2 from the head of the queue took their place"
    for number in range(30):
        present(one)
        update = swapped(one, number)
        assert not gone & {*one.kept_ids().tolist(), *one.removed_ids().tolist()}
        assert update.num_kept == 140
        partition(one)
    one.restore(sorted(gone))
    assert one.discarded_ids().tolist() == []


def test_restore_undoes_discard() -> None:
    one = sieve(CirculantSieve(fraction=0.3, interval_epochs=1), 200)
    kept, queue = one.kept_ids(), one.removed_ids()
    one.discard(kept[10:20])
    update = one.restore(kept[10:20])
    assert torch.equal(one.kept_ids(), kept)
    assert torch.equal(one.removed_ids(), queue)
    assert torch.equal(update.returned, kept[10:20])
    assert torch.equal(update.removed, queue[:10])
    one.discard(queue[5:6])
    one.restore(queue[5:6])
    assert one.removed_ids()[0] == queue[5]  # of the queue again, and next to come


def test_restoring_after_swaps_makes_room_for_the_sample_and_keeps_the_size() -> None:
    for seed in range(5):
        one = sieve(CirculantSieve(fraction=0.3, interval_epochs=1), 100, seed=seed)
        ids = one.kept_ids()[:12]
        one.discard(ids)
        for number in range(3):
            present(one, margin=torch.randn(100, generator=torch.Generator().manual_seed(number)))
            swapped(one, number)
        update = one.restore(ids)
        assert bool(torch.isin(ids, one.kept_ids()).all())
        assert len(update.removed) == len(set(update.removed.tolist())) == 12
        assert one.removed_ids()[:12].tolist() == update.removed.tolist()
        assert (len(one.kept_ids()), len(one.removed_ids())) == (70, 30)
        partition(one)


def test_what_made_room_comes_back_with_the_next_swap() -> None:
    one = sieve(CirculantSieve(fraction=0.3, interval_epochs=1), 100)
    for number in range(4):  # the first round is over: the queue is shuffled after each swap
        present(one)
        swapped(one, number)
    ids = one.kept_ids()[:3]
    one.discard(ids)
    room = one.restore(ids).removed
    present(one)
    assert set(room.tolist()) <= set(swapped(one).returned.tolist())


def test_what_made_room_comes_back_before_the_queue_is_shuffled_again() -> None:
    for seed in range(5):
        one = sieve(CirculantSieve(fraction=0.3, interval_epochs=1), 100, seed=seed)
        for number in range(4):
            present(one)
            swapped(one, number)
        ids = one.kept_ids()[:28]
        one.discard(ids)
        room = set(one.restore(ids).removed.tolist())  # more than the 21 of a swap
        for _ in range(2):
            present(one)
            room -= set(swapped(one).returned.tolist())
        assert not room


def test_one_stand_in_for_two_makes_room_once() -> None:
    members = Membership(6, torch.Generator().manual_seed(0), circulates=True)
    members.remove(torch.tensor([5]))
    members.discard(torch.tensor([0]))
    members.remove(torch.tensor([5]))
    members.discard(torch.tensor([1]))
    members.target = 4
    left, came = members.restore(torch.tensor([0, 1]))
    assert left[0] == 5
    assert int(left[1]) in (2, 3, 4)
    assert came.tolist() == [0, 1]
    assert (members.num_kept, members.queue.tolist()) == (4, left.tolist())


def test_with_an_empty_queue_the_set_shrinks_and_fills_up_again() -> None:
    one = sieve(CirculantSieve(fraction=0.1, interval_epochs=1), 50)
    ids = one.kept_ids()[:8]
    update = one.discard(ids)
    assert (update.num_kept, update.num_removed) == (42, 0)
    update = one.restore(ids)
    assert (update.num_kept, update.num_removed, update.num_discarded) == (45, 5, 0)
    partition(one)


def test_a_discarded_class_is_replaced_by_its_class() -> None:
    labels = torch.arange(200) % 4
    one = sieve(CirculantSieve(fraction=0.2, class_shares=True, interval_epochs=1), 200, labels=labels)
    ids = one.kept_ids()
    update = one.discard(ids[labels[ids] == 2][:6])
    assert update.returned_classes == {2: 6}
    assert update.classes == {0: 40, 1: 40, 2: 40, 3: 40}
    more = one.kept_ids()
    update = one.discard(more[labels[more] == 2][:9])  # only 4 of the class are left in the queue
    assert update.returned_classes[2] == 4
    assert update.num_kept == 160
    for number in range(3):
        present(one)
        assert swapped(one, number).num_kept == 160
        partition(one)


@pytest.mark.parametrize("settings", [None, ManualSieve(), LossSieve(), OneShotSieve()])
def test_without_a_queue_the_set_shrinks(settings: SieveSettings | None) -> None:
    one = Sieve(settings, 100, batch_size=10, seed=0)
    assert one.first_update is None
    update = one.discard([4, 2])
    assert (update.num_kept, update.returned.tolist()) == (98, [])
    assert update.reason == "2 samples discarded by hand"
    update = one.restore([4])
    assert (update.num_kept, update.returned.tolist(), update.removed.tolist()) == (99, [4], [])
    assert one.discarded_ids().tolist() == [2]


def test_discarded_samples_stay_away_from_the_loss_sieve_too() -> None:
    one = loss_sieve(torch.rand(100, generator=torch.Generator().manual_seed(1)))
    one.discard(range(10))
    for number in range(1, 12):
        update = one.after_pass(steps_done=number, planned_steps=12)
        assert not set(range(10)) & {*one.kept_ids().tolist(), *one.removed_ids().tolist()}
        assert update is None or update.num_kept == (72 if number / 12 < 0.875 else 90)
        partition(one)


@pytest.mark.parametrize("settings", [LossSieve(fraction=0.5), OneShotSieve(fraction=0.5, at=0.1)])
def test_after_discards_the_rule_still_leaves_a_batch(settings: SieveSettings) -> None:
    one = Sieve(settings, 100, batch_size=40, seed=0)
    one.discard(range(30))
    present(one)
    update = swapped(one, LONG // 2)
    assert (update.num_kept, update.num_removed, update.num_discarded) == (40, 30, 30)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.discard([3, 100]), "there is no sample 100; ids of this training set are 0 to 99"),
        (lambda s: s.discard([-1]), "there is no sample -1"),
        (lambda s: s.discard([]), "discard got no sample ids"),
        (lambda s: s.discard([1.5]), "must be whole numbers"),
        (lambda s: s.discard([True]), "must be whole numbers"),
        (lambda s: s.discard(torch.tensor(3)), "must be whole numbers in a list or a one-dimensional tensor, got 0-d"),
        (lambda s: s.discard([7, 8]), "samples 7 are discarded already, so nothing was changed"),
        (lambda s: s.restore([7, 8]), "samples 8 are not discarded, so nothing was changed"),
        (lambda s: s.restore([]), "restore got no sample ids"),
        (lambda s: s.discard([i for i in range(91) if i != 7]), r"leave 9 to train on, fewer than one batch of 10"),
        (lambda s: s.counts([1000]), "there is no sample 1000"),
    ],
)
def test_refusals_by_hand_change_nothing(call: Any, message: str) -> None:
    one = Sieve(None, 100, batch_size=10, seed=0)
    one.discard([7])
    with pytest.raises(DataError, match=message):
        call(one)
    assert len(one.kept_ids()) == 99
    assert one.discarded_ids().tolist() == [7]


def test_the_queue_counts_when_a_batch_has_to_be_left() -> None:
    one = Sieve(CirculantSieve(fraction=0.5), 100, batch_size=40, seed=0)
    kept, queue = one.kept_ids(), one.removed_ids()
    with pytest.raises(DataError, match="would leave 39 to train on"):
        one.discard(torch.cat([kept[:11], queue]))
    assert one.discard(kept).num_kept == 50  # the queue takes all the places
    partition(one)


# --- settings that change ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [False, True])
def test_a_new_fraction_holds_from_the_next_swap_on(shares: bool) -> None:
    labels = torch.arange(100) % 3
    one = sieve(CirculantSieve(fraction=0.2, interval_epochs=1, class_shares=shares), labels=labels)
    sizes = []
    for fraction in (0.2, 0.4, 0.1, 0.1):
        one.change(CirculantSieve(fraction=fraction, interval_epochs=1, class_shares=shares))
        present(one)
        update = swapped(one)
        sizes.append((update.num_kept, len(update.returned)))
        partition(one)
    assert sizes == [(80, 16), (60, 20), (90, 36), (90, 9)]


def test_a_change_is_checked() -> None:
    one = sieve(CirculantSieve(), batch_size=50)
    with pytest.raises(InvalidSettingError, match=r"fewer than one batch of 50; fraction can be at most 0\.5 here"):
        one.change(CirculantSieve(fraction=0.6))
    with pytest.raises(InvalidSettingError, match="cannot become a RandomSieve"):
        one.change(RandomSieve())
    with pytest.raises(InvalidSettingError, match="needs the label"):
        one.change(CirculantSieve(class_shares=True))
    assert one.settings == CirculantSieve()


# --- records, export, checkpoint --------------------------------------------------------------------------


def test_a_record_says_what_was_moved_and_why() -> None:
    """traps rows 77 and 84: composition, ids, count and reason; plain data all through."""
    one = sieve(CirculantSieve(fraction=0.2, interval_epochs=1), 100, labels=torch.arange(100) % 2)
    assert one.first_update is not None
    assert one.first_update.reason == "20 of 100 samples left out at random to begin with"
    assert one.first_update.removed.tolist() == one.removed_ids().tolist()
    before = set(one.kept_ids().tolist())
    present(one)
    update = swapped(one)
    record = json.loads(json.dumps(update.to_dict()))
    assert record["kind"] == "swap"
    assert set(record["removed"]) == before - set(one.kept_ids().tolist())
    assert set(record["returned"]) == set(one.kept_ids().tolist()) - before
    assert record["reason"] == "16 easiest of 80 kept samples exchanged for the 16 that waited longest"
    assert record["forgetting"] == {"0": 80}
    assert sum(record["classes"].values()) == record["num_kept"] == 80
    assert sum(record["removed_classes"].values()) == sum(record["returned_classes"].values()) == 16


def test_the_histogram_is_of_the_kept_samples() -> None:
    one = sieve(CirculantSieve(fraction=0.2, interval_epochs=9), 100)
    present(one)
    present(one, correct=torch.zeros(100, dtype=torch.bool))
    assert one.histogram() == {"1": 80}


def test_kept_samples_go_out_as_a_data_set_and_as_csv(tmp_path: Path) -> None:
    """traps row 72."""
    data = TensorDataset(torch.arange(100.0))
    one = sieve(CirculantSieve(fraction=0.2, interval_epochs=1), 100)
    present(one)
    swapped(one)
    subset = one.subset(data)
    assert isinstance(subset, Subset)
    assert [int(x[0]) for x in subset] == one.kept_ids().tolist()
    path = write_kept(one, tmp_path / "kept.csv")
    assert torch.equal(read_ids(path), one.kept_ids())
    assert path.read_text().splitlines()[0] == "id,forgetting_events,presentations,never_correct"
    ids = sorted(set(range(100)) - set(read_ids(path).tolist()))
    again = Sieve(None, 100, batch_size=1, seed=3)
    again.discard(ids)
    assert torch.equal(again.kept_ids(), one.kept_ids())


def test_export_is_checked(tmp_path: Path) -> None:
    one = sieve()
    with pytest.raises(DataError, match="over 100 samples, the data set has 99"):
        one.subset(TensorDataset(torch.zeros(99)))
    for text, message in (("number\n3\n", "no column named id"), ("id\n3.5\n", "else than whole numbers")):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            read_ids(tmp_path / "bad.csv")


@pytest.mark.parametrize(
    "settings",
    [
        CirculantSieve(fraction=0.3, interval_epochs=2, class_shares=True), RandomSieve(fraction=0.3, interval_steps=3),
        OneShotSieve(at=0.6), LossSieve(), None,
    ],
)  # fmt: skip
@pytest.mark.parametrize("stop", [0, 3, 7])
def test_going_on_from_a_saved_state_is_exact(settings: SieveSettings | None, stop: int, tmp_path: Path) -> None:
    labels = torch.arange(120) % 3

    def run(one: Sieve, first: int, last: int) -> list[Any]:
        found: list[Any] = []
        for number in range(first, last):
            generator = torch.Generator().manual_seed(number)
            for ids in one.kept_ids().split(30):
                values = torch.randn(len(ids), generator=generator)
                one.observe(ids, correct=values > 0, margin=values, loss=values.exp())
            if number in (1, 5):
                found.append(one.discard(one.kept_ids()[number : number + 4]).to_dict())
            if number == 6:
                found.append(one.restore(one.discarded_ids()[1:6]).to_dict())
            update = one.after_pass(steps_done=number + 1, planned_steps=12)
            found.append(None if update is None else update.to_dict())
            found += [one.kept_ids().tolist(), one.removed_ids().tolist(), one.histogram()]
            found.append(None if (w := one.weights(one.kept_ids())) is None else w.tolist())
        return found

    whole = run(Sieve(settings, 120, batch_size=10, seed=4, labels=labels), 0, 12)
    begun = Sieve(settings, 120, batch_size=10, seed=4, labels=labels)
    first = run(begun, 0, stop)
    torch.save(begun.state_dict(), tmp_path / "state.pt")
    run(begun, stop, 12)  # what goes on after a save does not reach into it
    resumed = Sieve(settings, 120, batch_size=10, seed=77, labels=labels)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert first + run(resumed, stop, 12) == whole


def test_a_state_of_something_else_is_refused() -> None:
    state = sieve().state_dict()
    with pytest.raises(DataError, match="of a CirculantSieve over 100 samples, this is a RandomSieve over 100"):
        sieve(RandomSieve()).load_state_dict(state)
    with pytest.raises(DataError, match="this is a CirculantSieve over 90"):
        sieve(samples=90).load_state_dict(state)


def test_what_is_handed_out_is_no_door_to_the_inside() -> None:
    one = sieve()
    one.kept_ids().zero_()
    one.removed_ids().zero_()
    partition(one)


def test_a_million_samples_are_exchanged_exactly() -> None:
    one = Sieve(CirculantSieve(interval_epochs=1), 10**6, batch_size=128, seed=0)
    ids = one.kept_ids()
    one.observe(ids, correct=ids % 3 > 0, margin=(ids % 1000).float())
    update = swapped(one)
    assert len(update.removed) == len(update.returned) == 160_000
    assert len(one.kept_ids()) == 800_000
