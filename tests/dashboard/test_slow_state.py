"""How much is sent: little when little happens, at once when something does, the same for a long run as for a short."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pages import Clock, Outlet, Page, told

from egeria_lab.dashboard.controls import Controls
from egeria_lab.dashboard.feed import Feed
from egeria_lab.dashboard.publisher import Publisher
from egeria_lab.dashboard.slow_state import STATUS_SECONDS, SlowState


class Counting(Outlet):
    """Counts messages and bytes as a comm would send them: only what changed."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = self.bytes = 0

    def send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        super().send(content, buffers)
        self.messages += 1
        self.bytes += len(json.dumps(content)) + sum(map(len, buffers))

    def update(self, **traits: Any) -> None:
        changed = {name: value for name, value in traits.items() if self.traits.get(name) != value}
        super().update(**traits)
        if changed:
            self.messages += 1
            self.bytes += len(json.dumps(changed))


def watched(steps: int, seconds: float = 20.0) -> tuple[float, float]:
    """Messages and bytes a second for 20 layers that train at 50 steps a second, after so many steps."""
    session, clock, outlet = told(20, steps=steps), Clock(), Counting()
    session.state = "running"
    publisher = Publisher(Feed(session), Controls(session), outlet, clock=clock)
    page = Page(publisher.receive)
    page.say("hello")
    publisher.tick()
    page.acknowledge(outlet.frames[-1][0]["seq"])
    before, step = (outlet.messages, outlet.bytes), steps
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.02
        step += 1
        row = {**session.history.steps.last(), "step": step, "loss": 1 / step, "elapsed_seconds": 0.02 * step}
        session.history.steps.append(**row)
        if step % 10 == 0:
            for layer in range(20):
                session.history.plasticity.append(step=step, layer=layer, value=1e-5, generation=1)
        publisher.tick()
        if outlet.frames[-1][0]["seq"] != publisher._answered:
            page.acknowledge(outlet.frames[-1][0]["seq"])
    publisher.close()
    return (outlet.messages - before[0]) / seconds, (outlet.bytes - before[1]) / seconds


def test_at_most_four_messages_and_15_kilobytes_a_second_and_no_more_for_a_long_run() -> None:
    """Traps 104, 105, 112."""
    messages, size = watched(200)
    assert messages <= 4
    assert size <= 15_000
    longer = watched(4000)
    assert longer[0] <= 4
    assert longer[1] == pytest.approx(size, rel=0.15)


def test_counters_once_a_second_and_what_happens_at_once() -> None:
    session, clock, outlet = told(), Clock(), Outlet()
    session.state = "running"
    slow = SlowState(Feed(session), Controls(session), outlet, clock)
    slow.tell(clock.now)
    told_, outlet.update = [], lambda **traits: told_.append(traits)
    session.history.steps.append(**{**session.history.steps.last(), "step": 1401, "loss": 0.1})
    slow.tell(clock.now + 0.1)
    assert told_ == []
    session.layers[3].state = "frozen"
    slow.tell(clock.now + 0.2)
    assert [traits["layers"][3]["state"] for traits in told_] == ["frozen"]
    assert told_[0]["status"]["step"] == 1401
    slow.tell(clock.now + 0.3)
    assert len(told_) == 1
    slow.tell(clock.now + 0.2 + STATUS_SECONDS + 0.01)
    assert len(told_) == 2


def test_a_page_that_is_hidden_or_gone_is_sent_nothing() -> None:
    """Trap 115."""
    session, clock, outlet = told(), Clock(), Counting()
    session.state = "running"
    publisher = Publisher(Feed(session), Controls(session), outlet, clock=clock)
    page = Page(publisher.receive)
    page.say("hello")
    publisher.tick()
    page.acknowledge(outlet.frames[-1][0]["seq"], visible=False)
    publisher.tick()
    before = outlet.messages
    for _ in range(200):
        clock.now += 0.5
        session.history.steps.append(**{**session.history.steps.last(), "step": session.steps_done + 1})
        publisher.tick()
    assert outlet.messages == before
    publisher.close()
