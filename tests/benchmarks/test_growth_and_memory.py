"""The figures of the suites `scale` and `memory` mean what they say."""

from __future__ import annotations

import pytest

from egeria_lab.benchmarks import memory, scale


def test_the_exponent_of_growth_is_1_for_what_is_linear() -> None:
    rows = [
        {"name": "a", "size": 10, "linear": 2.0, "flat": 5.0},
        {"name": "b", "size": 1000, "linear": 200.0, "flat": 5.0},
    ]
    assert scale._growth(rows) == {"linear": pytest.approx(1.0), "flat": pytest.approx(0.0)}


def test_history_and_samples_are_measured() -> None:
    assert set(scale._history(100)) == {"write_milliseconds", "read_newest_milliseconds"}
    assert set(scale._pass_by_samples(2000)) == {"exchange_milliseconds", "plan_milliseconds"}
    assert set(scale._added(3, 8, 1, steps=2)) == {
        "step_milliseconds", "added_milliseconds", "added_milliseconds_with_readings",
    }  # fmt: skip


def test_what_is_kept_for_backward_falls_with_the_frozen_front() -> None:
    kept = [row["kept_ratio"] for row in memory._peaks("resnet8")]
    assert kept[0] == 1.0 > kept[1] > kept[2] > 0
