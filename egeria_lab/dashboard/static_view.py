"""A still picture of a run as plain HTML and SVG, without any script.

For front ends that have no widget manager, for nbconvert and for saved notebooks. Text takes the colour of
the page around it, so that light and dark themes both work.
"""

from __future__ import annotations

import html
from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np

from egeria_lab.dashboard.figure_style import COLOURS, MOST_LINES, NO_READING, NO_STEP
from egeria_lab.dashboard.saving_rows import saving_rows
from egeria_lab.dashboard.series import (
    MARK_STYLES,
    SMALLEST,
    Curve,
    LayerRow,
    curve,
    marks,
    reading_grid,
    spans,
    thin,
    trailing_mean,
)
from egeria_lab.dashboard.summary import SessionView, headlines
from egeria_lab.dashboard.svg import Frame, dot, fallback, legend, line, panel, rectangle, text
from egeria_lab.events import EpochFinished, Event
from egeria_lab.history import Array, History
from egeria_lab.tables import html_table, percent

MOST_POINTS = 120
"""A line of the still picture never holds more points than this."""

MOST_MARKS = 80
"""The newest freezes, thaws and pins are marked on the curves, no more than these."""

DASHES = ("", "7 3", "2 3")
"""Lines of layer modules; with the six colours no two of the first twelve look alike."""

SHADES = 8
"""Steps of darkness in the heat map."""

SPAN_LOOKS = {
    "rule": ("#56B4E9", "", 1.0, "frozen by the rule"),
    "hand": ("#E69F00", "4 2", 1.0, "frozen by hand (dashed edge)"),
    "settling": ("#56B4E9", "", 0.4, "settling (narrow)"),
    "pin": ("#CC79A7", "1 2", 0.35, "pinned (narrow)"),
}
"""Colour, outline, height and words of frozen, settling and pinned stretches."""


def static_html(session: SessionView) -> str:
    """The dashboard as a still picture: loss, accuracy, plasticity, freeze timeline and savings.

    Args:
        session: what to draw, in any state; it is only read.

    Returns:
        A fragment of HTML, below 150 kB, with inline SVG, no script, no style sheet, nothing to load.

    Example:
        >>> from egeria_lab.session import Session
        >>> "no step yet" in static_html(Session("mlp", "digits"))
        True
    """
    history, events, layers = session.history, list(session.events), list(session.layers)
    ledger = session.savings().to_dict()
    done = f"step {session.steps_done:,} of {session.planned_steps:,}, {session.state}"
    parts = [
        _learning(history, events, "loss", 1.0, ""),
        _learning(history, events, "accuracy", 100.0, " %"),
        *_plasticity(history, layers),
        _timeline(history, events, layers),
        _savings(ledger),
        *_samples(history),
        *_sparsity(history),
    ]
    cards = headlines(session, ledger)[1:]
    numbers = " · ".join(f"{card.label.lower()} <b>{html.escape(card.value)}</b>" for card in cards)
    return (
        '<div class="egeria-lab-static" style="color:var(--jp-content-font-color1,currentColor);'
        'font:13px/1.45 var(--jp-ui-font-family,system-ui,sans-serif);max-width:1180px">'
        f"<p style='margin:0 0 4px'><b>{html.escape(session.name)}</b>: {html.escape(done)}. "
        "A still picture; it does not move.</p>"
        f"<p style='margin:0 0 8px'>{numbers}</p>{_error(session.error)}"
        '<div style="display:grid;gap:12px 20px;'
        'grid-template-columns:repeat(auto-fit,minmax(min(400px,100%),1fr))">'
        f"{''.join(parts)}{_recent(events)}</div></div>"
    )


def _error(error: BaseException | None) -> str:
    if error is None:
        return ""
    return f"<p style='margin:0 0 8px'><b>Failed:</b> {html.escape(f'{type(error).__name__}: {error}')}</p>"


