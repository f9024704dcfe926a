"""A schedule is followed: each change once, hands are respected, and rates end where layers freeze."""

from __future__ import annotations

import json

import pytest

from egeria_lab.algorithms.decision import Decision
from egeria_lab.algorithms.freeze_plans import NEVER
from egeria_lab.algorithms.schedule_policy import SchedulePolicy


class Run:
    """Carries decisions out, as a session does."""

    def __init__(self, **times: object) -> None:
        self.policy = SchedulePolicy(times)  # type: ignore[arg-type]
        self.frozen: list[str] = []
        self.by_hand: list[str] = []
        self.pinned: list[str] = []

    def at(self, progress: float) -> list[tuple[str, str]]:
        decisions: list[Decision] = self.policy.due(
            progress, frozen=self.frozen, pinned=self.pinned, by_hand=self.by_hand
        )
        for decision in decisions:
            if decision.action == "freeze":
                self.frozen.append(decision.layer)
            elif decision.action == "thaw":
                self.frozen.remove(decision.layer)
        return [(decision.action, decision.layer) for decision in decisions]


def test_layers_freeze_in_order_once() -> None:
    run = Run(a=0.2, b=0.4, head=NEVER)
    assert run.at(0.1) == []
    assert run.at(0.2) == [("freeze", "a")]
    assert run.at(0.3) == []
    assert run.at(1.0) == [("freeze", "b")]


def test_layers_of_a_block_freeze_and_thaw_at_the_same_step() -> None:
    run = Run(stem=((0.2, 0.8),), a=((0.2, 0.8),), b=((0.3, 0.8),), head=())
    assert run.at(0.25) == [("freeze", "stem"), ("freeze", "a")]
    assert run.at(0.3) == [("freeze", "b")]
    assert run.at(0.8) == [("thaw", "stem"), ("thaw", "a"), ("thaw", "b")]
    assert run.at(0.9) == run.at(1.0) == []


def test_cycles_freeze_and_thaw_again_and_again() -> None:
    run = Run(a=((0.1, 0.2), (0.4, 0.5), (0.7, NEVER)), head=())
    seen = [run.at(step / 20) for step in range(21)]
    changes = [(step / 20, change[0][0]) for step, change in enumerate(seen) if change]
    assert changes == [(0.1, "freeze"), (0.2, "thaw"), (0.4, "freeze"), (0.5, "thaw"), (0.7, "freeze")]


def test_a_stint_that_was_jumped_over_leaves_no_trace() -> None:
    assert Run(a=((0.1, 0.2),), head=()).at(0.5) == []
    assert Run(a=((0.1, 0.2), (0.3, 0.6)), head=()).at(0.5) == [("freeze", "a")]


def test_a_pin_is_reported_once_and_its_end_lets_the_layer_freeze() -> None:
    run = Run(a=0.2, b=0.4, head=NEVER)
    run.pinned = ["b"]
    assert run.at(0.5) == [("freeze", "a"), ("blocked", "b")]
    assert run.at(0.6) == []
    assert run.policy.is_waiting("b")
    run.pinned = []
    assert run.at(0.7) == [("freeze", "b")]
    assert not run.policy.is_waiting("b")


def test_a_pin_in_cycles_is_reported_once_for_all_of_them() -> None:
    run = Run(a=((0.1, 0.2), (0.4, 0.5), (0.7, 0.8)), head=())
    run.pinned = ["a"]
    assert [run.at(x) for x in (0.1, 0.2, 0.4, 0.5)] == [[("blocked", "a")], [], [], []]
    run.pinned = []
    assert run.at(0.6) == []
    assert run.at(0.7) == [("freeze", "a")]


def test_the_pin_that_ends_after_the_stint_freezes_nothing() -> None:
    run = Run(a=((0.1, 0.2),), head=())
    run.pinned = ["a"]
    run.at(0.1)
    assert run.policy.is_waiting("a")
    run.at(0.2)
    assert not run.policy.is_waiting("a")
    run.pinned = []
    assert run.at(0.3) == []


def test_what_was_frozen_by_hand_is_not_thawed_by_the_schedule() -> None:
    run = Run(a=((0.2, 0.5), (0.7, 0.9)), b=((0.2, 0.5),), head=())
    run.frozen, run.by_hand = ["a"], ["a"]
    assert run.at(0.3) == [("freeze", "b")]
    assert run.at(0.5) == [("thaw", "b")]
    assert run.at(0.7) == run.at(0.9) == []
    assert run.frozen == ["a"]


