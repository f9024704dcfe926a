"""Shadow the forward of some modules for one pass: skip, give a value, take one, or stop.

A skipped call returns a placeholder of the recorded structure: NaN of the right shape, which takes no memory.
Two recordings, with batches of 3 and of 2 samples, tell which dimensions follow the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from egeria_lab.algorithms.tracing import replaced_forwards

LARGE, SMALL = 3, 2  # samples in the two recordings
_CONSTANTS = (type(None), bool, int, float, str)


class CutReachedError(BaseException):
    """Leaves the model's forward at the cut; no Exception, so that no user code catches it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Do(Enum):
    """What a shadowed call does."""

    SKIP = "return a placeholder"
    GIVE = "return the given value"
    STOP = "run, then leave the model with the value"
    TAKE = "run, and keep the value"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of an output: its shape for any number of samples, and what to fill it with."""

    large: tuple[int, ...]
    slope: tuple[int, ...]  # growth of each dimension per sample
    fill: Tensor

    def make(self, rows: int) -> Tensor:
        """The placeholder for a batch of this many samples."""
        return self.fill.expand(self.shape(rows))

    def shape(self, rows: int) -> tuple[int, ...]:
        """The shape for a batch of this many samples."""
        return tuple(size + up * (rows - LARGE) for size, up in zip(self.large, self.slope, strict=True))


@dataclass(frozen=True, slots=True)
class Template:
    """The structure of one call's output."""

    spec: TreeSpec
    leaves: tuple[Any, ...]  # Leaf for tensors, anything else as it was

    def make(self, rows: int) -> Any:
        """The placeholder for a batch of this many samples."""
        return tree_unflatten([x.make(rows) if isinstance(x, Leaf) else x for x in self.leaves], self.spec)


Steps = dict[nn.Module, list[tuple[Do, Template | None] | None]]
"""For each shadowed module what its calls do, in order; None for the module's own forward."""


@dataclass(slots=True)
class Plan:
    """A proven cut: what the rest of the model needs to know about it."""

    calls: list[nn.Module]  # the module of each recorded call
    first: list[int]  # as in `Call`
    templates: list[Template]  # of the calls up to the cut
    cut: int


class Taken:
    """What a shadowed forward pass leaves behind.

    Attributes:
        value: the output of the call that was taken, copied.
    """

    def __init__(self, expected: int) -> None:
        self.value: Any = None
        self._open = expected

    def done(self) -> None:
        """Count one shadowed call."""
        self._open -= 1

    @property
    def complete(self) -> bool:
        """True when every shadowed call was made."""
        return self._open == 0


@contextmanager
def shadowed(steps: Steps, value: Any, rows: int) -> Iterator[Taken]:
    """Shadow modules while the block runs; afterwards each instance has what it had before.

    Args:
        steps: what the calls do, from `make_steps`.
        value: what a call returns that gives a value.
        rows: samples in the batch, for placeholders.

    Raises:
        CutReachedError: inside the block, from a call that stops.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with shadowed({model[0]: [(Do.GIVE, None)]}, torch.ones(1, 2), 1) as taken:
        ...     print(model(torch.zeros(1, 2)), taken.complete)
        tensor([[1., 1.]]) True
    """
    taken = Taken(sum(step is not None for todo in steps.values() for step in todo))

    def shadow(module: nn.Module) -> Callable[..., Any]:
        original = module.forward
        todo = iter(steps[module])

        def run(*args: Any, **kwargs: Any) -> Any:
            step = next(todo, None)
            if step is None:
                return original(*args, **kwargs)
            action, template = step
            taken.done()
            if action is Do.SKIP:
                assert template is not None
                return template.make(rows)
            if action is Do.GIVE:
                return value
            output = original(*args, **kwargs)
            if action is Do.STOP:
                raise CutReachedError(output)
            taken.value = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, output)
            return output

        return run

    with replaced_forwards({module: shadow(module) for module in steps}):
        yield taken


def make_steps(begin: Plan | None, end: Plan | None, at_end: Do) -> Steps:
    """What to shadow so that a pass begins behind one cut and ends at another one.

    Args:
        begin: the cut to begin behind, or None for the inputs.
        end: a later cut, or None for the outputs; one of the two is given.
        at_end: `Do.STOP` or `Do.TAKE`.
    """
    plan = begin if begin is not None else end
    assert plan is not None
    last = len(plan.calls) - 1 if end is None else end.cut
    skipped = set() if begin is None else _outermost(begin)
    inside = {p for position in skipped for p in range(plan.first[position], position)}
    steps: Steps = {}
    for position in range(last + 1):
        if position in inside:
            continue  # not called, as what encloses it is skipped
        step: tuple[Do, Template | None] | None = None
        if begin is not None and position == begin.cut:
            step = (Do.GIVE, None)
        elif begin is not None and position in skipped:
            step = (Do.SKIP, begin.templates[position])
        elif end is not None and position == end.cut:
            step = (at_end, None)
        steps.setdefault(plan.calls[position], []).append(step)
    return {module: todo for module, todo in steps.items() if any(todo)}


def _outermost(plan: Plan) -> set[int]:
    """The calls up to the cut that stand inside no other call up to the cut."""
    found = set()
    position = plan.cut
    while position >= 0:
        found.add(position)
        position = plan.first[position] - 1
    return found


def template_of(large: Any, small: Any) -> Template | None:
    """The common structure of an output for 3 and for 2 samples, or None.

    Example:
        >>> import torch
        >>> template = template_of((torch.zeros(3, 5), None), (torch.zeros(2, 5), None))
        >>> template.make(7)[0].shape
        torch.Size([7, 5])
    """
    leaves, spec = tree_flatten(large)
    others, spec_small = tree_flatten(small)
    if spec != spec_small:
        return None
    made: list[Any] = []
    for a, b in zip(leaves, others, strict=True):
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            return None
        if not isinstance(a, Tensor):
            made.append(a)
        elif a.dim() != b.dim():
            return None
        else:
            slope = tuple(x - y for x, y in zip(a.shape, b.shape, strict=True))
            made.append(Leaf(tuple(a.shape), slope, _filling(a, slope)))
    return Template(spec, tuple(made))


def _filling(tensor: Tensor, slope: tuple[int, ...]) -> Tensor:
    """NaN; integers cannot hold it, so they keep the values of the first sample, which stay valid indices."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.new_full((), float("nan"))
    for dim, up in enumerate(slope):
        if up:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor


def not_cacheable(template: Template) -> str:
    """Why such an output cannot be kept sample by sample; empty when it can.

    Example:
        >>> import torch
        >>> not_cacheable(template_of(torch.zeros(5, 3), torch.zeros(5, 2)))
        'it holds a tensor of shape (5, batch), which does not have the samples in front'
    """
    if not any(isinstance(leaf, Leaf) for leaf in template.leaves):
        return "it holds no tensor"
    for leaf in template.leaves:
        if not isinstance(leaf, Leaf):
            if not isinstance(leaf, _CONSTANTS):
                return f"it holds a {type(leaf).__name__}"
        elif not leaf.slope or leaf.slope[0] != 1 or any(leaf.slope[1:]) or leaf.large[0] != LARGE:
            shape = ", ".join(
                "batch" if up == 1 else f"{up} × batch" if up else str(size)
                for size, up in zip(leaf.large, leaf.slope, strict=True)
            )
            return f"it holds a tensor of shape ({shape}), which does not have the samples in front"
    return ""
