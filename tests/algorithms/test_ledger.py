"""The savings table: theoretical and measured apart, every zero with its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from egeria_lab.algorithms.costs import CostBook
from egeria_lab.algorithms.ledger import Ledger, LedgerLayer


def ledger(states: str, frozen_steps: int | None = None, **book: Any) -> Ledger:
    """A ledger over layers of equal cost; one letter a layer, "F" for frozen."""
    rows = tuple(
        LedgerLayer(
            name=f"layers.{i}", parameters=10, forward_flops=10.0, backward_flops=20.0,
            state="frozen" if letter == "F" else "active",
            frozen_steps=(5 if letter == "F" else 0) if frozen_steps is None else frozen_steps,
        )
        for i, letter in enumerate(states)
    )  # fmt: skip
    return Ledger(book=CostBook(**book), layers=rows, predicted_saved_bytes=600.0)


def test_nothing_frozen_says_so_three_times() -> None:
    why = ledger("aaa").why()
    assert set(why.values()) == {"no layer has been frozen yet"}


def test_a_frozen_prefix() -> None:
    why = ledger("FFa").why()
    assert why["flops"] == "2 of 3 layers frozen from the front skip their backward pass"
    assert why["memory"] == "the frozen front keeps nothing for backward (2 of 3 layers)"
    assert why["time"] == "too few steps with nothing frozen to compare with"


def test_a_hole_says_why_memory_did_not_fall() -> None:
    """traps row 69: '0 B: trainable layers lie before it'."""
    why = ledger("aFa").why()
    assert why["flops"].endswith("1 behind trainable layers save weight gradients only")
    assert why["memory"] == "0 B from freezing at the front: trainable layers lie before the frozen ones"
    both = ledger("FaFa").why()
    assert both["flops"].startswith("1 of 4 layers frozen from the front")
    assert both["flops"].endswith("1 behind trainable layers save weight gradients only")


def test_thawed_again() -> None:
    why = ledger("aaa", frozen_steps=3).why()
    assert why["flops"] == "layers were frozen for a while and are trained again"
    assert why["memory"] == "0 B now: no layer is frozen"


def test_the_floor_is_named() -> None:
    """traps row 12: all forward work and the head's backward remain whatever is frozen: (20 + 30) / 90."""
    assert ledger("FFa").always_active_share == pytest.approx(50 / 90)


def test_theoretical_and_measured_do_not_mix() -> None:
    """traps row 64."""
    book: dict[str, Any] = {
        "steps": 30, "executed_flops": 75.0, "full_flops": 100.0, "train_seconds": 8.0, "monitor_seconds": 2.0,
        "full_step_seconds": [1.0] * 10, "frozen_step_seconds": [0.5] * 20, "saved_bytes": 500,
        "full_saved_bytes": 1000,
    }  # fmt: skip
    made = ledger("FFa", **book)
    plain = json.loads(json.dumps(made.to_dict()))
    assert plain["flops"]["saved_fraction"] == 0.25
    assert plain["time"]["predicted_saved_fraction"] == 0.25
    assert plain["time"]["measured_saved_fraction"] == pytest.approx(1 / 3)
    assert plain["time"]["monitor_fraction"] == pytest.approx(0.2)
    assert plain["memory"]["saved_fraction"] == 0.5
    assert plain["memory"]["theoretical_saved_fraction"] == pytest.approx(0.4)
    assert [layer["state"] for layer in plain["layers"]] == ["frozen", "frozen", "active"]
    text, page = repr(made), made._repr_html_()
    for cell in ("theoretical", "measured", "25.0 %", "33.3 %", "50.0 %", "40.0 %", "-20.0 %", "cost of watching"):
        assert cell in text
        assert cell in page


def test_unknown_figures_are_dashes() -> None:
    made = ledger("FFa", steps=1)
    assert made.memory_saved_fraction is None
    assert made.memory_predicted_fraction is None
    assert "–" in repr(made)
    assert json.loads(json.dumps(made.to_dict()))["time"]["measured_saved_fraction"] is None
