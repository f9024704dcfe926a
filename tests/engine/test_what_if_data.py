"""Replays against real trainings: the same model, data and seed, under the settings that were only imagined."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import egeria_lab as lab
from egeria_lab.algorithms.what_if import what_if
from egeria_lab.algorithms.what_if_record import RecordedRun, WhatIf
from egeria_lab.engine.what_if_data import RunSource
from egeria_lab.errors import InvalidSettingError
from egeria_lab.events import FreezeBlocked, LayerFrozen, LayerSettling, LayerThawed, SettlingEnded

STEPS = 200
EAGER: dict[str, Any] = {
    "interval_steps": 2, "window": 3, "patience": 2, "tolerance": 0.6, "bootstrap_change": 0.5,
    "monitor_budget": 1.0, "reference": "fp32",
}  # fmt: skip
Story = list[tuple[int, str, str, str, str]]
Act = Callable[[lab.Session], object]
Train = Callable[..., lab.Session]


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    """Trains a small perceptron on digits, with things done by hand after some steps; each such run once."""
    made: list[lab.Session] = []
    known: dict[str, lab.Session] = {}

    def run(acts: tuple[tuple[int, Act], ...] = (), steps: int = STEPS, **options: Any) -> lab.Session:
        wanted = repr((acts, sorted(options.items())))
        if steps < STEPS or wanted not in known:
            session = fresh(acts, steps, **options)
            if steps < STEPS:
                return session
            known[wanted] = session
        return known[wanted]

    def fresh(acts: tuple[tuple[int, Act], ...], steps: int, **options: Any) -> lab.Session:
        settings = {**EAGER, **options.pop("settings", {})}
        model = lab.models.build("mlp", input_shape=(1, 8, 8), num_classes=10, seed=0, hidden=(16,) * 5)
        session = lab.Session(
            model, "digits", epochs=20, batch_size=64, freeze=lab.Plasticity(**settings),
            **{"lr": 0.05, "scheduler": "constant", **options},
        )  # fmt: skip
        made.append(session)
        for at, act in acts:
            if at > session.steps_done:
                session.step(at - session.steps_done)
            act(session)
        session.step(steps - session.steps_done)
        return session

    torch.set_num_threads(1)
    yield run
    for session in made:
        session.close()


def source(session: lab.Session) -> RunSource:
    return RunSource(session.history, session.events, session.settings_book, session.recorder.flops(()))


def record(session: lab.Session) -> RecordedRun:
    return source(session).latest()


def happened(session: lab.Session) -> Story:
    words = {
        LayerFrozen: "freeze", LayerThawed: "thaw", FreezeBlocked: "blocked", LayerSettling: "settle",
        SettlingEnded: "unsettle",
    }  # fmt: skip
    return [(e.step, words[type(e)], e.layer, e.reason, e.by) for e in session.events.of(*words)]  # type: ignore[attr-defined,index]


def told(answer: WhatIf, until: int = STEPS) -> Story:
    return [(h.step, h.action, h.layer, h.reason, h.by) for h in answer.happenings if h.step <= until]


def drops(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.MultiStepLR:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [120, 160])


HAND: tuple[tuple[int, Act], ...] = (
    (0, lambda s: s.freeze("layers.2")),
    (71, lambda s: s.override("freeze.tolerance", 0.3)),
    (71, lambda s: s.override("freeze.tolerance", 0.9, layer="layers.1")),
    (71, lambda s: s.pin("layers.3")),
    (93, lambda s: s.thaw("layers.2")),
    (120, lambda s: s.override("freeze.interval_steps", 3)),
    (140, lambda s: s.unpin("layers.3")),
    (141, lambda s: s.thaw("layers.0")),
    (142, lambda s: s.override("freeze.patience", 4)),
    (150, lambda s: s.reset("freeze.tolerance", layer="layers.1")),
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"settings": {"refresh_on_freeze": False}},
        {"settings": {"freeze_together": True}},
        {"settings": {"monitor_budget": 0.02}},
        {"settings": {"guard": 0.001}, "lr": 0.3},
        {"settings": {"interval_steps": 3, "window": 4, "refresh_evals": 9}},
        {"scheduler": drops, "scheduler_every": "step"},
        {"scheduler": "cosine"},
        {"scheduler": "cosine", "settings": {"bootstrap_rate": 0.8}},
        {"acts": HAND},
        {"settings": {"settle_epochs": 2.0}},
        {"settings": {"settle_epochs": 1.5, "freeze_together": True}, "acts": HAND},
        {"settings": {"settle_epochs": 1.0}, "scheduler": drops, "scheduler_every": "step"},
    ],
    ids=lambda options: str(sorted(options) or "plain"),
)
def test_a_real_run_replays_exactly_under_its_own_settings(train: Train, options: dict[str, Any]) -> None:
    session = train(**options)
    answer = what_if(record(session))
    assert len([step for step, action, _, _, by in happened(session) if (action, by) == ("freeze", "rule")]) >= 2
    assert told(answer) == happened(session)
    assert answer.exact_until is None
    assert answer.frozen == session.layers.frozen
    assert answer.saved_fraction == pytest.approx(session.recorder.book.flops_saved_fraction, rel=1e-12)
    assert answer.executed_flops == pytest.approx(session.recorder.book.executed_flops, rel=1e-12)


def test_these_runs_thaw_by_the_rate_and_by_the_guard(train: Train) -> None:
    by_rate = train(scheduler=drops, scheduler_every="step")
    assert any(action == "thaw" and "learning rate fell" in reason for _, action, _, reason, _ in happened(by_rate))
    by_guard = train(settings={"guard": 0.001}, lr=0.3)
    assert any(action == "thaw" and "accuracy" in reason for _, action, _, reason, _ in happened(by_guard))


@pytest.mark.parametrize(
    ("recorded", "asked"),
    [
        ({"tolerance": 0}, {"tolerance": 0.6}),  # recorded without freezing
        ({"tolerance": 0}, {"tolerance": 1.5}),
        ({"tolerance": 0.3}, {"tolerance": 0.6}),
        ({}, {"tolerance": 0.3}),
        ({"tolerance": 0, "refresh_evals": 30}, {"tolerance": 0.6, "patience": 4}),
        ({"tolerance": 0, "refresh_evals": 30}, {"tolerance": 0.6, "window": 5}),
        ({}, {"bootstrap_change": 0.02}),
        ({}, {"bootstrap_rate": 0.9}),
        ({}, {"max_frozen": 0.4}),
        ({}, {"refresh_on_freeze": False}),
        ({}, {"freeze_together": True}),
        ({}, {"monitor_budget": 0.02}),
        ({"refresh_on_freeze": False}, {"tolerance": 0.9}),
        ({"tolerance": 0}, {"tolerance": 0.6, "settle_epochs": 2.0}),
        ({}, {"settle_epochs": 1.0}),
        ({"settle_epochs": 1.0}, {"settle_epochs": 2.0}),
        ({"settle_epochs": 1.0}, {"settle_epochs": 0.0}),
    ],
    ids=str,
)
def test_up_to_the_first_difference_it_says_what_a_real_run_does(
    train: Train, recorded: dict[str, Any], asked: dict[str, Any]
) -> None:
    answer = what_if(record(train(settings=recorded)), **asked)
    real = happened(train(settings={**recorded, **asked}))
    assert answer.exact_until is not None
    assert told(answer, answer.exact_until) == [h for h in real if h[0] <= answer.exact_until]
    both = [*real, *happened(train(settings=recorded))]
    first = min(step for step, action, *_ in both if action in ("freeze", "settle"))
    assert answer.exact_until >= first  # the claim holds to the first freeze at least


@pytest.mark.parametrize(
    "asked", [{"patience": 4}, {"window": 5}, {"interval_steps": 4}, {"interval_steps": 3}], ids=str
)
def test_where_a_real_run_would_read_otherwise_less_is_claimed_and_still_true(
    train: Train, asked: dict[str, Any]
) -> None:
    answer = what_if(record(train(settings={"tolerance": 0})), tolerance=0.6, **asked)
    real = happened(train(settings={**asked}))
    assert answer.exact_until is not None
    assert told(answer, answer.exact_until) == [h for h in real if h[0] <= answer.exact_until]
    assert "real run" in answer.why_inexact


def test_a_thaw_at_another_time_is_a_difference_too(train: Train) -> None:
    recorded = train(scheduler=drops, scheduler_every="step")
    answer = what_if(record(recorded), thaw="never")
    thaw = next(step for step, action, *_ in happened(recorded) if action == "thaw")
    assert answer.exact_until == thaw
    assert told(answer, thaw) == [h for h in happened(recorded) if h[1] != "thaw" and h[0] <= thaw]


def test_it_answers_while_the_run_goes_on_and_changes_no_bit_of_it(train: Train) -> None:
    quiet, watched = train(steps=1), train(steps=1)
    quiet.step(STEPS - 1)
    keeper, answers, done = source(watched), [], threading.Event()

    def ask() -> None:
        while not done.wait(0.01):
            answers.append(what_if(keeper.latest()))

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        watched.step(STEPS - 1)
    finally:
        done.set()
        asker.join()
    assert watched.history["steps"]["loss"].tolist() == quiet.history["steps"]["loss"].tolist()
    assert len(answers) > 5
    for answer in answers:  # each is the truth about the steps that it knew of
        assert answer.exact_until is None
        assert told(answer) == [h for h in happened(watched) if h[0] <= answer.last_step]


def test_a_run_that_goes_on_in_the_middle_of_gathering_is_gathered_whole(train: Train) -> None:
    """New snapshots, readings and freezes between the tables and the events."""
    session = train(steps=60)

    class Slow:
        def __len__(self) -> int:
            return len(session.events)

        def __iter__(self) -> Iterator[Any]:
            before = list(session.events)
            session.step(60)
            return iter(before)

    flops = session.recorder.flops(())
    answer = what_if(RunSource(session.history, Slow(), session.settings_book, flops).latest())  # type: ignore[arg-type]
    assert (answer.last_step, answer.exact_until) == (60, None)
    assert told(answer) == [h for h in happened(session) if h[0] <= 60]


def test_what_was_gathered_is_kept_until_something_is_added(train: Train) -> None:
    session = train(steps=10)
    keeper = source(session)
    first = keeper.latest()
    assert keeper.latest() is first
    session.pin("layers.0")
    assert keeper.latest() is not first
    assert keeper.latest().acts[-1].action == "pin"
    session.step()
    assert keeper.latest().last_step == 11


def test_a_session_without_plasticity_is_refused() -> None:
    session = lab.Session("mlp", "digits", freeze=None)
    with pytest.raises(InvalidSettingError, match=r"records none; build it with freeze=lab.Plasticity"):
        record(session)
    session.close()
