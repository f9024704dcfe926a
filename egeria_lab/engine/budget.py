"""How long training is planned to be, and up to which step a call goes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from egeria_lab.errors import InvalidSettingError, TrainingError, require

STEP_LIMIT = "EGERIA_LAB_STEP_LIMIT"
"""Environment variable that caps every budget, so that notebooks can be tried in seconds."""


class PassPlanner(Protocol):
    """Knows how long passes will be, where they are not equally long."""

    def stop_after(self, epochs: float, total_steps: int) -> int | None:
        """The step at which so many passes from here are made under a plan, or None when it holds fewer."""

    def steps_for(self, epochs: float, total_steps: int | None = None) -> int:
        """The plan that makes so many passes from here, or more than a plan of `total_steps` makes."""


@dataclass
class Budget:
    """How long training is planned to be; schedules count against it.

    Attributes:
        steps_per_epoch: steps in one pass over the training data.
        total_steps: step at which training ends.
        decided: False while the length is only the default, so that the first `start(epochs=…)` decides it.
        planner: turns passes into steps where a sieve makes some shorter than others; None when all are alike.

    Example:
        >>> budget = Budget(steps_per_epoch=10, total_steps=200, decided=False)
        >>> budget.target(done=0, epochs=5), budget.total_steps
        (50, 50)
        >>> budget.target(done=50, steps=7), budget.total_steps
        (57, 57)
    """

    steps_per_epoch: int
    total_steps: int
    decided: bool = True
    planner: PassPlanner | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._clip()

    def _clip(self) -> None:
        limit = os.environ.get(STEP_LIMIT, "")
        if limit.isdigit():
            self.total_steps = min(self.total_steps, int(limit))

    def state_dict(self) -> dict[str, Any]:
        """The plan, as plain values."""
        return {
            "steps_per_epoch": self.steps_per_epoch, "total_steps": self.total_steps, "decided": self.decided,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a plan."""
        self.steps_per_epoch, self.total_steps = state["steps_per_epoch"], state["total_steps"]
        self.decided = state["decided"]
        self._clip()

    def check_left(self, done: int) -> None:
        """Raise when no step is left.

        Raises:
            TrainingError: when `done` steps use up the budget.
        """
        if done >= self.total_steps:
            raise TrainingError(
                f"the budget of {self.total_steps} steps is used up; session.extend(epochs=1) lengthens it, "
                "and run(epochs=…) or start(epochs=…) do so by themselves."
            )

    def target(self, done: int, steps: int | None = None, epochs: float | None = None) -> int:
        """The step up to which a run goes that is asked for so many steps or epochs from here.

        Without either it goes to the end of the budget. A longer run lengthens the budget.

        Raises:
            InvalidSettingError: when both are given, or one is not > 0.
            TrainingError: when neither is given and nothing is left.
        """
        if steps is not None and epochs is not None:
            raise InvalidSettingError(f"give steps or epochs, not both: got {steps=} and {epochs=}.")
        if steps is None and epochs is None:
            self.check_left(done)
            return self.total_steps
        amount = steps if steps is not None else epochs
        valid = isinstance(amount, (int, float)) and not isinstance(amount, bool) and 0 < amount < float("inf")
        require(valid, "Session", "steps" if epochs is None else "epochs", amount, "a number > 0")
        assert amount is not None
        decides = done == 0 and not self.decided and epochs is not None
        target = self._step_after(done, epochs, decides) if epochs is not None else done + max(1, round(amount))
        if target > self.total_steps or decides:
            self.decided, self.total_steps = True, target
            self._clip()
        return min(target, self.total_steps)

    def _step_after(self, done: int, epochs: float, decides: bool) -> int:
        if self.planner is None:
            return done + max(1, round(epochs * self.steps_per_epoch))
        within = None if decides else self.planner.stop_after(epochs, self.total_steps)
        return max(done + 1, self.planner.steps_for(epochs) if within is None else within)

    def extend(self, epochs: float) -> None:
        """Add passes over the training data.

        Raises:
            InvalidSettingError: when `epochs` is not a number > 0.
        """
        valid = isinstance(epochs, (int, float)) and not isinstance(epochs, bool) and 0 < epochs < float("inf")
        require(valid, "Session.extend", "epochs", epochs, "a number > 0")
        longer = (
            self.total_steps + round(epochs * self.steps_per_epoch)
            if self.planner is None
            else self.planner.steps_for(epochs, self.total_steps)
        )
        self.total_steps = max(self.total_steps + 1, longer)
        self.decided = True
        self._clip()
