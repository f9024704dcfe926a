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
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from egeria_lab.algorithms.batch_form import BatchForm
from egeria_lab.algorithms.given_back import generator_states, given_back, seeded, set_generator_states
from egeria_lab.algorithms.layers import LayerModule
from egeria_lab.algorithms.shadowing import (
    LARGE,
    SMALL,
    CutReachedError,
    Do,
    Plan,
    Steps,
    Template,
    make_steps,
    not_cacheable,
    shadowed,
    template_of,
)
from egeria_lab.algorithms.tracing import Call, is_good_cut, record, same_outputs, undisturbed
from egeria_lab.errors import LayerError


@dataclass(frozen=True, slots=True)
class _Trace:
    """The calls of the example, with a template for each, and the position of every boundary's cut."""

    calls: list[Call]
    templates: list[Template]


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
        self._batch = BatchForm(example)
        self._example = self._batch.take(example, torch.arange(LARGE) % self._batch.rows(example))
        self._plans: dict[int, Plan | str] = {}
        self._steps: dict[tuple[int | None, int | None, bool], Steps] = {}

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
                with shadowed(steps, value, self._batch.rows(content)):
                    self.forward(self.model, content)
            except CutReachedError as reached:
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
        with shadowed(steps, value, self._batch.rows(content)) as taken:
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
        with given_back(self.model):
            before = generator_states()
            with shadowed(self._made_steps(None, boundary, take=True), None, 0) as taken:
                outputs = seeded(lambda: self.run(content))
            if any(leaf.requires_grad for leaf in _tensors(taken.value)):
                return self._still_training(boundary)
            crossing = tree_map(_detached, taken.value)
            set_generator_states(before)
            computed = self.run_until(boundary, content)
            if any(not torch.equal(a, b) for a, b in zip(before, generator_states(), strict=True)):
                return f"{self._part(boundary)} draws random numbers (dropout outside of its modules?)."
            if not same_outputs(crossing, computed) or not same_outputs(computed, self.run_until(boundary, content)):
                return f"{self._part(boundary)} does not repeat its output for the same batch; is it frozen?"
            value = computed
            if through is not None:
                leaves, spec = tree_flatten(computed)
                parts = iter(through([x for x in leaves if isinstance(x, Tensor)]))
                value = tree_unflatten([next(parts) if isinstance(x, Tensor) else x for x in leaves], spec)
            again = seeded(lambda: self.run_from(boundary, value, content))
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

    def _make_plan(self, boundary: int) -> Plan | str:
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
        reason = not_cacheable(trace.templates[cut])
        if reason:
            return f"the output of {name!r} cannot be kept per sample: {reason}."
        modules = [call.module for call in trace.calls]
        first = [call.first for call in trace.calls]
        return Plan(modules, first, trace.templates[: cut + 1], cut)

    def _record(self) -> tuple[_Trace | str, Callable[[], Any], Any]:
        small = self._batch.take(self._example, torch.arange(SMALL))

        def run() -> Any:
            return seeded(lambda: self.forward(self.model, self._example))

        with undisturbed(self.model), torch.no_grad():
            calls, outputs = record(self.model, run)
            fewer, _ = record(self.model, lambda: self.forward(self.model, small))
        if [(c.name, c.first) for c in calls] != [(c.name, c.first) for c in fewer]:
            return "the model calls other modules for 2 samples than for 3.", run, outputs
        templates = []
        for call, less in zip(calls, fewer, strict=True):
            template = template_of(call.output, less.output)
            if template is None:
                return f"{call.name!r} returns another structure for 2 samples than for 3.", run, outputs
            templates.append(template)
        return _Trace(calls, templates), run, outputs

    def _made_steps(self, start: int | None, stop: int | None, take: bool = False) -> Steps:
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
            self._steps[key] = make_steps(begin, end, Do.TAKE if take else Do.STOP)
        return self._steps[key]


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
