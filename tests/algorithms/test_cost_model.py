"""The published figures of the cost model on the papers' ResNet-32, and the arithmetic behind it on small models."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import egeria_lab as lab
from egeria_lab.algorithms.cost_model import (
    dense_weight_gradients,
    effective_densities,
    floor_share,
    layer_flops,
    layer_names,
    layer_roles,
    three_units,
    training_flops,
    weight_flops,
)
from egeria_lab.algorithms.costs import StepFlops, count_flops
from egeria_lab.algorithms.layers import layers
from egeria_lab.algorithms.planned_costs import PlannedCost
from egeria_lab.algorithms.products import parameter_flops
from egeria_lab.algorithms.run_costs import (
    Interval,
    RunFlops,
    combined_share,
    mean_density,
    plan_intervals,
    rigl_flops,
    run_flops,
)
from egeria_lab.errors import InvalidSettingError, UnknownNameError

SAMPLES, EPOCHS, STRIDE, FROZEN_BLOCKS = 50_000, 160, 5, 10


@pytest.fixture(scope="module")
def resnet32() -> tuple[StepFlops, tuple[str, ...]]:
    """The counted step, and the names of the sparse weights: the 3×3 convolutions of the blocks."""
    torch.manual_seed(0)
    model = lab.models.build("resnet32", input_shape=(3, 32, 32), num_classes=100, width=2, shortcut="conv", seed=0)
    x = torch.zeros(2, 3, 32, 32)
    step = count_flops(model, layers(model, x), lambda: model(x).sum(), 2)
    by_parameter = parameter_flops(model, lambda: model(x), 2)
    assert {name: flops for name, flops in by_parameter.items() if flops} == weight_flops(step)
    sparse = tuple(name for name in by_parameter if name.endswith(("conv1.weight", "conv2.weight")))
    assert len(sparse) == 30
    return step, sparse


Counted = tuple[StepFlops, tuple[str, ...]]


def freeze_times(names: tuple[str, ...], start: int) -> dict[str, float]:
    """Stem and first block at `start`, nine more blocks one every five epochs."""
    blocks = {name: start + STRIDE * index for index, name in enumerate(names[1 : FROZEN_BLOCKS + 1])}
    return {name: epoch / EPOCHS for name, epoch in {names[0]: start, **blocks}.items()}


# --- published figures -----------------------------------------------------------------------------------


def test_macs_of_resnet_32(resnet32: Counted) -> None:
    step, _ = resnet32
    assert sum(step.forward) / 2 == pytest.approx(2.756e8, rel=1e-3)
    assert sum(weight_flops(step).values()) == pytest.approx(sum(step.forward))


def test_flops_of_dense_training(resnet32: Counted) -> None:
    """In three whole units; counted, the first convolution has no input gradient: 0.1 % less."""
    step, _ = resnet32
    units = run_flops(three_units(step), [Interval(samples=SAMPLES * EPOCHS)])
    assert units.executed == pytest.approx(1.323e16, rel=2e-4)
    assert units.executed == pytest.approx(SAMPLES * EPOCHS * 3 * sum(step.forward))
    assert units.saved == 0
    counted = run_flops(step, [Interval(samples=SAMPLES * EPOCHS)])
    assert counted.executed == pytest.approx(units.executed - SAMPLES * EPOCHS * step.forward[0])
    assert counted.executed == pytest.approx(1.323e16, rel=2e-3)


@pytest.mark.parametrize(("density", "ratio"), [(0.2, 0.2056), (0.1, 0.1064), (0.05, 0.0567)])
def test_true_ratio_of_uniform_sparsity(resnet32: Counted, density: float, ratio: float) -> None:
    """First convolution, 1×1 shortcuts and last linear layer are dense."""
    step, sparse = resnet32
    densities = dict.fromkeys(sparse, density)
    sparse_units, units = three_units(step, densities), three_units(step)
    assert training_flops(sparse_units) / training_flops(units) == pytest.approx(ratio, abs=5e-5)
    forward = sum(layer_flops(step, densities=densities).forward) / sum(step.forward)
    assert forward == pytest.approx(ratio, abs=5e-5)
    counted = sparse_units.total - step.forward[0]  # the first convolution's input gradient, which nobody computes
    assert training_flops(step, densities=densities) == pytest.approx(counted)


def test_share_of_the_frozen_blocks_and_ceiling(resnet32: Counted) -> None:
    """The papers' ceiling; counted exactly, the first trained block spares its input gradient as well."""
    step, _ = resnet32
    front = step.names[: FROZEN_BLOCKS + 1]
    assert sum(step.forward[: FROZEN_BLOCKS + 1]) / sum(step.forward) == pytest.approx(0.673, abs=5e-4)
    units = three_units(step)
    assert 1 - training_flops(units, frozen=front) / units.total == pytest.approx(0.449, abs=5e-4)
    entry = 2 * (64 * 128 * 9 * 8 * 8 + 64 * 128 * 8 * 8)  # input gradients of first convolution and shortcut
    assert step.total - training_flops(step, frozen=front) == pytest.approx(
        2 * sum(step.forward[: FROZEN_BLOCKS + 1]) - step.forward[0] + entry
    )


