"""Which layer is in which state, since when, why and by whom: the one table that every view shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from egeria_lab.algorithms.layers import LayerModule, LayerModules
from egeria_lab.errors import unknown_name
from egeria_lab.tables import html_table, text_table


@dataclass(slots=True)
class LayerRow:
    """State of one layer module.

    Attributes:
        name: what `freeze` takes.
        title: what the layer is, in words.
        num_parameters: number of its weights.
        frozen: it is not trained now.
        pinned: no rule may freeze it.
        since_step: finished steps when the state last changed.
        reason: why it is in this state.
        by: who put it there.
        note: why it is special, or empty.
    """

    name: str
    title: str
    num_parameters: int
    frozen: bool = False
    pinned: bool = False
    since_step: int = 0
    reason: str = "trained from the start"
    by: str = "session"
    note: str = ""

    @property
    def state(self) -> str:
        """``"frozen"``, ``"pinned"`` (trained, and no rule may freeze it) or ``"active"``."""
        return "frozen" if self.frozen else "pinned" if self.pinned else "active"

    def set(self, step: int, reason: str, by: str) -> None:
        """Note a change of state."""
        self.since_step, self.reason, self.by = step, reason, by


class LayerRows:
    """States of layer modules to look at, front to back; prints as a table.

    Args:
        rows: front to back.

    Example:
        >>> LayerRows([LayerRow("layers.0", "Linear", 10)])["layers.0"].state
        'active'
    """

    def __init__(self, rows: Iterable[LayerRow]) -> None:
        self._rows = {row.name: row for row in rows}

    @property
    def names(self) -> list[str]:
        """Names, front to back."""
        return list(self._rows)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of frozen layers, front to back."""
        return tuple(name for name, row in self._rows.items() if row.frozen)

    @property
    def pinned(self) -> tuple[str, ...]:
        """Names of pinned layers, front to back."""
        return tuple(name for name, row in self._rows.items() if row.pinned)

    def __getitem__(self, name: str | int) -> LayerRow:
        if isinstance(name, int):
            return list(self._rows.values())[name]
        if name not in self._rows:
            raise unknown_name("layer", name, self._rows)
        return self._rows[name]

    def __iter__(self) -> Iterator[LayerRow]:
        return iter(list(self._rows.values()))

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return text_table(*show_rows(self))

    def _repr_html_(self) -> str:
        return html_table(*show_rows(self))


class LayerBoard(LayerRows):
    """The rows of all layer modules of a model that is trained here.

    Example:
        >>> import torch
        >>> from egeria_lab.algorithms.layers import layers
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> board = LayerBoard(layers(model, torch.zeros(2, 2)))
        >>> [(row.name, row.state) for row in board]
        [('0', 'active'), ('1', 'active')]
    """

    def __init__(self, layers: LayerModules) -> None:
        super().__init__(
            LayerRow(layer.name, layer.title, layer.num_parameters, note=layer.note, reason=_at_the_start(layer))
            for layer in layers
        )

    @property
    def prefix_length(self) -> int:
        """How many layers from the front are frozen without a gap."""
        return next((i for i, row in enumerate(self._rows.values()) if not row.frozen), len(self._rows))

    def state_dict(self) -> dict[str, Any]:
        """The state of every layer, as plain values."""
        return {
            row.name: {
                "frozen": row.frozen, "pinned": row.pinned, "since_step": row.since_step,
                "reason": row.reason, "by": row.by,
            }
            for row in self
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of every layer."""
        for row in self:
            kept = state[row.name]
            row.frozen, row.pinned = kept["frozen"], kept["pinned"]
            row.set(kept["since_step"], kept["reason"], kept["by"])


def show_rows(rows: Iterable[LayerRow]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of a table of layer states."""
    cells = [
        [
            row.name, row.title, f"{row.num_parameters:,}", _state_in_words(row),
            f"{row.since_step:,}", row.by, "; ".join(part for part in (row.reason, row.note) if part),
        ]
        for row in rows
    ]  # fmt: skip
    return _HEAD, cells


def _at_the_start(layer: LayerModule) -> str:
    if layer.parameters and len(layer.untrained) == len(layer.parameters):
        return "its owner had switched its gradients off before the session: it is not trained"
    return "trained from the start"


def _state_in_words(row: LayerRow) -> str:
    return row.state + (", pinned" if row.pinned and row.frozen else "")


_HEAD = ["layer", "what", "parameters", "state", "since step", "by", "why"]
