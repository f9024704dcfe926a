"""The solver reproduces the published start epochs, and its meter the hand arithmetic behind them."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch import nn

import egeria_lab as lab
from egeria_lab.algorithms.freeze_plans import Stints, cycles, single_shot
from egeria_lab.algorithms.schedule_solver import (
    SavingMeter,
    epoch_clocks,
    latest,
    layer_densities,
    solve_start,
    three_unit_costs,
)
from egeria_lab.errors import InvalidSettingError

TARGETS = (0.10, 0.15, 0.20, 0.25, 0.30, 0.35)


@pytest.fixture(scope="module")
def resnet32() -> tuple[list[float], list[float]]:
    """MACs of the 15 blocks (the stem counted with the first) and the head, and the share that is masked."""
    model = lab.models.build("resnet32", input_shape=(3, 32, 32), num_classes=100, width=2, seed=0)
    macs, masked = [0.0] * len(model.layers), [0.0] * len(model.layers)

    def counting(layer: int, is_masked: bool):  # type: ignore[no-untyped-def]
        def count(module: nn.Module, _inputs: object, out: torch.Tensor) -> None:
            own = module.weight.numel() * (out.shape[2] * out.shape[3] if isinstance(module, nn.Conv2d) else 1)
            macs[layer] += own
            masked[layer] += own * is_masked

        return count

    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            layer = int(name.split(".")[1])
            is_masked = isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3) and layer > 0
            module.register_forward_hook(counting(layer, is_masked))
    model(torch.zeros(2, 3, 32, 32))
    costs = [macs[0] + macs[1], *macs[2:]]
    return costs, [own / cost for own, cost in zip([masked[0] + masked[1], *masked[2:]], costs, strict=True)]


ResNet32 = tuple[list[float], list[float]]


def soft_bound_density(progress: float) -> float:
    """EM&S at 90 %: 0.15 until epoch 90 of 160, 0.125 until 120, then 0.10."""
    return 0.15 if progress < 90 / 160 else 0.125 if progress < 120 / 160 else 0.10


def test_published_start_epochs_of_the_dense_network(resnet32: ResNet32) -> None:
    costs, _ = resnet32
    assert sum(costs) == pytest.approx(2.756e8, rel=1e-3)
    assert sum(costs[:10]) / sum(costs) == pytest.approx(0.673, abs=5e-4)
    assert [solve_start(three_unit_costs(costs, 10), x, 5, 160) for x in TARGETS] == [101, 84, 66, 48, 30, 12]


def test_published_start_epochs_at_constant_density(resnet32: ResNet32) -> None:
    costs, shares = resnet32
    densities = layer_densities(shares, lambda _progress: 0.1)
    sparse = [cost * own for cost, own in zip(costs, densities(0.0), strict=True)]  # type: ignore[arg-type]
    assert sum(sparse) / sum(costs) == pytest.approx(0.1064, abs=1e-4)
    expected = [102, 85, 67, 49, 31, 14]
    assert [solve_start(three_unit_costs(sparse, 10), x, 5, 160) for x in TARGETS] == expected
    dense = three_unit_costs(costs, 10)
    assert [solve_start(dense, x, 5, 160, density_at=densities) for x in TARGETS] == expected


def test_published_start_epochs_when_the_density_falls(resnet32: ResNet32) -> None:
    costs, shares = resnet32
    densities = layer_densities(shares, soft_bound_density)
    starts = [solve_start(three_unit_costs(costs, 10), x, 5, 160, density_at=densities) for x in TARGETS]
    assert starts == [94, 74, 57, 41, 25, 9]


def test_the_published_ceiling(resnet32: ResNet32) -> None:
    costs, _ = resnet32
    meter = SavingMeter(three_unit_costs(costs, 10), 160)
    assert meter.saving([((0, 160),)] * 10) == pytest.approx(0.449, abs=5e-4)


# --- the meter ---------------------------------------------------------------------------------------------


def test_saving_by_hand() -> None:
    # block 1 frozen for 50 of 100 epochs, block 2 for 40: 2 × (1 × 50 + 2 × 40) / (3 × 4 × 100)
    meter = SavingMeter(three_unit_costs([1.0, 2.0, 1.0], 2), 100)
    assert meter.saving(single_shot(2, 50, 10, 100)) == pytest.approx(260 / 1200)


def test_counted_costs_need_not_be_of_three_units() -> None:
    # 10 a step; 7 with one block frozen, 3 with two: 3 × 10 + 7 × 20 of 1000
    meter = SavingMeter([10, 7, 3], 100)
    assert meter.saving([((70, 100),), ((80, 100),)]) == pytest.approx(170 / 1000)


def test_only_blocks_frozen_without_a_gap_from_the_front_count() -> None:
    meter = SavingMeter([10, 7, 3], 100)
    assert meter.saving([(), ((0, 100),)]) == 0
    assert meter.saving([((50, 60),), ((0, 100),)]) == pytest.approx(7 * 10 / 1000)


def test_times_beyond_the_training_save_nothing() -> None:
    meter = SavingMeter([10, 5], 100)
    assert meter.saving([((90, 1e9),)]) == pytest.approx(0.05)
    assert meter.saving([((100, 200),)]) == 0


def brute_force(costs: list[list[float]], weights: list[float], plan: list[Stints], density=None) -> float:  # type: ignore[no-untyped-def]
    """Step by step: what is spent with and without freezing."""
    full = spent = 0.0
    for step, weight in enumerate(weights):
        frozen = 0
        while frozen < len(plan) and any(a <= step < b for a, b in plan[frozen]):
            frozen += 1
        own = [1.0] * len(costs[0]) if density is None else density((step + 0.5) / len(weights))
        full += weight * sum(c * d for c, d in zip(costs[0], own, strict=True))
        spent += weight * sum(c * d for c, d in zip(costs[frozen], own, strict=True))
    return 1 - spent / full


@pytest.mark.parametrize("seed", range(5))
def test_the_meter_is_the_sum_over_steps(seed: int) -> None:
    draw = random.Random(seed)
    costs = three_unit_costs([draw.uniform(1, 9) for _ in range(4)], 3)
    plan = [tuple((a, a + draw.randint(1, 9)) for a in range(draw.randint(0, 9), 60, 12)) for _ in range(3)]
    assert SavingMeter(costs, 60).saving(plan) == pytest.approx(brute_force(costs, [1.0] * 60, plan))

    def density(progress: float) -> list[float]:
        return [1.0, 0.5 + progress / 2, 0.9 - progress / 2, 0.1]

    got = SavingMeter(costs, 60, density_at=density).saving(plan)
    assert got == pytest.approx(brute_force(costs, [1.0] * 60, plan, density))


@pytest.mark.parametrize("last", [0.1, 0.5, 1.0, 1.9])
def test_two_clocks_enclose_every_size_of_the_last_batch(last: float) -> None:
    costs = three_unit_costs([3.0, 2.0, 1.0], 2)
    weights = [last if step % 4 == 3 else 1.0 for step in range(22)]
    for start in range(1, 22):
        plans = [single_shot(2, start, 1, 22), single_shot(2, start, 1, 20), cycles(2, start, 5, 2, 22)]
        for plan in plans:
            bounds = [SavingMeter(costs, 22, work_at=clock).saving(plan) for clock in epoch_clocks(4)]
            assert min(bounds) - 1e-12 <= brute_force(costs, weights, plan) <= max(bounds) + 1e-12
            assert max(bounds) - min(bounds) < 2 / 22


def test_a_density_that_is_one_number_scales_everything() -> None:
    costs, plan = three_unit_costs([1.0, 1.0], 1), single_shot(1, 50, 1, 100)
    assert SavingMeter(costs, 100, density_at=lambda _p: 0.1).saving(plan) == pytest.approx(1 / 6)
    late = SavingMeter(costs, 100, density_at=lambda progress: 0.3 if progress < 0.5 else 0.1)
    assert late.saving(plan) == pytest.approx(1 / 12)  # half of the epochs, but a quarter of the FLOPs


def test_costs_may_be_functions_of_progress() -> None:
    """They know more than one density for all rows: here a frozen block is pruned too."""
    full, frozen = (lambda p: 3.0 if p < 0.5 else 2.0), (lambda _p: 0.5)
    meter = SavingMeter([full, frozen], 100)
    assert meter.saving([((40, 60),)]) == pytest.approx((10 * 2.5 + 10 * 1.5) / 250)
    assert solve_start([full, frozen], 0.3, 1, 100) == 50


def test_a_long_training_reads_its_density_a_few_thousand_times() -> None:
    read = []
    meter = SavingMeter([3.0, 1.0], 1_000_000, density_at=lambda progress: read.append(progress) or 1.0)  # type: ignore[func-returns-value]
    assert len(read) <= 10_000
    assert meter.saving([((500_000, 1_000_000),)]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("costs", "message"),
    [([], "at least one"), ([-1.0], "numbers >= 0"), ([float("nan")], "finite"), ([0.0, 0.0], "costs nothing")],
)
def test_costs_that_are_none_are_refused(costs: list[float], message: str) -> None:
    with pytest.raises(InvalidSettingError, match=message):
        SavingMeter(costs, 10)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="2 densities for costs of 3 layers"):
        SavingMeter(three_unit_costs([1.0, 1.0, 1.0], 1), 10, density_at=lambda _p: [1.0, 1.0])
    with pytest.raises(InvalidSettingError, match="2 blocks that freeze need 3 step costs"):
        SavingMeter([2.0, 1.0], 10).saving([(), ()])


# --- solving -----------------------------------------------------------------------------------------------


def test_the_start_is_the_latest_that_meets_the_target() -> None:
    costs = three_unit_costs([3.0, 2.0, 5.0], 2)
    start = solve_start(costs, 0.1, 4, 60)
    meter = SavingMeter(costs, 60)
    assert meter.saving(single_shot(2, start, 4, 60)) >= 0.1
    assert meter.saving(single_shot(2, start + 1, 4, 60)) < 0.1


def test_resuming_begins_earlier_by_as_much_as_it_trains_longer() -> None:
    costs = three_unit_costs([1.0, 1.0], 1)
    assert solve_start(costs, 0.1, 1, 100) - solve_start(costs, 0.1, 1, 100, until=80) == 20


def test_a_target_that_cannot_be_met_gives_a_ceiling_that_can() -> None:
    costs = three_unit_costs([1.0, 1.0, 1.3], 2)
    with pytest.raises(InvalidSettingError, match=r"saving=0.9 .* the ceiling is 0\.\d+, with 2 blocks") as caught:
        solve_start(costs, 0.9, 7, 100)
    ceiling = float(re.findall(r"ceiling is ([\d.]+),", str(caught.value))[0])
    assert solve_start(costs, ceiling, 7, 100) == 0
    with pytest.raises(InvalidSettingError):
        solve_start(costs, ceiling + 2e-4, 7, 100)


def test_latest_is_the_last_one_that_holds() -> None:
    assert latest(range(100), lambda x: 1 - x / 100, 0.25) == 75
    assert latest(range(5), lambda _x: 1.0, 0.5) == 4
    assert latest(range(5), lambda _x: 0.0, 0.5) is None
    assert latest([], lambda _x: 1.0, 0.5) is None
