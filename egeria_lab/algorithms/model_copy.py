"""A model's structure copied once, and its tensors handed over again and again.

The copy is plain: no hooks, no gradients, eval mode, pruned and re-parametrised weights under their usual
names with the values that the forward pass uses. It is safe to run on another thread.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from egeria_lab.errors import LayerError

TensorName = tuple[str, str]
"""Path of a module and the name of a tensor in it."""

MADE_OF = ("_orig", "_mask", "_g", "_v", "_u")
"""Endings of the tensors that a forward hook computes a weight from."""

_HOOK_TABLES = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside `torch.compile` and data-parallel wrappers.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> unwrapped(model) is model
        True
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def plain_copy(model: nn.Module, *, steady: bool = True) -> nn.Module:
    """Copy a model's structure and values to the CPU, once, before training.

    Args:
        model: it is read and never changed.
        steady: keep attention off its fused path, so that every submodule is called.

    Raises:
        LayerError: when something inside the model cannot be copied.

    Example:
        >>> model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        >>> plain = plain_copy(model)
        >>> sorted(plain.state_dict()), torch.equal(plain.weight, model.weight)
        (['bias', 'weight'], True)
    """
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for module in model.modules():
            _prepare_memo(module, memo)
        try:
            copied = copy.deepcopy(model, memo)
        except Exception as error:
            raise LayerError(
                f"the model cannot be copied for the reference ({type(error).__name__}: {error}); keep what is "
                "not part of the computation outside the module, or use reference='fp32'."
            ) from error
        originals = dict(model.named_modules())
        for path, module in list(copied.named_modules()):
            if path in originals:
                _make_plain(originals[path], module)
    for module in copied.modules():
        module.training = False
        if steady:
            _make_steady(module)
    return copied


def _prepare_memo(module: nn.Module, memo: dict[int, Any]) -> None:
    """Say beforehand what becomes of tensors (also those that autograd made) and of hooks."""
    for name, value in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
        if isinstance(value, Tensor) and id(value) not in memo:
            if is_lazy(value):
                raise LayerError(f"{name} has no shape yet: run the model once before the session.")
            plain = value.detach().cpu().clone()
            is_parameter = isinstance(value, nn.Parameter)
            memo[id(value)] = nn.Parameter(plain, requires_grad=False) if is_parameter else plain
        elif name in _HOOK_TABLES:
            memo[id(value)] = OrderedDict()
        elif name == "_compiled_call_impl":
            memo[id(value)] = None


def _make_plain(original: nn.Module, copied: nn.Module) -> None:
    for name in _parametrised(original):
        value = _effective(original, name).cpu().clone()
        copied._modules.pop("parametrizations", None)
        copied.__class__ = type(original).__bases__[0]  # the shared class of the original stays as it is
        copied.register_parameter(name, nn.Parameter(value, requires_grad=False))
    for name, value in _hooked(original).items():
        vars(copied).pop(name, None)
        for suffix in MADE_OF:
            copied._parameters.pop(f"{name}{suffix}", None)
            copied._buffers.pop(f"{name}{suffix}", None)
        copied.register_parameter(name, nn.Parameter(value.cpu().clone(), requires_grad=False))


def _parametrised(module: nn.Module) -> list[str]:
    if not is_parametrized(module):
        return []
    parametrizations: Any = module.parametrizations
    return list(parametrizations)


def _hooked(module: nn.Module) -> dict[str, Tensor]:
    """Weights that a forward hook computes: pruning, and the older weight and spectral norm."""
    found = {}
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod):
            found[hook._tensor_name] = hook.apply_mask(module)  # type: ignore[no-untyped-call]
        elif isinstance(hook, WeightNorm):
            found[hook.name] = hook.compute_weight(module)
        elif isinstance(hook, SpectralNorm):
            found[hook.name] = hook.compute_weight(module, do_power_iteration=False)
    return {name: value.detach() for name, value in found.items()}


def _effective(module: nn.Module, name: str) -> Tensor:
    """A tensor as the forward pass sees it in eval mode."""
    if name not in _parametrised(module):
        found: Tensor = getattr(module, name)
        return found.detach()
    inner: Any = module.parametrizations
    modes = {part: part.training for part in inner[name].modules()}
    for part in modes:
        part.training = False
    try:
        value: Tensor = getattr(module, name)
        return value.detach()
    finally:
        for part, training in modes.items():
            part.training = training


def _make_steady(module: nn.Module) -> None:
    """Keep attention off its fused path: that path calls no submodule and hangs on a process-wide switch."""
    if isinstance(module, nn.MultiheadAttention):
        vars(module)["forward"] = MethodType(_attend, module)
    elif isinstance(module, nn.TransformerEncoderLayer):
        module.register_forward_pre_hook(lambda _module, _inputs: None)  # hooks rule the fused path out
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False


def _attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    other = key.detach() if key is query else key  # the fused path wants one and the same tensor
    return type(self).forward(self, query, other, other if value is key else value, *args, **kwargs)


def tensor_names(copied: nn.Module) -> list[TensorName]:
    """Every parameter and buffer of a plain copy, once.

    Example:
        >>> tensor_names(nn.Sequential(nn.Linear(1, 1)))
        [('0', 'weight'), ('0', 'bias')]
    """
    return [
        (path, name)
        for path, module in copied.named_modules()
        for name, value in [*module._parameters.items(), *module._buffers.items()]
        if value is not None
    ]


def cloned_state(model: nn.Module, names: Iterable[TensorName]) -> dict[TensorName, Tensor]:
    """Copies on the CPU of the named tensors as the model's forward pass uses them.

    From a GPU the copies are on their way when this returns: synchronise before they are read.

    Raises:
        LayerError: when the model has lost a module that it had.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> state = cloned_state(model, [("", "bias")])
        >>> state[("", "bias")] is model.bias
        False
    """
    modules = dict(model.named_modules())
    hooked: dict[str, dict[str, Tensor]] = {}
    state = {}
    with torch.no_grad():
        for path, name in names:
            if path not in modules:
                raise LayerError(f"the model no longer has a module {path!r}; build a new session for it.")
            if path not in hooked:
                hooked[path] = _hooked(modules[path])
            value = hooked[path].get(name)
            state[path, name] = to_cpu(value if value is not None else _effective(modules[path], name))
    return state


def to_cpu(tensor: Tensor) -> Tensor:
    """A copy on the CPU; from a GPU without waiting for it."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.to("cpu", non_blocking=True)
