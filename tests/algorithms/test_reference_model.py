"""The quantised snapshot, module by module, for each kind of model; and the plain copy that it runs on."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Tracer
from torch.nn.utils import parametrizations, prune

from egeria_lab import models
from egeria_lab.algorithms.layers import layers
from egeria_lab.algorithms.model_copy import cloned_state, plain_copy, tensor_names, unwrapped
from egeria_lab.algorithms.private_draws import PrivateDraws
from egeria_lab.algorithms.reference import Reference
from egeria_lab.algorithms.reference_model import ReferenceModel
from egeria_lab.errors import LayerError


def call(model: nn.Module, content: object) -> object:
    return model(content)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def reference_of(model: nn.Module, content: Tensor, engine: str = "int8") -> ReferenceModel:
    made = ReferenceModel(model, layers(model, content[:2]), call, engine=engine)
    made.refresh(made.state_of(model), content)
    return made


def true_outputs(model: nn.Module, content: Tensor) -> dict[str, Tensor]:
    plain = Reference(model, {layer.name: layer.output for layer in layers(model, content[:2])}, call)
    return plain.current(content)


def worst_error(made: ReferenceModel, model: nn.Module, content: Tensor) -> float:
    wanted = true_outputs(model, content)
    got = made.activations(content, list(wanted))
    assert list(got) == list(wanted)
    assert all(tensor.dtype == torch.float32 for tensor in got.values())
    return max(float((got[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted)


def small_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def encoder(**options: object) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)  # type: ignore[arg-type]
    return nn.TransformerEncoder(layer, 2)


KINDS = {
    "resnet8": (lambda: models.build("resnet8", input_shape=(1, 12, 12), num_classes=4), (16, 1, 12, 12)),
    "mlp": (lambda: models.build("mlp", input_shape=(1, 8, 8), num_classes=4), (16, 1, 8, 8)),
    "transformer": (
        lambda: models.build("transformer", input_shape=(1, 8, 8), num_classes=4, dim=16, depth=2),
        (16, 1, 8, 8),
    ),
    "sequential": (small_cnn, (16, 1, 12, 12)),
    "torch-encoder": (encoder, (8, 5, 16)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_quantises(kind: str) -> None:
    build, shape = KINDS[kind]
    model, content = build(), rows(*shape)
    made = reference_of(model, content)
    patches = [row for row in made.describe() if "over patches" in row[2]]
    assert [row[0] for row in patches] == (["layers.0"] if kind == "transformer" else [])
    assert all(engine == "int8" for name, engine, note in made.describe() if "over patches" not in note)
    assert 0 < worst_error(made, model, content) < 0.1
    with torch.no_grad():  # a refresh follows the weights
        for parameter in model.parameters():
            parameter.mul_(0.5)
    made.refresh(made.state_of(model), content)
    assert made.generation == 2
    assert 0 < worst_error(made, model, content) < 0.1


def test_fp32_is_exact_and_bf16_is_close() -> None:
    model, content = small_cnn(), rows(8, 1, 12, 12)
    exact = reference_of(model, content, "fp32")
    assert worst_error(exact, model, content) == 0
    assert exact.describe()[0] == ("0", "fp32", "float32: asked for")
    assert 0 < worst_error(reference_of(model, content, "bf16"), model, content) < 0.05


def test_what_is_not_quantised_says_why() -> None:
    tokens = models.build("transformer", input_shape=(6,), num_classes=5, vocabulary=5, dim=16, depth=1, head="tokens")
    made = ReferenceModel(tokens, layers(tokens, torch.zeros(2, 6, dtype=torch.long)), call)
    name, engine, note = made.describe()[0]
    assert (name, engine) == ("layers.0", "fp32")
    assert "Embedding" in note
    attention = reference_of(encoder(), rows(4, 5, 16)).describe()[0][2]
    assert attention == "2 × dynamic int8: 1 Linear; float32: nn.MultiheadAttention uses its weights itself"


class Branching(nn.Module):
    """A block that tracing cannot follow, of parts that it can."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3)
        self.linear = nn.LazyLinear(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) if float(x.sum()) > -1e9 else self.conv(-x)
        return self.linear(x)


def test_the_parts_of_a_block_are_quantised_where_the_block_cannot_be() -> None:
    torch.manual_seed(0)
    model, content = nn.Sequential(Branching(1), Branching(4), nn.Flatten(), nn.LazyLinear(2)), rows(8, 1, 8, 8)
    model(content)  # gives the lazy layers their shapes
    made = reference_of(model, content)
    _, engine, note = made.describe()[0]
    assert engine == "int8"
    assert "static int8: 1 Conv2d" in note
    assert "dynamic int8: 1 Linear" in note
    assert "Branching: it cannot be traced" in note
    assert 0 < worst_error(made, model, content) < 0.1


