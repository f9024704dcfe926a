"""Counted and derived FLOPs of frozen models against torch's own counter around a real forward and backward pass.

Every model is frozen in front (prefix), in the middle (a hole) and behind (suffix), and tried under each other
set of frozen layers as well; `count_flops` and `training_flops` must both agree with what really ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import egeria_lab as lab
from egeria_lab.algorithms.cost_model import (
    dense_weight_gradients,
    layer_flops,
    layer_roles,
    training_flops,
    weight_flops,
)
from egeria_lab.algorithms.costs import StepFlops, count_flops
from egeria_lab.algorithms.layers import LayerModules, layers
from egeria_lab.algorithms.products import parameter_flops

ROWS = 4


class Attention(nn.Module):
    """Single-head attention with weights of its own, so that scores and mixing are products without a weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return x + self.out(mixed)


class Tied(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, dim)
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(self.embed(tokens))))))


class Masked(nn.Module):
    """A linear layer that multiplies its weight by a mask in every forward pass."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, rows))
        self.register_buffer("mask", torch.ones(columns, rows))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask)


class Recomputed(nn.Module):
    """A block under gradient checkpointing: its forward pass runs again in the backward pass."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(4, 6)
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.front(x))[0][:, -1])


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.ConvTranspose2d(12, 6, 2, stride=2), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.Flatten(), nn.Linear(4 * 64, 5),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 24), nn.Linear(24, 4))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (mlp(), torch.randn(ROWS, 8)),
    "conv": lambda: (conv_net(), torch.randn(ROWS, 3, 8, 8)),
    "residual": lambda: (
        lab.models.build("resnet8", input_shape=(3, 16, 16), num_classes=5, width=2),
        torch.randn(ROWS, 3, 16, 16),
    ),
    "attention": lambda: (
        nn.Sequential(nn.Linear(6, 16), Attention(16), nn.Linear(16, 16), Attention(16), nn.Linear(16, 3)),
        torch.randn(ROWS, 10, 6),
    ),
    "encoder": lambda: (
        nn.Sequential(
            nn.Linear(4, 8),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            nn.Linear(8, 2),
        ),
        torch.randn(ROWS, 5, 4),
    ),
    "tied": lambda: (Tied(), torch.randint(0, 20, (ROWS, 7))),
    "masked": lambda: (
        nn.Sequential(Masked(8, 16), nn.ReLU(), Masked(16, 12), nn.ReLU(), Masked(12, 4)),
        torch.randn(ROWS, 8),
    ),
    "recomputed": lambda: (
        nn.Sequential(nn.Linear(6, 8), Recomputed(8), nn.Linear(8, 8), Recomputed(8), nn.Linear(8, 3)),
        torch.randn(ROWS, 6),
    ),
    "recurrent": lambda: (Recurrent(), torch.randn(ROWS, 5, 4)),
}  # fmt: skip


def made(kind: str) -> tuple[nn.Module, Tensor, LayerModules, StepFlops]:
    torch.manual_seed(0)
    model, x = MODELS[kind]()
    found = layers(model, x)
    return model, x, found, count_flops(model, found, lambda: model(x).sum(), ROWS)


@contextmanager
def plain_recurrence() -> Iterator[None]:
    """Without oneDNN, whose fused recurrent kernel shows torch's counter no product."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def really_run(model: nn.Module, x: Tensor, found: LayerModules, frozen: tuple[str, ...]) -> float:
    """FLOPs per sample by torch's counter while the frozen model is trained on one batch, as anybody would."""
    parameters = [(p, layer.name in frozen) for layer in found for p in layer.parameters]
    for parameter, is_frozen in parameters:
        parameter.requires_grad_(not is_frozen)
        parameter.grad = None
    model.train()
    with sdpa_kernel(SDPBackend.MATH), plain_recurrence(), FlopCounterMode(display=False) as counter:
        value = model(x).sum()
        if value.requires_grad:
            value.backward()
    for parameter, _ in parameters:
        parameter.requires_grad_(True)
        parameter.grad = None
    return counter.get_total_flops() / ROWS


def frozen_sets(names: list[str]) -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))


