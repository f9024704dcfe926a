"""The ways of calling `step()` again and again: in a background thread, in the calling thread, or awaited.

The file is one piece because start, pause, stop and the end of a run are one state machine.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from egeria_lab.commands import CommandQueue
from egeria_lab.distributed.group import FollowingEndedError
from egeria_lab.engine.interrupts import interrupts_held, interrupts_let_through
from egeria_lab.errors import InvalidSettingError
from egeria_lab.events import EventLog, RunFailed, RunPaused, RunResumed, RunStarted, RunStopped


class Steppable(Protocol):
    """What a runner needs from a session."""

    events: EventLog
    commands: CommandQueue

    @property
    def steps_done(self) -> int:
        """Finished steps."""

    def advance(self) -> Any:
        """Train one step."""

    def land_commands(self) -> None:
        """Carry out what waits in the queue."""

    @property
    def beat(self) -> float | None:
        """So often, in seconds, a paused run looks after its commands without being told; None for never."""

    def run_ended(self, outcome: str) -> None:
        """Carry out what waits in the queue: no run is under way any more."""

    def describe_run(self) -> tuple[str, int]:
        """Device and number of threads."""


class Runner:
    """Runs a session and knows what it is doing.

    One background thread at most. It is started in a copy of the caller's context, so that what it prints
    appears under the cell that started it.

    Attributes:
        state: ``"idle"``, ``"running"``, ``"paused"``, ``"stopped"``, ``"finished"`` or ``"failed"``.
        error: what a failed run raised, or None.
    """

    def __init__(self, session: Steppable, *, paused: bool = False) -> None:
        self._session = session
        self._hold = paused  # the first background run waits for `resume`
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._want_pause = False
        self._want_stop = False
        self._interrupted = False
        self._start_again = False
        self._looping = False
        self._target = 0
        self.state = "idle"
        self.error: BaseException | None = None

    @property
    def is_active(self) -> bool:
        """True while a thread is inside the training loop, also when it stands still."""
        return self._looping

    def check_free(self) -> None:
        """Raise when a run is under way, so that two threads never train one model.

        Raises:
            InvalidSettingError: when it is.
        """
        if self._looping:
            raise InvalidSettingError(
                "a run is under way in the background; pause() or stop() it, or wait() for it, first."
            )

    def shut_down(self) -> None:
        """End the run, if any, and wait for its thread; errors stay in `error`."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            while thread.ident is None and self._looping:  # `start`, in another thread, is about to start it
                time.sleep(0.001)
            if thread.ident is not None:
                thread.join()

    def start(self, target_step: int) -> None:
        """Train up to `target_step` in the background and return at once.

        While a run is under way this only moves its end; a paused run goes on.
        """
        with self._condition:
            self._target = target_step
            if self._looping:
                self._start_again = True  # a loop that is about to end, or to stop, goes on instead
                self._resume_locked()
                return
            self._begin_locked()
            self._want_pause, self._hold = self._hold, False
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=lambda: context.run(self._run_in_background), name="egeria-lab-trainer", daemon=True
            )
        self._announce_start()
        _running.add(self)
        self._thread.start()

    def pause(self) -> None:
        """Stand still at the next step boundary; everything is kept."""
        with self._condition:
            if self.state == "running":
                self._want_pause = True

    def resume(self) -> None:
        """Go on after a pause; after an interrupted cell, go on in the background."""
        if self.state == "paused" and not self._looping:
            self.start(self._target)
            return
        with self._condition:
            self._hold = False
            self._resume_locked()

    def stop(self) -> None:
        """End at the next step boundary; the model is usable and training can be started again."""
        with self._condition:
            if self._looping:
                self._want_stop, self._start_again = True, False
                self._condition.notify_all()
                return
            was_paused = self.state == "paused"
            if was_paused:
                self.state = "stopped"
        if was_paused:  # by an interrupted cell: no loop is there to say so
            self._session.events.append(RunStopped(step=self._session.steps_done, by="user", reason="asked for"))

    def nudge(self) -> None:
        """Tell a paused run that commands are waiting."""
        with self._condition:
            self._condition.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the background run has ended; True if it has.

        Raises:
            Exception: whatever the failed run raised.
        """
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            while thread.ident is None and self._looping:
                time.sleep(0.001)
            if thread.ident is not None:
                thread.join(timeout)
            if thread.is_alive():
                return False
        if self.state == "failed" and self.error is not None:
            raise self.error
        return not self.is_active

    async def wait_async(self) -> bool:
        """As `wait`, without blocking the event loop."""
        while self.is_active or (self._thread is not None and self._thread.is_alive()):
            await asyncio.sleep(0.05)
        return self.wait(0)

    def run_here(self, target_step: int, until: Callable[[Any], bool] | None, on_step: Callable[[Any], None]) -> None:
        """Train up to `target_step` in the calling thread.

        The first interrupt (Ctrl-C, or the kernel's stop button) pauses cleanly after the step under way.
        """
        with self._interrupts_pause(), interrupts_held():
            with self._condition:
                self.check_free()
                self._target = target_step
                self._begin_locked()
            self._announce_start()
            self._loop(until, on_step, blocking=True)
        if self.state == "failed" and self.error is not None:
            raise self.error

    def _begin_locked(self) -> None:
        self.state, self.error, self._looping = "running", None, True
        self._want_pause = self._want_stop = self._interrupted = self._start_again = False

    def _announce_start(self) -> None:
        device, threads = self._session.describe_run()
        try:
            self._session.events.append(
                RunStarted(
                    step=self._session.steps_done,
                    by="user",
                    planned_steps=self._target,
                    device=device,
                    threads=threads,
                )
            )
        except BaseException:  # an interrupt while somebody was being told: nothing has begun
            with self._condition:
                self.state, self._looping = "stopped", False
                if self._thread is not None and not self._thread.is_alive():
                    self._thread = None
            raise

    def _resume_locked(self) -> None:
        self._want_pause = False
        self._condition.notify_all()

    def _run_in_background(self) -> None:
        self._loop(None, lambda _record: None, blocking=False)

    def _loop(self, until: Callable[[Any], bool] | None, on_step: Callable[[Any], None], *, blocking: bool) -> None:
        while True:
            outcome, reason = "failed", ""
            try:
                with interrupts_let_through():
                    outcome, reason = self._train(until, on_step, blocking)
            except FollowingEndedError as end:
                outcome, reason = "stopped", str(end)
            except BaseException as error:  # kept, shown and raised again where the user stands
                self.error = error
            if not self._end(outcome, reason):
                return
            self._announce_start()

    def _train(
        self, until: Callable[[Any], bool] | None, on_step: Callable[[Any], None], blocking: bool
    ) -> tuple[str, str]:
        """Step up to the target; answers with how it ended and why."""
        session = self._session
        while session.steps_done < self._target:
            if self._want_pause and not self._want_stop:
                if blocking:  # nobody could resume a blocked cell: a pause gives it back
                    return "paused", ""
                self._stand_still()
            if self._want_stop:
                return "stopped", "asked for"
            self._start_again = False
            record = session.advance()
            on_step(record)
            if until is not None and until(record):
                return "stopped", "the condition given as until= holds"
        return "finished", "the planned steps are done"

    def _end(self, outcome: str, reason: str) -> bool:
        """Announce the end and become free; True when `start` came meanwhile and training goes on."""
        session = self._session
        step = session.steps_done
        if outcome == "failed":
            error = self.error
            session.events.append(RunFailed(step=step, error=f"{type(error).__name__}: {error}"))
        elif outcome == "paused":
            session.events.append(RunPaused(step=step, by="user"))
        else:
            by = "session" if outcome == "finished" else "user"
            session.events.append(RunStopped(step=step, by=by, reason=reason))
        with self._condition:
            again = self._start_again and outcome in ("finished", "stopped") and step < self._target
            self._start_again = self._want_pause = self._want_stop = False
            if not again:
                self.state, self._looping = outcome, False
        if not again:
            session.run_ended(outcome)  # what was put after the last step boundary lands
        return again

    def _stand_still(self) -> None:
        session = self._session
        with self._condition:
            self.state = "paused"
        session.events.append(RunPaused(step=session.steps_done, by="user"))
        while True:
            session.land_commands()
            with self._condition:
                if not self._want_pause or self._want_stop:
                    self.state = "running"
                    break
                if not len(session.commands):
                    self._condition.wait(session.beat)
        if not self._want_stop:
            session.events.append(RunResumed(step=session.steps_done, by="user"))

    @contextmanager
    def _interrupts_pause(self) -> Iterator[None]:
        """Turn the first SIGINT into a pause; a second one interrupts for real."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handler(_number: int, _frame: Any) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            self._want_pause = True

        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


_running: weakref.WeakSet[Runner] = weakref.WeakSet()


def _end_all() -> None:
    """End background runs before the interpreter goes: a thread inside torch may not outlive it."""
    for runner in list(_running):
        runner.shut_down()


atexit.register(_end_all)
