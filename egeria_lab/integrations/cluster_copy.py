"""The notebook's copy of what rank 0 records: history, events, layers, settings and ledger."""

from __future__ import annotations

from typing import Any

import numpy as np

from egeria_lab import commands as c
from egeria_lab.engine.layer_board import LayerRows
from egeria_lab.events import EventLog
from egeria_lab.history import History
from egeria_lab.integrations.cluster_engine import News, Seen


class UndoWords:
    """What could be undone and redone on rank 0."""

    def __init__(self, done: list[c.Command], undone: list[c.Command], why: str) -> None:
        self._done, self._undone, self._why = done, undone, why

    def commands(self) -> list[c.Command]:
        """What can be undone, oldest first."""
        return self._done

    def undone(self) -> list[c.Command]:
        """What can be redone, the next one last."""
        return self._undone

    def why_nothing(self) -> str:
        """Why no command can be undone, in one clause; empty when one can."""
        return self._why


class RunCopy:
    """History and events of rank 0, kept up with `News`.

    Args:
        facts: the slow state, from `egeria_lab.integrations.cluster_engine.facts`.

    Attributes:
        facts: the newest slow state.
        layers: states of the layer modules.
        seen: how far the copy goes.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.layers = LayerRows(facts["layers"])
        self.history = History(self.layers.names)
        self.events = EventLog()
        self.seen = Seen()

    def take(self, news: News) -> None:
        """Add what is new; after an undo on rank 0, hold exactly what still holds there."""
        if news.anew:
            state = {
                name: {"columns": list(rows), "rows": np.stack(list(rows.values()))} for name, rows in news.rows.items()
            }
            self.history.load_state_dict(state)
            self.events.load_state_dict({"events": news.events})
        else:
            for name, rows in news.rows.items():
                for values in zip(*rows.values(), strict=True):
                    self.history[name].append(**dict(zip(rows, map(float, values), strict=True)))
            for event in news.events:
                self.events.append(event)
        counted = len(news.events) + (0 if news.anew else self.seen.events)
        self.seen = Seen(news.rewinds, {name: len(self.history[name]) for name in self.history}, counted)
        self.facts = news.facts
        self.layers = LayerRows(news.facts["layers"])
