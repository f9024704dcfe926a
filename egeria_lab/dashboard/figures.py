"""History, events, layers and ledger in, Plotly figure out. Pure: no widget, no state, nothing changed.

Every figure says in words when there is nothing to draw yet. Colours are Okabe-Ito's; shape, dash or pattern
repeats what colour says. Lines never join readings that were taken against different reference models.
The file is one piece because a reader compares the figures with each other.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from egeria_lab.dashboard.figure_plasticity import plasticity_figure
from egeria_lab.dashboard.figure_style import (
    COLOURS,
    MOST_LINES,
    NO_STEP,
    SPAN_BARS,
    dress,
    empty_figure,
    hatch,
    labels_of,
    mark_traces,
    marker_of,
    style_plots,
)
from egeria_lab.dashboard.figure_techniques import sieve_figure, sparsity_figure
from egeria_lab.dashboard.saving_rows import saving_rows
from egeria_lab.dashboard.series import (
    MARK_STYLES,
    MOST_POINTS,
    X_AXES,
    LayerRow,
    curve,
    marks,
    spans,
    trailing_mean,
    x_of_steps,
)
from egeria_lab.events import BootstrapFinished, Event
from egeria_lab.history import Array, History
from egeria_lab.tables import percent

__all__ = [
    "empty_figure",
    "learning_figure",
    "plasticity_figure",
    "savings_figure",
    "savings_over_time_figure",
    "sieve_figure",
    "sparsity_figure",
    "style_plots",
    "timeline_figure",
]


def timeline_figure(
    history: History,
    events: Iterable[Event],
    layers: Iterable[LayerRow],
    *,
    x: str = "steps",
    theme: str = "light",
) -> go.Figure:
    """When each layer module trained, was frozen (by the rule or by hand) and was pinned.

    Args, errors: as `plasticity_figure`.

    Example:
        >>> timeline_figure(History(["layers.0"]), [], []).layout.annotations[0].text
        'no step yet: press Start or call session.start()'
    """
    title = "Freeze timeline (front layer on top)"
    x_of_steps(history, [], x)
    rows, events = list(layers), list(events)
    last = int(history.steps.last().get("step", 0))
    if last == 0 and not marks(events):
        return empty_figure(title, NO_STEP, theme)
    labels = labels_of(history, rows)
    figure = make_subplots(rows=1, cols=1)
    end = float(x_of_steps(history, [float(last)], x)[0])
    figure.add_bar(
        y=np.arange(len(labels)), x=np.full(len(labels), end), orientation="h", name="training", width=0.8,
        marker={"color": "rgba(128,128,128,0.16)", "line": {"width": 0}}, hoverinfo="skip",
    )  # fmt: skip
    _span_bars(figure, history, events, x, last)
    mark_traces(figure, history, events, x, legend=("thaw", "unpin"))
    _bootstrap_zone(figure, history, events, x, end)
    small = len(labels) > 20
    height = 250 + len(labels) * (13 if small else 28)
    figure.update_layout(barmode="overlay", bargap=0)
    dress(figure, title, height, theme)
    figure.update_yaxes(
        tickvals=list(range(len(labels))), ticktext=labels, range=[len(labels) - 0.4, -0.6], showgrid=False,
        tickfont={"size": 9 if small else 12},
    )  # fmt: skip
    figure.update_xaxes(title_text=X_AXES[x], range=[0, 1.02 * end if end > 0 else 1])
    return figure


def _span_bars(figure: go.Figure, history: History, events: list[Event], x: str, last: int) -> None:
    place = {name: index for index, name in enumerate(history.layer_names)}
    found = [span for span in spans(events, last) if span.layer in place]
    looks = {**SPAN_BARS, "pin": ("pinned: no rule may freeze it", "#CC79A7", ".", 0.26)}
    for kind, (name, colour, pattern, width) in looks.items():
        mine = [span for span in found if span.kind == kind]
        if not mine:
            continue
        start = x_of_steps(history, [float(s.start) for s in mine], x)
        stop = x_of_steps(history, [float(s.end) for s in mine], x)
        figure.add_bar(
            y=[place[s.layer] for s in mine], x=stop - start, base=start, orientation="h", name=name,
            width=width, marker={"color": colour, "pattern": hatch(pattern), "line": {"width": 0}},
            text=[html.escape(f"{s.layer}, steps {s.start} to {s.end}: {s.reason}") for s in mine],
            textposition="none", hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip


def _bootstrap_zone(figure: go.Figure, history: History, events: list[Event], x: str, end: float) -> None:
    over = [event for event in events if isinstance(event, BootstrapFinished)]
    edge = float(x_of_steps(history, [float(over[0].step)], x)[0]) if over else end
    if any(span.kind == "rule" for span in spans(events, 1)) and not over:
        return  # a rule without a critical period
    figure.add_scatter(
        x=[edge, edge], y=[-0.6, len(history.layer_names) - 0.4], mode="lines", hoverinfo="skip",
        line={"color": "#808080", "dash": "dot", "width": 1.5},
        name="bootstrapping ends" if over else "still bootstrapping: no rule freezes yet",
    )  # fmt: skip


def learning_figure(history: History, events: Iterable[Event], *, x: str = "steps", theme: str = "light") -> go.Figure:
    """Loss and accuracy, in training and in validation, with a mark at every freeze, thaw and pin.

    Args, errors: as `plasticity_figure`.

    Example:
        >>> learning_figure(History(["layers.0"]), []).layout.annotations[0].text
        'no step yet: press Start or call session.start()'
    """
    title = "Loss and accuracy, with freeze marks"
    at = x_of_steps(history, history.steps["step"], x)
    events = list(events)
    if not len(history.steps):
        return empty_figure(title, NO_STEP, theme)
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.045, row_heights=[0.08, 0.46, 0.46])
    _mark_strip(figure, history, events, x)
    window = min(max(len(at) // 60, 1), 200)
    for panel, name, scale in ((2, "loss", 1.0), (3, "accuracy", 100.0)):
        _learning_lines(figure, history, at, x, panel, name, scale, window)
    dress(figure, title, 600, theme)
    figure.update_yaxes(visible=False, range=[-1, 1], row=1, col=1)
    figure.update_yaxes(title_text="loss", row=2, col=1)
    figure.update_yaxes(title_text="accuracy (%)", row=3, col=1)
    figure.update_xaxes(showgrid=False, row=1, col=1)
    figure.update_xaxes(title_text=X_AXES[x], row=3, col=1)
    return figure


def _learning_lines(
    figure: go.Figure, history: History, at: Array, x: str, panel: int, name: str, scale: float, window: int
) -> None:
    values = scale * history.steps[name][: len(at)]
    finite = np.flatnonzero(np.isfinite(values))
    smooth = np.full(len(values), np.nan)
    smooth[finite] = trailing_mean(values[finite], window)
    one = np.zeros(len(values))
    raw, mean = curve(at, values, finite, one), curve(at, smooth, finite, one)
    if window > 1:
        figure.add_scatter(
            x=raw.x, y=raw.y, mode="lines", name="each batch", legendgroup="raw", hoverinfo="skip",
            line={"color": "rgba(86,180,233,0.35)", "width": 1}, showlegend=panel == 2, row=panel, col=1,
        )  # fmt: skip
    words = f"training, mean of the last {window} steps" if window > 1 else "training, each batch"
    figure.add_scatter(
        x=mean.x, y=mean.y, mode="lines", name=words, legendgroup="mean", showlegend=panel == 2,
        line={"color": COLOURS[0], "width": 2}, row=panel, col=1,
        hovertemplate="%{x}: %{y:.4g}<extra>training " + name + "</extra>",
    )  # fmt: skip
    epochs = history.epochs.rows()
    valid = scale * epochs[f"valid_{name}"]
    drawn = curve(x_of_steps(history, epochs["step"], x), valid, np.arange(len(valid)), np.zeros(len(valid)))
    figure.add_scatter(
        x=drawn.x, y=drawn.y, mode="lines+markers", name="validation, each epoch", legendgroup="valid",
        line={"color": COLOURS[1], "dash": "dash"}, showlegend=panel == 2,
        marker={"symbol": "square", "size": 7, "maxdisplayed": 40}, row=panel, col=1,
        hovertemplate="%{x}: %{y:.4g}<extra>validation " + name + "</extra>",
    )  # fmt: skip


def _mark_strip(figure: go.Figure, history: History, events: list[Event], x: str) -> None:
    """The strip above the curves: a marker an event; while they are few, upright lines through the panels."""
    found = marks(events)
    for kind, style in MARK_STYLES.items():
        mine = [mark for mark in found if mark.kind == kind][-MOST_POINTS:]
        if not mine:
            continue
        at = x_of_steps(history, [float(mark.step) for mark in mine], x)
        figure.add_scatter(
            x=at, y=np.zeros(len(at)), mode="markers", name=style.words,
            marker=marker_of(style, 11),
            text=[f"step {mark.step}: {html.escape(mark.sentence)}" for mark in mine],
            hovertemplate="%{text}<extra></extra>", row=1, col=1,
        )  # fmt: skip
        if len(found) <= 2 * MOST_LINES:
            for moment in at:
                figure.add_shape(
                    type="line", x0=moment, x1=moment, xref="x", y0=0, y1=0.94, yref="paper", layer="between",
                    line={"color": style.colour, "width": 1, "dash": "solid" if kind == "rule" else "dash"},
                )  # fmt: skip


def savings_figure(ledger: Mapping[str, object], *, theme: str = "light") -> go.Figure:
    """Theoretical and measured savings side by side; what monitoring costs points the other way.

    Args:
        ledger: `session.savings().to_dict()`.
        theme: ``"light"`` or ``"dark"``.

    Example:
        >>> ledger = {"flops": {"saved_fraction": 0.25}, "time": {"measured_saved_fraction": 0.2}}
        >>> [bar.name for bar in savings_figure(ledger).data]
        ['theoretical', 'measured']
    """
    rows = saving_rows(ledger)
    alone = len(rows) == 4
    title = "Savings against training without freezing" if alone else "Savings of each technique, and all together"
    if all(row.theoretical is None and row.measured is None for row in rows):
        return empty_figure(title, NO_STEP, theme)
    figure = go.Figure()
    names = ["<br>(".join([_broken(first), *rest]) for first, *rest in (row.quantity.split(" (") for row in rows)]
    looks = (("theoretical", "#E69F00", "/"), ("measured", "#0072B2", ""))
    shares: list[float] = [0.0, 0.1]
    for name, colour, pattern in looks:
        found = [row.theoretical if name == "theoretical" else row.measured for row in rows]
        signed = [
            None if share is None else -share if row.is_cost else share for row, share in zip(rows, found, strict=True)
        ]
        shares += [share for share in signed if share is not None]
        figure.add_bar(
            y=names, x=[None if share is None else 100 * share for share in signed], orientation="h",
            name=name, text=[percent(share) if share is not None else "" for share in signed],
            textposition="outside", cliponaxis=False,
            marker={"color": colour, "pattern": hatch(pattern)},
            customdata=[html.escape(row.why) for row in rows],
            hovertemplate="%{y}: %{x:.2f} %<br>%{customdata}<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.update_layout(barmode="group", bargap=0.3)
    dress(figure, title, max(380, 92 * len(rows)), theme)
    reach = max(shares) - min(shares)
    low = 100 * (min(shares) - 0.22 * reach) if min(shares) < 0 else 0.0
    figure.update_xaxes(
        title_text="saved (%); to the left of 0: spent or lost",
        range=[low, 100 * (max(shares) + 0.22 * reach)],
        zeroline=True, zerolinecolor="#808080", zerolinewidth=2,
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_layout(legend={"traceorder": "normal"})
    return figure


def _broken(words: str, most: int = 20) -> str:
    """A name of a bar in lines of not many more characters than `most`."""
    lines = [""]
    for word in words.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) > most:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(lines)


def savings_over_time_figure(history: History, *, x: str = "steps", theme: str = "light") -> go.Figure:
    """How the savings and the cost of monitoring developed.

    Args, errors: as `plasticity_figure`.

    Example:
        >>> history = History(["layers.0"])
        >>> history.savings.append(step=10, flops_saved_fraction=0.1, monitor_fraction=0.02)
        >>> [line.name for line in savings_over_time_figure(history).data]
        ['computation, theoretical', 'cost of monitoring']
    """
    title = "Savings over time"
    table = history.savings.rows()
    at = x_of_steps(history, table["step"], x)
    if not len(at):
        return empty_figure(title, NO_STEP, theme)
    with np.errstate(divide="ignore", invalid="ignore"):
        memory = 1 - table["saved_tensor_bytes"] / table["full_saved_tensor_bytes"]
    lines = (
        ("computation, theoretical", table["flops_saved_fraction"], "#E69F00", "dash", "diamond"),
        ("time, measured", table["time_saved_fraction"], "#0072B2", "solid", "circle"),
        ("memory for backward, measured", memory, "#009E73", "dot", "square"),
        ("cost of monitoring", table["monitor_fraction"], "#D55E00", "dashdot", "x"),
    )
    figure = go.Figure()
    for name, values, colour, dash, symbol in lines:
        drawn = curve(at, 100 * values, np.arange(len(at)), np.zeros(len(at)))
        if len(drawn.x):
            figure.add_scatter(
                x=drawn.x, y=drawn.y, mode="lines+markers", name=name,
                line={"color": colour, "dash": dash, "width": 2},
                marker={"symbol": symbol, "size": 7, "maxdisplayed": 12},
                hovertemplate="%{x}: %{y:.2f} %<extra>" + name + "</extra>",
            )  # fmt: skip
    dress(figure, title, 380, theme)
    figure.update_xaxes(title_text=X_AXES[x])
    figure.update_yaxes(title_text="share of the full cost (%)", rangemode="tozero")
    return figure
