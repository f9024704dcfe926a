"""The adapter: what quantises how, what is refused with which reason, and that a refresh takes new weights."""

from __future__ import annotations

import gc
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

from egeria_lab.algorithms import quantise as adapter
from egeria_lab.algorithms.quantise import choose_engine, quantise
from egeria_lab.algorithms.static_int8 import QuantisationRefusedError, StandIn
from egeria_lab.errors import UnknownNameError
from egeria_lab.models.resnet import ResidualBlock


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    """Weights and statistics from a generator of our own, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + (0.5 if tensor.dim() < 2 else -0.5))
    return module.eval()


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def converted(double: StandIn, content: Tensor) -> Tensor:
    with torch.no_grad():
        observe = double.calibrating()
        if observe is not None:
            observe(content)
        result: Tensor = double.convert()(content)
    return result


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("module", "shape", "what"),
    [
        (nn.Conv2d(3, 8, 3), (4, 3, 8, 8), "static int8: 1 Conv2d"),
        (nn.Conv1d(3, 8, 3), (4, 3, 8), "static int8: 1 Conv1d"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), (4, 3, 8, 8), "static int8: 1 Conv2d"),
        (ResidualBlock(4, 8, 2, "conv"), (4, 4, 8, 8), "static int8: 3 Conv2d"),
        (ResidualBlock(4, 8, 2, "pad"), (4, 4, 8, 8), "static int8: 2 Conv2d"),
        (nn.Linear(16, 8), (4, 16), "dynamic int8: 1 Linear"),
    ],
    ids=["conv", "conv1d", "conv-norm-relu", "block", "block-pad", "linear"],
)
def test_int8_is_close_and_refreshes(module: nn.Module, shape: tuple[int, ...], what: str) -> None:
    filled(module)
    double = quantise(module, "int8")
    assert double.what == what
    content = rows(*shape)
    with torch.no_grad():
        first = module(content)
    got = converted(double, content)
    assert got.dtype == torch.float32
    assert 0 < relative_error(got, first) < 0.1  # not zero: it was really computed in int8

    filled(module, seed=7)  # weights, batch-norm statistics: all new
    with torch.no_grad():
        second = module(content)
    assert relative_error(second, first) > 0.3
    assert relative_error(converted(double, content), second) < 0.1


def test_bf16_is_close_and_refreshes() -> None:
    module = filled(ResidualBlock(4, 8, 2, "conv"))
    double = quantise(module, "bf16")
    content = rows(4, 4, 8, 8)
    for seed in (0, 7):
        filled(module, seed)
        with torch.no_grad():
            wanted = module(content)
        got = converted(double, content)
        assert got.dtype == torch.float32
        assert 0 < relative_error(got, wanted) < 0.05


def test_a_leaf_whose_call_is_replaced_does_not_call_itself() -> None:
    conv = filled(nn.Conv2d(1, 2, 3))
    double = quantise(conv, "int8")
    content = rows(2, 1, 5, 5)
    observe = double.calibrating()
    assert observe is not None
    vars(conv)["forward"] = observe
    conv(content)
    vars(conv)["forward"] = double.convert()
    assert conv(content).shape == (2, 2, 3, 3)


def test_refusals_say_why() -> None:
    with pytest.raises(QuantisationRefusedError, match="neither a linear layer nor holds a convolution"):
        quantise(nn.LayerNorm(4).eval(), "int8")
    with pytest.raises(QuantisationRefusedError, match=r"weights are torch\.float64, not float32"):
        quantise(nn.Linear(2, 2).double(), "int8")
    with pytest.raises(QuantisationRefusedError, match=r"cannot be traced.*Proxy"):
        quantise(Branching().eval(), "int8")
    double = quantise(filled(nn.Conv2d(1, 1, 3)), "int8")
    double.calibrating()
    with pytest.raises(QuantisationRefusedError, match="no finite range"):
        double.convert()


class Branching(nn.Module):
    """Looks at its numbers, which tracing cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if float(x.sum()) > 0 else self.conv(-x)


def test_engine_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_engine("bf16") == ("bf16", "asked for")
    with pytest.raises(UnknownNameError, match="Did you mean 'int8'"):
        choose_engine("int4")
    monkeypatch.setattr(adapter.torch.backends, "quantized", type("none", (), {"engine": "none"}))
    engine, reason = choose_engine("int8")
    assert engine == "fp32"
    assert "no engine for it" in reason
    # An AVX2-only CPU has no bfloat16 arithmetic: bf16 would be slower there than float32.
    monkeypatch.setattr(adapter.torch.cpu, "get_capabilities", lambda: {"avx2": True}, raising=False)
    assert choose_engine("auto")[0] == "fp32"
    monkeypatch.setattr(adapter.torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert choose_engine("auto")[0] == "bf16"


def test_no_number_of_the_global_generator_is_used() -> None:
    """torch builds modules with random weights when it converts, and that runs beside training."""
    modules = [filled(ResidualBlock(4, 8, 2, "conv")), filled(nn.Linear(4, 2))]
    contents = [rows(4, 4, 8, 8), rows(3, 4)]
    before = torch.get_rng_state()
    for module, content in zip(modules, contents, strict=True):
        converted(quantise(module, "int8"), content)
    assert torch.equal(before, torch.get_rng_state())


def test_no_warning_comes_through() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted(quantise(filled(nn.Conv2d(1, 2, 3)), "int8"), rows(2, 1, 5, 5))
        converted(quantise(filled(nn.Linear(4, 2)), "int8"), rows(2, 4))


def test_other_threads_may_run_models_while_one_traces() -> None:
    """Tracing patches nn.Module for all threads; a training step on another one must not notice."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)).eval()
    content = rows(2, 1, 5, 5)
    wanted = model(content)
    inside, go_on = threading.Event(), threading.Event()
    results: list[object] = []

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 3)

        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert go_on.wait(10)
            return self.conv(x)

    def train() -> None:
        assert inside.wait(10)
        try:
            results.append(torch.equal(model(content), wanted))
        except BaseException as error:
            results.append(error)
        go_on.set()

    thread = threading.Thread(target=train)
    thread.start()
    double = quantise(Waits().eval(), "int8")
    thread.join()
    assert results == [True]
    assert double.what == "static int8: 1 Conv2d"


def test_snapshots_that_were_replaced_are_let_go() -> None:
    """torch would keep the module of each conversion; a long run makes thousands."""
    content = rows(4, 3, 8, 8)
    double = quantise(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval(), "int8"
    )

    def alive_after_one_more() -> int:
        calibrating = double.calibrating()
        assert calibrating is not None
        calibrating(content)
        double.convert()
        gc.collect()
        return sum(type(thing).__name__.startswith("GraphModule") for thing in gc.get_objects())

    before = alive_after_one_more()
    assert [alive_after_one_more() for _ in range(2)] == [before] * 2
