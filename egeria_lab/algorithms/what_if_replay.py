"""Play a recorded run again, from one evaluation to the next, with the freezing rule under other settings.

When a verdict lands and what follows from it is told here as the monitor of a real run does it; what a verdict
is, is told by `PlasticityPolicy` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from egeria_lab.algorithms.decision import Decision
from egeria_lab.algorithms.freeze_policy import Plasticity, PlasticityPolicy
from egeria_lab.algorithms.guard import Guard
from egeria_lab.algorithms.what_if_feed import LearningRateFeed, Readings
from egeria_lab.algorithms.what_if_reader import RecordedReader
from egeria_lab.algorithms.what_if_record import Act, Happening, RecordedRun


class Replay:
    """One replay.

    Args:
        run: the recorded run.
        settings: the rule's settings at the start, changes included.
        tolerances: own tolerances of layers for the whole run, or None for those of the recorded run.
        changed: fields of `Plasticity` that were changed: settings of the recorded run do not touch them.

    Attributes:
        frozen_sets: the frozen set after each step at which it would have changed.
        recorded_sets: the same for the recorded run.
        exact_until: last step up to which a real run would have done the same, None for all.
        why_inexact: why not beyond.
    """

    def __init__(
        self,
        run: RecordedRun,
        settings: Plasticity,
        tolerances: Mapping[str, float] | None,
        changed: frozenset[str],
    ) -> None:
        self.run = run
        self.policy = PlasticityPolicy(run.layers, settings)
        self.policy.together = run.together
        self.policy.tolerances = dict(tolerances or {})
        self.reader = RecordedReader(run, changed)
        self.readings = Readings(run, self.policy)
        self.frozen_sets: list[tuple[int, tuple[str, ...]]] = []
        self.recorded_sets: list[tuple[int, tuple[str, ...]]] = []
        self.exact_until: int | None = None
        self.why_inexact = ""
        self._changed = changed
        self._own_tolerances = tolerances is not None
        self._happened: list[Happening] = []
        self._by: dict[str, str] = {}  # frozen layer → by whom
        self._gone: tuple[str, ...] = ()
        self._recorded: set[str] = set()
        self._settled_there: dict[str, float] = {}  # layers that settle in the recorded run, over how many passes
        self._front: str | None = run.layers[0]
        self._blocked = False  # the front would freeze, but may not
        self._pinned: tuple[str, ...] = ()
        self._rates: LearningRateFeed | None = None
        self._guard = Guard()
        self._last_evaluation = 0
        self._acts = {step: list(acts) for step, acts in groupby(run.acts, lambda act: act.step)}

    def play(self) -> None:
        """From the first step to the last."""
        milestones = iter(sorted({*self._acts, *self.run.accuracies} - {0}))
        step, milestone, end = 0, next(milestones, None), self.run.last_step
        self._repeat(step)  # what was done before the first step
        self._compare(step)
        while True:
            interval = self.policy.settings.interval_steps
            due = (step // interval + 1) * interval
            telling = self._rates.next_step if self._rates is not None else None
            step = min(due, milestone or due, telling or due)
            if step > end:
                return
            before = len(self._happened)
            if step in (due, telling):
                self._after_step(step, step == due)
            if step == milestone:
                self._after_evaluation(step)
                self._repeat(step)
                milestone = next(milestones, None)
                self._compare(step)
            elif len(self._happened) > before:
                self._compare(step)

    def happenings(self) -> tuple[Happening, ...]:
        """What would have happened, each marked as exact or not."""
        until = self.exact_until if self.exact_until is not None else self.run.last_step
        return tuple(replace(happening, exact=happening.step <= until) for happening in self._happened)

    def _after_step(self, step: int, is_due: bool) -> None:
        if self._rates is not None and step == self._rates.next_step:
            thaws = self._rates.show(step, self._by_rule())
            if thaws:
                self._carry_out(step, thaws)
                return
        if not is_due:
            return
        decisions = self._evaluate(step)
        head_only = self._front in (None, self.run.layers[-1])  # then a run reads nothing
        if not head_only and not any(decision.action == "freeze" for decision in decisions):
            self.reader.ask(step, self.policy.settings)

    def _evaluate(self, step: int) -> list[Decision]:
        """The reading that was asked for last time lands, the rule decides, and that is carried out."""
        if self.policy.bootstrapping:
            self._watch_the_loss(step)
        landed = self.reader.collect()
        if landed is not None:
            self.readings.land(*landed)
        if self.policy.bootstrapping:
            return []
        if self.reader.off:
            self._lose(step - 1, self.reader.off)
        epochs, passes = self.policy.settings.settle_epochs, self.run.passes[step - 1]
        settled = self.policy.settling.look(frozen=self._by, pinned=self._pinned, passes=passes)
        self._carry_out(step, settled)
        verdicts = self._decide() if landed is not None else []
        done = self.policy.settling.instead(verdicts, passes=passes, epochs=epochs)
        self._carry_out(step, done)
        return [*settled, *done]

    def _watch_the_loss(self, step: int) -> None:
        """All that the rule does in the critical period: the loss of the last interval, as one mean."""
        losses = self.run.losses[self._last_evaluation : step]
        self.policy.saw_rate(max(self.run.learning_rates[self._last_evaluation : step]))
        self.policy.observe(sum(losses) / len(losses), self.run.learning_rates[step - 1], ())
        self.policy.evaluate({}, frozen=(), pinned=(), passes=self.run.passes[step - 1])
        if not self.policy.bootstrapping:
            self.readings.bootstrap_end = len(self.readings)
        self._last_evaluation = step

    def _decide(self) -> list[Decision]:
        if self._blocked or self._front is None:
            return []  # said once; the same until the frozen set, a pin or a setting changes
        decisions = found = self.readings.decide(self._front, self._gone, self._pinned)
        gone, together = self._gone, self.policy.together or self.policy.settings.freeze_together
        while together and found and found[-1].action == "freeze":
            gone = (*gone, found[-1].layer)
            front = self._front_behind(gone)
            found = self.readings.decide(front, gone, self._pinned) if front is not None else []
            decisions = [*decisions, *found]
        self._blocked = bool(decisions) and decisions[-1].action == "blocked"
        return decisions

    def _front_behind(self, gone: Sequence[str]) -> str | None:
        return next((name for name in self.run.layers if name not in gone), None)

    def _after_evaluation(self, step: int) -> None:
        """What the guard does when a pass over the data has ended."""
        allowed, accuracy = self.policy.settings.guard, self.run.accuracies.get(step)
        if allowed is None or accuracy is None:
            return
        reason, frozen = self._guard.check(accuracy, allowed), self._by_rule()
        if reason is not None and (frozen or self.policy.settling.begun):
            self._carry_out(step, self.policy.thaws(frozen, reason))
            self._set("tolerance", self.policy.settings.tolerance / 2)

    def _carry_out(self, step: int, decisions: Iterable[Decision], by: str = "rule") -> None:
        for decision in decisions:
            name = decision.layer
            if decision.action == "freeze":
                self._freeze(step, name, by)
            elif decision.action == "thaw":
                self._thaw(name, by)
            elif decision.action == "settle":
                self._show_rates(step)
            self._happened.append(
                Happening(step=step, action=decision.action, layer=name, reason=decision.reason, by=by, exact=True)
            )
        settling = self.policy.settling.begun
        gone = tuple(name for name in self.run.layers if name in self._by or name in settling)
        if self._note(self.frozen_sets, step, self._by) or gone != self._gone:
            self._gone = gone
            self._front, self._blocked = self._front_behind(gone), False

    def _freeze(self, step: int, name: str, by: str) -> None:
        self.policy.settling.begun.pop(name, None)  # by hand, it may still be on its way
        if by == "rule":
            self._show_rates(step)
            if "monitor_budget" in self._changed and not self.reader.off:
                self.reader.off = (
                    "with another monitor_budget a real run reads the layers behind the front at other steps."
                )
        elif self.readings.bootstrap_end is not None:
            self.readings.catch_up(name)
        self._by[name] = by
        self.reader.wants_snapshot |= self.policy.settings.refresh_on_freeze

    def _show_rates(self, step: int) -> None:
        """From the first freeze on, or the first layer that settles, the thaw rule looks at learning rates."""
        if self._rates is None:
            self._rates = LearningRateFeed(self.run, self.policy)
            self._rates.show_up_to(step)
        self._rates.show(step, self._by_rule())
        self.policy.froze()

    def _thaw(self, name: str, by: str) -> None:
        del self._by[name]
        self.readings.leave_out(name, self.reader.is_pending)
        self.reader.wants_snapshot = True
        if by == "rule":
            self.policy.thawed()
            self.readings.hold(self.policy.settings, self.policy.tolerances)

    def _repeat(self, step: int) -> None:
        """What was done in the recorded run: by hand again, by the rule only to compare with."""
        for act in self._acts.get(step, ()):
            if act.action == "set":
                self._repeat_setting(act)
                continue
            assert act.layer is not None
            if act.action in ("pin", "unpin"):
                others = tuple(name for name in self._pinned if name != act.layer)
                self._pinned = (*others, act.layer) if act.action == "pin" else others
                self._blocked = False
                continue
            self._settled_there.pop(act.layer, None)
            if act.action == "settle":
                self._settled_there[act.layer] = act.value
            if act.action in ("settle", "unsettle"):
                continue
            (self._recorded.add if act.action == "freeze" else self._recorded.discard)(act.layer)
            if act.by != "rule" and (act.layer in self._by) == (act.action == "thaw"):
                self._carry_out(step, [Decision(action=act.action, layer=act.layer, reason=act.reason)], act.by)
        self._note(self.recorded_sets, step, self._recorded)

    def _repeat_setting(self, act: Act) -> None:
        own = self._own_tolerances if act.layer is not None else act.name in self._changed
        if act.by != "rule" and not own:  # by the rule: its guard backed off, and does so here by itself
            self._set(act.name, act.value, act.layer)

    def _set(self, name: str, value: object, layer: str | None = None) -> None:
        settings, tolerances = self.policy.settings, dict(self.policy.tolerances)
        if layer is None:
            settings = replace(settings, **{name: value})  # type: ignore[arg-type]
        elif value is None:
            tolerances.pop(layer, None)
        else:
            tolerances[layer] = float(value)  # type: ignore[arg-type]
        self.readings.hold(settings, tolerances)
        self._blocked = False

    def _note(self, timeline: list[tuple[int, tuple[str, ...]]], step: int, frozen: Iterable[str]) -> bool:
        now = tuple(name for name in self.run.layers if name in set(frozen))
        if now == (timeline[-1][1] if timeline else ()):
            return False
        timeline.append((step, now))
        return True

    def _by_rule(self) -> tuple[str, ...]:
        return tuple(name for name in self._gone if self._by.get(name) == "rule")

    def _compare(self, step: int) -> None:
        """From the first difference of the frozen sets on, the record is of a training that went another way."""
        settling = {name: begun.epochs for name, begun in self.policy.settling.begun.items()}
        same = self._recorded == self._by.keys() and self._settled_there == settling
        if self.exact_until is not None or step >= self.run.last_step or same:
            return
        only_here = [name for name in self.run.layers if name in self._by and name not in self._recorded]
        if self._settled_there != settling:
            names = ", ".join(sorted({name for name, _ in self._settled_there.items() ^ settling.items()}))
            why = (
                f"{names} would settle from step {step:,} on otherwise than in the recorded run, and a layer that is "
                "trained less and less is read otherwise too."
            )
        elif only_here:
            why = (
                f"{', '.join(only_here)} would be frozen from step {step:,} on, unlike in the recorded run, so what "
                "was read later belongs to a training that went another way."
            )
        else:
            why = (
                f"the recorded run froze {', '.join(sorted(self._recorded - self._by.keys()))} at step {step:,} and "
                "this one would not; a frozen layer is not read, so its readings end there."
            )
        self.reader.off = self.reader.off or why
        self._lose(step, why)

    def _lose(self, step: int, why: str) -> None:
        if self.exact_until is None:
            self.exact_until, self.why_inexact = step, why
