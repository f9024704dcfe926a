"""Arrays that charts draw: x axes, thinning, gaps, spans, marks."""

from __future__ import annotations

import numpy as np
import pytest

from egeria_lab.dashboard.series import curve, marks, reading_grid, spans, thin, x_of_steps
from egeria_lab.errors import UnknownNameError
from egeria_lab.events import LayerFrozen, LayerPinned, LayerThawed, LayerUnpinned
from egeria_lab.history import History


@pytest.fixture
def history() -> History:
    made = History(["layers.0"])
    for step in range(1, 5):
        made.steps.append(step=step, epoch=step / 2, samples=8 * step, train_flops=100, elapsed_seconds=0.5 * step)
    return made


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("steps", [0, 2, 4]),
        ("epochs", [0, 1, 2]),
        ("samples", [0, 16, 32]),
        ("flops", [0, 200, 400]),
        ("seconds", [0, 1, 2]),
    ],
)
def test_x_axes_have_their_own_unit(history: History, axis: str, expected: list[float]) -> None:
    assert x_of_steps(history, [0, 2, 4], axis).tolist() == expected


def test_unknown_x_axis_names_the_known_ones(history: History) -> None:
    with pytest.raises(UnknownNameError, match=r"'step'.*Did you mean 'steps'.*flops"):
        x_of_steps(history, [0], "step")


@pytest.mark.parametrize("length", [5, 1000, 1001, 1002, 1999, 54_321])
def test_thinning_keeps_ends_and_extremes_within_the_limit(length: int) -> None:
    y = np.random.default_rng(length).normal(size=length)
    kept = thin(y, 1000)
    assert len(kept) <= 1000
    assert (np.diff(kept) > 0).all()
    assert {0, length - 1, int(y.argmin()), int(y.argmax())} <= set(kept.tolist())


@pytest.mark.parametrize("num_groups", [1, 7, 400, 4000])
def test_a_line_never_crosses_a_refresh(num_groups: int) -> None:
    x = np.arange(20_000.0)
    groups = np.floor(x * num_groups / len(x))
    y = np.random.default_rng(0).uniform(size=len(x))
    drawn = curve(x, y, np.arange(len(x)), groups)
    assert len(drawn.x) <= 1000
    joined = (drawn.rows[:-1] >= 0) & (drawn.rows[1:] >= 0)
    of_group = drawn.column(groups)
    assert (of_group[:-1][joined] == of_group[1:][joined]).all()
    assert np.isnan(drawn.y).sum() == len(set(of_group[np.isfinite(of_group)])) - 1


def test_readings_that_are_not_numbers_are_left_out() -> None:
    drawn = curve(np.arange(3.0), np.array([1, np.nan, 3]), np.arange(3), np.zeros(3))
    assert drawn.rows.tolist() == [0, 2]


def test_spans_tell_rule_hand_and_pin_apart() -> None:
    log = [
        LayerFrozen(step=3, by="rule", layer="a", reason="quiet"),
        LayerFrozen(step=4, by="dashboard", layer="b"),
        LayerPinned(step=5, by="user", layer="c"),
        LayerThawed(step=6, by="user", layer="a"),
        LayerThawed(step=7, by="user", layer="never frozen"),
        LayerUnpinned(step=8, by="user", layer="c"),
        LayerFrozen(step=9, by="rule", layer="a"),
    ]
    found = [(s.layer, s.start, s.end, s.kind) for s in spans(log, 12)]
    assert found == [("a", 3, 6, "rule"), ("b", 4, 12, "hand"), ("c", 5, 8, "pin"), ("a", 9, 12, "rule")]
    assert [m.kind for m in marks(log)] == ["rule", "hand", "pin", "thaw", "thaw", "unpin", "rule"]


def test_the_picture_fills_holes_within_one_generation_only() -> None:
    steps = np.array([10.0, 20, 30, 40, 50])
    layer = np.array([0.0, 1, 0, 1, 0])
    values = np.array([1.0, 2, 3, 4, 5])
    generation = np.array([0.0, 0, 0, 0, 1])
    _, grid = reading_grid(steps, layer, values, generation, 3, 99)
    nan = np.nan
    np.testing.assert_equal(grid, [[1, 1, 3, nan, 5], [nan, 2, 2, 4, nan], [nan] * 5])


def test_the_picture_is_averaged_when_there_are_too_many_columns() -> None:
    steps, grid = reading_grid(np.arange(4.0), np.zeros(4), np.array([1.0, 3, 5, 7]), np.zeros(4), 1, 2)
    assert steps.tolist() == [0.5, 2.5]
    assert grid.tolist() == [[2, 6]]
