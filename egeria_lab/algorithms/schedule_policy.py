"""Follow a freezing schedule: turn its times into decisions as training progresses. Deciding only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from egeria_lab.algorithms.decision import Decision
from egeria_lab.algorithms.freeze_plans import NEVER, Stints


class SchedulePolicy:
    """Decides which layers freeze and thaw, front to back, each planned change once.

    What people do by hand is respected: a layer that was frozen by hand is not thawed by the schedule, and
    one that was thawed by hand is not frozen again before its next stint, if there is one. A pinned layer is
    reported once as blocked, and freezes when it is unpinned while its stint lasts; layers behind it freeze
    as planned. Progress may fall back when a training is lengthened: nothing is undone then.

    Args:
        times: layer → the fraction of training at which it freezes (`NEVER` for not at all), or its stints
            ``((from, until), …)`` in ascending order.

    Attributes:
        times: layer → fraction of training at which it freezes first, or `NEVER`.

    Example:
        >>> policy = SchedulePolicy({"a": ((0.5, 0.9),), "b": NEVER})
        >>> [(d.action, d.layer) for d in policy.due(0.6, frozen=(), pinned=())]
        [('freeze', 'a')]
        >>> [(d.action, d.layer) for d in policy.due(0.9, frozen=("a",), pinned=())]
        [('thaw', 'a')]
    """

    def __init__(self, times: Mapping[str, float | Stints]) -> None:
        self.stints: dict[str, Stints] = {
            name: tuple(stint for stint in _as_stints(time) if stint[0] < 1) for name, time in times.items()
        }
        self.times = {name: stints[0][0] if stints else NEVER for name, stints in self.stints.items()}
        # Planned changes alternate: even ones freeze, odd ones thaw.
        self._changes = {
            name: [time for stint in stints for time in stint if time < 1] for name, stints in self.stints.items()
        }
        self._passed = dict.fromkeys(self.stints, 0)
        self._waiting: set[str] = set()
        self._announced: set[str] = set()

    def due(
        self, progress: float, *, frozen: Sequence[str], pinned: Sequence[str], by_hand: Sequence[str] = ()
    ) -> list[Decision]:
        """What freezes and thaws at a progress in [0, 1].

        Args:
            progress: finished share of the planned training.
            frozen: names of the layers that are frozen now.
            pinned: names of the layers that no rule may freeze.
            by_hand: those of `frozen` that somebody else than this schedule froze.
        """
        decisions: list[Decision] = []
        self._announced = {name for name in self._announced if name in pinned or name in self._waiting}
        for name, changes in self._changes.items():
            before = self._passed[name]
            while self._passed[name] < len(changes) and progress >= changes[self._passed[name]]:
                self._passed[name] += 1
            has_moved, is_due = self._passed[name] > before, self._passed[name] % 2 == 1
            if not is_due:
                self._waiting.discard(name)
                if has_moved and name in frozen and name not in by_hand:
                    decisions.append(self._thaw(name))
            elif name not in frozen and (has_moved or name in self._waiting):
                newly = [d.layer for d in decisions if d.action == "freeze"]
                decisions += self._freeze(name, pinned, is_last=self._trained(frozen, newly) == 1)
        return decisions

    def next_freeze(self, layer: str) -> float | None:
        """The fraction of training at which a layer freezes next, or None when it does not again."""
        passed, changes = self._passed[layer], self._changes[layer]
        position = passed + passed % 2
        return changes[position] if position < len(changes) else None

    def is_waiting(self, layer: str) -> bool:
        """True while a layer should be frozen by now but may not."""
        return layer in self._waiting

    def rate_factor(self, layer: str, progress: float) -> float:
        """Factor on the peak learning rate of a layer whose own cosine ends at its freeze.

        Before its first freeze a layer follows a cosine that ends there. A layer that is trained afterwards,
        because the plan or somebody thawed it or because it is pinned, follows the cosine of the head, which
        ends with the training.

        Source: SpFDE (NeurIPS 2022), section 3.2; FreezeOut (2017), section 3.

        Example:
            >>> round(SchedulePolicy({"a": 0.5}).rate_factor("a", 0.25), 6)
            0.5
        """
        end = 1.0 if self._passed[layer] else min(1.0, self.times[layer])
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress / end))) if end > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """How far the schedule has been followed, as plain values."""
        return {
            "passed": dict(self._passed),
            "waiting": sorted(self._waiting),
            "announced": sorted(self._announced),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another policy of the same layers was."""
        self._passed = {name: int(state["passed"][name]) for name in self.stints}
        self._waiting = set(state["waiting"])
        self._announced = set(state["announced"])

    def _trained(self, frozen: Sequence[str], newly: Sequence[str]) -> int:
        return sum(name not in frozen and name not in newly for name in self.stints)

    def _freeze(self, name: str, pinned: Sequence[str], *, is_last: bool) -> list[Decision]:
        obstacle = "it is the only layer that is still trained" if is_last else None
        if name in pinned:
            obstacle = "it is pinned; layers behind it freeze as planned, and save weight gradients only"
        if obstacle is None:
            self._waiting.discard(name)
            start, end = self.stints[name][self._passed[name] // 2]
            reason = f"scheduled for {start:.1%} of training" + (f", until {end:.1%}" if end < 1 else "")
            return [Decision(action="freeze", layer=name, reason=reason)]
        self._waiting.add(name)
        if name in self._announced:
            return []
        self._announced.add(name)
        return [Decision(action="blocked", layer=name, reason=obstacle)]

    def _thaw(self, name: str) -> Decision:
        time = self._changes[name][self._passed[name] - 1]
        return Decision(action="thaw", layer=name, reason=f"scheduled to be trained from {time:.1%} of training on")


def _as_stints(time: float | Stints) -> Stints:
    return ((float(time), NEVER),) if isinstance(time, (int, float)) else tuple(time)
