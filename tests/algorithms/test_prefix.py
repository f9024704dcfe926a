"""`egeria_lab.algorithms.prefix`: the two halves of a model are the whole, bit for bit, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from egeria_lab.algorithms.layers import LayerModules, layers
from egeria_lab.algorithms.prefix import PrefixRunner
from egeria_lab.errors import LayerError
from egeria_lab.models.registry import build


class Glue(nn.Module):
    """Shapes, a position table and a mean stand between the modules; the batch is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.positions = nn.Parameter(torch.randn(1, 8, 6))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.embedding(tokens) + self.positions[:, :length]
        x = self.first(x).view(batch * length, -1)
        x = self.drop(self.norm(self.second(x))).view(batch, length, -1)
        out: Tensor = self.head(x.mean(1).relu_())
        return out


class Pair(nn.Module):
    """A block that hands a tuple on: hidden values, a mask and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, state: tuple[Tensor, Tensor, None]) -> tuple[Tensor, Tensor, None]:
        hidden, mask, _ = state
        return torch.tanh(self.linear(hidden)) * mask[:, None], mask, None


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(3))
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = (x, x[:, 0] > 0, None)
        for block in self.blocks:
            state = block(state)
        out: Tensor = self.head(state[0])
        return out


class Encoder(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x if self.batch_first else x.transpose(0, 1))
        out: Tensor = self.head(x.mean(1 if self.batch_first else 0))
        return out


def resnet() -> nn.Module:
    return build("resnet8", input_shape=(1, 12, 12), num_classes=4)


def transformer() -> nn.Module:
    return build("transformer", input_shape=(1, 8, 8), num_classes=4, dim=16, depth=3, dropout=0.2, patch=4)


def images(size: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, 1, size, size)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Any]] = {
    "resnet": (resnet, images(12), None),
    "mlp": (lambda: build("mlp", input_shape=(1, 8, 8), num_classes=4, dropout=0.2), images(8), None),
    "transformer": (transformer, images(8), None),
    "encoder": (Encoder, lambda rows: torch.randn(rows, 5, 16), None),
    "pairs": (Pairs, lambda rows: torch.randn(rows, 5), None),
    "glue": (
        Glue,
        lambda rows: {"tokens": torch.randint(11, (rows, 8)), "labels": torch.zeros(rows)},
        lambda model, batch: (model(batch["tokens"]), batch["labels"]),
    ),
}


def frozen_up_to(found: LayerModules, boundary: int) -> None:
    for layer in found[: boundary + 1]:
        for parameter in layer.parameters:
            parameter.requires_grad_(False)
        for module in layer.modules:
            module.eval()


def make(name: str, boundary: int | None) -> tuple[nn.Module, PrefixRunner, Callable[[int], Any]]:
    build_model, batch_of, forward = CASES[name]
    model = build_model().train()
    found = layers(model, batch_of(2), forward=forward)
    if boundary is not None:
        frozen_up_to(found, boundary)
    return model, PrefixRunner(model, found, batch_of(4), forward), batch_of


def scalar(outputs: Any) -> Tensor:
    tensors = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor)]
    return torch.stack([x.float().square().sum() for x in tensors]).sum()


def gradients(model: nn.Module, outputs: Any) -> list[Tensor]:
    active = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(scalar(outputs), active))


@pytest.mark.parametrize("boundary", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_bit_equal(name: str, boundary: int) -> None:
    model, runner, batch_of = make(name, boundary)
    assert runner.check(boundary) == ""
    assert runner.verify(boundary, batch_of(6)) == ""
    for rows in (4, 9, 2, 1) if name != "glue" else (4, 9, 2):
        batch = batch_of(rows)
        torch.manual_seed(7)
        whole = runner.run(batch)
        expected = gradients(model, whole)
        value = runner.run_until(boundary, batch)
        torch.manual_seed(7)
        half = runner.run_from(boundary, value, batch)
        assert torch.equal(scalar(whole), scalar(half))
        assert all(torch.equal(a, b) for a, b in zip(expected, gradients(model, half), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_gap_between_two_cuts(name: str) -> None:
    _, runner, batch_of = make(name, 1)
    batch = batch_of(5)
    first = runner.run_until(0, batch)
    second = runner.run_until(1, batch, start=0, value=first)
    assert torch.equal(scalar(second), scalar(runner.run_until(1, batch)))


def test_what_is_in_front_of_the_cut_does_not_run() -> None:
    model, runner, batch_of = make("resnet", 2)
    batch = batch_of(4)
    assert runner.check(1) == runner.check(2) == ""  # the proofs run the whole model
    ran: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda _m, _x, name=name: ran.append(name))
    value = runner.run_until(1, batch)
    assert ran
    assert all(name.startswith(("layers.0", "layers.1")) for name in ran)
    ran.clear()
    runner.run_from(1, value, batch)
    assert ran
    assert all(name.startswith(("layers.2", "layers.3")) for name in ran)
    ran.clear()
    runner.run_until(2, batch, start=1, value=value)
    assert all(name.startswith("layers.2") for name in ran)


def trace_of(model: nn.Module) -> Any:
    return [
        (name, sorted(vars(module)), module.training, [b.clone() for b in module.buffers(recurse=False)])
        for name, module in model.named_modules()
    ]


def same(a: Any, b: Any) -> bool:
    return all(
        x[:3] == y[:3] and all(torch.equal(p, q) for p, q in zip(x[3], y[3], strict=True))
        for x, y in zip(a, b, strict=True)
    )


def test_nothing_stays_on_the_model() -> None:
    model, runner, batch_of = make("glue", 1)
    before, state = trace_of(model), torch.get_rng_state()
    batch = batch_of(4)
    state = torch.get_rng_state()
    runner.check(1)
    runner.verify(1, batch)
    value = runner.run_until(1, batch)
    assert same(before, trace_of(model))
    assert torch.equal(state, torch.get_rng_state())
    model.eval()
    frozen = trace_of(model)
    runner.run_from(1, value, batch)
    assert same(frozen, trace_of(model))


def test_an_error_in_the_model_puts_everything_back() -> None:
    model, runner, batch_of = make("resnet", 1)
    value = runner.run_until(1, batch_of(4))
    before = [x[:3] for x in trace_of(model)]

    def broken(_module: nn.Module, _inputs: Any) -> None:
        raise ArithmeticError("no")

    for place in (0, 3):
        handle = model.layers[place].register_forward_pre_hook(broken)  # type: ignore[union-attr,index,operator]
        with pytest.raises(ArithmeticError):
            runner.run_from(1, value, batch_of(4)) if place == 3 else runner.run_until(1, batch_of(4))
        handle.remove()
    assert before == [x[:3] for x in trace_of(model)]
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_forward_of_the_instance_is_given_back() -> None:
    _model, runner, batch_of = make("mlp", 0)
    first = runner.layers[0].output
    own = first.forward
    first.forward = own  # a user's own patch lies in the instance
    runner.run_from(0, runner.run_until(0, batch_of(3)), batch_of(3))
    assert vars(first)["forward"] is own


def test_frozen_parts_run_in_eval_mode_and_come_back() -> None:
    model, runner, batch_of = make("resnet", None)
    batch = batch_of(4)
    before = trace_of(model)
    assert torch.equal(runner.run_until(2, batch), runner.run_until(2, batch))
    assert same(before, trace_of(model))  # batch norm would have moved
    assert all(module.training for module in model.modules())


def test_the_head_is_no_boundary() -> None:
    _, runner, batch_of = make("mlp", None)
    last = len(runner.layers) - 1
    assert "the last one always runs" in runner.check(last)
    assert runner.check(-1)
    with pytest.raises(LayerError, match="always runs"):
        runner.run_from(last, torch.zeros(1), batch_of(2))


class Skipping(nn.Module):
    """What `down` makes is needed again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up, self.head = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.down(x)
        out: Tensor = self.head(self.up(self.middle(kept)) + kept)
        return out


