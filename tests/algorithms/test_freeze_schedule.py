"""Schedules reproduce the published figures and the hand arithmetic behind them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import egeria_lab as lab
from egeria_lab.algorithms.freeze_schedule import (
    NEVER,
    Schedule,
    SchedulePolicy,
    freezeout_times,
    linear_times,
    single_shot_saving,
    solve_start,
)
from egeria_lab.errors import InvalidSettingError, UnknownNameError

TARGETS = (0.10, 0.15, 0.20, 0.25, 0.30, 0.35)


@pytest.fixture(scope="module")
def resnet32() -> tuple[list[float], list[float]]:
    """MACs of each of the 15 blocks (the stem counted with the first) plus the head: dense, and at 90 %."""
    model = lab.models.build("resnet32", input_shape=(3, 32, 32), num_classes=100, width=2, seed=0)
    macs = [0.0] * len(model.layers)
    sparse = [0.0] * len(model.layers)
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Conv2d, nn.Linear)):
            continue
        layer = int(name.split(".")[1])
        is_block_conv = isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3) and layer > 0

        def count(m: nn.Module, _i: object, out: torch.Tensor, layer: int = layer, s: bool = is_block_conv) -> None:
            own = m.weight.numel() * (out.shape[2] * out.shape[3] if isinstance(m, nn.Conv2d) else 1)
            macs[layer] += own
            sparse[layer] += own * (0.1 if s else 1.0)

        module.register_forward_hook(count)
    model(torch.zeros(2, 3, 32, 32))
    return [macs[0] + macs[1], *macs[2:]], [sparse[0] + sparse[1], *sparse[2:]]


def test_published_start_epochs_of_the_dense_network(resnet32: tuple[list[float], list[float]]) -> None:
    dense, _ = resnet32
    assert sum(dense) == pytest.approx(2.756e8, rel=1e-3)
    assert sum(dense[:10]) / sum(dense) == pytest.approx(0.673, abs=5e-4)
    assert [solve_start(dense, x, 5, 160, 10) for x in TARGETS] == [101, 84, 66, 48, 30, 12]


def test_published_start_epochs_at_90_percent_sparsity(resnet32: tuple[list[float], list[float]]) -> None:
    dense, sparse = resnet32
    assert sum(sparse) / sum(dense) == pytest.approx(0.1064, abs=1e-4)
    assert [solve_start(sparse, x, 5, 160, 10) for x in TARGETS] == [102, 85, 67, 49, 31, 14]


def test_ceiling_is_two_thirds_of_the_frozen_share(resnet32: tuple[list[float], list[float]]) -> None:
    dense, _ = resnet32
    assert 2 / 3 * sum(dense[:10]) / sum(dense) == pytest.approx(0.449, abs=5e-4)


def test_the_start_is_the_latest_that_meets_the_target() -> None:
    costs = [3.0, 2.0, 5.0]
    start = solve_start(costs, 0.1, 4, 60, 2)
    assert single_shot_saving(costs, start, 4, 60, 2) >= 0.1
    assert single_shot_saving(costs, start + 1, 4, 60, 2) < 0.1


def test_saving_by_hand() -> None:
    # block 1 frozen for 50 of 100 epochs, block 2 for 40: 2 × (1 × 50 + 2 × 40) / (3 × 4 × 100)
    assert single_shot_saving([1.0, 2.0, 1.0], 50, 10, 100, 2) == pytest.approx(260 / 1200)


def test_a_target_that_cannot_be_met_says_what_can() -> None:
    with pytest.raises(InvalidSettingError, match=r"at most 0\.\d+ with 1 of 2"):
        solve_start([1.0, 1.0], 0.9, 5, 100, 1)


def test_linear_and_cubic_times() -> None:
    assert linear_times(2, start=0.0, level=0.5) == [1.0, NEVER]
    times = freezeout_times(5, start=0.5)
    assert times[0] == pytest.approx(0.5)
    assert times[-1] == pytest.approx(1.0)
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == sorted(gaps)
    assert freezeout_times(1, 0.3) == [1.0]


def test_the_head_never_freezes_and_names_are_checked() -> None:
    times = Schedule(variant="freezeout", start=0.2).freeze_times(["a", "b", "head"], [1, 1, 1], 10, 5)
    assert times["head"] == NEVER
    assert pytest.approx(times["a"]) == 0.2
    assert times["a"] < times["b"] < 1
    with pytest.raises(UnknownNameError, match="head"):
        Schedule(variant="fixed", layers=("head",)).freeze_times(["a", "head"], [1, 1], 10, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"saving": 0.0}, {"saving": 1.0}, {"max_frozen": 0}, {"start": 1.0}, {"level": 0},
        {"variant": "cubic"}, {"variant": "fixed"}, {"interval_epochs": 0}, {"interval_epochs": 1, "interval_steps": 1},
        {"block_lr": "step"},
    ],
)  # fmt: skip
def test_bad_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((InvalidSettingError, UnknownNameError)):
        Schedule(**wrong)  # type: ignore[arg-type]


def test_policy_freezes_in_order_once_and_reports_a_pin_once() -> None:
    policy = SchedulePolicy({"a": 0.2, "b": 0.4, "head": NEVER})
    assert policy.due(0.1, frozen=(), pinned=()) == []
    assert [d.layer for d in policy.due(0.5, frozen=(), pinned=("b",))] == ["a", "b"]
    assert [d.action for d in policy.due(0.5, frozen=("a",), pinned=("b",))] == []
    assert [d.layer for d in policy.due(0.6, frozen=("a",), pinned=())] == ["b"]


def test_own_cosine_ends_at_the_freeze() -> None:
    policy = SchedulePolicy({"a": 0.5, "head": NEVER})
    assert policy.rate_factor("a", 0.5) == pytest.approx(0.0)
    assert policy.rate_factor("a", 0.25) == pytest.approx(0.5)
    assert policy.rate_factor("head", 0.5) == pytest.approx(0.5)


@pytest.mark.parametrize("wrong", [{"saving": "a"}, {"saving": None}, {"start": float("nan")}, {"interval_steps": "5"}])
def test_what_is_no_number_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidSettingError, match="Schedule"):
        Schedule(**wrong)  # type: ignore[arg-type]
