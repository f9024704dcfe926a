"""Events are plain data, in order, for whoever wants them; a subscriber's fault is its own."""

from __future__ import annotations

import json
import threading
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import Any

import pytest

from egeria_lab import events
from egeria_lab.events import (
    EpochFinished,
    Event,
    EventLog,
    LayerFrozen,
    LayerThawed,
    RunPaused,
    SubscriberFailed,
)


def all_kinds() -> list[type[Event]]:
    found = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)]
    return [kind for kind in found if kind is not Event]


def example(kind: type[Event]) -> Event:
    values: dict[str, Any] = {"step": 7}
    samples = {"str": "text", "int": 3, "float": 0.25, "Scalar": 0.5}
    for field in fields(kind):
        if field.default is MISSING and field.default_factory is MISSING and field.name != "step":
            values[field.name] = samples.get(str(field.type), ("a",) if "tuple" in str(field.type) else 0.5)
    return kind(**values)


@pytest.mark.parametrize("kind", all_kinds())
def test_every_event_is_frozen_json_able_and_speaks(kind: type[Event]) -> None:
    event = example(kind)
    plain = json.loads(json.dumps(event.to_dict()))
    assert plain["event"] == kind.__name__
    assert plain["step"] == 7
    assert set(plain) == {"event", *(field.name for field in fields(kind))}
    assert event.sentence()
    assert "\n" not in event.sentence()
    with pytest.raises(FrozenInstanceError):
        event.step = 8  # type: ignore[misc]
    with pytest.raises(TypeError):
        kind(7)  # type: ignore[call-arg,misc]


def test_every_event_has_a_name_in_the_past() -> None:
    """R3 of the house: what happened, not what is wanted."""
    names = {kind.__name__ for kind in all_kinds()}
    wanted = {"LayerFrozen", "LayerThawed", "LayerPinned", "LayerUnpinned", "SettingChanged", "CommandRejected"}
    assert wanted <= names
    assert {"RunStarted", "RunPaused", "RunResumed", "RunStopped", "RunFailed", "ReferenceRefreshed"} <= names


def test_the_log_keeps_order_and_can_be_read_in_pieces() -> None:
    log = EventLog()
    made = [LayerFrozen(step=1, layer="a"), LayerThawed(step=2, layer="a"), LayerFrozen(step=3, layer="b")]
    for event in made:
        log.append(event)
    assert list(log) == made
    assert log.of(LayerFrozen) == [made[0], made[2]]
    assert log.of(LayerFrozen, LayerThawed) == made
    assert log.since(1) == made[1:]
    assert log.since(3) == []
    assert (len(log), log[0], log[-1]) == (3, made[0], made[2])
    assert repr(log).count("\n") == 2
    assert repr(EventLog()) == "no events yet"


def test_subscribers_get_their_kind_only_and_can_leave() -> None:
    log, frozen, everything = EventLog(), [], []
    leave = log.subscribe(frozen.append, LayerFrozen)
    log.subscribe(everything.append)
    log.append(LayerFrozen(step=1, layer="a"))
    log.append(LayerThawed(step=2, layer="a"))
    leave()
    leave()
    log.append(LayerFrozen(step=3, layer="b"))
    assert [event.step for event in frozen] == [1]
    assert [event.step for event in everything] == [1, 2, 3]


def test_the_same_callback_subscribed_twice_leaves_one_by_one() -> None:
    log, seen = EventLog(), []
    first, second = log.subscribe(seen.append), log.subscribe(seen.append)
    log.append(RunPaused(step=1))
    assert len(seen) == 2
    first()
    first()  # twice is harmless: the other subscription stays
    log.append(RunPaused(step=2))
    assert len(seen) == 3
    second()
    log.append(RunPaused(step=3))
    assert len(seen) == 3


def test_a_failing_subscriber_is_detached_and_reported_once_and_others_see_the_right_order() -> None:
    log = EventLog()
    seen: list[str] = []

    def broken(_event: Event) -> None:
        raise KeyError("no such curve")

    log.subscribe(broken)
    log.subscribe(lambda event: seen.append(type(event).__name__))
    log.append(RunPaused(step=4))
    log.append(RunPaused(step=5))
    assert [type(event).__name__ for event in log] == ["RunPaused", "SubscriberFailed", "RunPaused"]
    assert seen == ["RunPaused", "SubscriberFailed", "RunPaused"]
    failed = log[1]
    assert isinstance(failed, SubscriberFailed)
    assert failed.step == 4
    assert "broken" in failed.subscriber
    assert failed.error == "KeyError: 'no such curve'"


def test_a_subscriber_that_fails_on_the_report_of_its_own_failure_ends_there() -> None:
    log = EventLog()
    for _ in range(3):
        log.subscribe(lambda event: 1 / 0)  # type: ignore[arg-type,return-value]
    log.append(RunPaused(step=1))
    assert [type(event).__name__ for event in log] == ["RunPaused"] + ["SubscriberFailed"] * 3


def test_a_subscriber_may_subscribe_and_leave_while_it_is_called() -> None:
    log, late = EventLog(), []

    def once(_event: Event) -> None:
        leave()
        log.subscribe(late.append)

    leave = log.subscribe(once)
    log.append(RunPaused(step=1))
    log.append(RunPaused(step=2))
    assert [event.step for event in late] == [2]
    assert len(log) == 2


def test_an_interrupt_inside_a_subscriber_is_not_swallowed() -> None:
    log = EventLog()

    def interrupted(_event: Event) -> None:
        raise KeyboardInterrupt

    log.subscribe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.append(RunPaused(step=1))


def test_reading_while_another_thread_appends() -> None:
    log, stop, wrong = EventLog(), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            steps = [event.step for event in log]
            if steps != list(range(len(steps))):
                wrong.append(steps)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(3000):
        log.append(RunPaused(step=step))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(log) == 3000


def test_numbers_in_sentences() -> None:
    event = EpochFinished(step=8, epoch=1, train_loss=1.23456, train_accuracy=0.5, valid_loss=1.0, valid_accuracy=0.876)
    assert event.sentence() == "Epoch 1: loss 1.235, validation accuracy 87.6%"
    assert "(" not in LayerFrozen(step=1, by="rule", layer="a", reason="slope").sentence()