def test_paper_savings_at_published_starts(resnet32: Counted) -> None:
    """Freezing from epoch 67 (49) on saves 20 % (25 %) at 90 %, one epoch later does not; the rest of the table too."""
    step, sparse = resnet32
    densities = dict.fromkeys(sparse, 0.1)
    units = three_units(step, densities)
    for target, start in ((0.10, 102), (0.15, 85), (0.20, 67), (0.25, 49), (0.30, 31), (0.35, 14)):
        for epoch, met in ((start, True), (start + 1, False)):
            plan = plan_intervals(units, SAMPLES * EPOCHS, freeze_times=freeze_times(step.names, epoch))
            assert (run_flops(units, plan).saved_by_freezing >= target) == met, (target, epoch)


def test_paper_savings_under_the_soft_bound(resnet32: Counted) -> None:
    """With 0.15 / 0.125 / 0.10 counted, the starts are 94, 74, 57, 41, 25, 9; frozen blocks save what they would do."""
    step, sparse = resnet32
    units = StepFlops(step.forward, tuple(2 * flops for flops in step.forward), step.names)
    scales = [effective_densities(step, dict.fromkeys(sparse, d)) for d in (0.15, 0.125, 0.10)]
    phases = list(zip((90 / 160, 120 / 160, 1.0), scales, strict=True))
    for target, start in ((0.10, 94), (0.15, 74), (0.20, 57), (0.25, 41), (0.30, 25), (0.35, 9)):
        for epoch, met in ((start, True), (start + 1, False)):
            times = freeze_times(step.names, epoch)
            plan = plan_intervals(units, SAMPLES * EPOCHS, freeze_times=times, phases=phases)
            assert (run_flops(units, plan).saved_by_freezing >= target) == met, (target, epoch)


@pytest.mark.parametrize(("share", "left"), [(0.15, 0.7225), (0.20, 0.64), (0.25, 0.5625)])
def test_freezing_and_sieving_multiply(share: float, left: float) -> None:
    assert combined_share(share, share) == pytest.approx(left)
    step = StepFlops((1.0, 0.0), (2.0, 0.0), ("body", "head"))
    times = {"body": 1 - 1.5 * share}  # frozen for as long as it takes to save the share
    run = run_flops(step, plan_intervals(step, 1000, freeze_times=times, sieved=share))
    assert run.saved_by_freezing == pytest.approx(share)
    assert run.saved_by_sieving == pytest.approx(share)
    assert run.executed / run.dense == pytest.approx(left)


