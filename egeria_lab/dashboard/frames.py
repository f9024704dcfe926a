"""What one message to the page holds: new rows of some tables as raw numbers, thinned where they are many.

Thinning keeps, in every stretch of steps, the rows with the lowest and the highest value. The stretches are
powers of two long and start at multiples of their length, so thinning twice is the same as thinning once: a
page that followed a run from its beginning and a page that was opened late draw the same points.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Positions = NDArray[np.intp]

MOST_ROWS = {
    "steps": 2048, "plasticity": 16384, "epochs": 2048, "lanes": 4096, "sieve": 1024, "sparsity": 8192,
}  # fmt: skip
"""The most rows of each table in one message; what is more is thinned."""

KEYS = {"steps": "loss", "plasticity": "value", "epochs": "valid_loss", "sieve": "kept", "sparsity": "churn"}
"""The column whose lowest and highest values thinning keeps."""

LAYERED = ("plasticity", "sparsity")
"""Tables with a row for each layer module; every layer is thinned by itself."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one table on their way to a page.

    Attributes:
        table: name of the table.
        start: the first row's position in the kernel's table.
        count: the number of rows the kernel's table has; `start` + rows = `count` unless thinned.
        x: the step of each row, shape ``(n,)``.
        columns: the other columns by name, each of shape ``(n,)``.
        notes: one clause for each row, or nothing.
    """

    table: str
    start: int
    count: int
    x: Numbers
    columns: Mapping[str, Numbers]
    notes: Sequence[str] = field(default=())


def stretch_length(last_step: float, most: int) -> int:
    """The smallest power of two that cuts ``[0, last_step]`` into at most `most` stretches.

    Example:
        >>> stretch_length(100, 200), stretch_length(1000, 200)
        (1, 8)
    """
    length = 1
    while int(last_step) // length + 1 > most:
        length *= 2
    return length


def thin(step: Numbers, key: Numbers, group: Numbers, most: int) -> Positions:
    """Rows to keep so that at most `most` stretches of steps hold at most two rows of each group.

    Args:
        step: step of each row, ascending, >= 0, shape ``(n,)``.
        key: the value whose lowest and highest are kept, shape ``(n,)``; NaN where there is no other.
        group: whole number >= 0 of each row (the layer), shape ``(n,)``.
        most: most stretches, >= 1.

    Returns:
        Ascending positions; each group's first and last row are always among them.

    Example:
        >>> step = np.arange(8.0)
        >>> thin(step, np.array([0, 1, 0, 0, 0, 0, 9, 0.0]), np.zeros(8), 2).tolist()
        [0, 1, 4, 6, 7]
    """
    if not len(step):
        return np.zeros(0, dtype=np.intp)
    length = stretch_length(float(step[-1]), most)
    stretch = (step // length).astype(np.int64)
    cell = group.astype(np.int64) * (int(stretch[-1]) + 1) + stretch
    lowest = np.lexsort((np.where(np.isnan(key), np.inf, key), cell))
    highest = np.lexsort((np.where(np.isnan(key), np.inf, -key), cell))
    cells = cell[lowest]
    firsts = np.flatnonzero(np.r_[True, cells[1:] != cells[:-1]])
    _, first = np.unique(group, return_index=True)
    _, from_end = np.unique(group[::-1], return_index=True)
    kept = (lowest[firsts], highest[firsts], first, len(group) - 1 - from_end)
    return np.unique(np.concatenate(kept))


def bounded(part: Part) -> Part:
    """The same part with no more rows than `MOST_ROWS` allows (two more for each layer)."""
    most = MOST_ROWS[part.table]
    if len(part.x) <= most:
        return part
    if part.table == "lanes":
        kept = np.arange(len(part.x) - most, len(part.x))
    else:
        key = part.columns[KEYS[part.table]]
        group = part.columns["layer"] if part.table in LAYERED else np.zeros(len(part.x))
        num_groups = max(1, len(np.unique(group)))
        kept = thin(part.x, key, group, max(1, most // (2 * num_groups)))
    columns = {name: column[kept] for name, column in part.columns.items()}
    notes = [part.notes[int(i)] for i in kept] if part.notes else ()
    return Part(part.table, part.start, part.count, part.x[kept], columns, notes)


def pack(
    parts: Sequence[Part], seq: int, *, full: bool = False, as_text: bool = False
) -> tuple[dict[str, object], list[bytes]]:
    """A message for the page: a JSON-able header, and for each part float64 steps and float32 columns.

    Args:
        parts: what to send.
        seq: number of this message; the page acknowledges it.
        full: whether these are all tables from their first row: the answer to a page's hello.
        as_text: put the buffers into the header as base64, for front ends that lose them.

    Returns:
        Header and buffers; two buffers a part, little-endian, the columns one after the other.

    Example:
        >>> part = Part("steps", 0, 1, np.array([1.0]), {"loss": np.array([2.5])})
        >>> header, buffers = pack([part], 7)
        >>> header["seq"], header["parts"][0]["columns"], [len(b) for b in buffers]
        (7, ['loss'], [8, 4])
    """
    described: list[dict[str, object]] = []
    buffers: list[bytes] = []
    for part in parts:
        described.append(
            {
                "table": part.table, "start": part.start, "count": part.count, "rows": len(part.x),
                "columns": list(part.columns), "notes": list(part.notes),
            }
        )  # fmt: skip
        y = np.array(list(part.columns.values()), dtype="<f4").reshape(-1)
        buffers += [part.x.astype("<f8").tobytes(), y.tobytes()]
    header: dict[str, object] = {"kind": "frame", "seq": seq, "full": full, "parts": described}
    if as_text:
        header["text"] = [base64.b64encode(buffer).decode("ascii") for buffer in buffers]
        return header, []
    return header, buffers
