"""Learning-rate schedulers by name, from functions or as given: one for an optimizer, or one for each of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from egeria_lab.engine.budget import Budget
from egeria_lab.errors import InvalidSettingError, unknown_name


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _step(progress: float) -> float:
    return 1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": _cosine,
    "step": _step,
    "linear": lambda progress: 1 - progress,
    "constant": lambda _progress: 1.0,
}
"""Factor on the peak learning rate, as a function of the progress in [0, 1]."""


class SchedulerSet:
    """The schedulers of several optimizers, one each; None where a rate stays.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> one = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
        >>> list(SchedulerSet([LambdaLR(one, lambda step: 1.0), None]).state_dict())
        ['_schedulers']
    """

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self.schedulers = list(schedulers)

    @property
    def _schedulers(self) -> list[Any]:
        return [one for one in self.schedulers if one is not None]

    def state_dict(self) -> dict[str, Any]:
        """Where each stands."""
        return {"_schedulers": [one.state_dict() for one in self._schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        for one, its in zip(self._schedulers, state["_schedulers"], strict=True):
            one.load_state_dict(its)


def make_scheduler(scheduler: Any, optimizer: Optimizer, budget: Budget) -> Any:
    """One scheduler of one optimizer, from its name, a function of the optimizer, or as given.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> one = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
        >>> type(make_scheduler("cosine", one, Budget(1, 4))).__name__
        'LambdaLR'
    """
    if scheduler is None:
        return None
    if isinstance(scheduler, str):
        if scheduler not in SCHEDULES:
            raise unknown_name("scheduler", scheduler, SCHEDULES)
        factor = SCHEDULES[scheduler]
        return LambdaLR(optimizer, lambda step: factor(min(1.0, step / max(1, budget.total_steps))))
    made = scheduler(optimizer) if callable(scheduler) else scheduler
    if not isinstance(made, LRScheduler):
        raise InvalidSettingError(
            f"scheduler must be a name ({', '.join(SCHEDULES)}), None, a torch LRScheduler, or a function of "
            f"the optimizer that returns one; got {made!r}."
        )
    return made


def make_schedulers(given: Sequence[Any], parts: Sequence[Optimizer], budget: Budget) -> SchedulerSet:
    """One scheduler for each of several optimizers.

    Raises:
        InvalidSettingError: when there are not as many.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> one = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
        >>> len(make_schedulers(["cosine", None], [one, one], Budget(1, 4)).schedulers)
        2
    """
    if len(given) != len(parts):
        raise InvalidSettingError(
            f"{len(parts)} optimizers need as many schedulers, and {len(given)} were given; give one for each, None "
            "for a rate that stays."
        )
    return SchedulerSet([make_scheduler(one, part, budget) for one, part in zip(given, parts, strict=True)])


def moves_by_step(given: Any, made: Any) -> bool:
    """True for those that count steps: schedules by name, `OneCycleLR` and `CyclicLR`."""
    return isinstance(given, str) or isinstance(made, (OneCycleLR, CyclicLR))


def move(scheduler: Any, valid_loss: float | None) -> None:
    """Let a scheduler count once; a plateau looks at the validation loss, a finished `OneCycleLR` stays where it is."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(valid_loss if valid_loss is not None else 0.0)
    elif isinstance(scheduler, OneCycleLR) and scheduler.last_epoch >= scheduler.total_steps - 1:
        return
    elif scheduler is not None:
        scheduler.step()
