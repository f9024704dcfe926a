"""Attributions that are right by hand or by Captum's own slower way, on a live model that does not notice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import LayerConductance, LayerIntegratedGradients
from torch import Tensor, nn

import egeria_lab as lab
from egeria_lab.algorithms.layers import layers as find_layers
from egeria_lab.errors import DataError, InvalidSettingError, UnknownNameError
from egeria_lab.interpret import METHODS, Attribution, attribute, conductance, drift
from egeria_lab.interpret.no_trace import leaving_no_trace

Make = Callable[..., lab.Session]
IMAGE_METHODS = [(method, "block" if method.startswith("layer_") else None) for method in METHODS]


class ConvNet(nn.Module):
    """Convolution, batch norm, in-place ReLU, dropout, twice; then a head; (samples, 1, 8, 8) → (samples, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Dropout(0.4))
        self.block = nn.Conv2d(3, 4, 3)
        self.tail = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm2d(4), nn.Dropout(0.4), nn.Flatten())
        self.head = nn.Linear(4 * 4 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.tail(self.block(self.stem(x))))
        return out


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def net(images: Tensor) -> ConvNet:
    """In train mode, a step behind it: with running statistics, and gradients that are not None."""
    torch.manual_seed(0)
    model = ConvNet()
    model(images).square().sum().backward()
    return model


def tokens_model() -> nn.Module:
    return lab.models.build(
        "transformer", input_shape=(6,), num_classes=3, seed=0, vocabulary=11, dim=8, depth=2, heads=2
    )


