"""Background, blocking and awaited runs: no step lost or made twice, whatever is pressed and when."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import egeria_lab as lab
from egeria_lab.errors import InvalidSettingError, TrainingError
from egeria_lab.events import (
    CommandRejected,
    EpochFinished,
    LayerFrozen,
    ReferenceRefreshed,
    RunFailed,
    RunPaused,
    RunResumed,
    RunStarted,
    RunStopped,
)

Make = Callable[..., lab.Session]
Losses = Callable[[lab.Session], list[float]]
RUN_EVENTS = (RunStarted, RunPaused, RunResumed, RunStopped, RunFailed)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def run_events(session: lab.Session) -> list[str]:
    return [type(event).__name__ for event in session.events.of(*RUN_EVENTS)]


class Gate:
    """Lets training through one step at a time, so that a test decides what happens between which steps."""

    def __init__(self) -> None:
        self.open = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        self.shut = True

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        if self.shut and threading.current_thread().name == "egeria-lab-trainer" and model.training:
            self.arrived.release()
            assert self.open.acquire(timeout=20)
        return model(batch[0]), batch[1]

    def wait_inside_a_step(self) -> None:
        assert self.arrived.acquire(timeout=20)

    def let_go(self) -> None:
        self.shut = False
        self.open.release(1000)


# --- background ------------------------------------------------------------------------------------------


def test_a_background_run_is_the_blocking_run(make_session: Make, losses: Losses) -> None:
    blocking, background = make_session(dropout=0.3, epochs=5), make_session(dropout=0.3, epochs=5)
    blocking.step(40)
    background.start()
    assert background.wait(30)
    assert losses(background) == losses(blocking)
    assert background.state == "finished"
    assert run_events(background) == ["RunStarted", "RunStopped"]
    started = background.events.of(RunStarted)[0]
    assert isinstance(started, RunStarted)
    assert (started.step, started.planned_steps, started.device, started.threads) == (0, 40, "cpu", 1)


def test_start_returns_at_once_and_trains_in_its_own_thread(make_session: Make) -> None:
    gate = Gate()
    session = make_session(forward=gate)
    session.start(steps=3)
    gate.wait_inside_a_step()
    assert session.state == "running"
    assert session.steps_done == 0
    assert not session.wait(0.01)
    gate.let_go()
    assert session.wait(20)
    assert (session.state, session.steps_done) == ("finished", 3)


def test_pause_and_resume_lose_and_repeat_nothing(make_session: Make, losses: Losses) -> None:
    blocking, session = make_session(dropout=0.3, epochs=10), make_session(dropout=0.3, epochs=10)
    blocking.step(80)
    session.start()
    for number in range(4):
        until(lambda number=number: session.steps_done > 10 * number or session.state == "finished")
        session.pause()
        until(lambda: session.state in ("paused", "finished"))
        done = session.steps_done
        time.sleep(0.01)
        assert session.steps_done == done
        assert not session.wait(0.01) or session.state == "finished"
        session.resume()
    assert session.wait(30)
    assert losses(session) == losses(blocking)
    assert [int(s) for s in session.history["steps"]["step"]] == list(range(1, 81))


def test_stop_and_start_again_lose_and_repeat_nothing(make_session: Make, losses: Losses) -> None:
    """traps row 137: stopped at step k is the same as having asked for k steps."""
    session = make_session(dropout=0.3, epochs=10)
    session.start()
    until(lambda: session.steps_done >= 3)
    session.stop()
    assert session.wait(20)
    k = session.steps_done
    assert session.state in ("stopped", "finished")
    asked = make_session(dropout=0.3, epochs=10)
    if k:
        asked.step(k)
    assert losses(session) == losses(asked)
    assert all(
        torch.equal(a, b)
        for a, b in zip(session.model.state_dict().values(), asked.model.state_dict().values(), strict=True)
    )
    session.evaluate()  # the model is usable
    if session.state == "stopped":
        session.start()
        assert session.wait(20)
    asked.step(80 - k)
    assert losses(session) == losses(asked)


def test_pause_stands_between_steps_and_commands_land_while_it_stands(make_session: Make) -> None:
    gate = Gate()
    session = make_session(forward=gate)
    session.start(steps=20)
    gate.wait_inside_a_step()
    session.pause()
    gate.let_go()
    until(lambda: session.state == "paused")
    assert session.steps_done == 1
    receipt = session.freeze("first")
    assert receipt.wait(20)
    assert receipt.state == "done"
    assert receipt.event is not None
    assert receipt.event.step == 1
    assert session.layers["first"].frozen
    assert session.steps_done == 1
    session.resume()
    assert session.wait(20)
    assert run_events(session) == ["RunStarted", "RunPaused", "RunResumed", "RunStopped"]
    assert session.history["steps"]["num_frozen"].tolist() == [0] + [1] * 19


def test_a_command_put_inside_a_step_lands_at_the_next_boundary(make_session: Make) -> None:
    """traps row 15: effective at the next step, with a receipt that says pending until then."""
    gate = Gate()
    session = make_session(forward=gate)
    session.start(steps=5)
    gate.wait_inside_a_step()
    receipt = session.freeze("first")
    assert receipt.state == "pending"
    assert "next step boundary" in repr(receipt)
    assert not session.layers["first"].frozen
    gate.let_go()
    assert session.wait(20)
    assert receipt.event is not None
    assert receipt.event.step == 1
    assert session.history["steps"]["num_frozen"].tolist() == [0, 1, 1, 1, 1]


def test_stop_while_paused(make_session: Make) -> None:
    session = make_session()
    session.start()
    session.pause()
    until(lambda: session.state == "paused")
    session.stop()
    assert session.wait(20)
    assert session.state == "stopped"
    assert run_events(session)[-2:] == ["RunPaused", "RunStopped"]


def test_buttons_pressed_twice_or_out_of_place_do_no_harm(make_session: Make, losses: Losses) -> None:
    session = make_session(epochs=2)
    for press in (session.pause, session.resume, session.stop):
        press()
        press()
    assert session.state == "idle"
    session.start()
    session.start()  # twice is once
    session.resume()
    assert session.wait(20)
    assert session.steps_done == 16
    session.pause()
    session.resume()
    session.stop()
    assert session.state == "finished"
    blocking = make_session(epochs=2)
    blocking.step(16)
    assert losses(session) == losses(blocking)
    assert run_events(session) == ["RunStarted", "RunStopped"]


def test_start_while_running_moves_the_end(make_session: Make) -> None:
    gate = Gate()
    session = make_session(forward=gate)
    session.start(steps=3)
    gate.wait_inside_a_step()
    session.start(steps=10)
    gate.let_go()
    assert session.wait(20)
    assert session.steps_done == 10


def test_start_right_after_stop_is_not_lost(make_session: Make) -> None:
    gate = Gate()
    session = make_session(forward=gate)
    session.start(steps=10)
    gate.wait_inside_a_step()
    session.stop()
    session.start(steps=6)
    gate.let_go()
    assert session.wait(20)
    assert session.steps_done == 6
    assert run_events(session) == ["RunStarted", "RunStopped", "RunStarted", "RunStopped"]


def test_stop_right_after_start_is_not_lost(make_session: Make) -> None:
    gate = Gate()
    session = make_session(forward=gate)
    session.start(steps=10)
    gate.wait_inside_a_step()
    session.start(steps=20)
    session.stop()
    gate.let_go()
    assert session.wait(20)
    assert (session.steps_done, session.state) == (1, "stopped")


def test_start_at_the_very_end_of_a_run_is_not_lost(make_session: Make) -> None:
    """Whoever is told that a run ended may start the next one at once."""
    session = make_session()
    again = []

    def once_more(event: Any) -> None:
        if not again:
            again.append(event)
            session.start(steps=4)

    session.subscribe(once_more, RunStopped)
    session.start(steps=3)
    until(lambda: session.steps_done == 7 and session.state == "finished")
    assert session.wait(20)
    assert run_events(session) == ["RunStarted", "RunStopped", "RunStarted", "RunStopped"]


def test_many_pauses_resumes_and_stops_from_many_threads(make_session: Make, losses: Losses) -> None:
    session = make_session(dropout=0.3, epochs=30)
    session.start()

    def press(seed: int) -> None:
        generator = __import__("random").Random(seed)
        for _ in range(60):
            generator.choice((session.pause, session.resume, session.start, session.stop, session.resume))()
            time.sleep(0.0005)

    threads = [threading.Thread(target=press, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if session.steps_done < session.planned_steps:
        session.start()
    session.resume()
    until(lambda: session.steps_done == 240, 60)
    assert session.wait(20)
    blocking = make_session(dropout=0.3, epochs=30)
    blocking.step(240)
    assert losses(session) == losses(blocking)


def test_stepping_by_hand_while_a_run_is_under_way_is_refused(make_session: Make) -> None:
    gate = Gate()
    session = make_session(forward=gate)
    session.start(steps=4)
    gate.wait_inside_a_step()
    for call in (session.step, lambda: session.run(steps=1, progress=False)):
        with pytest.raises(InvalidSettingError, match=r"a run is under way in the background"):
            call()
    gate.let_go()
    assert session.wait(20)
    session.step()
    assert session.steps_done == 5


def test_evaluating_while_training_waits_for_the_step_and_changes_nothing(make_session: Make, losses: Losses) -> None:
    """traps row 98: one lock; evaluate is safe from another thread."""
    blocking, session = make_session(dropout=0.3, epochs=10), make_session(dropout=0.3, epochs=10)
    blocking.step(80)
    session.start()
    results = [session.evaluate()["loss"] for _ in range(10)]
    assert session.wait(30)
    assert all(result is not None for result in results)
    assert losses(session) == losses(blocking)


def test_close_ends_the_thread(make_session: Make) -> None:
    for paused in (False, True):
        session = make_session()
        session.start()
        if paused:
            session.pause()
            until(lambda session=session: session.state == "paused")
        session.close()
        assert session.state in ("stopped", "finished")
        assert not session._runner.is_active
        done = session.steps_done
        time.sleep(0.01)
        assert session.steps_done == done


# --- errors ----------------------------------------------------------------------------------------------


class Failing:
    """A loss that raises at one step."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.requires_grad and targets.numel() == 8:
            self.calls += 1
            if self.calls == self.at:
                raise ZeroDivisionError("a fault of the loss")
        return nn.functional.cross_entropy(outputs, targets)


