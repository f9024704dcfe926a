"""Moving average, line fit, tuned tolerance and patience of one layer, by hand and against NumPy."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from egeria_lab.algorithms.plasticity import TUNING_FITS, PlasticityTrend, Reading, linear_slope


def feed(trend: PlasticityTrend, values: list[float], **settings: float) -> list[Reading]:
    chosen = {"window": 2, "patience": 2, "tolerance": 0.2, **settings}
    return [trend.update(value, **chosen) for value in values]  # type: ignore[arg-type]


def test_slope_by_hand() -> None:
    """(−1.5, −0.5, 0.5, 1.5) · (1, 2, 2, 5) = 6, and the squares of the centred positions add to 5: 1.2."""
    values = [1.0, 2.0, 2.0, 5.0]
    by_hand = (-1.5 * 1 - 0.5 * 2 + 0.5 * 2 + 1.5 * 5) / 5
    assert by_hand == pytest.approx(1.2)
    assert linear_slope(values) == pytest.approx(by_hand, rel=1e-15)
    assert linear_slope([3.0, 3.0, 3.0]) == 0.0
    assert linear_slope([5.0, 1.0]) == -4.0


@pytest.mark.parametrize("count", [2, 3, 10, 37])
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e6])
def test_slope_agrees_with_polyfit(count: int, scale: float) -> None:
    values = [scale * random.Random(count + i).uniform(-1, 1) for i in range(count)]
    expected = np.polyfit(np.arange(count, dtype=np.float64), np.array(values), 1)[0]
    assert linear_slope(values) == pytest.approx(float(expected), rel=1e-9, abs=scale * 1e-12)


def test_slope_keeps_precision_on_a_large_level() -> None:
    """A slope of 1e-9 on a level of 1: float32 would lose it (its steps there are 6e-8)."""
    assert linear_slope([1 + 1e-9 * i for i in range(10)]) == pytest.approx(1e-9, rel=1e-5)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_one_value_has_no_slope(values: list[float]) -> None:
    with pytest.raises(ValueError, match=rf"at least 2 values, got {len(values)}"):
        linear_slope(values)


def test_moving_average_by_hand() -> None:
    readings = feed(PlasticityTrend(), [3.0, 6.0, 9.0, 0.0], window=3)
    assert [r.smoothed for r in readings] == [3.0, 4.5, 6.0, 5.0]
    assert [r.value for r in readings] == [3.0, 6.0, 9.0, 0.0]


def test_slope_is_fitted_through_the_last_window_of_smoothed_values() -> None:
    readings = feed(PlasticityTrend(), [0.0, 2.0, 4.0, 6.0, 1.0], window=3)
    smoothed = [0.0, 1.0, 2.0, 4.0, 11 / 3]
    assert [r.smoothed for r in readings] == pytest.approx(smoothed)
    assert [r.slope for r in readings[:2]] == [None, None]
    for position in (2, 3, 4):
        slope = readings[position].slope
        assert slope == pytest.approx(abs(linear_slope(smoothed[position - 2 : position + 1])))


def test_a_falling_series_has_a_positive_slope() -> None:
    assert feed(PlasticityTrend(), [9.0, 4.0, 1.0])[-1].slope == pytest.approx(4.0)


def test_tolerance_is_a_share_of_the_mean_of_the_first_five_slopes() -> None:
    """Values 0, 1, 3, 6, 10, 15: smoothed 0, 0.5, 2, 4.5, 8, 12.5; slopes 0.5, 1.5, 2.5, 3.5, 4.5; mean 2.5."""
    assert TUNING_FITS == 5
    trend = PlasticityTrend()
    readings = feed(trend, [0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    assert [r.slope for r in readings] == [None, 0.5, 1.5, 2.5, 3.5, 4.5]
    assert [r.tolerance for r in readings[:5]] == [None] * 5
    assert readings[5].tolerance == pytest.approx(0.2 * 2.5)
    assert trend.scale == pytest.approx(2.5)
    later = feed(trend, [115.0, 115.0])
    assert [r.tolerance for r in later] == pytest.approx([0.5, 0.5])  # tuned once and for all


def test_verdicts_and_patience_counter() -> None:
    trend = PlasticityTrend()
    moving = feed(trend, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], tolerance=0.5)  # slopes 0.5, 1, 1, 1, 1; scale 0.9
    assert [r.verdict for r in moving] == ["warming up"] * 5 + ["moving"]
    still = feed(trend, [5.0, 5.0], tolerance=0.5)  # slopes 0.5 (not < 0.45) and 0
    assert [(r.verdict, r.stable) for r in still] == [("moving", 0), ("stable", 1)]
    jump = feed(trend, [8.0], tolerance=0.5)
    assert [(r.verdict, r.stable) for r in jump] == [("moving", 0)]  # the counter starts again
    rest = feed(trend, [8.0, 8.0, 8.0, 8.0], tolerance=0.5)
    assert [r.stable for r in rest] == [0, 1, 2, 3]
    assert [r.verdict for r in rest] == ["moving", "stable", "freeze", "freeze"]


def test_equal_to_the_tolerance_is_not_below_it() -> None:
    trend = PlasticityTrend()
    feed(trend, [float(i) for i in range(7)])
    trend.first_slopes[:] = [1.0] * 5
    assert feed(trend, [7.0], tolerance=1.0)[-1].verdict == "moving"
    assert feed(trend, [8.0], tolerance=1.0 + 1e-12)[-1].verdict == "stable"


def test_a_tolerance_of_zero_never_freezes() -> None:
    trend = PlasticityTrend()
    readings = feed(trend, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] + [5.0] * 20, tolerance=0.0)
    assert {r.verdict for r in readings} == {"warming up", "moving"}


def test_patience_one_freezes_at_the_first_stable_reading() -> None:
    readings = feed(PlasticityTrend(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0], patience=1)
    assert [r.verdict for r in readings[-2:]] == ["moving", "freeze"]


def test_restart_keeps_the_tolerance_and_mixes_no_readings() -> None:
    trend = PlasticityTrend()
    feed(trend, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0])
    scale, stable = trend.scale, trend.stable
    assert stable > 0
    trend.restart()
    assert (trend.scale, trend.stable) == (scale, 0)
    first, second = feed(trend, [100.0, 102.0])
    assert first.smoothed == 100.0  # not averaged with what was read against the old reference
    assert first.slope is None
    assert first.verdict == "warming up"
    assert second.slope == pytest.approx(1.0)
    assert second.tolerance == pytest.approx(0.2 * scale)  # type: ignore[operator]


def test_restart_in_the_middle_of_tuning_goes_on_tuning() -> None:
    trend = PlasticityTrend()
    feed(trend, [0.0, 1.0, 2.0])
    trend.restart()
    readings = feed(trend, [0.0, 2.0, 4.0, 6.0])
    assert len(trend.first_slopes) == 5
    assert readings[-1].tolerance == pytest.approx(0.2 * (0.5 + 1 + 1 + 2 + 2) / 5)


def test_a_window_changed_mid_run_takes_effect_at_once() -> None:
    trend = PlasticityTrend()
    feed(trend, [float(i) for i in range(8)], window=4)
    smaller = feed(trend, [8.0], window=2)[0]
    assert smaller.smoothed == 7.5
    assert len(trend.smoothed) == 2
    larger = feed(trend, [9.0], window=4)[0]
    assert larger.slope is None  # too few smoothed values for a fit over four
    assert all(a < b for a, b in pairwise(trend.smoothed))


def test_not_a_number_never_counts_as_stable() -> None:
    trend = PlasticityTrend()
    feed(trend, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    reading = feed(trend, [math.nan])[0]
    assert reading.stable == 0
    assert reading.verdict == "moving"
