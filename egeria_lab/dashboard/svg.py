"""The little SVG that the static view needs: a frame with axes, lines with gaps, bars, words, a legend."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from egeria_lab.dashboard.series import Curve


@dataclass(frozen=True, slots=True)
class Frame:
    """Maps data to the picture: x grows from `x_low` to the right, y from `y_low` at the bottom upwards.

    Example:
        >>> frame = Frame(0, 100, 0, 1)
        >>> frame.x(0) == frame.left, frame.y(0) == frame.bottom, frame.y(1) == frame.top
        (True, True, True)
    """

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    unit: str = ""
    log: bool = False
    width: int = 440
    height: int = 170
    left: int = 52
    top: int = 16

    @classmethod
    def around(cls, curves: Sequence[Curve], *, x_end: float, unit: str = "", log: bool = False) -> Frame:
        """A frame that starts at x = 0 and holds every point; `log` says that y is an exponent of ten."""
        drawn = np.concatenate([c.y[np.isfinite(c.y)] for c in curves])
        low, high = (float(drawn.min()), float(drawn.max())) if len(drawn) else (0.0, 1.0)
        air = 0.04 * (high - low) if log else 0.0
        return cls(0.0, x_end, low - air, high + air, unit, log)

    @property
    def bottom(self) -> int:
        """y of the x axis, in the picture."""
        return self.height - 30

    def x(self, value: float) -> float:
        """Where a data x lies in the picture."""
        share = (value - self.x_low) / max(self.x_high - self.x_low, 1e-12)
        return self.left + share * (self.width - self.left - 12)

    def y(self, value: float) -> float:
        """Where a data y lies in the picture."""
        share = (value - self.y_low) / max(self.y_high - self.y_low, 1e-12)
        return self.bottom - share * (self.bottom - self.top)

    def x_axis(self, title: str) -> str:
        """The line at the bottom with its ends and its middle named."""
        ticks = "".join(
            text(self.x(value), self.bottom + 12, f"{value:,.0f}", anchor=anchor)
            for value, anchor in ((self.x_low, "start"), (self.x_high, "end"))
        )
        middle = text((self.left + self.width) / 2, self.bottom + 24, title, anchor="middle")
        path = f"M{self.left} {self.bottom}H{self.width - 12}"
        rule = f'<path d="{path}" stroke="currentColor" stroke-opacity=".5"/>'
        return rule + ticks + middle

    def axes(self, title: str) -> str:
        """Both axes: three faint lines across with their values, and the x axis."""
        marks = []
        for value in np.linspace(self.y_low, self.y_high, 3):
            large = abs(value) >= 1000
            word = f"{10**value:.0e}" if self.log else f"{value:{',.0f' if large else '.3g'}}{self.unit}"
            y = self.y(value)
            marks.append(
                f'<path d="M{self.left} {y:.1f}H{self.width - 12}" stroke="currentColor" '
                'stroke-opacity=".15"/>' + text(self.left - 4, y + 4, word, anchor="end")
            )
        return "".join(marks) + self.x_axis(title)

    def svg(self, body: str, label: str) -> str:
        """The picture itself; `label` is read out in its place."""
        return (
            f'<svg role="img" aria-label="{html.escape(label, quote=True)}" '
            f'viewBox="0 0 {self.width} {self.height}" '
            'style="width:100%;max-width:600px;height:auto;display:block" fill="none" font-size="11">'
            f"{body}</svg>"
        )


def text(
    x: float, y: float, words: str, *, anchor: str = "start", colour: str = "currentColor", hover: str = ""
) -> str:
    """A word in the picture; `hover` appears when the pointer rests on it.

    Example:
        >>> text(1, 2, "a < b")
        '<text x="1.0" y="2.0" text-anchor="start" fill="currentColor">a &lt; b</text>'
    """
    title = f"<title>{html.escape(hover)}</title>" if hover else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{title}{html.escape(words)}</text>'


def line(frame: Frame, drawn: Curve, colour: str, dash: str) -> str:
    """A curve as one path, lifted at each gap.

    Example:
        >>> gap = Curve(np.array([0.0, np.nan, 1]), np.array([0.0, np.nan, 1]), np.array([0, -1, 1]))
        >>> line(Frame(0, 1, 0, 1), gap, "red", "").count("M")
        2
    """
    points, pen = [], "M"
    for x, y in zip(drawn.x, drawn.y, strict=True):
        if np.isfinite(x) and np.isfinite(y):
            start = "h0" if pen == "M" else ""  # so that a point on its own is drawn, as a dot
            points.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}{start}")
            pen = "L"
        else:
            pen = "M"
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path d="{"".join(points)}" stroke="{colour}" stroke-width="1.6" stroke-linecap="round"{dashes}/>'
        if points
        else ""
    )


def dot(frame: Frame, x: float, y: float, colour: str) -> str:
    """A small square at a point."""
    return rectangle(frame.x(x) - 2, frame.y(y) - 2, 4, 4, colour)


def rectangle(
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str,
    *,
    opacity: float = 1,
    dash: str = "",
    hover: str = "",
) -> str:
    """A bar, with a dashed edge where asked for; never thinner than one unit.

    Example:
        >>> rectangle(0, 0, 0, 5, "red")
        '<rect x="0.0" y="0.0" width="1.0" height="5.0" fill="red"></rect>'
    """
    edge = f' stroke="currentColor" stroke-dasharray="{dash}"' if dash else ""
    faint = f' fill-opacity="{opacity}"' if opacity < 1 else ""
    title = f"<title>{html.escape(hover)}</title>" if hover else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}"{faint}{edge}>{title}</rect>'


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """Names with a piece of their line before them: (name, colour, dash)."""
    items = []
    for name, colour, dash in entries:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        items.append(
            '<span style="white-space:nowrap;margin-right:12px">'
            '<svg width="22" height="8" aria-hidden="true">'
            f'<path d="M0 4H22" stroke="{colour}" stroke-width="3"{dashes}/></svg> {html.escape(name)}</span>'
        )
    return f'<div style="font-size:12px;display:flex;flex-wrap:wrap">{"".join(items)}</div>'


def panel(title: str, body: str) -> str:
    """A titled part of the static view."""
    heading = f'<div style="font-weight:600;margin-bottom:2px">{html.escape(title)}</div>'
    return f'<div style="min-width:0;overflow-x:auto">{heading}{body}</div>'


def fallback(sentence: str) -> str:
    """What stands in place of a picture while there is nothing to draw."""
    return f'<p style="margin:24px 0;opacity:.8">{html.escape(sentence)}</p>'
