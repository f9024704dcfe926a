"""The low-precision reference: a copy of the model whose layer modules are quantised one by one.

Egeria (EuroSys 2023), section 4.1: a quantised snapshot of the training model, run on the CPU. Each layer module
is quantised separately, so that its output is plain float32 and can be captured, and only the layers up to
the one wanted are run. What cannot be quantised stays float32 and says why.

The file is one piece because planning, converting and restoring a snapshot must agree on every part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from egeria_lab.algorithms.layers import LayerModule
from egeria_lab.algorithms.model_copy import TensorName, cloned_state
from egeria_lab.algorithms.model_twin import Enough, ModelTwin, Reduce
from egeria_lab.algorithms.quantise import choose_engine, quantise
from egeria_lab.algorithms.static_int8 import Forward, QuantisationRefusedError, StandIn

SAME = 1e-3
"""A traced copy whose outputs differ by more than this share from the original's computes something else."""


@dataclass(slots=True, eq=False)
class _Unit:
    """A low-precision double and the calls it replaces: the last one runs it, those before pass through."""

    layer: str
    double: StandIn
    calls: list[nn.Module]
    forward: Forward | None = None
    refused: str = ""


@dataclass(slots=True)
class _LayerPlan:
    """What one layer module is made of.

    Attributes:
        units: the low-precision parts.
        reasons: why other parts stay float32.
    """

    units: list[_Unit] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class _UnitFailedError(Exception):
    """A stand-in raised where the module it stands for might not."""

    def __init__(self, unit: _Unit, error: Exception) -> None:
        super().__init__(str(error))
        self.unit = unit
        self.error = error