def test_an_error_in_the_background_is_kept_shown_and_raised_by_wait(make_session: Make) -> None:
    """traps row 103: the thread ends, the error is an event and in session.error, history is kept."""
    session = make_session(loss=Failing(at=4))
    session.start(steps=10)
    with pytest.raises(ZeroDivisionError, match=r"a fault of the loss"):
        session.wait(20)
    assert session.state == "failed"
    assert isinstance(session.error, ZeroDivisionError)
    assert not session._runner.is_active
    assert run_events(session) == ["RunStarted", "RunFailed"]
    failed = session.events.of(RunFailed)[0]
    assert isinstance(failed, RunFailed)
    assert failed.error == "ZeroDivisionError: a fault of the loss"
    assert failed.step == session.steps_done == 3
    assert len(session.history["steps"]) == 3


def test_after_an_error_the_run_goes_on_exactly(make_session: Make, losses: Losses) -> None:
    session, plain = make_session(loss=Failing(at=4)), make_session(loss=nn.functional.cross_entropy)
    session.start(steps=10)
    with pytest.raises(ZeroDivisionError):
        session.wait(20)
    session.start(steps=7)
    assert session.error is None
    assert session.wait(20)
    assert session.state == "finished"
    plain.step(10)
    assert losses(session) == losses(plain)


