"""Steer one session from several threads at once, by chance, and see that nothing is lost and nothing stays."""

from __future__ import annotations

import gc
import multiprocessing
import random
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch.utils.data import DataLoader

from egeria_lab import data, models
from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.commands import Receipt
from egeria_lab.errors import EgeriaLabError
from egeria_lab.session import Session

THREADS = 4
PATIENCE_SECONDS = 120.0
"""What has not come to its end after this stands still."""


def stress(seconds: float, *, threads: int = THREADS, workers: int = 2, seed: int = 0) -> dict[str, int]:
    """Call pause, resume, override, freeze, thaw, undo, redo, evaluate, fork and save by chance while training runs.

    Args:
        seconds: how long.
        threads: how many threads call.
        workers: processes that read the training data.
        seed: decides the calls.

    Returns:
        Counts by name: ``calls``, ``commands``, ``rejected``, ``steps``, and what should be 0: ``commands_lost``
        (neither done nor rejected), ``errors`` (not ours), ``stuck_threads``, ``threads_left``, ``processes_left``,
        ``sessions_left`` (in memory after `close`).
    """
    before = set(threading.enumerate())
    alive: list[weakref.ref[Any]] = []
    with tempfile.TemporaryDirectory() as place:
        found = _steer(Path(place), seconds, threads, workers, seed, alive)
    gc.collect()
    deadline = time.monotonic() + 5
    while _left(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    found["threads_left"] = len(_left(before))
    found["processes_left"] = len(multiprocessing.active_children())
    found["sessions_left"] = sum(reference() is not None for reference in alive)
    return found


def _left(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("egeria-lab")]


def _steer(
    place: Path, seconds: float, threads: int, workers: int, seed: int, alive: list[weakref.ref[Any]]
) -> dict[str, int]:
    digits = data.load("digits")
    train: DataLoader[Any] = DataLoader(cast("Any", digits.train), batch_size=64, shuffle=True, num_workers=workers)
    model = models.build("mlp", input_shape=digits.input_shape, num_classes=digits.num_classes or 10, seed=seed)
    session = Session(
        model, (train, digits.valid), epochs=10_000, lr=0.05, run_dir=place / "run",
        save_every_steps=50, freeze=Plasticity(interval_steps=2, window=3, patience=2, bootstrap_change=5.0),
    )  # fmt: skip
    alive.append(weakref.ref(session))
    receipts: list[Receipt] = []
    errors: list[BaseException] = []
    calls = [0] * threads
    end = time.monotonic() + seconds
    session.start()

    def work(number: int) -> None:
        draw = random.Random(seed * threads + number)
        while time.monotonic() < end:
            try:
                result = _call(session, draw, place / f"{number}.ckpt", alive)
                if isinstance(result, Receipt):
                    receipts.append(result)
            except EgeriaLabError:
                pass  # said in a sentence: nothing to undo, a run is under way …
            except BaseException as error:
                errors.append(error)
            calls[number] += 1
            time.sleep(draw.random() * 0.02)

    callers = [threading.Thread(target=work, args=(n,), name=f"chance-{n}", daemon=True) for n in range(threads)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(seconds + PATIENCE_SECONDS)
    stuck = sum(caller.is_alive() for caller in callers)
    session.resume()
    lost = sum(not receipt.wait(PATIENCE_SECONDS) for receipt in receipts)
    session.stop()
    stuck += not session.wait(PATIENCE_SECONDS)
    steps = session.steps_done
    if not stuck:
        session.close()
    return {
        "calls": sum(calls), "commands": len(receipts), "rejected": sum(r.state == "rejected" for r in receipts),
        "steps": steps, "commands_lost": lost, "errors": len(errors), "stuck_threads": stuck,
    }  # fmt: skip


def _call(session: Session, draw: random.Random, path: Path, alive: list[weakref.ref[Any]]) -> Any:
    layer = draw.choice(session.layers.names[:-1])

    def fork() -> None:
        second = session.fork()
        alive.append(weakref.ref(second))
        second.step()
        second.close()

    def change(call: Callable[[], Any], weight: int) -> list[Callable[[], Any]]:
        return [call] * weight

    return draw.choice(
        [
            *change(session.pause, 2),
            *change(session.resume, 4),
            *change(lambda: session.start(), 1),
            *change(session.stop, 1),
            *change(lambda: session.freeze(layer), 3),
            *change(lambda: session.thaw(layer), 3),
            *change(lambda: session.override("freeze.tolerance", draw.choice([0.2, 0.7, 2.0])), 2),
            *change(lambda: session.override("optimizer.lr", draw.choice([0.01, 0.05])), 2),
            *change(session.undo, 3),
            *change(session.redo, 2),
            *change(session.evaluate, 2),
            *change(fork, 1),
            *change(lambda: session.save(path), 1),
        ]
    )()
