"""The plasticity figure: lines for a few layer modules, heat maps for many."""

from __future__ import annotations

import html
from collections.abc import Iterable

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from egeria_lab.dashboard.figure_style import (
    COLOURS,
    MOST_LINES,
    NO_READING,
    SYMBOLS,
    dress,
    empty_figure,
    labels_of,
    log_range,
    mark_traces,
)
from egeria_lab.dashboard.series import (
    MARK_STYLES,
    MOST_POINTS,
    SMALLEST,
    X_AXES,
    Curve,
    LayerRow,
    curve,
    reading_grid,
    x_of_steps,
)
from egeria_lab.events import Event, ReferenceRefreshed, SettingChanged
from egeria_lab.history import VERDICTS, Array, History


def plasticity_figure(
    history: History,
    events: Iterable[Event],
    layers: Iterable[LayerRow],
    *,
    x: str = "steps",
    theme: str = "light",
) -> go.Figure:
    """Plasticity of each layer module, and how its slope compares with the tolerance.

    Above: the smoothed distance to the reference model. Below: |slope| divided by that layer's tolerance, so
    that one line, at 1, is everybody's tolerance: a layer that stays under it freezes. More than `MOST_LINES`
    layer modules are drawn as two heat maps.

    Args:
        history: the session's numbers.
        events: the session's events.
        layers: rows of `session.layers`, front to back.
        x: a key of `X_AXES`.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        UnknownNameError: for an x axis or a theme that does not exist.

    Example:
        >>> figure = plasticity_figure(History(["layers.0"]), [], [])
        >>> figure.layout.annotations[0].text
        'no reading yet: bootstrapping until the loss settles'
    """
    x_of_steps(history, [], x)
    rows, events = list(layers), list(events)
    title = "Plasticity: how fast each layer still changes"
    if not len(history.plasticity):
        return empty_figure(title, NO_READING, theme)
    draw = _plasticity_lines if len(history.layer_names) <= MOST_LINES else _plasticity_maps
    figure = draw(history, events, labels_of(history, rows), x)
    height = 660 if draw is _plasticity_lines else 760
    dress(figure, title, height, theme)
    if draw is _plasticity_maps:
        figure.update_layout(margin_t=72)  # room for the titles of the two maps
    figure.update_xaxes(title_text=X_AXES[x], row=2, col=1)
    return figure


def _style(index: int) -> tuple[dict[str, object], dict[str, object]]:
    """Line and marker of the layer module at a position."""
    colour = COLOURS[index % len(COLOURS)]
    dash = ("solid", "dash")[index // len(COLOURS) % 2]
    marker = {"symbol": SYMBOLS[index % len(SYMBOLS)], "color": colour, "size": 7, "maxdisplayed": 10}
    return {"color": colour, "dash": dash, "width": 1.8}, marker


def _alone(drawn: Curve) -> NDArray[np.intp]:
    """Positions of the points between two gaps: no line reaches them."""
    gap_before = np.isnan(np.r_[np.nan, drawn.y[:-1]])
    gap_after = np.isnan(np.r_[drawn.y[1:], np.nan])
    return np.flatnonzero(gap_before & gap_after & np.isfinite(drawn.y)) if len(drawn.y) else np.arange(0)


def _readings(history: History, x: str) -> tuple[dict[str, Array], Array, Array, Array]:
    """All readings, their x, their smoothed value and |slope| ÷ tolerance; logarithms made safe."""
    table = history.plasticity.rows()
    value = np.where(np.isfinite(table["smoothed"]), table["smoothed"], table["value"])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(table["slope"]) / np.maximum(table["tolerance"], SMALLEST**2)
    return (
        table,
        x_of_steps(history, table["step"], x),
        np.maximum(value, SMALLEST),
        np.maximum(ratio, SMALLEST),
    )


def _plasticity_lines(history: History, events: list[Event], labels: list[str], x: str) -> go.Figure:
    table, at, value, ratio = _readings(history, x)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07)
    details = np.stack([table["step"], table["value"], table["slope"], table["tolerance"]])
    for index, label in enumerate(labels):
        mine = np.flatnonzero(table["layer"] == index)
        line, marker = _style(index)
        for panel, y in ((1, value), (2, ratio)):
            drawn = curve(at, y, mine, table["generation"])
            verdict = drawn.column(table["verdict"])
            words = [VERDICTS[int(v)] if np.isfinite(v) else "" for v in verdict]
            custom = np.stack([drawn.column(column) for column in details], axis=1)
            figure.add_scatter(
                x=drawn.x, y=drawn.y, mode="lines+markers", name=label, legendgroup=label,
                line=line, marker=marker, connectgaps=False, showlegend=panel == 1,
                customdata=custom, text=words, row=panel, col=1,
                hovertemplate="step %{customdata[0]:.0f}: distance %{customdata[1]:.3g}<br>slope "
                "%{customdata[2]:.3g} per reading, tolerance %{customdata[3]:.3g}<br>%{text}",
            )  # fmt: skip
            lone = _alone(drawn)
            if len(lone):
                figure.add_scatter(
                    x=drawn.x[lone], y=drawn.y[lone], mode="markers", name=label, legendgroup=label,
                    marker={**marker, "maxdisplayed": 0}, showlegend=False, hoverinfo="skip",
                    row=panel, col=1,
                )  # fmt: skip
    top, bottom = log_range(value), log_range(ratio, np.array([0.3, 3.0]))
    bottom = [max(bottom[0], -4.0), min(bottom[1], 4.0)]
    _references(figure, history, events, x, [top, bottom])
    _tolerance(figure, history, events, x, bottom)
    exponents = {"type": "log", "dtick": 1, "exponentformat": "power"}
    figure.update_yaxes(title_text="SP distance to reference", range=top, **exponents, row=1, col=1)
    figure.update_yaxes(title_text="|slope| ÷ tolerance", range=bottom, **exponents, row=2, col=1)
    return figure


