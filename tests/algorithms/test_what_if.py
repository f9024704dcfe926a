"""A replay against the plain thing: every step shown to the rule, every reading of every layer fed at once."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from egeria_lab.algorithms.costs import StepFlops
from egeria_lab.algorithms.decision import Decision
from egeria_lab.algorithms.freeze_policy import Plasticity, PlasticityPolicy
from egeria_lab.algorithms.guard import Guard
from egeria_lab.algorithms.plasticity import PlasticityTrend, Reading
from egeria_lab.algorithms.thaw_rules import LearningRates
from egeria_lab.algorithms.what_if import what_if
from egeria_lab.algorithms.what_if_feed import LearningRateFeed, telling_steps
from egeria_lab.algorithms.what_if_record import Act, RecordedRun, WhatIf
from egeria_lab.algorithms.what_if_replay import Replay
from egeria_lab.errors import InvalidSettingError, UnknownNameError

NAMES = ("a", "b", "c", "d", "head")
STEPS = 240
STEPS_IN_A_PASS = 20
BATCH = 4
NAN = float("nan")
Story = list[tuple[int, str, str, str, str]]


def flops(frozen: tuple[str, ...]) -> StepFlops:
    """Forward 1, 2, 3, … a layer; backward twice that, and 0 in the frozen front."""
    forward = [float(1 + index) for index in range(len(NAMES))]
    front = next((i for i, name in enumerate(NAMES) if name not in frozen), len(NAMES))
    return StepFlops(tuple(forward), tuple(0.0 if i < front else 2 * f for i, f in enumerate(forward)))


class World:
    """What can be measured: a loss, a rate, an accuracy, and a distance for each step, layer and snapshot.

    Nothing of it depends on what is frozen, so that every difference is one of the replay's own making.
    """

    def __init__(self, seed: int, shape: str = "constant") -> None:
        draw = random.Random(seed)
        self.losses = [2 * math.exp(-step / 25) + 0.5 + 0.02 * draw.random() for step in range(STEPS)]
        self.rates = [self._rate(shape, step, draw) for step in range(STEPS)]
        self.accuracies = {step: draw.uniform(0.8, 0.9) for step in range(STEPS_IN_A_PASS, STEPS + 1, STEPS_IN_A_PASS)}
        self._noise = [[draw.random() for _ in NAMES] for _ in range(STEPS + 1)]
        self._decay = [draw.uniform(10, 60) for _ in NAMES]

    @staticmethod
    def _rate(shape: str, step: int, draw: random.Random) -> float:
        if shape == "steps":
            return 0.1 * 0.1 ** (step // 90)
        if shape == "restarts":
            return 0.05 * (1 + math.cos(math.pi * (step % 110) / 110)) + 1e-4
        if shape == "ragged":  # steep and gentle falls, rises and standing still, in any order
            return [0.1, 0.099, 0.09, 0.01, 0.009, 0.001][(step // 7 * 5 + step // 31) % 6 if draw.random() else 0]
        return 0.1

    def value(self, step: int, layer: int, snapshot: int) -> float:
        age = step - snapshot
        trend = age * math.exp(-step / self._decay[layer])
        return 1e-6 * (trend + 0.3 * self._noise[step][layer] * (age > 0) * math.exp(-step / 80))


class PlainRun:
    """A training as the monitor watches it, with nothing left out: the thing that a replay has to equal."""

    def __init__(
        self,
        world: World,
        settings: Plasticity,
        acts: Sequence[Act] = (),
        *,
        every: int = 1,
        skipped: frozenset[int] = frozenset(),
        tolerances: dict[str, float] | None = None,
        steps: int = STEPS,
    ) -> None:
        self.world, self.settings, self.by_hand, self.every = world, settings, acts, every
        self.skipped, self.tolerances, self.steps = skipped, tolerances or {}, steps
        self.policy = PlasticityPolicy(NAMES, settings)
        self.policy.tolerances = dict(self.tolerances)
        self.story: Story = []
        self.acts: list[Act] = []
        self.frozen: dict[str, str] = {}
        self.pinned: list[str] = []
        self.rows: list[tuple[int, int, dict[str, float]]] = []
        self.executed = 0.0
        self._pending: tuple[int, int, dict[str, float]] | None = None
        self._snapshot, self._since, self._count, self._wants = 0, 0, 0, True
        self._guard = Guard()
        self._repeat(0)
        for step in range(1, steps + 1):
            self._step(step)

    def gone(self) -> list[str]:
        return [name for name in NAMES if name in self.frozen]

    def _step(self, step: int) -> None:
        world, policy = self.world, self.policy
        during = tuple(self.gone())
        by_rule = [name for name in self.gone() if self.frozen[name] == "rule"]
        decisions = policy.observe(world.losses[step - 1], world.rates[step - 1], by_rule)
        if not decisions and step % policy.settings.interval_steps == 0:
            decisions = self._evaluate(step)
        self.executed += BATCH * flops(during).total
        self._carry_out(step, decisions)
        allowed = policy.settings.guard
        if allowed is not None and step in world.accuracies:
            reason = self._guard.check(world.accuracies[step], allowed)
            by_rule = [name for name in self.gone() if self.frozen[name] == "rule"]
            if reason and by_rule:
                self._carry_out(step, [Decision(action="thaw", layer=name, reason=reason) for name in by_rule])
                policy.settings = replace(policy.settings, tolerance=policy.settings.tolerance / 2)
                self.acts.append(
                    Act(step=step, action="set", name="tolerance", value=policy.settings.tolerance, by="rule")
                )
        self._repeat(step)

    def _evaluate(self, step: int) -> list[Decision]:
        values: dict[str, float] = {}
        if self._pending is not None:
            self.rows.append(self._pending)
            values = {name: value for name, value in self._pending[2].items() if name not in self.frozen}
            self._pending = None
        _, decisions = self.policy.evaluate(
            values, frozen=self.gone(), pinned=self.pinned, passes=step / STEPS_IN_A_PASS
        )
        if any(decision.action == "freeze" for decision in decisions):
            return decisions
        active = [name for name in NAMES if name not in self.frozen]
        if active == [NAMES[-1]]:  # nothing left to decide: nothing is read
            return decisions
        if self._wants or self._since >= self.policy.settings.readings_per_snapshot:
            self._snapshot, self._since, self._wants = step, 0, False
            self.policy.restart()
        if step not in self.skipped:
            wanted = active if self._count % self.every == 0 else active[:1]
            found = {name: self.world.value(step, NAMES.index(name), self._snapshot) for name in wanted}
            self._pending = step, self._snapshot, found
            self._since, self._count = self._since + 1, self._count + 1
        return decisions

    def _carry_out(self, step: int, decisions: Sequence[Decision], by: str = "rule") -> None:
        for decision in decisions:
            name = decision.layer
            self.story.append((step, decision.action, name, decision.reason, by))
            if decision.action == "blocked":
                continue
            self.acts.append(Act(step=step, action=decision.action, layer=name, by=by, reason=decision.reason))
            if decision.action == "freeze":
                self.frozen[name] = by
                self._wants |= self.policy.settings.refresh_on_freeze
                if by == "rule":
                    self.policy.froze()
            else:
                del self.frozen[name]
                self._wants = True
                if by == "rule":
                    self.policy.thawed()

    def _repeat(self, step: int) -> None:
        for act in self.by_hand:
            if act.step != step:
                continue
            name = act.layer or ""
            if act.action in ("freeze", "thaw"):
                if (name in self.frozen) == (act.action == "thaw"):
                    self._carry_out(step, [Decision(action=act.action, layer=name, reason=act.reason)], act.by)
                continue
            self.acts.append(act)
            if act.action == "pin":
                self.pinned.append(name)
            elif act.action == "unpin":
                self.pinned.remove(name)
            elif act.layer is not None:
                self.policy.tolerances[name] = act.value
            else:
                self.policy.settings = replace(self.policy.settings, **{act.name: act.value})

    def record(self) -> RecordedRun:
        return RecordedRun(
            layers=NAMES,
            settings=self.settings,
            losses=self.world.losses[: self.steps],
            learning_rates=self.world.rates[: self.steps],
            passes=[step / STEPS_IN_A_PASS for step in range(1, self.steps + 1)],
            samples=[BATCH * step for step in range(1, self.steps + 1)],
            reading_steps=[step for step, _, _ in self.rows],
            snapshot_steps=[snapshot for _, snapshot, _ in self.rows],
            values=[[found.get(name, NAN) for _, _, found in self.rows] for name in NAMES],
            flops=flops,
            skipped=self.skipped,
            acts=tuple(self.acts),
            accuracies=self.world.accuracies,
        )


def story_of(answer: WhatIf, until: int | None = None) -> Story:
    last = answer.last_step if until is None else until
    return [(h.step, h.action, h.layer, h.reason, h.by) for h in answer.happenings if h.step <= last]


QUICK: dict[str, Any] = {
    "interval_steps": 2, "window": 3, "patience": 2, "tolerance": 0.8, "bootstrap_change": 0.3,
}  # fmt: skip
HAND = (
    Act(step=0, action="freeze", layer="c", by="user", reason="asked for"),
    Act(step=41, action="thaw", layer="c", by="user", reason="asked for"),
    Act(step=60, action="set", name="tolerance", value=0.5, by="user"),
    Act(step=60, action="set", name="tolerance", layer="b", value=1.5, by="dashboard"),
    Act(step=63, action="pin", layer="b", by="user"),
    Act(step=80, action="freeze", layer="d", by="user", reason="asked for"),
    Act(step=100, action="unpin", layer="b", by="user"),
    Act(step=104, action="thaw", layer="d", by="user", reason="asked for"),
    Act(step=101, action="set", name="interval_steps", value=3, by="user"),
    Act(step=130, action="set", name="patience", value=3, by="user"),
    Act(step=170, action="thaw", layer="a", by="user", reason="asked for"),
)


def some_settings(draw: random.Random, start: dict[str, Any]) -> dict[str, Any]:
    choices: dict[str, Sequence[Any]] = {
        "interval_steps": (1, 2, 3, 4), "window": (2, 3, 5, 6), "patience": (1, 2, 4), "tolerance": (0, 0.3, 0.8, 3.0),
        "bootstrap_change": (0.05, 0.3, 0.9), "max_frozen": (None, 0.5), "refresh_on_freeze": (True, False),
        "freeze_together": (True, False), "refresh_evals": (None, 9, 40), "guard": (None, 0.03),
        "thaw": ("lr_drop", "never", thaws_below),
    }  # fmt: skip
    picked = draw.sample(sorted(choices), 4)
    return {**start, **{name: draw.choice(choices[name]) for name in picked}}


def thaws_below(rates: LearningRates) -> str | None:
    return "the rate is low" if rates.now < 0.03 <= rates.before else None


@pytest.mark.parametrize("seed", range(40))
def test_under_its_own_settings_a_run_replays_exactly(seed: int) -> None:
    """Freezes, thaws and obstacles at the same steps for the same reasons, and the same FLOPs."""
    draw = random.Random(seed)
    world = World(seed, draw.choice(["constant", "steps", "restarts", "ragged"]))
    skipped = frozenset(draw.sample(range(STEPS), 20)) if draw.random() < 0.3 else frozenset()
    run = PlainRun(
        world, Plasticity(**some_settings(draw, QUICK)), HAND if draw.random() < 0.5 else (),
        every=draw.choice([1, 1, 3]), skipped=skipped,
    )  # fmt: skip
    answer = what_if(run.record())
    assert story_of(answer) == run.story
    assert (answer.exact_until, answer.why_inexact) == (None, "")
    assert answer.executed_flops == answer.recorded_flops == pytest.approx(run.executed)
    assert answer.frozen == tuple(run.gone())
    assert all(happening.exact for happening in answer.happenings)


def test_the_runs_above_freeze_thaw_and_are_blocked() -> None:
    """Or they would prove nothing."""
    actions = []
    for shape in ("constant", "steps", "restarts", "ragged"):
        run = PlainRun(World(1, shape), Plasticity(**{**QUICK, "tolerance": 3.0, "max_frozen": 0.5}))
        actions += [(action, by) for _, action, _, _, by in run.story]
    assert {("freeze", "rule"), ("thaw", "rule"), ("blocked", "rule")} <= set(actions)


@pytest.mark.parametrize("seed", range(160))
def test_under_other_settings_it_says_what_a_real_run_does_as_far_as_it_claims(seed: int) -> None:
    draw = random.Random(1000 + seed)
    world = World(seed, draw.choice(["constant", "steps", "restarts", "ragged"]))
    acts = HAND if draw.random() < 0.3 else ()
    start = {**QUICK, "refresh_evals": draw.choice([None, 12])}
    before, after = some_settings(draw, start), some_settings(draw, start)
    if draw.random() < 0.8:  # one change or two, so that the claim reaches far
        few = draw.sample(sorted(name for name in after if name != "interval_steps"), 2)
        after = {**before, **{name: after[name] for name in few}}
    recorded = PlainRun(world, Plasticity(**before), acts).record()
    changes = {name: after.get(name, getattr(Plasticity(), name)) for name in {*before, *after}}
    changes = {name: value for name, value in changes.items() if value != getattr(recorded.settings, name)}
    answer = what_if(recorded, **changes)
    kept = tuple(act for act in acts if act.name not in changes)
    real = PlainRun(world, replace(recorded.settings, **changes), kept)
    until = STEPS if answer.exact_until is None else answer.exact_until
    assert story_of(answer, until) == [told for told in real.story if told[0] <= until]
    assert bool(answer.why_inexact) == (answer.exact_until is not None)
    if answer.exact_until is None:
        assert answer.executed_flops == pytest.approx(real.executed)


def test_a_lower_tolerance_is_exact_up_to_the_first_freeze_that_it_does_not_make() -> None:
    world = World(3)
    recorded = PlainRun(world, Plasticity(**QUICK))
    first = recorded.story[0]
    assert first[1] == "freeze"
    answer = what_if(recorded.record(), tolerance=0)
    assert answer.exact_until == first[0]
    assert answer.why_inexact.startswith(f"the recorded run froze {first[2]} at step {first[0]}")
    assert answer.happenings == ()


def test_a_run_without_freezes_names_the_first_freeze_of_every_tolerance() -> None:
    """The claim that people come for: record once, then move the slider."""
    world = World(5)
    recorded = PlainRun(world, Plasticity(**{**QUICK, "tolerance": 0})).record()
    seen = set()
    for tolerance in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.0):
        answer = what_if(recorded, tolerance=tolerance)
        real = PlainRun(world, replace(recorded.settings, tolerance=tolerance))
        first = next(told for told in real.story if told[1] == "freeze")
        assert story_of(answer)[0] == first
        assert answer.exact_until == first[0]
        assert [h.exact for h in answer.happenings] == [True] + [False] * (len(answer.happenings) - 1)
        assert f"{first[2]} would be frozen from step {first[0]} on" in answer.why_inexact
        seen.add(first[0])
    assert len(seen) > 3


def test_the_verdict_of_a_reading_lands_at_the_evaluation_after_it() -> None:
    """By hand: slopes 1, then 0 from the reading of step 10 on; two stable ones are there with that of step 12."""
    distances = [float(min(step, 8)) for step in range(30)]
    run = RecordedRun(
        layers=("body", "head"), settings=Plasticity(interval_steps=1, window=2, patience=2, tolerance=0),
        losses=[1.0] * 30, learning_rates=[0.1] * 30, passes=[1.0] * 30, samples=range(4, 124, 4),
        reading_steps=range(1, 31), snapshot_steps=[1] * 30, values=[distances, distances],
        flops=lambda frozen: StepFlops((1.0, 1.0), (0.0 if "body" in frozen else 1.0, 2.0)),
    )  # fmt: skip
    answer = what_if(run, tolerance=0.5, refresh_evals=99)
    assert (answer.happenings[0].step, answer.happenings[0].layer) == (13, "body")
    assert answer.spans == {"body": [(13, None)], "head": []}
    # steps 1 to 13 cost 5 a sample, 14 to 30 cost 4; 4 samples a step
    assert answer.executed_flops == 4 * (13 * 5 + 17 * 4)
    assert answer.recorded_flops == answer.full_flops == 4 * 30 * 5
    assert answer.saved_fraction == pytest.approx(17 / 150)


def test_other_snapshots_end_the_claim_before_the_first_freeze_and_say_what_keeps_them() -> None:
    """2 × (window + patience) readings are made against one snapshot: 10 on record, 14 with patience 4."""
    recorded = PlainRun(World(5), Plasticity(**{**QUICK, "tolerance": 0})).record()
    answer = what_if(recorded, patience=4, tolerance=0.8)
    assert "a snapshot of step 2, and the readings on record compare with one of step 22" in answer.why_inexact
    assert answer.why_inexact.endswith("refresh_evals=10 keeps the recorded snapshots.")
    kept = what_if(recorded, patience=4, tolerance=0.8, refresh_evals=10)
    assert "snapshot" not in kept.why_inexact
    assert (kept.exact_until or STEPS) > (answer.exact_until or STEPS)


def test_nothing_is_claimed_to_be_wrong_while_nothing_may_freeze() -> None:
    """Readings of the critical period decide nothing, so other snapshots do not matter there."""
    recorded = PlainRun(World(5), Plasticity(**{**QUICK, "bootstrap_change": 1e-6})).record()
    answer = what_if(recorded, patience=4, window=5, interval_steps=4)
    assert (answer.exact_until, answer.happenings) == (None, ())


def test_readings_that_are_missing_are_named() -> None:
    recorded = PlainRun(World(5), Plasticity(**{**QUICK, "tolerance": 0})).record()
    answer = what_if(recorded, interval_steps=3, tolerance=0.8)
    assert answer.why_inexact == "a real run would read at step 3, and no reading of that step is on record."
    assert answer.happenings  # still an estimate
    assert not any(happening.exact for happening in answer.happenings)


def test_another_monitoring_budget_is_exact_for_the_front_only() -> None:
    world = World(5)
    recorded = PlainRun(world, Plasticity(**QUICK), every=3)
    answer = what_if(recorded.record(), monitor_budget=1.0)
    assert story_of(answer, answer.exact_until) == recorded.story[:1]
    assert "monitor_budget" in answer.why_inexact


def test_what_the_recorded_run_changed_midway_stays_unless_it_is_asked_for() -> None:
    world = World(5)
    acts = (
        Act(step=70, action="set", name="tolerance", value=3.0, by="user"),
        Act(step=70, action="set", name="tolerance", layer="a", value=0.0, by="user"),
    )
    settings = Plasticity(**{**QUICK, "tolerance": 0})
    recorded = PlainRun(world, settings, acts)
    assert recorded.story == []  # a has a tolerance of its own, and is the front
    free = what_if(recorded.record(), tolerances={})
    assert story_of(free)[:1] == PlainRun(world, settings, acts[:1]).story[:1] != []
    everywhere = what_if(recorded.record(), tolerance=3.0, tolerances={})
    assert story_of(everywhere)[:1] == PlainRun(world, replace(settings, tolerance=3.0)).story[:1]
    own = what_if(recorded.record(), tolerance=0.0, tolerances={"a": 3.0})
    assert story_of(own)[:1] == PlainRun(world, settings, tolerances={"a": 3.0}).story[:1] != []


def test_a_thawed_layer_does_not_freeze_on_what_was_read_while_it_was_frozen() -> None:
    """The reading under way at the thaw is on record, as nothing froze there, and a real run has none."""
    recorded = PlainRun(World(1, "steps"), Plasticity(**{**QUICK, "tolerance": 0})).record()
    answer = what_if(recorded, tolerance=3.0)
    thaws = [h.step for h in answer.happenings if (h.action, h.layer) == ("thaw", "a")]
    freezes = [h.step for h in answer.happenings if (h.action, h.layer) == ("freeze", "a")]
    assert thaws[0] % QUICK["interval_steps"]  # between two evaluations: a reading is under way
    assert freezes[1] - thaws[0] >= 3 * QUICK["interval_steps"]


def test_what_a_guard_did_on_record_is_not_repeated_without_it() -> None:
    settings = Plasticity(**{**QUICK, "tolerance": 3.0, "guard": 0.01})
    run = PlainRun(World(5), settings)
    assert any(act.action == "set" for act in run.acts)
    replay = Replay(run.record(), replace(settings, guard=None), None, frozenset({"guard"}))
    replay.play()
    assert replay.policy.settings.tolerance == 3.0
    first_thaw = next(step for step, action, *_ in run.story if action == "thaw")
    assert replay.exact_until == first_thaw
    again = Replay(run.record(), settings, None, frozenset())
    again.play()
    assert again.policy.settings.tolerance == run.policy.settings.tolerance < 3.0


def test_settings_at_once_equal_single_ones() -> None:
    recorded = PlainRun(World(5), Plasticity(**{**QUICK, "tolerance": 0})).record()
    settings = Plasticity(**{**QUICK, "tolerance": 0.8, "max_frozen": 0.5})
    assert what_if(recorded, settings) == what_if(recorded, tolerance=0.8, max_frozen=0.5)
    assert what_if(recorded, settings).changes == {"tolerance": 0.8, "max_frozen": 0.5}


def test_layers_freeze_together_in_a_compiled_model() -> None:
    world = World(5)
    recorded = PlainRun(world, Plasticity(**{**QUICK, "tolerance": 0})).record()
    together = what_if(replace(recorded, together=True), tolerance=3.0, refresh_on_freeze=False)
    assert (
        together.happenings
        == what_if(recorded, tolerance=3.0, refresh_on_freeze=False, freeze_together=True).happenings
    )
    steps = [h.step for h in together.happenings if h.action == "freeze"]
    assert len(steps) > len(set(steps))


# --- learning rates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_the_steps_that_are_shown_tell_a_thaw_rule_as_much_as_all_of_them(seed: int) -> None:
    draw = random.Random(seed)
    rates = [0.1]
    while len(rates) < 200:
        factor = draw.choice([1.0, 1.0, 0.99, 0.81, 0.5, 0.1, 0.05, 10.0, 2.0])
        rates += [rates[-1] * factor] * draw.choice([1, 1, 2, 5, 12])
    rates = rates[:200]
    settings = Plasticity(interval_steps=draw.choice([1, 2, 5, 10]))
    run = replace(PlainRun(World(0), settings, steps=200).record(), learning_rates=rates)
    start = draw.randrange(1, 190)
    plain, fed = (PlasticityPolicy(NAMES, settings) for _ in range(2))
    feed = LearningRateFeed(run, fed)
    told: list[list[tuple[int, str]]] = [[], []]
    for step in range(1, 201):
        frozen = ("a",) if step > start else ()
        for decision in plain.observe(0.0, rates[step - 1], frozen):
            told[0].append((step, decision.reason))
            plain.thawed()
            plain.froze()  # and so on: only the rate at the last freeze is moved
        if step > start and feed.next_step == step:
            for decision in feed.show(step, frozen):
                told[1].append((step, decision.reason))
                fed.thawed()
                fed.froze()
        if step == start:
            feed.show_up_to(step)
            feed.show(step, ())
            plain.froze()
            fed.froze()
    assert told[0] == told[1]


def test_a_smooth_decay_shows_next_to_nothing_and_a_users_rule_sees_every_step() -> None:
    rates = [0.05 * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)]
    assert len(telling_steps(rates, 10)) < STEPS / 3
    seen: list[float] = []

    def watches(rates: LearningRates) -> None:
        seen.append(rates.now)

    world = World(5)
    world.rates = rates
    recorded = PlainRun(world, Plasticity(**QUICK)).record()
    answer = what_if(recorded, thaw=watches)
    freeze = answer.happenings[0].step
    assert seen[-(STEPS - freeze) :] == rates[freeze:]


# --- what it looks like, and what it refuses ---------------------------------------------------------------


def test_the_answer_prints_as_text_and_html_and_goes_to_json() -> None:
    recorded = PlainRun(World(5), Plasticity(**{**QUICK, "tolerance": 0})).record()
    answer = what_if(recorded, tolerance=0.8, thaw=thaws_below)
    text, html = repr(answer), answer._repr_html_()
    for part in ("freezes", "estimate", "exact", f"Exact up to step {answer.exact_until}", "% saved"):
        assert part in text
    assert "<table>" in html
    assert "<td" in html
    plain = json.loads(json.dumps(answer.to_dict()))
    assert plain["changes"] == {"tolerance": 0.8, "thaw": "thaws_below"}
    assert plain["happenings"][0]["step"] == answer.happenings[0].step
    assert plain["spans"]["a"][0][0] == answer.happenings[0].step
    assert plain["saved_fraction"] == answer.saved_fraction
    nothing = what_if(recorded)
    assert "nothing would freeze" in repr(nothing)
    assert "Exact to the end of the record." in repr(nothing)


def test_spans_follow_thaws() -> None:
    run = PlainRun(World(1, "steps"), Plasticity(**{**QUICK, "tolerance": 3.0}))
    answer = what_if(run.record())
    freezes = [step for step, action, layer, _, _ in run.story if (action, layer) == ("freeze", "a")]
    thaws = [step for step, action, layer, _, _ in run.story if (action, layer) == ("thaw", "a")]
    assert answer.spans["a"] == list(zip(freezes, [*thaws, None][: len(freezes)], strict=True))
    assert thaws


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tolerence": 0.1}, UnknownNameError, "Did you mean 'tolerance'"),
        ({"tolerance": -1}, InvalidSettingError, "Plasticity.tolerance must be >= 0, got -1"),
        ({"distance": "cka"}, InvalidSettingError, "what_if cannot change distance"),
        ({"probe_rows": 8}, InvalidSettingError, "only readings with 64 were recorded"),
        ({"tolerances": {"z": 0.1}}, UnknownNameError, "Unknown layer 'z'"),
        ({"tolerances": {"a": -0.1}}, InvalidSettingError, "the tolerance of a must be a number >= 0"),
        ({"settings": 0.3}, InvalidSettingError, r"give lab.Plasticity\(…\), got 0.3"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_sentence(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    recorded = PlainRun(World(5), Plasticity(**QUICK), steps=40).record()
    with pytest.raises(error, match=words):
        what_if(recorded, **changes)


def test_a_record_that_does_not_fit_together_is_refused() -> None:
    recorded = PlainRun(World(5), Plasticity(**QUICK), steps=40).record()
    with pytest.raises(InvalidSettingError, match=r"RecordedRun\.passes must be 40 values long, got 39"):
        replace(recorded, passes=recorded.passes[:-1])
    with pytest.raises(InvalidSettingError, match=r"RecordedRun\.values must be one series a layer"):
        replace(recorded, values=recorded.values[:-1])
    with pytest.raises(InvalidSettingError, match=r"Act\.action must be one of freeze, thaw"):
        Act(step=1, action="melt")


def test_an_empty_record_answers_too() -> None:
    answer = what_if(PlainRun(World(5), Plasticity(**QUICK), steps=0).record(), tolerance=0.1)
    assert (answer.happenings, answer.saved_fraction, answer.exact_until) == ((), 0.0, None)


def test_a_slider_may_ask_on_every_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 layers × 2,000 readings: only those that can decide something are fed, or it would take half a second."""
    fed = [0]
    update = PlasticityTrend.update

    def counting(self: PlasticityTrend, *args: Any, **keywords: Any) -> Reading:
        fed[0] += 1
        return update(self, *args, **keywords)

    monkeypatch.setattr(PlasticityTrend, "update", counting)
    layers, count = 60, 2000
    names = tuple(f"layer {index}" for index in range(layers))
    settings = Plasticity(tolerance=0, interval_steps=10)
    period = settings.readings_per_snapshot
    decay = [[math.exp(-reading / (200 + 60 * layer)) for reading in range(count)] for layer in range(layers)]
    run = RecordedRun(
        layers=names, settings=settings,
        losses=[0.5 + 2 * math.exp(-step / 3000) for step in range(10 * count)], learning_rates=[0.1] * (10 * count),
        passes=[step / 500 for step in range(1, 10 * count + 1)], samples=range(1, 10 * count + 1),
        reading_steps=range(10, 10 * count + 1, 10),
        snapshot_steps=[10 * (reading // period * period + 1) for reading in range(count)],
        values=[[reading % period * scale for reading, scale in enumerate(scales)] for scales in decay],
        flops=lambda frozen: StepFlops((1.0,) * layers, (2.0,) * (layers - len(frozen)) + (0.0,) * len(frozen)),
    )  # fmt: skip
    for tolerance in (0.05, 0.2, 0.5, 1.0):
        fed[0] = 0
        answer = what_if(run, tolerance=tolerance)
        assert 0 < fed[0] < 0.1 * layers * count, f"{fed[0]} of {layers * count} readings were fed"
    assert len(answer.frozen) > 10
