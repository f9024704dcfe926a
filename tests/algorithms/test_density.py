"""Layer densities add up, ERK is solved and clipped, and counts are whole numbers that meet the total."""

from __future__ import annotations

import math

import pytest
import torch

from egeria_lab.algorithms.sparse.density import erk_densities, live_units, uniform_densities
from egeria_lab.errors import InvalidSettingError

SHAPES = {"a": (16, 16, 3, 3), "b": (32, 16, 3, 3), "c": (64, 64, 3, 3), "fc": (10, 64), "tiny": (4, 4, 1, 1)}


def total_density(shapes: dict[str, tuple[int, ...]], densities: dict[str, float]) -> float:
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return sum(densities[name] * size for name, size in sizes.items()) / sum(sizes.values())


def test_uniform_is_the_same_everywhere() -> None:
    assert set(uniform_densities(SHAPES, 0.3).values()) == {0.3}


@pytest.mark.parametrize("density", [0.01, 0.05, 0.1, 0.3, 0.6, 0.9, 1.0])
def test_erk_meets_the_total_and_no_layer_exceeds_one(density: float) -> None:
    densities = erk_densities(SHAPES, density)
    assert total_density(SHAPES, densities) == pytest.approx(density)
    assert all(0 < d <= 1 for d in densities.values())


def test_erk_is_proportional_to_sum_over_product_below_the_clip() -> None:
    densities = erk_densities(SHAPES, 0.05)
    free = [name for name in SHAPES if densities[name] < 1]
    ratios = {densities[name] / (sum(SHAPES[name]) / math.prod(SHAPES[name])) for name in free}
    assert len(free) >= 3
    assert max(ratios) == pytest.approx(min(ratios))


def test_erk_is_solved_again_after_each_clip() -> None:
    # By hand: a is 2 x 2 (4/4), b 10 x 10 (20/100), c 100 x 100 (200/10000); the budget is 0.05 · 10104 = 505.2.
    # With all three ε = 505.2/224 = 2.255: a is over, 501.2/220 = 2.278 for the rest: b 0.4556, c 0.04556.
    densities = erk_densities({"a": (2, 2), "b": (10, 10), "c": (100, 100)}, 0.05)
    assert densities == pytest.approx({"a": 1.0, "b": 0.455636, "c": 0.0455636}, rel=1e-5)


def test_erk_respects_the_cap_of_a_scheme() -> None:
    caps = dict.fromkeys(("a", "b", "c"), 4 / 9)
    densities = erk_densities(SHAPES, 0.3, caps)
    assert max(densities[name] for name in caps) <= 4 / 9 + 1e-12
    assert total_density(SHAPES, densities) == pytest.approx(0.3)


def test_what_no_scheme_can_hold_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidSettingError, match=r"a density of 0\.6 is more than .* \(0\.4444\); raise the sparsity"):
        erk_densities({"a": (8, 8, 3, 3)}, 0.6, {"a": 4 / 9})
    with pytest.raises(InvalidSettingError, match=r"a would have a density of 0\.6 .* at most 0\.4444; .* 0\.5556"):
        uniform_densities({"a": (8, 8, 3, 3)}, 0.6, {"a": 4 / 9})
    assert uniform_densities({"a": (8, 8, 3, 3)}, 0.6, {"a": 4 / 9}, clip=True) == {"a": 4 / 9}
    assert erk_densities({"a": (8, 8, 3, 3)}, 0.6, {"a": 4 / 9}, clip=True) == {"a": 4 / 9}


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_exact_to_one_unit_in_each_layer_and_in_total(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = {str(i): int(torch.randint(40, 5000, (), generator=generator)) * 4 for i in range(12)}
    density = float(torch.rand((), generator=generator)) * 0.9 + 0.05
    for unit in (1, 4):
        units = dict.fromkeys(sizes, unit)
        counts = live_units(sizes, units, dict.fromkeys(sizes, density))
        for name, size in sizes.items():
            assert abs(counts[name] * unit - density * size) < unit
        assert abs(sum(counts.values()) * unit - density * sum(sizes.values())) <= unit / 2 + 1e-6


def test_binary_fractions_are_read_as_written() -> None:
    assert 0.29 * 100 < 29
    assert live_units({"a": 100}, {"a": 1}, {"a": 0.29}) == {"a": 29}
    assert live_units({"a": 1000}, {"a": 1}, {"a": 1 - 0.9}) == {"a": 100}


def test_no_layer_loses_its_last_weight() -> None:
    sizes = {"large": 1000, "tiny": 4}
    assert live_units(sizes, {"large": 1, "tiny": 1}, {"large": 0.05, "tiny": 0.05}) == {"large": 50, "tiny": 1}
    assert live_units({"tiny": 16}, {"tiny": 4}, {"tiny": 0.05}) == {"tiny": 1}
