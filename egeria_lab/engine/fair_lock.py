"""A lock that is given to whoever waits longest, so that a training thread does not starve those who ask between."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType


class FairLock:
    """A re-entrant lock with a queue.

    A thread that gives a common lock back and takes it again at once, as training does between two steps, usually
    gets it again before anybody who waits has woken up: an `evaluate` from another thread could wait for minutes.

    Args:
        when_free: called by whoever gives the lock back while nobody waits for it, after that: what could not be done
            while it was taken can be done now.

    Example:
        >>> lock = FairLock()
        >>> with lock, lock:
        ...     lock.acquire(blocking=False)
        True
    """

    def __init__(self, when_free: Callable[[], None] | None = None) -> None:
        self._when_free = when_free
        self._inner = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock, behind those who wait already; False when it is taken and `blocking` is False."""
        me = threading.get_ident()
        with self._inner:
            if self._owner == me:
                self._depth += 1
                return True
            if self._owner is None:
                self._owner, self._depth = me, 1
                return True
            if not blocking:
                return False
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((me, turn))
        try:
            turn.acquire()
        except BaseException:  # an interrupt while it waited
            with self._inner:
                given = (me, turn) not in self._waiting
                if not given:
                    self._waiting.remove((me, turn))
            if given:
                self.release()
            raise
        return True

    def release(self, *, tell: bool = True) -> None:
        """Give the lock back, to the next in the queue if there is one.

        Args:
            tell: call `when_free`; False for whoever looks after that itself.

        Raises:
            RuntimeError: when this thread does not hold it.
        """
        with self._inner:
            if self._owner != threading.get_ident():
                raise RuntimeError("a lock is given back by the thread that holds it.")
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                self._depth = 1
                turn.release()
                return
        if tell and self._when_free is not None:
            self._when_free()

    def __enter__(self) -> FairLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