@pytest.mark.parametrize("kind", MODELS)
def test_counted_and_derived_agree_with_what_ran(kind: str) -> None:
    """Prefixes, holes, suffixes and all other subsets: within 1 % (in fact to the operation)."""
    model, x, found, full = made(kind)
    assert len(found) >= 3
    for frozen in frozen_sets(found.names):
        ran = really_run(model, x, found, frozen)
        counted = count_flops(model, found, lambda: model(x).sum(), ROWS, frozen)
        assert counted.total == pytest.approx(ran, rel=0.01), frozen
        assert training_flops(full, frozen=frozen) == pytest.approx(ran, rel=0.01), frozen
        assert training_flops(counted, frozen=()) == pytest.approx(full.total, rel=0.15)  # from a frozen count too


@pytest.mark.parametrize("kind", MODELS)
def test_each_layer_is_derived_as_it_is_counted(kind: str) -> None:
    model, x, found, full = made(kind)
    names = found.names
    for frozen in (tuple(names[:1]), tuple(names[:-1]), tuple(names[1:2]), tuple(names[-1:]), tuple(names[1:])):
        counted = count_flops(model, found, lambda: model(x).sum(), ROWS, frozen)
        derived = layer_flops(full, frozen=frozen)
        assert derived.forward == pytest.approx(counted.forward, rel=0.01)
        assert derived.backward == pytest.approx(counted.backward, rel=0.01), frozen


def test_tied_weights_let_no_frozen_front_go_idle() -> None:
    """traps row 70: the embedding belongs to the head, so gradients run all the way back to it."""
    _, x, found, full = made("tied")
    front = found.names[:2]
    assert layer_roles(full, front)[front[1]] == "hole"  # a lookup costs nothing, so the embedding itself is idle
    untied_model = Tied()
    untied_model.head.weight = nn.Parameter(untied_model.embed.weight.detach().clone())
    untied = layers(untied_model, x)
    step = count_flops(untied_model, untied, lambda: untied_model(x).sum(), ROWS)
    assert layer_roles(step, untied.names[:2])[untied.names[1]] == "frozen"
    saved = 1 - training_flops(full, frozen=front) / training_flops(full)
    saved_untied = 1 - training_flops(step, frozen=untied.names[:2]) / training_flops(step)
    assert saved < saved_untied