def _references(figure: go.Figure, history: History, events: list[Event], x: str, ranges: list[list[float]]) -> None:
    """A thin upright line in each panel where the reference model was replaced."""
    steps = [float(event.step) for event in events if isinstance(event, ReferenceRefreshed)]
    if not steps:
        return
    at = x_of_steps(history, steps[-MOST_POINTS // 3 :], x)
    for panel, (low, high) in enumerate(ranges, start=1):
        y = np.tile([10**low, 10**high, np.nan], len(at))
        figure.add_scatter(
            x=np.repeat(at, 3), y=y, mode="lines", name="reference refreshed", legendgroup="reference",
            line={"color": "#999999", "dash": "dot", "width": 1}, hoverinfo="skip", showlegend=panel == 1,
            row=panel, col=1,
        )  # fmt: skip


def _tolerance(figure: go.Figure, history: History, events: list[Event], x: str, exponents: list[float]) -> None:
    """The line at 1, the zone under it, and where somebody moved the tolerance."""
    last = float(np.nanmax(history.plasticity["step"]))
    ends = x_of_steps(history, [0.0, max(last, history.steps.last().get("step", last))], x)
    figure.add_scatter(
        x=np.r_[ends, ends[::-1]], y=[1.0, 1.0, 10 ** exponents[0], 10 ** exponents[0]], mode="lines",
        line={"width": 0}, fill="toself", fillcolor="rgba(0,158,115,0.10)", hoverinfo="skip",
        name="quiet enough to freeze", row=2, col=1,
    )  # fmt: skip
    figure.add_scatter(
        x=ends, y=[1.0, 1.0], mode="lines", name="tolerance", hoverinfo="skip",
        line={"color": "#808080", "dash": "dash", "width": 2}, row=2, col=1,
    )  # fmt: skip
    moved = [e for e in events if isinstance(e, SettingChanged) and e.name.endswith("tolerance")]
    if moved:
        figure.add_scatter(
            x=x_of_steps(history, [float(e.step) for e in moved], x), y=np.ones(len(moved)), mode="markers",
            marker={"symbol": "triangle-down", "size": 11, "color": "#808080"}, name="tolerance changed",
            text=[html.escape(e.sentence()) for e in moved], hovertemplate="%{text}<extra></extra>",
            row=2, col=1,
        )  # fmt: skip
    if not np.isfinite(history.plasticity["tolerance"]).any():
        figure.add_annotation(
            text="tolerance not tuned yet: it comes from a layer's first slopes", showarrow=False,
            xref="x2 domain", yref="y2 domain", x=0.5, y=0.3,
        )  # fmt: skip


def _plasticity_maps(history: History, events: list[Event], labels: list[str], x: str) -> go.Figure:
    table, _, value, ratio = _readings(history, x)
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.12,
        subplot_titles=(
            "distance to the reference model, front layer on top",
            "slope against tolerance (blue: quiet enough to freeze)",
        ),
    )  # fmt: skip
    looks = (
        ("Cividis", None, "log10 of SP distance", 1, value),
        ([[0, "#0072B2"], [0.5, "#d9d9d9"], [1, "#D55E00"]], 1.5, "log10 of |slope| ÷ tolerance", 2, ratio),
    )
    for scale, limit, words, panel, values in looks:
        steps, grid = reading_grid(
            table["step"], table["layer"], np.log10(values), table["generation"], len(labels), 300
        )
        figure.add_heatmap(
            x=x_of_steps(history, steps, x), y=np.arange(len(labels)), z=grid.astype(np.float32),
            colorscale=scale, zmin=None if limit is None else -limit, zmax=limit, hoverongaps=False,
            colorbar={"title": {"text": words, "side": "right"}, "thickness": 12, "len": 0.46,
                      "y": 0.78 if panel == 1 else 0.22},
            text=np.repeat(np.array(labels)[:, None], grid.shape[1], axis=1) if panel == 1 else None,
            hovertemplate="layer %{y}<br>%{x}: 10^%{z:.2f}<extra></extra>", row=panel, col=1,
        )  # fmt: skip
        mark_traces(figure, history, events, x, panel, legend=tuple(MARK_STYLES) if panel == 1 else ())
    step = max(1, -(-len(labels) // 20))
    figure.update_yaxes(
        tickvals=list(range(0, len(labels), step)), ticktext=labels[::step], showgrid=False,
        range=[len(labels) - 0.5, -0.5], tickfont={"size": 10},
    )  # fmt: skip
    figure.update_xaxes(showgrid=False)
    return figure