class DecidesOnce(nn.Module):
    """Asks something that tracing answers once for all, and wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * (1.0 if isinstance(x, Tensor) else 3.0)


def test_a_traced_copy_that_computes_something_else_is_found_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(DecidesOnce(), nn.Flatten(), nn.Linear(144, 2))
    content = rows(8, 1, 8, 8)
    made = reference_of(model, content)
    assert made.describe()[0][1:] == ("fp32", "float32: its traced copy does not compute the same")
    assert made.describe()[1][1] == "int8"
    assert worst_error(made, model, content) < 0.1


def test_a_stand_in_that_fails_later_gives_way_to_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model, content = small_cnn(), rows(8, 1, 12, 12)
    made = reference_of(model, content)

    def broken(*_args: object) -> object:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(made._plans["4"].units[0], "forward", broken)
    assert worst_error(made, model, content) < 0.1
    assert made.describe()[1][1:] == ("fp32", "float32: RuntimeError in low precision: no such kernel")


def test_only_what_is_wanted_is_run_and_nothing_is_left_behind() -> None:
    model, content = small_cnn(), rows(8, 1, 12, 12)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = reference_of(model, content)
    ran: list[str] = []
    made.model[9].register_forward_hook(lambda *_: ran.append("head"))  # type: ignore[index]
    reduced = made.activations(content, ["0"], reduce=lambda tensor: tensor.sum())
    assert ran == []
    assert reduced["0"].shape == ()
    assert made.activations(content, []) == {}
    assert all("forward" not in vars(module) for module in made.model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_a_refresh_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing patches nn.Module for all threads: it may happen at construction only."""
    model, content = small_cnn(), rows(8, 1, 12, 12)
    made = reference_of(model, content)

    def no_trace(*_args: object, **_more: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(Tracer, "trace", no_trace)
    made.refresh(made.state_of(model), content)
    assert {engine for _, engine, _ in made.describe()} == {"int8"}


# --- the plain copy -----------------------------------------------------------------------------------


def disguised() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    pruned = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    prune.random_unstructured(pruned[0], "weight", amount=0.5)
    pruned(rows(3, 6)).sum().backward()  # now its weight is no leaf, which deepcopy refuses
    weighted = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 2))
    spectral = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 2))
    return {"pruned": pruned, "weight-norm": weighted, "spectral-norm": spectral}


@pytest.mark.parametrize("kind", ["pruned", "weight-norm", "spectral-norm"])
def test_masked_and_parametrised_modules_come_under_plain_names(kind: str) -> None:
    model = disguised()[kind]
    plain = plain_copy(model)
    assert set(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).state_dict()) <= set(plain.state_dict())
    assert type(plain[0]) is nn.Linear  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(rows(3, 6)).square().sum().backward()
    optimizer.step()  # a pruned module's own weight attribute is now a step behind
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    state = cloned_state(model, tensor_names(plain))
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    with torch.no_grad():
        for (path, name), value in state.items():
            getattr(plain.get_submodule(path), name).copy_(value)
        wanted = model.eval()(rows(3, 6))
        assert torch.equal(plain(rows(3, 6)), wanted)
    model.train()(rows(3, 6)).sum().backward()  # the original still works, its class untouched
    made = reference_of(model, rows(8, 6))
    assert worst_error(made, model, rows(8, 6)) < 0.1


def test_the_copy_has_no_hooks_no_gradients_and_ties_what_was_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[0].register_forward_hook(lambda *_: pytest.fail("a hook of the training model ran"))
    plain = plain_copy(model)
    plain(torch.ones(1, 4))
    assert plain[0].weight is plain[2].weight  # type: ignore[index]
    assert not any(parameter.requires_grad for parameter in plain.parameters())
    assert not any(module.training for module in plain.modules())
    assert model.training
    assert len(model[0]._forward_hooks) == 1


def test_what_cannot_be_copied_is_one_sentence() -> None:
    model = nn.Linear(1, 1)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(LayerError, match=r"cannot be copied for the reference.*use reference='fp32'"):
        plain_copy(model)


def test_compiled_models_are_unwrapped() -> None:
    model = nn.Linear(2, 2)
    assert unwrapped(torch.compile(model)) is model  # type: ignore[arg-type]


def test_attention_of_the_copy_ignores_the_process_wide_switch() -> None:
    """Another session may flip it at any time; numbers would then depend on when."""
    plain = plain_copy(encoder())
    content = rows(4, 5, 16)
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[:, 4] = True
    results = []
    enabled = torch.backends.mha.get_fastpath_enabled()
    try:
        for switch in (True, False):
            torch.backends.mha.set_fastpath_enabled(switch)
            with torch.no_grad():
                results.append(plain(content, src_key_padding_mask=padding))
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
    assert results[0].shape == content.shape
    assert torch.equal(*results)


# --- draws --------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.conv(x), 0.5, training=True) + 0.1 * torch.randn_like(x[:, :, 2:, 2:])


def test_draws_in_eval_mode_are_private_and_repeat() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Noisy(), nn.Flatten(), nn.Linear(144, 2))
    content = rows(8, 1, 8, 8)
    made = ReferenceModel(model, layers(model, content[:2]), call)
    before = torch.get_rng_state()
    made.refresh(made.state_of(model), content)
    first = made.activations(content, ["2"])["2"]
    second = made.activations(content, ["2"])["2"]
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


def test_private_draws_cover_the_usual_ways_of_drawing() -> None:
    ones = torch.ones(6)
    half = torch.ones(1, 1, 4, 4)
    ways = [
        lambda: torch.rand(3), lambda: torch.randn_like(ones), lambda: torch.bernoulli(ones / 2),
        lambda: torch.randperm(6), lambda: torch.empty(6).uniform_(), lambda: torch.multinomial(ones, 2),
        lambda: nn.functional.dropout(ones), lambda: nn.functional.gumbel_softmax(ones),
        lambda: torch.randint_like(ones, 9), lambda: torch.distributions.Normal(0.0, 1.0).sample(),
        lambda: nn.functional.scaled_dot_product_attention(half, half, half, dropout_p=0.5),
    ]  # fmt: skip
    before = torch.get_rng_state()
    for way in ways:
        with torch.no_grad(), PrivateDraws(3) as draws:
            first = way()
        with torch.no_grad(), PrivateDraws(3):
            assert torch.equal(first, way())
        assert draws.used
    with torch.no_grad(), PrivateDraws(3) as draws:
        nn.functional.scaled_dot_product_attention(half, half, half)
    assert not draws.used
    assert torch.equal(before, torch.get_rng_state())