def test_run_raises_where_the_user_stands(make_session: Make) -> None:
    session = make_session(loss=Failing(at=2))
    with pytest.raises(ZeroDivisionError):
        session.run(steps=5, progress=False)
    assert session.state == "failed"
    assert isinstance(session.error, ZeroDivisionError)
    assert session.run(steps=2, progress=False) is not None
    assert session.state == "finished"


def test_a_command_that_was_waiting_when_the_run_failed_still_lands(make_session: Make) -> None:
    gate = Gate()
    session = make_session(forward=gate, loss=Failing(at=1))
    session.start(steps=5)
    gate.wait_inside_a_step()
    receipt = session.freeze("first")
    gate.let_go()
    with pytest.raises(ZeroDivisionError):
        session.wait(20)
    assert receipt.wait(20)
    assert receipt.state == "done"
    assert len(session.commands) == 0


def test_nothing_left_to_do_is_one_sentence(make_session: Make) -> None:
    session = make_session(epochs=1)
    session.run(progress=False)
    for call in (session.start, lambda: session.run(progress=False)):
        with pytest.raises(TrainingError, match=r"budget of 8 steps is used up"):
            call()
    for bad in ({"steps": 0}, {"epochs": -1}, {"steps": float("nan")}, {"steps": True}):
        with pytest.raises(InvalidSettingError, match=r"must be a number > 0"):
            session.start(**bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match=r"steps or epochs, not both"):
        session.run(steps=1, epochs=1)
    assert session.state == "finished"


