"""The what-if tuner's second mode: a fork of the run gets the tried settings, and both are really trained.

The run itself goes on as it is (it is started when it stands still), the fork beside it from the very same step for
as many steps. The fork is closed at the end, whoever ends it; nothing of it stays in the run.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from egeria_lab.dashboard.saving_rows import number
from egeria_lab.dashboard.series import spans, thin, trailing_mean
from egeria_lab.dashboard.tuner import TUNED
from egeria_lab.errors import EgeriaLabError

MOST_POINTS = 120
MEAN_STEPS = 20
MOST_STEPS = 1_000_000
CATCH_UP_SECONDS = 0.05
LOOK_SECONDS = 0.5


class Race:
    """Trains a fork beside one session; one at a time.

    Args:
        session: what is forked. It is trained too, and otherwise not touched.

    Attributes:
        version: grows whenever `state` may say something else.

    Example:
        >>> from egeria_lab.algorithms.freeze_policy import Plasticity
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", epochs=2, freeze=Plasticity(interval_steps=1, reference="fp32"))
        >>> _ = session.step(3)
        >>> race = Race(session)
        >>> race.start({"steps": 5, "tolerance": 0.4})
        >>> race.wait(60), session.wait(60)
        (True, True)
        >>> state = race.state()
        >>> state["phase"], state["from"], state["step"], session.steps_done, session.setting("freeze.tolerance")
        ('done', 3, 8, 8, 0.2)
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._fork: Any = None
        self._stopped = False
        self._started_run = False
        self._state: dict[str, Any] = {}
        self.version = 0

    @property
    def trains(self) -> bool:
        """Whether a fork is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, wish: Mapping[str, object]) -> None:
        """Fork and train in the background; what is wrong with the wish is said by `state`.

        Args:
            wish: ``"steps"``, and values of `egeria_lab.dashboard.tuner.TUNED` that the fork is to have.
        """
        with self._lock:
            if self.trains:
                return
            self._stopped = self._started_run = False
            self._state = {"phase": "forking", "changes": _changes(wish), "problem": ""}
            self.version += 1
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=context.run, args=(self._run, dict(wish)), name="egeria-lab-race", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the fork at its next step boundary, and pause the run if it was started for this."""
        self._stopped = True
        fork = self._fork
        if fork is not None:
            fork.stop()
            if self._started_run:
                self._session.pause()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the fork is closed; False when `timeout` seconds passed first."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return not self.trains

    def state(self) -> dict[str, Any]:
        """Where it stands, JSON-able and bounded.

        Returns:
            ``phase`` (``"forking"``, ``"training"``, ``"done"``, ``"stopped"`` or ``"failed"``), ``changes``,
            ``problem`` in one sentence, and once the fork trains ``from``, ``until``, ``step``, ``loss`` and
            ``run_loss`` (steps and means of 20 steps), ``valid`` and ``run_valid`` (steps and accuracies),
            ``spans`` of the fork's frozen layers and ``saved``, ``run_saved``: shares of the FLOPs of these steps.
        """
        fork, state = self._fork, dict(self._state)
        return {**state, **self._figures(fork)} if fork is not None else state

    def _run(self, wish: Mapping[str, object]) -> None:
        session = self._session
        try:
            changes = _changes(wish)
            steps = self._steps(wish)
            fork = session.fork(undo_bytes=0)
            try:
                self._train(fork, changes, steps)
            finally:
                self._state.update(self._figures(fork))
                self._fork = None
                fork.close()
        except EgeriaLabError as error:
            self._end("failed", _first_line(error))
        except Exception as error:  # whatever training raises is told to who asked, and the run is untouched
            self._end("failed", f"{type(error).__name__}: {_first_line(error)}")
        else:
            self._end("stopped" if self._stopped else "done", "")

    def _train(self, fork: Any, changes: Mapping[str, Any], steps: int) -> None:
        session = self._session
        for name, value in changes.items():
            fork.override(f"freeze.{name}", value)
        self._state |= {"phase": "training", "from": fork.steps_done, "until": fork.steps_done + steps}
        self._fork = fork
        fork.start(steps=steps)
        ahead = fork.steps_done + steps - session.steps_done
        if session.state != "running" and ahead > 0:
            self._started_run = True
            session.start(steps=steps)
        if self._stopped:  # asked for before there was something to stop
            self.stop()
        while not fork.wait(LOOK_SECONDS):
            if getattr(session, "_closed", False):  # nobody is left to look at it
                self.stop()
        while not self._stopped and session.state == "running" and session.steps_done < fork.steps_done:
            time.sleep(CATCH_UP_SECONDS)  # the slower of the two is shown to its end as well

    def _steps(self, wish: Mapping[str, object]) -> int:
        asked = number(wish.get("steps"))
        if asked is None or not 1 <= asked <= MOST_STEPS:
            raise EgeriaLabError(f"steps must be 1 to {MOST_STEPS:,}, got {wish.get('steps')!r}.")
        left = int(self._session.planned_steps - self._session.steps_done)
        if left < 1:
            raise EgeriaLabError("The plan is used up, there is nothing to train: lengthen it by +1 epoch first.")
        return min(round(asked), left)

    def _end(self, phase: str, problem: str) -> None:
        self._state |= {"phase": phase, "problem": problem}
        self.version += 1

    def _figures(self, fork: Any) -> dict[str, Any]:
        start, end = self._state.get("from"), self._state.get("until")
        if start is None or end is None:
            return {}
        frozen = [
            [fork.history.layer_names.index(span.layer), max(span.start, start), span.end]
            for span in spans(fork.events, fork.steps_done)
            if span.is_frozen and span.end >= start
        ]
        run = self._session.history
        return {
            "step": fork.steps_done,
            "loss": _loss(fork.history, start, end),
            "run_loss": _loss(run, start, end),
            "valid": _valid(fork.history, start, end),
            "run_valid": _valid(run, start, end),
            "saved": _saved(fork.history, start, end),
            "run_saved": _saved(run, start, end),
            "spans": frozen[-200:],
        }


def _changes(wish: Mapping[str, object]) -> dict[str, Any]:
    """The settings that the fork is to have."""
    found = {name: number(wish.get(name)) for name in TUNED}
    return {n: v if n == "tolerance" else round(v) for n, v in found.items() if v is not None}


def _rows(steps: Any, start: int, end: int) -> Any:
    return np.flatnonzero((steps > start) & (steps <= end))


def _loss(history: Any, start: int, end: int) -> list[list[float]]:
    """Steps and losses from the fork on, as means of the last steps, thinned."""
    rows = history.steps.rows()
    mine = _rows(rows["step"], start, end)
    mean = trailing_mean(np.nan_to_num(rows["loss"]), MEAN_STEPS)[mine]
    kept = thin(mean, MOST_POINTS)
    return [rows["step"][mine][kept].tolist(), [float(f"{value:.4g}") for value in mean[kept]]]


def _valid(history: Any, start: int, end: int) -> list[list[float]]:
    rows = history.epochs.rows()
    mine = _rows(rows["step"], start, end)
    mine = mine[np.isfinite(rows["valid_accuracy"][mine])][-MOST_POINTS:]
    return [rows["step"][mine].tolist(), [float(f"{value:.4g}") for value in rows["valid_accuracy"][mine]]]


def _saved(history: Any, start: int, end: int) -> float | None:
    rows = history.steps.rows()
    mine = _rows(rows["step"], start, end)
    full = float(np.nansum(rows["full_flops"][mine]))
    return 1 - float(np.nansum(rows["train_flops"][mine])) / full if full else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
