"""Optimizers by name or as given, and the learning-rate schedule that moves them.

Schedules by name count in fractions of the planned training, so a longer budget or fewer steps an epoch re-plans them
by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, ReduceLROnPlateau

from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.engine.budget import Budget
from egeria_lab.engine.optimizer_set import OptimizerSet, parts_of
from egeria_lab.engine.schedulers import SchedulerSet, make_scheduler, make_schedulers, move, moves_by_step
from egeria_lab.errors import InvalidSettingError, is_number, unknown_name

DEFAULT_RATES = {"sgd": 0.1, "adam": 1e-3, "adamw": 1e-3}


def make_optimizer(
    optimizer: str | Optimizer | Sequence[Optimizer] | Callable[[Iterable[nn.Parameter]], Any],
    model: nn.Module,
    learning_rate: float | None,
) -> Optimizer:
    """An optimizer from its name, from a function of the parameters, or as given; several become an `OptimizerSet`.

    Args:
        optimizer: ``"sgd"`` (momentum 0.9, weight decay 5e-4), ``"adam"``, ``"adamw"``, a function
            ``f(params)`` that returns an `Optimizer` or a list of them, an `Optimizer` over parameters of `model`, or
            a list of them.
        model: the model to train.
        learning_rate: > 0, or None for 0.1 with SGD and 1e-3 with Adam and AdamW. A ready-made optimizer
            keeps its own rate.

    Raises:
        UnknownNameError: for an unknown name.
        InvalidSettingError: for a rate that is not > 0, or an optimizer of another model or one that cannot be stepped.

    Example:
        >>> make_optimizer("sgd", nn.Linear(1, 1), None).param_groups[0]["lr"]
        0.1
    """
    if learning_rate is not None and not (is_number(learning_rate) and learning_rate > 0):
        raise InvalidSettingError(f"lr must be a finite number > 0 or None, got {learning_rate!r}.")
    if isinstance(optimizer, str):
        return _by_name(optimizer, model, learning_rate)
    is_made = isinstance(optimizer, (Optimizer, list, tuple)) or not callable(optimizer)
    made: Any = optimizer if is_made else optimizer(model.parameters())  # type: ignore[operator]
    parts = list(made) if isinstance(made, (list, tuple)) else [made]
    if not parts or not all(isinstance(part, Optimizer) for part in parts):
        raise InvalidSettingError(
            f"optimizer must be a name ({', '.join(DEFAULT_RATES)}), a torch Optimizer, a list of them, or a function "
            f"of the parameters that returns one of these; got {made!r}."
        )
    for part in parts:
        _check_usable(part, model)
    return parts[0] if len(parts) == 1 else OptimizerSet(parts)


def _by_name(name: str, model: nn.Module, learning_rate: float | None) -> Optimizer:
    if name not in DEFAULT_RATES:
        raise unknown_name("optimizer", name, DEFAULT_RATES)
    rate = learning_rate if learning_rate is not None else DEFAULT_RATES[name]
    parameters = list(model.parameters())
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=5e-4)
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return kind(parameters, lr=rate)


def _check_usable(optimizer: Optimizer, model: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise InvalidSettingError(
            f"the optimizer {type(optimizer).__name__} holds no parameter of the model; build it from "
            "model.parameters(), after the model has been moved to its device."
        )
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise InvalidSettingError(
            f"{type(optimizer).__name__} evaluates the loss several times a step by a closure, and a step here has one "
            "forward pass; choose an optimizer whose step() needs no closure."
        )


def split_by_layer(optimizer: Optimizer, layers: LayerModules) -> None:
    """Give each layer module parameter groups of its own, with the options of the group they came from.

    Args:
        optimizer: an optimizer that has not made a step yet.
        layers: the layer modules; groups are named by them under the key ``"layer"``.

    Raises:
        InvalidSettingError: when a parameter belongs to no layer module.
    """
    for number, part in enumerate(parts_of(optimizer)):
        split = _groups_by_layer(part, layers)
        if isinstance(optimizer, OptimizerSet):
            optimizer.set_groups(number, split)
        else:
            part.param_groups[:] = split


def _groups_by_layer(optimizer: Optimizer, layers: LayerModules) -> list[dict[str, Any]]:
    owner = {id(p): layer.name for layer in layers for p in layer.parameters}
    split: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        unowned = [p for p in group["params"] if id(p) not in owner]
        if unowned:
            raise InvalidSettingError(
                f"a parameter of shape {tuple(unowned[0].shape)} belongs to no layer module, so it has no schedule "
                "of its own; choose block_lr='global'."
            )
        for layer in layers:
            mine = [p for p in group["params"] if owner[id(p)] == layer.name]
            if mine:
                split.append({**group, "params": mine, "layer": layer.name})
    return split


class Schedule:
    """Moves the learning rate of an optimizer, once a step or once an epoch as its scheduler wants.

    Args:
        scheduler: a name in `SCHEDULES`, a function ``f(optimizer) -> LRScheduler``, or None. A `OneCycleLR`
            that has come to its own end keeps its last rate when the budget goes on. For several optimizers a
            function is called with each of them, and a list has one scheduler, function or name for each.
        optimizer: the optimizer.
        budget: the budget; names count against it, also when it changes.
        every: ``"auto"``, ``"step"`` or ``"epoch"``. Named schedules, `OneCycleLR` and `CyclicLR` move
            every step, others every epoch.
        layer_factor: ``f(layer, progress)``, the factor of each layer's own schedule, for an optimizer
            whose groups were split by layer; it takes the place of the one schedule for all.

    Example:
        >>> optimizer = make_optimizer("sgd", nn.Linear(1, 1), 0.2)
        >>> schedule = Schedule("linear", optimizer, Budget(1, 4))
        >>> schedule.after_step()
        >>> schedule.learning_rate
        0.15000000000000002
    """

    def __init__(
        self,
        scheduler: Any,
        optimizer: Optimizer,
        budget: Budget,
        every: str = "auto",
        layer_factor: Callable[[str, float], float] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler: LRScheduler | ReduceLROnPlateau | SchedulerSet | None = None
        self._shown_group = 0
        self._clocks: list[tuple[Any, str]] = []
        if layer_factor is not None:
            self._follow_layers(scheduler, budget, layer_factor)
            return
        if scheduler is None:
            return
        if every not in ("auto", "step", "epoch"):
            raise unknown_name("scheduler_every", every, ("auto", "step", "epoch"))
        parts = parts_of(optimizer)
        if isinstance(scheduler, (list, tuple)) or (len(parts) > 1 and callable(scheduler)):
            given = list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler] * len(parts)
            self.scheduler = make_schedulers(given, parts, budget)
            made = self.scheduler.schedulers
        else:
            self.scheduler = make_scheduler(scheduler, optimizer, budget)
            given, made = [scheduler], [self.scheduler]
        self._clocks = [
            (one, every if every != "auto" else "step" if moves_by_step(wish, one) else "epoch")
            for wish, one in zip(given, made, strict=True)
        ]
        self.every = self._clocks[0][1]

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first parameter group now; of the head where each layer has its own."""
        return float(self.optimizer.param_groups[self._shown_group]["lr"])

    @property
    def peak_rate(self) -> float:
        """Highest rate of that group that the schedule plans, as far as it says so."""
        group = self.optimizer.param_groups[self._shown_group]
        if isinstance(self.scheduler, CyclicLR):
            return float(self.scheduler.max_lrs[self._shown_group])
        return float(group.get("max_lr", group.get("initial_lr", group["lr"])))

    def _follow_layers(self, scheduler: Any, budget: Budget, layer_factor: Callable[[str, float], float]) -> None:
        if scheduler != "cosine":
            raise InvalidSettingError(
                f"block_lr='cosine' gives each layer a cosine of its own, but scheduler={scheduler!r} was given; "
                "leave scheduler='cosine', or choose block_lr='global'."
            )

        def follow(layer: str) -> Callable[[int], float]:
            return lambda step: layer_factor(layer, min(1.0, step / max(1, budget.total_steps)))

        names = [group["layer"] for group in self.optimizer.param_groups]
        self.scheduler = LambdaLR(self.optimizer, [follow(name) for name in names])
        self.every, self._shown_group = "step", len(names) - 1
        self._clocks = [(self.scheduler, "step")]

    def after_step(self) -> None:
        """Count one optimizer step."""
        for scheduler, every in self._clocks:
            if every == "step":
                move(scheduler, None)

    def after_epoch(self, valid_loss: float) -> None:
        """Count one epoch; a plateau scheduler looks at the validation loss."""
        for scheduler, every in self._clocks:
            if every == "epoch":
                move(scheduler, valid_loss)

    def scale(self, factor: float) -> None:
        """Multiply the peak rate of every group, keeping the schedule's shape."""
        for group in self.optimizer.param_groups:
            group["lr"] = float(group["lr"]) * factor
            for key in ("initial_lr", "max_lr", "min_lr"):
                if key in group:
                    group[key] = group[key] * factor
        for scheduler in _with_parts(self.scheduler):
            for name in ("base_lrs", "max_lrs", "min_lrs", "eta_min", "default_min_lr"):
                rates = getattr(scheduler, name, None)
                if rates is not None:
                    scaled = [rate * factor for rate in rates] if isinstance(rates, list) else rates * factor
                    setattr(scheduler, name, scaled)

    def state_dict(self) -> dict[str, Any]:
        """Where the scheduler stands, as plain values; functions of the user stay out. Rates lie in the optimizer."""
        kind = None if self.scheduler is None else type(self.scheduler).__name__
        return {"kind": kind, "scheduler": None if self.scheduler is None else self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go on from there; False, and nothing is changed, when the state is that of another kind of scheduler."""
        kind = None if self.scheduler is None else type(self.scheduler).__name__
        if state["kind"] != kind:
            return False
        if self.scheduler is not None:
            self.scheduler.load_state_dict(_fitting(state["scheduler"], self.scheduler.state_dict()))
        return True


def _fitting(state: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What of a scheduler's state is named as its own; parts in parts, and counters as counters."""
    fit: dict[str, Any] = {}
    for name, value in state.items():
        if name not in now:
            continue
        if name == "_schedulers":
            value = [_fitting(part, its) for part, its in zip(value, now[name], strict=True)]
        elif isinstance(now[name], Counter):
            value = Counter(value)
        fit[name] = value
    return fit


def _with_parts(scheduler: Any) -> list[Any]:
    """A scheduler and those that it is made of (`SequentialLR`, `ChainedScheduler`)."""
    if scheduler is None:
        return []
    return [scheduler, *(part for inner in getattr(scheduler, "_schedulers", ()) for part in _with_parts(inner))]
