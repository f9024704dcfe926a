"""Distances between representations: values by hand, bounds, invariances, and the inputs that break naive code."""

from __future__ import annotations

import math

import pytest
import torch

from egeria_lab.algorithms.distances import (
    DISTANCES,
    cosine_distance,
    distance,
    linear_cka_distance,
    relative_l2_distance,
    sp_distance,
)
from egeria_lab.errors import InvalidSettingError, UnknownNameError


def random_pair(rows: int = 8, features: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(rows, features, generator=generator),
        torch.randn(rows, features, generator=generator),
    )


def test_sp_by_hand_divides_rows_by_their_l2_norm() -> None:
    """G = [[1, 1], [1, 2]] against G' = I.

    L2: rows (0.7071, 0.7071) and (0.4472, 0.8944); squares of the differences 0.0858 + 0.5 + 0.2 + 0.0111 = 0.7969,
    by b² = 4. L1 would give rows (0.5, 0.5) and (0.3333, 0.6667) and 0.1806.
    """
    a = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    b = torch.eye(2)
    half, fifth = 1 / math.sqrt(2), 1 / math.sqrt(5)
    by_hand = ((half - 1) ** 2 + half**2 + fifth**2 + (2 * fifth - 1) ** 2) / 4
    assert float(sp_distance(a, b)) == pytest.approx(by_hand, rel=1e-6)
    assert float(sp_distance(a, b)) == pytest.approx(0.199233, abs=1e-6)
    assert abs(float(sp_distance(a, b)) - 0.1806) > 0.01


@pytest.mark.parametrize("rows", [2, 3, 8, 33])
def test_sp_bounds_hold(rows: int) -> None:
    a, b = random_pair(rows)
    for x, y in ((a, b), (a, -b), (a.abs(), -b.abs()), (1e3 * a, 1e-3 * b)):
        assert 0 <= float(sp_distance(x, y)) <= 4 / rows
    assert 0 <= float(sp_distance(a.relu(), b.relu())) <= 2 / rows


def test_sp_upper_bound_is_approached_when_every_relation_flips() -> None:
    """Two samples are mirrored in one representation and equal in the other, far from their own norms.

    Row 0 of G is (1, c), of G' (1, -c): with one long sample, c grows without limit and the rows become
    opposite unit vectors for that sample, 4 each in the limit.
    """
    rows = 8
    a = torch.ones(rows, 1)
    a[0] = 1e4  # every other row of G is dominated by its product with sample 0
    b = a.clone()
    b[0] = -1e4
    value = float(sp_distance(a, b))
    # rows 1 … 7 flip completely (4 each); row 0 only compares with itself
    assert value == pytest.approx(4 * (rows - 1) / rows**2, rel=1e-3)
    assert value <= 4 / rows


def test_sp_relu_bound_is_reached_by_orthogonal_relations() -> None:
    """Long sample 0 is related to all others in one representation, and every sample to itself only in the other."""
    rows = 6
    a = torch.ones(rows, 1)
    a[0] = 1e4
    b = torch.eye(rows)
    value = float(sp_distance(a, b))
    assert value == pytest.approx(2 * (rows - 1) / rows**2, rel=1e-2)
    assert value <= 2 / rows


def test_sp_is_zero_for_itself_symmetric_and_takes_other_feature_counts() -> None:
    a, b = random_pair()
    assert float(sp_distance(a, a)) == 0.0
    assert torch.equal(sp_distance(a, b), sp_distance(b, a))
    padded = torch.cat([a, torch.zeros(8, 5)], dim=1)
    assert float(sp_distance(a, padded)) < 1e-12
    assert float(sp_distance(a.reshape(8, 3, 2, 2), b)) == float(sp_distance(a, b))


@pytest.mark.parametrize("factor", [1e-20, 1e-6, 3.0, 1e6, 1e18])
def test_sp_ignores_positive_scale(factor: float) -> None:
    a, b = random_pair()
    assert float(sp_distance(factor * a, b)) == pytest.approx(float(sp_distance(a, b)), rel=1e-4)


def test_sp_ignores_rotation_of_features() -> None:
    a, b = random_pair()
    rotation, _ = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(1)))
    assert float(sp_distance(a @ rotation, a)) < 1e-10
    assert float(sp_distance(a @ rotation, b)) == pytest.approx(float(sp_distance(a, b)), rel=1e-4)


@pytest.mark.parametrize("name", sorted(DISTANCES))
def test_zero_rows_give_no_nan(name: str) -> None:
    a, b = random_pair()
    a[0] = 0
    zero = torch.zeros_like(a)
    for x, y in ((a, b), (a, a), (zero, b), (a, zero), (zero, zero)):
        assert math.isfinite(float(DISTANCES[name](x, y))), (name, x[0, 0], y[0, 0])
    assert float(DISTANCES[name](zero, zero)) == 0.0