def test_mean_density_of_the_soft_bound(resnet32: Counted) -> None:
    """A third (at 95 %: two thirds) more work on the masked weights than at the target; the ledger counts it."""
    assert mean_density([(90, 0.15), (30, 0.125), (40, 0.10)]) == pytest.approx(0.133, abs=5e-4)
    assert mean_density([(90, 0.10), (30, 0.075), (40, 0.05)]) == pytest.approx(0.083, abs=5e-4)
    step, sparse = resnet32
    only_masked = sum(weight_flops(step)[name] for name in sparse)
    for levels, target, more in (((0.15, 0.125, 0.10), 0.10, 0.33), ((0.10, 0.075, 0.05), 0.05, 0.66)):
        phases = [(end, dict.fromkeys(sparse, d)) for end, d in zip((90 / 160, 120 / 160, 1.0), levels, strict=True)]
        run = run_flops(step, plan_intervals(step, 1.0, phases=phases, targets=dict.fromkeys(sparse, target)))
        assert run.soft_bound == pytest.approx(more * 3 * target * only_masked, rel=0.01)
        assert run.executed - run.soft_bound == pytest.approx(
            training_flops(step, densities=dict.fromkeys(sparse, target))
        )


def test_rigl_amortised(resnet32: Counted) -> None:
    """The formula in whole units, and the same overhead out of the counted products."""
    step, sparse = resnet32
    densities = dict.fromkeys(sparse, 0.1)
    units = three_units(step)
    scaled = effective_densities(step, densities)
    f_s, f_d = sum(three_units(step, densities).forward), sum(step.forward)
    run = run_flops(units, [Interval(samples=1, densities=scaled, dense_gradient_steps=100)])
    assert run.executed == pytest.approx(rigl_flops(f_s, f_d, 100))
    assert run.dense_gradients == pytest.approx((f_d - f_s) / 101)
    exact = run_flops(step, [Interval(samples=1, densities=densities, dense_gradient_steps=100)])
    assert exact.dense_gradients == pytest.approx((f_d - f_s) / 101)


def test_dense_gradients_that_were_counted_go_before_the_amortised_ones() -> None:
    step = StepFlops((10.0, 10.0), (20.0, 20.0), ("a", "b"))
    interval = Interval(samples=100, sieved=0.2, densities={"a": 0.1, "b": 0.5}, frozen=("a",), dense_gradient_steps=4)
    assert run_flops(step, [interval]).dense_gradients == pytest.approx(80 / 5 * 5)
    counted = run_flops(step, [replace(interval, dense_gradient_samples=32)])
    assert counted.dense_gradients == pytest.approx(32 * 5)
    without = run_flops(step, [replace(interval, dense_gradient_samples=0)])
    assert without.dense_gradients == 0
    assert counted.after_sparsity - without.after_sparsity == pytest.approx(32 * (9 + 5))
    assert counted.executed - without.executed == counted.after_freezing - without.after_freezing == 32 * 5


def test_a_planned_step_costs_what_the_run_counts(resnet32: Counted) -> None:
    """Under a soft bound a frozen block is at its target; the sum over steps is that of the intervals."""
    step, sparse = resnet32
    phases = [(0.5, dict.fromkeys(sparse, 0.15)), (1.0, dict.fromkeys(sparse, 0.1))]
    targets = dict.fromkeys(sparse, 0.1)
    front = step.names[:4]
    planned = PlannedCost(step, lambda p: phases[0][1] if p < 0.5 else phases[1][1], targets=targets)
    cost = sum(planned.of_step(front if i >= 4 else (), (i + 0.5) / 16) for i in range(16))
    intervals = plan_intervals(step, 16, freeze_times=dict.fromkeys(front, 0.25), phases=phases, targets=targets)
    assert cost == pytest.approx(run_flops(step, intervals).executed)
    assert planned.of_step(front, 0.3) < training_flops(step, densities=phases[0][1], frozen=front)
    assert planned(0.7) == list(effective_densities(step, phases[1][1]).values())


