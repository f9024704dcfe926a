"""The plots on a suite's page: lines and points, both axes linear or both logarithmic, without outside parts."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from egeria_lab.dashboard.figure_style import COLOURS
from egeria_lab.dashboard.series import Curve
from egeria_lab.dashboard.svg import Frame, dot, legend, line, text
from egeria_lab.errors import require

DASHES = ("", "7 3", "2 3")
NUM_TICKS = 5

Chart = dict[str, Any]
"""``{"title", "x", "y", "log", "lines": [{"name", "x": [...], "y": [...]}]}``, all of it JSON."""


def chart(
    title: str, x: str, y: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, log: bool = False
) -> Chart:
    """Figures to be drawn together; points that are no numbers, or not > 0 where `log`, are left out.

    Args:
        title: of the plot.
        x: title of the x axis, with its unit.
        y: title of the y axis, with its unit.
        lines: name → its points, in order of x.
        log: both axes are logarithmic.

    Example:
        >>> chart("growth", "layers", "seconds", {"a": [(8, 1.0), (80, float("nan"))]})["lines"]
        [{'name': 'a', 'x': [8.0], 'y': [1.0]}]
    """
    require(bool(lines), "chart", "lines", dict(lines), "at least one line")
    drawn = []
    for name, points in lines.items():
        good = [(a, b) for a, b in points if math.isfinite(a) and math.isfinite(b) and (not log or min(a, b) > 0)]
        drawn.append({"name": name, "x": [float(a) for a, _ in good], "y": [float(b) for _, b in good]})
    return {"title": title, "x": x, "y": y, "log": log, "lines": drawn}


def as_svg(found: Chart) -> str:
    """The plot, its legend below it.

    Example:
        >>> as_svg(chart("growth", "layers", "seconds", {"a": [(8, 1.0), (80, 9.0)]})).count("<rect")  # two points
        2
    """
    scale = np.log10 if found["log"] else np.asarray
    curves = [
        Curve(scale(np.array(each["x"], float)), scale(np.array(each["y"], float)), np.arange(len(each["x"])))
        for each in found["lines"]
    ]
    xs, ys = (np.concatenate([getattr(curve, name) for curve in curves]) for name in ("x", "y"))
    if not len(xs):
        return f"<p>{html.escape(found['title'])}: nothing to draw</p>"
    frame = Frame(
        float(xs.min()) if found["log"] else 0.0, float(xs.max()), *_span(ys), width=600, height=300, left=64, top=30
    )
    looks = [(COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]) for i in range(len(curves))]
    body = [_axes(frame, found)]
    for curve, (colour, dash) in zip(curves, looks, strict=True):
        body.append(line(frame, curve, colour, dash))
        body += [dot(frame, float(a), float(b), colour) for a, b in zip(curve.x, curve.y, strict=True)]
    names = [each["name"] for each in found["lines"]]
    key = legend((name, *look) for name, look in zip(names, looks, strict=True))
    picture = frame.svg("".join(body), _said(found))
    return f"<figure><figcaption>{html.escape(found['title'])}</figcaption>{picture}{key}</figure>"


def _span(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    air = 0.05 * (high - low) or 0.5
    return low - air, high + air


def _axes(frame: Frame, found: Chart) -> str:
    parts = [text(frame.left, 14, found["y"])]
    for value in np.linspace(frame.y_low, frame.y_high, NUM_TICKS):
        y = frame.y(float(value))
        parts.append(f'<path d="M{frame.left} {y:.1f}H{frame.width - 12}" stroke="currentColor" stroke-opacity=".15"/>')
        parts.append(text(frame.left - 4, y + 4, _word(float(value), found["log"]), anchor="end"))
    for value in np.linspace(frame.x_low, frame.x_high, NUM_TICKS):
        anchor = "end" if value == frame.x_high else "middle"
        parts.append(text(frame.x(float(value)), frame.bottom + 12, _word(float(value), found["log"]), anchor=anchor))
    parts.append(text((frame.left + frame.width) / 2, frame.bottom + 26, found["x"], anchor="middle"))
    return "".join(parts)


def _word(value: float, log: bool) -> str:
    shown = 10**value if log else value
    return f"{shown:,.0f}" if 1000 <= abs(shown) < 1e7 else f"{shown:.3g}"


def _said(found: Chart) -> str:
    return f"{found['title']}: {found['y']} against {found['x']}, {', '.join(each['name'] for each in found['lines'])}"