def trace_of(model: nn.Module) -> dict[str, Any]:
    """All that somebody could see of a model, and of the global generators."""
    kinds = [kind for kind in vars(model) if "hooks" in kind]
    named = dict(model.named_parameters())
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "versions": [tensor._version for tensor in (*model.parameters(), *model.buffers())],
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in named.items()},
        "gradient objects": [id(p.grad) for p in named.values() if p.grad is not None],
        "flags": {name: p.requires_grad for name, p in named.items()},
        "modes": [module.training for module in model.modules()],
        "hooks": [list(getattr(module, kind).items()) for module in model.modules() for kind in kinds],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": [np.asarray(part) for part in np.random.get_state()],
        "python": random.getstate(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def assert_no_trace(before: dict[str, Any], model: nn.Module) -> None:
    after = trace_of(model)
    assert [name for name in before if not same(before[name], after[name])] == []


# --- no trace -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "layer"), IMAGE_METHODS)
@pytest.mark.parametrize("mode", ["train", "eval", "frozen"])
def test_nothing_is_left_in_the_model_or_in_the_generators(
    net: ConvNet, images: Tensor, method: str, layer: str | None, mode: str
) -> None:
    modules = find_layers(net, images)
    net.train(mode != "eval")
    net.stem[3].eval()  # what its owner had put into eval mode
    if mode == "frozen":
        lab.freeze_layers(net, ["stem"])
    before = trace_of(net)
    given = images.clone()
    found = attribute(net, given, method=method, layer=layer, layers=modules)
    assert_no_trace(before, net)
    assert torch.equal(given, images)
    assert not given.requires_grad
    assert found.maps.abs().sum() > 0


@pytest.mark.parametrize("method", [name for name in METHODS if name != "occlusion"])
def test_nothing_is_left_in_a_model_of_tokens(method: str) -> None:
    model = tokens_model()
    ids = torch.randint(0, 11, (4, 6))
    before = trace_of(model)
    attribute(model, ids, method=method, layer="layers.2" if method == "layer_activation" else "layers.0",
              layers=find_layers(model, ids)) if method != "layer_gradcam" else None  # fmt: skip
    assert_no_trace(before, model)


@pytest.mark.parametrize("at", [1, 2, 3, 5])
@pytest.mark.parametrize("method", ["integrated_gradients", "layer_conductance", "gradient_shap"])
def test_nothing_is_left_after_an_error_in_the_model(net: ConvNet, images: Tensor, method: str, at: int) -> None:
    calls: list[int] = []

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        out: Tensor = model(x)
        if len(calls) >= at:
            model.eval()
            model.stem[0].weight.requires_grad_(False)  # type: ignore[index,union-attr]
            raise RuntimeError("the model broke")
        return out

    before = trace_of(net)
    with pytest.raises((RuntimeError, DataError), match="the model broke"):
        attribute(
            net, images, method=method, layer="block", layers={"stem": net.stem, "block": net.block}, forward=forward
        )
    assert_no_trace(before, net)


def test_what_happens_in_the_block_is_undone(net: ConvNet, images: Tensor) -> None:
    """Also what Captum does not do today: a backward pass, hooks that stay, modes, statistics."""
    before = trace_of(net)
    kept = net.block.register_forward_hook(lambda *_: None)
    with_hook = trace_of(net)
    with leaving_no_trace(net, seed=1):
        assert not net.training
        net.train()
        net(images).sum().backward()
        net.block.register_forward_hook(lambda *_: None)
        net.block.register_full_backward_hook(lambda *_: None)
        net.head.weight.requires_grad_(False)
        torch.rand(3), np.random.rand(3), random.random()
    assert_no_trace(with_hook | {"versions": trace_of(net)["versions"]}, net)
    kept.remove()
    assert_no_trace(before | {"versions": trace_of(net)["versions"]}, net)


def test_a_session_that_is_looked_into_between_steps_trains_on_bit_for_bit(
    make_session: Make, losses: Callable[[lab.Session], list[float]]
) -> None:
    """traps row 81: with batch norm, dropout and a frozen layer, by several methods, after every step."""
    quiet, watched = make_session(dropout=0.3), make_session(dropout=0.3)
    samples = torch.randn(3, 6)
    for number in range(16):
        for session in (quiet, watched):
            if number == 5:
                session.freeze("first")
            if number == 11:
                session.thaw("first")
            session.step()
        for method in ("integrated_gradients", "gradient_shap", "layer_conductance"):
            layer = "second" if method.startswith("layer_") else None
            attribute(watched.model, samples, method=method, layer=layer, layers=watched.layer_modules, n_steps=4)
    assert losses(watched) == losses(quiet)
    assert all(map(torch.equal, watched.model.state_dict().values(), quiet.model.state_dict().values()))


def test_it_can_be_asked_from_another_thread_while_a_run_is_under_way(
    make_session: Make, losses: Callable[[lab.Session], list[float]]
) -> None:
    """traps row 98: behind the lock that a step holds."""
    quiet, watched = make_session(dropout=0.3), make_session(dropout=0.3)
    quiet.step(60)
    samples = torch.randn(3, 6)
    watched.start(steps=60)
    found = []
    while watched.steps_done < 60:
        with watched._lock:
            found.append(attribute(watched.model, samples, layers=watched.layer_modules, n_steps=4))
    watched.wait(30)
    assert found
    assert losses(watched) == losses(quiet)


def test_neither_no_grad_nor_autocast_nor_inference_mode_around_it_matters(net: ConvNet, images: Tensor) -> None:
    plain = attribute(net, images, [0, 1, 2, 3, 0], layers={"block": net.block})
    around: list[Any] = [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)]
    for context in around:
        with context:
            found = attribute(net, images, [0, 1, 2, 3, 0], layers={"block": net.block})
        assert torch.equal(found.maps, plain.maps)
        assert torch.equal(found.layers[0].conductance, plain.layers[0].conductance)  # type: ignore[arg-type]


def test_draws_are_its_own_and_repeatable(net: ConvNet, images: Tensor) -> None:
    one = attribute(net, images, method="gradient_shap")
    torch.manual_seed(99)
    np.random.seed(99)
    two = attribute(net, images, method="gradient_shap")
    other = attribute(net, images, method="gradient_shap", seed=1)
    assert torch.equal(one.maps, two.maps)
    assert not torch.equal(one.maps, other.maps)


def test_what_is_returned_belongs_to_nobody_else(net: ConvNet, images: Tensor) -> None:
    net.eval()
    found = attribute(net, images, method="layer_activation", layer="block", layers={"block": net.block})
    row = found.layers[0].conductance
    assert row is not None
    kept = found.maps.clone(), row.clone(), found.inputs.clone()
    images.zero_()
    with torch.no_grad():
        net.block.weight.zero_()
    assert all(map(torch.equal, (found.maps, row, found.inputs), kept))
    for tensor in (found.maps, row, found.inputs):
        assert (tensor.device.type, tensor.dtype, tensor.requires_grad) == ("cpu", torch.float32, False)


# --- right ------------------------------------------------------------------------------------------------


@pytest.fixture
def linear() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3, bias=False))


