"""The figures of the freezing suite are computed from the curves as its page says; one tiny run goes through."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from egeria_lab.benchmarks import freezing
from egeria_lab.benchmarks.freezing import WAYS, Task, compare
from egeria_lab.benchmarks.freezing_figures import OURS, PLAIN, Curve, goals_of, row_of
from egeria_lab.benchmarks.kept_parts import KeptParts

TINY = Task("mlp", "digits", 3, {"scheduler": "step"})


def curve(*points: tuple[float, float], saving: float = 0.0) -> Curve:
    return Curve([s for s, _ in points], [a for _, a in points], 1e9 * (1 - saving), 0)


def test_time_to_target_is_of_means_of_two_evaluations() -> None:
    lucky = curve((1.0, 50.0), (2.0, 90.0), (3.0, 60.0), (4.0, 90.0))
    assert lucky.smoothed() == [50.0, 70.0, 75.0, 75.0]
    assert lucky.seconds_to(75.0) == 3.0
    assert lucky.seconds_to(80.0) is None


def test_ratios_and_the_target_are_those_of_plain_training() -> None:
    plain = [curve((1.0, 70.0), (2.0, 80.0), (4.0, 80.0)), curve((1.0, 70.0), (2.0, 84.0), (4.0, 84.0))]
    fast = [curve((1.0, 80.0), (2.0, 82.0), saving=0.4), curve((1.0, 82.0), (2.0, 84.0), saving=0.6)]
    row = row_of("task", "fast", {PLAIN: plain, "fast": fast})
    assert row["same_budget_ratio"] == 2.0
    assert row["counted_saving"] == pytest.approx(0.5)
    assert row["measured_over_counted"] == pytest.approx(1.0)
    assert row["accuracy_percent"] == 82.0
    assert row["seeds_that_reached_the_target"] == 2  # the targets are 80 and 84, each less half of 2.83
    assert row["time_to_target_ratio"] == 3.0  # 4 s against 1 s, 4 s against 2 s


def test_one_seed_that_misses_its_own_target_leaves_no_ratio() -> None:
    plain = [curve((1.0, 70.0), (4.0, 80.0)), curve((1.0, 70.0), (4.0, 84.0))]
    low = [curve((1.0, 80.0), (2.0, 82.0)), curve((1.0, 70.0), (2.0, 78.0))]
    row = row_of("task", "low", {PLAIN: plain, "low": low})
    assert (row["seeds_that_reached_the_target"], row["time_to_target_ratio"]) == (1, None)


def test_a_way_is_held_against_the_highest_curve_of_a_peer_where_it_ends() -> None:
    found = {
        PLAIN: [curve((1.0, 70.0), (2.0, 80.0), (4.0, 90.0))],
        "plain, half the passes": [curve((1.0, 76.0), (2.0, 80.0))],
        "late": [curve((3.0, 99.0))],
        "plasticity": [curve((1.0, 99.0))],  # ours as well
        "everything": [curve((0.5, 75.0), (2.0, 76.0), saving=0.5)],
    }
    rows = {way: row_of("task", way, found) for way in found}
    row = rows["everything"]
    assert (row["best_peer_in_its_time"], row["best_peer_accuracy_percent"]) == ("plain, half the passes", 78.0)
    goals = {each["name"]: each for each in goals_of("task", rows)}
    behind = goals["task: everything, points below the best peer's curve"]
    assert (behind["value"], behind["met"]) == (78.0 - 75.5, False)
    assert rows["plasticity"]["best_peer_accuracy_percent"] == 76.0


def test_a_saving_that_the_clock_does_not_confirm_says_where_it_went() -> None:
    plain, slow = [curve((1.0, 70.0), (4.0, 80.0))], [curve((1.0, 70.0), (3.2, 80.0), saving=0.5)]
    slow[0].reading_share, slow[0].cache_seconds = 0.03, 0.32
    row = row_of("task", "slow", {PLAIN: plain, "slow": slow})
    assert row["measured_over_counted"] == pytest.approx(0.4)
    assert "readings 3.0% and the activation cache 10.0% of its time" in row["where_the_rest_went"]
    good = row_of("task", "good", {PLAIN: plain, "good": [curve((1.0, 70.0), (2.0, 80.0), saving=0.5)]})
    assert good["where_the_rest_went"] == ""


def test_what_nobody_counted_has_no_counted_saving() -> None:
    plain, other = [curve((1.0, 70.0), (4.0, 80.0))], [curve((1.0, 70.0), (3.0, 80.0), saving=math.nan)]
    row = row_of("task", "other", {PLAIN: plain, "other": other})
    assert (row["counted_saving"], row["measured_over_counted"]) == (None, None)
    assert row["measured_saving"] == 0.25


def test_goals_of_a_missed_target_are_not_met() -> None:
    plain = row_of("task", PLAIN, {PLAIN: [curve((1.0, 70.0), (4.0, 80.0))]})
    never = row_of(
        "task",
        "everything",
        {PLAIN: [curve((1.0, 70.0), (4.0, 80.0))], "everything": [curve((1.0, 10.0), (2.0, 12.0))]},
    )
    goals = {each["name"]: each for each in goals_of("task", {PLAIN: plain, "everything": never})}
    assert not goals["task: everything, same budget"]["met"]
    assert math.isnan(goals["task: everything, time to target"]["value"])
    assert not goals["task: everything, time to target"]["met"]
    assert not goals["task: everything, points lost against plain"]["met"]


def test_every_way_that_is_ours_is_one_that_is_trained() -> None:
    assert set(WAYS) >= OURS


@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_way_can_be_trained(way: str) -> None:
    curves = freezing.side_by_side(replace(TINY, epochs=4), [way], seed=0)
    assert len(curves[way].accuracies) >= 2
    assert curves[way].seconds == sorted(curves[way].seconds)
    assert curves[way].seconds[0] > 0


def test_ways_run_side_by_side_and_evaluations_are_not_counted() -> None:
    found = compare({"digits": TINY}, (PLAIN, "fixed list"), seeds=[0])
    rows = {row["way"]: row for row in found["rows"]}
    assert rows[PLAIN]["same_budget_ratio"] == 1.0
    assert rows[PLAIN]["counted_saving"] == 0.0
    assert 0.02 < rows["fixed list"]["counted_saving"] < 0.6
    assert found["plots"][0]["title"] == "digits: accuracy against time"
    assert rows["fixed list"]["frozen_layers_at_the_end"] == 2


def test_a_suite_that_was_stopped_goes_on_with_the_seeds_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = freezing.side_by_side
    trained: list[int | str] = []

    def stopped(task: Task, ways: Sequence[str], seed: int) -> dict[str, Curve]:
        if seed in trained:
            raise AssertionError(f"seed {seed} is trained twice")
        if seed == 1 and not trained.count("stopped"):
            trained.append("stopped")
            raise KeyboardInterrupt
        trained.append(seed)
        return train(task, ways, seed)

    monkeypatch.setattr(freezing, "side_by_side", stopped)
    with pytest.raises(KeyboardInterrupt):
        compare({"digits": TINY}, (PLAIN, "fixed list"), seeds=[0, 1], folder=tmp_path / "parts")
    found = compare({"digits": TINY}, (PLAIN, "fixed list"), seeds=[0, 1], folder=tmp_path / "parts")
    assert trained == [0, "stopped", 1]
    assert [row["seeds"] for row in found["rows"]] == [2, 2]
    assert not (tmp_path / "parts").exists()  # the next run measures anew


@pytest.mark.parametrize("other", [{"epochs": 2.0}, {"keywords": {"lr": 0.05}}])
def test_a_kept_seed_of_another_task_is_trained_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setattr(KeptParts, "clear", lambda self: None)
    whole = compare({"digits": TINY}, (PLAIN,), seeds=[0], folder=tmp_path)
    changed = compare({"digits": replace(TINY, **other)}, (PLAIN,), seeds=[0], folder=tmp_path)
    assert whole["rows"][0]["seconds"] != changed["rows"][0]["seconds"]


def test_a_broken_part_is_measured_anew(tmp_path: Path) -> None:
    kept = KeptParts(tmp_path, {"a": 1})
    kept.put("x", 2)
    assert kept.get("x") == 2
    (tmp_path / "x.json").write_text("{", encoding="utf-8")
    assert kept.get("x") is None
