"""Processes that read data are started so that an interrupt reaches the one who decides what it means, and not them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Inside the block, processes are started that never see SIGINT; this one sees it behind the block.

    Ctrl-C and the stop button of a kernel reach a whole group of processes. A reading process would die of it, and
    what was to be a pause behind the step under way would be a failed step. Nothing is done where signals cannot be
    blocked (Windows); SIGTERM, by which the processes are ended, is not blocked.

    Example:
        >>> with interrupts_blocked():
        ...     pass    # start processes here
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