def weight_of(linear: nn.Sequential, targets: list[int]) -> Tensor:
    return linear[1].weight.detach()[targets].reshape(-1, 1, 8, 8)  # type: ignore[union-attr,index,operator]


def test_on_a_linear_model_every_method_is_known_by_hand(linear: nn.Sequential, images: Tensor) -> None:
    targets = [0, 2, 1, 1, 0]
    weight = weight_of(linear, targets)
    by_hand = {
        "integrated_gradients": weight * (images - 0.5),
        "saliency": weight.abs(),
        "input_x_gradient": weight * images,
    }
    for method, expected in by_hand.items():
        found = attribute(linear, images, targets, method=method, baseline=0.5)
        assert torch.allclose(found.maps, expected, atol=1e-5), method
        assert found.targets.tolist() == targets
    shap = attribute(linear, images, targets, method="gradient_shap", baseline=0.5)
    noise = weight.abs() * 0.1 * images.std() * 4 / 16**0.5  # the mean of 16 draws, within four deviations
    assert ((shap.maps - weight * (images - 0.5)).abs() <= noise).all()
    covered = attribute(linear, images, targets, method="occlusion", baseline=0.5)  # windows of 1 × 1
    assert torch.allclose(covered.maps, weight * (images - 0.5), atol=1e-5)


def test_occlusion_of_larger_images_slides_a_window(images: Tensor) -> None:
    """28 × 28: windows of 4 × 4 every 2 pixels; only those that reach a bright spot change the score."""

    class Centre(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 0, 13:15, 13:15].sum((1, 2))[:, None]

    found = attribute(Centre(), torch.ones(2, 1, 28, 28), method="occlusion")
    assert found.maps[0, 0, 13, 13] > 0
    touched = found.maps[0, 0].nonzero()
    assert touched.min() == 10
    assert touched.max() == 17


def test_the_delta_says_how_far_the_maps_are_from_adding_up(net: ConvNet, images: Tensor) -> None:
    net.eval()
    for method, layer in (("integrated_gradients", None), ("gradient_shap", None), ("layer_conductance", "block")):
        found = attribute(net, images, [0, 1, 2, 3, 0], method=method, layer=layer, n_steps=64)
        with torch.no_grad():
            change = (net(images) - net(0 * images)).gather(1, torch.tensor([[0], [1], [2], [3], [0]]))[:, 0]
        assert found.delta is not None
        assert found.delta.shape == (5,)
        assert found.score_change == pytest.approx(float(change.mean()), rel=1e-4)
        assert torch.allclose(found.delta, found.maps.flatten(1).sum(1) - change, atol=1e-4)
        if method != "gradient_shap":  # which draws a few points of the path, with noise
            assert found.delta.abs().max() < 0.05 * change.abs().max()
    for method in ("saliency", "input_x_gradient", "occlusion"):
        assert attribute(net, images, method=method).delta is None


