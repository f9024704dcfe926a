"""Which weights are masked: the defaults of the papers, each switchable, names before rules, tied ones once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import egeria_lab as lab
from egeria_lab.algorithms.sparse.methods import StaticSparsity
from egeria_lab.algorithms.sparse.weights import select_weights
from egeria_lab.errors import InvalidSettingError, LayerError, UnknownNameError


def sparse_names(model: nn.Module, **options: Any) -> list[str]:
    return [weight.name for weight in select_weights(model, StaticSparsity(sparsity=0.5, **options)).sparse]


def resnet() -> nn.Module:
    return lab.models.build("resnet8", input_shape=(3, 32, 32), num_classes=10, seed=0)


def test_a_resnet_masks_exactly_its_block_convolutions() -> None:
    expected = [f"layers.{block}.conv{i}.weight" for block in (1, 2, 3) for i in (1, 2)]
    assert sparse_names(resnet()) == expected
    dense = select_weights(resnet(), StaticSparsity()).dense
    assert {name: reason.split(" (")[0] for name, reason in dense.items()} == {
        "layers.0.conv.weight": "the first convolution",
        "layers.2.shortcut.0.weight": "a 1x1 shortcut convolution",
        "layers.3.shortcut.0.weight": "a 1x1 shortcut convolution",
        "layers.4.linear.weight": "the last layer",
    }


@pytest.mark.parametrize(
    ("switch", "added"),
    [
        ("dense_first", ["layers.0.conv.weight"]),
        ("dense_shortcuts", ["layers.2.shortcut.0.weight", "layers.3.shortcut.0.weight"]),
        ("dense_last", ["layers.4.linear.weight"]),
    ],
)
def test_each_rule_can_be_switched_off(switch: str, added: list[str]) -> None:
    extra = set(sparse_names(resnet(), **{switch: False})) - set(sparse_names(resnet()))
    assert sorted(extra) == added


def test_names_go_before_rules() -> None:
    names = sparse_names(resnet(), dense=("layers.1",), sparse=("layers.0.conv", "layers.4.linear.weight"))
    assert "layers.0.conv.weight" in names
    assert "layers.4.linear.weight" in names
    assert not [name for name in names if name.startswith("layers.1.")]


def test_the_order_is_that_of_the_model() -> None:
    model = resnet()
    order = [name for name, _ in model.named_parameters()]
    names = sparse_names(model, sparse=("layers.4", "layers.0"))
    assert names == sorted(names, key=order.index)


def test_depthwise_convolutions_stay_dense_unless_told_otherwise() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8, 2)
    )
    assert sparse_names(model) == ["2.weight"]
    assert sparse_names(model, dense_depthwise=False) == ["1.weight", "2.weight"]


def test_a_bottlenecks_own_1x1_convolutions_are_masked() -> None:
    block = nn.ModuleDict({"conv1": nn.Conv2d(8, 8, 1), "downsample": nn.Sequential(nn.Conv2d(8, 8, 1))})
    model = nn.Sequential(nn.Conv2d(3, 8, 3), block, nn.Linear(8, 2))
    assert sparse_names(model) == ["1.conv1.weight"]


def test_attention_is_masked_inside() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2, kdim=4, vdim=4), nn.Linear(8, 2))
    assert sparse_names(model) == [
        "0.in_proj_weight", "0.out_proj.weight",
        "1.q_proj_weight", "1.k_proj_weight", "1.v_proj_weight", "1.out_proj.weight",
    ]  # fmt: skip


def test_transposed_convolutions_have_their_outputs_second() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ConvTranspose2d(6, 8, 3), nn.Conv2d(8, 3, 1))
    (weight,) = select_weights(model, StaticSparsity()).sparse
    assert (weight.name, weight.shape) == ("1.weight", (8, 6, 3, 3))
    assert tuple(weight.outputs_first(weight.outputs_first(weight.parameter)).shape) == (6, 8, 3, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.inner = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.inner.weight
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight


def test_a_tied_weight_is_one_weight() -> None:
    assert sparse_names(Tied()) == ["inner.weight"]  # the head is the last layer, and so is the embedding then
    assert sparse_names(Tied(), dense_last=False) == ["embedding.weight", "inner.weight"]
    assert sparse_names(Tied(), sparse=("head",)) == ["embedding.weight", "inner.weight"]
    assert sparse_names(Tied(), dense=("again",), sparse=("head",)) == ["embedding.weight"]


def test_what_is_not_trained_stays_dense() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].weight.requires_grad_(False)
    assert sparse_names(model) == ["1.weight"]
    assert sparse_names(model, sparse=("0",)) == ["0.weight", "1.weight"]


def test_embeddings_and_norms_are_masked_by_name_only() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 2))
    assert sparse_names(model) == ["2.weight"]
    assert sparse_names(model, sparse=("0.weight",)) == ["0.weight", "2.weight"]
    with pytest.raises(InvalidSettingError, match=r"1\.weight has 1 dimension"):
        sparse_names(model, sparse=("1.weight",))
    with pytest.raises(InvalidSettingError, match="1 holds no convolution and no linear layer"):
        sparse_names(model, sparse=("1",))


def test_mistakes_in_names() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown layer 'layers\.9'. Did you mean 'layers\.[0-4]"):
        sparse_names(resnet(), dense=("layers.9",))
    with pytest.raises(InvalidSettingError, match=r"layers\.1\.conv1\.weight is named in dense= and in sparse="):
        sparse_names(resnet(), dense=("layers.1",), sparse=("layers.1.conv1",))


def test_nothing_to_mask_is_said_with_the_reasons() -> None:
    with pytest.raises(LayerError, match=r"0\.weight: the last layer \(dense_last\).*name some in sparse="):
        sparse_names(nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(LayerError, match="it has no convolution and no linear layer"):
        sparse_names(nn.Sequential(nn.BatchNorm1d(4)))
    assert torch.is_grad_enabled()
