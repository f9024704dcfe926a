"""One HTML file about a run that needs no network: the numbers, the pictures, the events, the settings."""

from __future__ import annotations

import html
import json
import os
import platform
import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from egeria_lab.dashboard.figure_style import THEMES
from egeria_lab.dashboard.figures import (
    learning_figure,
    plasticity_figure,
    savings_figure,
    savings_over_time_figure,
    sieve_figure,
    sparsity_figure,
    timeline_figure,
)
from egeria_lab.dashboard.report_style import CSS, THEME_SCRIPT
from egeria_lab.dashboard.saving_rows import SavingRow, saving_rows
from egeria_lab.dashboard.sieve_sheet import SieveSheet, sheet_table
from egeria_lab.dashboard.summary import (
    SessionView,
    headlines,
    layer_rows,
    setting_rows,
)
from egeria_lab.engine.arguments import check_path
from egeria_lab.errors import EgeriaLabError
from egeria_lab.events import Event
from egeria_lab.tables import html_table, percent

PACKAGES = ("egeria-lab", "torch", "numpy", "plotly")
MOST_EVENTS = 3000
PLOT_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
}


def write_report(session: SessionView, path: str | os.PathLike[str], *, x: str = "steps") -> Path:
    """Write everything worth knowing about a run into one HTML file that opens without a network.

    The file is written beside its target under another name and then renamed, so that a reader never meets
    half a report. The session is only read; it may be training meanwhile.

    Args:
        session: what to report on, in any state.
        path: the file to write; an existing file is replaced.
        x: x axis of the charts, a key of `egeria_lab.dashboard.series.X_AXES`.

    Returns:
        The absolute path of the file.

    Raises:
        EgeriaLabError: when the folder does not exist or cannot be written to, or the path is a folder.
        UnknownNameError: when `x` is not the name of an x axis.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from egeria_lab.session import Session
        >>> with TemporaryDirectory() as folder:
        ...     write_report(Session("mlp", "digits"), f"{folder}/run.html").name
        'run.html'
    """
    return write_whole(check_destination(path), render_report(session, x=x))


def write_whole(target: Path, page: str) -> Path:
    """Write a page beside its target under another name, then rename it: a reader never meets half of it.

    Raises:
        EgeriaLabError: when it cannot be written.
    """
    part = target.with_name(f".egeria-lab-{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_text(page, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise EgeriaLabError(
            f"Cannot write the report to {target}: {error.strerror}. Choose a folder that you may write to."
        ) from error
    return target


def check_destination(path: str | os.PathLike[str]) -> Path:
    """Where a report would be written, links followed; raises before any work is done when it cannot be.

    Raises:
        EgeriaLabError: when the path is no plain file, its folder does not exist or cannot be written to, or
            the file may not be replaced.

    Example:
        >>> check_destination("run.html").name
        'run.html'
    """
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise EgeriaLabError(f"Cannot write the report to {path!r}: give a file name, as in run.html.")
    target = check_path("Cannot write the report: path", path).resolve()
    if target.is_dir():
        raise EgeriaLabError(f"Cannot write the report to {target}: it is a folder. Give a file name, as in run.html.")
    if not target.parent.is_dir():
        raise EgeriaLabError(
            f"Cannot write the report to {target}: its folder does not exist. Create {target.parent} first."
        )
    if target.exists() and not target.is_file():
        raise EgeriaLabError(f"Cannot write the report to {target}: it is no plain file. Give a file name.")
    if target.exists() and not target.stat().st_mode & 0o200:
        raise EgeriaLabError(f"Cannot write the report to {target}: the file is write-protected. Give another name.")
    try:
        with NamedTemporaryFile(dir=target.parent, prefix=".egeria-lab-"):
            pass
    except OSError as error:
        raise EgeriaLabError(
            f"Cannot write the report to {target}: {error.strerror}. Choose a folder that you may write to."
        ) from error
    return target


def render_report(session: SessionView, *, x: str = "steps") -> str:
    """The report as the text of an HTML page, about 5 MB, nearly all of it plotly.js.

    Args:
        session: what to report on.
        x: x axis of the charts, a key of `egeria_lab.dashboard.series.X_AXES`.

    Example:
        >>> from egeria_lab.session import Session
        >>> "no reading yet" in render_report(Session("mlp", "digits"))
        True
    """
    history, events, layers = session.history, list(session.events), list(session.layers)
    ledger = session.savings().to_dict()
    sections = [
        figure_section("learning", learning_figure(history, events, x=x)),
        figure_section("plasticity", plasticity_figure(history, events, layers, x=x)),
        figure_section("timeline", timeline_figure(history, events, layers, x=x)),
        f'<div class="pair">{figure_section("savings", savings_figure(ledger))}'
        f"{figure_section('savings-over-time', savings_over_time_figure(history, x=x))}</div>",
        *_technique_sections(session, x),
        section("Savings, and the reason for each zero", _savings_table(saving_rows(ledger))),
        section("Layers", scroll(html_table(*layer_rows(layers, ledger)), "wide")),
        section("What happened", _event_table(events)),
        section("Settings", scroll(html_table(*setting_rows(session, layers)))),
        section("Versions", scroll(html_table(["what", "version"], _versions(session)))),
    ]
    return page_of(f"{session.name}: layer freezing report", _header(session, ledger) + "".join(sections))


