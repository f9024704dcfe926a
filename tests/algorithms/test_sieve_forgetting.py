"""Forgetting events by hand, margins, ids beyond every float, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from egeria_lab.algorithms.sieving.forgetting import (
    NEVER_CORRECT_RANK,
    NOT_PRESENTED_RANK,
    ForgettingLog,
    class_signals,
)
from egeria_lab.algorithms.sieving.settings import CirculantSieve, LossSieve
from egeria_lab.algorithms.sieving.sieve import Sieve
from egeria_lab.errors import DataError

# Presentations of six samples, 1 right, 0 wrong, by hand.
HISTORY = {
    0: [1, 1, 1, 1],  # 0 events
    1: [1, 0, 1, 0],  # 2 events
    2: [0, 0, 0, 0],  # never correct
    3: [0, 1, 0, 0],  # 1 event
    4: [0, 0, 1, 1],  # 0 events: learning is no forgetting
    5: [],  # not presented
}


def told(log: ForgettingLog, sample: int, right: list[int], margin: float = 1.0) -> None:
    for value in right:
        log.observe(torch.tensor([sample]), torch.tensor([bool(value)]), torch.tensor([margin]))


def example() -> ForgettingLog:
    log = ForgettingLog(6)
    for sample, right in HISTORY.items():
        told(log, sample, right)
    return log


def test_events_of_the_hand_example() -> None:
    counts = example().counts(torch.arange(6))
    assert counts.events.tolist() == counts.events_total.tolist() == [0, 2, 0, 1, 0, 0]
    assert counts.presentations.tolist() == [4, 4, 4, 4, 4, 0]
    assert counts.never_correct.tolist() == [False, False, True, False, False, False]


def test_hardness_and_histogram() -> None:
    log, ids = example(), torch.arange(6)
    assert log.hardness(ids).tolist() == [0, 2, NEVER_CORRECT_RANK, 1, 0, NOT_PRESENTED_RANK]
    assert log.hardness(ids, "ignored").tolist() == [0, 2, 0, 1, 0, NOT_PRESENTED_RANK]
    assert log.histogram(ids) == {"0": 2, "1": 1, "2": 1, "never correct": 1, "not presented": 1}
    assert log.histogram(ids[:2]) == {"0": 1, "2": 1}


def test_a_new_interval_counts_from_zero_and_a_fall_across_the_border_counts() -> None:
    log, ids = example(), torch.tensor([0, 1, 4])
    log.next_interval()
    assert log.counts(ids).events.tolist() == [0, 0, 0]
    assert log.counts(ids).events_total.tolist() == [0, 2, 0]
    log.observe(ids, torch.tensor([False, False, True]), torch.zeros(3))
    assert log.counts(ids).events.tolist() == [1, 0, 0]
    assert log.counts(ids).events_total.tolist() == [1, 2, 0]
    assert log.counts(ids).presentations.tolist() == [1, 1, 1]
    assert log.counts(ids).presentations_total.tolist() == [5, 5, 5]


def test_without_borders_the_fall_does_not_count() -> None:
    log = example()
    log.next_interval(across_borders=False)
    told(log, 0, [0, 1, 0])
    assert log.counts(torch.tensor([0])).events.tolist() == [1]


def test_never_correct_ever_and_in_the_interval() -> None:
    log = example()
    log.next_interval()
    told(log, 3, [0, 0])  # was right once, before
    told(log, 2, [0])
    told(log, 1, [1])
    ids = torch.tensor([1, 2, 3])
    assert log.hardness(ids, "ever").tolist() == [0, NEVER_CORRECT_RANK, 0]
    assert log.hardness(ids, "interval").tolist() == [0, NEVER_CORRECT_RANK, NEVER_CORRECT_RANK]
    told(log, 2, [1])
    assert log.hardness(ids, "interval").tolist() == [0, 0, NEVER_CORRECT_RANK]
    assert not bool(log.counts(ids).never_correct.any())


def test_a_sample_that_was_away_goes_on_from_its_last_presentation() -> None:
    log = ForgettingLog(1)
    told(log, 0, [1])
    log.next_interval()
    log.next_interval()
    told(log, 0, [0])
    assert log.counts(torch.tensor([0])).events.tolist() == [1]


def test_mean_margin_is_of_the_interval() -> None:
    log = ForgettingLog(2)
    for margin in (1.0, 2.0, 6.0):
        told(log, 0, [1], margin)
    assert log.mean_margin(torch.tensor([0, 1]))[0] == 3.0
    assert log.mean_margin(torch.tensor([0, 1]))[1].isnan()
    log.next_interval()
    told(log, 0, [1], -4.0)
    assert log.mean_margin(torch.tensor([0])).tolist() == [-4.0]


def test_margins_that_are_not_finite_do_not_spread() -> None:
    log = ForgettingLog(3)
    log.observe(torch.arange(3), torch.ones(3).bool(), torch.tensor([float("inf"), float("-inf"), float("nan")]))
    assert log.mean_margin(torch.arange(3)).tolist() == [1e6, -1e6, 0.0]


def test_a_sample_that_comes_twice_in_a_batch_was_presented_twice_in_its_order() -> None:
    log, one = ForgettingLog(5), ForgettingLog(5)
    ids = torch.tensor([3, 1, 3, 2, 3, 1])
    right = torch.tensor([True, False, False, True, True, True])
    margin = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    log.observe(ids, right, margin)
    for i in range(6):
        one.observe(ids[i : i + 1], right[i : i + 1], margin[i : i + 1])
    for name, value in one.state_dict().items():
        assert torch.equal(log.state_dict()[name], value), name
    assert log.counts(torch.tensor([3])).events.tolist() == [1]
    assert log.counts(torch.tensor([3])).presentations.tolist() == [3]
    assert log.mean_margin(torch.tensor([1, 3])).tolist() == [4.0, 3.0]


def test_counts_agree_with_a_plain_loop_over_random_batches() -> None:
    generator = torch.Generator().manual_seed(3)
    log, events, last = ForgettingLog(50), [0] * 50, [-1] * 50
    for _ in range(200):
        ids = torch.randint(50, (9,), generator=generator)
        right = torch.rand(9, generator=generator) < 0.5
        log.observe(ids, right, torch.zeros(9))
        for i, r in zip(ids.tolist(), right.tolist(), strict=True):
            events[i] += last[i] == 1 and not r
            last[i] = int(r)
    assert log.counts(torch.arange(50)).events.tolist() == events
    assert sum(events) > 100


# --- signals of a batch ----------------------------------------------------------------------------------


def test_signals_of_class_scores() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0], [1.0, 1.0, 0.0]])
    signals = class_signals(scores, torch.tensor([0, 2, 1]))
    assert signals.margin.tolist() == [1.0, -4.0, 0.0]
    assert signals.correct.tolist() == (scores.argmax(1) == torch.tensor([0, 2, 1])).tolist() == [True, False, False]
    probabilities = torch.eye(3)[torch.tensor([0, 2, 1])]
    assert class_signals(scores, probabilities).margin.tolist() == [1.0, -4.0, 0.0]


def test_signals_of_half_precision_scores() -> None:
    signals = class_signals(torch.tensor([[1.0, 2.0]], dtype=torch.float16, requires_grad=True), torch.tensor([1]))
    assert signals.margin.dtype == torch.float32
    assert not signals.margin.requires_grad


def test_signals_of_sequences_and_ignored_labels() -> None:
    scores = torch.tensor([[[2.0, 0.0], [0.0, 4.0]], [[2.0, 0.0], [3.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]]])
    scores = torch.cat([scores, torch.full((3, 2, 1), -9.0)], 2)
    labels = torch.tensor([[0, 1], [-100, 1], [-100, -100]])
    for outputs in (scores, scores.movedim(-1, 1)):
        signals = class_signals(outputs, labels)
        assert signals.correct.tolist() == [True, False, True]
        assert signals.margin.tolist() == [3.0, -3.0, 0.0]


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (torch.zeros(4, 1), torch.zeros(4, 1)),
        (torch.zeros(4, 1), torch.zeros(4).long()),
        (torch.zeros(4), torch.zeros(4)),
        (torch.zeros(4, 3), torch.zeros(4)),
        (torch.zeros(4, 3), torch.zeros(5).long()),
        ({"scores": 1}, torch.zeros(4)),
    ],
)
def test_outputs_that_are_no_class_scores_are_refused_with_the_reason(outputs: Any, targets: Any) -> None:
    with pytest.raises(DataError, match=r"needs class scores of shape \(samples, classes\).*use RandomSieve"):
        class_signals(outputs, targets)


# --- traps row 73: ids are never rounded ------------------------------------------------------------------


def test_ids_stay_whole_under_mixed_precision() -> None:
    """70,000 rows and float16 losses: the right samples get the scores."""
    before = DataLoader.__iter__, torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    sieve = Sieve(LossSieve(fraction=0.2), 70_000, batch_size=128, seed=0)
    ids = torch.tensor([2047, 2049, 65_503, 65_505, 69_999])
    sieve.observe(ids, loss=torch.arange(1.0, 6.0).half())
    assert sieve.losses is not None
    assert (~sieve.losses.losses.isnan()).nonzero().flatten().tolist() == ids.tolist()
    assert sieve.losses.losses[ids].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    sieve.after_pass(steps_done=1, planned_steps=10)
    assert (DataLoader.__iter__, torch.utils.data.dataloader._BaseDataLoaderIter.__next__) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_ids_beyond_what_a_float32_can_hold() -> None:
    """2**24 + 3 rows; a tiny kept set keeps the test quick."""
    rows = 2**24 + 3
    sieve = Sieve(CirculantSieve(fraction=0.9999, interval_epochs=1, ties="random"), rows, batch_size=100, seed=0)
    kept = sieve.kept_ids()
    assert kept.dtype == sieve.removed_ids().dtype == torch.int64
    last = torch.tensor([rows - 3, rows - 2, rows - 1])
    assert last.float().long().unique().numel() < 3  # what a float would make of them
    for correct in (True, False, False):
        sieve.observe(last, correct=torch.tensor([correct, correct, not correct]))
    sieve.observe(kept, correct=torch.ones(len(kept), dtype=torch.bool))
    assert sieve.counts(last).events.tolist() == [1, 1, 0]
    assert int(sieve.log.events.sum()) == 2
    update = sieve.after_pass(steps_done=1, planned_steps=100)
    assert update is not None
    everything = torch.cat([sieve.kept_ids(), sieve.removed_ids()])
    assert len(everything) == rows
    seen = torch.zeros(rows, dtype=torch.bool)
    seen[everything] = True
    assert bool(seen.all())


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32), torch.tensor([[1]]), [1]])
def test_other_ids_are_refused(ids: Any) -> None:
    sieve = Sieve(None, 5, batch_size=1, seed=0)
    with pytest.raises(DataError, match="one-dimensional int64 tensor, so that none is rounded"):
        sieve.observe(ids)


@pytest.mark.parametrize(
    ("settings", "signals", "message"),
    [
        (
            CirculantSieve(),
            {"margin": torch.zeros(2)},
            r"CirculantSieve needs `correct`.*model has to give class scores",
        ),
        (CirculantSieve(), {"correct": torch.ones(2).bool()}, "CirculantSieve needs `margin`"),
        (LossSieve(), {}, r"LossSieve needs `loss`.*reduction='none'"),
        (LossSieve(), {"loss": torch.tensor(0.5)}, r"`loss` must have one value a sample, got shape \(\) for ids"),
        (None, {"correct": torch.ones(3).bool()}, r"`correct` must have one value a sample, got shape \(3,\)"),
    ],
)
def test_missing_signals_are_named(settings: Any, signals: dict[str, Tensor], message: str) -> None:
    sieve = Sieve(settings, 10, batch_size=1, seed=0)
    with pytest.raises(DataError, match=message):
        sieve.observe(torch.tensor([0, 1]), **signals)


def test_a_log_of_a_million_takes_23_bytes_a_sample() -> None:
    log = ForgettingLog(10**6)
    assert sum(x.numel() * x.element_size() for x in log.state_dict().values()) == 23 * 10**6


# --- targets that are no classes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "targets",
    [
        torch.randn(6, 3, generator=torch.Generator().manual_seed(0)),  # to regress on, or to rebuild
        torch.tensor([[1.0, 1.0, 0.0]]).repeat(6, 1),  # several labels at once
        torch.zeros(6, 3),
        torch.full((6, 3), torch.nan),
        torch.tensor([[1.5, -0.5, 0.0]]).repeat(6, 1),
    ],
)
def test_float_targets_count_as_classes_only_when_they_are_probabilities(targets: torch.Tensor) -> None:
    with pytest.raises(DataError, match="use RandomSieve or LossSieve"):
        class_signals(torch.zeros(6, 3), targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_do(dtype: torch.dtype) -> None:
    smooth = torch.full((1, 10), 0.01).index_fill_(1, torch.tensor([4]), 0.91).to(dtype)
    assert class_signals(smooth, smooth).correct.tolist() == [True]


def test_a_sample_without_a_counted_label_is_never_wrong() -> None:
    labels = torch.tensor([-100, 0, -100, 1])
    found = class_signals(torch.tensor([[0.0, 1.0]] * 4), labels)
    assert found.correct.tolist() == [True, False, True, True]
    assert found.margin.tolist() == [0, -1, 0, 1]
    rows = class_signals(torch.zeros(2, 3, 5), torch.full((2, 3), -100))
    assert rows.correct.tolist() == [True, True]
