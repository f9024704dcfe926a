"""Look into a live model and leave it, and everything around it, as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn

from egeria_lab.algorithms.given_back import seed_generators
from egeria_lab.algorithms.tracing import undisturbed

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


@contextmanager
def leaving_no_trace(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Run the block with the model in eval mode and own random numbers; afterwards all is as before.

    Put back, also after an error: gradients, `requires_grad` flags, modes, buffers, hooks, and the global
    generators of torch, NumPy and Python (Captum draws from the first two). Outer autocast, `no_grad` and inference
    mode do not reach into the block. For the thread that trains, or between two steps of it.

    Args:
        model: the live model.
        seed: of the random numbers that are drawn inside.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.Linear(2, 1))
        >>> with leaving_no_trace(model):
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     _ = torch.rand(1), model.train()
        >>> model.training, model[1].weight.grad
        (True, None)
    """
    gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    hooks = [(getattr(module, kind), dict(getattr(module, kind))) for module in model.modules() for kind in _HOOKS]
    for_python, for_numpy = random.getstate(), np.random.get_state()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(undisturbed(model))
            for device in {parameter.device.type for parameter in model.parameters()} | {"cpu"}:
                stack.enter_context(torch.autocast(device, enabled=False))
            if any(isinstance(module, nn.RNNBase) for module in model.modules()):
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # it has no gradient in eval mode
            for parameter, _, _ in gradients:
                parameter.grad = None  # a backward pass inside may not add to what is there
            _seed(seed)
            yield
    finally:
        random.setstate(for_python)
        np.random.set_state(for_numpy)
        for parameter, gradient, flag in gradients:
            parameter.requires_grad_(flag)
            parameter.grad = gradient
        for registered, before in hooks:
            if registered != before:
                registered.clear()
                registered.update(before)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_generators(seed)  # inside a fork of the generators
