"""Every matrix product and convolution of one forward pass: its FLOPs, its weight, and what it depends on.

One pass is enough to know the cost of a step under any frozen set: a product's gradient towards one of its
operands is computed exactly when that operand depends on a parameter that is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from egeria_lab.algorithms.tracing import undisturbed

Formulas = Mapping[Any, Callable[..., int]]
"""Operation → formula for its FLOPs, as `torch.utils.flop_counter` keeps them."""

_aten = torch.ops.aten
_SECOND_AND_THIRD = (_aten.addmm, _aten.baddbmm)  # the first argument is only added
_FIRST_AND_SECOND = (_aten.mm, _aten.bmm, _aten.convolution, _aten._convolution)


@dataclass(frozen=True, slots=True)
class Product:
    """Equal products of one layer module, counted together, per sample.

    Attributes:
        layer: position of the layer module in which it runs, front to back.
        weight: name of the parameter that is one operand, or None (attention scores, for example).
        flops: FLOPs of the forward pass; the gradient towards each operand costs as much again.
        outputs: elements of its results.
        depends: for each operand, the layer modules whose trainable parameters it depends on; the weight,
            where there is one, comes last.
    """

    layer: int
    weight: str | None
    flops: float
    outputs: float
    depends: tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter as the tracer needs it: its name, and the layer module that trains it, if any does."""

    name: str
    parameter: Tensor
    layer: int | None


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a tensor comes from: which weights, which layers' parameters, and whether any data."""

    weights: frozenset[str] = frozenset()
    layers: frozenset[int] = frozenset()
    data: bool = False


_DATA = _Origin(data=True)
_CONSTANT = _Origin()


@dataclass(slots=True)
class _Total:
    flops: float = 0.0
    outputs: float = 0.0


@dataclass(slots=True)
class _Place:
    """One parameter (or buffer) inside a storage, which several may share."""

    start: int
    end: int
    origin: _Origin = field(default=_CONSTANT)


class ProductTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the products that run while it is entered; enter it before the mode that takes operations apart.

    A tensor computed from weights alone (a masked, cast or transposed weight) counts as that weight. What
    was detached on the way still counts as depending on what it was computed from.

    Args:
        weights: the parameters.
        buffers: tensors that are neither parameters nor data.
        formulas: the FLOPs of each operation.
        layer: tells the position of the layer module that is running.
    """

    supports_higher_order_operators = True

    def __init__(
        self, weights: Sequence[Weight], buffers: Sequence[Tensor], formulas: Formulas, layer: Callable[[], int]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_on = True
        self._formulas = formulas
        self._layer = layer
        self._sizes = {weight.name: weight.parameter.numel() for weight in weights}
        self._places: dict[StorageWeakRef, list[_Place]] = {}
        self._computed: dict[StorageWeakRef, _Origin] = {}
        self._totals: dict[tuple[int, str | None, tuple[frozenset[int], ...]], _Total] = {}
        for weight in weights:
            layers = frozenset() if weight.layer is None else frozenset({weight.layer})
            self._place(weight.parameter, _Origin(frozenset({weight.name}), layers))
        for buffer in buffers:
            self._place(buffer, _CONSTANT)

    def products(self, num_samples: int) -> tuple[Product, ...]:
        """What was noted, per sample, in order of first occurrence."""
        return tuple(
            Product(layer, weight, total.flops / num_samples, total.outputs / num_samples, depends)
            for (layer, weight, depends), total in self._totals.items()
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.is_on:
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            packet = getattr(func, "_overloadpacket", None)
            if packet in self._formulas:
                self._note(packet, args, inputs, self._formulas[packet](*args, **kwargs, out_val=out), out)
            self._remember(out, [self._origin(tensor) for tensor in inputs])
        return out

    def _place(self, tensor: Tensor, origin: _Origin) -> None:
        key = _storage(tensor)
        if key is not None:
            start = int(tensor.storage_offset())
            self._places.setdefault(key, []).append(_Place(start, start + tensor.numel(), origin))

    def _origin(self, tensor: Tensor) -> _Origin:
        key = _storage(tensor)
        if key is None:
            return _DATA
        places = self._places.get(key)
        if places is None:
            return self._computed.get(key, _DATA)
        offset = tensor.storage_offset()  # recurrent layers keep all their weights in one storage
        return next((place.origin for place in places if place.start <= offset < place.end), places[0].origin)

    def _remember(self, out: object, origins: Sequence[_Origin]) -> None:
        made = _Origin(
            frozenset().union(*(origin.weights for origin in origins)),
            frozenset().union(*(origin.layers for origin in origins)),
            any(origin.data for origin in origins),
        )
        for leaf in tree_leaves(out):
            key = _storage(leaf) if isinstance(leaf, Tensor) else None
            if key is not None and key not in self._places:
                self._computed[key] = made

    def _note(self, packet: Any, args: Sequence[Any], inputs: list[Tensor], flops: int, out: object) -> None:
        operands = inputs
        if packet in _SECOND_AND_THIRD:
            operands = [args[1], args[2]]
        elif packet in _FIRST_AND_SECOND:
            operands = [args[0], args[1]]
        origins = [self._origin(tensor) for tensor in operands]
        origins.sort(key=lambda origin: bool(origin.weights) and not origin.data)  # stable: weights go last
        names = origins[-1].weights if origins and not origins[-1].data else frozenset()
        weight = max(sorted(names), key=lambda name: self._sizes[name], default=None)
        key = (self._layer(), weight, tuple(origin.layers for origin in origins))
        total = self._totals.setdefault(key, _Total())
        total.flops += float(flops)
        total.outputs += sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    """The identity of a tensor's storage, which stays taken while this is kept; None where there is none."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):  # sparse and opaque tensors
        return None


