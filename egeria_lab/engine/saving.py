"""Save a session, load it again anywhere, and save by itself into a run directory."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from egeria_lab.algorithms.model_copy import unwrapped
from egeria_lab.checkpoint.file import read, write
from egeria_lab.checkpoint.folder import RunFolder, latest
from egeria_lab.checkpoint.journal import COMMANDED, NAME, Journal, recover
from egeria_lab.checkpoint.tree import Tree
from egeria_lab.engine.adopting import note_changes
from egeria_lab.engine.arguments import check_path, described, rebuilt
from egeria_lab.engine.session_state import SessionState, capture, check_between_steps, restore
from egeria_lab.errors import CheckpointError, EgeriaLabError, is_number, is_whole, require
from egeria_lab.events import CheckpointLoaded, CheckpointSaved, Event, SaveFailed

SAVE_EVERY_MINUTES = 5.0
KEEP_CHECKPOINTS = 3
MOST_NAMED = 20
"""A note names so many lost commands and counts the others."""


def save(session: Any, path: str | os.PathLike[str]) -> Path:
    """Write everything that decides a session's future to one file; from any thread, between two steps.

    Raises:
        CheckpointError: when it cannot be written; what was there before is untouched.
        InvalidSettingError: from inside a step.
    """
    session._check_open()
    check_between_steps(session, "save()")
    start = time.perf_counter()
    target = check_path("Session.save: path", path)
    with session._lock:
        session.land_if_alone()  # what was asked before is part of what is saved
        state = capture(session)
        session.bad_loss.keep(state)  # what goes on from the file would go back to it, too
    size = write(target, _whole(session, state))
    seconds = time.perf_counter() - start
    session.events.append(
        CheckpointSaved(step=state.step, by="user", path=str(target), num_bytes=size, seconds=seconds)
    )
    return target


def load(
    make: Callable[..., Any],
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    data: Any = None,
    **changes: Any,
) -> Any:
    """Build a session from a checkpoint and put it where it was.

    Args:
        make: builds a session from keyword arguments.
        path: a checkpoint, or a run directory, whose newest whole checkpoint is taken and which is saved into
            from then on.
        model: the model, when it was one of the user's own; its weights are overwritten.
        data: the data, when they were the user's own.
        changes: other arguments of `Session` that take the place of those it was made with.

    Raises:
        CheckpointError: when the checkpoint cannot be read or does not fit, or something must be given again.
    """
    place = check_path("Session.load: path", path)
    if place.is_dir():
        found, tree, notes = latest(place)
        notes += what_is_lost(place, tree)
        changes.setdefault("run_dir", place)
    else:
        found, tree, notes = place, read(place), []
    given = dict(changes)
    given.update({k: v for k, v in (("model", model), ("data", data)) if v is not None})
    state = _state_in(found, tree)
    arguments, more = rebuilt(tree["arguments"], given)
    notes += more
    if isinstance(arguments.get("model"), nn.Module):
        notes += set_flags(unwrapped(arguments["model"]), state.tree)
    asked = {name: value for name, value in changes.items() if "own" not in tree["arguments"].get(name, ("own",))}
    session = _made(make, arguments)
    try:
        notes += restore(session, state, asked=asked)
        note_changes(session, asked)
    except BaseException:
        session.close()
        raise
    if session._autosave is not None and place.is_dir() and session._autosave.folder.path.samefile(place):
        session._autosave.is_saved()
    session.events.append(CheckpointLoaded(step=session.steps_done, path=str(found), notes=tuple(notes)))
    return session


def set_flags(model: nn.Module, tree: Mapping[str, Any]) -> list[str]:
    """Switch gradients on and off as their owner had them when the state was taken, whatever was frozen then."""
    parked = {name for entry in tree["parts"]["freezer"]["parked"] for name in entry["trainable"]}
    changed = []
    for name, parameter in model.named_parameters():
        wanted = tree["model"]["trainable"].get(name, parameter.requires_grad) or name in parked
        if parameter.requires_grad != wanted:
            parameter.requires_grad_(wanted)
            changed.append(name)
    if not changed:
        return []
    return [
        "The model came with gradients switched on and off elsewhere; the checkpoint's layers are the ones that are "
        f"frozen ({len(changed)} tensors changed, {changed[0]} first)."
    ]


class Autosave:
    """Saves a session into a run directory by steps and by minutes, and keeps the journal between.

    What cannot be written is told by an event and tried again; training goes on.

    Args:
        session: the session.
        run_dir: the directory.
        every_steps: steps between two checkpoints, >= 1, or None.
        every_minutes: minutes between two checkpoints, > 0, or None; by a clock that does not jump.
        keep: checkpoints that stay.

    Raises:
        CheckpointError: when the directory cannot be used, or another session holds it.
    """

    def __init__(
        self,
        session: Any,
        run_dir: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_minutes: float | None = SAVE_EVERY_MINUTES,
        keep: int = KEEP_CHECKPOINTS,
    ) -> None:
        whole = every_steps is None or (is_whole(every_steps) and every_steps >= 1)
        require(whole, "Session", "save_every_steps", every_steps, "a whole number >= 1 or None")
        valid = every_minutes is None or (is_number(every_minutes) and every_minutes > 0)
        require(valid, "Session", "save_every_minutes", every_minutes, "a number > 0 or None")
        self.folder = RunFolder(check_path("Session.run_dir", run_dir), keep)
        self._session = session
        self._every_steps = every_steps
        self._every_seconds = None if every_minutes is None else 60 * every_minutes
        self._saved_at = time.monotonic()
        self._saved_step = session.steps_done
        self._failing: set[str] = set()
        try:
            self.journal = Journal(self.folder.path / NAME, session.history, session.events)
        except CheckpointError:
            self.folder.close()
            raise
        self._unsubscribe = [session.events.subscribe(self._after_command, kind) for kind in COMMANDED]

    def after_step(self) -> None:
        """Look at a finished step, on the thread that trains: journal, and a checkpoint when one is due."""
        session = self._session
        steps, seconds = session.steps_done - self._saved_step, time.monotonic() - self._saved_at
        due = self._every_steps is not None and steps >= self._every_steps
        due = due or (self._every_seconds is not None and seconds >= self._every_seconds)
        if due or session.steps_done >= session.planned_steps:
            self.save()
        self._try("journal", self.journal.note)

    def save(self) -> None:
        """Save now."""
        start = time.perf_counter()
        session = self._session
        self._saved_at, self._saved_step = time.monotonic(), session.steps_done

        def write_down() -> None:
            self._try("journal", self.journal.flush)
            state = capture(session)
            session.bad_loss.keep(state)
            path, size = self.folder.save(session.steps_done, _whole(session, state))
            seconds = time.perf_counter() - start
            session.events.append(
                CheckpointSaved(step=session.steps_done, path=str(path), num_bytes=size, seconds=seconds)
            )

        self._try("checkpoint", write_down)

    def is_saved(self) -> None:
        """The newest checkpoint there is what the session was loaded from: the next one is due as if never stopped."""
        self._saved_step = self._session.steps_done

    def close(self, save: bool = True) -> None:
        """Save what was trained since the last checkpoint, and give the directory back."""
        if save and self._session.steps_done != self._saved_step:
            self.save()
        for end in self._unsubscribe:
            end()
        self.journal.close()
        self.folder.close()

    def _after_command(self, event: Event) -> None:
        """A command may land between two steps that are far apart: the journal has it at once."""
        if event.by not in ("rule", "session"):
            self._try("journal", self.journal.note)

    def _try(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
            self._failing.discard(what)
        except Exception as error:  # whatever it is: a run does not end because it cannot be saved
            if what not in self._failing:  # said once, until it works again
                self._failing.add(what)
                reason = (
                    str(error) if isinstance(error, (EgeriaLabError, OSError)) else f"{type(error).__name__}: {error}"
                )
                self._session.events.append(SaveFailed(step=self._session.steps_done, reason=reason))


def _made(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    unknown = [name for name in arguments if name not in inspect.signature(make).parameters]
    if unknown:
        raise CheckpointError(
            f"this version of egeria_lab has no argument {unknown[0]}= that a session could be made with."
        )
    try:
        return make(**arguments)
    except TypeError as error:  # a value of the wrong kind in a file
        raise CheckpointError(f"the checkpoint's arguments cannot be used ({error}).") from error


def _whole(session: Any, state: SessionState) -> Tree:
    return {"arguments": described(session._arguments), "state": state.tree}


def _state_in(path: Path, tree: Tree) -> SessionState:
    try:
        state, arguments = tree["state"], tree["arguments"]
        known = isinstance(arguments, dict) and all(isinstance(what, dict) for what in arguments.values())
        _ = [state[name] for name in ("model", "optimizer", "layers", "data", "rule", "graphs")]
        _ = [entry["trainable"] for entry in state["parts"]["freezer"]["parked"]]
        if not known or not is_whole(state["step"]) or state["step"] < 0:
            raise KeyError("step")
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} holds no session (it lacks {error}).") from error
    return SessionState(state["step"], state)


def what_is_lost(place: Path, tree: Tree) -> list[str]:
    """What a run made after its checkpoint and nothing saved, as far as its journal tells, in at most one sentence."""
    try:
        history, events = recover(place / NAME)
        step, saved = int(tree["state"]["step"]), list(tree["state"]["parts"]["events"]["events"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return []  # no journal, or no session: what follows says so
    same = len(saved) <= len(events) and all(repr(a) == repr(b) for a, b in zip(saved, events, strict=False))
    later = events[len(saved) :] if same else [event for event in events if event.step > step]
    commands = [e for e in later if isinstance(e, COMMANDED) and e.by not in ("rule", "session")]
    steps = max(0, int(max(history.steps["step"], default=0)) - step)
    lost = [f"{n:,} {what}{'s' if n != 1 else ''}" for n, what in ((steps, "step"), (len(commands), "command")) if n]
    if not lost:
        return []
    named = "; ".join(f"step {event.step}: {event.sentence()}" for event in commands[:MOST_NAMED])
    more = f"; and {len(commands) - MOST_NAMED:,} more" if len(commands) > MOST_NAMED else ""
    verb = "is" if steps + len(commands) == 1 else "are"
    return [f"{' and '.join(lost)} after the checkpoint {verb} lost{': ' if named else ''}{named}{more}."]
