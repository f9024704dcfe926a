"""What a user can ask: frozen, imperative records, and the thread-safe queue they wait in.

A command may be put from any thread (a cell, a widget callback, a logger). It lands at the start of the
next step, in order, and always leaves an event: what it changed, or `CommandRejected` with the reason.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from egeria_lab.events import CommandRejected, Event, Scalar

_MOST_IDS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Something a user wants. `by` is ``"user"`` (code) or ``"dashboard"`` (a widget)."""

    by: str = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeLayer(Command):
    """Stop training this layer module."""

    layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThawLayer(Command):
    """Train this layer module again."""

    layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinLayer(Command):
    """Forbid every rule to freeze this layer module."""

    layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinLayer(Command):
    """Allow rules to freeze this layer module again."""

    layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Override(Command):
    """Give a setting a new value, for all layers or for one."""

    name: str
    value: Scalar
    layer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset(Command):
    """Give a setting back the value that the session started with."""

    name: str
    layer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend(Command):
    """Lengthen the budget; the learning-rate schedule is planned again over the new length."""

    epochs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard(Command):
    """Take these samples out of training until they are restored."""

    ids: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Discard(by={self.by!r}, ids={_some(self.ids)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore(Command):
    """Give these discarded samples back to training."""

    ids: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Restore(by={self.by!r}, ids={_some(self.ids)})"


def _some(ids: tuple[int, ...]) -> str:
    """All of a few ids; of more, the first five and their number, so that a reason behind them can be found."""
    if len(ids) <= _MOST_IDS_SHOWN:
        return repr(ids)
    return f"({', '.join(str(i) for i in ids[:_MOST_IDS_SHOWN])}, … {len(ids):,} in all)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo(Command):
    """Go back to the state right before the newest command landed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redo(Command):
    """Take the newest undo back."""


@dataclass
class Receipt:
    """What became of one command: shown as the result of the call that put it.

    Attributes:
        command: the command itself.
        event: the event it led to, or None while it waits for the next step boundary.
    """

    command: Command
    event: Event | None = None
    _landed: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def state(self) -> str:
        """``"pending"``, ``"done"`` or ``"rejected"``."""
        if self.event is None:
            return "pending"
        return "rejected" if isinstance(self.event, CommandRejected) else "done"

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the command has landed, at most `timeout` seconds; True if it has."""
        return self._landed.wait(timeout)

    def land(self, event: Event) -> None:
        """Note the event that the command led to."""
        self.event = event
        self._landed.set()

    def __repr__(self) -> str:
        if self.event is None:
            return f"pending: {self.command} lands at the next step boundary"
        return f"step {self.event.step}: {self.event.sentence()}"


class CommandQueue:
    """Commands in the order in which they were put, from any thread.

    Example:
        >>> queue = CommandQueue()
        >>> receipt = queue.put(FreezeLayer(layer="layers.0"))
        >>> receipt.state, len(queue)
        ('pending', 1)
        >>> [r.command.layer for r in queue.drain()]
        ['layers.0']
    """

    def __init__(self) -> None:
        self._waiting: deque[Receipt] = deque()
        self._lock = threading.Lock()
        self._listener: Callable[[], None] | None = None

    def put(self, command: Command) -> Receipt:
        """Add a command and return its receipt; whoever owns the queue is told that one is waiting."""
        receipt = Receipt(command)
        with self._lock:
            self._waiting.append(receipt)
        if self._listener is not None:
            self._listener()
        return receipt

    def on_put(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each put, in the thread that put."""
        self._listener = listener

    def drain(self) -> list[Receipt]:
        """Take out everything that waits, in order."""
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
        return taken

    def pending(self) -> list[Command]:
        """What waits, in order, without taking it out."""
        with self._lock:
            return [receipt.command for receipt in self._waiting]

    def __len__(self) -> int:
        return len(self._waiting)
