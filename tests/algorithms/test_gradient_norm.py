"""AutoFreeze's rule by hand: sums of gradients, relative change, percentile, contiguous front."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from egeria_lab.algorithms.gradient_norm import (
    GradientNorm,
    GradientNormPolicy,
    percentile_of,
    relative_change,
)
from egeria_lab.errors import InvalidSettingError


def parameter(grad: float) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(1))
    made.grad = torch.tensor([float(grad)])
    return made


def policy_with(norms: list[list[float]], **settings: float) -> GradientNormPolicy:
    """A policy over layers a, b, … that has seen one interval for each row of gradient values."""
    names = "abcdef"[: len(norms[0])]
    parameters = {name: [parameter(0.0)] for name in names}
    policy = GradientNormPolicy(parameters, GradientNorm(**settings))  # type: ignore[arg-type]
    for row in norms[:-1]:
        _fill(parameters, row)
        policy.observe(())
        policy.evaluate(frozen=(), pinned=())
    _fill(parameters, norms[-1])
    policy.observe(())
    return policy


def _fill(parameters: dict[str, list[nn.Parameter]], row: list[float]) -> None:
    for (p,), value in zip(parameters.values(), row, strict=True):
        p.grad = torch.tensor([float(value)])


def test_layers_below_the_percentile_freeze_from_the_front() -> None:
    # changes at the third interval: a 1 %, b 2 %, c 50 %, head 90 %; the median of those is 26 %
    rows = [[1, 1, 1, 1], [1, 1, 1, 1], [1.01, 1.02, 1.5, 1.9]]
    policy = policy_with(rows)
    decisions = policy.evaluate(frozen=(), pinned=())
    assert [d.layer for d in decisions] == ["a", "b"]
    assert decisions[0].slope == pytest.approx(0.01, rel=1e-3)
    assert decisions[0].tolerance == pytest.approx(0.26, rel=1e-3)


def test_a_layer_that_still_changes_keeps_all_behind_it_active() -> None:
    policy = policy_with([[1, 1, 1, 1], [1, 1, 1, 1], [1.9, 1.01, 1.02, 1.5]])
    assert policy.evaluate(frozen=(), pinned=()) == []


def test_pins_caps_and_the_head() -> None:
    rows = [[1, 1, 1], [1, 1, 1], [1.01, 1.02, 1.03]]
    assert policy_with(rows).evaluate(frozen=(), pinned=("a",)) == []
    every = policy_with(rows, percentile=100).evaluate(frozen=(), pinned=())
    assert [d.layer for d in every] == ["a", "b"]
    capped = policy_with(rows, percentile=100, max_frozen=0.34).evaluate(frozen=(), pinned=())
    assert [d.layer for d in capped] == ["a"]


def test_nothing_freezes_during_warm_up() -> None:
    policy = policy_with([[1, 1], [1, 1]])
    assert policy.evaluate(frozen=(), pinned=()) == []


def test_gradients_are_summed_over_the_interval() -> None:
    p = parameter(3.0)
    policy = GradientNormPolicy({"a": [p], "head": [parameter(1.0)]}, GradientNorm())
    for _ in range(4):
        policy.observe(())
    policy.evaluate(frozen=(), pinned=())
    p.grad = torch.tensor([6.0])
    policy.observe(())
    policy.evaluate(frozen=(), pinned=())
    assert policy.changes["a"] == pytest.approx(0.5)  # |12 − 6| / 12


def test_small_functions() -> None:
    assert relative_change(0.0, 0.0) == 0.0
    assert relative_change(0.0, 1.0) == float("inf")
    assert percentile_of([3.0], 10) == 3.0
    assert percentile_of([4.0, 1.0], 25) == pytest.approx(1.75)


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval_steps": 0},
        {"interval_steps": 1.5},
        {"percentile": 0},
        {"percentile": None},
        {"warm_up": 1},
        {"max_frozen": "x"},
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidSettingError):
        GradientNorm(**wrong)  # type: ignore[arg-type]