# --- blocking and awaited --------------------------------------------------------------------------------


def test_run_until_a_condition_holds(make_session: Make) -> None:
    session = make_session()
    record = session.run(steps=30, until=lambda r: r.step == 7, progress=False)
    assert record is not None
    assert record.step == session.steps_done == 7
    assert session.state == "stopped"
    stopped = session.events.of(RunStopped)[0]
    assert isinstance(stopped, RunStopped)
    assert "until=" in stopped.reason


def test_run_with_a_progress_bar(make_session: Make, capsys: pytest.CaptureFixture[str]) -> None:
    session = make_session()
    session.run(steps=3)
    err = capsys.readouterr().err
    assert "TinyNet on synthetic" in err
    assert "3/3" in err


def test_pause_pressed_from_another_thread_gives_a_blocking_run_back(make_session: Make) -> None:
    """traps row 92: paused within one step."""
    session = make_session()
    pressed: list[int] = []

    def press(record: lab.StepRecord) -> bool:
        if record.step == 5:
            thread = threading.Thread(target=session.pause)
            thread.start()
            thread.join()
            pressed.append(record.step)
        return False

    session.run(steps=50, until=press, progress=False)
    assert session.steps_done == 5
    assert session.state == "paused"
    session.resume()  # goes on in the background
    assert session.wait(20)
    assert (session.state, session.steps_done) == ("finished", 50)


def test_stop_after_an_interrupted_cell(make_session: Make) -> None:
    session = make_session()
    session.run(steps=50, until=lambda r: session.pause() is not None or False, progress=False)
    assert session.state == "paused"
    session.stop()
    assert session.state == "stopped"
    assert run_events(session) == ["RunStarted", "RunPaused", "RunStopped"]


def test_five_and_five_and_pause(make_session: Make, losses: Losses) -> None:
    """traps row 140: 'run N more, then stand still', repeatedly."""
    session, plain = make_session(epochs=3), make_session(epochs=3)
    for _ in range(4):
        session.run(steps=5, progress=False)
    plain.step(20)
    assert losses(session) == losses(plain)
    assert session.planned_steps == 24


