"""Run a model in two halves: up to a proven cut, and from the cut on, in any model, for a batch of any size.

Behind the cut the frozen layer modules are really skipped: their calls return placeholders (NaN of the right
shape, which take no memory), and the call at the cut returns the value that is given. What stands between the
modules (reshapes, position tables, lengths) still runs, on placeholders. Were anything from the front needed
after all, the outputs would be NaN at once and never silently wrong.

Two recordings with batches of 3 and 2 samples tell which dimensions of each output follow the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from egeria_lab.algorithms.layers import LayerModule
from egeria_lab.algorithms.tracing import (
    Call,
    _replaced_forwards,
    is_good_cut,
    record,
    same_outputs,
    undisturbed,
)
from egeria_lab.errors import LayerError

_LARGE, _SMALL = 3, 2  # samples in the two recordings
_CONSTANTS = (type(None), bool, int, float, str)


class _CutReachedError(BaseException):
    """Leaves the model's forward at the cut; no Exception, so that no user code catches it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Do(Enum):
    """What a shadowed call does."""

    SKIP = "return a placeholder"
    GIVE = "return the given value"
    STOP = "run, then leave the model with the value"
    TAKE = "run, and keep the value"


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One tensor of an output: its shape for any number of samples, and what to fill it with."""

    large: tuple[int, ...]
    slope: tuple[int, ...]  # growth of each dimension per sample
    fill: Tensor

    def make(self, rows: int) -> Tensor:
        return self.fill.expand(self.shape(rows))

    def shape(self, rows: int) -> tuple[int, ...]:
        return tuple(size + up * (rows - _LARGE) for size, up in zip(self.large, self.slope, strict=True))


@dataclass(frozen=True, slots=True)
class _Template:
    """The structure of one call's output."""

    spec: TreeSpec
    leaves: tuple[Any, ...]  # _Leaf for tensors, anything else as it was

    def make(self, rows: int) -> Any:
        return tree_unflatten([x.make(rows) if isinstance(x, _Leaf) else x for x in self.leaves], self.spec)


@dataclass(frozen=True, slots=True)
class _Trace:
    """The calls of the example, with a template for each, and the position of every boundary's cut."""

    calls: list[Call]
    templates: list[_Template]


_Steps = dict[nn.Module, list[tuple[_Do, _Template | None] | None]]


@dataclass(slots=True)
class _Plan:
    """A proven cut: what the rest of the model needs to know about it."""

    calls: list[nn.Module]  # the module of each recorded call
    first: list[int]  # as in `Call`
    templates: list[_Template]  # of the calls up to the cut
    cut: int


