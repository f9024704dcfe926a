"""The activation cache: what crossed the cut behind the frozen prefix, kept by sample and view for each boundary.

The order of coming batches is known, so a thread reads the next ones ahead while the model trains. Nothing
here knows a model; `egeria_lab.data.cached_forward` puts the two together.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from egeria_lab.data.activation_store import CacheStore, Keys, free_bytes
from egeria_lab.data.cache_settings import ActivationCache, CacheStatistics, CostComparison, ErrorMeter, OnEvent
from egeria_lab.data.prefetch import Coming, Prefetcher
from egeria_lab.data.row_format import RowFormat

__all__ = ["ActivationCache", "CacheStatistics", "CachedPrefix", "OnEvent"]

_SHARE_OF_FREE_DISK = 0.5


class _Boundary(NamedTuple):
    """The rows of one boundary."""

    store: CacheStore
    form: RowFormat


class CachedPrefix:
    """What crossed the cut behind a frozen prefix, kept by (sample id, view) for one or more boundaries.

    When something goes wrong with the disk there is one event, the rows are given up, and everything is
    computed again: nothing that trains depends on a row being there. One training thread uses a cache.

    Args:
        settings: where, how much, how precise.
        num_samples: samples in the training set; ids lie in ``[0, num_samples)``.
        views: augmentations a sample may have, >= 1.
        names: of the layer modules, front to back, for messages.
        on_event: told what a user should know, as a kind and one sentence.
        pin_memory: read into page-locked memory, for a copy to a GPU that does not wait.

    Example:
        >>> cache = CachedPrefix(ActivationCache(), num_samples=100)
        >>> ids, views = torch.arange(4), torch.zeros(4, dtype=torch.int64)
        >>> cache.put(2, ids, views, [torch.ones(4, 3)])
        >>> tensors, hit = cache.fetch(2, ids + 2, views)
        >>> hit.tolist(), tensors[0][:2].tolist()
        ([True, True, False, False], [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
        >>> cache.close()
    """

    def __init__(
        self,
        settings: ActivationCache,
        *,
        num_samples: int,
        views: int = 1,
        names: Sequence[str] = (),
        on_event: OnEvent | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.settings = settings
        self.num_samples = num_samples
        self.views = views
        self.names = list(names)
        self.generation = 0
        self.statistics = CacheStatistics()
        self._on_event: OnEvent = on_event or (lambda kind, message: None)
        self._boundaries: dict[int, _Boundary] = {}
        self._off: set[int] = set()  # boundaries where the cache is slower, until one of them moves
        self._lost = False
        self._full = False
        self._budget: int | None = settings.max_bytes
        self._errors = ErrorMeter()
        self._costs = CostComparison()
        self._stolen_seconds = 0.0
        self._prefetcher = Prefetcher(settings.prefetch_batches, pin_memory)
        self._pin_memory = pin_memory
        self._finalize = weakref.finalize(self, _shut_down, self._prefetcher, self._boundaries)

    def announce(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Tell the coming batches, as ``(ids, views)`` in their order; what was told before is dropped.

        The iterable is read by the training thread, a few batches ahead; it may be endless.
        """
        count = self.views  # no reference to the cache itself: the reader would keep it alive
        self._prefetcher.announce(_keys(ids, views, count) for ids, views in batches)

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
        keys = _keys(ids, views, self.views)
        tensors, hit = None, torch.zeros(len(ids), dtype=torch.bool)
        kept = self._boundaries.get(boundary)
        try:
            if kept is not None and len(keys) and kept.store.holds(keys).any():
                tensors, hit = self._read(kept, keys)
        except OSError as error:
            self._give_up(error)
        self._prefetcher.look_ahead(keys, [kept.store for kept in self._boundaries.values()])
        hits = int(hit.sum())
        seconds = time.perf_counter() - start
        self.statistics.hits += hits
        self.statistics.misses += len(ids) - hits
        self.statistics.wait_seconds += seconds
        if 2 * hits > len(ids):
            self._costs.loaded(seconds + self._stolen_seconds, hits)
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
                self._write(boundary, kept, _keys(ids, views, self.views), tensors)
        except OSError as error:
            self._give_up(error)
        self.statistics.write_seconds += time.perf_counter() - start
        self._count_rows()

    def note_recompute(self, seconds: float, rows: int) -> None:
        """Tell what computing rows of the current boundary from the inputs costs; compared with loading."""
        if rows:
            self._costs.computed(seconds, rows)

    def invalidate(self, reason: str) -> None:
        """Forget every row at once, because what they were computed from has changed."""
        self.generation += 1
        self._prefetcher.drop()
        held = sum(kept.store.num_rows for kept in self._boundaries.values())
        for boundary in list(self._boundaries):
            self._close(boundary)
        self._off.clear()
        self._costs = CostComparison()
        self._count_rows()
        if held:
            self._on_event("invalidated", f"the activation cache forgot {held:,} rows: {reason}.")

    def close(self) -> None:
        """Stop reading and remove all files."""
        self._finalize()
        self._count_rows()

    def _name(self, boundary: int) -> str:
        return repr(self.names[boundary]) if boundary < len(self.names) else f"layer module {boundary}"

    def _read(self, kept: _Boundary, keys: Keys) -> tuple[list[Tensor] | None, Tensor]:
        coming = self._prefetcher.take(kept.store, keys) or Coming(kept.store, keys, self._pin_memory)
        coming.read()
        self.statistics.read_seconds += coming.background_seconds
        if _cores() <= torch.get_num_threads():  # no core to spare: the reading thread took time from training
            self._stolen_seconds += coming.background_seconds
        return kept.form.decode(coming.rows), torch.from_numpy(coming.held)

    def _open(self, boundary: int, tensors: list[Tensor]) -> _Boundary | None:
        form = RowFormat(tensors, self.settings.dtype)
        if self._budget is None:
            self._budget = int(free_bytes(self.settings.directory) * _SHARE_OF_FREE_DISK)
        store = CacheStore(self.settings.directory, self.num_samples * self.views, form.num_bytes, self._budget)
        kept = self._boundaries[boundary] = _Boundary(store, form)
        self._costs = CostComparison()
        self._off.clear()
        self._on_event(
            "built",
            f"the activation cache keeps the output of {self._name(boundary)}: {form.num_bytes:,} bytes a sample, "
            f"at most {store.capacity:,} rows, in {store.path}.",
        )
        return kept

    def _write(self, boundary: int, kept: _Boundary, keys: Keys, tensors: list[Tensor]) -> None:
        packed = kept.form.encode(tensors)
        if not self.settings.exact:
            self._errors.note(kept.form, tensors, packed)
            self.statistics.relative_error = self._errors.relative_error
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
        costs = self._costs
        if not (self.settings.self_profiling and costs.loading_is_slower()):
            return
        self._off.add(boundary)
        self._close(boundary)
        self._count_rows()
        self._on_event(
            "off",
            f"the activation cache behind {self._name(boundary)} is off: loading takes {1e6 * costs.load:.1f} µs "
            f"a sample, computing {1e6 * costs.compute:.1f} µs. It is tried again when more layers are frozen.",
        )

    def _count_rows(self) -> None:
        self.statistics.rows = sum(k.store.num_rows for k in self._boundaries.values())
        self.statistics.num_bytes = sum(k.store.num_bytes for k in self._boundaries.values())


def _keys(ids: Tensor, views: Tensor, count: int) -> Keys:
    keys: Keys = (ids * count + views).cpu().numpy()
    return keys


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shut_down(prefetcher: Prefetcher, boundaries: dict[int, _Boundary]) -> None:
    prefetcher.close()
    for kept in boundaries.values():
        kept.store.close()
    boundaries.clear()
