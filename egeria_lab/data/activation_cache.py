"""The activation cache of the frozen prefix: its settings, and rows kept by sample and view for each boundary.

The order of coming batches is known, so a thread reads the next ones ahead while the model trains. Nothing
here knows a model; `egeria_lab.data.cached_forward` puts the two together.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_lab.data.activation_store import DTYPES, CacheStore, Keys, RowFormat, Rows, free_bytes
from egeria_lab.data.prefetch import Coming, Prefetcher
from egeria_lab.errors import require

OnEvent = Callable[[str, str], None]
"""``on_event(kind, message)``; kinds: built, full, lost, off, refused, invalidated."""

_SHARE_OF_FREE_DISK = 0.5
_MEASURED_BATCHES = 8
_ERROR_ROWS = 8
# Waking another thread costs about 0.2 ms, as much as reading this much.
_SMALL_BATCH_BYTES = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCache:
    """Keep the outputs of the frozen layers, so that their forward pass is skipped too.

    Args:
        directory: where the files go, each session in a sub-directory of its own; None for the system's place
            for temporary files.
        max_bytes: most bytes on disk, all boundaries together; None for half of what is free at the start.
            Samples beyond are computed.
        dtype: ``"float32"`` keeps values as they were computed, bit for bit; ``"float16"``, ``"bfloat16"``
            and ``"int8"`` (with a scale for each sample) are smaller and round them.
        prefetch_batches: batches read ahead, >= 0; 0 reads when asked.
        self_profiling: turn off where loading is measured to be slower than computing; False keeps on.

    Raises:
        InvalidSettingError: for a value out of range.

    Example:
        >>> ActivationCache(dtype="int8").max_bytes is None
        True
    """

    directory: str | os.PathLike[str] | None = None
    max_bytes: int | None = None
    dtype: str = "float32"
    prefetch_batches: int = 4
    self_profiling: bool = True

    def __post_init__(self) -> None:
        owner = "ActivationCache"
        place = self.directory is None or isinstance(self.directory, (str, os.PathLike))
        require(place, owner, "directory", self.directory, "a path or None")
        size = self.max_bytes is None or (_whole(self.max_bytes) and self.max_bytes >= 1)
        require(size, owner, "max_bytes", self.max_bytes, "a whole number >= 1 or None")
        require(self.dtype in DTYPES, owner, "dtype", self.dtype, "one of " + ", ".join(DTYPES))
        ahead = _whole(self.prefetch_batches) and self.prefetch_batches >= 0
        require(ahead, owner, "prefetch_batches", self.prefetch_batches, "a whole number >= 0")
        switch = isinstance(self.self_profiling, bool)
        require(switch, owner, "self_profiling", self.self_profiling, "True or False")

    @property
    def exact(self) -> bool:
        """True when values come back bit for bit."""
        return DTYPES[self.dtype] is None


@dataclass(slots=True)
class CacheStatistics:
    """What a cache did so far.

    Attributes:
        hits: rows that were served.
        misses: rows that were asked for and not there.
        rows: rows held now.
        num_bytes: bytes on disk now.
        wait_seconds: time the training thread spent waiting for rows and decoding them.
        read_seconds: time the reading thread was busy.
        write_seconds: time the training thread spent encoding and writing rows.
        relative_error: root mean square error of stored values, relative to theirs, in a sample of them; 0 for
            ``"float32"``.
    """

    hits: int = 0
    misses: int = 0
    rows: int = 0
    num_bytes: int = 0
    wait_seconds: float = 0.0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    relative_error: float = 0.0


class _Boundary:
    """The rows of one boundary."""

    def __init__(self, store: CacheStore, form: RowFormat) -> None:
        self.store = store
        self.form = form


class CachedPrefix:
    """What crossed the cut behind a frozen prefix, kept by (sample id, view) for one or more boundaries.

    When something goes wrong with the disk there is one event, the rows are given up, and everything is
    computed again: nothing that trains depends on a row being there. One training thread uses a cache.

    Args:
        settings: where, how much, how precise.
        num_samples: samples in the training set; ids lie in ``[0, num_samples)``.
        views: augmentations a sample may have, >= 1.
        on_event: told what a user should know, as a kind and one sentence.
        pin_memory: read into page-locked memory, for a copy to a GPU that does not wait.

    Example:
        >>> cache = CachedPrefix(ActivationCache(), num_samples=100)
        >>> ids, views = torch.arange(4), torch.zeros(4, dtype=torch.int64)
        >>> cache.put(2, ids, views, [torch.ones(4, 3)])
        >>> tensors, hit = cache.fetch(2, ids + 2, views)
        >>> hit.tolist(), tensors[0][:2].tolist()
        ([True, True, False, False], [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
        >>> cache.nearest(5)
        2
        >>> cache.close()
    """

    def __init__(
        self,
        settings: ActivationCache,
        *,
        num_samples: int,
        views: int = 1,
        on_event: OnEvent | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.settings = settings
        self.num_samples = num_samples
        self.views = views
        self.generation = 0
        self.statistics = CacheStatistics()
        self._on_event: OnEvent = on_event or (lambda kind, message: None)
        self._boundaries: dict[int, _Boundary] = {}
        self._off: set[int] = set()  # boundaries where the cache is slower, until one of them moves
        self._lost = False
        self._full = False
        self._budget: int | None = settings.max_bytes
        self._errors = (0.0, 0.0)  # sums of squares: of errors and of values
        self._load: deque[float] = deque(maxlen=4 * _MEASURED_BATCHES)
        self._recompute: deque[float] = deque(maxlen=4 * _MEASURED_BATCHES)
        self._announced: Iterator[tuple[Tensor, Tensor]] = iter(())
        self._ahead: deque[Keys] = deque()  # announced batches that were handed to the reading thread
        self._stolen_seconds = 0.0
        self._prefetcher = Prefetcher(pin_memory)
        self._pin_memory = pin_memory
        self._finalize = weakref.finalize(self, _shut_down, self._prefetcher, self._boundaries)

    def announce(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Tell the coming batches, as ``(ids, views)`` in their order; what was told before is dropped.

        The iterable is read by the training thread, a few batches ahead; it may be endless.
        """
        self._prefetcher.drop()
        self._ahead.clear()
        self._announced = iter(batches)

    def nearest(self, wanted: int) -> int | None:
        """The last boundary at or in front of `wanted` that has rows, or None."""
        held = [b for b, kept in self._boundaries.items() if b <= wanted and kept.store.num_rows > 0]
        return max(held, default=None)

    def is_off(self, boundary: int) -> bool:
        """True when this boundary is served no more: loading was slower, the disk was lost, or it is closed."""
        return self._lost or boundary in self._off or not self._finalize.alive

    def fetch(self, boundary: int, ids: Tensor, views: Tensor) -> tuple[list[Tensor] | None, Tensor]:
        """The tensors of these samples, as far as they are held.

        Args:
            boundary: whose rows.
            ids: int64 sample ids, shape ``(b,)``.
            views: int64, shape ``(b,)``.

        Returns:
            Tensors on the CPU of shape ``(b, ...)`` whose missing rows are arbitrary (None when all are
            missing), and a bool mask ``(b,)`` of those that are held.
        """
        start = time.perf_counter()
        self._stolen_seconds = 0.0
        keys = self._keys(ids, views)
        tensors, hit = None, torch.zeros(len(ids), dtype=torch.bool)
        kept = self._boundaries.get(boundary)
        try:
            if kept is not None and len(keys) and kept.store.holds(keys).any():
                tensors, hit = self._read(kept, keys)
        except OSError as error:
            self._give_up(error)
        self._look_ahead(keys)
        hits = int(hit.sum())
        seconds = time.perf_counter() - start
        self.statistics.hits += hits
        self.statistics.misses += len(ids) - hits
        self.statistics.wait_seconds += seconds
        if 2 * hits > len(ids):
            self._load.append((seconds + self._stolen_seconds) / hits)
            self._compare_costs(boundary)
        return (tensors if hits else None), hit

    def put(self, boundary: int, ids: Tensor, views: Tensor, tensors: list[Tensor], mask: Tensor | None = None) -> None:
        """Keep rows that were computed.

        Args:
            boundary: whose rows; its store is made when it is the first time.
            ids: int64, shape ``(b,)``.
            views: int64, shape ``(b,)``.
            tensors: each of shape ``(b, ...)``.
            mask: bool ``(b,)``, which rows to keep; all by default.
        """
        if self.is_off(boundary):
            return
        start = time.perf_counter()
        try:
            kept = self._boundaries.get(boundary) or self._open(boundary, tensors)
            if kept is not None and kept.form.fits(tensors):
                if mask is not None:
                    index = mask.nonzero().flatten()
                    ids, views = ids[index], views[index]
                    tensors = [x[index.to(x.device)] for x in tensors]
                self._write(boundary, kept, self._keys(ids, views), tensors)
        except OSError as error:
            self._give_up(error)
        self.statistics.write_seconds += time.perf_counter() - start
        self._count_rows()

    def round_trip(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors as they would come back from the cache, on their device."""
        form = RowFormat(tensors, self.settings.dtype)
        restored = form.decode(form.encode(tensors))
        return [x.to(like.device) for x, like in zip(restored, tensors, strict=True)]

    def note_recompute(self, seconds: float, rows: int) -> None:
        """Tell what computing rows of the current boundary from the inputs costs; compared with loading."""
        if rows:
            self._recompute.append(seconds / rows)

    def invalidate(self, reason: str) -> None:
        """Forget every row at once, because what they were computed from has changed."""
        self.generation += 1
        self._prefetcher.drop()
        held = sum(kept.store.num_rows for kept in self._boundaries.values())
        for boundary in list(self._boundaries):
            self._close(boundary)
        self._off.clear()
        self._forget_costs()
        self._count_rows()
        if held:
            self._on_event("invalidated", f"the activation cache forgot {held:,} rows: {reason}.")

    def close(self) -> None:
        """Stop reading and remove all files."""
        self._finalize()
        self._count_rows()

    def _keys(self, ids: Tensor, views: Tensor) -> Keys:
        keys: Keys = (ids * self.views + views).cpu().numpy()
        return keys

    def _read(self, kept: _Boundary, keys: Keys) -> tuple[list[Tensor] | None, Tensor]:
        coming = self._prefetcher.take(kept.store, keys) or Coming(kept.store, keys, self._pin_memory)
        coming.read()
        self.statistics.read_seconds += coming.background_seconds
        if _cores() <= torch.get_num_threads():  # no core to spare: the reading thread took time from training
            self._stolen_seconds += coming.background_seconds
        return kept.form.decode(coming.rows), torch.from_numpy(coming.held)

    def _look_ahead(self, keys: Keys) -> None:
        """Hand the reading thread as many of the announced batches as it may be ahead of this one."""
        for position, ahead in enumerate(self._ahead):
            if np.array_equal(ahead, keys):
                for _ in range(position + 1):
                    self._ahead.popleft()
                break
        while len(self._ahead) < self.settings.prefetch_batches:
            following = next(self._announced, None)
            if following is None:
                return
            coming = self._keys(*following)
            self._ahead.append(coming)
            for kept in self._boundaries.values():
                large = len(coming) * kept.store.row_bytes >= _SMALL_BATCH_BYTES
                if large and kept.store.holds(coming).any():
                    self._prefetcher.give(kept.store, coming)

    def _open(self, boundary: int, tensors: list[Tensor]) -> _Boundary | None:
        form = RowFormat(tensors, self.settings.dtype)
        if self._budget is None:
            self._budget = int(free_bytes(self.settings.directory) * _SHARE_OF_FREE_DISK)
        store = CacheStore(self.settings.directory, self.num_samples * self.views, form.num_bytes, self._budget)
        kept = self._boundaries[boundary] = _Boundary(store, form)
        self._forget_costs()
        self._off.clear()
        self._on_event(
            "built",
            f"the activation cache keeps layer module {boundary}'s output: {form.num_bytes:,} bytes a sample, "
            f"at most {store.capacity:,} rows, in {store.path}.",
        )
        return kept

    def _write(self, boundary: int, kept: _Boundary, keys: Keys, tensors: list[Tensor]) -> None:
        packed = kept.form.encode(tensors)
        if not self.settings.exact:
            self._measure_error(kept.form, tensors, packed)
        others = sum(k.store.num_bytes for k in self._boundaries.values() if k is not kept)
        assert self._budget is not None
        if others and kept.store.bytes_for(len(keys)) + others > self._budget:
            self._close_others(boundary)  # the new boundary takes the place of the old one
        try:
            kept.store.write(keys, packed)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            kept.store.stop_growing()
            self._say_full(kept, f"the disk is full ({error.strerror})")
            kept.store.write(keys, packed)
        if not kept.store.holds(keys).all():
            self._say_full(kept, "its budget is used up")
        if all(k.store.num_rows <= kept.store.num_rows for k in self._boundaries.values()):
            self._close_others(boundary)

    def _say_full(self, kept: _Boundary, why: str) -> None:
        if not self._full:
            self._full = True
            self._on_event(
                "full",
                f"the activation cache holds {kept.store.num_rows:,} rows and takes no more: {why}. "
                "The other samples are computed.",
            )

    def _close_others(self, boundary: int) -> None:
        for other in [b for b in self._boundaries if b != boundary]:
            self._close(other)

    def _close(self, boundary: int) -> None:
        kept = self._boundaries.pop(boundary)
        self._prefetcher.drop(kept.store)
        kept.store.close()

    def _give_up(self, error: OSError) -> None:
        """The one warning about the disk; from here on everything is computed."""
        if self._lost:
            return
        self._lost = True
        for boundary in list(self._boundaries):
            self._close(boundary)
        self._count_rows()
        place = error.filename or self.settings.directory or "the directory for temporary files"
        self._on_event(
            "lost",
            f"the activation cache cannot use {place} ({error.strerror or error}); training goes on and "
            "computes the frozen layers. Give ActivationCache(directory=…) a place that can be written.",
        )

    def _compare_costs(self, boundary: int) -> None:
        if not self.settings.self_profiling or len(self._load) < _MEASURED_BATCHES or not self._recompute:
            return
        load, recompute = median(self._load), median(self._recompute)
        if load <= recompute:
            return
        self._off.add(boundary)
        self._close(boundary)
        self._count_rows()
        self._on_event(
            "off",
            f"the activation cache of layer module {boundary} is off: loading takes {1e6 * load:.1f} µs a sample, "
            f"computing {1e6 * recompute:.1f} µs. It is tried again when more layers are frozen.",
        )

    def _forget_costs(self) -> None:
        self._load.clear()
        self._recompute.clear()

    def _measure_error(self, form: RowFormat, tensors: list[Tensor], packed: Rows) -> None:
        few = [x[:_ERROR_ROWS].detach().cpu() for x in tensors]
        error, size = self._errors
        for was, now in zip(few, form.decode(packed[:_ERROR_ROWS].copy()), strict=True):
            if was.is_floating_point():
                error += float((was.double() - now.double()).square().sum())
                size += float(was.double().square().sum())
        self._errors = (error, size)
        self.statistics.relative_error = (error / size) ** 0.5 if size else 0.0

    def _count_rows(self) -> None:
        self.statistics.rows = sum(k.store.num_rows for k in self._boundaries.values())
        self.statistics.num_bytes = sum(k.store.num_bytes for k in self._boundaries.values())


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shut_down(prefetcher: Prefetcher, boundaries: dict[int, _Boundary]) -> None:
    prefetcher.close()
    for kept in boundaries.values():
        kept.store.close()
    boundaries.clear()
