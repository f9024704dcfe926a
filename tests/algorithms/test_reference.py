"""The snapshot: it does not move when the model does, runs only as far as needed, and leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from egeria_lab.algorithms.reference import Reference, evaluating


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))


def reference_of(model: nn.Sequential) -> Reference:
    return Reference(model, {"front": model[2], "head": model[4]}, lambda m, x: m(x))


def test_the_snapshot_stays_when_weights_and_statistics_move() -> None:
    model, x = net(), torch.randn(6, 3)
    reference = reference_of(model)
    reference.refresh()
    assert reference.generation == 1
    model.eval()
    expected = model(x).detach()
    model.train()
    with torch.no_grad():
        model(x + 3)  # running statistics move
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(reference.activations(x)["head"], expected)
    assert not torch.equal(reference.current(x)["head"], expected)
    reference.refresh()
    assert reference.generation == 2
    assert torch.equal(reference.activations(x)["head"], reference.current(x)["head"])


def test_right_after_a_refresh_nothing_differs() -> None:
    model, x = net(), torch.randn(6, 3)
    reference = reference_of(model)
    reference.refresh()
    before, now = reference.activations(x), reference.current(x)
    assert list(before) == list(now) == ["front", "head"]
    assert all(torch.equal(before[name], now[name]) for name in before)


def test_what_lies_behind_the_wanted_layer_is_not_run() -> None:
    model, x = net(), torch.randn(6, 3)
    ran = []
    model[4].register_forward_hook(lambda *_: ran.append("head"))
    reference = reference_of(model)
    reference.refresh()
    assert list(reference.activations(x, stop_after=model[2])) == ["front"]
    assert list(reference.current(x, stop_after=model[2])) == ["front"]
    assert ran == []
    reference.current(x)
    assert ran == ["head"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool) -> None:
    model, x = net(), torch.randn(6, 3)
    model[1].eval()
    reference = reference_of(model)
    reference.refresh()
    with torch.no_grad():
        model[0].weight.add_(1)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    identity = [id(p) for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    attributes = [sorted(m.__dict__) for m in model.modules()]
    wrong = torch.randn(6, 9) if fails else x
    for call in (reference.activations, reference.current):
        if fails:
            with pytest.raises(RuntimeError):
                call(wrong)
        else:
            call(wrong, stop_after=model[2])
            call(wrong)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert [id(p) for p in model.parameters()] == identity
    assert [m.training for m in model.modules()] == modes
    assert [sorted(m.__dict__) for m in model.modules()] == attributes
    assert sum(len(m._forward_hooks) for m in model.modules()) == 0
    assert torch.is_grad_enabled()


def test_tied_weights_are_swapped_in_together() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.decode = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.decode.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.decode(self.embed(x))
            return out

    model, x = Tied(), torch.tensor([1, 4])
    reference = Reference(model, {"decode": model.decode}, lambda m, ids: m(ids))
    reference.refresh()
    expected = model(x).detach()
    with torch.no_grad():
        model.embed.weight.mul_(3)
    assert torch.equal(reference.activations(x)["decode"], expected)


def test_a_model_whose_weights_cannot_be_deep_copied_is_snapshotted() -> None:
    """traps row 60: a non-leaf tensor in the model refuses deepcopy; tensors are copied by name instead."""
    model = net()
    model.cache = (model[0].weight * 2,)  # type: ignore[assignment]
    reference = reference_of(model)
    reference.refresh()
    assert reference.activations(torch.randn(2, 3))["head"].shape == (2, 2)


def test_evaluating_restores_every_mode_also_after_an_error() -> None:
    model = net()
    model[3].eval()
    with pytest.raises(ZeroDivisionError), evaluating(model):  # noqa: PT012
        assert not any(m.training for m in model.modules())
        assert not torch.is_grad_enabled()
        _ = 1 / 0
    assert [m.training for m in model.modules()] == [True, True, True, True, False, True]
    assert torch.is_grad_enabled()
