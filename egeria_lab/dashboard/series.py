"""From history and events to what a chart draws: x values, thinned curves, spans and marks. Draws nothing.

The file is one piece because all of it answers one question: where does each point lie on the x axis?
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from egeria_lab.errors import unknown_name
from egeria_lab.events import (
    Event,
    LayerFrozen,
    LayerPinned,
    LayerSettling,
    LayerThawed,
    LayerUnpinned,
    SettlingEnded,
)
from egeria_lab.history import Array, History

X_AXES = {
    "steps": "training step",
    "epochs": "passes over the training data (epochs)",
    "samples": "training samples seen",
    "flops": "training work done (FLOPs)",
    "seconds": "elapsed time (seconds)",
}
"""What a chart can have along its x axis, and the axis title of each."""

SMALLEST = 1e-12
"""Logarithmic axes show nothing below this: smaller values, zero included, are drawn at it."""

MOST_POINTS = 1000
"""A trace never holds more points than this, gaps included."""

HANDS = ("user", "dashboard")
"""The values of `Event.by` that mean a person."""


class LayerRow(Protocol):
    """One row of `session.layers`: a layer module and what has become of it."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def since_step(self) -> int | None: ...
    @property
    def reason(self) -> str: ...
    @property
    def by(self) -> str: ...
    @property
    def num_parameters(self) -> int: ...


def x_of_steps(history: History, steps: Array | list[float], axis: str = "steps") -> Array:
    """Where given steps lie on an x axis.

    Args:
        history: supplies the epoch, samples, FLOPs and seconds at each recorded step.
        steps: numbers of finished steps, shape ``(n,)``.
        axis: a key of `X_AXES`.

    Returns:
        x values, shape ``(n,)``, in the unit of the axis; step 0 lies at 0.

    Raises:
        UnknownNameError: when `axis` is not a key of `X_AXES`.

    Example:
        >>> history = History(["layers.0"])
        >>> for step in (1, 2):
        ...     history.steps.append(step=step, samples=32 * step)
        >>> x_of_steps(history, [0, 1, 2], "samples").tolist()
        [0.0, 32.0, 64.0]
    """
    if axis not in X_AXES:
        raise unknown_name("x axis", axis, X_AXES)
    wanted = np.asarray(steps, dtype=np.float64)
    rows = history.steps.rows()
    if axis == "steps" or not len(rows["step"]):
        return wanted
    match axis:
        case "epochs":
            position = rows["epoch"]
        case "seconds":
            position = rows["elapsed_seconds"]
        case "samples":
            position = rows["samples"]
        case _:
            position = np.cumsum(np.nan_to_num(rows["train_flops"]))
    return np.interp(wanted, np.r_[0.0, rows["step"]], np.r_[0.0, position])


