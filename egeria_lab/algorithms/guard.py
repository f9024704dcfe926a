"""A safety net: notice when accuracy falls too far below its best while layers are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Guard:
    """Remembers the best validation accuracy and says when the fall from it is too deep.

    Attributes:
        best: the best accuracy so far, in [0, 1], or None before the first.

    Example:
        >>> guard = Guard()
        >>> guard.check(0.90, allowed=0.02)
        >>> guard.check(0.87, allowed=0.02)
        'validation accuracy 87.0% is 3.0 points below its best 90.0% (guard: 2.0)'
    """

    best: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """The best accuracy so far."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.best = state["best"]

    def check(self, accuracy: float, allowed: float) -> str | None:
        """Take in one accuracy; the reason to act, or None.

        Args:
            accuracy: validation accuracy, in [0, 1].
            allowed: how far below the best it may fall, as a fraction.
        """
        best = self.best if self.best is not None else accuracy
        self.best = max(best, accuracy)
        if best - accuracy <= allowed:
            return None
        return (
            f"validation accuracy {accuracy:.1%} is {100 * (best - accuracy):.1f} points below its best "
            f"{best:.1%} (guard: {100 * allowed:.1f})"
        )
