"""Schemes: units and masks convert into each other, structure holds, misfits are refused in one sentence."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from egeria_lab.algorithms.sparse.masks import n_of_m, scheme_for
from egeria_lab.algorithms.sparse.mutation import first_mask
from egeria_lab.algorithms.sparse.patterns import PATTERNS
from egeria_lab.errors import InvalidSettingError, UnknownNameError

SHAPE = (8, 12, 3, 3)
ALL = ("unstructured", "block", "pattern", "2:4", "1:4")


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def has_structure(name: str, mask: Tensor) -> bool:
    """The rule of the scheme, written down without the scheme's own code."""
    if name == "block":
        rows = mask.reshape(mask.shape[0] // 4, 4, -1)
        return bool((rows == rows[:, :1]).all())
    if name == "pattern" and mask.shape[2:] == (3, 3):
        known = {tuple(p.tolist()) for p in PATTERNS} | {(False,) * 9}
        return all(tuple(kernel.tolist()) in known for kernel in mask.reshape(-1, 9))
    if ":" in name:
        quota, group = (int(x) for x in name.split(":"))
        groups = torch.stack([mask[:, i : i + group].sum(1) for i in range(0, mask.shape[1], group)])
        return bool((groups == quota).all())
    return True


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("values", [False, True])
def test_first_masks_have_the_exact_count_and_the_structure(name: str, values: bool) -> None:
    scheme = scheme_for(name, "layer", SHAPE)
    count = {"2:4": 432, "1:4": 216}.get(name, 20)
    magnitudes = torch.rand(SHAPE, generator=seeded(1)) if values else None
    mask = first_mask(scheme, count, seeded(), magnitudes)
    assert mask.shape == SHAPE
    assert int(mask.sum()) == count * scheme.unit_size
    assert int(scheme.units(mask).sum()) == count
    assert has_structure(name, mask)


@pytest.mark.parametrize("name", ["unstructured", "block", "2:4"])
def test_units_and_weights_are_each_others_inverse(name: str) -> None:
    scheme = scheme_for(name, "layer", SHAPE)
    units = torch.rand(scheme.num_units, generator=seeded()) < 0.3
    assert torch.equal(scheme.units(scheme.weights(units)), units)


@pytest.mark.parametrize("name", ALL)
def test_scores_are_sums_over_the_live_weights_of_each_unit(name: str) -> None:
    scheme = scheme_for(name, "layer", SHAPE)
    mask = first_mask(scheme, {"2:4": 432, "1:4": 216}.get(name, 20), seeded())
    values = torch.rand(SHAPE, generator=seeded(1))
    scores = scheme.scores(torch.where(mask, values, 0))
    assert scores.shape == (scheme.num_units,)
    for unit in scheme.units(mask).nonzero()[:5, 0]:
        single = torch.zeros(scheme.num_units, dtype=torch.bool)
        single[unit] = True
        assert float(scores[unit]) == pytest.approx(float(values[scheme.weights(single) & mask].sum()), rel=1e-5)


def test_magnitude_keeps_the_largest_and_random_does_not() -> None:
    values = torch.rand(SHAPE, generator=seeded(1))
    scheme = scheme_for("unstructured", "layer", SHAPE)
    largest = first_mask(scheme, 50, seeded(), values)
    assert float(values[largest].min()) >= float(values[~largest].max())
    assert not torch.equal(first_mask(scheme, 50, seeded()), largest)


def test_random_masks_follow_their_generator_alone() -> None:
    scheme = scheme_for("pattern", "layer", SHAPE)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = first_mask(scheme, 20, seeded(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, first_mask(scheme, 20, seeded(3)))
    assert not torch.equal(first, first_mask(scheme, 20, seeded(4)))


def test_random_masks_favour_no_position() -> None:
    scheme = scheme_for("unstructured", "layer", (4, 10))
    counts = sum(first_mask(scheme, 10, seeded(seed)).int() for seed in range(400))
    assert isinstance(counts, Tensor)
    assert int(counts.min()) > 60
    assert int(counts.max()) < 145  # 100 expected, standard deviation 8.7


def test_there_are_eight_patterns_of_four_with_the_centre_closed_under_turning() -> None:
    assert PATTERNS.shape == (8, 9)
    assert set(PATTERNS.sum(1).tolist()) == {4}
    assert bool(PATTERNS[:, 4].all())
    known = {tuple(p.tolist()) for p in PATTERNS}
    assert len(known) == 8
    assert {tuple(torch.rot90(p.reshape(3, 3)).flatten().tolist()) for p in PATTERNS} == known


def test_a_new_kernel_takes_its_best_pattern_by_value_and_any_at_random() -> None:
    scheme = scheme_for("pattern", "layer", (1, 8, 3, 3))
    values = PATTERNS.float().reshape(1, 8, 3, 3) + 0.1
    every = torch.ones(8, dtype=torch.bool)
    assert torch.equal(scheme.new(every, values, seeded()), PATTERNS.reshape(1, 8, 3, 3))
    drawn = {tuple(scheme.new(every, None, seeded(s))[0, 0].flatten().tolist()) for s in range(60)}
    assert len(drawn) == 8


def test_pattern_drops_kernels_of_other_sizes_whole() -> None:
    scheme = scheme_for("pattern", "layer", (4, 4, 5, 5))
    mask = first_mask(scheme, 6, seeded()).reshape(16, 25)
    assert sorted(mask.sum(1).tolist()) == [0] * 10 + [25] * 6
    linear = scheme_for("pattern", "layer", (4, 4))
    assert (linear.num_units, linear.unit_size, linear.max_density) == (16, 1, 1.0)


def test_misfits_name_the_layer_and_the_numbers() -> None:
    with pytest.raises(InvalidSettingError, match=r"layers\.3 has 10 output channels.*multiple of block_size=4"):
        scheme_for("block", "layers.3", (10, 4, 3, 3))
    assert scheme_for("block", "layers.3", (10, 4, 3, 3), block_size=5).num_units == 72
    with pytest.raises(
        InvalidSettingError, match=r"stem has 3 input channels, and the scheme 2:4 needs a multiple of 4"
    ):
        scheme_for("2:4", "stem", (16, 3, 3, 3))
    with pytest.raises(InvalidSettingError, match=r"0 < N < M, got '4:4'"):
        n_of_m("4:4")
    with pytest.raises(UnknownNameError, match="Did you mean 'block'"):
        scheme_for("blocks", "layer", SHAPE)
