"""Ctrl-C, and a kernel's stop button, may end a step while it computes, and never tear what it writes down.

Python raises `KeyboardInterrupt` between any two lines of the main thread. Between the update of the weights and the
row that tells of it, that would be a step that was made and that nobody knows of; between the two lines that take and
note a lock, a session that answers no more.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

PATIENCE_SECONDS = 5.0
"""So long a block holds a second interrupt back: a user's rule in an endless loop must be possible to leave."""


class _Holder:
    """The one handler of SIGINT while a block holds interrupts back; only the main thread comes here."""

    def __init__(self) -> None:
        self.before: Any = None
        self.is_open = True
        self.kept: list[FrameType | None] = []
        self.since = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Keep an interrupt, or hand it on."""
        if self.is_open:
            self._pass_on(frame)
        elif self.kept and time.monotonic() - self.since >= PATIENCE_SECONDS:
            self.kept.clear()
            self._pass_on(frame)
        else:
            self.kept.append(frame)

    def hand_on(self) -> None:
        """What was kept happens now."""
        while self.kept:
            self._pass_on(self.kept.pop(0))

    def _pass_on(self, frame: FrameType | None) -> None:
        was_open, self.is_open = self.is_open, False
        self.before(signal.SIGINT, frame)
        self.is_open = was_open  # not when it raised: what cleans up behind an interrupt is not interrupted again


_holder: _Holder | None = None


@contextmanager
def interrupts_held() -> Iterator[None]:
    """An interrupt of the main thread waits until the block is over; blocks may be nested.

    A second interrupt that comes when the block has lasted for `PATIENCE_SECONDS` is let through all the same. In
    other threads, and where SIGINT has no Python handler, nothing is done: nothing would be raised there.

    Example:
        >>> with interrupts_held():
        ...     pass  # what may not be torn
    """
    global _holder
    if threading.get_ident() != threading.main_thread().ident:
        yield
        return
    if _holder is not None:
        with _set(_holder, False):
            yield
        return
    holder = _Holder()
    holder.is_open, holder.since = False, time.monotonic()
    holder.before = signal.default_int_handler  # for an interrupt that comes before the next line is done
    before = signal.signal(signal.SIGINT, holder.handle)
    holder.before = before
    if not callable(before):  # ignored, or left to the operating system
        signal.signal(signal.SIGINT, before)
        yield
        return
    _holder = holder
    try:
        yield
    finally:
        _holder = None
        if signal.getsignal(signal.SIGINT) == holder.handle:  # else somebody has put a handler of his own
            signal.signal(signal.SIGINT, before)
        holder.hand_on()


@contextmanager
def interrupts_let_through() -> Iterator[None]:
    """Inside `interrupts_held`, a block that an interrupt may end: reading a batch, or a forward and backward pass.

    Example:
        >>> with interrupts_held():
        ...     with interrupts_let_through():
        ...         pass  # what may be given up half way
    """
    if _holder is None or threading.get_ident() != threading.main_thread().ident:
        yield
        return
    with _set(_holder, True):
        yield


@contextmanager
def _set(holder: _Holder, is_open: bool) -> Iterator[None]:
    before, since = holder.is_open, holder.since
    try:
        holder.is_open, holder.since = is_open, time.monotonic()
        if is_open:
            holder.hand_on()
        yield
    finally:
        holder.is_open, holder.since = before, since
        if before:
            holder.hand_on()