def test_sp_all_zero_against_identity_by_hand() -> None:
    """G = 0 against G' = I: b ones, by b²."""
    assert float(sp_distance(torch.zeros(4, 4), torch.eye(4))) == pytest.approx(1 / 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    """Sums of squares of 512 features of size 30 overflow float16; differences of 1e-6 vanish in bfloat16."""
    generator = torch.Generator().manual_seed(2)
    a = (30 * torch.randn(8, 512, generator=generator)).to(dtype)
    b = (a.float() * (1 + 0.02 * torch.randn(8, 512, generator=generator))).to(dtype)
    for measure in DISTANCES.values():
        result = measure(a, b)
        assert result.dtype == torch.float32
        assert torch.equal(result, measure(a.float(), b.float()))
        assert 0 < float(result) < 1


def test_float64_stays_float64() -> None:
    a, b = random_pair()
    assert sp_distance(a.double(), b.double()).dtype == torch.float64
    assert float(sp_distance(a.double(), b.double())) == pytest.approx(float(sp_distance(a, b)), rel=1e-5)


def test_small_distances_are_resolved() -> None:
    """Typical plasticity lies between 1e-4 and 1e-8; a change of 1e-4 in the activations must be seen."""
    a, _ = random_pair(64, 32)
    noise = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    small = float(sp_distance(a + 1e-3 * noise, a))
    smaller = float(sp_distance(a + 1e-4 * noise, a))
    exact = float(sp_distance((a + 1e-4 * noise).double(), a.double()))
    assert small / smaller == pytest.approx(100, rel=0.05)  # the distance is a square
    assert smaller == pytest.approx(exact, rel=1e-2)


def test_distances_leave_no_gradient_and_inputs_alone() -> None:
    a, b = random_pair()
    a.requires_grad_(True)
    before = a.detach().clone()
    assert not sp_distance(a, b).requires_grad
    assert torch.equal(a.detach(), before)
    assert a.grad is None


def test_cka_by_hand() -> None:
    """Two samples: centring leaves ±d/2, so any two non-constant representations of two samples agree."""
    a, b = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0, 5.0], [4.0, 1.0]])
    assert float(linear_cka_distance(a, b)) == pytest.approx(0, abs=1e-6)
    # three samples on one axis: centred x = (-1, 0, 1), y = (1, -2, 1), xᵀy = 0, so CKA = 0
    x, y = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[3.0], [0.0], [3.0]])
    assert float(linear_cka_distance(x, y)) == pytest.approx(1)
    # x = (-1, 0, 1), z = (-1, 2, -1) + (-2, 0, 2) = (-3, 2, 1): (xᵀz)² / (|x|²|z|²) = 16 / (2 × 14)
    z = torch.tensor([[-3.0], [2.0], [1.0]])
    assert float(linear_cka_distance(x, z)) == pytest.approx(1 - 16 / 28, rel=1e-6)


def test_cka_ignores_shift_scale_and_rotation_and_a_constant_is_far_from_a_spread() -> None:
    a, b = random_pair()
    rotation, _ = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(1)))
    assert float(linear_cka_distance(a, 5 * a @ rotation + 3)) == pytest.approx(0, abs=1e-5)
    assert 0 < float(linear_cka_distance(a, b)) < 1
    assert float(linear_cka_distance(torch.ones(4, 2), torch.ones(4, 3))) == 0
    assert float(linear_cka_distance(torch.ones(4, 1), torch.arange(4.0)[:, None])) == 1


def test_cosine_by_hand() -> None:
    a = torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 0.0]])
    b = torch.tensor([[0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]])
    by_hand = (1 + (1 - 1 / math.sqrt(2)) + 2) / 3
    assert float(cosine_distance(a, b)) == pytest.approx(by_hand, rel=1e-6)
    assert float(cosine_distance(torch.zeros(1, 2), torch.ones(1, 2))) == 1


def test_relative_l2_by_hand() -> None:
    """‖(3, 4) − (0, 0)‖ = 5 against ‖(6, 8)‖ = 10."""
    reference = torch.tensor([[6.0], [8.0]])
    assert float(relative_l2_distance(torch.tensor([[9.0], [12.0]]), reference)) == pytest.approx(0.5)
    assert float(relative_l2_distance(reference, torch.tensor([[3.0], [4.0]]))) == pytest.approx(1.0)


def test_one_feature_a_sample_and_one_sample_work() -> None:
    for measure in DISTANCES.values():
        assert math.isfinite(float(measure(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]))))
        assert math.isfinite(float(measure(torch.ones(1, 3), torch.ones(1, 3))))


def test_bad_input_is_named() -> None:
    a, b = random_pair()
    with pytest.raises(InvalidSettingError, match=r"got 8 and 7 rows"):
        sp_distance(a, b[:7])
    with pytest.raises(InvalidSettingError, match=r"got 8 and 7 rows"):
        linear_cka_distance(a, b[:7])
    with pytest.raises(InvalidSettingError, match=r"equal shapes: got \(8, 12\) and \(8, 5\).*'sp' and 'cka'"):
        cosine_distance(a, b[:, :5])
    with pytest.raises(InvalidSettingError, match=r"scalar"):
        sp_distance(torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(UnknownNameError, match=r"Unknown distance 'spp'\. Did you mean 'sp'\? Known: sp, cka"):
        distance("spp")
    assert [distance(name) for name in DISTANCES] == list(DISTANCES.values())


def test_a_cosine_distance_is_never_below_zero_by_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20_000, 7, generator=generator)
    singles = [float(cosine_distance(row[None], 3 * row[None])) for row in rows[:2000]]
    assert min(singles) >= 0
    assert float(cosine_distance(rows, 3 * rows)) < 1e-6
    assert max(float(cosine_distance(row[None], -row[None])) for row in rows[:2000]) <= 2
