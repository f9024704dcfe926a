"""`compare`: several runs in one picture that goes on as long as one of them trains, with a table and a page."""

from __future__ import annotations

import contextvars
import html
import os
import threading
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from IPython.display import publish_display_data

from egeria_lab.dashboard.compare_figure import compare_figure
from egeria_lab.dashboard.compare_runs import Run, gather
from egeria_lab.dashboard.compare_table import cells, data_frame, differing_cells
from egeria_lab.dashboard.compare_view import compare_html, has_news
from egeria_lab.dashboard.report import check_destination, figure_section, page_of, scroll, section, write_whole
from egeria_lab.events import Event, RunResumed, RunStarted
from egeria_lab.tables import html_table, text_table

REFRESH_SECONDS = 2.0
MOST_SHOWN = 8


class Comparison:
    """Several runs side by side; shown in a notebook it is drawn anew every two seconds while one of them trains.

    Args:
        runs: from `egeria_lab.dashboard.compare_runs.gather`.

    Attributes:
        runs: what is compared, in order.

    Example:
        >>> from egeria_lab.session import Session
        >>> a, b = (Session("mlp", "digits", epochs=1, seed=seed) for seed in (0, 1))
        >>> _ = a.step(2), b.step(3)
        >>> compare(a, other=b).table["steps"].to_dict()
        {'mlp on digits': 2, 'other': 3}
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self._shown: list[str] = []
        self._seen = [run.size for run in self.runs]
        self._context = contextvars.copy_context()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._ends = [self._follow(run) for run in self.runs if run.source is not None]

    @property
    def table(self) -> pd.DataFrame:
        """The numbers now, one row a run, and the settings in which the runs differ."""
        return data_frame(self.runs)

    def figure(self, x: str = "steps", theme: str = "light") -> go.Figure:
        """The picture as a Plotly figure.

        Args:
            x: x axis of the timelines, a key of `egeria_lab.dashboard.series.X_AXES`.
            theme: ``"light"`` or ``"dark"``.
        """
        return compare_figure(self.runs, x=x, theme=theme)

    def to_html(self, path: str | os.PathLike[str] = "compare.html") -> Path:
        """Write one page with the figure and the tables that opens without a network; returns its path.

        Raises:
            EgeriaLabError: when it cannot be written there.
        """
        target = check_destination(path)
        differ = differing_cells(self.runs)
        parts = [
            figure_section("compare", self.figure()),
            section("In numbers", scroll(html_table(*cells(self.runs)))),
            section("Settings that differ", scroll(html_table(*differ)) if differ[1] else "None."),
        ]
        names = html.escape(", ".join(run.name for run in self.runs))
        header = f"<header><h1>Runs compared</h1><p class='note'>{names}</p></header>"
        return write_whole(target, page_of("Runs compared", header + "".join(parts)))

    def show(self) -> None:
        """Show it here; the same place is drawn anew while one of the runs trains."""
        name = uuid.uuid4().hex
        self._shown = [*self._shown, name][-MOST_SHOWN:]
        self._context = contextvars.copy_context()  # what is drawn later belongs to this cell
        self._publish(name, update=False)
        self._go_on()

    def close(self) -> None:
        """Follow the runs no longer; what is shown stays as it is."""
        self._closed = True
        for end in self._ends:
            end()
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _ipython_display_(self) -> None:
        self.show()

    def _repr_html_(self) -> str:
        return compare_html(self.runs)

    def __repr__(self) -> str:
        return text_table(*cells(self.runs))

    def __del__(self) -> None:
        for end in getattr(self, "_ends", ()):
            end()

    def _publish(self, name: str, *, update: bool) -> None:
        data = {"text/plain": repr(self), "text/html": self._repr_html_()}
        publish_display_data(  # type: ignore[no-untyped-call]
            data, {}, transient={"display_id": name}, update=update
        )

    def _follow(self, run: Run) -> Any:
        """Begin to draw when this run begins to train; keeps nothing alive."""
        mine = weakref.ref(self)

        def on_event(event: Event) -> None:
            comparison = mine()
            if comparison is not None and isinstance(event, (RunStarted, RunResumed)):
                comparison._go_on()

        return run.source.events.subscribe(on_event)

    def _go_on(self) -> None:
        with self._lock:
            if self._closed or not self._shown or self._thread is not None:
                return
            context, mine = self._context.copy(), weakref.ref(self)
            self._thread = threading.Thread(
                target=context.run, args=(_refresh, mine), name="egeria-lab-compare", daemon=True
            )
            self._thread.start()

    def _look(self) -> bool:
        """Draw what is new; True while one of the runs trains."""
        trains = self._trains()
        if has_news(self.runs, self._seen):
            self._seen = [run.size for run in self.runs]
            for name in self._shown:
                self._publish(name, update=True)
        return trains and not self._closed

    def _trains(self) -> bool:
        return any(run.state == "running" for run in self.runs)

    def _is_over(self) -> bool:
        """Called by the thread that sees no run training: whether it may end, decided once for it and `_go_on`."""
        with self._lock:
            if self._trains() and not self._closed:
                return False
            self._thread = None
            return True


def _refresh(mine: weakref.ref[Comparison]) -> None:
    """Body of the thread: holds the comparison only while it looks."""
    while True:
        comparison = mine()
        if comparison is None or comparison._wake.wait(REFRESH_SECONDS):
            return
        if not comparison._look() and comparison._is_over():
            return
        del comparison


def compare(*runs: Any, **named: Any) -> Comparison:
    """Several runs in one picture: accuracy against time and work, freeze timelines, numbers, differing settings.

    Args:
        runs: sessions in any state, checkpoints or run directories (which are only read).
        named: the same by the name that they shall have: ``compare(plain=a, rule=b)``.

    Raises:
        InvalidSettingError: for nothing, too many, or something that is no run.
        CheckpointError: for a file that cannot be read.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", epochs=1)
        >>> _ = session.step(2)
        >>> compare(plain=session).runs[0].name
        'plain'
    """
    return Comparison(gather(runs, named))
