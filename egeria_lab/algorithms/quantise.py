"""Low-precision stand-ins for modules: the one place that knows how torch quantises.

Measured on one core of an AVX-512 CPU with 64 rows, which decided what is quantised how:

* convolutions (with their batch norm, ReLU and additions) by static int8: 4-5 times faster than float32;
* linear layers by dynamic int8, whose input range is taken from each batch: as fast as static int8 (0.6 to
  2.6 times float32, small ones slower), with a quarter to a half less error around GELU, and it works in
  any module, traceable or not;
* activations use 7 bits, because 8-bit products overflow the 16-bit sums of CPUs without VNNI;
* ranges are the plain minimum and maximum: a histogram takes twice the time and gives the same error.

`torch.ao.quantization` is deprecated without a replacement for eager modules on CPU. Its undecorated
functions are called, so that its own deprecation warning, and no other, stays away.
"""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized.dynamic import Linear as DynamicLinear
from torch.ao.quantization import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_per_channel_weight_observer,
    per_channel_dynamic_qconfig,
)
from torch.ao.quantization.fx.prepare import prepare
from torch.ao.quantization.fx.tracer import QuantizationTracer
from torch.ao.quantization.quantize_fx import _fuse_fx, convert_fx
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights
from torch.utils._pytree import tree_map

from egeria_lab.errors import LayerError, unknown_name

Forward = Callable[..., Any]

ENGINES = ("auto", "int8", "bf16", "fp32")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVERT: Callable[[GraphModule], GraphModule] = inspect.unwrap(convert_fx)


class QuantisationRefused(LayerError):
    """A module that has no low-precision version; the message is the reason, without a full stop."""


def choose_engine(asked: str = "auto") -> tuple[str, str]:
    """The numeric format for this CPU, and why.

    Args:
        asked: ``"auto"``, ``"int8"``, ``"bf16"`` or ``"fp32"``. Auto takes int8 where torch has an engine for
            it, else bf16 where the CPU computes in it (elsewhere bf16 is up to 12 times slower than float32).

    Raises:
        UnknownNameError: for any other name.

    Example:
        >>> choose_engine("fp32")
        ('fp32', 'asked for')
    """
    if asked not in ENGINES:
        raise unknown_name("reference engine", asked, ENGINES)
    has_int8 = torch.backends.quantized.engine not in ("none", "NoQEngine")
    if asked == "int8" and not has_int8:
        return "fp32", "int8 was asked for, but this build of torch has no engine for it"
    if asked != "auto":
        return asked, "asked for"
    if has_int8:
        return "int8", f"torch's {torch.backends.quantized.engine} engine"
    if has_fast_bfloat16():
        return "bf16", "no int8 engine, but the CPU computes in bfloat16"
    return "fp32", "this build of torch has no int8 engine and the CPU no bfloat16 arithmetic"


def has_fast_bfloat16() -> bool:
    """True when the CPU has bfloat16 arithmetic; False when torch cannot tell.

    Example:
        >>> has_fast_bfloat16() in (True, False)
        True
    """
    tell = getattr(torch.cpu, "get_capabilities", dict)  # since torch 2.10
    able: dict[str, Any] = tell()
    return any(bool(able.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))


class StandIn:
    """A low-precision double of one module, whose weights it takes anew at each `convert`.

    Attributes:
        module: the float32 module it stands for; its calls are replaced, it is not changed.
        what: the kind of quantisation and of layers, in words.
    """

    what: str

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def calibrating(self) -> Forward | None:
        """Forget old ranges; answers with the forward that observes new ones, or None if none are needed."""
        return None

    def convert(self) -> Forward:
        """The low-precision forward for the module's weights of this moment.

        Raises:
            QuantisationRefused: when no ranges were observed since `calibrating`.
        """
        raise NotImplementedError


def quantise(module: nn.Module, engine: str) -> StandIn:
    """Make the low-precision double of one module.

    Call it where no model is being compiled: the module is traced. Other threads may run their models.

    Args:
        module: in eval mode, float32, on the CPU; with convolutions, or a linear layer by itself.
        engine: ``"int8"`` or ``"bf16"``.

    Raises:
        QuantisationRefused: with the reason, when there is no such double.

    Example:
        >>> linear = nn.Linear(8, 4).eval()
        >>> double = quantise(linear, "int8")
        >>> double.what, double.convert()(torch.ones(2, 8)).shape
        ('dynamic int8: 1 Linear', torch.Size([2, 4]))
    """
    if engine not in ("int8", "bf16"):
        raise unknown_name("low-precision engine", engine, ("int8", "bf16"))
    odd = {p.dtype for p in module.parameters() if p.is_floating_point()} - {torch.float32}
    if odd:
        raise QuantisationRefused(f"its weights are {', '.join(sorted(map(str, odd)))}, not float32")
    if engine == "bf16":
        return Bfloat16(module)
    if any(isinstance(inner, _CONVOLUTIONS) for inner in module.modules()):
        return StaticInt8(module)
    if type(module) is nn.Linear:
        return DynamicInt8(module)
    raise QuantisationRefused("it is neither a linear layer nor holds a convolution")


class DynamicInt8(StandIn):
    """int8 weights, one scale an output; the input is quantised by the range of each batch."""

    what = "dynamic int8: 1 Linear"

    def convert(self) -> Forward:
        _quieten()
        self.module.qconfig = per_channel_dynamic_qconfig  # type: ignore[assignment]  # where it is looked for
        forward: Forward = DynamicLinear.from_float(self.module).forward
        return forward