class PrefixRunner:
    """Runs one model up to, between and from the outputs of its layer modules.

    A *boundary* is the position, front to back, of the last layer module of the prefix: boundary 1 means
    that layer modules 0 and 1 are in front of the cut. Nothing stays on the model between calls; one thread
    at a time may use a runner, and nobody else may run the model meanwhile. Hooks of skipped modules see
    placeholders.

    Args:
        model: the model.
        layers: its layer modules, front to back, as `egeria_lab.algorithms.layers.layers` returns them.
        example: one batch, in the form that `forward` takes, one sample or more; its tensors count samples
            in their first dimension.
        forward: ``forward(model, batch)``; default ``model(batch)``.

    Example:
        >>> from egeria_lab.algorithms.layers import layers
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> batch = torch.randn(5, 4)
        >>> runner = PrefixRunner(model, layers(model, batch), batch)
        >>> value = runner.run_until(0, batch)
        >>> value.shape, torch.equal(runner.run_from(0, value, batch), model(batch))
        (torch.Size([5, 8]), True)
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[LayerModule],
        example: Any,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        self.model = model
        self.layers = list(layers)
        self.forward: Callable[[nn.Module, Any], Any] = forward or (lambda m, x: m(x))
        self._batch = _BatchForm(example)
        self._example = self._batch.take(example, torch.arange(_LARGE) % self._batch.rows(example))
        self._plans: dict[int, _Plan | str] = {}
        self._steps: dict[tuple[int | None, int | None, bool], _Steps] = {}

    def run(self, content: Any) -> Any:
        """The whole model, as `forward` calls it."""
        return self.forward(self.model, content)

    def check(self, boundary: int) -> str:
        """Why the model cannot be cut behind layer module `boundary`; empty when it can.

        The answer is proved on the example once and kept.
        """
        if boundary not in self._plans:
            self._plans[boundary] = self._make_plan(boundary)
        plan = self._plans[boundary]
        return plan if isinstance(plan, str) else ""

    def run_until(self, boundary: int, content: Any, *, start: int | None = None, value: Any = None) -> Any:
        """What crosses the cut behind `boundary`, without autograd, the prefix in eval mode.

        Args:
            boundary: where to stop.
            content: the batch.
            start: an earlier boundary, to run only the layer modules between the two.
            value: what crosses the cut at `start`.

        Raises:
            LayerError: when the cut is not proven (`check` says why).
        """
        steps = self._made_steps(start, boundary)
        with torch.no_grad(), self._prefix_in_eval(boundary):
            try:
                with _shadowed(steps, value, self._batch.rows(content)):
                    self.forward(self.model, content)
            except _CutReachedError as reached:
                return reached.value
        raise LayerError(f"the model ended without reaching {self.layers[boundary].name!r}.")

    def run_from(self, boundary: int, value: Any, content: Any) -> Any:
        """The model's outputs, computed from what crosses the cut; the layer modules in front are skipped.

        Args:
            boundary: the cut.
            value: what crosses it, for the samples of `content`; later modules may work on it in place.
            content: the batch, for what the rest of `forward` needs (targets, lengths, masks).

        Raises:
            LayerError: when the cut is not proven, or the model did not come by it this time.
        """
        steps = self._made_steps(boundary, None)
        with _shadowed(steps, value, self._batch.rows(content)) as taken:
            outputs = self.forward(self.model, content)
        if not taken.complete:
            raise LayerError(
                f"the model did not call {self.layers[boundary].name!r} as it did on the example batch; "
                "what it calls must not depend on the data or on the mode. Train without the cache."
            )
        return outputs

    def verify(self, boundary: int, content: Any, through: Callable[[list[Tensor]], list[Tensor]] | None = None) -> str:
        """Why the two halves do not add up to the whole on this batch, in the modes of now; empty if they do.

        Compares, bit for bit: what crosses the cut in an ordinary forward pass with `run_until`, twice; and the
        outputs with `run_from`. Buffers and generators are given back as they were.

        Args:
            boundary: the cut.
            content: a batch.
            through: applied to the tensors that cross the cut before `run_from`, for example storing and
                reading them.
        """
        reason = self.check(boundary)
        if reason:
            return reason
        with _given_back(self.model):
            before = _generator_states()
            with _shadowed(self._made_steps(None, boundary, take=True), None, 0) as taken:
                outputs = _seeded(lambda: self.run(content))
            if any(leaf.requires_grad for leaf in _tensors(taken.value)):
                return self._still_training(boundary)
            crossing = tree_map(_detached, taken.value)
            _set_generator_states(before)
            computed = self.run_until(boundary, content)
            if any(not torch.equal(a, b) for a, b in zip(before, _generator_states(), strict=True)):
                return f"{self._part(boundary)} draws random numbers (dropout outside of its modules?)."
            if not same_outputs(crossing, computed) or not same_outputs(computed, self.run_until(boundary, content)):
                return f"{self._part(boundary)} does not repeat its output for the same batch; is it frozen?"
            value = computed
            if through is not None:
                leaves, spec = tree_flatten(computed)
                parts = iter(through([x for x in leaves if isinstance(x, Tensor)]))
                value = tree_unflatten([next(parts) if isinstance(x, Tensor) else x for x in leaves], spec)
            again = _seeded(lambda: self.run_from(boundary, value, content))
        if not same_outputs(tree_map(_detached, outputs), tree_map(_detached, again)):
            return f"the part behind {self.layers[boundary].name!r} gives other outputs when it runs alone."
        return ""

    def rows(self, content: Any) -> int:
        """Number of samples in a batch."""
        return self._batch.rows(content)

    def take(self, content: Any, index: Tensor) -> Any:
        """The samples `index` (int64, a sample may come twice) of a batch, as a batch."""
        return self._batch.take(content, index)

    def _part(self, boundary: int) -> str:
        names = [self.layers[0].name, self.layers[boundary].name]
        return f"the part {names[0]!r} … {names[1]!r}" if boundary else f"{names[0]!r}"

    def _still_training(self, boundary: int) -> str:
        inside = {m for layer in self.layers[: boundary + 1] for m in layer.modules}
        names = [
            f"{module_name}.{name}"
            for module_name, module in self.model.named_modules()
            if module in inside
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        which = f" ({', '.join(names[:3])})" if names else ""
        return f"{self._part(boundary)} still depends on trainable parameters{which}: freeze them first."

    @contextmanager
    def _prefix_in_eval(self, boundary: int) -> Iterator[None]:
        modules = [m for layer in self.layers[: boundary + 1] for m in layer.modules if m.training]
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module in modules:
                module.training = True

    def _make_plan(self, boundary: int) -> _Plan | str:
        if not 0 <= boundary < len(self.layers) - 1:
            return (
                f"boundary {boundary} is no cut: the model has {len(self.layers)} layer modules, and the last "
                "one always runs."
            )
        if any(_is_compiled(module) for module in self.model.modules()):
            return "parts of the model are compiled by torch.compile, which would compile every skip anew."
        name = self.layers[boundary].name
        trace, run, outputs = self._record()
        if isinstance(trace, str):
            return trace
        with undisturbed(self.model):
            # The first good place: of a module that is called again later, the earlier call cuts no deeper
            # than the layer module does.
            cut = next(
                (
                    position
                    for position, call in enumerate(trace.calls)
                    if call.module is self.layers[boundary].output and is_good_cut(trace.calls, position, run, outputs)
                ),
                None,
            )
        if cut is None:
            return f"behind {name!r} the model needs more from the front than its output: no place to cut."
        reason = _not_cacheable(trace.templates[cut])
        if reason:
            return f"the output of {name!r} cannot be kept per sample: {reason}."
        modules = [call.module for call in trace.calls]
        first = [call.first for call in trace.calls]
        return _Plan(modules, first, trace.templates[: cut + 1], cut)

    def _record(self) -> tuple[_Trace | str, Callable[[], Any], Any]:
        small = self._batch.take(self._example, torch.arange(_SMALL))

        def run() -> Any:
            torch.manual_seed(0)  # inside a fork of the generators
            return self.forward(self.model, self._example)

        with undisturbed(self.model), torch.no_grad():
            calls, outputs = record(self.model, run)
            fewer, _ = record(self.model, lambda: self.forward(self.model, small))
        if [(c.name, c.first) for c in calls] != [(c.name, c.first) for c in fewer]:
            return "the model calls other modules for 2 samples than for 3.", run, outputs
        templates = []
        for call, less in zip(calls, fewer, strict=True):
            template = _template(call.output, less.output)
            if template is None:
                return f"{call.name!r} returns another structure for 2 samples than for 3.", run, outputs
            templates.append(template)
        return _Trace(calls, templates), run, outputs

    def _made_steps(self, start: int | None, stop: int | None, take: bool = False) -> _Steps:
        """What the shadowed modules do, call by call; made once for each pair of boundaries."""
        key = (start, stop, take)
        if key not in self._steps:
            for boundary in (start, stop):
                reason = "" if boundary is None else self.check(boundary)
                if reason:
                    raise LayerError(reason)
            begin, end = (None if b is None else self._plans[b] for b in (start, stop))
            assert not isinstance(begin, str)
            assert not isinstance(end, str)
            self._steps[key] = _make_steps(begin, end, _Do.TAKE if take else _Do.STOP)
        return self._steps[key]


class _BatchForm:
    """Knows which tensors of a (nested) batch count samples in their first dimension."""

    def __init__(self, example: Any) -> None:
        leaves, self.spec = tree_flatten(example)
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim() > 0]
        if not tensors or leaves[tensors[0]].shape[0] == 0:
            raise LayerError("the example batch holds no tensor with at least one sample.")
        self.lead = tensors[0]
        count = leaves[self.lead].shape[0]
        self.counting = {i for i in tensors if leaves[i].shape[0] == count}

    def rows(self, content: Any) -> int:
        return int(self._leaves(content)[self.lead].shape[0])

    def take(self, content: Any, index: Tensor) -> Any:
        leaves = self._leaves(content)
        taken = [x[index.to(x.device)] if i in self.counting else x for i, x in enumerate(leaves)]
        return tree_unflatten(taken, self.spec)

    def _leaves(self, content: Any) -> list[Any]:
        leaves, spec = tree_flatten(content)
        if spec != self.spec:
            raise LayerError("the batch has another structure than the example batch.")
        return leaves


class _Taken:
    """What a shadowed forward pass leaves behind."""

    def __init__(self, expected: int) -> None:
        self.value: Any = None
        self._open = expected

    def done(self) -> None:
        self._open -= 1

    @property
    def complete(self) -> bool:
        return self._open == 0


@contextmanager
def _shadowed(steps: _Steps, value: Any, rows: int) -> Iterator[_Taken]:
    taken = _Taken(sum(step is not None for todo in steps.values() for step in todo))

    def shadow(module: nn.Module) -> Callable[..., Any]:
        original = module.forward
        todo = iter(steps[module])

        def run(*args: Any, **kwargs: Any) -> Any:
            step = next(todo, None)
            if step is None:
                return original(*args, **kwargs)
            action, template = step
            taken.done()
            if action is _Do.SKIP:
                assert template is not None
                return template.make(rows)
            if action is _Do.GIVE:
                return value
            output = original(*args, **kwargs)
            if action is _Do.STOP:
                raise _CutReachedError(output)
            taken.value = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, output)
            return output

        return run

    with _replaced_forwards({module: shadow(module) for module in steps}):
        yield taken


def _make_steps(begin: _Plan | None, end: _Plan | None, at_end: _Do) -> _Steps:
    plan = begin if begin is not None else end
    assert plan is not None
    last = len(plan.calls) - 1 if end is None else end.cut
    skipped = set() if begin is None else _outermost(begin)
    inside = {p for position in skipped for p in range(plan.first[position], position)}
    steps: _Steps = {}
    for position in range(last + 1):
        if position in inside:
            continue  # not called, as what encloses it is skipped
        step: tuple[_Do, _Template | None] | None = None
        if begin is not None and position == begin.cut:
            step = (_Do.GIVE, None)
        elif begin is not None and position in skipped:
            step = (_Do.SKIP, begin.templates[position])
        elif end is not None and position == end.cut:
            step = (at_end, None)
        steps.setdefault(plan.calls[position], []).append(step)
    return {module: todo for module, todo in steps.items() if any(todo)}


def _outermost(plan: _Plan) -> set[int]:
    """The calls up to the cut that stand inside no other call up to the cut."""
    found = set()
    position = plan.cut
    while position >= 0:
        found.add(position)
        position = plan.first[position] - 1
    return found


def _template(large: Any, small: Any) -> _Template | None:
    """The common structure of an output for 3 and for 2 samples, or None."""
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
            made.append(_Leaf(tuple(a.shape), slope, _filling(a, slope)))
    return _Template(spec, tuple(made))


def _filling(tensor: Tensor, slope: tuple[int, ...]) -> Tensor:
    """NaN; integers cannot hold it, so they keep the values of the first sample, which stay valid indices."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.new_full((), float("nan"))
    for dim, up in enumerate(slope):
        if up:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor


def _not_cacheable(template: _Template) -> str:
    if not any(isinstance(leaf, _Leaf) for leaf in template.leaves):
        return "it holds no tensor"
    for leaf in template.leaves:
        if not isinstance(leaf, _Leaf):
            if not isinstance(leaf, _CONSTANTS):
                return f"it holds a {type(leaf).__name__}"
        elif not leaf.slope or leaf.slope[0] != 1 or any(leaf.slope[1:]) or leaf.large[0] != _LARGE:
            shape = ", ".join(
                "batch" if up == 1 else f"{up} × batch" if up else str(size)
                for size, up in zip(leaf.large, leaf.slope, strict=True)
            )
            return f"it holds a tensor of shape ({shape}), which does not have the samples in front"
    return ""


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _seeded(run: Callable[[], Any]) -> Any:
    torch.manual_seed(0)  # inside a fork of the generators
    return run()


def _generator_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return states


def _set_generator_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


@contextmanager
def _given_back(model: nn.Module) -> Iterator[None]:
    """Run the block in the modes of now and give buffers and generators back."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers:
                        buffer.copy_(buffers[name])
