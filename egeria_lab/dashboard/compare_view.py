"""The comparison as plain HTML and SVG, without any script: what a notebook shows, keeps and prints."""

from __future__ import annotations

import html
from collections.abc import Sequence

from egeria_lab.dashboard.compare_figure import NO_STEPS, PAIR, look
from egeria_lab.dashboard.compare_runs import Run
from egeria_lab.dashboard.compare_table import accuracy_points, cells, differing_cells
from egeria_lab.dashboard.series import Curve, spans, thin
from egeria_lab.dashboard.static_view import SPAN_LOOKS, span_key
from egeria_lab.dashboard.svg import Frame, dot, fallback, legend, line, panel, rectangle, text
from egeria_lab.tables import amount, html_table

MOST_POINTS = 150
SVG_DASHES = {"solid": "", "dash": "7 3", "dot": "2 3"}
AXES = {"seconds": ("time", "s"), "flops": ("work", "FLOPs")}
STYLE = (
    "color:var(--jp-content-font-color1,currentColor);font:13px/1.45 var(--jp-ui-font-family,system-ui,sans-serif);"
    "max-width:1180px"
)


def compare_html(runs: Sequence[Run]) -> str:
    """Accuracy against seconds and FLOPs, freeze timelines, the numbers, the settings that differ.

    Args:
        runs: what is compared; only read.

    Returns:
        A fragment of HTML with inline SVG, no script, nothing to load.

    Example:
        >>> from egeria_lab.session import Session
        >>> "no step yet" in compare_html([Run("plain", Session("mlp", "digits"))])
        True
    """
    key = legend([(run.name, look(i)[0], SVG_DASHES[look(i)[1]]) for i, run in enumerate(runs)])
    differ = differing_cells(runs)
    tables = f'<div style="overflow-x:auto;margin-top:10px">{html_table(*cells(runs))}</div>'
    if differ[1]:
        tables += (
            '<div style="overflow-x:auto;margin-top:10px"><div style="font-weight:600">Settings that differ</div>'
            f"{html_table(*differ)}</div>"
        )
    grid = "display:grid;gap:12px 20px;grid-template-columns:repeat(auto-fit,minmax(min(400px,100%),1fr))"
    return (
        f'<div class="egeria-lab-compare" style="{STYLE}"><p style="margin:0 0 4px"><b>Runs compared</b></p>{key}'
        f'<div style="{grid}">{"".join(_accuracy(runs, axis) for axis in PAIR)}</div>'
        f'<div style="{grid};margin-top:10px">{_timelines(runs)}</div>{tables}</div>'
    )


def _accuracy(runs: Sequence[Run], axis: str) -> str:
    words, unit = AXES[axis]
    title = f"Accuracy against {words}"
    curves, checked = [], []
    for run in runs:
        x, y, valid = accuracy_points(run, axis)
        kept = thin(y, MOST_POINTS)
        curves.append(Curve(x[kept], 100 * y[kept], kept))
        checked.append(valid)
    if not any(len(curve.x) for curve in curves):
        return panel(title, fallback(NO_STEPS))
    end = max(float(curve.x[-1]) for curve in curves if len(curve.x))
    frame = Frame.around(curves, x_end=end, unit=" %")
    body = [frame.axes("")]
    for index, curve in enumerate(curves):
        colour, dash, _ = look(index)
        body.append(line(frame, curve, colour, SVG_DASHES[dash]))
        if checked[index] and len(curve.x) <= 40:
            body += [dot(frame, x, y, colour) for x, y in zip(curve.x, curve.y, strict=True)]
    note = "on the validation data" if all(checked) else "of training batches where no pass has ended yet"
    picture = _named_ends(frame, "".join(body), end, unit, title)
    return panel(title, f'{picture}<div style="font-size:12px">{note}</div>')


def _named_ends(frame: Frame, body: str, end: float, unit: str, title: str) -> str:
    """The picture with an x axis in readable units: FLOPs have too many digits to be written out."""
    plain = Frame(0.0, end, frame.y_low, frame.y_high, frame.unit)
    without = body.replace(frame.x_axis(""), "")
    rule = f'<path d="M{frame.left} {frame.bottom}H{frame.width - 12}" stroke="currentColor" stroke-opacity=".5"/>'
    ticks = "".join(
        text(plain.x(share * end), frame.bottom + 14, amount(share * end, unit) if share else "0", anchor=anchor)
        for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
    )
    return frame.svg(without + rule + ticks, title)


def _timelines(runs: Sequence[Run]) -> str:
    last = max(int(run.history.steps.last().get("step", 0)) for run in runs)
    if not last:
        return ""
    parts = [_timeline(run, last) for run in runs]
    settled = {span.kind for run in runs for span in spans(run.events, last)} & {"settling"}
    return "".join(parts) + f"<div>{span_key({'rule', 'hand'} | settled)}</div>"


def _timeline(run: Run, last: int) -> str:
    names = run.history.layer_names
    row = 14 if len(names) <= 12 else max(2, 170 // len(names))
    frame = Frame(0.0, float(last), 0.0, 1.0, height=row * len(names) + 46, left=92)
    place = {name: frame.top + row * index for index, name in enumerate(names)}
    mine = int(run.history.steps.last().get("step", 0))
    width = max(frame.x(mine) - frame.left, 1.0)
    body = [frame.x_axis("training step")]
    for index, name in enumerate(names):
        body.append(rectangle(frame.left, place[name], width, row - 1, "currentColor", opacity=0.1))
        if index % max(1, 12 // row) == 0:
            body.append(text(frame.left - 4, place[name] + min(row - 2, 10), name[-14:], anchor="end"))
    for span in spans(run.events, mine):
        if span.layer in place and span.kind != "pin":
            colour, dash, height, _ = SPAN_LOOKS[span.kind]
            thick = (row - 1) * height
            hover = f"{span.layer}, steps {span.start:,} to {span.end:,}: {span.reason}"
            left, right = frame.x(span.start), frame.x(span.end)
            top = place[span.layer] + (row - 1 - thick) / 2
            body.append(rectangle(left, top, right - left, thick, colour, dash=dash, hover=hover))
    title = f"Freeze timeline: {run.name}"
    return panel(title, frame.svg("".join(body), html.escape(title)))


def has_news(runs: Sequence[Run], seen: Sequence[tuple[int, int, int]]) -> bool:
    """Whether there is something to draw that was not there when `seen` was taken."""
    return any(run.size != size for run, size in zip(runs, seen, strict=True))