def test_a_cut_inside_a_skip_connection_is_refused() -> None:
    model, batch = Skipping(), torch.randn(4, 4)
    found = list(layers(model, batch))
    found[0].output = model.middle
    reason = PrefixRunner(model, found, batch).check(0)
    assert "needs more from the front" in reason


def test_compiled_parts_are_refused() -> None:
    model, runner, _ = make("resnet", 0)
    block = model.get_submodule("layers.2")
    block._compiled_call_impl = block._call_impl  # what block.compile() leaves, without the compiler
    assert "torch.compile" in runner.check(0)


def test_samples_must_lie_in_front() -> None:
    model = Encoder(batch_first=False)
    batch = torch.randn(4, 5, 16)
    reason = PrefixRunner(model, layers(model, batch), batch).check(0)
    assert "(5, batch, 16)" in reason


def test_samples_folded_into_rows_are_refused() -> None:
    _, runner, _ = make("glue", None)
    assert "(8 × batch, 6)" in runner.check(2)


def test_what_cannot_be_stored_is_refused() -> None:
    class Carrier:
        pass

    class Carrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, state: Any) -> Any:
            return (self.linear(state[0] if isinstance(state, tuple) else state), Carrier())

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = Carrying(), Carrying(), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.b(self.a(x))[0])
            return out

    model, batch = Whole(), torch.randn(3, 3)
    found = list(layers(model, batch))
    found[0].output = model.a
    reason = PrefixRunner(model, found, batch).check(0)
    assert "Carrier" in reason