def page_of(title: str, body: str) -> str:
    """A whole page around some sections with figures, with plotly.js in it: it loads nothing."""
    theme = THEME_SCRIPT.replace("__THEMES__", json.dumps(THEMES))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{CSS}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><main>{body}</main>"
        f"<script>{theme}</script></body></html>\n"
    )


def _technique_sections(session: SessionView, x: str) -> list[str]:
    """What runs beside freezing, as far as it is on."""
    sections = []
    if len(session.history.sparsity):
        sections.append(figure_section("sparsity", sparsity_figure(session.history, session.layers, x=x)))
    sheet = SieveSheet(session)
    state = sheet.state()
    if len(session.history.sieve) or state:
        sections.append(figure_section("sieve", sieve_figure(session.history, x=x)))
        sections.append(section("Samples", _contact_sheet(state, sheet.pictures())))
    return sections


def _contact_sheet(state: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The sieve's numbers, some samples as pictures where there are any, and all of them as a table."""
    counts = [
        [name if not name[0].isdigit() else f"forgotten {'once' if name == '1' else f'{name} times'}", f"{n:,}"]
        for name, n in state.get("histogram", ())
    ]
    groups = state.get("groups", [])
    rows = []
    for group in groups:
        shown = [item for item in group["items"] if str(item["id"]) in pictures]
        images = "".join(
            f'<figure><img src="{pictures[str(item["id"])]}" alt="sample {item["id"]}" width="56" height="56">'
            f"<figcaption>{html.escape(item['label'])}<br>#{item['id']}</figcaption></figure>"
            for item in shown
        )
        if images:
            rows.append(f'<h3>{html.escape(group["title"])}</h3><div class="sheet">{images}</div>')
    why = f'<p class="note">{html.escape(state["why_no_histogram"])}</p>' if state.get("why_no_histogram") else ""
    table = html_table(["since the last exchange", "samples"], counts) if counts else ""
    both = f'<div class="pair"><div>{"".join(rows)}</div><div>{table}{why}</div></div>'
    return both + scroll(html_table(*sheet_table(groups)))


def _header(session: SessionView, ledger: Mapping[str, object]) -> str:
    cards = "".join(
        f'<div class="card"><div class="label">{html.escape(card.label)}</div>'
        f'<div class="value">{html.escape(card.value)}</div>'
        f'<div class="note">{html.escape(card.note)}</div></div>'
        for card in headlines(session, ledger)
    )
    failed = f'<p class="failed">{html.escape(_fault(session.error))}</p>' if session.error is not None else ""
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f"<header><h1>{html.escape(session.name)}</h1>"
        f'<p class="note">Layer freezing report, written {written}. '
        f"Trained on {html.escape(str(session.device))}.</p>{failed}</header>"
        f'<section class="cards" aria-label="headline numbers">{cards}</section>'
    )


def _fault(error: BaseException) -> str:
    return f"The run failed: {type(error).__name__}: {error}. What was recorded until then is below."


def section(title: str, body: str) -> str:
    """A titled part of a page."""
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>"


def scroll(body: str, kind: str = "") -> str:
    """A frame in which wide or long content scrolls; reachable by keyboard."""
    return f'<div class="scroll {kind}" tabindex="0">{body}</div>'


def figure_section(name: str, figure: go.Figure) -> str:
    """A part of a page that is one figure."""
    figure.update_layout(paper_bgcolor="rgba(0,0,0,0)")
    body = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=f"figure-{name}",
        config=PLOT_CONFIG,
    )
    title = html.escape(figure.layout.title.text, quote=True)
    return f'<section class="plot" role="figure" aria-label="{title}">{body}</section>'


def _savings_table(rows: Iterable[SavingRow]) -> str:
    head = ["", "theoretical", "measured", "amount", "why"]
    cells = [[row.quantity, percent(row.theoretical), percent(row.measured), row.absolute, row.why] for row in rows]
    return scroll(html_table(head, cells))


def _event_table(events: list[Event]) -> str:
    shown = events[-MOST_EVENTS:]
    cells = [[f"{event.step:,}", type(event).__name__, event.by, event.sentence()] for event in shown]
    left_out = len(events) - len(shown)
    note = f'<p class="note">The first {left_out:,} events are left out.</p>' if left_out else ""
    if not cells:
        return '<p class="note">Nothing has happened yet.</p>'
    return note + scroll(html_table(["step", "event", "by", "in words"], cells))


def _versions(session: SessionView) -> list[list[str]]:
    found = [["device", str(session.device)], ["Python", platform.python_version()]]
    for package in PACKAGES:
        try:
            found.append([package, version(package)])
        except PackageNotFoundError:
            found.append([package, "not installed as a package"])
    return [*found, ["system", f"{platform.system()} on {platform.machine()}"]]