def test_what_was_thawed_by_hand_stays_so_until_its_next_stint() -> None:
    run = Run(a=((0.2, 0.5), (0.7, NEVER)), head=())
    run.at(0.2)
    run.frozen.remove("a")
    assert run.at(0.3) == run.at(0.5) == []
    assert run.at(0.7) == [("freeze", "a")]


def test_a_longer_training_undoes_nothing() -> None:
    run = Run(a=((0.5, 0.9),), b=((0.6, 0.9),), head=())
    assert run.at(0.5) == [("freeze", "a")]
    assert run.at(0.25) == run.at(0.4) == run.at(0.5) == []  # lengthened to twice its length
    assert run.at(0.6) == [("freeze", "b")]
    assert run.at(0.9) == [("thaw", "a"), ("thaw", "b")]
    assert run.at(0.7) == []  # lengthened after the thaw: trained to the end


def test_the_last_trained_layer_is_not_frozen() -> None:
    run = Run(a=0.2, b=0.4, head=NEVER)
    run.frozen, run.by_hand = ["head"], ["head"]
    assert run.at(0.2) == [("freeze", "a")]
    assert run.at(0.4) == [("blocked", "b")]
    assert run.at(0.5) == []
    run.frozen.remove("head")
    assert run.at(0.6) == [("freeze", "b")]


def test_reasons_tell_the_times() -> None:
    policy = SchedulePolicy({"a": ((0.5, 0.9),), "b": 0.5, "c": 0.5, "head": NEVER})
    freeze, plain, blocked = policy.due(0.5, frozen=(), pinned=("c",))
    assert freeze.reason == "scheduled for 50.0% of training, until 90.0%"
    assert plain.reason == "scheduled for 50.0% of training"
    assert blocked.reason.startswith("it is pinned")
    (thaw,) = policy.due(0.9, frozen=("a", "b"), pinned=())[:1]
    assert thaw.reason == "scheduled to be trained from 90.0% of training on"


def test_the_next_freeze_is_known() -> None:
    run = Run(a=((0.2, 0.5), (0.7, NEVER)), head=())
    assert [run.policy.times[name] for name in ("a", "head")] == [0.2, NEVER]
    assert run.policy.next_freeze("head") is None
    assert run.policy.next_freeze("a") == 0.2
    run.at(0.2)
    assert run.policy.next_freeze("a") == 0.7
    run.at(0.5)
    assert run.policy.next_freeze("a") == 0.7
    run.at(0.7)
    assert run.policy.next_freeze("a") is None


# --- rates -------------------------------------------------------------------------------------------------


def test_own_cosine_ends_at_the_freeze() -> None:
    policy = SchedulePolicy({"a": 0.5, "head": NEVER})
    assert policy.rate_factor("a", 0.0) == 1
    assert policy.rate_factor("a", 0.25) == pytest.approx(0.5)
    assert policy.rate_factor("a", 0.5) == pytest.approx(0.0)
    assert policy.rate_factor("head", 0.5) == pytest.approx(0.5)
    assert policy.rate_factor("head", 1.0) == pytest.approx(0.0)
    assert SchedulePolicy({"a": 0.0, "head": NEVER}).rate_factor("a", 0.0) == 0


@pytest.mark.parametrize("thaw", ["by plan", "by hand", "never frozen, as it is pinned"])
def test_a_layer_trained_after_its_freeze_follows_the_head(thaw: str) -> None:
    run = Run(a=((0.5, 0.75),), head=NEVER)
    run.pinned = ["a"] if "pinned" in thaw else []
    run.at(0.5)
    if thaw == "by hand":
        run.frozen.remove("a")
    run.at(0.75)
    assert run.frozen == []
    for progress in (0.75, 0.8, 0.99):
        factor = run.policy.rate_factor("a", progress)
        assert factor == run.policy.rate_factor("head", progress) > 0


# --- state -------------------------------------------------------------------------------------------------


def test_a_restored_policy_goes_on_where_the_other_was() -> None:
    times = {"a": ((0.1, 0.2), (0.4, NEVER)), "b": 0.1, "head": NEVER}
    run, other = Run(**times), Run(**times)
    run.pinned = other.pinned = ["b"]
    run.at(0.1)
    state = json.loads(json.dumps(run.policy.state_dict()))
    other.policy.load_state_dict(state)
    other.frozen = list(run.frozen)
    assert other.policy.is_waiting("b")
    for progress in (0.15, 0.2, 0.3):
        assert other.at(progress) == run.at(progress)
    run.pinned = other.pinned = []
    assert other.at(0.4) == run.at(0.4) == [("freeze", "a"), ("freeze", "b")]
    assert other.policy.rate_factor("a", 0.5) == run.policy.rate_factor("a", 0.5)
