"""What runs on each engine of a notebook's cluster: one session, one of the ranks, and answers for the notebook.

The functions here are called by name from `egeria_lab.integrations.cluster`; an engine keeps one session at a time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from egeria_lab import commands as c
from egeria_lab.engine.layer_board import LayerRow
from egeria_lab.engine.threads import available_cores
from egeria_lab.errors import TrainingError
from egeria_lab.events import Event
from egeria_lab.session import Session


@dataclass
class _Kept:
    """The session of this engine, and the receipts that the notebook waits for."""

    session: Session | None = None
    receipts: dict[int, c.Receipt] = field(default_factory=dict)


_kept = _Kept()


@dataclass(frozen=True, slots=True)
class Seen:
    """How far the notebook's copy of the run goes.

    Attributes:
        rewinds: how often history and events were put back.
        rows: rows of each table.
        events: number of events.
    """

    rewinds: tuple[int, int] = (0, 0)
    rows: Mapping[str, int] = field(default_factory=dict)
    events: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """What is new on rank 0 since the notebook last asked.

    Attributes:
        anew: history and events begin anew: an undo, say, put them back.
        rewinds: see `Seen`.
        rows: the new rows of each table, columns by name.
        events: the new events.
        landed: number of a command → the event that it led to.
        facts: what a dashboard shows besides: state, steps, settings, layers, ledger.
    """

    anew: bool
    rewinds: tuple[int, int]
    rows: dict[str, dict[str, Any]]
    events: list[Event]
    landed: dict[int, Event]
    facts: dict[str, Any]


def place() -> tuple[str, str, int]:
    """Host name, an address of it, and a free port: what is needed to meet on this engine."""
    host = socket.gethostname()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "127.0.0.1"
    return host, address, port


def build(how: str, rank: int, size: int, address: str, port: int, here: int, arguments: dict[str, Any]) -> None:
    """Become one of the ranks and make the session.

    Args:
        how: ``"make"`` or ``"load"``.
        rank, size: which of how many.
        address, port: where rank 0 listens.
        here: how many engines share this machine, and its cores.
        arguments: those of `Session`, or of `Session.load`.
    """
    close()
    if dist.is_initialized():  # of an earlier session, perhaps with engines that are gone
        dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    torch.set_num_threads(max(1, available_cores() // here))
    make: Any = Session if how == "make" else Session.load
    _kept.session = make(**{**arguments, "distributed": True})


def session() -> Session:
    """This engine's session.

    Raises:
        TrainingError: when there is none.
    """
    if _kept.session is None:
        raise TrainingError("this engine has no session: it was started anew, or the session was closed.")
    return _kept.session


def close() -> None:
    """Close this engine's session, if it has one."""
    _kept.receipts.clear()
    if _kept.session is not None:
        _kept.session.close()
        _kept.session = None


def call(name: str, *arguments: Any, **options: Any) -> Any:
    """Call one of the session's functions."""
    result = getattr(session(), name)(*arguments, **options)
    return None if isinstance(result, (Session, c.Receipt)) else result


def check(name: str, value: Any, layer: str | None) -> None:
    """Raise for a setting that cannot be changed so."""
    session().settings_book.check(name, value, layer)


def land() -> None:
    """Land what waits in the queue of rank 0, on every rank: no run is under way."""
    if session().state not in ("running", "paused"):
        session().land_commands("rest")


def exchange(commands: list[tuple[int, c.Command]], seen: Seen) -> News:
    """Put commands into the queue of rank 0 and answer with what is new.

    Args:
        commands: each with the notebook's number for it.
        seen: how far the notebook's copy goes.
    """
    mine = session()
    for number, command in commands:
        _kept.receipts[number] = mine.commands.put(command)
    landed = {number: receipt.event for number, receipt in _kept.receipts.items() if receipt.event is not None}
    for number in landed:
        del _kept.receipts[number]
    rewinds = (mine.history.rewinds, mine.events.rewinds)
    anew = rewinds != seen.rewinds
    start = {name: 0 if anew else seen.rows.get(name, 0) for name in mine.history}
    rows = {name: {k: v.copy() for k, v in mine.history[name].rows(start[name]).items()} for name in mine.history}
    events = mine.events.since(0 if anew else seen.events)
    return News(anew, rewinds, rows, list(events), landed, facts())


def facts() -> dict[str, Any]:
    """The slow state of the session, as plain records."""
    mine = session()
    ring = mine.undo_ring
    return {
        "name": mine.name,
        "state": mine.state,
        "error": None if mine.error is None else f"{type(mine.error).__name__}: {mine.error}",
        "steps_done": mine.steps_done,
        "planned_steps": mine.planned_steps,
        "steps_per_epoch": mine.steps_per_epoch,
        "epoch": mine.epoch,
        "device": str(mine.device),
        "layers": [_copy(row) for row in mine.layers],
        "settings": mine.settings(),
        "per_layer": dict(mine.settings_book.per_layer),
        "savings": mine.savings(),
        "undo": (ring.commands(), ring.undone(), ring.why_nothing()),
    }


def _copy(row: LayerRow) -> LayerRow:
    return LayerRow(**{name: getattr(row, name) for name in LayerRow.__slots__})