def thin(y: Array, limit: int = MOST_POINTS) -> NDArray[np.intp]:
    """Choose at most `limit` points that keep the outline of a curve: each stretch's lowest and highest.

    Args:
        y: finite values in drawing order, shape ``(n,)``.
        limit: most points to keep, >= 4.

    Returns:
        Ascending positions in `y`; the first and the last point are always among them.

    Example:
        >>> y = np.zeros(5000)
        >>> y[1234] = 9.0
        >>> kept = thin(y, 100)
        >>> len(kept) <= 100, 1234 in kept, int(kept[0]), int(kept[-1])
        (True, True, 0, 4999)
    """
    if len(y) <= limit:
        return np.arange(len(y))
    size = -(-len(y) // ((limit - 2) // 2))
    padded = np.pad(y, (0, -len(y) % size), mode="edge").reshape(-1, size)
    starts = np.arange(len(padded)) * size
    chosen = np.r_[0, starts + padded.argmin(axis=1), starts + padded.argmax(axis=1), len(y) - 1]
    return np.unique(np.minimum(chosen, len(y) - 1))


@dataclass(frozen=True, slots=True)
class Curve:
    """A thinned line: `y` is NaN where it has a gap; `rows` are the table rows drawn, -1 at a gap."""

    x: Array
    y: Array
    rows: NDArray[np.intp]

    def column(self, values: Array) -> Array:
        """Another column of the same table, point for point with `x` and `y`."""
        return np.where(self.rows < 0, np.nan, values[self.rows]) if len(values) else self.y


def curve(x: Array, y: Array, rows: NDArray[np.intp], groups: Array, limit: int = MOST_POINTS) -> Curve:
    """Thin a line and break it wherever its group changes.

    Args:
        x: x of every table row, shape ``(n,)``.
        y: y of every table row, shape ``(n,)``.
        rows: the table rows of this line, ascending; those whose y is not finite are left out.
        groups: group of every table row (the reference generation), shape ``(n,)``.
        limit: most points, gaps included.

    Example:
        >>> line = curve(np.arange(4.0), np.ones(4), np.arange(4), np.array([0.0, 0, 1, 1]))
        >>> line.y.tolist(), line.rows.tolist()
        ([1.0, 1.0, nan, 1.0, 1.0], [0, 1, -1, 2, 3])
    """
    rows = rows[np.isfinite(y[rows])]
    num_gaps = int(np.count_nonzero(np.diff(groups[rows])))
    room = limit - num_gaps if num_gaps <= limit // 2 else limit // 2
    rows = rows[thin(y[rows], room)]
    breaks = np.flatnonzero(np.diff(groups[rows])) + 1
    drawn = np.insert(rows, breaks, -1)
    return Curve(
        x=np.where(drawn < 0, np.nan, x[drawn]) if len(x) else x,
        y=np.where(drawn < 0, np.nan, y[drawn]) if len(y) else y,
        rows=drawn,
    )


def trailing_mean(y: Array, window: int) -> Array:
    """Mean of each value and the up to ``window - 1`` values before it, shape as `y`.

    Example:
        >>> trailing_mean(np.array([2.0, 4.0, 6.0]), 2).tolist()
        [2.0, 3.0, 5.0]
    """
    sums = np.cumsum(np.r_[0.0, y])
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of steps in which a layer module was frozen, settled or was pinned.

    Attributes:
        kind: ``"rule"`` or ``"hand"`` (who froze it), ``"settling"`` or ``"pin"``.
    """

    layer: str
    start: int
    end: int
    kind: str
    reason: str = ""

    @property
    def is_frozen(self) -> bool:
        """Whether the layer was not trained at all."""
        return self.kind in ("rule", "hand")


def spans(events: Iterable[Event], last_step: int) -> list[Span]:
    """The frozen, settling and pinned stretches of all layer modules; those still open end at `last_step`.

    Example:
        >>> log = [LayerFrozen(step=3, by="rule", layer="a"), LayerThawed(step=5, by="user", layer="a")]
        >>> [(s.layer, s.start, s.end, s.kind) for s in spans(log, 9)]
        [('a', 3, 5, 'rule')]
    """
    open_spans: dict[tuple[str, str], Span] = {}
    done: list[Span] = []

    def end(layer: str, state: str, step: int) -> None:
        ended = open_spans.pop((layer, state), None)
        if ended is not None:
            done.append(replace(ended, end=step))

    for event in events:
        match event:
            case LayerFrozen():
                end(event.layer, "settling", event.step)
                kind = "hand" if event.by in HANDS else "rule"
                span = Span(event.layer, event.step, last_step, kind, event.reason)
                open_spans.setdefault((event.layer, "frozen"), span)
            case LayerPinned():
                open_spans.setdefault((event.layer, "pinned"), Span(event.layer, event.step, last_step, "pin"))
            case LayerSettling():
                span = Span(event.layer, event.step, last_step, "settling", event.reason)
                open_spans.setdefault((event.layer, "settling"), span)
            case SettlingEnded():
                end(event.layer, "settling", event.step)
            case LayerThawed():
                end(event.layer, "frozen", event.step)
            case LayerUnpinned():
                end(event.layer, "pinned", event.step)
    return sorted([*done, *open_spans.values()], key=lambda span: span.start)


@dataclass(frozen=True, slots=True)
class MarkStyle:
    """How one kind of mark looks: in words, as a character, as a Plotly marker, in an Okabe-Ito colour."""

    words: str
    glyph: str
    symbol: str
    colour: str


MARK_STYLES = {
    "rule": MarkStyle("frozen by the rule", "◆", "diamond", "#0072B2"),
    "hand": MarkStyle("frozen by hand", "◇", "diamond-open", "#D55E00"),
    "thaw": MarkStyle("thawed", "○", "circle-open", "#009E73"),
    "pin": MarkStyle("pinned", "■", "square", "#CC79A7"),
    "unpin": MarkStyle("unpinned", "□", "square-open", "#CC79A7"),
}
"""The kinds of mark; shape and colour both tell them apart."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment at which a layer module changed state; `kind` is a key of `MARK_STYLES`."""

    step: int
    layer: str
    kind: str
    sentence: str


def marks(events: Iterable[Event]) -> list[Mark]:
    """Freezes, thaws, pins and unpins, in order.

    Example:
        >>> [m.kind for m in marks([LayerFrozen(step=3, by="user", layer="a", reason="asked for")])]
        ['hand']
    """
    found = []
    for event in events:
        match event:
            case LayerFrozen():
                kind = "hand" if event.by in HANDS else "rule"
            case LayerThawed():
                kind = "thaw"
            case LayerPinned():
                kind = "pin"
            case LayerUnpinned():
                kind = "unpin"
            case _:
                continue
        found.append(Mark(event.step, event.layer, kind, event.sentence()))
    return found


def reading_grid(
    steps: Array, layer: Array, values: Array, generation: Array, num_layers: int, most_columns: int
) -> tuple[Array, Array]:
    """Readings as a picture: one row a layer module, one column a step (or a stretch of steps).

    A cell without a reading is filled from the one before it only when the same layer has a later reading
    against the same reference; everything else stays NaN.

    Args:
        steps, layer, values, generation: columns of the table of readings, each of shape ``(n,)``.
        num_layers: number of rows.
        most_columns: readings beyond this many distinct steps are averaged in stretches.

    Returns:
        Steps of the columns, shape ``(c,)``, and the picture, shape ``(num_layers, c)``.

    Example:
        >>> zero = np.zeros(2)
        >>> x, grid = reading_grid(np.array([10.0, 20.0]), zero, np.array([1.0, 2.0]), zero, 1, 300)
        >>> x.tolist(), grid.tolist()
        ([10.0, 20.0], [[1.0, 2.0]])
    """
    moments, position = np.unique(steps, return_inverse=True)
    width = max(1, -(-len(moments) // most_columns))
    column = position // width
    columns = np.array([moments[i : i + width].mean() for i in range(0, len(moments), width)])
    grid = np.full((num_layers, len(columns)), np.nan)
    for row in range(num_layers):
        mine = np.flatnonzero((layer == row) & np.isfinite(values))
        if not len(mine):
            continue
        counts = np.bincount(column[mine], minlength=len(columns))
        sums = np.bincount(column[mine], weights=values[mine], minlength=len(columns))
        grid[row] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        for now, later in pairwise(mine):
            if generation[now] == generation[later]:
                grid[row, column[now] + 1 : column[later]] = grid[row, column[now]]
    return columns, grid
