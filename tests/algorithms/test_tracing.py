"""The replay behind every cut: what is skipped, what is poisoned, what leaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egeria_lab.algorithms.tracing import is_good_cut, record, same_outputs, skipping, undisturbed


class Skip(nn.Module):
    """Two layers with a skip connection around the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        out: Tensor = self.c(self.b(hidden) + hidden)
        return out


def traced(model: nn.Module, x: Tensor) -> tuple[list[Any], Any, Any]:
    def forward() -> object:
        return model(x)

    calls, outputs = record(model, forward)
    return calls, outputs, forward


def test_calls_are_listed_in_order_of_completion_with_what_lies_inside() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 2))
    calls, outputs, _ = traced(model, torch.ones(1, 3))
    assert [call.name for call in calls] == ["0.0", "0.1", "0", "1"]
    assert [call.first for call in calls] == [0, 1, 0, 3]
    assert torch.equal(calls[-1].output, outputs)
    assert not calls[0].output.requires_grad


def test_recorded_outputs_are_copies() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    x = torch.randn(8, 3)
    calls, _, _ = traced(model, x)
    assert torch.equal(calls[0].output, F.linear(x, model[0].weight, model[0].bias))


def test_a_chain_is_good_everywhere_and_a_skip_connection_is_not() -> None:
    x = torch.ones(1, 3)
    model: nn.Module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    calls, outputs, forward = traced(model, x)
    assert [is_good_cut(calls, i, forward, outputs) for i in range(3)] == [True, True, True]
    model = Skip()
    calls, outputs, forward = traced(model, x)
    assert [is_good_cut(calls, i, forward, outputs) for i in range(3)] == [True, False, True]


def test_a_leak_that_multiplies_by_zero_is_still_seen() -> None:
    """0 × NaN is NaN: a path with weight zero today still leaks."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.gate = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            out: Tensor = self.b(hidden) + self.gate * hidden
            return out

    calls, outputs, forward = traced(Gated(), torch.ones(1, 3))
    assert not is_good_cut(calls, 1, forward, outputs)


def test_leaks_through_integers_and_booleans_are_seen() -> None:
    class Route(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(1)

    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x > 0

    class Leaky(nn.Module):
        def __init__(self, side: nn.Module) -> None:
            super().__init__()
            self.side, self.a, self.b = side, nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            side = self.side(x)
            out: Tensor = self.b(self.a(x))
            return out * side.reshape(len(x), -1).float()

    x = torch.tensor([[0.5, 2.0, 1.0], [3.0, 1.0, 2.0]])
    for side in (Route(), Mask()):
        calls, outputs, forward = traced(Leaky(side), x)
        position = [call.name for call in calls].index("a")
        assert not is_good_cut(calls, position, forward, outputs)


def test_user_code_that_fails_on_poison_counts_as_a_leak() -> None:
    class Checks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            out: Tensor = self.b(hidden)
            if bool(hidden.isnan().any()):
                raise ValueError("not a number")
            return out

    calls, outputs, forward = traced(Checks(), torch.ones(1, 3))
    assert not is_good_cut(calls, 1, forward, outputs)
    assert is_good_cut(calls, 0, forward, outputs)


def test_skipping_really_skips() -> None:
    ran = []

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            ran.append(self)
            return super().forward(x)

    model = nn.Sequential(Counts(3, 3), Counts(3, 3), Counts(3, 2))
    calls, outputs, forward = traced(model, torch.ones(1, 3))
    ran.clear()
    with skipping(calls, 1, calls[1].output):
        assert torch.equal(forward(), outputs)
    assert ran == [model[2]]
    assert all("forward" not in module.__dict__ for module in model)


def test_forwards_come_back_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(RuntimeError):
        record(model, lambda: model(torch.ones(1, 99)))
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_same_outputs() -> None:
    one = torch.ones(2)
    assert same_outputs({"a": one, "b": (one, None)}, {"a": one.clone(), "b": (one, None)})
    assert not same_outputs({"a": one}, {"b": one})
    assert not same_outputs([one], [one, one])
    assert not same_outputs([one], (one,))
    assert not same_outputs(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_outputs(one, 1.0)


def test_undisturbed_puts_back_modes_buffers_and_generators_also_after_an_error() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[1].eval()
    rng = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), undisturbed(model):  # noqa: PT012
        assert not any(m.training for m in model.modules())
        model[0].running_mean += 7
        torch.randn(3)
        _ = 1 / 0
    assert [m.training for m in model.modules()] == [True, True, False]
    assert torch.equal(model[0].running_mean, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), rng)
