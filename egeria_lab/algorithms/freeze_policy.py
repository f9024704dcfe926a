"""Egeria's rule: decide which layers to freeze or thaw. Doing it is `freezing.Freezer`'s work.

A policy is told the loss and learning rate of every step (`observe`) and, every so often, the plasticity
of each active layer (`evaluate`); it answers with decisions. It knows no step counter and no widget.
The file is one piece because the settings and the state machine that reads them explain each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from egeria_lab.algorithms.decision import Decision
from egeria_lab.algorithms.distances import DISTANCES
from egeria_lab.algorithms.plasticity import PlasticityTrend, Reading
from egeria_lab.algorithms.settling import Settling
from egeria_lab.algorithms.thaw_rules import SMOOTH_RATIO, THAW_RULES, LearningRates, ThawRule
from egeria_lab.errors import InvalidSettingError, is_number, is_whole, require, unknown_name
from egeria_lab.tables import ShownAsTable

RELAXED_FLOOR = 3
"""After a thaw, `window` and `patience` are halved, but never below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plasticity(ShownAsTable):
    """Egeria's rule: freeze the frontmost active layer when its plasticity has stopped moving.

    Attributes:
        distance: ``"sp"``, ``"cka"``, ``"cosine"`` or ``"relative_l2"``.
        interval_steps: training steps between two readings, >= 1.
        window: readings in the moving average and in the line fit, >= 2.
        patience: stable readings in a row before a freeze, >= 1.
        tolerance: share of a layer's own first slopes below which it is stable, >= 0.
        bootstrap_change: nothing freezes until the training loss changes by less than this share
            between two windows, > 0.
        bootstrap_epochs: nothing freezes before so many passes over the data, >= 0; 0 for fine-tuning.
        bootstrap_rate: nothing freezes before the learning rate has come down to this share of its highest, in
            (0, 1], or None for no such condition.
        settle_epochs: a layer that is to be frozen is first trained less and less over so many passes, >= 0: what
            freezes at a high learning rate without it keeps the noise of its last steps. 0 freezes at once, as in the
            paper. Measured on ResNet-8 and fashion-mini, 12 epochs, step schedule, tolerance 0.6, never thawed: seed
            0, 2 epochs, 87.8 % as with nothing frozen, × 1.61 as fast (× 1.43 without a cache), 44 % of the FLOPs
            saved; at once 85.6 %, 69 % saved. A prototype with 1, 2 and 3 epochs, seeds 0 and 1: 87.6 and 87.0, 88.2
            and 88.1, 87.8 and 88.4 %, against 87.9 and 88.2 % plain; 54 and 61, 39 and 49, 36 and 27 % saved.
        reference: ``"auto"``, ``"int8"``, ``"bf16"`` or ``"fp32"``, the numeric format of the reference model;
            layers that cannot be had in it are compared in float32.
        refresh_evals: readings between two snapshots, or None for 2 × (window + patience); never less
            than window + patience.
        refresh_on_freeze: take a new snapshot, and so begin new series, whenever a layer freezes; False lets
            the next layer freeze as soon as its own series allows. Measured on ResNet-8 and fashion-mini, 8
            epochs, seeds 0 to 2: 13.6, 6.8 and 26.1 % of the FLOPs saved with True (accuracy 87.7, 87.7, 87.7 %),
            19.0, 12.8 and 18.0 % with False (87.8, 87.5, 87.8 %), 88.0, 88.5, 88.5 % with nothing frozen.
        freeze_together: when the front layer freezes, those right behind it whose own readings have been stable
            long enough freeze at the same step, instead of one at each reading. Always so for a compiled
            model, where each new frozen set costs a recompile. Measured as above, with `refresh_on_freeze`
            False: 19.0, 17.0 and 18.0 % saved, accuracy 87.8, 87.1, 87.8 %.
        thaw: ``"lr_drop"``, ``"never"``, or a function of `LearningRates`.
        max_frozen: at most this share of the layers may be frozen by the rule, in (0, 1], or None.
        monitor_budget: share of the training time that readings may take, in (0, 1].
        probe_rows: samples of the batch that a reading compares, >= 2.
        load_gate: leave a reading out while the machine's load average per core lies above this, > 0, or None.
            A run with a gate is not repeatable, so there is none by default and none under
            ``deterministic=True``.
        guard: when validation accuracy falls by more than this fraction below its best, thaw what the rule
            froze and halve the tolerance; in (0, 1), or None for no guard.

    Raises:
        InvalidSettingError: when made with a value outside these ranges.

    Source: Egeria (EuroSys 2023), sections 3 and 4.2.

    Example:
        >>> Plasticity(tolerance=0.3).tolerance
        0.3
        >>> Plasticity(patience=0)
        Traceback (most recent call last):
        egeria_lab.errors.InvalidSettingError: Plasticity.patience must be a whole number >= 1, got 0.
    """

    distance: str = "sp"
    interval_steps: int = 10
    window: int = 10
    patience: int = 10
    tolerance: float = 0.2
    bootstrap_change: float = 0.10
    bootstrap_epochs: float = 1.0
    bootstrap_rate: float | None = None
    settle_epochs: float = 0.0
    reference: str = "auto"
    refresh_evals: int | None = None
    refresh_on_freeze: bool = True
    freeze_together: bool = False
    thaw: str | ThawRule = "lr_drop"
    max_frozen: float | None = None
    monitor_budget: float = 0.05
    probe_rows: int = 64
    load_gate: float | None = None
    guard: float | None = None

    prefix: ClassVar[str] = "freeze"

    def __post_init__(self) -> None:
        if self.distance not in DISTANCES:
            raise unknown_name("distance", self.distance, DISTANCES)
        for name, low in (("interval_steps", 1), ("window", 2), ("patience", 1), ("probe_rows", 2)):
            value = getattr(self, name)
            require(is_whole(value) and value >= low, "Plasticity", name, value, f"a whole number >= {low}")
        require(is_number(self.tolerance) and self.tolerance >= 0, "Plasticity", "tolerance", self.tolerance, ">= 0")
        for name in ("bootstrap_change", "monitor_budget"):
            value = getattr(self, name)
            require(is_number(value) and value > 0, "Plasticity", name, value, "a number > 0")
        for name in ("bootstrap_epochs", "settle_epochs"):
            value = getattr(self, name)
            require(is_number(value) and value >= 0, "Plasticity", name, value, "a number >= 0")
        rate = self.bootstrap_rate
        valid = rate is None or (is_number(rate) and 0 < rate <= 1)
        require(valid, "Plasticity", "bootstrap_rate", rate, "in (0, 1] or None")
        require(self.monitor_budget <= 1, "Plasticity", "monitor_budget", self.monitor_budget, "in (0, 1]")
        require(
            self.max_frozen is None or (is_number(self.max_frozen) and 0 < self.max_frozen <= 1),
            "Plasticity", "max_frozen", self.max_frozen, "in (0, 1] or None",
        )  # fmt: skip
        require(
            self.refresh_evals is None or (is_whole(self.refresh_evals) and self.refresh_evals >= 1),
            "Plasticity", "refresh_evals", self.refresh_evals, "a whole number >= 1 or None",
        )  # fmt: skip
        require(
            self.guard is None or (is_number(self.guard) and 0 < self.guard < 1),
            "Plasticity", "guard", self.guard, "in (0, 1) or None",
        )  # fmt: skip
        require(
            self.load_gate is None or (is_number(self.load_gate) and self.load_gate > 0),
            "Plasticity", "load_gate", self.load_gate, "a number > 0 or None",
        )  # fmt: skip
        for name in ("refresh_on_freeze", "freeze_together"):
            value = getattr(self, name)
            require(isinstance(value, bool), "Plasticity", name, value, "True or False")
        if self.reference not in REFERENCES:
            raise unknown_name("reference", self.reference, REFERENCES)
        if not callable(self.thaw) and self.thaw not in THAW_RULES:
            raise unknown_name("thaw rule", self.thaw, THAW_RULES)

    @property
    def thaw_rule(self) -> ThawRule:
        """The thaw rule as a function."""
        return self.thaw if callable(self.thaw) else THAW_RULES[self.thaw]

    @property
    def readings_per_snapshot(self) -> int:
        """How many readings are made against one snapshot."""
        shortest = self.window + self.patience
        return max(shortest, self.refresh_evals) if self.refresh_evals is not None else 2 * shortest


