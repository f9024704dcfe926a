"""Ctrl-C between any two lines of a step: no step is made without being written down, and the session goes on."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

import egeria_lab as lab
from egeria_lab.engine import interrupts
from egeria_lab.engine.interrupts import interrupts_held, interrupts_let_through


def make() -> lab.Session:
    model = lab.models.build("mlp", input_shape=(1, 8, 8), num_classes=10, seed=0)
    return lab.Session(
        model, "digits", batch_size=256, epochs=40, lr=0.05, seed=1, deterministic=True,
        freeze=lab.Plasticity(interval_steps=1, window=2, patience=2, tolerance=5.0, settle_epochs=2),
        sieve=lab.CirculantSieve(fraction=0.3),
    )  # fmt: skip


class Lines:
    """Counts lines of the package as they run, and interrupts before a chosen one."""

    def __init__(self) -> None:
        self.count = 0
        self.at = -1
        self.signals = 1

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if "egeria_lab" not in frame.f_code.co_filename or frame.f_code.co_filename.endswith("interrupts.py"):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                for _ in range(self.signals):
                    signal.raise_signal(signal.SIGINT)
        return self._trace

    def run(self, work: Callable[[], Any], at: int = -1, signals: int = 1) -> bool:
        """Do the work; True when it was interrupted."""
        self.count, self.at, self.signals = 0, at, signals
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def rows(session: lab.Session) -> list[float]:
    values: list[float] = session.history["steps"]["loss"].tolist()
    return values


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("how", ["step", "run"])
def test_an_interrupt_before_any_line_loses_no_step_and_no_row(how: str, signals: int) -> None:
    calm, hurried, lines, draw = make(), make(), Lines(), random.Random(signals)
    one: dict[str, Callable[[lab.Session], Any]] = {
        "step": lambda session: session.step(),
        "run": lambda session: session.run(steps=1, progress=False),
    }
    lines.run(lambda: one[how](calm))
    most = lines.count
    while calm.steps_done < 80:
        calm.step()
    interrupted = 0
    while hurried.steps_done < 80:
        done = hurried.steps_done
        interrupted += lines.run(lambda: one[how](hurried), draw.randrange(1, most), signals)
        assert hurried.steps_done in (done, done + 1)
        assert len(hurried.history["steps"]) == hurried.steps_done, f"a step without a row, line {lines.at}"
        assert not hurried._runner.is_active
        with ThreadPoolExecutor(1) as others:
            assert others.submit(_is_free, hurried).result(), f"the lock was kept, line {lines.at}"
    assert interrupted > 20 or (how, signals) == ("run", 1)  # there, one alone is a pause
    assert rows(hurried) == rows(calm)
    assert [repr(e) for e in hurried.events.of(lab.events.LayerFrozen)] == [
        repr(e) for e in calm.events.of(lab.events.LayerFrozen)
    ]
    assert hurried.layers.frozen == calm.layers.frozen
    calm.close()
    hurried.close()


def _is_free(session: lab.Session) -> bool:
    if not session._lock.acquire(blocking=False):
        return False
    session._lock.release()
    return True


def _interrupted(note: list[str], before: str, behind: str) -> None:
    note.append(before)
    signal.raise_signal(signal.SIGINT)
    note.append(behind)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    note: list[str] = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        _interrupted(note, "before", "behind")
    assert note == ["before", "behind"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_inside_it_a_block_lets_them_through_and_what_came_before_too() -> None:
    note: list[str] = []
    with interrupts_held():
        with pytest.raises(KeyboardInterrupt), interrupts_let_through():
            _interrupted(note, "let through", "not here")
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts_let_through():
            note.append("nor here: one was kept")
        with pytest.raises(KeyboardInterrupt), interrupts_let_through(), interrupts_held():
            _interrupted(note, "held again", "until its end")
    assert note == ["let through", "held again", "until its end"]


def test_what_cleans_up_behind_an_interrupt_is_not_interrupted_again() -> None:
    note: list[str] = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            _interrupted(note, "cleaning", "cleaned")

    def held() -> None:
        with interrupts_held():
            with pytest.raises(KeyboardInterrupt), interrupts_let_through():
                work()
            note.append("behind")

    with pytest.raises(KeyboardInterrupt):  # the second one, at the end of the block
        held()
    assert note == ["cleaning", "cleaned", "behind"]


def test_an_endless_loop_in_a_held_block_can_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupts_held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # soon after: still held
        monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_an_interrupt_is_not_pythons_it_stays_so(handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_held():
            assert signal.getsignal(signal.SIGINT) == handler
        assert signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_was_put_inside_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    calls = []
    try:
        with interrupts_held():
            signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]


def test_other_threads_change_nothing() -> None:
    def other() -> None:
        with interrupts_held(), interrupts_let_through():
            found.append(interrupts._holder is None or not interrupts._holder.is_open)

    found: list[bool] = []
    with interrupts_held():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [True]
