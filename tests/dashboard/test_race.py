"""The second mode of the tuner: a fork with the tried settings is really trained beside the run, and closed."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch
from pages import Clock, Outlet, Page, told

import egeria_lab as lab
from egeria_lab.dashboard.controls import Controls
from egeria_lab.dashboard.feed import Feed
from egeria_lab.dashboard.publisher import Publisher
from egeria_lab.dashboard.race import MOST_POINTS, Race
from egeria_lab.errors import TrainingError


def made(**how: Any) -> lab.Session:
    torch.set_num_threads(1)
    rule = lab.Plasticity(interval_steps=1, window=4, patience=3, tolerance=0.0, reference="fp32")
    return lab.Session("mlp", "digits", **{"epochs": 20, "lr": 0.05, "seed": 0, "freeze": rule, **how})


def until(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[lab.Session]:
    """Every fork that is made."""
    made_: list[lab.Session] = []
    fork = lab.Session.fork

    def noting(self: lab.Session, **changes: Any) -> lab.Session:
        made_.append(fork(self, **changes))
        return made_[-1]

    monkeypatch.setattr(lab.Session, "fork", noting)
    return made_


def test_the_fork_is_what_a_run_with_these_settings_from_here_would_be(forks: list[lab.Session]) -> None:
    session = made()
    session.step(30)
    by_hand = session.fork()
    by_hand.override("freeze.tolerance", 5.0)
    by_hand.step(60)
    race = Race(session)
    race.start({"steps": 60, "tolerance": 5.0})
    assert race.wait(60)
    assert session.wait(60)
    (_, fork) = forks
    assert fork.history.steps["loss"].tolist() == by_hand.history.steps["loss"].tolist()
    state = race.state()
    assert (state["phase"], state["problem"], state["from"], state["until"], state["step"]) == ("done", "", 30, 90, 90)
    assert state["changes"] == {"tolerance": 5.0}
    assert state["saved"] > 0 == state["run_saved"]
    assert state["spans"][0][0] == 0
    rows = by_hand.history.steps.rows()
    assert state["loss"][0][-1] == 90
    assert state["loss"][1][-1] == pytest.approx(rows["loss"][-20:].mean(), rel=1e-3)
    by_hand.close()


def test_the_run_goes_on_as_without_it(forks: list[lab.Session]) -> None:
    plain, seen = made(), made()
    plain.step(90)
    seen.step(30)
    race = Race(seen)
    race.start({"steps": 60, "tolerance": 5.0, "interval_steps": 2})
    assert race.wait(60)
    assert seen.wait(60)
    assert seen.steps_done == 90
    assert seen.history.steps["loss"].tolist() == plain.history.steps["loss"].tolist()
    assert seen.setting("freeze.tolerance") == 0.0
    assert forks[0].setting("freeze.interval_steps") == 2
    assert forks[0]._closed
    assert seen.planned_steps == plain.planned_steps


def test_beside_a_run_that_trains_and_stopped_by_hand(forks: list[lab.Session]) -> None:
    session = made(epochs=4000)
    session.start()
    until(lambda: session.steps_done > 5)
    race = Race(session)
    race.start({"steps": 40_000, "tolerance": 0.4})
    until(lambda: race.state().get("step", 0) > race.state().get("from", 10**9))
    race.start({"steps": 5})  # one at a time
    assert len(forks) == 1
    race.stop()
    assert race.wait(30)
    assert race.state()["phase"] == "stopped"
    assert forks[0]._closed
    assert session.state == "running"  # it trained before, it trains on
    session.close()


def test_a_run_that_was_started_for_it_stands_still_when_it_is_stopped(forks: list[lab.Session]) -> None:
    session = made(epochs=4000)
    session.step(3)
    race = Race(session)
    race.start({"steps": 40_000, "tolerance": 0.4})
    until(lambda: session.state == "running")
    race.stop()
    assert race.wait(30)
    until(lambda: session.state == "paused")
    session.close()


def test_closing_the_session_ends_the_fork(forks: list[lab.Session]) -> None:
    session = made(epochs=4000)
    session.step(3)
    race = Race(session)
    race.start({"steps": 40_000})
    until(lambda: len(forks) == 1 and forks[0].state == "running")
    session.close()
    assert race.wait(30)
    assert forks[0]._closed


@pytest.mark.parametrize("steps", [0, -1, "many", float("nan"), None])
def test_steps_that_make_no_sense_are_refused(steps: object, forks: list[lab.Session]) -> None:
    race = Race(made())
    race.start({"steps": steps})
    assert race.wait(10)
    assert race.state()["phase"] == "failed"
    assert "steps must be 1 to" in race.state()["problem"]
    assert forks == []


def test_a_value_out_of_range_and_a_used_up_plan_are_told(forks: list[lab.Session]) -> None:
    session = made(epochs=1)
    race = Race(session)
    race.start({"steps": 5, "patience": 0})
    assert race.wait(30)
    assert "patience" in race.state()["problem"]
    assert forks[0]._closed
    session.run(progress=False)
    race.start({"steps": 5})
    assert race.wait(10)
    assert "The plan is used up" in race.state()["problem"]


def test_a_fork_that_fails_is_told_and_the_run_is_untouched(
    forks: list[lab.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = made()
    session.step(3)

    def broken(_self: lab.Session) -> None:
        raise TrainingError("the loss is not finite.")

    race = Race(session)
    own = lab.Session.advance
    monkeypatch.setattr(lab.Session, "advance", lambda self: own(self) if self is session else broken(self))
    race.start({"steps": 5})
    assert race.wait(30)
    assert (race.state()["phase"], race.state()["problem"]) == ("failed", "the loss is not finite.")
    assert forks[0]._closed
    assert session.wait(30)
    assert session.steps_done == 8


def test_what_is_told_is_small_and_plain(forks: list[lab.Session]) -> None:
    session = made(epochs=60)
    race = Race(session)
    race.start({"steps": 600, "tolerance": 0.4})
    assert race.wait(90)
    assert session.wait(90)
    state = race.state()
    assert len(state["loss"][0]) <= MOST_POINTS
    assert len(state["valid"][0]) == 50
    assert len(json.dumps(state)) < 12_000


def test_the_page_is_told_every_two_seconds_and_at_the_end_and_closing_ends_it(forks: list[lab.Session]) -> None:
    session = made(epochs=4000)
    session.step(3)
    outlet, clock = Outlet(), Clock()
    publisher = Publisher(Feed(session), Controls(session), outlet, clock=clock)
    page = Page(publisher.receive)
    page.say("hello")
    publisher.tick()
    page.say("race", steps=40_000, tolerance=0.4)
    until(lambda: publisher.tick() is not None and "race" in outlet.traits)
    told_ = []
    outlet.update = lambda **traits: told_.extend(k for k in traits if k == "race")
    publisher.tick()
    assert told_ == []  # not again before two seconds
    clock.now += 2.1
    publisher.tick()
    assert told_ == ["race"]
    page.say("race")
    assert publisher._feed.race.wait(30)
    publisher.tick()
    publisher.tick()
    assert told_ == ["race", "race"]
    page.say("race", steps=40_000)
    until(lambda: len(forks) == 2)
    publisher.close()
    assert publisher._feed.race.wait(30)
    assert not [thread for thread in threading.enumerate() if thread.name == "egeria-lab-race"]
    session.close()


def test_a_session_that_cannot_be_forked_says_so() -> None:
    race = Race(told())
    race.start({"steps": 5})
    assert race.wait(10)
    assert race.state()["phase"] == "failed"
