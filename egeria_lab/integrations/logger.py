"""What every logger has in common: a thread that copies what a session records, and never disturbs it."""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from egeria_lab.errors import InvalidSettingError, is_number, require
from egeria_lab.events import CommandRedone, CommandUndone, Event, SubscriberFailed
from egeria_lab.history import History
from egeria_lab.session import Session

Row = Mapping[str, float]
TABLES = ("steps", "plasticity", "epochs", "savings", "sieve", "sparsity")


class Logger(ABC):
    """What every logger does: follow one session, copy what is new, and never disturb it.

    A logger that fails is detached, the session notes a `SubscriberFailed` event, and training goes on. After an `undo`
    the steps that are trained again are written again: the newest row of a step is the one that counts.

    Args:
        every_seconds: pause between two looks at the history, > 0; events are written at once.

    To write your own: a subclass with `write_row`, `write_event` and, where needed, `begin` and `end`.

    Example:
        >>> class Printer(Logger):
        ...     def write_row(self, table, row, layer): pass
        ...     def write_event(self, event): print(event.sentence())
        >>> session = Session("mlp", "digits", epochs=1)
        >>> with Printer() as log:
        ...     _ = session.subscribe(log), session.pin("layers.0")
        layers.0 pinned by user: no rule may freeze it
    """

    def __init__(self, *, every_seconds: float = 2.0) -> None:
        valid = is_number(every_seconds) and every_seconds > 0
        require(valid, type(self).__name__, "every_seconds", every_seconds, "a number > 0")
        self.every_seconds = every_seconds
        self.error: Exception | None = None
        self._session: Session | None = None
        self._news: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._written = dict.fromkeys(TABLES, 0)
        self._unsubscribe: Callable[[], None] = lambda: None
        self._reported = False

    def __repr__(self) -> str:
        where = getattr(self, "folder", None) or getattr(self, "project", None)
        whom = "not following a session yet" if self._session is None else f"follows {self._session.name}"
        failed = f", failed: {self.error}" if self.error is not None else ""
        return f"{type(self).__name__}({'' if where is None else f'to {where}, '}{whom}{failed})"

    # --- what a logger of its own kind adds ------------------------------------------------------------

    def begin(self, session: Session) -> None:  # noqa: B027 - need not be there
        """Called once, before anything is written."""

    @abstractmethod
    def write_row(self, table: str, row: Row, layer: str | None) -> None:
        """Write one row of a history table; `layer` names the layer of tables that have one row for each."""

    @abstractmethod
    def write_event(self, event: Event) -> None:
        """Write one event."""

    def flush(self) -> None:  # noqa: B027 - need not be there
        """Called after each batch of rows and events."""

    def end(self) -> None:  # noqa: B027 - need not be there
        """Called once, after everything is written."""

    # --- what all have in common -----------------------------------------------------------------------

    def follow(self, session: Session, event: type[Event] | None = None) -> Callable[[], None]:
        """Begin to write what `session` records, from its first step on; `Session.subscribe` calls this.

        Returns:
            `close`.

        Raises:
            InvalidSettingError: when this logger follows a session already.
        """
        if self._session is not None:
            raise InvalidSettingError(f"this {type(self).__name__} logger follows a session already; make another one.")
        self._session = session
        for past in session.events:
            if event is None or isinstance(past, event):
                self._news.put(past)

        def hear(news: Event) -> None:
            if self.error is not None:  # the event log detaches and reports whoever raises
                self._reported = True
                raise self.error
            self._news.put(news)

        hear.__qualname__ = f"lab.loggers.{type(self).__name__}"
        self._unsubscribe = session.events.subscribe(hear, event)
        self._thread = threading.Thread(target=self._work, name=f"egeria-lab-{type(self).__name__}", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        return self.close

    def close(self) -> None:
        """Write what is left and end; twice is once. What went wrong is in `error`."""
        self._unsubscribe()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._news.put(None)
            thread.join()
        atexit.unregister(self.close)
        if self.error is not None and not self._reported and self._session is not None:
            self._reported = True
            name, error = f"lab.loggers.{type(self).__name__}", f"{type(self.error).__name__}: {self.error}"
            self._session.events.append(SubscriberFailed(step=self._session.steps_done, subscriber=name, error=error))

    def __call__(self, event: Event) -> None:
        """Write one event: for an event log without a session."""
        self.write_event(event)

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _work(self) -> None:
        assert self._session is not None
        try:
            try:
                self.begin(self._session)
                self._copy_all(self._session.history)
            finally:
                self.end()
        except Exception as error:  # whoever watches may not stop what it watches
            self.error = error

    def _copy_all(self, history: History) -> None:
        """Write events as they come and rows every so often, until it is over."""
        going_on, next_look = True, time.monotonic()
        while going_on:
            going_on = self._take_news(history, next_look - time.monotonic())
            if not going_on or time.monotonic() >= next_look:
                self._copy_rows(history)
                next_look = time.monotonic() + self.every_seconds
            self.flush()

    def _take_news(self, history: History, seconds: float) -> bool:
        """Wait so long for events and write all that are there; False when it is over."""
        try:
            event = self._news.get(timeout=max(seconds, 0.0))
            while event is not None:
                self._take(event, history)
                event = self._news.get_nowait()
        except queue.Empty:
            return True
        return False

    def _take(self, event: Event, history: History) -> None:
        self.write_event(event)
        if isinstance(event, (CommandUndone, CommandRedone)):  # rows behind it are others from now on
            for name in TABLES:
                steps = history[name]["step"]
                self._written[name] = min(self._written[name], int((steps <= event.step).sum()))

    def _copy_rows(self, history: History) -> None:
        for name in TABLES:
            columns = history[name].rows(self._written[name])
            count = len(columns["step"])
            for index in range(count):
                row = {column: float(values[index]) for column, values in columns.items()}
                layer = row.pop("layer", None)
                named = None if layer is None or math.isnan(layer) else history.layer_names[int(layer)]
                self.write_row(name, row, named)
            self._written[name] += count
