"""The form of a suite's figures, the timing in turn, and the rank correlation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from egeria_lab.benchmarks import overhead
from egeria_lab.benchmarks.charts import as_svg, chart
from egeria_lab.benchmarks.harness import Timing, goal, interleave, result, write
from egeria_lab.benchmarks.reference import spearman
from egeria_lab.errors import InvalidSettingError


def test_functions_run_in_turn_and_the_order_turns() -> None:
    ran: list[str] = []
    time = iter(range(1000))

    def work(name: str) -> Callable[[], None]:
        return lambda: ran.append(name)

    timings = interleave({"a": work("a"), "b": work("b")}, rounds=3, clock=lambda: float(next(time)))
    assert ran == ["a", "b", "a", "b", "b", "a", "a", "b"]  # the first two are not counted
    assert timings["a"].seconds == timings["b"].seconds == (1.0, 1.0, 1.0)
    with pytest.raises(InvalidSettingError, match="rounds"):
        interleave({}, rounds=0)


def test_one_slow_moment_moves_no_ratio() -> None:
    slow, fast = Timing((2.0, 200.0, 2.0, 2.0)), Timing((1.0, 100.0, 1.0, 1.0))
    assert slow.ratio_to(fast) == 2.0
    assert fast.median_seconds == 1.0
    assert Timing((1.0, 2.0, 3.0, 4.0, 5.0)).spread_seconds == 2.0
    assert Timing((1.0,)).spread_seconds == 0.0


def test_goals_are_met_or_not() -> None:
    assert goal("a", 2.0, 2.0, ">=")["met"]
    assert not goal("a", 2.1, 2.0, "<=")["met"]
    assert not goal("a", float("nan"), 2.0, "<=")["met"]
    with pytest.raises(InvalidSettingError, match="sense"):
        goal("a", 1.0, 1.0, "<")


def test_written_figures_come_back_and_the_page_stands_alone(tmp_path: Path) -> None:
    found = result("demo", [{"name": "<b>", "seconds": 0.5}, {"name": "c", "bytes": 3}], [], [0, 1])
    as_json, as_page = write(found, tmp_path / "bench")
    assert json.loads(as_json.read_text()) == found
    assert set(found) == {"suite", "machine", "versions", "seeds", "rows", "goals", "plots"}
    text = as_page.read_text()
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "http" not in text


def test_plots_are_drawn_on_the_page_and_kept_as_numbers(tmp_path: Path) -> None:
    lines = {"a <i>": [(10.0, 1.0), (1000.0, 100.0)], "b": [(10.0, 0.0), (100.0, 7.0), (1000.0, float("nan"))]}
    plots = [chart("growth", "layers", "seconds", lines, log=True), chart("same", "layers", "seconds", lines)]
    found = result("demo", [{"name": "a"}], [], [0], plots)
    as_json, as_page = write(found, tmp_path)
    assert json.loads(as_json.read_text())["plots"][0]["lines"][1] == {"name": "b", "x": [100.0], "y": [7.0]}
    assert found["plots"][1]["lines"][1]["x"] == [10.0, 100.0]
    text = as_page.read_text()
    assert text.count("<figure>") == 2
    assert "<i>" not in text
    assert "a &lt;i&gt;" in text
    first, second = (part for part in text.split("<figure>")[1:])
    assert all(f"{end}<" in first for end in (">10", ">1,000"))  # of the axis, in the plot's own numbers
    assert ">0<" in second  # a plot that is not logarithmic begins at nothing
    nothing = chart("none", "x", "y", {"a": [(0.0, 0.0)]}, log=True)
    assert "nothing to draw" in as_svg(nothing)
    with pytest.raises(InvalidSettingError, match="lines"):
        chart("none", "x", "y", {})


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3, 4, 5], [5, 6, 7, 8, 7], 0.8207826816681233),  # a textbook case with one tie
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 1, 1], [1, 2, 3], 0.0),
    ],
)
def test_rank_correlation(a: list[float], b: list[float], expected: float) -> None:
    assert spearman(a, b) == pytest.approx(expected)


def test_the_range_of_a_ratio_holds_the_true_one_nineteen_times_in_twenty() -> None:
    draw = np.random.default_rng(0)
    for many in (40, 400):
        ones, held = Timing((1.0,) * many), 0
        for _ in range(400):
            noise = draw.lognormal(0.0, 0.3, many)  # its median is 1
            low, high = Timing(tuple(1.1 * noise)).ratio_range(ones)
            held += low <= 1.1 <= high
        assert 370 <= held <= 396, held
    assert Timing((1.0, 3.0, 2.0)).ratio_range(Timing((1.0,) * 3)) == (1.0, 3.0)


def test_the_overhead_suite_times_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "STEPS", 2)
    monkeypatch.setattr(overhead, "interleave", lambda ways, rounds: interleave(ways, rounds=1))
    threads = torch.get_num_threads()
    found = overhead.run()
    assert torch.get_num_threads() == threads
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [overhead.HAND, overhead.BARE, overhead.JOURNAL, overhead.FIVE, overhead.TWO]
    assert rows[overhead.HAND]["ratio_to_hand_written"] == 1.0
    assert rows[overhead.BARE]["ratio_to_session_without_rule"] == 1.0
    assert all(0.1 < row["ratio_to_hand_written"] < 10 for row in rows.values())
    assert [each["goal"] for each in found["goals"]] == [1.02, 1.01, 1.05, 1.02]
