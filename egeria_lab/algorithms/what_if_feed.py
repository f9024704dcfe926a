"""Feed recorded series to the freezing rule, and no more of them than can make a difference.

The rule decides about the frontmost active layer only. So the readings of the others are kept and fed when
their turn comes, under the settings that held when each was made; what a new snapshot has made void by then is
left out. Likewise for learning rates: only those around a jump can make a built-in thaw rule speak.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from egeria_lab.algorithms.decision import Decision
from egeria_lab.algorithms.freeze_policy import Plasticity, PlasticityPolicy
from egeria_lab.algorithms.thaw_rules import SMOOTH_RATIO, never_thaw, thaw_on_lr_drop
from egeria_lab.algorithms.what_if_record import RecordedRun


@dataclass(frozen=True, slots=True)
class Phase:
    """What holds from one reading on until something is changed."""

    settings: Plasticity
    tolerances: Mapping[str, float]
    relaxed: bool


class Readings:
    """Readings that have landed, in order, and how far each layer's series was fed to the rule.

    Args:
        run: the recorded run.
        policy: the rule.

    Attributes:
        bootstrap_end: number of readings that landed while nothing might freeze, None while that holds.
    """

    def __init__(self, run: RecordedRun, policy: PlasticityPolicy) -> None:
        self.policy = policy
        self.bootstrap_end: int | None = None
        self._values = dict(zip(run.layers, run.values, strict=True))
        self._first = run.layers[0]
        self._landed: list[tuple[int, bool, Phase]] = []  # position in the record, new series, what held
        self._restarts: list[int] = []
        self._fed = dict.fromkeys(run.layers, 0)
        self._widest = 0
        self.hold(policy.settings, policy.tolerances)

    def __len__(self) -> int:
        return len(self._landed)

    def hold(self, settings: Plasticity, tolerances: Mapping[str, float]) -> None:
        """Note what holds from the next reading on."""
        self.policy.settings, self.policy.tolerances = settings, dict(tolerances)
        self._now = Phase(settings, self.policy.tolerances, self.policy.relaxed)
        self._widest = max(self._widest, settings.window)

    def land(self, index: int, restart: bool) -> None:
        """Take in the next reading, the first of a new series if `restart`."""
        if restart:
            self._restarts.append(len(self._landed))
        self._landed.append((index, restart, self._now))

    def leave_out(self, layer: str, pending: bool) -> None:
        """The layer was frozen up to now: nothing that landed, or is about to, is a reading of it."""
        self._fed[layer] = len(self._landed) + pending

    def decide(self, front: str, frozen: Sequence[str], pinned: Sequence[str]) -> list[Decision]:
        """Let the rule decide about the frontmost active layer on the reading that has just landed."""
        newest = len(self._landed) - 1
        if self._fed[front] > newest:
            return []
        self.catch_up(front, newest)
        if self.policy.stable_of(front) + 1 < self.policy.patience:
            return self._feed(front, newest)  # not stable for long enough, whatever this reading says
        return self._feed(front, newest, frozen, pinned)

    def catch_up(self, layer: str, end: int | None = None) -> None:
        """Feed what the rule has not seen of a layer, up to position `end` (all that landed by default)."""
        end = len(self._landed) if end is None else end
        position = self._fed[layer]
        if position >= end:
            return
        bootstrap_end = min(end, self.bootstrap_end if self.bootstrap_end is not None else end)
        if position < bootstrap_end:
            self._bootstrap(layer, self._series_start(position, bootstrap_end), bootstrap_end)
            position = bootstrap_end
        while position < end and self.policy.limit_of(layer) is None:  # its first slopes tune its tolerance
            self._feed(layer, position)
            position += 1
        for later in range(self._series_start(position, end), end):
            self._feed(layer, later)
        self._fed[layer] = end

    def _bootstrap(self, layer: str, start: int, end: int) -> None:
        """Of the critical period only the last readings are still in the windows when it ends."""
        column = self._values[layer]
        read = [position for position in range(start, end) if _is_value(column[self._landed[position][0]])]
        self.policy.bootstrapping = True
        for position in read[-2 * self._widest :]:
            self._feed(layer, position)
        self.policy.bootstrapping = False
        self._fed[layer] = end

    def _series_start(self, position: int, end: int) -> int:
        """The newest restart at or before `end`, where it lies behind `position`: it voids what came before."""
        place = bisect_right(self._restarts, end)
        return max(position, self._restarts[place - 1]) if place else position

    def _feed(
        self, layer: str, position: int, frozen: Sequence[str] | None = None, pinned: Sequence[str] = ()
    ) -> list[Decision]:
        """One reading to the rule; without `frozen` in such a way that it has nothing to decide."""
        index, restart, phase = self._landed[position]
        policy = self.policy
        self._fed[layer] = position + 1
        if restart:
            policy.restart(layer)
        value = self._values[layer][index]
        if not _is_value(value):
            return []
        if phase is not self._now:
            policy.settings, policy.tolerances, policy.relaxed = phase.settings, dict(phase.tolerances), phase.relaxed
        if frozen is None:  # then the frontmost active layer is another one, of which there is no reading
            frozen = (self._first,) if layer == self._first else ()
        _, decisions = policy.judge({layer: value}, gone=frozen, pinned=pinned)
        if phase is not self._now:
            now = self._now
            policy.settings, policy.tolerances, policy.relaxed = now.settings, dict(now.tolerances), now.relaxed
        return decisions


def _is_value(value: float) -> bool:
    return value == value  # NaN: not read


class LearningRateFeed:
    """Shows the rule the learning rates that its thaw rule might speak at, from the first freeze on.

    A built-in rule speaks at a rise or at a steep fall, and needs to know how long the rate had stood still
    and whether it had been falling smoothly: the steps in front of each such jump and the first ones of each
    smooth decay tell it as much as all steps would. A user's own function is shown every step.

    Args:
        run: the recorded run.
        policy: the rule.

    Attributes:
        next_step: the next step to show, or None.
    """

    def __init__(self, run: RecordedRun, policy: PlasticityPolicy) -> None:
        self._rates = run.learning_rates
        self._policy = policy
        rule = policy.settings.thaw_rule
        longest = max([policy.settings.interval_steps, *(a.value for a in run.acts if a.name == "interval_steps")])
        if rule is never_thaw:
            self._steps: list[int] = []
        elif rule is thaw_on_lr_drop:
            self._steps = telling_steps(self._rates, longest)
        else:
            self._steps = list(range(1, run.last_step + 1))
        self._position = 0
        self._shown = 0

    @property
    def next_step(self) -> int | None:
        return self._steps[self._position] if self._position < len(self._steps) else None

    def show_up_to(self, step: int) -> None:
        """Show what lies behind at the first freeze; nothing was frozen, so nothing thaws.

        What the rule remembers of rates seen meanwhile does no harm: to go back to the first one is a rise, or
        the rates rise on the way from there, and a rise makes it forget.
        """
        while (upcoming := self.next_step) is not None and upcoming <= step:
            self.show(upcoming, ())

    def show(self, step: int, frozen: Sequence[str]) -> list[Decision]:
        """Show one step. Losses do not count any more: the critical period is over when something has frozen."""
        if step == self.next_step:
            self._position += 1
        if step <= self._shown:
            return []
        self._shown = step
        return self._policy.observe(0.0, self._rates[step - 1], frozen)


def telling_steps(rates: Sequence[float], interval_steps: int) -> list[int]:
    """Numbers of the steps, from 1, that tell a built-in thaw rule as much as all steps would.

    Example:
        >>> telling_steps([0.1] * 10 + [0.01] * 5, interval_steps=2)    # 3 steps in front of the drop
        [1, 8, 9, 10, 11]
        >>> telling_steps([1.0, 0.99, 0.98, 0.97, 0.96], interval_steps=2)    # the start of a smooth decay
        [1, 2]
    """
    found = {1} if len(rates) else set()
    gentle_before = False
    for step, (before, now) in enumerate(pairwise(rates), start=2):
        if now == before:
            gentle_before = False
            continue
        gentle = SMOOTH_RATIO * before < now < before
        if not gentle:
            found.update(range(max(1, step - interval_steps - 1), step + 1))
        elif not gentle_before:
            found.update((step - 1, step))
        gentle_before = gentle
    return sorted(found)
