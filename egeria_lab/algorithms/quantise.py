"""Low-precision stand-ins for modules: the one place that knows how torch quantises.

Measured on one core of an AVX-512 CPU with 64 rows, which decided what is quantised how:

* convolutions (with their batch norm, ReLU and additions) by static int8: 3-5 times faster than float32;
* linear layers by dynamic int8, whose input range is taken from each batch: as fast as static int8 (0.6 to
  2.6 times float32, small ones slower), with a quarter to a half less error around GELU, and it works in
  any module, traceable or not;
* convolutions over patches stay float32: they are 1 % of a transformer's work, and as its first layer
  their plasticity (1e-9 to 1e-7) is smaller than int8's rounding (4e-8);
* activations use 7 bits, because 8-bit products overflow the 16-bit sums of CPUs without VNNI;
* ranges are the plain minimum and maximum: a histogram takes twice the time and gives the same error.

`torch.ao.quantization` is deprecated without a replacement for eager modules on CPU. Its undecorated
functions are called, so that its own deprecation warning, and no other, stays away.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized.dynamic import Linear as DynamicLinear
from torch.ao.quantization import per_channel_dynamic_qconfig
from torch.utils._pytree import tree_map

from egeria_lab.algorithms.private_draws import PrivateDraws
from egeria_lab.algorithms.static_int8 import (
    CONVOLUTIONS,
    Forward,
    QuantisationRefusedError,
    StandIn,
    StaticInt8,
    quieten,
)
from egeria_lab.errors import unknown_name

ENGINES = ("auto", "int8", "bf16", "fp32")


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
    has_int8 = torch.backends.quantized.engine not in ("none", None)
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


def quantise(module: nn.Module, engine: str) -> StandIn:
    """Make the low-precision double of one module.

    The module is traced: other threads may run their models meanwhile, but not compile one.

    Args:
        module: in eval mode, float32, on the CPU; with convolutions, or a linear layer by itself.
        engine: ``"int8"`` or ``"bf16"``.

    Raises:
        QuantisationRefusedError: with the reason, when there is no such double.

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
        raise QuantisationRefusedError(f"its weights are {', '.join(sorted(map(str, odd)))}, not float32")
    quieten()
    if engine == "bf16":
        return Bfloat16(module)
    convolutions = [inner for inner in module.modules() if isinstance(inner, CONVOLUTIONS)]
    if convolutions and all(_cuts_patches(inner) for inner in convolutions):
        raise QuantisationRefusedError("a convolution over patches costs too little to be worth the rounding")
    if convolutions:
        return StaticInt8(module)
    if type(module) is nn.Linear:
        return DynamicInt8(module)
    raise QuantisationRefusedError("it is neither a linear layer nor holds a convolution")


class DynamicInt8(StandIn):
    """int8 weights, one scale an output; the input is quantised by the range of each batch."""

    what = "dynamic int8: 1 Linear"

    def convert(self) -> Forward:
        self.module.qconfig = per_channel_dynamic_qconfig  # type: ignore[assignment]  # where it is looked for
        with PrivateDraws(0):  # for its initial weights, which nobody sees
            double: Any = DynamicLinear.from_float(self.module)  # type: ignore[no-untyped-call]
        forward: Forward = double.forward
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


def _cuts_patches(module: nn.Module) -> bool:
    """True where a convolution uses each input once, as patch embeddings do."""
    kernel: Any = module.kernel_size
    return tuple(kernel) == module.stride and max(kernel) > 1


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _caster(given: torch.dtype, wanted: torch.dtype) -> Callable[[Any], Any]:
    return lambda leaf: leaf.to(wanted) if isinstance(leaf, Tensor) and leaf.dtype == given else leaf
