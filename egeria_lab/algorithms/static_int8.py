"""Static int8 for one module by torch's FX tracing, made so that only weights and ranges are refreshed.

Tracing patches `nn.Module` for the whole process, so it happens once, on the thread that builds, and lets the
calls of other threads through. What runs at a refresh (fold, observe, convert) patches nothing.
"""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_per_channel_weight_observer,
)
from torch.ao.quantization.fx import utils as fx_utils
from torch.ao.quantization.fx.prepare import prepare
from torch.ao.quantization.fx.tracer import QuantizationTracer
from torch.ao.quantization.quantize_fx import _fuse_fx, convert_fx
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from egeria_lab.algorithms.private_draws import PrivateDraws
from egeria_lab.errors import LayerError

Forward = Callable[..., Any]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_convert: Callable[[GraphModule], GraphModule] = inspect.unwrap(convert_fx)  # without the deprecation warning


class QuantisationRefusedError(LayerError):
    """A module that has no low-precision version; the message is the reason, without a full stop."""


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

    def ranges(self) -> list[list[float]]:
        """The ranges that were observed, as ``[lowest, highest]``; empty where none are needed."""
        return []

    def take_ranges(self, ranges: Sequence[Sequence[float]]) -> None:
        """In place of `calibrating` and a run: the ranges that another run observed."""

    def convert(self) -> Forward:
        """The low-precision forward for the module's weights of this moment.

        Raises:
            QuantisationRefusedError: when no ranges were observed since `calibrating`.
        """
        raise NotImplementedError


class StaticInt8(StandIn):
    """int8 weights and activations by FX tracing; the ranges of activations come from calibration rows.

    Tracing and the insertion of observers happen once, here. A refresh folds the batch norms again, observes
    and converts: 15 to 20 ms of CPU time for a residual block, on whatever thread runs it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        root = _with_own_calls(module)
        tracer = _OneThreadTracer()
        try:
            traced = GraphModule(root, tracer.trace(root))
            self._folds = _fold_batch_norms(traced)
            fused = _fuse_fx(traced, False)
            self._prepared: Any = prepare(fused, _qconfigs(), False, tracer.node_name_to_scope, ())
        except Exception as error:  # whatever a user's own forward does under tracing
            raise QuantisationRefusedError(f"it cannot be traced ({_first_line(error)})") from error
        known = {id(p) for p in root.parameters()} | {id(p) for f in self._folds for p in f.tensors}
        if any(id(parameter) not in known for parameter in self._prepared.parameters()):
            raise QuantisationRefusedError("torch copied its weights: they could not be refreshed")
        self._observers = [m for m in self._prepared.modules() if isinstance(m, MinMaxObserver)]
        self.what = f"static int8: {_census(self._prepared)}"

    def calibrating(self) -> Forward:
        for fold in self._folds:
            fold.update()
        for observer in self._observers:
            observer.reset_min_max_vals()
        forward: Forward = self._prepared.forward
        return forward

    def ranges(self) -> list[list[float]]:
        return [[float(observer.min_val), float(observer.max_val)] for observer in self._observers]

    def take_ranges(self, ranges: Sequence[Sequence[float]]) -> None:
        self.calibrating()
        for observer, (low, high) in zip(self._observers, ranges, strict=True):
            observer.min_val.fill_(low)
            observer.max_val.fill_(high)

    def convert(self) -> Forward:
        if any(not bool(torch.isfinite(o.max_val - o.min_val).all()) for o in self._observers):
            raise QuantisationRefusedError("the calibration rows gave no finite range for its activations")
        # convert_fx consumes what it is given; the copy keeps the prepared module for the next refresh. It
        # builds modules that initialise their weights, and the generator of the process is training's.
        with PrivateDraws(0):
            forward: Forward = _convert(copy.deepcopy(self._prepared)).forward
        _let_go_of_modules()
        return forward


def _with_own_calls(module: nn.Module) -> nn.Module:
    """The module with leaves that share tensors but are objects of their own.

    Traced code calls leaves. Were a leaf itself one of the calls to be replaced, it would call itself.
    """
    if next(module.children(), None) is None:
        return nn.Sequential(copy.copy(module))
    if type(module) is nn.Sequential:
        return nn.Sequential(*[copy.copy(child) for child in module])
    return module


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

    def __init__(self, layer: Any, norm: Any) -> None:
        self.layer, self.norm = layer, norm
        self.folded = copy.deepcopy(layer)
        self.folded.bias = nn.Parameter(torch.zeros(len(norm.running_mean)), requires_grad=False)
        self.tensors = list(self.folded.parameters())

    def update(self) -> None:
        n = self.norm
        fuse: Any = fuse_linear_bn_weights if isinstance(self.layer, nn.Linear) else fuse_conv_bn_weights
        with torch.no_grad():
            weight, bias = fuse(
                self.layer.weight, self.layer.bias, n.running_mean, n.running_var, n.eps, n.weight, n.bias
            )
            self.folded.weight.copy_(weight)
            self.folded.bias.copy_(bias)


def _fold_batch_norms(traced: GraphModule) -> list[_Fold]:
    """Fold each batch norm into the layer before it, where that layer feeds nothing else and runs once."""
    modules = dict(traced.named_modules())
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    folds = []
    for node in list(traced.graph.nodes):
        before = node.args[0] if node.args else None
        if not _is_call(node, _BATCH_NORMS, modules) or not isinstance(before, Node):
            continue
        foldable = _is_call(before, (*CONVOLUTIONS, nn.Linear), modules) and len(before.users) == 1
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
    qconfig = QConfig(activation, default_per_channel_weight_observer)  # type: ignore[no-untyped-call]
    return QConfigMapping().set_global(qconfig)


def _census(module: nn.Module) -> str:
    kinds = [type(m).__name__ for m in module.modules() if isinstance(m, (*CONVOLUTIONS, nn.Linear))]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _let_go_of_modules() -> None:
    """torch asks each module that it prepares or converts for its device through a cache, which keeps all of them for
    good: 1.3 MB for each snapshot of a ResNet-8."""
    clear = getattr(getattr(fx_utils, "assert_and_get_unique_device", None), "cache_clear", None)
    if clear is not None:
        clear()


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def quieten() -> None:
    """Let torch's own once-only notes about quantised tensors pass unseen, on the thread that builds."""
    global _quiet
    if not _quiet:
        _quiet = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*(quantize_per_tensor|torch\.ao).*deprecated")
            torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)


_quiet = False