def in_own_loop(make: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
    """Run on a thread of its own: the main thread may have an event loop already (a browser beside it)."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(make())).result()


def test_awaiting_a_run(make_session: Make, losses: Losses) -> None:
    session, plain = make_session(), make_session()
    ticks = []

    async def main() -> bool:
        async def tick() -> None:
            while session.state != "finished":
                ticks.append(1)
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        done = await session.run_async(steps=40)
        await ticking
        return done

    assert in_own_loop(main)
    assert ticks  # the loop was free meanwhile
    plain.step(40)
    assert losses(session) == losses(plain)


def test_awaiting_a_failing_run_raises(make_session: Make) -> None:
    session = make_session(loss=Failing(at=2))
    with pytest.raises(ZeroDivisionError):
        in_own_loop(lambda: session.run_async(steps=5))


# --- interrupts ------------------------------------------------------------------------------------------


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
def test_an_interrupt_pauses_after_the_step_under_way(make_session: Make, losses: Losses) -> None:
    """A real SIGINT: traps rows 92, 101."""
    session, plain = make_session(dropout=0.3), make_session(dropout=0.3)

    def interrupt(record: lab.StepRecord) -> bool:
        if record.step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    session.run(steps=30, until=interrupt, progress=False)
    assert session.state == "paused"
    assert session.steps_done == 6
    assert session.error is None
    session.run(steps=24, progress=False)
    plain.step(30)
    assert losses(session) == losses(plain)


def test_the_second_interrupt_is_a_real_one(make_session: Make) -> None:
    session = make_session()

    def interrupt(outputs: Tensor, targets: Tensor) -> Tensor:
        if session.steps_done == 3 and outputs.requires_grad:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return nn.functional.cross_entropy(outputs, targets)

    session.trainer.loss = interrupt
    with pytest.raises(KeyboardInterrupt):
        session.run(steps=10, progress=False)
    assert session.state == "failed"
    session.trainer.loss = nn.functional.cross_entropy
    assert session.step().step == 4


def test_ctrl_c_in_a_program(tmp_path: Any) -> None:
    """A program in its own process, interrupted at a random moment, prints a consistent state and goes on."""
    program = textwrap.dedent("""
        import torch
        torch.set_num_threads(1)
        import egeria_lab as lab
        session = lab.Session("mlp", "digits", epochs=1000, freeze=None)
        print("ready", flush=True)
        session.run(progress=False)
        rows = len(session.history["steps"])
        print(session.state, rows == session.steps_done > 0, flush=True)
        session.run(steps=2, progress=False)
        print(session.state, session.steps_done - rows, flush=True)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "paused True\nfinished 2\n", err
    assert process.returncode == 0
    assert "Traceback" not in err


# --- commands from several threads -----------------------------------------------------------------------


def test_commands_from_four_threads_land_in_order_and_none_is_lost(make_session: Make) -> None:
    """traps row 95: a locked queue, applied once, in order, logged with the step."""
    session = make_session(freeze=lab.Plasticity(), epochs=2000)
    session.start()
    receipts: dict[int, list[Any]] = {number: [] for number in range(4)}

    def put(number: int) -> None:
        for position in range(50):
            receipts[number].append(session.override("freeze.tolerance", number + (position + 1) / 100))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [receipt for own in receipts.values() for receipt in own]
    assert all(receipt.wait(20) for receipt in everything)
    session.stop()
    session.wait(20)
    assert {receipt.state for receipt in everything} == {"done"}
    landed = [event.new for event in session.events if type(event).__name__ == "SettingChanged"]  # type: ignore[attr-defined]
    assert len(landed) == 200
    for number in range(4):
        own = [value for value in landed if number < value <= number + 0.5]  # type: ignore[operator]
        assert own == [number + (position + 1) / 100 for position in range(50)]
    steps = [event.step for event in session.events]
    assert steps == sorted(steps)
    olds = [event.old for event in session.events if type(event).__name__ == "SettingChanged"]  # type: ignore[attr-defined]
    assert olds[1:] == landed[:-1]  # each command saw what the one before it left


def test_commands_from_two_threads_while_nothing_runs(make_session: Make) -> None:
    session = make_session()
    receipts: list[Any] = []

    def put() -> None:
        for _ in range(100):
            receipts.append(session.freeze("first"))
            receipts.append(session.thaw("first"))

    threads = [threading.Thread(target=put) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(receipt.wait(5) for receipt in receipts)
    assert len(session.commands) == 0
    assert len(session.events) == 400
    assert len(session.optimizer.param_groups[0]["params"]) == len(list(session.model.parameters()))


def test_commands_put_while_another_thread_steps_do_not_stay_behind(make_session: Make) -> None:
    session = make_session(epochs=1000)
    receipts: list[Any] = []
    done = threading.Event()

    def put() -> None:
        while not done.is_set():
            receipts.append(session.pin("first"))
            receipts.append(session.unpin("first"))
            time.sleep(0.003)

    thread = threading.Thread(target=put)
    thread.start()
    for _ in range(20):
        session.step(5)
    done.set()
    thread.join()
    assert all(receipt.wait(5) for receipt in receipts)
    assert len(session.commands) == 0


def test_a_subscriber_that_puts_a_command_sees_it_land_at_the_next_boundary(make_session: Make) -> None:
    """In a run and in step() alike; never in the middle of a step."""
    traces = []
    for way in ("step", "start"):
        session = make_session()
        receipts: list[Any] = []
        session.subscribe(lambda _e, s=session, r=receipts: r.append(s.freeze("first")), EpochFinished)
        if way == "step":
            session.step(10)
        else:
            session.start(steps=10)
            assert session.wait(20)
        assert [receipt.state for receipt in receipts] == ["done"]
        frozen = session.events.of(LayerFrozen)[0]
        assert frozen.step == 8
        traces.append(session.history["steps"]["num_frozen"].tolist())
    assert traces[0] == traces[1] == [0] * 8 + [1, 1]


def test_a_command_put_in_the_middle_of_a_step_does_not_touch_that_step(make_session: Make) -> None:
    """The snapshot is announced between update and record of step 1; the record is of what that step was."""
    session = make_session(freeze=lab.Plasticity(interval_steps=1))
    receipts: list[Any] = []
    session.subscribe(lambda _event: receipts.append(session.freeze("first")), ReferenceRefreshed)
    record = session.step()
    assert record.frozen == ()
    assert session.history["steps"]["num_frozen"].tolist() == [0]
    assert [receipt.state for receipt in receipts] == ["done"]  # landed when the step was over
    assert session.step().frozen == ("first",)


def test_a_command_that_came_during_the_last_step_lands_when_step_returns(make_session: Make) -> None:
    session = make_session()
    receipts: list[Any] = []

    def put_from_elsewhere(outputs: Tensor, targets: Tensor) -> Tensor:
        if session.steps_done == 2 and outputs.requires_grad:
            thread = threading.Thread(target=lambda: receipts.append(session.freeze("first")))
            thread.start()
            thread.join()
            assert receipts[0].state == "pending"
        return nn.functional.cross_entropy(outputs, targets)

    session.trainer.loss = put_from_elsewhere
    session.step(3)
    assert receipts[0].state == "done"
    assert receipts[0].event.step == 3


def test_a_command_that_came_during_an_evaluation_lands_when_it_returns(make_session: Make) -> None:
    session = make_session()
    receipts: list[Any] = []

    def put_from_elsewhere(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        if not receipts:
            thread = threading.Thread(target=lambda: receipts.append(session.freeze("first")))
            thread.start()
            thread.join()
        return model(batch[0]), batch[1]

    session.trainer.forward = put_from_elsewhere
    session.evaluate()
    assert receipts[0].state == "done"


@pytest.mark.parametrize("call", ["save", "fork", "attribute"])
def test_a_command_that_came_while_the_model_was_being_read_lands_afterwards(
    make_session: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, call: str
) -> None:
    session = make_session()
    session.step()
    receipts: list[Any] = []

    def put_from_elsewhere() -> None:
        thread = threading.Thread(target=lambda: receipts.append(session.freeze("first")))
        thread.start()
        thread.join()
        assert receipts[0].state == "pending"

    def with_a_put(name: str) -> Callable[..., Any]:
        function = getattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2])

        def instead(*values: Any, **options: Any) -> Any:
            if not receipts:
                put_from_elsewhere()
            return function(*values, **options)

        return instead

    import egeria_lab.interpret.attribution

    for name in ("egeria_lab.engine.saving.capture", "egeria_lab.engine.forking.capture"):
        monkeypatch.setattr(name, with_a_put(name))
    name = "egeria_lab.interpret.attribution.attribute"
    monkeypatch.setattr(name, functools.wraps(egeria_lab.interpret.attribution.attribute)(with_a_put(name)))
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: session.save(tmp_path / "one.ckpt"),
        "fork": lambda: session.fork().close(),
        "attribute": lambda: session.attribute([0, 1]),
    }
    calls[call]()
    assert receipts[0].state == "done"
    assert session.layers["first"].frozen


def test_a_command_that_came_while_the_session_was_closed_is_rejected_in_a_sentence(make_session: Make) -> None:
    session = make_session()
    receipts: list[Any] = []

    def late() -> None:
        receipts.append(session.freeze("first"))

    with session._lock:  # as another thread that saves
        thread = threading.Thread(target=late)
        thread.start()
        thread.join()
        session.close()
    assert receipts[0].wait(0)
    assert "the session is closed" in repr(receipts[0])
    assert not session.layers["first"].frozen


def test_a_subscriber_that_answers_every_event_does_not_hang(make_session: Make) -> None:
    session = make_session()
    session.subscribe(lambda _event: session.freeze("first"))
    session.freeze("first")
    session.step(2)
    assert session.layers["first"].frozen
    assert len(session.events.of(CommandRejected)) > 0


def test_a_step_from_inside_a_step_is_refused(make_session: Make) -> None:
    session = make_session()
    failures: list[str] = []

    def greedy(_event: Any) -> None:
        try:
            session.step()
        except InvalidSettingError as error:
            failures.append(str(error))

    session.subscribe(greedy, EpochFinished)
    session.step(8)
    assert session.steps_done == 8
    assert len(failures) == 1
    assert "from inside a step" in failures[0]