def test_a_planned_step_knows_which_dense_gradients_a_frozen_layer_spares() -> None:
    step = StepFlops((10.0, 10.0), (20.0, 20.0), ("a", "b"))
    planned = PlannedCost(step, lambda _p: {"a": 0.1, "b": 0.5}, dense_gradients_at=lambda p: float(p < 0.5))
    assert planned.of_step((), 0.2) - planned.of_step((), 0.7) == pytest.approx(9 + 5)
    assert planned.of_step(("a",), 0.2) - planned.of_step(("a",), 0.7) == pytest.approx(5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"densities": 0.5}, "densities must be a mapping"), ({"densities": [0.5]}, "densities must be a mapping"),
        ({"densities": 0}, "densities must be a mapping"), ({"frozen": "0"}, "frozen must be a list of layer names"),
        ({"frozen": ("0",), "cached": "0"}, "cached must be a list of layer names"),
    ],
)  # fmt: skip
def test_what_is_no_mapping_or_list_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    for step in (StepFlops((8.0, 2.0), (8.0, 4.0)), StepFlops((8.0, 2.0), (8.0, 4.0), ("0", "1"))):
        with pytest.raises(InvalidSettingError, match=message):
            training_flops(step, **settings)
    with pytest.raises(InvalidSettingError, match=r"step must be a StepFlops"):
        training_flops("mlp")  # type: ignore[arg-type]


# --- small models by hand --------------------------------------------------------------------------------

# Three linear layers: 4 → 8 → 6 → 2.
MACS = (32.0, 48.0, 12.0)


@pytest.fixture(scope="module")
def small() -> StepFlops:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(5, 4)
    return count_flops(model, layers(model, x), lambda: model(x).sum(), 5)


def by_hand(*macs: float) -> tuple[float, ...]:
    return tuple(2 * value for value in macs)


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        ({}, (32, 48, 12), (32, 96, 24)),
        ({"frozen": ["0"]}, (32, 48, 12), (0, 48, 24)),
        ({"frozen": ["2"]}, (32, 48, 12), (32, 48, 24)),
        ({"frozen": ["4"]}, (32, 48, 12), (32, 96, 12)),
        ({"frozen": ["0", "2"], "cached": ["0"]}, (0, 48, 12), (0, 0, 12)),
        ({"frozen": ["0", "2"], "cached": {"0": 0.5, "2": 0.25}}, (16, 36, 12), (0, 0, 12)),
        ({"densities": {"2.weight": 0.1}}, (32, 4.8, 12), (32, 9.6, 24)),
        ({"densities": {"2": 0.1}}, (32, 4.8, 12), (32, 9.6, 24)),
        ({"densities": {"0.weight": 0.5, "2.weight": 0.1}, "frozen": ["0"]}, (16, 4.8, 12), (0, 4.8, 24)),
        ({"densities": {"0.weight": 0.0}}, (0, 48, 12), (0, 96, 24)),
    ],
)
def test_frozen_cached_and_sparse_by_hand(
    small: StepFlops, settings: dict[str, Any], forward: tuple[float, ...], backward: tuple[float, ...]
) -> None:
    now = layer_flops(small, **settings)
    assert now.forward == pytest.approx(by_hand(*forward))
    assert now.backward == pytest.approx(by_hand(*backward))
    assert training_flops(small, **settings, sieved=0.2) == pytest.approx(0.8 * 2 * (sum(forward) + sum(backward)))


def test_densities_of_layers_follow_their_weights_by_flops() -> None:
    """One block, two convolutions on images of different size: 16 × 9 against 4 × 9 multiply-adds a weight."""
    first, second = (nn.Conv2d(1, 1, 3, padding=1, bias=False) for _ in range(2))
    block = nn.Sequential(first, nn.AvgPool2d(2), second)
    model = nn.Sequential(block, nn.Flatten(), nn.Linear(4, 2))
    x = torch.zeros(2, 1, 4, 4)
    found = layers(model, x, names=["0"])
    step = count_flops(model, found, lambda: model(x).sum(), 2)
    density = effective_densities(step, {"0.0.weight": 0.5, "0.2.weight": 0.25})
    assert density["0"] == pytest.approx((16 * 0.5 + 4 * 0.25) / 20)
    assert density[found.names[-1]] == 1.0


