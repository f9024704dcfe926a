"""How much of a score flows through each layer module, all of them in one pass along the path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from egeria_lab.algorithms.activations import first_tensor

MOST_ROWS = 256
"""Samples times points of the path in one forward pass."""


def layer_conductances(
    scores: Callable[..., Tensor],
    modules: Mapping[str, nn.Module],
    x: Tensor,
    baseline: Tensor,
    extra: tuple[Tensor, ...],
    n_steps: int,
) -> dict[str, Tensor]:
    """Conductance of every unit of every named module.

    The sum of a layer's units is the change of the score from the baseline to the inputs, for every layer that all
    of the score flows through. Equal to Captum's `LayerConductance` (trapezoid points), which walks the path
    once for each layer; here it is walked once.

    Args:
        scores: ``scores(x, *extra)``, one number a sample.
        modules: name → module, whose outputs are looked at.
        x: where the path ends, shape (samples, …).
        baseline: where it begins, same shape.
        extra: further arguments of `scores`, one row a sample.
        n_steps: steps of the path, >= 1.

    Returns:
        For each module that the score depends on, shape (samples, …) as its output, on the CPU, float32.

    Source: Dhamdhere et al., "How Important is a Neuron?", ICLR 2019, and Shrikumar et al. 2018 (arXiv 1807.09946).

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> x = torch.ones(1, 2)
        >>> found = layer_conductances(lambda x: model(x)[:, 0], {"0": model[0]}, x, 0 * x, (), 4)
        >>> bool(torch.isclose(found["0"].sum(), (model(x) - model(0 * x)).detach()[0, 0], atol=1e-6))
        True
    """
    totals: dict[str, Tensor] = {}
    points = torch.linspace(0, 1, n_steps + 1).tolist()
    steps_at_once = max(1, MOST_ROWS // len(x) - 1)
    for first in range(0, n_steps, steps_at_once):
        part = points[first : first + steps_at_once + 1]
        path = torch.cat([baseline + point * (x - baseline) for point in part]).detach().requires_grad_()
        with _outputs_of(modules) as outputs:
            value = scores(path, *(tensor.repeat(len(part), *[1] * (tensor.dim() - 1)) for tensor in extra))
        found = {name: output for name, output in outputs.items() if _is_on_the_path(output, len(path))}
        gradients = torch.autograd.grad(value.sum(), list(found.values()), allow_unused=True) if found else ()
        for (name, output), gradient in zip(found.items(), gradients, strict=True):
            if gradient is not None:
                flow = _flow(output.detach(), gradient, len(x))
                totals[name] = totals[name] + flow if name in totals else flow
    return {name: total.float().cpu() for name, total in totals.items()}


def _flow(output: Tensor, gradient: Tensor, count: int) -> Tensor:
    """Sum over the steps of gradient × change of the output; rows are points of the path, then samples."""
    flow = gradient[:-count] * (output[count:] - output[:-count])
    return flow.reshape(-1, count, *flow.shape[1:]).sum(0)


def _is_on_the_path(output: Tensor, rows: int) -> bool:
    return output.requires_grad and output.dim() > 0 and len(output) == rows


@contextmanager
def _outputs_of(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The outputs of a forward pass with their place in the graph; the first call of each module counts."""
    outputs: dict[str, Tensor] = {}

    def hook_for(name: str) -> Callable[[nn.Module, object, object], object]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> object:
            tensor = first_tensor(output)
            if tensor is None or name in outputs:
                return None
            outputs[name] = tensor
            # A copy goes on: the next module may work in place on what this one returned.
            return tensor.clone() if tensor is output else None

        return hook

    handles = [module.register_forward_hook(hook_for(name)) for name, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