class Bfloat16(StandIn):
    """A copy of the module in bfloat16; what goes in and comes out is cast."""

    what = "bf16"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._copy = copy.deepcopy(module).to(torch.bfloat16)

    def convert(self) -> Forward:
        with torch.no_grad():
            for mine, theirs in zip(_tensors(self._copy), _tensors(self.module), strict=True):
                mine.copy_(theirs)
        inner = self._copy

        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map(_caster(torch.float32, torch.bfloat16), (args, kwargs))
            return tree_map(_caster(torch.bfloat16, torch.float32), inner(*args, **kwargs))

        return forward


class StaticInt8(StandIn):
    """int8 weights and activations by FX tracing; the ranges of activations come from calibration rows.

    Tracing and the insertion of observers happen once, here. A refresh folds the batch norms again, observes
    and converts: 5 to 10 ms for a residual block.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        _quieten()
        root = module if next(module.children(), None) is not None else nn.Sequential(module)
        tracer = _OneThreadTracer()
        try:
            traced = GraphModule(root, tracer.trace(root))
            self._folds = _fold_batch_norms(traced)
            fused = _fuse_fx(traced, False)
            self._prepared: Any = prepare(fused, _qconfigs(), False, tracer.node_name_to_scope, ())
        except Exception as error:  # whatever a user's own forward does under tracing
            raise QuantisationRefused(f"it cannot be traced ({_first_line(error)})") from error
        known = {id(p) for p in root.parameters()} | {id(p) for f in self._folds for p in f.tensors}
        if any(id(parameter) not in known for parameter in self._prepared.parameters()):
            raise QuantisationRefused("torch copied its weights while tracing, so they could not be refreshed")
        self._observers = [m for m in self._prepared.modules() if isinstance(m, MinMaxObserver)]
        self.what = f"static int8: {_census(self._prepared)}"

    def calibrating(self) -> Forward:
        for fold in self._folds:
            fold.update()
        for observer in self._observers:
            observer.reset_min_max_vals()
        forward: Forward = self._prepared.forward
        return forward

    def convert(self) -> Forward:
        if any(not bool(torch.isfinite(o.max_val - o.min_val).all()) for o in self._observers):
            raise QuantisationRefused("the calibration rows gave no finite range for its activations")
        # convert_fx consumes what it is given; the copy keeps the prepared module for the next refresh.
        forward: Forward = _CONVERT(copy.deepcopy(self._prepared)).forward
        return forward


class _OneThreadTracer(QuantizationTracer):
    """Tracing patches `nn.Module` for the whole process; calls from other threads are let through."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.record_stack_traces = False
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


class _Fold:
    """A convolution or linear layer with the batch norm behind it folded in, refreshed from the two."""

    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        self.layer, self.norm = layer, norm
        self.folded = copy.deepcopy(layer)
        width = layer.weight.shape[0]
        self.folded.bias = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.tensors = list(self.folded.parameters())

    def update(self) -> None:
        n: Any = self.norm
        fuse: Any = fuse_linear_bn_weights if isinstance(self.layer, nn.Linear) else fuse_conv_bn_weights
        with torch.no_grad():
            weight, bias = fuse(
                self.layer.weight, self.layer.bias, n.running_mean, n.running_var, n.eps, n.weight, n.bias
            )
            self.folded.weight.copy_(weight)  # type: ignore[operator]
            self.folded.bias.copy_(bias)  # type: ignore[operator, union-attr]


def _fold_batch_norms(traced: GraphModule) -> list[_Fold]:
    """Fold each batch norm into the layer before it, where that layer feeds nothing else and runs once."""
    modules = dict(traced.named_modules())
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    folds = []
    for node in list(traced.graph.nodes):
        before = node.args[0] if node.args else None
        if not _is_call(node, _BATCH_NORMS, modules) or not isinstance(before, Node):
            continue
        foldable = _is_call(before, (*_CONVOLUTIONS, nn.Linear), modules) and len(before.users) == 1
        norm = modules[str(node.target)]
        once = calls.count(str(node.target)) == 1 and calls.count(str(before.target)) == 1
        if not foldable or not once or norm.running_mean is None:
            continue
        fold = _Fold(modules[str(before.target)], norm)
        traced.set_submodule(str(before.target), fold.folded)
        node.replace_all_uses_with(before)
        traced.graph.erase_node(node)
        folds.append(fold)
    traced.delete_all_unused_submodules()
    traced.recompile()
    return folds


def _is_call(node: Node, kinds: tuple[type[nn.Module], ...], modules: dict[str, nn.Module]) -> bool:
    return node.op == "call_module" and type(modules[str(node.target)]) in kinds


def _qconfigs() -> QConfigMapping:
    activation = MinMaxObserver.with_args(dtype=torch.quint8, quant_min=0, quant_max=127)
    return QConfigMapping().set_global(QConfig(activation, default_per_channel_weight_observer))


def _census(module: nn.Module) -> str:
    kinds = [type(m).__name__ for m in module.modules() if isinstance(m, (*_CONVOLUTIONS, nn.Linear))]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _caster(given: torch.dtype, wanted: torch.dtype) -> Callable[[Any], Any]:
    return lambda leaf: leaf.to(wanted) if isinstance(leaf, Tensor) and leaf.dtype == given else leaf


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _quieten() -> None:
    """Let torch's own once-only notes about quantised tensors pass unseen, on the thread that builds."""
    global _quiet
    if not _quiet:
        _quiet = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*(quantize_per_tensor|torch\.ao).*deprecated")
            torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)


_quiet = False