def test_what_a_prefix_a_hole_and_a_suffix_save() -> None:
    """traps row 69, in FLOPs: the same layer saves most in front, and only weight gradients elsewhere."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    x = torch.randn(ROWS, 16)
    found = layers(model, x)
    step = count_flops(model, found, lambda: model(x).sum(), ROWS)
    unit = 2 * 16 * 16
    assert step.total == unit * (2 + 3 * 4)
    assert step.total - training_flops(step, frozen=["0"]) == 2 * unit  # and the second layer's input gradient
    assert step.total - training_flops(step, frozen=["2"]) == unit
    assert step.total - training_flops(step, frozen=["4"]) == unit
    assert step.total - training_flops(step, frozen=["0", "1"]) == 4 * unit
    assert layer_roles(step, ["0", "2", "4"]) == {"0": "frozen", "1": "active", "2": "hole", "3": "active", "4": "hole"}


class InGroups(nn.Module):
    """What a grouped convolution is: one convolution for each group of channels, side by side."""

    def __init__(self, groups: int, channels: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Conv2d(channels // groups, channels // groups, 3, padding=1) for _ in range(groups)
        )

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.chunk(len(self.parts), dim=1)
        return torch.cat([part(piece) for part, piece in zip(self.parts, pieces, strict=True)], dim=1)


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_grouped_convolutions_cost_what_their_groups_cost(groups: int) -> None:
    """torch counts the weight gradient of a grouped convolution as if it were full; the groups apart tell the truth."""
    x = torch.randn(ROWS, 6, 5, 5)
    whole = nn.Sequential(nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=groups), nn.Conv2d(6, 2, 1))
    apart = nn.Sequential(nn.Conv2d(6, 6, 1), InGroups(groups, 6), nn.Conv2d(6, 2, 1))
    found, found_apart = layers(whole, x), layers(apart, x, names=["0", "1", "2"])
    step = count_flops(whole, found, lambda: whole(x).sum(), ROWS)
    for frozen in frozen_sets(found.names):
        ran = really_run(apart, x, found_apart, frozen)
        assert count_flops(whole, found, lambda: whole(x).sum(), ROWS, frozen).total == pytest.approx(ran), frozen
        assert training_flops(step, frozen=frozen) == pytest.approx(ran), frozen


def test_recurrent_layers_are_counted() -> None:
    """Fused recurrent kernels show no products; counted in plain ones: 4 gates × (in + hidden) × hidden a step."""
    _, _, found, step = made("recurrent")
    first, second = 5 * 4 * 8 * (6 + 8), 5 * 4 * 8 * (8 + 8)
    assert step.forward[found.index_of("lstm")] == 2 * (first + second)
    assert weight_flops(step)["lstm.weight_hh_l1"] == 2 * 5 * 4 * 8 * 8


@pytest.mark.parametrize("kind", MODELS)
def test_flops_by_weight_are_the_same_with_and_without_layer_modules(kind: str) -> None:
    model, x, _, step = made(kind)
    by_parameter = parameter_flops(model, lambda: model(x), ROWS)
    assert set(by_parameter) == {name for name, _ in model.named_parameters()}
    assert {name: flops for name, flops in by_parameter.items() if flops} == weight_flops(step)


def test_a_mask_inside_forward_does_not_hide_the_weight() -> None:
    _, _, _, step = made("masked")
    assert weight_flops(step) == {"0.weight": 256.0, "2.weight": 384.0, "4.weight": 96.0}


def test_attention_scores_have_no_weight() -> None:
    _, _, found, step = made("attention")
    block = found.index_of("1")
    products = [p for p in step.products if p.layer == block]
    assert sum(p.flops for p in products if p.weight is None) == 2 * 2 * 10 * 10 * 16
    assert sum(p.flops for p in products if p.weight is not None) == 2 * 4 * 10 * 16 * 16


def test_what_its_owner_excluded_stays_excluded() -> None:
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(ROWS, 8)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    found = layers(model, x)
    step = count_flops(model, found, lambda: model(x).sum(), ROWS)
    assert training_flops(step) == pytest.approx(step.total)
    for frozen in frozen_sets(found.names):
        counted = count_flops(model, found, lambda: model(x).sum(), ROWS, frozen)
        assert training_flops(step, frozen=frozen) == pytest.approx(counted.total), frozen


class WeightFirst(nn.Module):
    """A linear map written the other way round: the weight is the first operand."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, rows))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.T).T


def test_a_weight_is_found_as_either_operand() -> None:
    model = nn.Sequential(WeightFirst(8, 16), nn.ReLU(), WeightFirst(16, 4))
    x = torch.randn(ROWS, 8)
    found = layers(model, x)
    step = count_flops(model, found, lambda: model(x).sum(), ROWS)
    assert weight_flops(step) == {"0.weight": 256.0, "2.weight": 128.0}
    assert dense_weight_gradients(step, {"0.weight": 0.5, "2.weight": 0.5}, ["0"]) == 64
    for frozen in frozen_sets(found.names):
        assert training_flops(step, frozen=frozen) == pytest.approx(really_run(model, x, found, frozen)), frozen


def test_weights_in_one_storage_are_told_apart() -> None:
    """As recurrent layers keep theirs on a GPU: one flat storage, each weight a view of it."""
    flat = torch.randn(8 * 16 + 16 * 4)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    model[0].weight = nn.Parameter(flat[:128].view(16, 8))
    model[2].weight = nn.Parameter(flat[128:].view(4, 16))
    x = torch.randn(ROWS, 8)
    assert parameter_flops(model, lambda: model(x), ROWS) == {"0.weight": 256.0, "2.weight": 128.0}


def test_counting_twice_gives_the_same_and_switches_kernels_back() -> None:
    before = torch._C._get_mkldnn_enabled(), torch.backends.cudnn.enabled
    model, x, found, step = made("recurrent")
    again: Any = count_flops(model, found, lambda: model(x).sum(), ROWS)
    assert again == step
    assert (torch._C._get_mkldnn_enabled(), torch.backends.cudnn.enabled) == before
