"""Several runs in one Plotly figure: accuracy against time and against work, and when each froze what."""

from __future__ import annotations

import html
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from egeria_lab.dashboard.compare_runs import Run
from egeria_lab.dashboard.compare_table import accuracy_points
from egeria_lab.dashboard.figure_style import COLOURS, SPAN_BARS, SYMBOLS, dress, empty_figure, hatch
from egeria_lab.dashboard.series import X_AXES, spans, thin, x_of_steps

TITLE = "Runs compared"
NO_STEPS = "no step yet in any of these runs: start one"
DASHES = ("solid", "dash", "dot")
PAIR = ("seconds", "flops")
"""The x axes of the two charts of accuracy."""

MOST_POINTS = 400


def look(index: int) -> tuple[str, str, str]:
    """Colour, dash and shape of run number `index`: no two of twelve are alike.

    Example:
        >>> len({look(index)[:2] for index in range(12)})
        12
    """
    dash = DASHES[(index + index // len(COLOURS)) % len(DASHES)]
    return COLOURS[index % len(COLOURS)], dash, SYMBOLS[index % len(SYMBOLS)]


def compare_figure(runs: Sequence[Run], *, x: str = "steps", theme: str = "light") -> go.Figure:
    """Accuracy of all runs against seconds and FLOPs, and below it a freeze timeline for each.

    Args:
        runs: from `egeria_lab.dashboard.compare_runs.gather`.
        x: x axis of the timelines, a key of `egeria_lab.dashboard.series.X_AXES`.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        UnknownNameError: for an x axis or a theme that does not exist.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", epochs=1)
        >>> _ = session.run(progress=False)
        >>> figure = compare_figure([Run("plain", session)])
        >>> [trace.name for trace in figure.data]
        ['plain', 'plain', 'trained']
    """
    x_of_steps(runs[0].history, [], x)
    if not any(len(run.history.steps) for run in runs):
        return empty_figure(TITLE, NO_STEPS, theme)
    titles = [f"freeze timeline: {html.escape(run.name)}" for run in runs]
    heights = [lane_height(len(run.history.layer_names)) for run in runs]
    figure = make_subplots(
        rows=1 + len(runs), cols=2, specs=[[{}, {}], *([{"colspan": 2}, None] for _ in runs)],
        row_heights=[320, *heights], vertical_spacing=74 / (444 + sum(heights) + 74 * len(runs)),
        subplot_titles=["accuracy against time", "accuracy against work", *titles],
    )  # fmt: skip
    _accuracies(figure, runs)
    for position, run in enumerate(runs):
        _timeline(figure, run, position + 2, x)
    dress(figure, TITLE, 474 + sum(heights) + 74 * len(runs), theme)
    figure.update_layout(barmode="overlay", margin={"t": 84, "b": 90})
    figure.update_annotations(font={"size": 13})
    for column, axis in enumerate(PAIR):
        figure.update_xaxes(title_text=X_AXES[axis], rangemode="tozero", row=1, col=column + 1)
        figure.update_xaxes(exponentformat="SI", row=1, col=column + 1)
        figure.update_yaxes(tickformat=".0%", row=1, col=column + 1)
    _share_the_axis(figure, runs, x)
    return figure


def lane_height(num_layers: int) -> int:
    """Height of a timeline in pixels."""
    return min(max(24 * num_layers, 60), 260)


def _accuracies(figure: go.Figure, runs: Sequence[Run]) -> None:
    for column, axis in enumerate(PAIR):
        for index, run in enumerate(runs):
            colour, dash, symbol = look(index)
            x, y, valid = accuracy_points(run, axis)
            if not len(x):
                continue
            kept = thin(y, MOST_POINTS)
            words = "validation" if valid else "training batches, no pass has ended yet"
            figure.add_scatter(
                x=x[kept], y=y[kept], mode="lines+markers" if valid and len(kept) <= 60 else "lines",
                name=html.escape(run.name), legendgroup=str(index), showlegend=column == 0,
                line={"color": colour, "dash": dash, "width": 2}, marker={"symbol": symbol, "size": 7},
                hovertemplate="%{y:.1%} after %{x:.4s}, " + words + f"<extra>{html.escape(run.name)}</extra>",
                row=1, col=column + 1,
            )  # fmt: skip


def _timeline(figure: go.Figure, run: Run, row: int, x: str) -> None:
    names = run.history.layer_names
    place = {name: index for index, name in enumerate(names)}
    last = int(run.history.steps.last().get("step", 0))
    whole = float(x_of_steps(run.history, [float(last)], x)[0])
    figure.add_bar(
        y=list(place.values()), x=[whole] * len(names), base=0, orientation="h", width=0.8, hoverinfo="skip",
        name="trained", showlegend=row == 2, legendgroup="trained", row=row, col=1,
        marker={"color": "rgba(128,128,128,0.18)"},
    )  # fmt: skip
    for kind, (words, colour, pattern, width) in SPAN_BARS.items():
        mine = [span for span in spans(run.events, last) if span.kind == kind and span.layer in place]
        if not mine:
            continue
        start = x_of_steps(run.history, [float(s.start) for s in mine], x)
        stop = x_of_steps(run.history, [float(s.end) for s in mine], x)
        shown = any(trace.name == words for trace in figure.data)
        figure.add_bar(
            y=[place[s.layer] for s in mine], x=stop - start, base=start, orientation="h", name=words, width=width,
            legendgroup=kind, showlegend=not shown, textposition="none", hovertemplate="%{text}<extra></extra>",
            marker={"color": colour, "pattern": hatch(pattern), "line": {"width": 0}},
            text=[html.escape(f"{s.layer}, steps {s.start:,} to {s.end:,}: {s.reason}") for s in mine], row=row, col=1,
        )  # fmt: skip
    every = max(1, -(-len(names) * 14 // lane_height(len(names))))
    ticks = list(range(0, len(names), every))
    figure.update_yaxes(
        tickvals=ticks, ticktext=[html.escape(names[i][-24:]) for i in ticks], range=[len(names) - 0.4, -0.6],
        showgrid=False, tickfont={"size": 11}, row=row, col=1,
    )  # fmt: skip


def _share_the_axis(figure: go.Figure, runs: Sequence[Run], x: str) -> None:
    """All timelines end where the longest run ends, so that they can be compared."""
    ends = [float(x_of_steps(run.history, [run.history.steps.last().get("step", 0.0)], x)[0]) for run in runs]
    for position in range(len(runs)):
        figure.update_xaxes(range=[0, 1.02 * max(ends) or 1], row=position + 2, col=1)
    figure.update_xaxes(title_text=X_AXES[x], row=len(runs) + 1, col=1)
