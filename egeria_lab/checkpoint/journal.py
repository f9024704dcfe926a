"""The record of a run between checkpoints: rows and events as JSON lines, appended as they come.

A line is ``checksum payload``. A kill in the middle of a line leaves a torn last one, which is left out; so is
everything behind a line that is damaged. When training goes on from an earlier step (a checkpoint, an undo), a
line says so, and what came after that step counts no more.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from egeria_lab.errors import CheckpointError, EgeriaLabError
from egeria_lab.events import (
    CommandRedone,
    CommandUndone,
    Event,
    EventLog,
    LayerFrozen,
    LayerPinned,
    LayerThawed,
    LayerUnpinned,
    SamplesDiscarded,
    SamplesRestored,
    SettingChanged,
    event_from_dict,
)
from egeria_lab.history import Array, History

NAME = "journal.jsonl"
FLUSH_SECONDS = 1.0
"""A killed process loses no more of the record than this."""
RETRY_SECONDS = 30.0
COMMANDED = (
    LayerFrozen, LayerThawed, LayerPinned, LayerUnpinned, SettingChanged, SamplesDiscarded, SamplesRestored,
    CommandUndone, CommandRedone,
)  # fmt: skip
"""Events that a command leaves, which nobody gives again by himself: they are flushed at once."""


class Journal:
    """Appends what is new in the tables and events of a session to a file.

    Args:
        path: the file.
        history: the tables.
        events: the events.

    Example:
        >>> import tempfile
        >>> from egeria_lab.events import LayerThawed
        >>> history, events = History(["a"]), EventLog()
        >>> with tempfile.TemporaryDirectory() as place:
        ...     journal = Journal(Path(place) / NAME, history, events)
        ...     history.steps.append(step=1, loss=0.5)
        ...     events.append(LayerThawed(step=1, layer="a"))
        ...     journal.note()
        ...     journal.close()
        ...     recovered, happened = recover(Path(place) / NAME)
        >>> recovered.steps["loss"].tolist(), happened[0].sentence()
        ([0.5], 'a thawed by session: ')
    """

    def __init__(self, path: Path, history: History, events: EventLog) -> None:
        self.path = path
        self._history = history
        self._events = events
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._flushed = time.monotonic()
        self._retry_at = 0.0
        self._urgent = False
        self._rewinds = (history.rewinds, events.rewinds)
        self._rows: dict[str, Array] = {}
        self._told: list[Event] = []
        self._open()

    def note(self) -> None:
        """Write down what is new; flushed at most once a second, and at once when a command landed.

        Raises:
            CheckpointError: when the file cannot be written to; it is tried again half a minute later.
        """
        with self._lock:
            if self._file is None and time.monotonic() < self._retry_at:
                return
            try:
                if self._file is None:
                    self._open()
                self._write_new()
                if (self._urgent or time.monotonic() - self._flushed >= FLUSH_SECONDS) and self._file is not None:
                    self._file.flush()
                    self._flushed, self._urgent = time.monotonic(), False
                    if not self.path.exists():  # somebody removed it
                        self._file.close()
                        self._file = None
            except (OSError, ValueError) as error:
                self._give_up()
                raise CheckpointError(f"the journal {self.path} cannot be written ({error}).") from error

    def flush(self) -> None:
        """Write everything down for good."""
        self.note()
        with self._lock:
            try:
                if self._file is not None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            except (OSError, ValueError) as error:
                self._give_up()
                raise CheckpointError(f"the journal {self.path} cannot be written ({error}).") from error

    def close(self) -> None:
        """Write what is left and close the file; a full disk is no reason to fail now."""
        with contextlib.suppress(CheckpointError):
            self.flush()
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.close()

    def _open(self) -> None:
        """Begin with a line of one's own, also behind a torn one, and with the whole of what counts now."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
            self._file.write("\n")
        except OSError as error:
            raise CheckpointError(f"the journal {self.path} cannot be written ({error.strerror or error}).") from error
        columns = {name: list(table.columns) for name, table in self._history.items()}
        self._line({"begin": {"layers": list(self._history.layer_names), "columns": columns}})
        self._rows = {name: table.state_dict()["rows"][:, :0] for name, table in self._history.items()}
        self._told = []

    def _write_new(self) -> None:
        self._take_back_if_rewound()
        for name, table in self._history.items():
            written, rows = self._rows[name].shape[1], table.state_dict()["rows"]
            for row in rows[:, written:].T.tolist():
                self._line({"row": [name, row]})
            self._rows[name] = rows
        for event in self._events.since(len(self._told)):
            self._line({"event": event.to_dict()})
            self._told.append(event)
            self._urgent = self._urgent or (isinstance(event, COMMANDED) and event.by not in ("rule", "session"))

    def _take_back_if_rewound(self) -> None:
        """After a restore: tell how much of what was written still holds."""
        now = (self._history.rewinds, self._events.rewinds)
        if now == self._rewinds:
            return
        self._rewinds = now
        for name, table in self._history.items():
            self._rows[name] = self._rows[name][:, : _common(self._rows[name], table.state_dict()["rows"])]
        same = 0
        for mine, theirs in zip(self._told, list(self._events), strict=False):
            if mine != theirs and repr(mine) != repr(theirs):  # NaN is not equal to itself
                break
            same += 1
        del self._told[same:]
        self._line({"back": {"tables": {name: rows.shape[1] for name, rows in self._rows.items()}, "events": same}})

    def _line(self, record: Mapping[str, Any]) -> None:
        text = json.dumps(record, separators=(",", ":"))
        assert self._file is not None
        self._file.write(f"{zlib.crc32(text.encode()):08x} {text}\n")

    def _give_up(self) -> None:
        self._retry_at = time.monotonic() + RETRY_SECONDS
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.close()
        self._file = None


