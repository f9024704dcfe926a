"""`egeria_lab.benchmarks.cache` on a model that trains in a moment."""

from __future__ import annotations

import json
import math

import pytest
import torch

from egeria_lab.benchmarks import cache


def test_the_suite_reports_figures_and_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "QUICK_CASES", (("mlp", 1),))
    monkeypatch.setattr(cache, "BATCH", 32)
    found = json.loads(json.dumps(cache.run(quick=True)))
    assert found["suite"] == "cache"
    (row,) = found["rows"]
    assert row["name"] == "mlp, 2 of 4 layers frozen, float32"
    assert row["bit_equal"] is True
    assert row["bytes_per_row"] % 4 == 0
    assert 0 < row["prefix_flops_share"] < 1
    times = [row[f"{way}_step_seconds"] for way in ("no_cache", "cold", "warm", "held_in_memory")]
    assert all(0 < seconds < 10 for seconds in times)
    goals = {each["name"]: each for each in found["goals"]}
    assert goals["bit_equal loss traces"]["met"] is True
    assert all(math.isfinite(each["value"]) for each in found["goals"])
    assert torch.get_num_threads() == 1
