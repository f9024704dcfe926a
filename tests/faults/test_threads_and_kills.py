"""Steering by chance from four threads, kills at random moments, a soak: ``egeria-lab bench faults``, but short."""

from __future__ import annotations

import json
from typing import Any

import pytest

from egeria_lab.benchmarks import faults, kills, soak, stress
from egeria_lab.benchmarks.suites import SUITES


def test_four_threads_lose_nothing_and_leave_nothing() -> None:
    found = stress.stress(6.0, seed=1)
    assert found["calls"] >= 100
    assert found["commands"] > 30
    assert 0 < found["rejected"] < found["commands"]
    assert {name: found[name] for name in faults.SHOULD_BE_ZERO} == dict.fromkeys(faults.SHOULD_BE_ZERO, 0)


def test_kills_lose_no_more_than_what_was_not_saved() -> None:
    found = kills.kill_again_and_again(4, seed=2)
    assert (found["kills"], found["exact"], found["half_files"], found["wrong_journals"]) == (4, 4, 0, 0)


def test_a_short_soak_tells_all_its_figures() -> None:
    found = soak.soak(120)
    assert found["steps"] >= 120
    assert found["journal_bytes_a_step"] > 0
    assert found["undo_bytes"] > 0
    assert found["step_time_ratio"] > 0


def test_a_line_of_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    leak = iter(range(10**6))
    monkeypatch.setattr(soak, "_resident_bytes", lambda: 1e8 + 4096.0 * 100 * next(leak))
    found = soak.soak(100)
    assert found["memory_slope_bytes"] == pytest.approx(4096.0 * 100 / 2 * soak.PER_STEPS, rel=1e-6)  # 2 steps a mark


def test_the_suite_reports_each_part_and_its_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, Any] = {}
    fine = dict.fromkeys(("exact", "kills"), 7) | dict.fromkeys(("half_files", "wrong_journals"), 0)
    monkeypatch.setattr(faults, "kill_again_and_again", lambda n: counts.update(kills=n) or fine)
    still = dict.fromkeys(faults.SHOULD_BE_ZERO, 0)
    monkeypatch.setattr(faults, "stress", lambda s: counts.update(seconds=s) or still)
    grown = {"memory_slope_bytes": 5e6, "record_slope_bytes": 4e6, "step_time_ratio": 1.5}
    monkeypatch.setattr(faults, "soak", lambda n: counts.update(steps=n) or grown)
    quick, full = SUITES["faults"][0](True), SUITES["faults"][0](False)
    assert counts == {"kills": 200, "seconds": 60.0, "steps": 100_000}
    assert all(each["met"] for each in quick["goals"])
    assert [each["name"] for each in full["goals"] if not each["met"]] == ["step time, last fifth to second fifth"]
    assert [row["name"] for row in json.loads(json.dumps(full))["rows"]] == ["kills", "four threads", "soak"]
