"""Do a recorded run again from its seed, arguments and commands, and compare every loss and every freeze."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from egeria_lab.checkpoint.file import read
from egeria_lab.checkpoint.folder import latest
from egeria_lab.engine.arguments import check_path, rebuilt
from egeria_lab.engine.budget import Budget
from egeria_lab.engine.command_log import CommandLog
from egeria_lab.errors import CheckpointError
from egeria_lab.events import (
    BatchSkipped,
    BootstrapFinished,
    CommandRejected,
    EpochFinished,
    Event,
    FreezeBlocked,
    LayerFrozen,
    LayerPinned,
    LayerSettling,
    LayerThawed,
    LayerUnpinned,
    MaskUpdated,
    ReferenceRefreshed,
    SamplesSieved,
    SettingChanged,
    SettlingEnded,
)

COMPARED = (
    BatchSkipped, BootstrapFinished, CommandRejected, EpochFinished, FreezeBlocked, LayerFrozen, LayerPinned,
    LayerSettling, LayerThawed, LayerUnpinned, MaskUpdated, ReferenceRefreshed, SamplesSieved, SettingChanged,
    SettlingEnded,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What doing a run again showed.

    Attributes:
        path: the checkpoint that tells the run.
        steps: steps that were done again.
        commands: commands that were given again.
        difference: the first thing that came out otherwise, or None.
    """

    path: str
    steps: int
    commands: int
    difference: str | None

    @property
    def exact(self) -> bool:
        """True when every loss and every event was the same to the bit."""
        return self.difference is None

    def __repr__(self) -> str:
        if self.exact:
            return f"Replay({self.steps:,} steps and {self.commands:,} commands: every loss and every event the same)"
        return f"Replay(not the same: {self.difference})"


def replay(
    make: Callable[..., Any], path: str | os.PathLike[str], *, model: Any = None, data: Any = None, **changes: Any
) -> Replay:
    """Do a recorded run again and compare.

    Args:
        make: builds a session from keyword arguments.
        path: a run directory or a checkpoint.
        model: the model as it was before training, when it was one of the user's own.
        data: the data, when they were the user's own.
        changes: other arguments, for objects of one's own (``loss=``, ``forward=``).

    Raises:
        CheckpointError: when the record cannot be read, or the run went on with other arguments in between.
    """
    place = check_path("replay: path", path)
    found, tree, _ = latest(place) if place.is_dir() else (place, read(place), [])
    given = {**changes, **{k: v for k, v in (("model", model), ("data", data)) if v is not None}}
    parts, log = tree["state"]["parts"], CommandLog()
    log.load_state_dict(parts["commands"])
    if log.changed is not None:
        raise CheckpointError(f"{found} cannot be replayed: it went on from a checkpoint with another {log.changed}.")
    arguments, _ = rebuilt(tree["arguments"], given)
    session = make(**arguments)
    try:
        commands, difference = _do_again(session, log, tree["state"]["step"], _recorded(parts))
    finally:
        session.close()
    return Replay(path=str(found), steps=tree["state"]["step"], commands=commands, difference=difference)


@dataclass(frozen=True, slots=True)
class _Record:
    losses: list[float]
    events: list[Event]


def _recorded(parts: dict[str, Any]) -> _Record:
    steps = parts["history"]["steps"]
    losses = steps["rows"][steps["columns"].index("loss")].tolist()
    return _Record(losses, _compared(parts["events"]["events"]))


def _compared(events: Iterable[Event]) -> list[Event]:
    """Commands that were undone are not given again, so undoing is not compared either."""
    undoing = ("Undo(", "Redo(")
    return [
        event
        for event in events
        if isinstance(event, COMPARED)
        and not (isinstance(event, CommandRejected) and event.command.startswith(undoing))
    ]


def _do_again(session: Any, log: CommandLog, steps: int, record: _Record) -> tuple[int, str | None]:
    commands = 0
    while True:
        for entry in log.at(session.steps_done):
            if isinstance(entry, Budget):
                session.budget.total_steps, session.budget.decided = entry.total_steps, entry.decided
            else:
                commands += 1
                session.commands.put(entry)
        done = session.steps_done
        if done >= steps:
            break
        loss = session.step().loss
        if loss != record.losses[done]:
            return commands, f"the loss of step {done + 1} is {loss!r} and was {record.losses[done]!r}"
    events = _compared(session.events)
    for now, then in zip(events, record.events, strict=False):
        if repr(now) != repr(then):
            return commands, f"step {then.step}: “{now.sentence()}” instead of “{then.sentence()}”"
    if len(events) != len(record.events):
        return commands, f"there are {len(events)} events and were {len(record.events)}"
    return commands, None