def test_conductances_of_all_layers_equal_captums_one_by_one(
    net: ConvNet, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    net.eval()
    targets = torch.tensor([0, 1, 2, 3, 0])
    modules = find_layers(net, images)
    assert len(modules) == 3
    captum = {
        layer.name: LayerConductance(net, layer.output).attribute(
            images, target=targets, n_steps=16, method="riemann_trapezoid"
        )
        for layer in modules
    }
    for rows in (256, 40, 1):  # in one piece, in several, in pieces of one step
        monkeypatch.setattr(conductance, "MOST_ROWS", rows)
        found = attribute(net, images, targets, layers=modules, n_steps=16)
        for row in found.layers:
            assert row.conductance is not None
            assert torch.allclose(row.conductance, captum[row.name], atol=1e-5), (row.name, rows)
            assert row.mean_abs == pytest.approx(captum[row.name].abs().mean().item(), rel=1e-4)
            assert row.total == pytest.approx(captum[row.name].flatten(1).sum(1).mean().item(), rel=1e-3, abs=1e-5)
    mapped = attribute(net, images, targets, method="layer_conductance", layer="block", n_steps=16)
    alone = LayerConductance(net, net.block).attribute(images, target=targets, n_steps=16, method="riemann_trapezoid")
    assert torch.allclose(mapped.maps, alone, atol=1e-5)


def test_all_of_the_score_flows_through_every_layer(images: Tensor) -> None:
    model = lab.models.build("resnet8", input_shape=(1, 8, 8), num_classes=10, seed=0)
    found = attribute(model, images, layers=find_layers(model, images), n_steps=64)
    assert len(found.layers) == 5
    for row in found.layers:
        assert row.total == pytest.approx(found.score_change, rel=0.1, abs=0.02)


def test_activation_and_gradcam(net: ConvNet, images: Tensor) -> None:
    net.eval()
    activation = net.block(net.stem(images)).detach().requires_grad_()
    found = attribute(net, images, 2, method="layer_activation", layer="block")
    assert torch.allclose(found.maps, activation, atol=1e-6)
    gradient = torch.autograd.grad(net.head(net.tail(activation.clone()))[:, 2].sum(), activation)[0]
    by_hand = (gradient.mean((2, 3), keepdim=True) * activation).sum(1, keepdim=True).relu()
    cam = attribute(net, images, 2, method="layer_gradcam", layer="block")
    assert cam.maps.shape == (5, 1, 4, 4)
    assert torch.allclose(cam.maps, by_hand, atol=1e-6)
    assert cam.targets.tolist() == [2] * 5
    modules = find_layers(net, images)  # the cut behind "block" lies after the flattening
    assert torch.equal(attribute(net, images, 2, method="layer_gradcam", layer="block", layers=modules).maps, cam.maps)
    assert attribute(net, images, 2, method="layer_activation", layer="block", layers=modules).maps.shape == (5, 64)


@pytest.mark.parametrize("method", ["integrated_gradients", "saliency", "input_x_gradient", "gradient_shap"])
def test_modules_that_work_in_place_change_no_map(net: ConvNet, images: Tensor, method: str) -> None:
    """Behind the layer where attribution begins, behind those that are compared, and at the very front."""
    parts = {"stem": net.stem, "block": net.block, "head": net.head}
    found = attribute(net, images, 0, method=method, layer="block", layers=parts)
    compared = attribute(net, images, 0, method=method, layers=parts)
    front = nn.Sequential(nn.ReLU(inplace=True), net)
    at_front = attribute(front, images, 0, method=method)
    for module in front.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    plain = attribute(net, images, 0, method=method, layer="block", layers=parts)
    assert torch.equal(found.maps, plain.maps)
    assert repr(compared) == repr(attribute(net, images, 0, method=method, layers=parts))
    assert torch.equal(at_front.maps, attribute(front, images, 0, method=method).maps)
    assert [row.mean_abs for row in found.layers] == [row.mean_abs for row in plain.layers]


def test_frozen_and_active_layers_are_told_apart(net: ConvNet, images: Tensor) -> None:
    modules = find_layers(net, images)
    free = attribute(net, images, layers=modules)
    assert [row.state for row in free.layers] == ["active"] * 3
    names = [row.name for row in free.layers]
    freezer = lab.freeze_layers(net, ["stem", "block", "tail"])  # the tail goes with the block
    found = attribute(net, images, layers=modules)
    assert [(row.name, row.state) for row in found.layers] == list(
        zip(names, ["frozen", "frozen", "active"], strict=True)
    )
    assert all(
        torch.equal(a.conductance, b.conductance)  # type: ignore[arg-type]
        for a, b in zip(free.layers, found.layers, strict=True)
    )  # that it is frozen changes nothing about what it does
    freezer.close()
    freezer = lab.freeze_layers(net, ["tail"])  # a part of what belongs to the layer module "block"
    assert [row.state for row in attribute(net, images, layers=modules).layers] == ["active"] * 3
    freezer.close()
    by_name = attribute(net, images, layers={"stem": net.stem, "flatten": net.tail[3], "unused": nn.Linear(1, 1)})
    assert [row.state for row in by_name.layers] == ["active", "no weights", "active"]
    assert by_name.layers[2].mean_abs is None


def test_without_targets_the_predicted_class_is_explained(net: ConvNet, images: Tensor) -> None:
    net.eval()
    with torch.no_grad():
        predicted = net(images).argmax(1)
    net.train()
    found = attribute(net, images)
    assert torch.equal(found.targets, predicted)
    assert torch.equal(found.maps, attribute(net, images, predicted).maps)


def test_a_model_with_one_output_a_sample_is_explained_by_it(images: Tensor) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1, bias=False))
    found = attribute(model, images, torch.rand(5))
    assert torch.allclose(found.maps.flatten(1), model[1].weight.detach() * images.flatten(1), atol=1e-6)


