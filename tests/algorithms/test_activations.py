"""`capture`: what it takes, that it leaves no hook, and that later work in place does not reach what it took."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from egeria_lab.algorithms.activations import capture, first_tensor


def hooks(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )


def test_first_tensor_looks_into_nested_outputs() -> None:
    x = torch.ones(2)
    assert first_tensor(x) is x
    assert first_tensor((None, [{"a": 3, "b": x}])) is x
    assert first_tensor({"hidden": (x, torch.zeros(1))}) is x
    assert first_tensor([None, "text", ()]) is None


def test_captures_the_output_of_each_module() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    with capture({"first": model[0], "relu": model[1]}) as outputs:
        model(x)
    assert list(outputs) == ["first", "relu"]
    assert torch.equal(outputs["first"], model[0](x))
    assert torch.equal(outputs["relu"], model[0](x).relu())
    assert not outputs["first"].requires_grad
    assert hooks(model) == 0


def test_rows_and_reduce() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    x = torch.randn(5, 3)
    with capture({"0": model[0]}, reduce=lambda t: t.sum(), rows=2) as outputs:
        model(x)
    assert torch.equal(outputs["0"], model[0](x)[:2].detach().sum())


def test_hooks_go_also_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(9, 2))
    with pytest.raises(RuntimeError), capture({"0": model[0], "1": model[1]}) as outputs:
        model(torch.zeros(1, 3))
    assert hooks(model) == 0
    assert list(outputs) == ["0"]


def test_the_first_call_counts_when_a_layer_is_recomputed() -> None:
    """traps row 55: under checkpointing forward hooks run again at recompute; one sample a step is right."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    calls = []
    with capture({"0": model[0]}, reduce=lambda t: calls.append(1) or t.clone()) as outputs:  # type: ignore[func-returns-value]
        hidden = checkpoint(model[0], torch.ones(2, 3), use_reentrant=False)
        first = outputs["0"].clone()
        with torch.no_grad():
            model[0].bias.add_(1)  # the recomputation would give something else
        model[1](hidden).sum()
        model[0](torch.zeros(2, 3))
    assert len(calls) == 1
    assert torch.equal(outputs["0"], first)


def test_work_in_place_behind_a_layer_does_not_reach_its_captured_output() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    x = torch.randn(8, 3)
    before = model[0](x).detach().clone()
    with capture({"linear": model[0]}) as outputs:
        model(x)
    assert bool((before < 0).any())
    assert torch.equal(outputs["linear"], before)


def test_a_module_without_a_tensor_output_is_left_out() -> None:
    class Says(nn.Module):
        def forward(self, x: torch.Tensor) -> str:
            return "nothing"

    module = Says()
    with capture({"says": module}) as outputs:
        module(torch.zeros(1))
    assert outputs == {}


def test_capturing_does_not_change_gradients_or_keep_the_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 3)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with capture({"0": model[0], "1": model[1]}) as outputs:
        model(x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True) if p.grad is not None)
    assert all(output.grad_fn is None for output in outputs.values())
