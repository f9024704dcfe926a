"""Layers on their way to being frozen: they are trained less and less, until nothing is lost by stopping.

What freezes while the learning rate is high keeps the noise of its last steps, and costs accuracy; what comes to
rest first does not. Freezing each layer at the end of a falling rate of its own is FreezeOut's idea (Brock et al.,
2017); here the verdict of the plasticity rule, not a schedule, says when a layer begins.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from egeria_lab.algorithms.decision import Decision


def settling_factor(done: float) -> float:
    """What is left of a layer's updates when so much of its settling is done, a half cosine from 1 to 0.

    Args:
        done: share of the settling, >= 0.

    Example:
        >>> [round(settling_factor(done), 2) for done in (0, 0.5, 1, 2)]
        [1.0, 0.5, 0.0, 0.0]
    """
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@dataclass(frozen=True, slots=True)
class Begun:
    """A layer that settles.

    Attributes:
        passes: passes over the data when it began.
        epochs: how many it takes.
        verdict: the decision to freeze it, which is carried out at the end.
    """

    passes: float
    epochs: float
    verdict: Decision


class Settling:
    """Which layers settle, front to back, and what is to be done about them.

    Args:
        layers: names of all layers, front to back.

    Example:
        >>> settling = Settling(["a", "b"])
        >>> settling.begin(Decision(action="freeze", layer="a", reason="stable"), passes=3.0, epochs=2.0).action
        'settle'
        >>> [settling.look(frozen=[], pinned=[], passes=p) for p in (4.0, 4.9)]
        [[], []]
        >>> [(d.action, d.reason) for d in settling.look(frozen=[], pinned=[], passes=5.0)]
        [('freeze', 'stable; settled since epoch 3.0')]
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = tuple(layers)
        self.begun: dict[str, Begun] = {}

    def begin(self, verdict: Decision, *, passes: float, epochs: float) -> Decision:
        """Let a layer settle that is to be frozen; answers with what is done instead."""
        self.begun[verdict.layer] = Begun(passes, epochs, verdict)
        return replace(verdict, action="settle", value=epochs)

    def instead(self, verdicts: list[Decision], *, passes: float, epochs: float) -> list[Decision]:
        """What is done where layers settle for so many passes before they freeze; for 0, the verdicts themselves."""
        if not epochs:
            return verdicts
        return [self.begin(one, passes=passes, epochs=epochs) if one.action == "freeze" else one for one in verdicts]

    def let_go(self, why: str) -> list[Decision]:
        """Let no layer settle any more; answers with what is done."""
        found = [replace(begun.verdict, action="unsettle", reason=why) for begun in self.begun.values()]
        self.begun.clear()
        return found

    def look(self, *, frozen: Collection[str], pinned: Collection[str], passes: float) -> list[Decision]:
        """Freeze what has settled, and let go what no longer may: pinned, or not next to the frozen front any more."""
        found: list[Decision] = []
        gone, is_whole = set(frozen), True  # whether all settling layers so far are frozen now
        for name in self._layers:
            if name in frozen:
                self.begun.pop(name, None)
            elif name in self.begun:
                begun = self.begun[name]
                ahead = next((other for other in self._layers if other not in gone), None)
                if name in pinned or ahead != name:
                    why = "it is pinned" if name in pinned else f"{ahead} before it is trained"
                    found.append(replace(begun.verdict, action="unsettle", reason=why))
                    del self.begun[name]
                    continue
                gone.add(name)
                is_whole = is_whole and passes - begun.passes >= begun.epochs - 1e-9
                if is_whole:
                    reason = f"{begun.verdict.reason}; settled since epoch {begun.passes:.1f}"
                    found.append(replace(begun.verdict, reason=reason))
                    del self.begun[name]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Who settles, as plain values."""
        return {name: [begun.passes, begun.epochs, asdict(begun.verdict)] for name, begun in self.begun.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.begun = {
            name: Begun(passes, epochs, Decision(**verdict)) for name, (passes, epochs, verdict) in state.items()
        }
