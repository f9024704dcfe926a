"""Layer modules of many kinds of models, and that looking for them leaves a model as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import egeria_lab as lab
from egeria_lab.algorithms.layers import layers
from egeria_lab.errors import LayerError, UnknownNameError

IMAGES = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))


class EncoderModel(nn.Module):
    """Embedding, two encoder layers, a linear decoder; optionally tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.decode = nn.Linear(16, 11, bias=False)
        if tied:
            self.decode.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decode(self.encoder(self.embed(x)))
        return out


class UNet(nn.Module):
    """One skip connection from the first convolution to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(1, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.into(x)
        deep = self.up(F.relu(self.middle(F.relu(self.down(skip)))))
        out: Tensor = self.out(torch.cat([skip, deep], 1))
        return out


class ClassToken(nn.Module):
    """A parameter of the model itself, joined in behind the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.project = nn.Linear(4, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.cat([self.token.expand(len(x), -1, -1), self.project(x)], 1)
        out: Tensor = self.head(F.relu(self.mix(hidden))[:, 0])
        return out


class SharedRelu(nn.Module):
    """One ReLU module for all layers, as much code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.relu(self.second(self.relu(self.first(x)))))
        return out


class UsedTwice(nn.Module):
    """A layer that runs twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.head(F.relu(self.again(F.relu(self.again(hidden)))))
        return out


class Draws(nn.Module):
    """Adds noise between its layers, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = self.second(hidden + torch.randn_like(hidden))
        out: Tensor = self.head(hidden + torch.randn_like(hidden))
        return out


def by_name(name: str) -> nn.Module:
    return lab.models.build(name, input_shape=(1, 8, 8), num_classes=3)


@pytest.mark.parametrize("name", ["mlp", "resnet8", "resnet14", "transformer"])
def test_our_own_models_are_cut_at_their_layers(name: str) -> None:
    model = by_name(name)
    found = layers(model, IMAGES)
    parts = list(model.layers)  # type: ignore[arg-type]
    assert found.names == [f"layers.{i}" for i in range(len(parts))]
    assert [layer.title for layer in found] == [part.title() for part in parts]
    for layer, part in zip(found, parts, strict=True):
        assert [id(p) for p in layer.parameters] == [id(p) for p in part.parameters()]
        assert set(part.modules()) <= set(layer.modules)
    assert sum(layer.num_parameters for layer in found) == sum(p.numel() for p in model.parameters())
    assert all(layer.note == "" for layer in found)


def test_an_encoder_is_cut_between_whole_layers() -> None:
    model = EncoderModel(tied=False)
    found = layers(model, TOKENS)
    assert found.names == ["embed", "encoder.layers.0", "encoder.layers.1", "decode"]
    assert [layer.num_parameters for layer in found] == [11 * 16, 2224, 2224, 16 * 11]


def test_a_tied_weight_belongs_to_its_last_user_and_is_never_frozen_early() -> None:
    """traps row 70: reported as such."""
    model = EncoderModel(tied=True)
    found = layers(model, TOKENS)
    assert [layer.num_parameters for layer in found] == [0, 2224, 2224, 176]
    assert found[-1].parameters == [model.embed.weight]
    assert found[0].note == "shares weights with a later layer"
    assert [layer.note for layer in found[1:]] == ["", "", ""]


def test_a_skip_connection_is_not_cut_inside() -> None:
    """After the first layer one tensor carries everything; behind it the skip connection is open."""
    found = layers(UNet(), IMAGES)
    assert found.names == ["into", "down"]
    assert [layer.num_parameters for layer in found] == [40, 1030]


def test_a_class_token_belongs_to_the_layer_that_still_needs_it() -> None:
    model = ClassToken()
    found = layers(model, torch.randn(2, 3, 4))
    assert found.names == ["project", "mix", "head"]
    assert found[1].num_parameters == 8 * 8 + 8 + 8
    assert any(p is model.token for p in found[1].parameters)


def test_a_shared_activation_does_not_mix_up_the_outputs() -> None:
    model = SharedRelu()
    found = layers(model, torch.randn(2, 4))
    assert found.names == ["first", "second", "head"]
    outputs = [layer.output for layer in found]
    assert len(set(outputs)) == 3
    assert model.relu not in outputs


def test_a_layer_that_runs_twice_is_one_layer_with_what_follows() -> None:
    model = UsedTwice()
    found = layers(model, torch.randn(2, 4))
    assert found.names == ["first", "again"]
    assert [layer.num_parameters for layer in found] == [40, 72 + 27]
    with pytest.raises(LayerError, match=r"'again' runs more than once"):
        layers(model, torch.randn(2, 4), names=["first", "again"])


def test_a_model_that_draws_numbers_is_cut_like_any_other() -> None:
    found = layers(Draws(), torch.randn(2, 4))
    assert found.names == ["first", "second", "head"]


def test_in_place_activations() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(64, 3),
    )  # fmt: skip
    found = layers(model, IMAGES)
    assert found.names == ["0", "2", "5"]
    assert found[0].output is model[1]


def test_norms_and_activations_go_with_the_layer_before_them() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    found = layers(model, torch.randn(4, 4))
    assert found.names == ["0", "3"]
    assert set(found[0].modules) == {model[0], model[1], model[2]}
    assert found[0].output is model[2]


def test_frozen_weights_are_found_too_and_stay_frozen() -> None:
    model = ClassToken()
    model.token.requires_grad_(False)
    model.project.weight.requires_grad_(False)
    found = layers(model, torch.randn(2, 3, 4))
    assert found[0].num_parameters == 40
    assert not model.token.requires_grad
    assert not model.project.weight.requires_grad
    assert model.mix.weight.requires_grad


def test_a_submodule_that_never_runs_is_in_no_way() -> None:
    model = SharedRelu()
    model.unused = nn.Linear(5, 5)
    found = layers(model, torch.randn(2, 4))
    assert found.names == ["first", "second", "head"]


def test_a_model_without_submodules_is_one_layer() -> None:
    model = nn.Linear(4, 3)
    found = layers(model, torch.randn(2, 4))
    assert found.names == ["model"]
    assert found[0].parameters == list(model.parameters())
    assert found[0].output is model


def test_recurrent_layers_return_tuples() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 4)
            self.first = nn.LSTM(4, 4, batch_first=True)
            self.second = nn.LSTM(4, 4, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden, _ = self.first(self.embed(x))
            hidden, _ = self.second(hidden)
            out: Tensor = self.head(hidden[:, -1])
            return out

    assert layers(Recurrent(), TOKENS).names == ["embed", "first", "second", "head"]


def test_dict_outputs_and_a_forward_of_ones_own() -> None:
    class Wants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, *, values: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.first(values))}

    found = layers(Wants(), {"values": torch.randn(2, 4)}, forward=lambda m, x: m(**x))  # type: ignore[arg-type]
    assert found.names == ["first", "head"]


# --- names given by hand ---------------------------------------------------------------------------------


def test_names_given_by_hand_merge_layers_and_the_head_is_added() -> None:
    model = by_name("mlp")
    found = layers(model, IMAGES, names=["layers.1"])
    assert found.names == ["layers.0", "layers.2"]  # called after the first module with weights
    assert found[0].output is model.layers[1]  # type: ignore[index]
    assert found[0].num_parameters == 64 * 256 + 256 + 256 * 128 + 128
    whole = layers(model, IMAGES, names=[f"layers.{i}" for i in range(4)])
    assert whole.names == [f"layers.{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("model", "names", "kind", "message"),
    [
        (UNet, ["into", "down"], LayerError, "'down' is no place to cut.*skip connection"),
        (UNet, ["intoo"], UnknownNameError, "Unknown submodule 'intoo'. Did you mean 'into'"),
        (lambda: by_name("mlp"), ["layers.1", "layers.0"], LayerError, "front to back"),
        (lambda: by_name("mlp"), ["layers.3", "layers.0"], LayerError, "front to back"),
        (lambda: by_name("mlp"), ["layers.0", "layers.0"], LayerError, "front to back"),
        (lambda: nn.Sequential(nn.ReLU()), None, LayerError, "no weights"),
    ],
)
def test_bad_places_are_refused(
    model: Callable[[], nn.Module], names: list[str] | None, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        layers(model(), IMAGES, names=names)


# --- the table -------------------------------------------------------------------------------------------


def test_the_table_finds_by_name_and_prints() -> None:
    found = layers(by_name("mlp"), IMAGES)
    assert found.find("layers.2") is found[2]
    assert found.index_of("layers.2") == 2
    assert len(found) == 4
    with pytest.raises(UnknownNameError, match=r"Unknown layer 'layer.2'. Did you mean 'layers.2'"):
        found.find("layer.2")
    assert "dense 64→256" in repr(found)
    assert "16,640" in repr(found)
    assert found._repr_html_().count("<tr>") == 5


# --- the model is left alone -----------------------------------------------------------------------------


def fingerprint(model: nn.Module) -> dict[str, Any]:
    return {
        "attributes": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
        "flags": [p.requires_grad for p in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone().tolist() for p in model.parameters()],
        "state": {name: tensor.clone().tolist() for name, tensor in model.state_dict().items()},
        "identity": [id(p) for p in model.parameters()] + [id(b) for b in model.buffers()],
    }


@pytest.mark.parametrize("kind", ["resnet8", "encoder", "tied", "class token", "draws", "twice"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(kind: str, fails: bool) -> None:
    made: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
        "resnet8": (lambda: by_name("resnet8"), IMAGES),
        "encoder": (lambda: EncoderModel(tied=False), TOKENS),
        "tied": (lambda: EncoderModel(tied=True), TOKENS),
        "class token": (ClassToken, torch.randn(2, 3, 4)),
        "draws": (Draws, torch.randn(2, 4)),
        "twice": (UsedTwice, torch.randn(2, 4)),
    }
    model, example = made[kind][0](), made[kind][1]
    model.train()
    next(iter(model.children())).eval()  # a mode of the user's own
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before, rng = fingerprint(model), torch.get_rng_state()
    grad_enabled, fast_path = torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()
    if fails:
        with pytest.raises((LayerError, UnknownNameError, RuntimeError)):
            layers(model, example, names=["no such module"])
        with pytest.raises((RuntimeError, IndexError)):
            layers(model, torch.zeros(2, 999))
    else:
        layers(model, example)
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled() == grad_enabled
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


def test_a_forward_of_the_instances_own_survives() -> None:
    model = by_name("mlp")
    part = model.layers[0]  # type: ignore[index]
    original = part.forward
    own = lambda x: original(x)  # noqa: E731
    part.forward = own
    layers(model, IMAGES)
    assert part.__dict__["forward"] is own
