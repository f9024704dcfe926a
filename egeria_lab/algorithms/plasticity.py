"""A series of plasticity readings in, a trend and a verdict out.

Egeria (EuroSys 2023), section 4.2: smooth the readings, fit a line through the last ones, and call the
layer converged when the slope has stayed below a tolerance for long enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TUNING_FITS = 5
"""The tolerance of a layer is tuned on the mean |slope| of its first so many fits."""


def linear_slope(values: Sequence[float]) -> float:
    """Least-squares slope of `values` against 0, 1, 2, …, in closed form and double precision.

    Args:
        values: at least two numbers.

    Returns:
        Change per position.

    Raises:
        ValueError: for fewer than two values.

    Example:
        >>> linear_slope([1.0, 3.0, 5.0])
        2.0
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"a line needs at least 2 values, got {count}.")
    centre = (count - 1) / 2
    mean = sum(values) / count
    weighted = sum((index - centre) * (value - mean) for index, value in enumerate(values))
    return weighted / (count * (count * count - 1) / 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One plasticity reading of one layer and what follows from it.

    Attributes:
        value: the distance to the reference, as measured.
        smoothed: moving average over the last `window` readings.
        slope: |slope| per reading of the smoothed values, None before there are enough.
        tolerance: what the slope is compared with, None until it is tuned.
        stable: how many readings in a row the slope has been below the tolerance.
        verdict: ``"warming up"``, ``"moving"``, ``"stable"`` or ``"freeze"``.
    """

    value: float
    smoothed: float
    slope: float | None
    tolerance: float | None
    stable: int
    verdict: str


@dataclass(slots=True)
class PlasticityTrend:
    """Smoothing, slope, tolerance and patience of one layer.

    The settings are given at each update, so that they may change mid-run. `restart` begins a new series
    (readings against different references are never mixed) and keeps the tuned tolerance.

    Example:
        >>> trend = PlasticityTrend()
        >>> for value in (0.0, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0):
        ...     reading = trend.update(value, window=2, patience=2, tolerance=0.5)
        >>> reading.verdict, reading.stable
        ('freeze', 2)
    """

    values: deque[float] = field(default_factory=deque)
    smoothed: deque[float] = field(default_factory=deque)
    first_slopes: list[float] = field(default_factory=list)
    stable: int = 0

    @property
    def scale(self) -> float | None:
        """Mean |slope| of the first fits: the tolerance of 1.0. None until the fits were made."""
        if len(self.first_slopes) < TUNING_FITS:
            return None
        return sum(self.first_slopes) / len(self.first_slopes)

    def state_dict(self) -> dict[str, Any]:
        """The series as plain values."""
        return {
            "values": list(self.values),
            "smoothed": list(self.smoothed),
            "first_slopes": list(self.first_slopes),
            "stable": self.stable,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a series of `state_dict`."""
        self.values, self.smoothed = deque(state["values"]), deque(state["smoothed"])
        self.first_slopes, self.stable = list(state["first_slopes"]), int(state["stable"])

    def restart(self) -> None:
        """Begin a new series against a new reference; the tuned tolerance stays."""
        self.values.clear()
        self.smoothed.clear()
        self.stable = 0

    def update(self, value: float, *, window: int, patience: int, tolerance: float) -> Reading:
        """Add one reading.

        Args:
            value: distance to the reference, >= 0.
            window: readings in the moving average and in the fit, >= 2.
            patience: stable readings in a row that a freeze needs, >= 1.
            tolerance: share of the layer's first slopes below which it counts as stable, >= 0.
        """
        self._append(value, window)
        slope = abs(linear_slope(self.smoothed)) if len(self.smoothed) >= window else None
        if slope is not None and len(self.first_slopes) < TUNING_FITS:
            self.first_slopes.append(slope)
        limit = None if self.scale is None else tolerance * self.scale
        is_stable = slope is not None and limit is not None and slope < limit
        self.stable = self.stable + 1 if is_stable else 0
        verdict = "warming up" if limit is None or slope is None else "stable" if is_stable else "moving"
        if is_stable and self.stable >= patience:
            verdict = "freeze"
        return Reading(
            value=value,
            smoothed=self.smoothed[-1],
            slope=slope,
            tolerance=limit,
            stable=self.stable,
            verdict=verdict,
        )

    def _append(self, value: float, window: int) -> None:
        self.values.append(value)
        while len(self.values) > window:
            self.values.popleft()
        self.smoothed.append(sum(self.values) / len(self.values))
        while len(self.smoothed) > window:
            self.smoothed.popleft()
