"""Append-only columns of numbers, written by one thread and readable from any, without locks.

A row is published by raising `count` after its values are in place; columns grow by doubling into fresh
arrays, so a reader that took an old array still sees complete rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from egeria_lab.errors import unknown_name
from egeria_lab.tables import html_table

Array = NDArray[np.float64]


class Table:
    """Named float64 columns of equal length that only ever grow.

    Args:
        columns: names of the columns, in order.

    Example:
        >>> table = Table(["step", "loss"])
        >>> table.append(step=1, loss=2.5)
        >>> table.append(step=2, loss=2.0)
        >>> len(table), table["loss"].tolist(), table.rows(1)["step"].tolist()
        (2, [2.5, 2.0], [2.0])
    """

    def __init__(self, columns: list[str], capacity: int = 256) -> None:
        self.columns = tuple(columns)
        self._data = np.full((len(columns), capacity), np.nan)
        self._count = 0

    def append(self, **values: float | None) -> None:
        """Add one row; a missing or None value is stored as NaN.

        Raises:
            KeyError: when a name is not a column.
        """
        unknown = set(values) - set(self.columns)
        if unknown:
            raise KeyError(f"no column {sorted(unknown)}; columns: {', '.join(self.columns)}")
        row = self._count
        if row == self._data.shape[1]:
            grown = np.full((len(self.columns), 2 * row), np.nan)
            grown[:, :row] = self._data
            self._data = grown
        for position, name in enumerate(self.columns):
            value = values.get(name)
            self._data[position, row] = np.nan if value is None else value
        self._count = row + 1  # published last: a reader never sees a half-written row

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, name: str) -> Array:
        """One column as a read-only view of what is published so far."""
        return self.rows()[name]

    def rows(self, start: int = 0) -> dict[str, Array]:
        """All columns from row `start` on, as read-only views of equal length."""
        count = self._count  # before the data: old arrays always hold at least that many rows
        data = self._data[:, start:count].view()
        data.flags.writeable = False
        return {name: data[position] for position, name in enumerate(self.columns)}

    def last(self) -> dict[str, float]:
        """The newest row, or an empty dictionary when there is none."""
        count = self._count
        if count == 0:
            return {}
        return {name: float(self._data[i, count - 1]) for i, name in enumerate(self.columns)}

    def state_dict(self) -> dict[str, Any]:
        """The rows so far: an array ``(columns, rows)`` that nobody writes to any more, and the columns' names."""
        count = self._count
        return {"columns": list(self.columns), "rows": self._data[:, :count]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold exactly those rows. Columns that they do not have are NaN; those that this table has not are lost."""
        rows = state["rows"]
        data = np.full((len(self.columns), max(256, 2 * rows.shape[1])), np.nan)
        for position, name in enumerate(state["columns"]):
            if name in self.columns:
                data[self.columns.index(name), : rows.shape[1]] = rows[position]
        self._count = min(self._count, rows.shape[1])  # a reader never sees more rows than there are
        self._data = data
        self._count = rows.shape[1]

    def frame(self) -> pd.DataFrame:
        """A copy as a pandas data frame."""
        return pd.DataFrame({name: column.copy() for name, column in self.rows().items()})


STEP_COLUMNS = [
    "step", "epoch", "loss", "accuracy", "learning_rate", "samples", "num_frozen",
    "step_seconds", "monitor_seconds", "train_flops", "full_flops", "elapsed_seconds",
]  # fmt: skip
PLASTICITY_COLUMNS = [
    "step", "layer", "value", "smoothed", "slope", "tolerance", "stable", "verdict", "generation",
]  # fmt: skip
EPOCH_COLUMNS = [
    "epoch", "step", "train_loss", "train_accuracy", "valid_loss", "valid_accuracy", "seconds",
]  # fmt: skip
SAVINGS_COLUMNS = [
    "step", "flops_saved_fraction", "time_saved_fraction", "saved_tensor_bytes",
    "full_saved_tensor_bytes", "monitor_fraction",
]  # fmt: skip

RATE_COLUMNS = ["step", "layer", "learning_rate"]

SIEVE_COLUMNS = ["step", "epoch", "kept", "waiting", "discarded", "removed", "returned", "forgetting_events"]
SPARSITY_COLUMNS = ["step", "layer", "density", "churn"]

VERDICTS = ("warming up", "moving", "stable", "freeze", "blocked", "frozen")
"""What a plasticity reading can say about its layer; the table stores the position in this tuple."""


class History(Mapping[str, Table]):
    """The tables of a session: ``steps``, ``plasticity``, ``epochs``, ``savings``, ``rates``, ``sieve``, ``sparsity``.

    In the table ``plasticity``, `layer` is the position of the layer module, front to back, and `verdict`
    the position in `VERDICTS`; `frame` spells both out.

    Example:
        >>> history = History(["layers.0", "layers.1"])
        >>> history.plasticity.append(step=10, layer=1, value=3e-6, verdict=1)
        >>> history.frame("plasticity")[["step", "layer", "verdict"]].values.tolist()
        [[10, 'layers.1', 'moving']]
    """

    def __init__(self, layer_names: list[str]) -> None:
        self.layer_names = tuple(layer_names)
        self.rewinds = 0
        self.steps = Table(STEP_COLUMNS)
        self.plasticity = Table(PLASTICITY_COLUMNS)
        self.epochs = Table(EPOCH_COLUMNS)
        self.savings = Table(SAVINGS_COLUMNS)
        self.rates = Table(RATE_COLUMNS)
        self.sieve = Table(SIEVE_COLUMNS)
        self.sparsity = Table(SPARSITY_COLUMNS)

    @property
    def _tables(self) -> dict[str, Table]:
        return {
            "steps": self.steps,
            "plasticity": self.plasticity,
            "epochs": self.epochs,
            "savings": self.savings,
            "rates": self.rates,
            "sieve": self.sieve,
            "sparsity": self.sparsity,
        }

    def __getitem__(self, name: str) -> Table:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def state_dict(self) -> dict[str, Any]:
        """Every table, see `Table.state_dict`."""
        return {name: table.state_dict() for name, table in self._tables.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold exactly those rows; `rewinds` tells those who follow the tables to begin anew."""
        for name, table in self._tables.items():
            if name in state:
                table.load_state_dict(state[name])
        self.rewinds += 1

    def frame(self, table: str = "steps") -> pd.DataFrame:
        """One table as a pandas data frame, with whole numbers and names where they belong.

        Args:
            table: the name of one of them.

        Raises:
            UnknownNameError: for any other name.
        """
        if table not in self._tables:
            raise unknown_name("history table", table, self._tables)
        frame = self._tables[table].frame()
        whole = ["step", "num_frozen", "stable", "generation", "samples", *SIEVE_COLUMNS[2:]]
        whole += ["epoch"] if table == "epochs" else []
        for column in whole:
            if column in frame:
                frame[column] = frame[column].fillna(-1).astype("int64")
        if "layer" in frame:
            frame["layer"] = [self.layer_names[int(i)] for i in frame["layer"]]
        if "verdict" in frame:
            frame["verdict"] = [VERDICTS[int(i)] for i in frame["verdict"]]
        return frame

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {len(table)} rows" for name, table in self._tables.items())
        return f"History({sizes})"

    def _repr_html_(self) -> str:
        rows = [[name, f"{len(table):,}", ", ".join(table.columns)] for name, table in self._tables.items()]
        hint = "<p><code>.frame(table)</code> gives one of them as a pandas data frame.</p>"
        return html_table(["table", "rows", "columns"], rows) + hint
