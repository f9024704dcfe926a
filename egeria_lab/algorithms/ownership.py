"""Which layer module owns which parameter: the last one that uses it, so that none is frozen too early."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from egeria_lab.algorithms.tracing import Call, skipping


def parameter_owners(
    model: nn.Module,
    calls: list[Call],
    cuts: list[int],
    run: Callable[[], object],
    uses: dict[nn.Module, set[int]],
) -> dict[int, int]:
    """Parameter id → the last segment that uses it.

    Where the owner of a parameter runs in exactly one segment that is the answer. Otherwise (a parameter
    of the model itself, tied or shared weights) autograd is asked which parameters the part behind each
    cut still reaches.
    """
    owners: dict[int, int] = {}
    doubtful: list[nn.Parameter] = []
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(module)
    for parameter in model.parameters():
        segments: set[int] = set()
        for module in holders[id(parameter)]:
            segments |= uses.get(module, {-1, -2})
        if len(segments) == 1:
            owners[id(parameter)] = segments.pop()
        else:
            doubtful.append(parameter)
    if doubtful:
        owners.update(_last_reached(doubtful, calls, cuts, run))
    return owners


def _last_reached(
    parameters: list[nn.Parameter], calls: list[Call], cuts: list[int], run: Callable[[], object]
) -> dict[int, int]:
    flags = [parameter.requires_grad for parameter in parameters]
    owners = {id(parameter): 0 for parameter in parameters}
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for segment, cut in enumerate(cuts, start=1):
            with skipping(calls, cut, calls[cut].output):
                outputs = run()
            leaves = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor) and x.requires_grad]
            if not leaves:
                continue
            total = torch.stack([leaf.float().sum() for leaf in leaves]).sum()
            grads = torch.autograd.grad(total, parameters, allow_unused=True)
            for parameter, grad in zip(parameters, grads, strict=True):
                if grad is not None:
                    owners[id(parameter)] = segment
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
    return owners