def test_scores_of_positions_are_averaged_over_those_that_count() -> None:
    """Classes second or last, targets a position, −100 left out."""
    x = torch.randn(2, 3, 4)  # samples, positions, classes
    targets = torch.tensor([[0, 3, -100], [1, 1, 2]])
    expected = torch.zeros(2, 3, 4)
    for sample, row in enumerate(targets.tolist()):
        for position, kind in enumerate(row):
            if kind >= 0:
                expected[sample, position, kind] = 1 / sum(k >= 0 for k in row)
    last = attribute(nn.Identity(), x, targets, method="saliency")
    second = attribute(nn.Identity(), x.movedim(2, 1), targets, method="saliency")
    assert torch.allclose(last.maps, expected)
    assert torch.allclose(second.maps.movedim(1, 2), expected)


def test_a_forward_of_ones_own_and_outputs_with_logits(net: ConvNet, images: Tensor) -> None:
    class Answer:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    plain = attribute(net, images, 1)
    found = attribute(net, images, 1, forward=lambda model, x: Answer(model(x)))
    assert torch.equal(found.maps, plain.maps)


# --- tokens -----------------------------------------------------------------------------------------------


def test_token_ids_have_no_gradient_and_the_sentence_says_where_to_begin() -> None:
    model = tokens_model()
    ids = torch.randint(0, 11, (4, 6))
    with pytest.raises(InvalidSettingError, match=r"these are int64 \(token ids\?\): say layer='layers.0' to begin"):
        attribute(model, ids, layers=find_layers(model, ids))
    with pytest.raises(InvalidSettingError, match="say layer='the name of the embedding'"):
        attribute(model, ids, method="saliency")


@pytest.mark.parametrize("frozen", [False, True])
def test_tokens_are_explained_at_their_embedding_frozen_or_not(frozen: bool) -> None:
    model = tokens_model().eval()
    ids = torch.randint(0, 11, (4, 6))
    modules = find_layers(model, ids)
    if frozen:
        lab.freeze_layers(model, ["layers.0", "layers.1"])
    captum = LayerIntegratedGradients((twin := tokens_model().eval()), twin.layers[0]).attribute(  # type: ignore[index]
        ids, baselines=0 * ids, target=1, n_steps=32
    )
    found = attribute(model, ids, 1, layer="layers.0", layers=modules, n_steps=32)
    assert torch.allclose(found.maps, captum, atol=1e-5)
    assert torch.equal(found.inputs, ids)
    with torch.no_grad():
        change = float((model(ids) - model(0 * ids))[:, 1].mean())
    assert found.score_change == pytest.approx(change, rel=1e-4)
    assert found.maps.flatten(1).sum(1).mean() == pytest.approx(change, rel=0.05, abs=0.02)
    assert [row.state for row in found.layers] == (["frozen"] * 2 + ["active"] * 2 if frozen else ["active"] * 4)
    for row in found.layers:
        assert row.total == pytest.approx(change, rel=0.15, abs=0.05)
    for method in ("layer_conductance", "layer_activation"):
        at = attribute(model, ids, 1, method=method, layer="layers.1", layers=modules)
        assert at.maps.shape == (4, 6, 8)
        assert at.layers[1].mean_abs == pytest.approx(found.layers[1].mean_abs, rel=1e-4)


# --- drift ------------------------------------------------------------------------------------------------


def test_drift_is_none_for_the_same_and_known_for_a_scaled_model(linear: nn.Sequential, images: Tensor) -> None:
    before = attribute(linear, images, 0, layers={"all": linear[1]})
    assert drift(before, before).to_dict()["maps"] == {"state": "", "cosine": 1.0, "relative_l2": 0.0}
    with torch.no_grad():
        linear[1].weight.mul_(3)  # type: ignore[operator,union-attr]
    moved = drift(before, attribute(linear, images, 0, layers={"all": linear[1]}))
    for row in moved.rows:
        assert (row.cosine, row.relative_l2) == pytest.approx((1.0, 2.0), abs=1e-5)
    with torch.no_grad():
        linear[1].weight.mul_(-1)  # type: ignore[operator,union-attr]
    assert drift(before, attribute(linear, images, 0, layers={"all": linear[1]}))["all"].cosine == pytest.approx(-1.0)