def _learning(history: History, events: list[Event], name: str, scale: float, unit: str) -> str:
    steps, epochs = history.steps.rows(), history.epochs.rows()
    title = name.capitalize()
    finite = np.flatnonzero(np.isfinite(steps[name]))
    if not len(finite):
        return panel(title, fallback(NO_STEP))
    window = min(max(len(finite) // 60, 1), 200)
    mean = np.full(len(steps[name]), np.nan)
    mean[finite] = trailing_mean(scale * steps[name][finite], window)
    train = curve(steps["step"], mean, finite, np.zeros(len(mean)), MOST_POINTS)
    values = scale * epochs[f"valid_{name}"]
    valid = curve(epochs["step"], values, np.arange(len(values)), np.zeros(len(values)), MOST_POINTS)
    frame = Frame.around([train, valid], x_end=float(steps["step"][-1]), unit=unit)
    body = [frame.axes("training step"), _mark_ticks(frame, events)]
    body += [line(frame, train, COLOURS[0], ""), line(frame, valid, COLOURS[1], "5 3")]
    if len(valid.x) <= 40:
        body += [dot(frame, x, y, COLOURS[1]) for x, y in zip(valid.x, valid.y, strict=True)]
    key = legend([(f"training, mean of {window} steps", COLOURS[0], ""), ("validation", COLOURS[1], "5 3")])
    shapes = " ".join(
        f'<span style="color:{style.colour}">{style.glyph}</span> {style.words}'
        for kind, style in MARK_STYLES.items()
        if any(mark.kind == kind for mark in marks(events))
    )
    picture = frame.svg("".join(body), f"{title} over training steps")
    return panel(title, f'{picture}{key}<div style="font-size:12px">{shapes}</div>')


def _mark_ticks(frame: Frame, events: Iterable[Event]) -> str:
    drawn = []
    for mark in marks(events)[-MOST_MARKS:]:
        style = MARK_STYLES[mark.kind]
        x = frame.x(mark.step)
        drawn.append(
            f'<path d="M{x:.1f} 14V{frame.bottom}" stroke="{style.colour}" stroke-opacity=".5"/>'
            + text(x, 11, style.glyph, anchor="middle", colour=style.colour, hover=mark.sentence)
        )
    return "".join(drawn)


def _plasticity(history: History, layers: Sequence[LayerRow]) -> list[str]:
    title = "Plasticity (log scale): distance to the reference model"
    table = history.plasticity.rows()
    if not len(table["step"]):
        return [panel(title, fallback(NO_READING))]
    value = np.where(np.isfinite(table["smoothed"]), table["smoothed"], table["value"])
    value = np.log10(np.maximum(value, SMALLEST))
    if len(history.layer_names) > MOST_LINES:
        return [panel(title, _heat_map(history, table, value))]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log10(np.maximum(np.abs(table["slope"]) / table["tolerance"], SMALLEST))
    titles = {row.name: row.title for row in layers}
    names = [f"{name} · {titles[name]}" if titles.get(name) else name for name in history.layer_names]
    key = legend([(name, *_look(index)) for index, name in enumerate(names)])
    quiet = "Slope ÷ tolerance (log scale): under the dashed line a layer freezes"
    return [
        panel(title, _layer_lines(history, table, value, "plasticity of each layer") + key),
        panel(
            quiet,
            _layer_lines(history, table, np.clip(ratio, -4, 4), "slope against tolerance", tolerance=True),
        ),
    ]


def _look(index: int) -> tuple[str, str]:
    return COLOURS[index % len(COLOURS)], DASHES[(index + index // len(COLOURS)) % len(DASHES)]


def _layer_lines(history: History, table: Mapping[str, Array], y: Array, label: str, *, tolerance: bool = False) -> str:
    curves = [
        curve(table["step"], y, np.flatnonzero(table["layer"] == index), table["generation"], MOST_POINTS)
        for index in range(len(history.layer_names))
    ]
    if not any(len(drawn.x) for drawn in curves):
        return fallback("tolerance not tuned yet: it comes from a layer's first slopes")
    ends = np.array([table["step"][0], table["step"][-1]])
    bound = Curve(ends, np.zeros(2), np.array([-1, -1]))
    last = history.steps.last().get("step", float(ends[1]))
    frame = Frame.around([*curves, bound] if tolerance else curves, x_end=last, log=True)
    body = frame.axes("training step")
    if tolerance:
        body += (
            f'<path d="M{frame.x(0):.1f} {frame.y(0):.1f}H{frame.x(last):.1f}" stroke="currentColor" '
            'stroke-width="1.5" stroke-dasharray="6 4"/>'
            + text(frame.x(last), frame.y(0) - 4, "tolerance", anchor="end")
        )
    return frame.svg(body + "".join(line(frame, c, *_look(i)) for i, c in enumerate(curves)), label)


def _heat_map(history: History, table: Mapping[str, Array], value: Array) -> str:
    rows = len(history.layer_names)
    steps, grid = reading_grid(table["step"], table["layer"], value, table["generation"], rows, min(48, 3000 // rows))
    frame = Frame(0.0, history.steps.last().get("step", float(steps[-1])), 0.0, float(rows), height=220)
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    shade = np.nan_to_num((grid - low) / max(high - low, 1e-9) * (SHADES - 1), nan=-1).round().astype(int)
    edges = [round(frame.x(step)) for step in (0.0, *(steps[:-1] + steps[1:]) / 2, steps[-1])]
    cell = (frame.bottom - frame.top) / rows
    paths = []
    for depth in range(SHADES):
        cells = "".join(
            f"M{edges[c]} {frame.top + r * cell:.1f}H{edges[c + 1]}v{cell:.1f}H{edges[c]}z"
            for r, c in zip(*np.nonzero(shade == depth), strict=True)
        )
        paths.append(f'<path d="{cells}" fill="{COLOURS[0]}" fill-opacity="{(depth + 1) / SHADES:.2f}"/>')
    words = f"pale 10^{low:.1f} to strong 10^{high:.1f}; empty: frozen, or no reading"
    ends = text(frame.left - 4, frame.top + 9, "front", anchor="end") + text(
        frame.left - 4, frame.bottom, "head", anchor="end"
    )
    body = frame.x_axis("training step") + "".join(paths) + ends
    return frame.svg(body, "plasticity of each layer as a heat map") + f"<div>{words}</div>"


def _timeline(history: History, events: list[Event], layers: Sequence[LayerRow]) -> str:
    title = "Freeze timeline, front layer on top"
    last = int(history.steps.last().get("step", 0))
    if not last:
        return panel(title, fallback(NO_STEP))
    names, state = history.layer_names, {row.name: row.state for row in layers}
    row = 16 if len(names) <= MOST_LINES else max(3, min(6, 480 // len(names)))
    frame = Frame(0.0, float(last), 0.0, 1.0, height=row * len(names) + 46, left=92)
    place = {name: frame.top + row * index for index, name in enumerate(names)}
    every, whole = max(1, 12 // row), frame.x(last) - frame.left
    body = [frame.x_axis("training step")]
    for index, name in enumerate(names):
        hover = f"{name}: {state.get(name, 'active')}"
        body.append(rectangle(frame.left, place[name], whole, row - 2, "currentColor", opacity=0.1))
        if index % every == 0:
            body.append(text(frame.left - 4, place[name] + min(row - 3, 10), name[-14:], anchor="end", hover=hover))
    found = [span for span in spans(events, last) if span.layer in place]
    for span in found:
        colour, dash, height, _ = SPAN_LOOKS[span.kind]
        thin = (row - 2) * height
        left, top = frame.x(span.start), place[span.layer] + (row - 2 - thin) / 2
        hover = f"{span.layer}, steps {span.start} to {span.end}: {span.reason or 'pinned'}"
        body.append(rectangle(left, top, frame.x(span.end) - left, thin, colour, dash=dash, hover=hover))
    key = span_key({"rule", "hand", "pin"} | {span.kind for span in found})
    return panel(title, frame.svg("".join(body), "which layers were frozen when") + key)


def span_key(kinds: Container[str]) -> str:
    """What the stretches of a timeline mean."""
    return legend([(words, colour, "") for kind, (colour, _, _, words) in SPAN_LOOKS.items() if kind in kinds])


def _samples(history: History) -> list[str]:
    """Samples trained on, set aside and discarded, where any was ever left out."""
    table = history.sieve.rows()
    if not len(table["step"]):
        return []
    names = {"kept": "trained on", "waiting": "set aside", "discarded": "discarded by hand"}
    curves = [_held(table["step"], table[name], history) for name in names]
    return [
        panel("Samples", _lines_from_zero(curves, history, "", "samples over training steps", list(names.values())))
    ]


def _sparsity(history: History) -> list[str]:
    """Live weights over training: of each layer, or of the mean where they are many."""
    table = history.sparsity.rows()
    if not len(table["step"]):
        return []
    masked = [int(i) for i in np.unique(table["layer"])]
    if len(masked) > MOST_LINES:
        steps, grid = reading_grid(
            table["step"], table["layer"], table["density"], np.zeros(len(table["step"])), masked[-1] + 1, MOST_POINTS
        )
        curves, names = [_held(steps, np.nanmean(grid[masked], axis=0) * 100, history)], ["mean of the layers"]
    else:
        rows = [np.flatnonzero(table["layer"] == index) for index in masked]
        curves = [_held(table["step"][mine], table["density"][mine] * 100, history) for mine in rows]
        names = [history.layer_names[index] for index in masked]
    return [panel("Live weights", _lines_from_zero(curves, history, " %", "live weights over training steps", names))]


def _held(step: Array, y: Array, history: History) -> Curve:
    """What was written down at some steps and holds until the next of them, or until now."""
    end = max(float(step[-1]), history.steps.last().get("step", 0.0))
    kept = thin(y, MOST_POINTS // 2)
    at, y = np.r_[step[kept], end], y[kept]
    return Curve(np.r_[at[0], np.repeat(at[1:], 2)][: 2 * len(y)], np.repeat(y, 2), np.zeros(2 * len(y), dtype=np.intp))


def _lines_from_zero(curves: list[Curve], history: History, unit: str, label: str, names: list[str]) -> str:
    zero = Curve(np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.intp))
    last = max(history.steps.last().get("step", 1.0), max(float(drawn.x[-1]) for drawn in curves), 1.0)
    frame = Frame.around([*curves, zero], x_end=last, unit=unit)
    body = frame.axes("training step") + "".join(line(frame, drawn, *_look(i)) for i, drawn in enumerate(curves))
    return frame.svg(body, label) + legend([(name, *_look(i)) for i, name in enumerate(names)])


def _savings(ledger: Mapping[str, object]) -> str:
    rows = [[row.quantity, percent(row.theoretical), percent(row.measured), row.why] for row in saving_rows(ledger)]
    return panel("Savings against training without freezing", html_table(["", "theoretical", "measured", "why"], rows))


def _recent(events: list[Event], most: int = 8) -> str:
    events = [event for event in events if not isinstance(event, EpochFinished)]
    items = "".join(
        f"<li>step {event.step:,}: {html.escape(event.sentence()[:200])}</li>" for event in events[-most:][::-1]
    )
    return panel("Latest events", f'<ul style="margin:0;padding-left:18px">{items or "<li>none yet</li>"}</ul>')