def test_trainable_weights_in_front_are_named() -> None:
    _, runner, batch_of = make("resnet", None)
    reason = runner.verify(1, batch_of(4))
    assert "trainable" in reason
    assert "layers.0.conv.weight" in reason


class Tied(nn.Module):
    """The embedding is the head's weight too: freezing the first layer module does not freeze it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.embedding(x)))
        return out


def test_tied_weights_that_still_train_are_refused() -> None:
    model, batch = Tied(), torch.randint(7, (5,))
    found = layers(model, batch)
    frozen_up_to(found, 0)
    assert "embedding.weight" in PrefixRunner(model, found, batch).verify(0, batch)


class Functional(nn.Module):
    """Dropout outside of any module: the mode of the whole model decides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.5, self.training)
        out: Tensor = self.head(self.second(x))
        return out


def test_a_prefix_that_draws_is_refused() -> None:
    """Row 28: dropout in a frozen prefix would be stored with one draw for ever."""
    model, batch = Functional().train(), torch.randn(4, 6)
    found = layers(model, batch)
    frozen_up_to(found, 1)
    runner = PrefixRunner(model, found, batch)
    assert runner.check(1) == ""  # in eval mode nothing draws
    assert "draws random numbers" in runner.verify(1, batch)
    assert runner.verify(0, batch) == ""  # the dropout lies behind this cut


def test_dropout_modules_of_a_frozen_prefix_are_quiet() -> None:
    _model, runner, batch_of = make("transformer", 2)
    batch = batch_of(4)
    assert torch.equal(runner.run_until(2, batch), runner.run_until(2, batch))
    assert runner.verify(2, batch) == ""


def test_a_prefix_that_is_not_frozen_is_refused() -> None:
    model, runner, batch_of = make("resnet", 1)
    model.train()  # batch norm works on the batch again
    assert "is it frozen" in runner.verify(1, batch_of(4))


def test_a_model_that_takes_another_way_is_noticed() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
            self.detour = False

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(x if self.detour else self.b(self.a(x)))
            return out

    model, batch = Choosing(), torch.randn(4, 3)
    runner = PrefixRunner(model, layers(model, batch), batch)
    value = runner.run_until(0, batch)
    model.detour = True
    with pytest.raises(LayerError, match="did not call 'a'"):
        runner.run_from(0, value, batch)
    with pytest.raises(LayerError, match="without reaching"):
        runner.run_until(0, batch)


def test_a_module_that_runs_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.a(self.b(self.a(x))))
            return out

    model, batch = Twice(), torch.randn(4, 3)
    found = layers(model, batch)
    runner = PrefixRunner(model, found, batch)
    for boundary in range(len(found) - 1):
        value = runner.run_until(boundary, batch)
        assert torch.equal(runner.run_from(boundary, value, batch), model(batch))


def test_rows_of_a_batch() -> None:
    _, runner, batch_of = make("glue", None)
    batch = batch_of(5)
    part = runner.take(batch, torch.tensor([4, 0, 4]))
    assert runner.rows(part) == 3
    assert torch.equal(part["tokens"], batch["tokens"][[4, 0, 4]])
    with pytest.raises(LayerError, match="structure"):
        runner.rows(torch.zeros(3))
    with pytest.raises(LayerError, match="no tensor"):
        PrefixRunner(Tied(), [], {"a": 1})
