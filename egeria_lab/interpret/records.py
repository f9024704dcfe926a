"""What an attribution says, and how far two of the same samples lie apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from egeria_lab.algorithms.distances import cosine_distance, relative_l2_distance
from egeria_lab.errors import DataError
from egeria_lab.tables import html_table, text_table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerAttribution:
    """How much of the score flows through one layer module.

    Attributes:
        name: name of the layer module.
        state: ``"frozen"``, ``"active"``, or ``"no weights"``.
        conductance: shape (samples, …) as its output, float32, on the CPU; None where nothing of the score
            depends on it.
        mean_abs: mean |conductance| over units and samples, >= 0.
        total: sum over the units, mean over the samples: the change of the score that flows through it.
    """

    name: str
    state: str
    conductance: Tensor | None = field(repr=False)
    mean_abs: float | None
    total: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attribution:
    """Which parts of the inputs, and which layers, made the score of a class what it is.

    Tensors are float32 on the CPU and belong to nobody else.

    Attributes:
        method: name of the method.
        layer: where the maps lie, or None for the inputs.
        maps: shape of the inputs, or of the layer's output, one row a sample; Grad-CAM has one channel.
        inputs: the samples that were explained.
        targets: the class that was explained, for each sample (or each position of each).
        delta: for path methods, how far the maps of each sample are from adding up to the score, else None.
        score_change: mean change of the score from the baseline to the inputs.
        layers: a row for each layer module, front to back; empty when no layers were given.
    """

    method: str
    layer: str | None
    maps: Tensor = field(repr=False)
    inputs: Tensor = field(repr=False)
    targets: Tensor
    delta: Tensor | None
    score_change: float
    layers: tuple[LayerAttribution, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the maps, as JSON-able plain data."""
        return {
            "method": self.method,
            "layer": self.layer,
            "shape": list(self.maps.shape),
            "targets": self.targets.tolist(),
            "delta": None if self.delta is None else self.delta.tolist(),
            "score_change": self.score_change,
            "layers": [
                {"name": row.name, "state": row.state, "mean_abs": row.mean_abs, "total": row.total}
                for row in self.layers
            ],
        }

    def drift_since(self, before: Attribution) -> Drift:
        """How far it moved since an earlier one of the same samples; see `drift`."""
        return drift(before, self)

    def _rows(self) -> list[list[str]]:
        return [[row.name, row.state, _short(row.mean_abs), _short(row.total)] for row in self.layers]

    def _title(self) -> str:
        where = f"at {self.layer}" if self.layer else "of the inputs"
        delta = "" if self.delta is None else f"; convergence delta at most {float(self.delta.abs().max()):.2g}"
        shape = " × ".join(str(size) for size in self.maps.shape)
        return f"{self.method} {where}: {shape}; the score changes by {self.score_change:.3g} from the baseline{delta}"

    def __repr__(self) -> str:
        return f"{self._title()}\n{text_table(_HEAD, self._rows())}" if self.layers else self._title()

    def _repr_html_(self) -> str:
        return f"<p>{self._title()}</p>" + (html_table(_HEAD, self._rows()) if self.layers else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftRow:
    """How far one attribution moved.

    Attributes:
        name: ``"maps"``, or the name of a layer module.
        state: of the layer in the later attribution.
        cosine: mean over the samples of the cosine between before and after, in [-1, 1]; 1 = same direction.
        relative_l2: ``‖after − before‖ / ‖before‖``, >= 0; 0 = the same.
    """

    name: str
    state: str
    cosine: float
    relative_l2: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far the attribution of the same samples moved; the maps first, then the layers front to back."""

    rows: tuple[DriftRow, ...]

    def __getitem__(self, name: str) -> DriftRow:
        found: Mapping[str, DriftRow] = {row.name: row for row in self.rows}
        return found[name]

    def to_dict(self) -> dict[str, Any]:
        """The rows as JSON-able plain data, by name."""
        return {
            row.name: {"state": row.state, "cosine": row.cosine, "relative_l2": row.relative_l2} for row in self.rows
        }

    def _cells(self) -> list[list[str]]:
        return [[row.name, row.state, f"{row.cosine:.4f}", f"{row.relative_l2:.4f}"] for row in self.rows]

    def __repr__(self) -> str:
        return text_table(_DRIFT_HEAD, self._cells())

    def _repr_html_(self) -> str:
        return html_table(_DRIFT_HEAD, self._cells())


def drift(before: Attribution, after: Attribution) -> Drift:
    """How far the attribution of the same samples moved, for example since a layer was frozen.

    A frozen layer's outputs stay the same, yet its conductance may move: it is what the layers behind make of it.

    Args:
        before: the earlier attribution.
        after: the later one, of the same samples and classes by the same method.

    Raises:
        DataError: when the two are of different samples, classes, methods or layers.

    Example:
        >>> from egeria_lab.interpret.attribution import attribute
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> first = attribute(model, torch.ones(2, 3), [0, 1])
        >>> drift(first, first)["maps"]
        DriftRow(name='maps', state='', cosine=1.0, relative_l2=0.0)
    """
    for what, same in (
        ("methods", (before.method, before.layer) == (after.method, after.layer)),
        ("samples", before.inputs.shape == after.inputs.shape and torch.equal(before.inputs, after.inputs)),
        ("classes", before.targets.shape == after.targets.shape and torch.equal(before.targets, after.targets)),
        ("layers", [row.name for row in before.layers] == [row.name for row in after.layers]),
    ):
        if not same:
            advice = " Give targets=: what the model predicts may have changed." if what == "classes" else ""
            raise DataError(f"drift compares two attributions alike, and these are of different {what}.{advice}")
    rows = [_moved("maps", "", before.maps, after.maps)]
    for earlier, later in zip(before.layers, after.layers, strict=True):
        if earlier.conductance is not None and later.conductance is not None:
            rows.append(_moved(later.name, later.state, earlier.conductance, later.conductance))
    return Drift(rows=tuple(rows))


def _moved(name: str, state: str, before: Tensor, after: Tensor) -> DriftRow:
    if torch.equal(before, after):  # without the rounding of a cosine
        return DriftRow(name=name, state=state, cosine=1.0, relative_l2=0.0)
    cosine = 1 - float(cosine_distance(after, before))
    return DriftRow(name=name, state=state, cosine=cosine, relative_l2=float(relative_l2_distance(after, before)))


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


_HEAD = ["layer", "state", "mean |conductance|", "change of the score through it"]
_DRIFT_HEAD = ["of", "state", "cosine", "relative L2"]
