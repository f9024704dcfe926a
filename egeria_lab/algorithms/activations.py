"""Take the outputs of chosen modules during one forward pass and leave no hook behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def first_tensor(output: object) -> Tensor | None:
    """The first tensor inside a module's output: itself, or the first one in a tuple, list or dict.

    Example:
        >>> first_tensor((None, {"hidden": torch.zeros(2)})).shape
        torch.Size([2])
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        for item in output:
            found = first_tensor(item)
            if found is not None:
                return found
    return None


@contextmanager
def capture(
    modules: Mapping[str, nn.Module],
    reduce: Callable[[Tensor], Tensor] | None = None,
    rows: int | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Collect the detached output of each named module while the block runs.

    Only a module's first call counts: recomputation under gradient checkpointing fires hooks again.
    Hooks are removed when the block ends, also after an error.

    Args:
        modules: name → module, the names being the keys of the result.
        reduce: applied to each output at once, so that large activations need not be kept.
        rows: keep only the first `rows` samples of each output (all by default).

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> with capture({"linear": layer}, rows=4) as outputs:
        ...     _ = layer(torch.zeros(8, 3))
        >>> outputs["linear"].shape, len(layer._forward_hooks)
        (torch.Size([4, 2]), 0)
    """
    outputs: dict[str, Tensor] = {}

    def hook_for(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            tensor = first_tensor(output)
            if tensor is None or name in outputs:
                return
            with torch.no_grad():
                kept = tensor.detach()[:rows] if rows is not None else tensor.detach()
                # A copy: a later module may work in place on what this one returned.
                outputs[name] = reduce(kept) if reduce is not None else kept.clone()

        return hook

    handles = [module.register_forward_hook(hook_for(name)) for name, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