def test_drift_since_a_layer_froze(make_session: Make) -> None:
    session = make_session()
    session.step(3)
    session.freeze("first")
    samples = torch.randn(6, 6)

    def look(method: str = "integrated_gradients", layer: str | None = None) -> Attribution:
        return attribute(
            session.model, samples, [0, 1, 2] * 2, method=method, layer=layer, layers=session.layer_modules
        )

    before, activation = look(), look("layer_activation", "first")
    session.step(20)
    moved = drift(before, look())
    assert [(row.name, row.state) for row in moved.rows] == [
        ("maps", ""), ("first", "frozen"), ("second", "active"), ("head", "active"),
    ]  # fmt: skip
    assert all(row.relative_l2 > 0.01 and row.cosine < 1 for row in moved.rows)
    assert drift(activation, look("layer_activation", "first"))["maps"].relative_l2 == 0  # frozen: it says the same


def test_drift_compares_like_with_like(net: ConvNet, images: Tensor) -> None:
    one = attribute(net, images, 0, layers={"stem": net.stem})
    others = {
        "methods": attribute(net, images, 0, method="saliency"),
        "samples": attribute(net, images + 1, 0),
        "classes": attribute(net, images, 1),
        "layers": attribute(net, images, 0, layers={"block": net.block}),
    }
    for what, other in others.items():
        with pytest.raises(DataError, match=f"these are of different {what}"):
            drift(one, other)


# --- asked wrongly, and how it looks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "integrated_gradient"}, UnknownNameError, "Did you mean 'integrated_gradients'.*layer_gradcam"),
        ({"layer": "blok", "method": "layer_activation"}, UnknownNameError, "Did you mean 'block'"),
        ({"method": "layer_conductance"}, InvalidSettingError, "looks at one layer: say which by layer=. Layers: stem"),
        ({"method": "layer_gradcam", "layer": "head"}, InvalidSettingError, r"puts out images.*gives \(5, 4\)"),
        ({"method": "occlusion", "layer": "block"}, InvalidSettingError, "got layer='block'"),
        ({"n_steps": 0}, InvalidSettingError, "attribute.n_steps must be a whole number >= 1, got 0"),
        ({"targets": [0, 1]}, DataError, "one class number for each of 5 samples"),
        ({"targets": 4}, DataError, r"classes from 0 to 3, got \[4\]"),
        ({"targets": torch.rand(5)}, DataError, "got torch.float32"),
        ({"baseline": torch.zeros(3)}, InvalidSettingError, r"baseline must be a number.*got \(3,\)"),
        ({"inputs": torch.zeros(0, 1, 8, 8)}, DataError, r"a sample or more, got \(0, 1, 8, 8\)"),
        ({"inputs": [1, 2]}, DataError, "got list"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    net: ConvNet, images: Tensor, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    before = trace_of(net)
    with pytest.raises(error, match=words):
        attribute(net, **{"inputs": images, "layers": {"stem": net.stem}, **options})
    assert_no_trace(before, net)


def test_flat_inputs_are_no_images() -> None:
    with pytest.raises(InvalidSettingError, match=r"covers parts of images.*got torch.float32 of shape \(2, 3\)"):
        attribute(nn.Linear(3, 2), torch.ones(2, 3), method="occlusion")


def test_it_prints_as_text_and_html_and_goes_to_json(net: ConvNet, images: Tensor) -> None:
    found = attribute(net, images, 0, layers={"stem": net.stem, "unused": nn.Linear(1, 1)})
    text = repr(found)
    for part in ("integrated_gradients of the inputs: 5 × 1 × 8 × 8", "stem", "active", "convergence delta", "–"):
        assert part in text
    assert "<table>" in found._repr_html_()
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["shape"] == [5, 1, 8, 8]
    assert plain["layers"][0] == {
        "name": "stem", "state": "active", "mean_abs": found.layers[0].mean_abs, "total": found.layers[0].total,
    }  # fmt: skip
    moved = drift(found, found)
    assert "relative L2" in repr(moved)
    assert "<table>" in moved._repr_html_()
    json.dumps(moved.to_dict())


def test_captum_is_loaded_only_when_it_is_asked_for() -> None:
    """It brings Matplotlib and IPython along, and seconds; traps rows 127 and 128: never its Insights."""
    code = (
        "import sys, egeria_lab as lab; lab.Session('mlp', 'digits', epochs=1).step(); print('captum' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
    package = Path(lab.__file__).parent
    assert not [path.name for path in package.rglob("*.py") if "insights" in path.read_text(encoding="utf-8")]
