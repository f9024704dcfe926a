"""Everything of a model that a checkpoint holds, and how it is put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def model_state(model: nn.Module) -> dict[str, Any]:
    """Weights, buffers, flags, and how weights lie in memory where that is not the usual order.

    Kernels round otherwise when channels lie innermost (``model.to(memory_format=torch.channels_last)``), so that a
    training is only repeated to the bit in the same layout.

    Example:
        >>> model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        >>> model_state(model)["strides"]
        {'weight': [18, 1, 6, 2]}
    """
    extra = {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
    return {
        "parameters": dict(model.named_parameters()),
        "strides": {
            name: list(parameter.stride())
            for name, parameter in model.named_parameters()
            if _is_channels_last(parameter)
        },
        "buffers": dict(model.named_buffers()),
        "trainable": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "extra": extra,
    }


def placed(model: nn.Module, device: torch.device, *, channels_last: bool) -> nn.Module:
    """The model on its device, with the channels of 2-d convolutions innermost where that is asked for.

    Example:
        >>> placed(nn.Conv2d(2, 3, 3), torch.device("cpu"), channels_last=True).weight.stride()
        (18, 1, 6, 2)
    """
    model = model.to(device)
    return model.to(memory_format=torch.channels_last) if channels_last else model  # type: ignore[call-overload]


def lay_out(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Let the weights lie in memory as they did; what lay in the usual order may lie as this model has it.

    Example:
        >>> model = nn.Conv2d(2, 3, 3)
        >>> lay_out(model, {"strides": {"weight": [18, 1, 6, 2]}})
        >>> model.weight.stride()
        (18, 1, 6, 2)
    """
    strides = state.get("strides", {})  # checkpoints of earlier versions have none
    for name, parameter in model.named_parameters():
        wanted = tuple(strides.get(name, parameter.stride()))
        if parameter.stride() != wanted:
            if sum((n - 1) * step for n, step in zip(parameter.shape, wanted, strict=True)) + 1 != parameter.numel():
                raise ValueError(f"{name} of shape {tuple(parameter.shape)} cannot lie in memory by strides {wanted}")
            empty = torch.empty_strided(parameter.shape, wanted, dtype=parameter.dtype, device=parameter.device)
            parameter.data = empty.copy_(parameter.data)


def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Put back what `model_state` took; layouts first, see `lay_out`."""
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state["parameters"][name])
            parameter.requires_grad_(state["trainable"][name])
            parameter.grad = None
        for name, value in state["buffers"].items():
            _load_buffer(modules, name, value)
    for name, value in state["extra"].items():
        modules[name].set_extra_state(value)
    for name, training in state["training"].items():
        modules[name].training = training


def _load_buffer(modules: Mapping[str, nn.Module], name: str, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    now = modules[path]._buffers.get(last)
    if now is not None and now.shape == value.shape and now.dtype == value.dtype:
        now.copy_(value)
    else:  # it grew during training
        device = next((p.device for p in modules[""].parameters()), value.device)
        modules[path]._buffers[last] = value.to(device if now is None else now.device)


def _is_channels_last(tensor: Tensor) -> bool:
    """By strides, which say more than `is_contiguous` where a kernel is 1x1."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats:
        return False
    usual = torch.empty(tensor.shape, device="meta")
    return tensor.stride() != usual.stride() and tensor.is_contiguous(memory_format=formats[tensor.dim()])