REFERENCES = ("auto", "int8", "bf16", "fp32")


class PlasticityPolicy:
    """Egeria's rule as a state machine over the ordered layers of one model.

    Args:
        layers: names of the layers, front to back; the last one (the head) is never frozen by the rule.
        settings: the rule's settings; replace them at any time through `settings`.

    Attributes:
        bootstrapping: True while the loss still falls fast and nothing may freeze.
        loss_change: relative change of the window-averaged loss at the last evaluation, or None.
        relaxed: True after a thaw: window and patience are halved.
        together: layers may freeze together, whatever the settings say.
        settling: which layers are on their way to being frozen.

    Example:
        >>> policy = PlasticityPolicy(["a", "b"], Plasticity(window=2, patience=1, tolerance=0.5))
        >>> policy.bootstrapping
        True
    """

    def __init__(self, layers: Sequence[str], settings: Plasticity) -> None:
        self.layers = tuple(layers)
        self.settings = settings
        self.tolerances: dict[str, float] = {}
        self.bootstrapping = True
        self.loss_change: float | None = None
        self.relaxed = False
        self.together = False
        self.settling = Settling(layers)
        self._trends = {name: PlasticityTrend() for name in self.layers}
        self._interval_losses: list[float] = []
        self._losses: deque[float] = deque()
        self._rate: float | None = None
        self._highest_rate = 0.0
        self._rate_age = 0
        self._rate_is_smooth = False
        self._rate_at_last_freeze: float | None = None
        self._blocked: set[tuple[str, str]] = set()

    @property
    def window(self) -> int:
        """Readings in the average and the fit that hold now."""
        return self._relaxed(self.settings.window)

    @property
    def patience(self) -> int:
        """Stable readings in a row that a freeze needs now."""
        return self._relaxed(self.settings.patience)

    def _relaxed(self, readings: int) -> int:
        return min(readings, max(RELAXED_FLOOR, readings // 2)) if self.relaxed else readings

    def tolerance_of(self, layer: str) -> float:
        """The tolerance that holds for one layer: its own override, or the one for all."""
        return self.tolerances.get(layer, self.settings.tolerance)

    def limit_of(self, layer: str) -> float | None:
        """The slope below which the layer counts as stable now; None until it is tuned."""
        scale = self._trends[layer].scale
        return None if scale is None else scale * self.tolerance_of(layer)

    def stable_of(self, layer: str) -> int:
        """How many readings in a row the layer has been stable."""
        return self._trends[layer].stable

    def observe(self, loss: float, learning_rate: float, frozen: Sequence[str]) -> list[Decision]:
        """Take in one finished step; when the thaw rule asks for it, thaw all layers and let none settle any more."""
        self._interval_losses.append(loss)
        self.saw_rate(learning_rate)
        before = self._rate if self._rate is not None else learning_rate
        if learning_rate != before:
            self._rate_is_smooth = learning_rate < before and (
                self._rate_is_smooth or learning_rate > SMOOTH_RATIO * before
            )
        rates = LearningRates(
            now=learning_rate,
            before=before,
            at_last_freeze=self._rate_at_last_freeze,
            stood_still=self._rate_age >= self.settings.interval_steps,
            smooth=self._rate_is_smooth,
        )
        reason = self.settings.thaw_rule(rates) if frozen or self.settling.begun else None
        self._rate_age = self._rate_age + 1 if learning_rate == before else 1
        self._rate = learning_rate
        if reason is None:
            return []
        return self.thaws(frozen, reason)

    def thaws(self, frozen: Sequence[str], reason: str) -> list[Decision]:
        """Thaw layers, and let none settle any more."""
        return [
            *(Decision(action="thaw", layer=name, reason=reason) for name in frozen), *self.settling.let_go(reason),
        ]  # fmt: skip

    def saw_rate(self, learning_rate: float) -> None:
        """Note a learning rate, for `Plasticity.bootstrap_rate`."""
        self._highest_rate = max(self._highest_rate, learning_rate)

    def thawed(self) -> None:
        """Note that the thaw rule's decision was carried out: from now on criteria are relaxed."""
        self.relaxed = True
        self._rate_at_last_freeze = None

    def froze(self) -> None:
        """Note that a layer was frozen, or began to settle, at the current learning rate."""
        self._rate_at_last_freeze = self._rate

    def restart(self, layer: str | None = None) -> None:
        """Begin new series, after a refresh (all layers) or after a thaw by hand (one layer)."""
        for name in [layer] if layer is not None else self.layers:
            self._trends[name].restart()

    def evaluate(
        self,
        values: Mapping[str, float],
        *,
        frozen: Sequence[str],
        pinned: Sequence[str],
        passes: float,
    ) -> tuple[dict[str, Reading], list[Decision]]:
        """Take in one reading of each layer in `values` and decide about the frontmost active one.

        Args:
            values: layer → distance to the reference.
            frozen: names of frozen layers.
            pinned: names of layers that may not be frozen by a rule.
            passes: passes over the training data so far.

        Returns:
            The reading of each layer, and the decisions.
        """
        self._update_bootstrap(passes)
        if self.bootstrapping:
            return self.judge(values, gone=frozen, pinned=pinned)
        settled = self.settling.look(frozen=frozen, pinned=pinned, passes=passes)
        gone = [*frozen, *(one.layer for one in settled if one.action == "freeze"), *self.settling.begun]
        readings, verdicts = self.judge(values, gone=gone, pinned=pinned)
        done = self.settling.instead(verdicts, passes=passes, epochs=self.settings.settle_epochs)
        return readings, [*settled, *done]

    def judge(
        self, values: Mapping[str, float], *, gone: Sequence[str], pinned: Sequence[str]
    ) -> tuple[dict[str, Reading], list[Decision]]:
        """Take in one reading of each layer in `values`, and say which layers behind those in `gone` may freeze."""
        readings = {name: self._read(name, value) for name, value in values.items()}
        if self.bootstrapping:
            return readings, []
        gone = list(gone)
        decisions: list[Decision] = []
        while (front := next((name for name in self.layers if name not in gone), None)) is not None:
            decision = self._decide(front, readings, len(gone), pinned)
            if decision is not None:
                decisions.append(decision)
            if decision is None or decision.action != "freeze":
                break
            gone.append(front)
            if not (self.together or self.settings.freeze_together):
                break
        return readings, decisions

    def _decide(
        self, front: str, readings: dict[str, Reading], num_frozen: int, pinned: Sequence[str]
    ) -> Decision | None:
        """What becomes of the frontmost active layer; a verdict that an obstacle stops becomes "blocked"."""
        if front not in readings or readings[front].verdict != "freeze":
            return None
        reading = readings[front]
        obstacle = self._obstacle(front, num_frozen, pinned)
        if obstacle is not None:
            readings[front] = replace(reading, verdict="blocked")
            if (front, obstacle) in self._blocked:
                return None
            self._blocked.add((front, obstacle))
            return Decision(action="blocked", layer=front, reason=obstacle)
        assert reading.slope is not None
        assert reading.tolerance is not None
        reason = (
            f"slope {reading.slope:.1e} < tolerance {reading.tolerance:.1e} "
            f"for {reading.stable} of {self.patience} readings"
        )
        return Decision(action="freeze", layer=front, reason=reason, slope=reading.slope, tolerance=reading.tolerance)

    def _read(self, name: str, value: float) -> Reading:
        reading = self._trends[name].update(
            value, window=self.window, patience=self.patience, tolerance=self.tolerance_of(name)
        )
        if self.bootstrapping:  # slopes of the critical period would tune the tolerance far too wide
            self._trends[name].first_slopes.clear()
            self._trends[name].stable = 0
            return replace(reading, tolerance=None, stable=0, verdict="warming up")
        return reading

    def _update_bootstrap(self, passes: float) -> None:
        if not self._interval_losses:
            return
        self._losses.append(sum(self._interval_losses) / len(self._interval_losses))
        self._interval_losses.clear()
        window = self.settings.window
        while len(self._losses) > 2 * window:
            self._losses.popleft()
        if len(self._losses) < 2 * window:
            return
        recent = list(self._losses)
        before = sum(recent[:window]) / window
        after = sum(recent[window:]) / window
        self.loss_change = abs(before - after) / max(abs(before), 1e-12)
        enough = passes >= self.settings.bootstrap_epochs and self._rate_is_low()
        if self.bootstrapping and enough and self.loss_change < self.settings.bootstrap_change:
            self.bootstrapping = False

    def _rate_is_low(self) -> bool:
        share = self.settings.bootstrap_rate
        return share is None or (self._rate is not None and self._rate <= share * self._highest_rate * (1 + 1e-9))

    def _obstacle(self, layer: str, num_frozen: int, pinned: Sequence[str]) -> str | None:
        if layer in pinned:
            return "it is pinned"
        if layer == self.layers[-1]:
            return "the head is never frozen by a rule"
        cap = self.settings.max_frozen
        if cap is not None and num_frozen + 1 > cap * len(self.layers):
            allowed = int(cap * len(self.layers))
            return f"max_frozen={cap:.3g} allows at most {allowed} of {len(self.layers)} layers"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what freezes next but the settings, as plain values."""
        return {
            "tolerances": dict(self.tolerances),
            "bootstrapping": self.bootstrapping,
            "loss_change": self.loss_change,
            "relaxed": self.relaxed,
            "trends": {name: trend.state_dict() for name, trend in self._trends.items()},
            "interval_losses": list(self._interval_losses),
            "losses": list(self._losses),
            "rate": self._rate,
            "highest_rate": self._highest_rate,
            "rate_age": self._rate_age,
            "rate_is_smooth": self._rate_is_smooth,
            "rate_at_last_freeze": self._rate_at_last_freeze,
            "settling": self.settling.state_dict(),
            "blocked": sorted([layer, obstacle] for layer, obstacle in self._blocked),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another policy of the same layers was; settings are replaced through `settings`."""
        self.tolerances = dict(state["tolerances"])
        self.bootstrapping, self.loss_change = state["bootstrapping"], state["loss_change"]
        self.relaxed = state["relaxed"]
        for name, trend in self._trends.items():
            trend.load_state_dict(state["trends"][name])
        self._interval_losses, self._losses = list(state["interval_losses"]), deque(state["losses"])
        self._rate, self._rate_age = state["rate"], state["rate_age"]
        self._rate_is_smooth, self._rate_at_last_freeze = state["rate_is_smooth"], state["rate_at_last_freeze"]
        self._highest_rate = state.get("highest_rate", self._rate or 0.0)
        self.settling.load_state_dict(state.get("settling", {}) if self.settings.settle_epochs else {})
        self._blocked = {(layer, obstacle) for layer, obstacle in state["blocked"]}

    def set_tolerance(self, layer: str, tolerance: float) -> None:
        """Give one layer a tolerance of its own.

        Raises:
            InvalidSettingError: when it is negative or not a number.
        """
        if not is_number(tolerance) or tolerance < 0:
            raise InvalidSettingError(f"Plasticity.tolerance must be >= 0, got {tolerance!r}.")
        self.tolerances[layer] = float(tolerance)