def weights_of(model: nn.Module, owners: Mapping[int, int | None]) -> list[Weight]:
    """The parameters of a model with the layer module that trains each, given as parameter id → position."""
    return [Weight(name, parameter, owners.get(id(parameter))) for name, parameter in model.named_parameters()]


def parameter_flops(model: nn.Module, forward: Callable[[], object], num_samples: int) -> dict[str, float]:
    """Forward FLOPs per sample of every parameter; 0 for those that are only added or multiplied.

    Args:
        model: any module; left as it was.
        forward: runs it on `num_samples` samples.
        num_samples: samples in that batch, >= 1.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2, bias=False))
        >>> parameter_flops(model, lambda: model(torch.zeros(5, 1, 4, 4)), 5)
        {'0.weight': 144.0, '0.bias': 0.0, '2.weight': 32.0}
    """
    with undisturbed(model), countable_kernels(model), torch.no_grad():
        counter = flop_counter()
        tracer = ProductTracer(weights_of(model, {}), list(model.buffers()), counter.flop_registry, lambda: 0)
        with tracer, counter:
            forward()
    flops = {name: 0.0 for name, _ in model.named_parameters()}
    for product in tracer.products(num_samples):
        if product.weight is not None:
            flops[product.weight] += product.flops
    return flops


def flop_counter() -> FlopCounterMode:
    """Torch's counter, in one total for all modules, with the gradients of grouped convolutions put right.

    Totals module by module are switched off: the hooks behind them fail on modules whose inputs are
    parameters, as those of `torch.nn.utils.parametrizations` are.

    Example:
        >>> x, weight = torch.zeros(1, 4, 3, 3), torch.zeros(4, 1, 1, 1, requires_grad=True)
        >>> with flop_counter() as counter:
        ...     torch.nn.functional.conv2d(x, weight, groups=4).sum().backward()
        >>> counter.get_total_flops()    # 2 × 4 channels × 9 pixels, forward and weight gradient
        144
    """
    counter = FlopCounterMode(display=False, custom_mapping={_aten.convolution_backward: _gradients_of_convolution})
    counter.mod_tracker = _OneTotal()  # type: ignore[assignment]
    return counter


class _OneTotal:
    """What `FlopCounterMode` asks for the modules that run: there is only the whole."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _OneTotal:
        return self

    def __exit__(self, *_error: object) -> None:
        return None


def _gradients_of_convolution(
    output: Sequence[int], x: Sequence[int], weight: Sequence[int], *args: Any, out_shape: object = None, **_: object
) -> int:
    """Input and weight gradient cost what the forward pass does; torch counts grouped ones as if they were full.

    Args are the shapes of `aten.convolution_backward`'s tensors, then its other arguments.
    """
    transposed, wanted = bool(args[4]), args[7]
    pixels = prod((x if transposed else output)[2:])
    return 2 * x[0] * pixels * prod(weight) * (int(wanted[0]) + int(wanted[1]))


@contextmanager
def countable_kernels(model: nn.Module) -> Iterator[None]:
    """While the block runs, do without the fused kernels whose products no counter sees.

    Attention goes by plain products on every device; recurrent layers too, which needs cuDNN and oneDNN off.
    """
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            # The public switch of oneDNN sets more than this, and warns about it on machines without it.
            stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
            torch._C._set_mkldnn_enabled(False)
        yield
