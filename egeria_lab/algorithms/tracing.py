"""Record the calls of all submodules during one batch, and replay the batch with a part of them skipped.

The replay is the proof behind every cut: each skipped call returns its recorded output filled with NaN
(integers: perturbed), the call at the cut returns its recorded output. If the model's output stays
bit-equal, nothing else from in front of the cut is needed behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

Forward = Callable[[], object]
"""Runs the model on the example batch and returns its outputs."""


@dataclass(slots=True, eq=False)
class Call:
    """One completed call of a submodule.

    Attributes:
        module: the module.
        name: its qualified name.
        first: position of the first call that completed inside this one; equal to its own when a leaf.
        output: what it returned, detached.
    """

    module: nn.Module
    name: str
    first: int
    output: Any


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the block with the model in eval mode and put back modes, buffers, flags and generators."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # The fused attention path calls no submodule, so there would be nothing to record.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            for module in modes:
                module.training = False
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, training in modes.items():
            module.training = training
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and not torch.equal(buffer, buffers[name]):  # unchanged ones keep their version
                    buffer.copy_(buffers[name])


@contextmanager
def replaced_forwards(replace: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Shadow the forward of some modules; afterwards each instance has what it had before."""
    had: dict[nn.Module, Any] = {module: module.__dict__.get("forward") for module in replace}
    try:
        for module, forward in replace.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, forward in had.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


def record(model: nn.Module, forward: Forward) -> tuple[list[Call], object]:
    """Run `forward` and list the calls of all submodules in order of completion.

    Returns:
        The calls and the model's outputs.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> calls, output = record(model, lambda: model(torch.zeros(1, 2)))
        >>> [call.name for call in calls]
        ['0', '1']
    """
    calls: list[Call] = []
    names = {module: name for name, module in model.named_modules() if name}

    def recording(module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            first = len(calls)
            output = original(*args, **kwargs)
            # A clone: the next module may work in place on what this one returned.
            kept = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, output)
            calls.append(Call(module, names[module], first, kept))
            return output

        return run

    with replaced_forwards({module: recording(module) for module in names}):
        outputs = forward()
    return calls, outputs


def _poisoned(output: Any) -> Any:
    def poison(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_floating_point() or leaf.is_complex():
            return leaf.new_full((), float("nan")).expand(leaf.shape)
        return ~leaf if leaf.dtype == torch.bool else leaf + 1

    return tree_map(poison, output)


@contextmanager
def skipping(calls: list[Call], cut: int, value: Any) -> Iterator[None]:
    """While the block runs, skip every call before position `cut` and let the call at `cut` return `value`.

    Args:
        calls: as recorded by `record` on the same kind of batch.
        cut: position in `calls`.
        value: returned by the call at the cut, for example its recorded output.
    """
    made: dict[nn.Module, int] = {}
    positions: dict[nn.Module, list[int]] = {}
    for position, call in enumerate(calls):
        positions.setdefault(call.module, []).append(position)

    def count(module: nn.Module) -> int | None:
        """The recorded position of this call, or None for one call more than was recorded."""
        number = made.get(module, 0)
        made[module] = number + 1
        known = positions[module]
        return known[number] if number < len(known) else None

    def shadow(module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            position = count(module)
            if position is None or position > cut:
                return original(*args, **kwargs)
            for inner in calls[calls[position].first : position]:
                count(inner.module)  # calls made inside the skipped one are not made now
            if position == cut:
                return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value)
            return _poisoned(calls[position].output)

        return run

    with replaced_forwards({module: shadow(module) for module in positions}):
        yield


def same_outputs(a: object, b: object) -> bool:
    """True when two (nested) outputs hold bit-equal tensors without NaN and the same structure.

    Example:
        >>> same_outputs((torch.ones(1), 2), (torch.ones(1), 2)), same_outputs(torch.ones(1), torch.zeros(1))
        (True, False)
    """
    leaves_a, spec_a = tree_flatten(a)
    leaves_b, spec_b = tree_flatten(b)
    if len(leaves_a) != len(leaves_b) or str(spec_a) != str(spec_b):
        return False
    tensors = [(x, y) for x, y in zip(leaves_a, leaves_b, strict=True) if isinstance(x, Tensor)]
    return all(isinstance(y, Tensor) and torch.equal(x, y) for x, y in tensors)


def is_good_cut(calls: list[Call], cut: int, forward: Forward, outputs: object) -> bool:
    """True when the output recorded at `cut` is all that the rest of the model needs from its front.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> forward = lambda: model(torch.ones(1, 2))
        >>> calls, outputs = record(model, forward)
        >>> is_good_cut(calls, 1, forward, outputs)
        True
    """
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(skipping(calls, cut, calls[cut].output))
        try:
            replayed = forward()
        except Exception:  # NaN or a perturbed index may make the user's own code raise: then it leaks
            return False
    return same_outputs(outputs, replayed)