def test_products_without_a_weight_stay_dense() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 8), encoder, nn.Linear(8, 2))
    x = torch.randn(2, 5, 4)
    step = count_flops(model, layers(model, x), lambda: model(x).sum(), 2)
    nothing = layer_flops(step, densities=dict.fromkeys(weight_flops(step), 0.0))
    assert sum(nothing.forward) == 2 * 2 * 5 * 5 * 8  # scores and mixing
    assert sum(nothing.backward) == 2 * sum(nothing.forward)


def test_roles(small: StepFlops) -> None:
    assert layer_roles(small, ["0", "4"], ["0"]) == {"0": "cached", "2": "active", "4": "hole"}
    assert layer_roles(small, ["0", "2", "4"]) == {"0": "frozen", "2": "frozen", "4": "frozen"}


def test_the_floor_is_the_head_and_every_forward_pass(small: StepFlops) -> None:
    """traps row 12."""
    assert floor_share(small) == pytest.approx((32 + 48 + 12 + 12) / (92 + 152))
    sparse = floor_share(small, {"0.weight": 0.5})
    assert sparse == pytest.approx((16 + 48 + 12 + 12) / (16 * 2 + 48 * 3 + 12 * 3))
    assert floor_share(StepFlops((0.0,), (0.0,))) == 0


def test_a_step_made_by_hand_is_read_in_whole_units() -> None:
    step = StepFlops((10.0, 20.0, 5.0), (20.0, 40.0, 10.0))
    assert layer_names(step) == ("0", "1", "2")
    assert layer_flops(step, frozen=["0"]).backward == (0.0, 40.0, 10.0)
    assert layer_flops(step, frozen=["1"], densities={"1": 0.5}).backward == (20.0, 10.0, 10.0)
    assert dense_weight_gradients(step, {"0": 0.1, "1": 0.5}, ["0"]) == pytest.approx(10)


def test_dense_weight_gradients_of_trained_weights_only(small: StepFlops) -> None:
    densities = {"0.weight": 0.5, "2.weight": 0.25}
    assert dense_weight_gradients(small, densities) == pytest.approx(2 * (16 + 36))
    assert dense_weight_gradients(small, densities, ["0"]) == pytest.approx(2 * 36)


# --- whole runs ------------------------------------------------------------------------------------------


def test_a_run_by_hand(small: StepFlops) -> None:
    """100 presentations, 20 left out; half of the time dense, then the first layer sparse, then frozen and cached."""
    half = {"0.weight": 0.5}
    run = run_flops(
        small,
        [
            Interval(samples=50, sieved=0.2),
            Interval(samples=25, sieved=0.2, densities=half),
            Interval(samples=25, sieved=0.2, densities=half, frozen=("0",), cached=("0",)),
        ],
    )
    full = 2 * (92 + 152)
    sparse = full - 2 * 2 * 16
    frozen = sparse - 2 * 16 - 2 * 48
    assert (run.samples, run.trained_samples) == (100, pytest.approx(80))
    assert run.dense == pytest.approx(100 * full)
    assert run.after_sieving == pytest.approx(80 * full)
    assert run.after_sparsity == pytest.approx(40 * full + 40 * sparse)
    assert run.after_freezing == pytest.approx(40 * full + 20 * sparse + 20 * frozen)
    assert run.executed == pytest.approx(40 * full + 20 * sparse + 20 * (frozen - 2 * 16))
    left = (1 - run.saved_by_sieving) * (1 - run.saved_by_sparsity) * (1 - run.saved_by_freezing)
    assert left * (1 - run.saved_by_caching) == pytest.approx(1 - run.saved)


def test_steps_add_up_to_intervals(small: StepFlops) -> None:
    stepwise = RunFlops()
    settings: dict[str, Any] = {"frozen": ("0",), "densities": {"2.weight": 0.3}, "sieved": 0.25}
    for _ in range(10):
        stepwise.add(small, Interval(samples=12 / 0.75, **settings))
    whole = run_flops(small, [Interval(samples=160, **settings)])
    assert stepwise.trained_samples == pytest.approx(120)
    assert stepwise.to_dict() == pytest.approx(whole.to_dict())


