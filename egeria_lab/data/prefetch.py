"""Read the rows of coming batches ahead, in a thread that does nothing else."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from egeria_lab.data.activation_store import CacheStore, Keys, Mask
from egeria_lab.data.row_format import Rows


class Coming:
    """The rows of one batch: asked for, and then there.

    Args:
        store: where they lie.
        keys: which ones, shape ``(b,)``.
        pin_memory: read into page-locked memory.

    Attributes:
        rows: uint8 ``(b, row_bytes)``, arbitrary where not held.
        held: bool ``(b,)``.
        error: what went wrong while reading, or None.
        background_seconds: processor time of reading it, when another thread than the user's did.
    """

    def __init__(self, store: CacheStore, keys: Keys, pin_memory: bool) -> None:
        self.store = store
        self.keys = keys
        self.rows: Rows = np.empty((0, 0), dtype=np.uint8)
        self.held: Mask = np.zeros(len(keys), dtype=bool)
        self.error: OSError | None = None
        self.background_seconds = 0.0
        self._pin_memory = pin_memory
        self._there = threading.Event()
        self._claim = threading.Lock()

    def read(self) -> None:
        """Have the rows: read them, or wait for the thread that is reading them.

        Raises:
            OSError: when the file cannot be read.
        """
        self.try_reading(background=False)
        self._there.wait()
        if self.error is not None:
            raise self.error

    def try_reading(self, background: bool) -> None:
        """Read unless another thread has begun to; errors are kept for `read`."""
        if not self._claim.acquire(blocking=False):
            return
        start = time.thread_time()
        try:
            buffer = torch.empty(len(self.keys), self.store.row_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
            self.rows = buffer.numpy()
            self.held = self.store.read(self.keys, self.rows)
        except OSError as error:
            self.error = error
        finally:
            if background:
                self.background_seconds = time.thread_time() - start
            self._there.set()


# Waking another thread costs about 0.2 ms, as much as reading this much.
SMALL_BATCH_BYTES = 2**18


class Prefetcher:
    """Reads batches in the order in which they were given; the thread starts with the first one.

    Args:
        depth: announced batches to be ahead, >= 0.
        pin_memory: read into page-locked memory.

    Example:
        >>> store = CacheStore(None, num_keys=4, row_bytes=2, max_bytes=100)
        >>> keys = np.array([2, 1])
        >>> store.write(keys, np.array([[5, 5], [6, 6]], dtype=np.uint8))
        >>> prefetcher = Prefetcher()
        >>> prefetcher.give(store, keys)
        >>> coming = prefetcher.take(store, keys)
        >>> coming.read()
        >>> coming.rows.tolist()
        [[5, 5], [6, 6]]
        >>> prefetcher.close(); store.close()
    """

    def __init__(self, depth: int = 4, pin_memory: bool = False) -> None:
        self._depth = depth
        self._pin_memory = pin_memory
        self._announced: Iterator[Keys] = iter(())
        self._ahead: deque[Keys] = deque()  # announced batches that were looked at
        self._queue: deque[Coming] = deque()
        self._todo: deque[Coming] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def announce(self, batches: Iterator[Keys]) -> None:
        """Tell the keys of the coming batches; they are drawn by `look_ahead`, as far as needed."""
        self.drop()
        self._ahead.clear()
        self._announced = batches

    def look_ahead(self, after: Keys, stores: Iterable[CacheStore]) -> None:
        """Ask for announced batches until enough of them lie ahead of batch `after`, from all stores."""
        for position, ahead in enumerate(self._ahead):
            if np.array_equal(ahead, after):
                for _ in range(position + 1):
                    self._ahead.popleft()
                break
        while len(self._ahead) < self._depth:
            keys = next(self._announced, None)
            if keys is None:
                return
            self._ahead.append(keys)
            for store in stores:
                if len(keys) * store.row_bytes >= SMALL_BATCH_BYTES and store.holds(keys).any():
                    self.give(store, keys)

    def give(self, store: CacheStore, keys: Keys) -> None:
        """Ask for a batch."""
        coming = Coming(store, keys, self._pin_memory)
        with self._wake:
            if self._closed:
                return
            self._queue.append(coming)
            self._todo.append(coming)
            self._wake.notify()
        if self._thread is None or not self._thread.is_alive():  # a fork has no threads
            self._thread = threading.Thread(target=self._run, name="egeria-lab-prefetch", daemon=True)
            self._thread.start()

    def take(self, store: CacheStore, keys: Keys) -> Coming | None:
        """The batch with these keys, when it was given; what was given before it is dropped."""
        for position, coming in enumerate(self._queue):
            if coming.store is store and np.array_equal(coming.keys, keys):
                with self._wake:
                    passed = [self._queue.popleft() for _ in range(position + 1)][:-1]
                    self._todo = deque(x for x in self._todo if all(x is not y for y in passed))
                return coming
        return None

    def drop(self, store: CacheStore | None = None) -> None:
        """Forget the batches that were given (those of one store only)."""
        with self._wake:
            for queue in (self._queue, self._todo):
                kept = [x for x in queue if store is not None and x.store is not store]
                queue.clear()
                queue.extend(kept)

    def close(self) -> None:
        """Stop the thread and wait for its last read."""
        with self._wake:
            self._closed = True
            self._queue.clear()
            self._todo.clear()
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._todo and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                coming = self._todo.popleft()
            coming.try_reading(background=True)
