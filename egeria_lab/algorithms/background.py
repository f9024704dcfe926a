"""One daemon thread with a bounded queue, kept to one core, for work beside training.

Threads, as measured with torch 2.13 on two cores: `torch.set_num_threads` sets OpenMP's number for the calling
thread alone, and beside it a process-wide number that threads take over at their first parallel operation.
So the thread asks for one core for itself, and the thread that built it then states the old number again:
threads that are started later get what they would have got.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

WAITING = 2
"""Pieces of work that may wait; one more makes the one who gives it wait."""


@dataclass(slots=True, eq=False)
class Job:
    """A piece of work and what became of it.

    Attributes:
        work: what to do; forgotten once done, with all that it holds.
        done: set when there is a result or an error.
        result: what `work` returned.
        error: what it raised.
    """

    work: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None


class _Bench:
    """What the two threads share. The thread holds this and not its owner, so that an owner can be dropped."""

    def __init__(self, delay_seconds: float) -> None:
        self.jobs: queue.Queue[Job | None] = queue.Queue(WAITING)
        self.closed = threading.Event()
        self.delay_seconds = delay_seconds
        self.seconds = 0.0

    def serve(self, started: threading.Event) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # the first look takes over the process-wide number: now, while it is 1
        started.set()
        while not self.closed.is_set():
            job = self.jobs.get()
            if job is None:
                break
            if self.delay_seconds:
                time.sleep(self.delay_seconds)
            try:
                job.result = job.work()
            except BaseException as error:  # it is raised where the result is collected
                job.error = error
            job.work = _nothing
            self.seconds = time.thread_time()
            job.done.set()
            del job  # do not hold the last result until the next one comes


class Workbench:
    """Does pieces of work in the order given, one at a time, on a thread of its own.

    Args:
        delay_seconds: sleep before each piece, to try a slow thread, >= 0.

    Example:
        >>> bench = Workbench()
        >>> job = bench.give(lambda: 6 * 7)
        >>> job.done.wait(10), job.result
        (True, 42)
        >>> bench.close()
    """

    def __init__(self, delay_seconds: float = 0.0) -> None:
        self._bench = _Bench(delay_seconds)
        threads = torch.get_num_threads()
        started = threading.Event()
        thread = threading.Thread(target=self._bench.serve, args=(started,), name="egeria-lab-reference", daemon=True)
        thread.start()
        started.wait()
        torch.set_num_threads(threads)  # for threads to come; see the top of this file
        self._end = weakref.finalize(self, _end, self._bench, thread)

    @property
    def seconds(self) -> float:
        """CPU time of the thread until its last finished piece of work."""
        return self._bench.seconds

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._bench.closed.is_set()

    def give(self, work: Callable[[], Any]) -> Job:
        """Queue a piece of work; waits while the queue is full."""
        job = Job(work)
        self._bench.jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread behind its present piece of work; what waits is dropped. Twice is once."""
        self._end()


def _nothing() -> None:
    """In place of work that was done."""


def _end(bench: _Bench, thread: threading.Thread) -> None:
    """Also called when the owner is dropped, and at exit: a thread inside torch must not outlive Python."""
    bench.closed.set()
    while True:
        try:
            bench.jobs.get_nowait()
        except queue.Empty:
            break
    bench.jobs.put(None)
    if threading.current_thread() is not thread:
        thread.join(timeout=10)
