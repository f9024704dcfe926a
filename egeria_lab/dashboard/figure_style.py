"""What all figures share: colours, shapes, title, axes, and the figure that says why it is empty."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio

from egeria_lab.dashboard.series import (
    MARK_STYLES,
    MOST_POINTS,
    SMALLEST,
    LayerRow,
    MarkStyle,
    marks,
    x_of_steps,
)
from egeria_lab.errors import unknown_name
from egeria_lab.events import Event
from egeria_lab.history import Array, History

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's colours, without the yellow and the black that vanish on white and on dark."""

SYMBOLS = (
    "circle", "square", "diamond", "triangle-up", "cross", "x",
    "circle-open", "square-open", "diamond-open", "triangle-down", "star", "hexagram",
)  # fmt: skip

MOST_LINES = 12
"""With more layer modules than this, plasticity is drawn as a heat map."""

MOST_DECADES = 8.0
"""A logarithmic axis starts no further than this below the largest value; zooming out shows the rest."""

SPAN_BARS = {
    "rule": ("frozen by the rule", "#56B4E9", "", 0.8),
    "hand": ("frozen by hand", "#E69F00", "/", 0.8),
    "settling": ("settling: trained less and less", "rgba(86,180,233,0.5)", "", 0.3),
}
"""Words, colour, hatching and width of a layer's stretches in a timeline."""
NO_READING = "no reading yet: bootstrapping until the loss settles"
NO_STEP = "no step yet: press Start or call session.start()"

THEMES = {
    "light": {"ink": "#1f2328", "grid": "#e3e6ea", "paper": "#ffffff"},
    "dark": {"ink": "#e6e6e6", "grid": "#3d4148", "paper": "#16181d"},
}
"""Colours of text, grid lines and background."""


def layer_label(row: LayerRow, most: int = 30) -> str:
    """Name and title of a layer module, shortened in the middle, safe to show in a figure.

    Example:
        >>> from types import SimpleNamespace
        >>> layer_label(SimpleNamespace(name="layers.0", title="stem"))
        'layers.0 · stem'
    """
    label = f"{row.name} · {row.title}" if row.title and row.title != row.name else row.name
    if len(label) > most:
        label = f"{label[: most // 2 - 1]}…{label[-(most // 2) :]}"
    return html.escape(label)


def dress(figure: go.Figure, title: str, height: int, theme: str) -> go.Figure:
    """Title, size and colours that all figures share."""
    if theme not in THEMES:
        raise unknown_name("theme", theme, THEMES)
    colours = THEMES[theme]
    figure.update_layout(
        template="none",
        title={"text": title, "x": 0, "xref": "container", "yref": "container", "y": 1,
               "yanchor": "top", "pad": {"t": 10, "l": 12}, "font": {"size": 16}},
        height=height,
        margin={"l": 68, "r": 18, "t": 48, "b": 56},
        font={"color": colours["ink"], "size": 12, "family": "system-ui, sans-serif"},
        paper_bgcolor=colours["paper"],
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        hovermode="closest",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#9aa4af", "activecolor": colours["ink"]},
    )  # fmt: skip
    figure.update_xaxes(gridcolor=colours["grid"], zeroline=False, title_standoff=8, automargin=True)
    figure.update_yaxes(gridcolor=colours["grid"], zeroline=False, title_standoff=8, automargin=True)
    return figure


def style_plots(theme: str = "light") -> None:
    """From now on every Plotly figure of this process looks like ours, those of Plotly Express and of pandas too.

    Args:
        theme: ``"light"`` or ``"dark"``, for a notebook in a dark JupyterLab.

    Raises:
        UnknownNameError: for any other.

    Example:
        >>> before = pio.templates.default
        >>> style_plots("dark")
        >>> pio.templates.default, pio.templates["egeria_lab"].layout.paper_bgcolor
        ('egeria_lab', '#16181d')
        >>> pio.templates.default = before
    """
    bare = dress(go.Figure(), "", 340, theme).update_layout(
        colorway=COLOURS, legend={"orientation": "v", "y": 1, "x": 1.02, "yanchor": "top", "yref": "paper"}
    )
    axis = {"gridcolor": THEMES[theme]["grid"], "zeroline": False, "automargin": True, "exponentformat": "power"}
    layout = {**bare.layout.to_plotly_json(), "template": None, "xaxis": axis, "yaxis": axis, "bargap": 0.25}
    pio.templates["egeria_lab"] = go.layout.Template(layout=layout)
    pio.templates.default = "egeria_lab"


def empty_figure(title: str, sentence: str, theme: str = "light") -> go.Figure:
    """A figure that says why there is nothing to see.

    Example:
        >>> empty_figure("Plasticity", NO_READING).layout.annotations[0].text
        'no reading yet: bootstrapping until the loss settles'
    """
    figure = go.Figure()
    figure.add_annotation(text=sentence, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 14})
    dress(figure, title, 190, theme)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure


def log_range(*values: Array) -> list[float]:
    """Range of a logarithmic axis, as exponents of ten: what is drawn, with a little air."""
    drawn = np.concatenate([v[np.isfinite(v)] for v in values]) if values else np.array([])
    above = drawn[drawn > SMALLEST]
    if not len(above):
        return [-1.0, 1.0] if not len(drawn) else [np.log10(SMALLEST) - 1, np.log10(SMALLEST) + 1]
    low, high = float(np.log10(above.min())), float(np.log10(above.max()))
    low = max(low, high - MOST_DECADES)
    air = max(0.08 * (high - low), 0.1)
    return [low - air, high + air]


def hatch(shape: str) -> dict[str, object]:
    """A pattern over a bar's own colour, so that the bar can be told without seeing colours."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "#333333", "size": 7, "solidity": 0.2}


def labels_of(history: History, rows: Sequence[LayerRow]) -> list[str]:
    known = {row.name: layer_label(row) for row in rows}
    return [known.get(name, html.escape(name)) for name in history.layer_names]


def mark_traces(
    figure: go.Figure,
    history: History,
    events: list[Event],
    x: str,
    panel: int = 1,
    *,
    legend: Sequence[str] = (),
) -> None:
    """Freezes, thaws and pins at the height of their layer; the kinds in `legend` are named."""
    place = {name: index for index, name in enumerate(history.layer_names)}
    found = [mark for mark in marks(events) if mark.layer in place]
    for kind, style in MARK_STYLES.items():
        mine = [mark for mark in found if mark.kind == kind][-MOST_POINTS:]
        if mine:
            figure.add_scatter(
                x=x_of_steps(history, [float(m.step) for m in mine], x), y=[place[m.layer] for m in mine],
                mode="markers", name=style.words, legendgroup=kind, showlegend=kind in legend,
                marker=marker_of(style, 10), cliponaxis=False,
                text=[f"step {m.step}: {html.escape(m.sentence)}" for m in mine],
                hovertemplate="%{text}<extra></extra>", row=panel, col=1,
            )  # fmt: skip


def marker_of(style: MarkStyle, size: int) -> dict[str, object]:
    """A mark for Plotly: open shapes are white inside, filled ones have a white edge, to stand out."""
    is_open = style.symbol.endswith("-open")
    return {
        "symbol": style.symbol.removesuffix("-open"),
        "size": size,
        "color": "#ffffff" if is_open else style.colour,
        "line": {"width": 2 if is_open else 1.5, "color": style.colour if is_open else "#ffffff"},
    }
