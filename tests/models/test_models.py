"""The models that come by name: parts, sizes, costs, seeds, and what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from egeria_lab import data, models
from egeria_lab.errors import InvalidSettingError, UnknownNameError

DEPTHS = (8, 14, 20, 32, 56)


def build(name: str, input_shape: tuple[int, ...] = (1, 8, 8), num_classes: int = 10, **options: Any) -> nn.Module:
    return models.build(name, input_shape=input_shape, num_classes=num_classes, **options)


def layers(model: nn.Module) -> nn.Sequential:
    assert isinstance(model.layers, nn.Sequential)
    return model.layers


def titles(model: nn.Module) -> list[str]:
    return [layer.title() for layer in layers(model)]  # type: ignore[operator]


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def forward_macs(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, *input_shape))
    return int(counter.get_total_flops()) // 2


def resnet_parameters(depth: int, channels: int, classes: int, width: int = 1, conv_shortcut: bool = True) -> int:
    """By hand: 9 weights a channel pair in each 3x3 convolution, two a channel in each batch norm."""
    total, before = 9 * channels * 16 * width + 2 * 16 * width, 16 * width
    for after in (16 * width, 32 * width, 64 * width):
        for _ in range((depth - 2) // 6):
            total += 9 * before * after + 9 * after * after + 4 * after
            total += before * after + 2 * after if before != after and conv_shortcut else 0
            before = after
    return total + before * classes + classes


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are faster on one thread, above all when tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- every model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.names(pretrained=False))
@pytest.mark.parametrize("input_shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8)])
def test_output_shape_and_names_of_the_layers(name: str, input_shape: tuple[int, ...]) -> None:
    model = build(name, input_shape, num_classes=7)
    x = torch.randn(2, *input_shape)
    assert model(x).shape == (2, 7)
    assert [child for child, _ in model.named_children()] == ["layers"]
    assert {key.split(".")[1] for key in model.state_dict()} == {str(i) for i in range(len(layers(model)))}
    assert titles(model)[-1] == "head"


@pytest.mark.parametrize("name", models.names(pretrained=False))
def test_the_model_is_the_chain_of_its_layers(name: str) -> None:
    model = build(name).eval()
    x = torch.randn(3, 1, 8, 8)
    replayed = x
    for layer in layers(model):
        replayed = layer(replayed)
    assert torch.equal(replayed, model(x))


@pytest.mark.parametrize("name", models.names(pretrained=False))
def test_seed_decides_the_weights_and_the_global_generator_is_left_alone(name: str) -> None:
    before = torch.get_rng_state()
    first = build(name, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    same, other = build(name, seed=5), build(name, seed=6)
    weights, again, different = (model.state_dict() for model in (first, same, other))
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    assert any(not torch.equal(weights[key], different[key]) for key in weights)


def test_building_leaves_the_default_device_alone_and_stays_on_the_cpu() -> None:
    with torch.device("meta"):
        model = build("resnet8")
        assert torch.empty(1).device.type == "meta"
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("name", ["mlp", "resnet8", "transformer"])
def test_training_lowers_the_loss_and_reaches_every_parameter(name: str) -> None:
    inputs, targets = (
        torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(32) % 10,
    )
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert losses[0] < 4.0  # a sane start: near log(10) = 2.3
    grads = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert all(grad is not None and grad.any() for grad in grads.values())


@pytest.mark.parametrize("name", ["mlp", "resnet8", "transformer"])
def test_a_copy_is_independent_and_equal(name: str) -> None:
    model = build(name).eval()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 1, 8, 8)
    expected = model(x)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert torch.equal(twin(x), expected)


# ---- sizes and costs -----------------------------------------------------------------------------


def test_mlp_parameters_by_hand() -> None:
    assert num_parameters(build("mlp")) == 64 * 256 + 256 + 256 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10
    assert num_parameters(build("mlp", hidden=())) == 64 * 10 + 10
    assert titles(build("mlp", hidden=(32, 16))) == ["dense 64→32", "dense 32→16", "head"]


def test_resnet8_parameters_layer_by_layer() -> None:
    model = build("resnet8", (1, 28, 28))
    assert titles(model) == ["stem 1→16", "block 16→16", "block 16→32 /2", "block 32→64 /2", "head"]
    assert [num_parameters(layer) for layer in layers(model)] == [176, 4672, 14528, 57728, 650]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("options", [{}, {"width": 2}, {"shortcut": "pad"}])
def test_resnet_parameters_by_hand(depth: int, options: dict[str, Any]) -> None:
    model = build(f"resnet{depth}", (3, 32, 32), 100, **options)
    expected = resnet_parameters(depth, 3, 100, options.get("width", 1), options.get("shortcut") != "pad")
    assert num_parameters(model) == expected
    assert len(layers(model)) == 2 + (depth - 2) // 2


def test_resnet20_with_padding_has_the_published_size() -> None:
    assert num_parameters(build("resnet20", (3, 32, 32), shortcut="pad")) == pytest.approx(0.27e6, rel=0.01)


def test_resnet32_of_the_sparse_training_papers_has_their_cost() -> None:
    model = build("resnet32", (3, 32, 32), 100, width=2)
    stem, shortcuts, head = 9 * 3 * 32 * 1024, 32 * 64 * 256 + 64 * 128 * 64, 128 * 100
    equal_convs = 10 * 9 * 32 * 32 * 1024 + 9 * 9 * 64 * 64 * 256 + 9 * 9 * 128 * 128 * 64
    entering_convs = 9 * 32 * 64 * 256 + 9 * 64 * 128 * 64
    by_hand = stem + shortcuts + equal_convs + entering_convs + head
    assert forward_macs(model, (3, 32, 32)) == by_hand == 275_624_448
    assert 160 * 50_000 * 3 * 2 * by_hand == pytest.approx(1.323e16, rel=1e-3)  # dense training on CIFAR


def test_resnet32_stem_and_ten_blocks_hold_two_thirds_of_the_cost() -> None:
    model = build("resnet32", (3, 32, 32), 100, width=2)
    front = nn.Sequential(*list(layers(model))[:11])
    assert forward_macs(front, (3, 32, 32)) / forward_macs(model, (3, 32, 32)) == pytest.approx(0.673, abs=5e-4)


def test_transformer_parameters_by_hand() -> None:
    encoder = 2 * 2 * 64 + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64)
    head = 2 * 64 + 64 * 10 + 10
    image = (1 * 16 * 64 + 64) + 49 * 64
    assert num_parameters(build("transformer", (1, 28, 28))) == image + 4 * encoder + head
    tokens = 30 * 64 + 12 * 64
    assert num_parameters(build("transformer", (12,), vocabulary=30, depth=2)) == tokens + 2 * encoder + head


# ---- what is particular to each ------------------------------------------------------------------


def test_mlp_dropout_works_in_training_only() -> None:
    model = build("mlp", dropout=0.5)
    x = torch.randn(4, 1, 8, 8)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("shortcut", ["conv", "pad"])
def test_resnet_halves_the_image_twice(shortcut: str) -> None:
    model = build("resnet8", (1, 28, 28), shortcut=shortcut)
    shapes, x = [], torch.randn(2, 1, 28, 28)
    for layer in layers(model):
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(16, 28, 28), (16, 28, 28), (32, 14, 14), (64, 7, 7), (10,)]


def test_padded_shortcut_carries_the_input_and_zeros() -> None:
    block = layers(build("resnet8", shortcut="pad"))[2]
    x = torch.randn(2, 16, 8, 8)
    carried = block.shortcut(x)  # type: ignore[operator]
    assert torch.equal(carried[:, :16], x[:, :, ::2, ::2])
    assert carried.shape == (2, 32, 4, 4)
    assert not carried[:, 16:].any()


def test_transformer_patch_follows_the_image() -> None:
    assert titles(build("transformer", (3, 32, 32)))[0] == "patches 4x4→64"
    assert titles(build("transformer", (1, 8, 8)))[0] == "patches 2x2→64"
    assert titles(build("transformer", (1, 28, 28), patch=7, dim=32, depth=1)) == [
        "patches 7x7→32",
        "encoder layer",
        "head",
    ]


def test_attention_equals_torchs_own() -> None:
    layer = layers(build("transformer", dim=16, heads=4, depth=1))[1]
    own = nn.MultiheadAttention(16, 4, batch_first=True)
    state = layer.state_dict()
    own.load_state_dict(
        {
            "in_proj_weight": state["query_key_value.weight"],
            "in_proj_bias": state["query_key_value.bias"],
            "out_proj.weight": state["project.weight"],
            "out_proj.bias": state["project.bias"],
        }
    )
    x = torch.randn(3, 5, 16)
    expected: Tensor = own(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(layer._attend(x), expected)  # type: ignore[operator]


def test_token_transformer_classifies_and_takes_shorter_sequences() -> None:
    model = build("transformer", (12,), 3, vocabulary=30)
    ids = torch.randint(30, (4, 12))
    assert titles(model)[0] == "tokens 30→64"
    assert model(ids).shape == (4, 3)
    assert model(ids[:, :5]).shape == (4, 3)
    assert not torch.allclose(model(ids), model(ids.flip(1)), atol=1e-4)  # positions matter


def test_language_model_sees_no_later_token_and_fits_cross_entropy() -> None:
    model = build("transformer", (12,), 30, vocabulary=30, head="tokens").eval()
    ids = torch.randint(30, (4, 12), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 30
    scores, after = model(ids), model(changed)
    assert scores.shape == (4, 30, 12)
    torch.testing.assert_close(scores[:, :, :7], after[:, :, :7])
    assert not torch.allclose(scores[:, :, 7:], after[:, :, 7:], atol=1e-4)
    assert cross_entropy(scores, ids).isfinite()


def test_transformer_learns_digits_by_sgd() -> None:
    loaded = data.load("digits")
    train, valid = loaded.train, loaded.valid
    assert isinstance(train, data.ArrayDataset)
    assert isinstance(valid, data.ArrayDataset)
    model = build("transformer", dim=32, depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        inputs, targets = train.gather(torch.randint(len(train), (64,), generator=generator))
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert (model(valid.inputs).argmax(1) == valid.targets).float().mean() > 0.7


# ---- what is refused -----------------------------------------------------------------------------


def test_an_unknown_model_or_option_gives_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown model 'resnet9'. Did you mean 'resnet8'\?"):
        build("resnet9")
    with pytest.raises(UnknownNameError, match=r"option of model 'resnet8': 'widht'.*Known: width, shortcut"):
        build("resnet8", widht=2)
    with pytest.raises(UnknownNameError, match="option of model 'resnet8': 'depth'"):
        build("resnet8", depth=20)


@pytest.mark.parametrize(
    ("name", "field", "options"),
    [
        ("mlp", "hidden", {"hidden": (0,)}),
        ("mlp", "dropout", {"dropout": 1.0}),
        ("mlp", "num_classes", {"num_classes": 0}),
        ("mlp", "seed", {"seed": -1}),
        ("mlp", "input_shape", {"input_shape": ()}),
        ("mlp", "input_shape", {"input_shape": (1, 0)}),
        ("resnet8", "input_shape", {"input_shape": (8, 8)}),
        ("resnet8", "width", {"width": 0}),
        ("resnet8", "shortcut", {"shortcut": "none"}),
        ("transformer", "dim", {"dim": 30}),
        ("transformer", "depth", {"depth": 0}),
        ("transformer", "heads", {"heads": 1.0}),
        ("transformer", "dropout", {"dropout": -0.1}),
        ("transformer", "head", {"head": "words"}),
        ("transformer", "head", {"head": "tokens"}),
        ("transformer", "patch", {"patch": 3}),
        ("transformer", "patch", {"input_shape": (12,), "vocabulary": 9, "patch": 2}),
        ("transformer", "vocabulary", {"vocabulary": 9}),
        ("transformer", "vocabulary", {"input_shape": (12,)}),
        ("transformer", "input_shape", {"input_shape": (12, 12)}),
    ],
)
def test_a_setting_out_of_range_is_named(name: str, field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError, match=rf"{name}\.{field} must be "):
        build(name, **options)
