"""The figures of what runs beside freezing: which samples are trained on, and how sparse each layer is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from egeria_lab.dashboard.figure_style import COLOURS, MOST_LINES, SYMBOLS, dress, empty_figure, labels_of
from egeria_lab.dashboard.frames import thin
from egeria_lab.dashboard.series import X_AXES, LayerRow, reading_grid, x_of_steps
from egeria_lab.history import Array, History

MOST_STRETCHES = 200
"""Two rows each: at most 400 points a line."""

MOST_EXCHANGES = 200

NO_SIEVE = "no sample has been left out: build the session with sieve=lab.CirculantSieve(…), or discard some"
NO_SPARSITY = "every weight is trained: build the session with sparsity=lab.MEST(…)"


def sieve_figure(history: History, *, x: str = "steps", theme: str = "light") -> go.Figure:
    """Samples trained on, set aside and discarded over training, with a mark at each exchange.

    Args:
        history: the session's numbers.
        x: a key of `X_AXES`.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        UnknownNameError: for an x axis or a theme that does not exist.

    Example:
        >>> history = History(["layers.0"])
        >>> history.sieve.append(step=0, kept=80, waiting=20, discarded=0, removed=20, returned=0)
        >>> [trace.name for trace in sieve_figure(history).data]
        ['trained on', 'set aside', 'discarded by hand', 'samples exchanged']
    """
    title = "Samples: trained on, set aside, discarded"
    table = history.sieve.rows()
    x_of_steps(history, [], x)
    if not len(table["step"]):
        return empty_figure(title, NO_SIEVE, theme)
    rows = thin(table["step"], table["kept"], np.zeros(len(table["step"])), MOST_STRETCHES)
    end = max(float(table["step"][-1]), history.steps.last().get("step", 0.0))
    at = x_of_steps(history, np.r_[table["step"][rows], end], x)  # what holds, holds until now
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.02, row_heights=[0.08, 0.92])
    looks = (
        ("kept", "trained on", COLOURS[0], ""),
        ("waiting", "set aside", COLOURS[1], "/"),
        ("discarded", "discarded by hand", COLOURS[3], "x"),
    )
    for name, words, colour, pattern in looks:
        values = table[name][rows]
        figure.add_scatter(
            x=at, y=np.r_[values, values[-1]], mode="lines", name=words, stackgroup="all", row=2, col=1,
            line={"shape": "hv", "width": 1.5, "color": colour},
            fillpattern={"shape": pattern, "fgcolor": colour, "bgcolor": "rgba(128,128,128,0.12)", "size": 7},
            hovertemplate="%{x}: %{y:,} " + words + "<extra></extra>",
        )  # fmt: skip
    moved = rows[table["removed"][rows] + table["returned"][rows] > 0][-MOST_EXCHANGES:]
    step, out, back = (table[name][moved] for name in ("step", "removed", "returned"))
    figure.add_scatter(
        x=x_of_steps(history, step, x), y=np.zeros(len(moved)), mode="markers", row=1, col=1,
        name="samples exchanged", marker={"symbol": "triangle-down", "size": 10, "color": "#808080"},
        text=[f"step {s:.0f}: {o:.0f} out, {b:.0f} in" for s, o, b in zip(step, out, back, strict=True)],
        hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
    dress(figure, title, 420, theme)
    figure.update_yaxes(visible=False, range=[-1, 1], row=1, col=1)
    figure.update_yaxes(title_text="samples", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(showgrid=False, row=1, col=1)
    figure.update_xaxes(title_text=X_AXES[x], row=2, col=1)
    return figure


def sparsity_figure(
    history: History, layers: Iterable[LayerRow], *, x: str = "steps", theme: str = "light"
) -> go.Figure:
    """Share of live weights in each layer module, and the share that each mask update exchanged.

    More than `MOST_LINES` layer modules with masks are drawn as two heat maps.

    Args:
        history: the session's numbers.
        layers: rows of `session.layers`, front to back.
        x: a key of `X_AXES`.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        UnknownNameError: for an x axis or a theme that does not exist.

    Example:
        >>> history = History(["layers.0"])
        >>> history.sparsity.append(step=0, layer=0, density=0.1)
        >>> sparsity_figure(history, []).data[0].y.tolist()
        [0.1, 0.1]
    """
    title = "Sparsity: live weights of each layer, and how many an update exchanged"
    table = history.sparsity.rows()
    x_of_steps(history, [], x)
    if not len(table["step"]):
        return empty_figure(title, NO_SPARSITY, theme)
    labels = labels_of(history, list(layers))
    masked = [int(i) for i in np.unique(table["layer"])]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    if len(masked) <= MOST_LINES:
        _lines(figure, history, table, masked, labels, x)
    else:
        _maps(figure, history, table, masked, labels, x)
    dress(figure, title, 560, theme)
    figure.update_xaxes(title_text=X_AXES[x], row=2, col=1)
    return figure


def _lines(
    figure: go.Figure, history: History, table: dict[str, Array], masked: list[int], labels: list[str], x: str
) -> None:
    end = max(float(table["step"][-1]), history.steps.last().get("step", 0.0))
    for index in masked:
        mine = np.flatnonzero(table["layer"] == index)
        mine = mine[thin(table["step"][mine], table["churn"][mine], np.zeros(len(mine)), MOST_STRETCHES)]
        step, density, churn = (table[name][mine] for name in ("step", "density", "churn"))
        colour, dash = COLOURS[index % len(COLOURS)], ("solid", "dash", "dot", "dashdot")[index % 4]
        figure.add_scatter(
            x=x_of_steps(history, np.r_[step, end], x), y=np.r_[density, density[-1]], mode="lines",
            name=labels[index], legendgroup=labels[index], row=1, col=1,
            line={"shape": "hv", "color": colour, "width": 2.2, "dash": dash},
            hovertemplate="%{x}: %{y:.1%} live<extra>" + labels[index] + "</extra>",
        )  # fmt: skip
        known = np.isfinite(churn)
        figure.add_scatter(
            x=x_of_steps(history, step[known], x), y=churn[known], mode="lines+markers", showlegend=False,
            name=labels[index], legendgroup=labels[index], line={"color": colour, "width": 1}, row=2, col=1,
            marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 6, "color": colour, "maxdisplayed": 40},
            hovertemplate="%{x}: %{y:.1%} exchanged<extra>" + labels[index] + "</extra>",
        )  # fmt: skip
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", title_text="live weights", row=1, col=1)
    figure.update_yaxes(tickformat=".1%", rangemode="tozero", title_text="exchanged", row=2, col=1)


def _maps(
    figure: go.Figure, history: History, table: dict[str, Array], masked: list[int], labels: list[str], x: str
) -> None:
    place = np.full(int(max(masked)) + 1, -1.0)
    place[masked] = np.arange(len(masked))
    row_of = place[table["layer"].astype(int)]
    same = np.zeros(len(row_of))
    end = max(float(table["step"][-1]) + 1, history.steps.last().get("step", 0.0))
    for panel, name, scale, words in ((1, "density", "Cividis", "live"), (2, "churn", "Viridis", "exchanged")):
        steps, grid = reading_grid(table["step"], row_of, table[name], same, len(masked), MOST_STRETCHES)
        figure.add_heatmap(
            x=x_of_steps(history, np.r_[steps, end], x), y=np.arange(len(masked)),
            z=grid.astype(np.float32), colorscale=scale, hoverongaps=False, row=panel, col=1,
            colorbar={"title": {"text": words, "side": "right"}, "thickness": 12, "len": 0.46, "tickformat": ".0%",
                      "y": 0.78 if panel == 1 else 0.22},
            hovertemplate="layer %{y}, %{x}: %{z:.1%} " + words + "<extra></extra>",
        )  # fmt: skip
    every = max(1, -(-len(masked) // 14))
    shown = list(range(0, len(masked), every))
    figure.update_yaxes(
        tickvals=shown, ticktext=[labels[masked[i]] for i in shown], showgrid=False, autorange="reversed",
        tickfont={"size": 10},
    )  # fmt: skip
    figure.update_xaxes(showgrid=False)