def test_frozen_layers_are_pruned_to_their_target(small: StepFlops) -> None:
    """EM&S: a layer that freezes over budget would stay there for good."""
    plan = plan_intervals(
        small, 100, freeze_times={"0": 0.25, "2": 2.0}, targets={"0.weight": 0.1, "2.weight": 0.1},
        phases=[(0.5, {"0.weight": 0.15, "2.weight": 0.15}), (0.75, {"0.weight": 0.12, "2.weight": 0.12})],
    )  # fmt: skip
    assert [i.samples for i in plan] == [25, 25, 25, 25]
    assert [i.frozen for i in plan] == [(), ("0",), ("0",), ("0",)]
    assert [i.densities["0.weight"] for i in plan] == [0.15, 0.1, 0.1, 0.1]
    assert [i.densities["2.weight"] for i in plan] == [0.15, 0.15, 0.12, 0.12]
    run = run_flops(small, plan)
    assert run.soft_bound == pytest.approx(
        25 * 0.05 * 2 * (2 * 32 + 3 * 48) + 25 * 0.05 * 2 * 2 * 48 + 50 * 0.02 * 2 * 2 * 48
    )


def test_a_checkpoint_continues_exactly(small: StepFlops) -> None:
    run = run_flops(small, [Interval(samples=7.5, frozen=("0",), sieved=0.1)])
    again = RunFlops()
    again.load_state_dict(json.loads(json.dumps(run.state_dict())))
    assert again == run
    assert json.loads(json.dumps(run.to_dict()))["saved"] == run.saved


def test_an_empty_run_claims_nothing() -> None:
    run = RunFlops()
    assert run.saved == run.saved_by_sieving == run.saved_by_freezing == 0


# --- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"frozen": ["9"]}, UnknownNameError, "Unknown layer '9'"),
        ({"cached": ["9"]}, UnknownNameError, "Unknown layer '9'"),
        ({"densities": {"0.wieght": 0.1}}, UnknownNameError, "parameter '0.wieght'. Did you mean '0.weight'"),
        (
            {"densities": {"0.weight": 1.5}},
            InvalidSettingError,
            r"must be a share in \[0, 1\], got 1.5",
        ),
        ({"densities": {"0.weight": float("nan")}}, InvalidSettingError, "got nan"),
        ({"sieved": 1.0}, InvalidSettingError, "sieved must be the share of samples left out"),
        ({"sieved": -0.1}, InvalidSettingError, "got -0.1"),
        ({"cached": ["0"]}, InvalidSettingError, "cannot be cached"),
        ({"frozen": ["0", "4"], "cached": ["4"]}, InvalidSettingError, "here 0; freeze it and every layer before it"),
        ({"frozen": ["0"], "cached": {"0": 2.0}}, InvalidSettingError, r"cached.0 must be a share in \[0, 1\]"),
    ],
)
def test_bad_input_is_one_sentence(
    small: StepFlops, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        training_flops(small, **settings)


def test_bad_intervals_and_plans(small: StepFlops) -> None:
    for wrong in ({"samples": -1}, {"samples": 1, "sieved": 1.0}, {"samples": 1, "dense_gradient_steps": 0},
                  {"samples": 1, "dense_gradient_samples": -1}):  # fmt: skip
        with pytest.raises(InvalidSettingError, match="Interval"):
            Interval(**wrong)
    with pytest.raises(UnknownNameError, match="Unknown layer '9'"):
        plan_intervals(small, 1, freeze_times={"9": 0.5})
    with pytest.raises(InvalidSettingError, match="in order of time"):
        plan_intervals(small, 1, phases=[(0.5, {}), (0.25, {})])
    with pytest.raises(InvalidSettingError, match="how long > 0"):
        mean_density([])
    with pytest.raises(InvalidSettingError, match=r"interval must be a whole number >= 1, got 0\.5"):
        rigl_flops(1.0, 2.0, 0.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match="sieving must be a share"):
        combined_share(0.1, 1.0)
