"""What a page is told about a session: new rows of its tables, and its slow state in words and small rows.

The session's own history is the buffer: the feed only remembers how far each table was sent. With nobody
looking nothing is built, and a view that comes late starts from one full frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import numpy as np

from egeria_lab.dashboard.controls import LiveSession
from egeria_lab.dashboard.explainer import Explainer
from egeria_lab.dashboard.frames import MOST_ROWS, Part, bounded
from egeria_lab.dashboard.panels import PANELS, Panel, columns_needed
from egeria_lab.dashboard.race import Race
from egeria_lab.dashboard.saving_rows import number, saving_rows, watching_costs
from egeria_lab.dashboard.series import HANDS, trailing_mean
from egeria_lab.dashboard.setting_sliders import describe_settings
from egeria_lab.dashboard.sieve_sheet import SieveSheet
from egeria_lab.dashboard.tuner import Tuner
from egeria_lab.dashboard.undo_words import undo_state
from egeria_lab.events import (
    EpochFinished,
    Event,
    FreezeBlocked,
    LayerFrozen,
    LayerPinned,
    LayerSettling,
    LayerThawed,
    LayerUnpinned,
    ReferenceRefreshed,
    SettingChanged,
    SettlingEnded,
)
from egeria_lab.history import Array, Table
from egeria_lab.tables import percent

LANE_KINDS = {
    LayerFrozen: 0,
    LayerThawed: 1,
    LayerPinned: 2,
    LayerUnpinned: 3,
    ReferenceRefreshed: 4,
    SettingChanged: 5,
    LayerSettling: 6,
    SettlingEnded: 7,
}
"""The events that the timeline draws, and their code in the column ``kind``."""

BY_HAND, BY_RULE = 1, 0
NUM_WORDS = 8
MEAN_STEPS = 20
"""The strong lines of loss and accuracy are means of this many steps."""


class Lanes:
    """The events that the timeline draws, as a table of numbers and one clause for each.

    Example:
        >>> lanes = Lanes(["layers.0"])
        >>> lanes.take([LayerFrozen(step=30, by="user", layer="layers.0", reason="asked for")])
        >>> lanes.table.last()["step"], lanes.table.last()["by"], lanes.notes
        (30.0, 1.0, ['asked for'])
    """

    def __init__(self, layer_names: Iterable[str]) -> None:
        self.table = Table(["step", "layer", "kind", "by", "slope", "tolerance"])
        self.notes: list[str] = []
        self._positions = {name: position for position, name in enumerate(layer_names)}

    def take(self, events: Iterable[Event]) -> None:
        """Add those of `events` that the timeline draws."""
        for event in events:
            kind = LANE_KINDS.get(type(event))
            if kind is None:
                continue
            layer = getattr(event, "layer", None)
            self.notes.append(str(getattr(event, "reason", "")) or event.sentence())
            self.table.append(
                step=event.step,
                layer=-1 if layer is None else self._positions.get(layer, -1),
                kind=kind,
                by=BY_HAND if event.by in HANDS else BY_RULE,
                slope=getattr(event, "slope", None),
                tolerance=getattr(event, "tolerance", None),
            )


class Feed:
    """Reads one session for all its views; used by one thread.

    Args:
        session: what is watched; nothing here changes it.
        panels: whose columns are sent.

    Attributes:
        tuner, explainer, race: answer what a page asks for besides.
    """

    def __init__(self, session: LiveSession, panels: Iterable[type[Panel]] = PANELS) -> None:
        self._session = session
        self._needs = columns_needed(panels)
        self._sent = dict.fromkeys(self._needs, 0)
        self._lanes = Lanes(session.history.layer_names)
        self._events_read = 0
        self._words: deque[dict[str, object]] = deque(maxlen=NUM_WORDS)
        self._settings: list[dict[str, object]] | None = None
        self._rewinds = (session.history.rewinds, session.events.rewinds)
        self._is_anew = False
        self._flops = (0, 0.0)  # FLOPs of so many first rows of the table of steps
        self._sheet = SieveSheet(session)
        self.tuner, self.explainer, self.race = Tuner(session), Explainer(session), Race(session)

    @property
    def sieve_moved(self) -> bool:
        """Samples were exchanged, discarded or restored since the last call of `sieve`."""
        return self._sheet.moved

    def sieve(self) -> dict[str, object]:
        """The slow state of the sieve panel: its numbers and samples, and the samples' pictures by id."""
        return {"sieve": self._sheet.state(), "pictures": self._sheet.pictures()}

    @property
    def session(self) -> LiveSession:
        """The session that is read."""
        return self._session

    def full(self) -> list[Part]:
        """All tables from their first row, thinned to what a page can use; later deltas follow on."""
        self.read_events()
        return [self._part(table, 0) for table in self._needs]

    def delta(self) -> list[Part]:
        """The rows that are new since the last call; a table with too many is sent whole, thinned."""
        self.read_events()
        if self._is_anew:
            self._is_anew = False
            return [self._part(table, 0) for table in self._needs]
        parts = []
        for table, sent in self._sent.items():
            count = len(self._table(table))
            if count > sent:
                parts.append(self._part(table, sent if count - sent <= MOST_ROWS[table] else 0))
        return parts

    def read_events(self) -> None:
        """Take in the events that are new since the last call; after an undo, all that still hold."""
        rewinds = (self._session.history.rewinds, self._session.events.rewinds)
        if rewinds != self._rewinds:
            self._rewinds, self._is_anew = rewinds, True
            self._lanes, self._events_read = Lanes(self._session.history.layer_names), 0
            self._words.clear()
            self._settings = None
        events = self._session.events.since(self._events_read)
        self._events_read += len(events)
        self._lanes.take(events)
        for event in events:
            self._say(event)
            if isinstance(event, SettingChanged):
                self._settings = None

    def state(self) -> dict[str, object]:
        """The slow state, everything but the ledger: small, JSON-able, the latest is all that counts."""
        self.read_events()
        if self._settings is None:
            self._settings = describe_settings(self._session)
        return {
            "status": self.status(),
            "layers": self._layers(),
            "settings": self._settings,
            "words": list(self._words),
        }

    def ledger(self, dashboard_fraction: float | None) -> dict[str, object]:
        """Savings as rows for bars, and what watching costs in one line.

        Args:
            dashboard_fraction: the publisher's share of the training time, or None before there is one.
        """
        ledger = self._session.savings().to_dict()
        rows = saving_rows(ledger)
        cost = next((row.measured for row in rows if row.is_cost), None)
        watching = [f"monitoring {percent(cost)}", f"dashboard {percent(dashboard_fraction)}", *watching_costs(ledger)]
        return {"rows": [asdict(row) for row in rows if not row.is_cost], "watching": ", ".join(watching)}

    def _table(self, name: str) -> Table:
        return self._lanes.table if name == "lanes" else self._session.history[name]

    def _part(self, name: str, start: int) -> Part:
        rows = self._table(name).rows(start)
        count = start + len(rows["step"])
        if name == "steps":
            rows |= self._means(start, count)
            rows["flops"] = self._work(start, rows["train_flops"])
        notes: Sequence[str] = self._lanes.notes[start:count] if name == "lanes" else ()
        columns = {column: rows[column] for column in self._needs[name]}
        self._sent[name] = count
        return bounded(Part(name, start, count, rows["step"], columns, notes))

    def _means(self, start: int, count: int) -> dict[str, Array]:
        before = max(0, start - MEAN_STEPS + 1)
        rows = self._session.history.steps.rows(before)
        return {
            f"{name}_mean": trailing_mean(rows[name][: count - before], MEAN_STEPS)[start - before :]
            for name in ("loss", "accuracy")
        }

    def _work(self, start: int, flops: Array) -> Array:
        """FLOPs up to each row, from those up to the row before the first."""
        known, total = self._flops
        if start != known:
            total = float(np.nansum(self._session.history.steps["train_flops"][:start]))
        sums = np.asarray(total + np.cumsum(np.nan_to_num(flops)), dtype=np.float64)
        self._flops = (start + len(sums), float(sums[-1]) if len(sums) else total)
        return sums

    def _say(self, event: Event) -> None:
        if isinstance(event, EpochFinished):
            return  # the curves say it
        said = {
            "step": event.step, "kind": type(event).__name__, "by": event.by, "text": event.sentence(),
            "about": getattr(event, "layer", None),
        }  # fmt: skip
        last = self._words[-1] if self._words else {}
        if isinstance(event, FreezeBlocked) and (last.get("kind"), last.get("about")) == (
            said["kind"],
            said["about"],
        ):
            self._words.pop()  # said again at every reading: once is enough
        self._words.append(said)

    def status(self) -> dict[str, object]:
        """Where the run stands, in numbers and in one line."""
        session = self._session
        layers = list(session.layers)
        frozen = sum(row.state == "frozen" for row in layers)
        return {
            "state": session.state,
            "step": int(session.steps_done),
            "planned": int(session.planned_steps),
            "name": session.name,
            "device": str(session.device),
            "text": status_line(session, frozen, len(layers)),
            "error": "" if session.error is None else _first_line(session.error),
            "lacks": list(getattr(session, "lacks", ())),
            **undo_state(session.undo_ring),
        }

    def _layers(self) -> list[dict[str, object]]:
        return [
            {
                "name": row.name, "title": row.title, "state": row.state,
                "since": None if row.since_step is None else int(row.since_step),
                "reason": row.reason or "", "by": row.by or "", "parameters": int(row.num_parameters),
            }
            for row in self._session.layers
        ]  # fmt: skip


def status_line(session: LiveSession, num_frozen: int, num_layers: int) -> str:
    """Where a run stands, in one line.

    Example:
        >>> from types import SimpleNamespace as Some
        >>> from egeria_lab.history import History
        >>> run = Some(steps_done=420, planned_steps=1560, epoch=5.38, history=History([]))
        >>> status_line(run, 2, 5)
        'step 420 of 1,560, epoch 5.4, 2 of 5 layers frozen'
    """
    recent = session.history.steps.rows(max(0, len(session.history.steps) - 20))["loss"]
    loss = number(float(np.mean(recent))) if len(recent) else None
    parts = [f"step {session.steps_done:,} of {session.planned_steps:,}", f"epoch {session.epoch:.1f}"]
    if loss is not None:
        parts.append(f"loss {loss:.2f}" if abs(loss) >= 0.1 else f"loss {loss:.3g}")
    return ", ".join([*parts, f"{num_frozen} of {num_layers} layers frozen"])


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
