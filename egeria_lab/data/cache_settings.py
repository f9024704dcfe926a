"""The activation cache of the frozen prefix: its settings, what it reports, and whether it is worth its while.

`egeria_lab.data.activation_cache` keeps the rows, `egeria_lab.data.cached_forward` runs a model with them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from egeria_lab.data.row_format import DTYPES, RowFormat, Rows
from egeria_lab.errors import require
from egeria_lab.tables import ShownAsTable

OnEvent = Callable[[str, str], None]
"""``on_event(kind, message)``; kinds: built, full, lost, off, refused, invalidated."""

_MEASURED_BATCHES = 8
_ERROR_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCache(ShownAsTable):
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


class CostComparison:
    """Loading against computing, in seconds a row, by the median of the last batches.

    Example:
        >>> costs = CostComparison()
        >>> costs.computed(0.5, rows=100)
        >>> for _ in range(8):
        ...     costs.loaded(0.1, rows=100)
        >>> costs.loading_is_slower()
        False
    """

    def __init__(self) -> None:
        self._load: deque[float] = deque(maxlen=4 * _MEASURED_BATCHES)
        self._compute: deque[float] = deque(maxlen=4 * _MEASURED_BATCHES)

    def loaded(self, seconds: float, rows: int) -> None:
        """Note what loading took."""
        self._load.append(seconds / rows)

    def computed(self, seconds: float, rows: int) -> None:
        """Note what computing took."""
        self._compute.append(seconds / rows)

    def loading_is_slower(self) -> bool:
        """True when enough was measured and loading took longer."""
        return len(self._load) >= _MEASURED_BATCHES and bool(self._compute) and self.load > self.compute

    @property
    def load(self) -> float:
        """Seconds a row."""
        return median(self._load)

    @property
    def compute(self) -> float:
        """Seconds a row."""
        return median(self._compute)


class ErrorMeter:
    """The root mean square error of rows that were rounded, relative to their values.

    Example:
        >>> import torch
        >>> tensors = [torch.tensor([[1.0, 1.001]])]
        >>> form, meter = RowFormat(tensors, "float16"), ErrorMeter()
        >>> meter.note(form, tensors, form.encode(tensors))
        >>> 0 < meter.relative_error < 1e-3
        True
    """

    def __init__(self) -> None:
        self._error = self._size = 0.0

    def note(self, form: RowFormat, tensors: list[Tensor], packed: Rows) -> None:
        """Compare a few rows with what they were made from."""
        few = [x[:_ERROR_ROWS].detach().cpu() for x in tensors]
        for was, now in zip(few, form.decode(packed[:_ERROR_ROWS].copy()), strict=True):
            if was.is_floating_point():
                self._error += float((was.double() - now.double()).square().sum())
                self._size += float(was.double().square().sum())

    @property
    def relative_error(self) -> float:
        """0 when nothing was noted."""
        return (self._error / self._size) ** 0.5 if self._size else 0.0


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
