"""What a freezing rule wants done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a policy wants done.

    Attributes:
        action: ``"freeze"``, ``"thaw"``, ``"settle"`` (on its way to being frozen), ``"unsettle"``, ``"blocked"``
            (would freeze, but may not) or ``"set"`` (a setting).
        layer: name of the layer, or of the setting.
        reason: one clause with the numbers.
        slope: |slope| that led to it, where there is one.
        tolerance: what it was compared with.
        value: the new value of a setting, or over how many passes a layer settles.
    """

    action: str
    layer: str
    reason: str
    slope: float | None = None
    tolerance: float | None = None
    value: float | None = None
