"""The savings ledger: theoretical and measured figures side by side, and why a saving is what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from egeria_lab.algorithms.costs import CostBook
from egeria_lab.tables import amount, html_table, percent, text_table


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLayer:
    """What one layer module costs per sample, and how long it has been frozen."""

    name: str
    parameters: int
    forward_flops: float
    backward_flops: float
    state: str
    frozen_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a session has saved so far.

    *Theoretical* figures are counted or predicted (FLOPs of the operations that ran; bytes summed over
    layers); *measured* figures come from the clock and from autograd's own storage. The two never mix.

    Attributes:
        book: the running totals.
        layers: the cost of each layer module, front to back.
        predicted_saved_bytes: bytes kept for backward as predicted from the run with nothing frozen.
        worker_seconds: processor time that the reference spent beside the training thread.
        waited_seconds: time the training thread waited for it; part of the book's monitoring time.
        cache: figures of the activation cache by name, or None when there is none.
    """

    book: CostBook
    layers: tuple[LedgerLayer, ...]
    predicted_saved_bytes: float | None = None
    worker_seconds: float = 0.0
    waited_seconds: float = 0.0
    cache: Mapping[str, float] | None = None

    @property
    def memory_saved_fraction(self) -> float | None:
        """Measured share of backward storage that the newest frozen set saves."""
        if not self.book.full_saved_bytes or self.book.saved_bytes is None:
            return None
        return 1 - self.book.saved_bytes / self.book.full_saved_bytes

    @property
    def memory_predicted_fraction(self) -> float | None:
        """Predicted share of backward storage that the newest frozen set saves."""
        if not self.book.full_saved_bytes or self.predicted_saved_bytes is None:
            return None
        return 1 - self.predicted_saved_bytes / self.book.full_saved_bytes

    def why(self) -> dict[str, str]:
        """One clause for each of FLOPs, time and memory."""
        frozen = [layer.name for layer in self.layers if layer.state == "frozen"]
        prefix = next((i for i, layer in enumerate(self.layers) if layer.state != "frozen"), len(self.layers))
        if not frozen and not any(layer.frozen_steps for layer in self.layers):
            nothing = "no layer has been frozen yet"
            return {"flops": nothing, "time": nothing, "memory": nothing}
        hole = len(frozen) > prefix
        flops = f"{prefix} of {len(self.layers)} layers frozen from the front skip their backward pass"
        if hole:
            flops += f"; {len(frozen) - prefix} behind trainable layers save weight gradients only"
        memory = f"the frozen front keeps nothing for backward ({prefix} of {len(self.layers)} layers)"
        if prefix == 0:
            memory = "0 B from freezing at the front: trainable layers lie before the frozen ones"
        if not frozen:
            flops = "layers were frozen for a while and are trained again"
            memory = "0 B now: no layer is frozen"
        time = "steps are timed against the median of those with nothing frozen"
        if self.book.baseline_seconds is not None:
            time = "measured beside the same run without freezing, watching included"
        elif self.book.time_saved_fraction is None:
            time = "too few steps with nothing frozen to compare with"
        return {"flops": flops, "time": time, "memory": memory}

    @property
    def always_active_share(self) -> float:
        """FLOPs share of the head, which no rule freezes: the floor of what training costs."""
        total = sum(layer.forward_flops + layer.backward_flops for layer in self.layers)
        head = self.layers[-1].forward_flops + self.layers[-1].backward_flops
        forward = sum(layer.forward_flops for layer in self.layers[:-1])
        return (head + forward) / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The ledger as JSON-able plain data."""
        book, why = self.book, self.why()
        return {
            "steps": book.steps,
            "flops": {
                "executed": book.executed_flops,
                "without_freezing": book.full_flops,
                "saved_fraction": book.flops_saved_fraction,
                "floor_fraction": self.always_active_share,
                "why": why["flops"],
            },
            "time": {
                "train_seconds": book.train_seconds,
                "monitor_seconds": book.monitor_seconds,
                "predicted_saved_fraction": book.flops_saved_fraction,
                "measured_saved_fraction": book.time_saved_fraction,
                "monitor_fraction": book.monitor_fraction,
                "worker_seconds": self.worker_seconds,
                "waited_seconds": self.waited_seconds,
                "why": why["time"],
            },
            "memory": {
                "saved_tensor_bytes": book.saved_bytes,
                "full_saved_tensor_bytes": book.full_saved_bytes,
                "saved_fraction": self.memory_saved_fraction,
                "theoretical_saved_fraction": self.memory_predicted_fraction,
                "why": why["memory"],
            },
            "cache": None if self.cache is None else dict(self.cache),
            "layers": [
                {
                    "name": layer.name,
                    "parameters": layer.parameters,
                    "forward_flops": layer.forward_flops,
                    "backward_flops": layer.backward_flops,
                    "state": layer.state,
                    "frozen_steps": layer.frozen_steps,
                }
                for layer in self.layers
            ],
        }

    def _rows(self) -> list[list[str]]:
        book, why = self.book, self.why()
        executed = f"{amount(book.executed_flops, 'FLOPs')} of {amount(book.full_flops, 'FLOPs')}"
        watching = f"{book.monitor_seconds:.1f} s in {book.steps:,} steps"
        if self.worker_seconds:
            watching += f", {self.waited_seconds:.1f} s of it waiting; {self.worker_seconds:.1f} s on the worker"
        kept = "–"
        if book.saved_bytes is not None and book.full_saved_bytes is not None:
            kept = f"{amount(book.saved_bytes, 'B')} of {amount(book.full_saved_bytes, 'B')} a step"
        return [
            ["FLOPs", percent(book.flops_saved_fraction), "counted, not timed", executed, why["flops"]],
            [
                "time", percent(book.flops_saved_fraction), percent(book.time_saved_fraction),
                f"{book.train_seconds:.1f} s trained", why["time"],
            ],
            [
                "memory for backward", percent(self.memory_predicted_fraction),
                percent(self.memory_saved_fraction), kept, why["memory"],
            ],
            [
                "cost of watching", "–", percent(-book.monitor_fraction if book.monitor_fraction else 0.0),
                watching, "plasticity readings, snapshots and counting, not included above",
            ],
            [
                "most that freezing can save", percent(1 - self.always_active_share), "–", "of the FLOPs",
                f"{self.layers[-1].name}, the head, and every forward pass remain; only a cache saves more",
            ],
            *self._cache_rows(),
        ]  # fmt: skip

    def _cache_rows(self) -> list[list[str]]:
        if self.cache is None:
            return []
        hits, misses = int(self.cache["hits"]), int(self.cache["misses"])
        served = f"{hits:,} of {hits + misses:,} rows served, {amount(self.cache['num_bytes'], 'B')} on disk"
        reading, writing = self.cache["wait_seconds"], self.cache["write_seconds"]
        cost = f"{reading:.1f} s reading, {writing:.1f} s writing, within the step times"
        return [["activation cache", "in FLOPs", "in time", served, cost]]

    def __repr__(self) -> str:
        return text_table(_HEAD, self._rows())

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._rows())


_HEAD: Sequence[str] = ("saved", "theoretical", "measured", "amount", "why")
