"""Diagnostics against hand counts, and against the distance that measures the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import egeria_lab as lab
from egeria_lab.algorithms.cost_model import training_flops
from egeria_lab.algorithms.costs import count_flops
from egeria_lab.algorithms.diagnostics import (
    Churn,
    Density,
    densities,
    forgetting_histogram,
    mask_churn,
    names_by_layer,
    representational_similarity,
    representations,
    structural_similarity,
)
from egeria_lab.algorithms.distances import linear_cka_distance
from egeria_lab.algorithms.layers import layers
from egeria_lab.errors import InvalidSettingError

GROUPS = {"front": ("a", "b"), "head": ("c", "c.bias"), "norms only": ("d",)}


def mask(text: str) -> Tensor:
    return torch.tensor([letter == "1" for letter in text])


# --- density and churn -----------------------------------------------------------------------------------


def test_density_by_parameter_and_by_layer() -> None:
    masks = {"a": mask("1000"), "b": mask("11"), "c": mask("000")}
    assert densities(masks) == {"a": Density(1, 4), "b": Density(2, 2), "c": Density(0, 3)}
    assert densities(masks, GROUPS) == {"front": Density(3, 6), "head": Density(0, 3)}
    assert densities(masks, GROUPS)["front"].share == 0.5
    assert Density(0, 0).share == 0


def test_density_of_weights_is_that_of_their_mask() -> None:
    live = mask("10110")
    assert densities({"w": torch.randn(5) * live}) == densities({"w": live})


def test_densities_feed_the_cost_model() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(2, 4)
    step = count_flops(model, layers(model, x), lambda: model(x).sum(), 2)
    masks = {"0.weight": torch.arange(32).reshape(8, 4) < 8}
    shares = {name: density.share for name, density in densities(masks).items()}
    assert training_flops(step, densities=shares) == step.total - 0.75 * 2 * 64


def test_churn_by_hand() -> None:
    before, after = {"a": mask("1110"), "b": mask("1000")}, {"a": mask("1101"), "b": mask("1110")}
    assert mask_churn(before, after) == {"a": Churn(1, 1, 3, 3), "b": Churn(0, 2, 3, 1)}
    assert mask_churn(before, after)["a"].share == pytest.approx(1 / 3)
    both = mask_churn(before, after, {"front": ("a", "b")})["front"]
    assert both == Churn(1, 3, 6, 4)
    assert both.share == pytest.approx(0.4)
    assert both.warning == ""


def test_no_churn_warns() -> None:
    """traps row 63: masks that never change, or are all ones."""
    ones = {"a": mask("1111")}
    churn = mask_churn(ones, ones)["a"]
    assert churn.share == 0
    assert "exchanged no weight" in churn.warning
    nothing = mask_churn({"a": mask("0000")}, {"a": mask("0000")})["a"]
    assert nothing.share == 0
    assert "no weight is live" in nothing.warning


def test_all_exchanged_is_one() -> None:
    assert mask_churn({"a": mask("1100")}, {"a": mask("0011")})["a"].share == 1


# --- structural similarity -------------------------------------------------------------------------------


def test_structural_similarity_by_hand() -> None:
    """Six live positions at the end, the three largest are 0, 3 and 5; the mask has 0 and 5."""
    final = torch.tensor([4.0, 0.1, 0.0, -3.0, 0.2, -2.5, 0.3])
    assert structural_similarity({"w": mask("1110011")}, {"w": final}) == {"w": pytest.approx(2 / 3)}
    assert structural_similarity({"w": final}, {"w": final}) == {"w": 1.0}
    assert structural_similarity({"w": mask("0000000")}, {"w": final}) == {"w": 0.0}


def test_an_odd_number_is_rounded_up_and_ties_go_by_position() -> None:
    """Five live positions: three count; of the equal magnitudes the first ones."""
    final = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, 0.0])
    assert structural_similarity({"w": mask("111000")}, {"w": final}) == {"w": 1.0}
    assert structural_similarity({"w": mask("110111")}, {"w": final}) == {"w": pytest.approx(2 / 3)}
    assert structural_similarity({"w": mask("000111")}, {"w": final}) == {"w": 0.0}


def test_dead_positions_never_count_as_important() -> None:
    final = torch.tensor([0.0] * 98 + [1.0, 2.0])
    only_dead = torch.ones(100)
    only_dead[98:] = 0
    assert structural_similarity({"w": only_dead}, {"w": final}) == {"w": 0.0}
    assert structural_similarity({"w": torch.ones(4)}, {"w": torch.zeros(4)}) == {"w": 0.0}


def test_layers_pool_their_weights_and_top_can_be_chosen() -> None:
    final = {"a": torch.tensor([4.0, 3.0, 2.0, 1.0]), "b": torch.tensor([9.0, 8.0])}
    earlier = {"a": mask("1000"), "b": mask("10")}
    assert structural_similarity(earlier, final, GROUPS) == {"front": pytest.approx(2 / 3)}
    assert structural_similarity(earlier, final, GROUPS, top=1.0) == {"front": pytest.approx(2 / 6)}


def test_similarity_to_the_end_grows_as_masks_approach_it() -> None:
    torch.manual_seed(0)
    final = torch.randn(200) * (torch.rand(200) < 0.3)
    shares = []
    for kept in (0.0, 0.5, 1.0):
        shares.append(structural_similarity({"w": (final != 0) & (torch.rand(200) < kept)}, {"w": final})["w"])
    assert shares[0] == 0
    assert shares[2] == 1
    assert 0.2 < shares[1] < 0.8


# --- representational similarity -------------------------------------------------------------------------


def resnet(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return lab.models.build("resnet8", input_shape=(1, 8, 8), num_classes=3, seed=seed)


def test_cka_agrees_with_the_distance() -> None:
    first, second, x = resnet(0), resnet(1), torch.randn(6, 1, 8, 8)
    found, found_second = layers(first, x), layers(second, x)
    now, later = representations(first, found, x), representations(second, found_second, x)
    similarity = representational_similarity(now, later)
    assert list(similarity) == found.names
    first.eval()
    second.eval()
    a = b = x
    for one, other, name in zip(first.layers, second.layers, found.names, strict=True):  # type: ignore[arg-type]
        a, b = one(a), other(b)
        assert similarity[name] == pytest.approx(1 - float(linear_cka_distance(a, b)), abs=1e-4)
    assert representational_similarity(now, now) == {name: pytest.approx(1) for name in found.names}


def test_training_moves_only_what_is_trained() -> None:
    model, x = resnet(0), torch.randn(6, 1, 8, 8)
    found = layers(model, x)
    before = representations(model, found, x)
    with torch.no_grad():
        model.layers[2].conv1.weight.normal_()  # type: ignore[index]
    similarity = representational_similarity(before, representations(model, found, x))
    same = [similarity[name] == pytest.approx(1, abs=1e-12) for name in found.names]
    assert same == [True, True, False, False, False]


def test_looking_leaves_the_model_alone() -> None:
    model, x = resnet(0), torch.randn(6, 1, 8, 8)
    found = layers(model, x)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    grams = representations(model, found, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(gram.requires_grad for gram in grams.values())
    assert sum(len(module._forward_hooks) for module in model.modules()) == 0


def test_constant_representations() -> None:
    zeros, other = torch.zeros(3, 3), torch.eye(3)
    assert representational_similarity({"a": zeros}, {"a": zeros}) == {"a": 1.0}
    assert representational_similarity({"a": zeros}, {"a": other}) == {"a": 0.0}


def test_dict_batches_go_by_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    batch = {"x": torch.randn(5, 4)}

    def forward(m: nn.Module, b: object) -> object:
        return m(b["x"])  # type: ignore[index]

    found = layers(model, batch, forward=forward)
    assert list(representations(model, found, batch, forward)) == ["0", "2"]


def test_names_by_layer_cover_every_parameter_once() -> None:
    model = resnet(0)
    groups = names_by_layer(model, layers(model, torch.randn(2, 1, 8, 8)))
    assert sorted(name for names in groups.values() for name in names) == sorted(n for n, _ in model.named_parameters())


# --- forgetting ------------------------------------------------------------------------------------------


def test_histogram_by_hand() -> None:
    assert forgetting_histogram([2, 0, 0, 5]) == {"0": 2, "1": 0, "2": 1, "3": 0, "4": 0, "5": 1}
    assert forgetting_histogram([2, 0, 0, 5], most=2) == {"0": 2, "1": 0, "2+": 2}
    assert forgetting_histogram([2, 0, 0], most=2) == {"0": 2, "1": 0, "2": 1}


def test_never_correct_is_counted_apart() -> None:
    counts = torch.tensor([0, 0, 3], dtype=torch.int32)
    histogram = forgetting_histogram(counts, torch.tensor([True, False, True]))
    assert histogram == {"0": 1, "never correct": 2}
    assert sum(histogram.values()) == 3
    assert forgetting_histogram(torch.tensor([0]), torch.tensor([True])) == {"0": 0, "never correct": 1}


# --- bad input -------------------------------------------------------------------------------------------


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(InvalidSettingError, match="only one has b"):
        mask_churn({"a": mask("1")}, {"a": mask("1"), "b": mask("1")})
    with pytest.raises(InvalidSettingError, match=r"'a' has shape \(1,\) in one and \(2,\) in the other"):
        structural_similarity({"a": mask("1")}, {"a": mask("11")})
    with pytest.raises(InvalidSettingError, match="compare the same parameters"):
        representational_similarity({"a": torch.eye(2)}, {"a": torch.eye(3)})
    for top in (0, 1.1, float("nan")):
        with pytest.raises(InvalidSettingError, match=r"top must be a share in \(0, 1\]"):
            structural_similarity({"a": mask("1")}, {"a": mask("1")}, top=top)
    with pytest.raises(InvalidSettingError, match="some negative"):
        forgetting_histogram([1, -1])
    with pytest.raises(InvalidSettingError, match=r"got torch\.float32"):
        forgetting_histogram(torch.tensor([0.5]))
    with pytest.raises(InvalidSettingError, match="each of the 2 samples"):
        forgetting_histogram([1, 2], torch.tensor([True]))