class ReferenceModel(ModelTwin):
    """A snapshot of a model in low precision.

    Building it copies the structure and traces what can be traced: once, before training, on the thread that
    builds (ResNet-8 0.1 s, ResNet-56 0.6 s; models without convolutions 0.02 s). `refresh` and `activations`
    may then run on one other thread.

    Args:
        model: the training model; it is read and never changed.
        layers: its layer modules, front to back.
        forward: ``forward(model, content)`` runs a model on a batch; called on another thread, with a copy of
            the model that is on the CPU.
        engine: ``"auto"``, ``"int8"``, ``"bf16"`` or ``"fp32"``; see `choose_engine`.
        seed: seed of draws that the model makes in eval mode.

    Attributes:
        engine: the engine in use.
        generation: number of the snapshot, from 1; 0 before the first.

    Raises:
        UnknownNameError: for an unknown engine.
        LayerError: when the model cannot be copied.

    Example:
        >>> import torch
        >>> from egeria_lab.algorithms.layers import layers
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> batch = torch.linspace(-1, 1, 8).reshape(2, 4)
        >>> reference = ReferenceModel(model, layers(model, batch), lambda m, x: m(x), engine="int8")
        >>> reference.refresh(reference.state_of(model), batch)
        >>> outputs = reference.activations(batch, ["2"])
        >>> (outputs["2"] - model(batch)).abs().max().item() < 0.1
        True
        >>> reference.describe()[0]
        ('0', 'int8', 'dynamic int8: 1 Linear')
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[LayerModule],
        forward: Callable[[nn.Module, object], object],
        *,
        engine: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(model, {layer.name: layer.output for layer in layers}, forward, seed=seed)
        self.engine, self.engine_reason = choose_engine(engine)
        self.generation = 0
        self._checked = False
        counterparts = self.counterparts()
        self._plans: dict[str, _LayerPlan] = {}
        for layer in layers:
            inside = [counterparts[module] for module in layer.modules if module in counterparts]
            self._plans[layer.name] = self._plan(layer.name, inside)
        self._planned = {name: (list(plan.units), list(plan.reasons)) for name, plan in self._plans.items()}
        self._dropped: list[tuple[str, int, str]] = []  # layer, position among its planned units, reason

    def state_of(self, model: nn.Module, names: Sequence[TensorName] | None = None) -> dict[TensorName, Tensor]:
        """Clone the tensors of the training model that a snapshot needs; cheap, for the training thread."""
        return cloned_state(model, self.names if names is None else names)

    def refresh(self, state: Mapping[TensorName, Tensor], content: object) -> None:
        """Become the snapshot of `state`: load, observe ranges on the calibration rows, convert.

        Args:
            state: from `state_of`.
            content: calibration rows, as `forward` takes them.
        """
        self.load(state)
        if not self._checked:
            self._drop_wrong_copies(content)
        with self._replaced({unit: unit.double.calibrating() for unit in self._units()}):
            self._run_guarded(content, self._last(), None)
        for unit in self._units():
            try:
                unit.forward = unit.double.convert()
            except (QuantisationRefusedError, RuntimeError) as error:
                self._drop(unit, str(error))
        self.generation += 1

    def activations(self, content: object, wanted: Sequence[str], reduce: Reduce | None = None) -> dict[str, Tensor]:
        """Outputs of the wanted layers under the snapshot, in float32; nothing behind the last is run.

        Args:
            content: a batch, as `forward` takes it.
            wanted: names of layers.
            reduce: applied to each output at once.
        """
        with self._replaced({unit: unit.forward for unit in self._units()}):
            return self._run_guarded(content, wanted, reduce)

    def state_dict(self) -> dict[str, Any]:
        """The snapshot and all that its conversion hangs on: plain values and tensors (its own, not copies)."""
        tensors: dict[str, dict[str, Tensor]] = {}
        for (path, name), tensor in self._own.items():
            tensors.setdefault(path, {})[name] = tensor
        return {
            "engine": self.engine,
            "generation": self.generation,
            "checked": self._checked,
            "draws": self._draws,
            "dropped": [list(entry) for entry in self._dropped],
            "ranges": [unit.double.ranges() for unit in self._units()],
            "tensors": tensors,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the very snapshot of `state_dict`: the same tensors, ranges and parts that are float32.

        The other reference must have been made of the same model with the same engine.
        """
        self.load({(path, name): x for path, inside in state["tensors"].items() for name, x in inside.items()})
        for name, (units, reasons) in self._planned.items():
            self._plans[name].units, self._plans[name].reasons = list(units), list(reasons)
        self._dropped = []
        for layer, position, reason in state["dropped"]:
            self._drop(self._planned[layer][0][position], reason)
        self.generation, self._checked, self._draws = state["generation"], state["checked"], state["draws"]
        if self.generation:
            for unit, ranges in zip(self._units(), state["ranges"], strict=True):
                unit.double.take_ranges(ranges)
                unit.forward = unit.double.convert()

    def describe(self) -> list[tuple[str, str, str]]:
        """Each layer's name, engine, and what is quantised how and why other parts are not."""
        rows = []
        for name, plan in self._plans.items():
            kinds = [unit.double.what for unit in plan.units]
            counted = [f"{kinds.count(k)} × {k}" if kinds.count(k) > 1 else k for k in dict.fromkeys(kinds)]
            reasons = [f"float32: {reason}" for reason in dict.fromkeys(plan.reasons)]
            rows.append((name, self.engine if plan.units else "fp32", "; ".join([*counted, *reasons])))
        return rows

    # --- planning -------------------------------------------------------------------------------------

    def _plan(self, name: str, inside: list[nn.Module]) -> _LayerPlan:
        plan = _LayerPlan()
        if self.engine == "fp32":
            plan.reasons.append(self.engine_reason)
            return plan
        for group in self._groups(inside):
            if len(group) > 1:
                try:
                    plan.units.append(_Unit(name, quantise(nn.Sequential(*group), self.engine), group))
                    continue
                except QuantisationRefusedError:
                    pass  # one by one, then
            for module in group:
                self._plan_module(plan, name, module)
        if not plan.units and not plan.reasons:
            plan.reasons.append("it holds no convolution and no nn.Linear")
        return plan

    def _plan_module(self, plan: _LayerPlan, layer: str, module: nn.Module) -> None:
        """Quantise a module whole, or else the parts of it that can be."""
        if not any(p.dim() >= 2 for p in module.parameters()):
            return
        try:
            plan.units.append(_Unit(layer, quantise(module, self.engine), [module]))
            return
        except QuantisationRefusedError as refusal:
            if isinstance(module, nn.MultiheadAttention):
                plan.reasons.append("nn.MultiheadAttention uses its weights itself")
                return
            children = list(module.children())
            if not children or "traced" in str(refusal):
                plan.reasons.append(f"{type(module).__name__}: {refusal}")
        for child in module.children():
            self._plan_module(plan, layer, child)

    def _groups(self, inside: list[nn.Module]) -> list[list[nn.Module]]:
        """The outermost modules; neighbours in one nn.Sequential together, from the first convolution on."""
        below = {child for module in inside for child in module.modules() if child is not module}
        outermost = [module for module in dict.fromkeys(inside) if module not in below]
        places: dict[nn.Module, tuple[int, int]] = {}
        for number, parent in enumerate(self.model.modules()):
            if type(parent) is nn.Sequential:
                places.update({child: (number, position) for position, child in enumerate(parent)})
        alone = [[module] for module in outermost if module not in places]
        chained = sorted((m for m in outermost if m in places), key=places.__getitem__)
        runs = groupby(enumerate(chained), lambda pair: (places[pair[1]][0], places[pair[1]][1] - pair[0]))
        for _, pairs in runs:
            members = [module for _, module in pairs]
            start = next((i for i, m in enumerate(members) if isinstance(m, nn.modules.conv._ConvNd)), None)
            if start is None:
                alone += [[module] for module in members]
            else:
                alone += [[module] for module in members[:start]] + [members[start:]]
        return alone

    # --- running --------------------------------------------------------------------------------------

    def _units(self) -> Iterator[_Unit]:
        return iter([unit for plan in self._plans.values() for unit in plan.units])

    def _last(self) -> list[str]:
        return list(self._plans)[-1:]

    def _drop(self, unit: _Unit, reason: str) -> None:
        plan = self._plans[unit.layer]
        plan.units.remove(unit)
        plan.reasons.append(reason.strip().partition("\n")[0])
        self._dropped.append((unit.layer, self._planned[unit.layer][0].index(unit), reason))

    def _drop_wrong_copies(self, content: object) -> None:
        """Compare traced copies with their originals, once: tracing may have frozen a decision of the code."""
        original = self.run(content, list(self._plans))
        while any(plan.units for plan in self._plans.values()):
            with self._replaced({unit: unit.double.calibrating() for unit in self._units()}):
                traced = self._run_guarded(content, list(self._plans), None)
            wrong = next((n for n in original if n in traced and not _same(original[n], traced[n])), None)
            if wrong is None or not self._plans[wrong].units:
                break
            for unit in list(self._plans[wrong].units):
                self._drop(unit, "its traced copy does not compute the same")
        self._checked = True

    def _run_guarded(self, content: object, wanted: Sequence[str], reduce: Reduce | None) -> dict[str, Tensor]:
        """Run with stand-ins; one that fails is given up for good and its module runs instead."""
        while True:
            try:
                return self.run(content, wanted, reduce)
            except _UnitFailedError as failed:
                self._drop(failed.unit, f"{type(failed.error).__name__} in low precision: {failed}")
                for module in failed.unit.calls:
                    vars(module).pop("forward", None)

    @contextmanager
    def _replaced(self, forwards: Mapping[_Unit, Forward | None]) -> Iterator[None]:
        with ExitStack() as stack:
            for unit, forward in forwards.items():
                if forward is None:
                    continue
                *passed, last = unit.calls
                for module in passed:
                    vars(module)["forward"] = _first
                    stack.callback(vars(module).pop, "forward", None)
                vars(last)["forward"] = _guarded(unit, forward)
                stack.callback(vars(last).pop, "forward", None)
            yield


def _first(first: Any, *_others: Any, **_more: Any) -> Any:
    return first


def _guarded(unit: _Unit, forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except (_UnitFailedError, Enough):
            raise
        except Exception as error:
            raise _UnitFailedError(unit, error) from error

    return run


def _same(original: Tensor, traced: Tensor) -> bool:
    if original.shape != traced.shape:
        return False
    return bool((original - traced).norm() <= SAME * original.norm())