def _common(a: Array, b: Array) -> int:
    """How many rows two tables begin with that are the same."""
    count = min(a.shape[1], b.shape[1])
    same = ((a[:, :count] == b[:, :count]) | (np.isnan(a[:, :count]) & np.isnan(b[:, :count]))).all(axis=0)
    return count if same.all() else int(same.argmin())


def lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The whole records of a journal, in order; a torn or damaged line ends them, up to the next beginning."""
    skipping = False
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            checksum, _, text = line.rstrip("\n").partition(" ")
            try:
                whole = line.endswith("\n") and f"{zlib.crc32(text.encode()):08x}" == checksum
                record = json.loads(text) if whole else None
            except (ValueError, RecursionError):
                record = None
            if not line.strip():
                continue
            if not isinstance(record, dict):
                skipping = True
            elif "begin" in record or not skipping:
                skipping = False
                yield record


def recover(path: str | os.PathLike[str]) -> tuple[History, list[Event]]:
    """Tables and events as a journal tells them, also of a process that was killed.

    Raises:
        CheckpointError: when there is no journal, or it is none of ours.
    """
    history: History | None = None
    events: list[Event] = []
    try:
        for record in lines(path):
            if "begin" in record:
                history, events = History([str(name) for name in record["begin"]["layers"]]), []
            elif history is None:
                continue
            elif "back" in record:
                _take_back(history, record["back"]["tables"])
                del events[int(record["back"]["events"]) :]
            elif "row" in record:
                name, values = record["row"]
                table = history[name]
                table.append(**dict(zip(table.columns, map(float, values), strict=True)))
            elif "event" in record:
                events.append(event_from_dict(record["event"]))
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no journal {path}.") from error
    except OSError as error:
        raise CheckpointError(f"the journal {path} cannot be read ({error.strerror or error}).") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, EgeriaLabError) as error:
        raise CheckpointError(f"the journal {path} cannot be used ({type(error).__name__}: {error}).") from error
    if history is None:
        raise CheckpointError(f"{path} is no journal of egeria_lab, or nothing of it is whole.")
    return history, events


def _take_back(history: History, counts: Mapping[str, int]) -> None:
    for name, table in history.items():
        state = table.state_dict()
        table.load_state_dict({**state, "rows": state["rows"][:, : int(counts[name])]})
