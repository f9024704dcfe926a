"""The savings ledger: theoretical and measured figures side by side, and why a saving is what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from egeria_lab.algorithms.costs import CostBook
from egeria_lab.algorithms.ledger_parts import (
    LayerTable,
    LedgerLayer,
    SieveFigures,
    SparsityFigures,
    memory_reason,
    memory_rows,
    parts_to_dict,
    run_rows,
    share_of,
    sieving_reason,
    sparsity_reason,
)
from egeria_lab.algorithms.memory_model import MemoryRun
from egeria_lab.algorithms.run_costs import RunFlops
from egeria_lab.tables import amount, html_table, percent, text_table

__all__ = ["Ledger", "LedgerLayer", "SieveFigures", "SparsityFigures"]


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
        exchange: bytes of gradients between ranks by name, or None in a single process.
        run: FLOPs of the run on paper, technique by technique; needed to show `sieve` and `sparsity`.
        sieve: what a sieve did, or None when there is none.
        sparsity: what sparse training did, or None when nothing is sparse.
        paper_memory: memory as the papers count it, or None when it was not asked for.
        floor: share of the FLOPs that no frozen front can save, where it was counted (`floor_share`).
        peak_bytes: measured peak of the device's allocator in a step, or None where there is none to ask.
        full_peak_bytes: the same with nothing frozen.
    """

    book: CostBook
    layers: tuple[LedgerLayer, ...]
    predicted_saved_bytes: float | None = None
    worker_seconds: float = 0.0
    waited_seconds: float = 0.0
    cache: Mapping[str, float] | None = None
    exchange: Mapping[str, float] | None = None
    run: RunFlops | None = None
    sieve: SieveFigures | None = None
    sparsity: SparsityFigures | None = None
    paper_memory: MemoryRun | None = None
    floor: float | None = None
    peak_bytes: int | None = None
    full_peak_bytes: int | None = None

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
        """One clause for each of FLOPs, time and memory, and for each feature that is on."""
        frozen = [layer.name for layer in self.layers if layer.state == "frozen"]
        if not frozen and not any(layer.frozen_steps for layer in self.layers):
            nothing = "no layer has been frozen yet"
            return {"flops": nothing, "time": nothing, "memory": nothing, **self._why_parts()}
        return {
            "flops": self._why_flops(frozen),
            "time": self._why_time(),
            "memory": self._why_memory(frozen),
            **self._why_parts(),
        }

    @property
    def _has_parts(self) -> bool:
        return self.sieve is not None or self.sparsity is not None

    @property
    def _prefix(self) -> int:
        return next((i for i, layer in enumerate(self.layers) if layer.state != "frozen"), len(self.layers))

    def _why_flops(self, frozen: Sequence[str]) -> str:
        if not frozen:
            return "layers were frozen for a while and are trained again"
        why = f"{self._prefix} of {len(self.layers)} layers frozen from the front skip their backward pass"
        if len(frozen) > self._prefix:
            why += f"; {len(frozen) - self._prefix} behind trainable layers save weight gradients only"
        if self.book.full_flops and self.book.flops_saved_fraction <= 0:
            why += "; 0 so far: no step was made with them, or they hold no product to skip"
        return why if self.sparsity is None else f"{why}; of dense kernels, which masks do not spare"

    def _why_time(self) -> str:
        why = "steps are timed against the median of those with nothing frozen"
        if self.book.baseline_seconds is not None:
            why = "measured beside the same run without freezing, watching included"
        measured = self.book.time_saved_fraction
        if measured is None:
            return "too few steps with nothing frozen to compare with"
        return why if measured > 0 else f"{why}; nothing gained: what is skipped takes less than what else changed"

    def _why_memory(self, frozen: Sequence[str]) -> str:
        if not frozen:
            return "0 B now: no layer is frozen"
        if self._prefix == 0:
            return "0 B from freezing at the front: trainable layers lie before the frozen ones"
        if self.memory_saved_fraction is not None and self.memory_saved_fraction <= 0:
            return "0 B: the frozen front held no more than its output, which the first trained layer keeps"
        return f"the frozen front keeps nothing for backward ({self._prefix} of {len(self.layers)} layers)"

    def _why_parts(self) -> dict[str, str]:
        why = {}
        if self.run is not None and self.sieve is not None:
            why["sieving"] = sieving_reason(self.run, self.sieve)
        if self.run is not None and self.sparsity is not None:
            why["sparsity"] = sparsity_reason(self.run, self.sparsity)
        if self.paper_memory is not None:
            why["paper_memory"] = memory_reason(self.paper_memory)
        return why

    @property
    def always_active_share(self) -> float:
        """FLOPs share of the head, which no rule freezes, and of every forward pass: the floor of training.

        Counted where `floor` is given; otherwise the head's whole backward pass is taken, which is a little
        more, as its input gradient goes too once everything before it is frozen.
        """
        if self.floor is not None:
            return self.floor
        total = sum(layer.forward_flops + layer.backward_flops for layer in self.layers)
        head = self.layers[-1].forward_flops + self.layers[-1].backward_flops
        forward = sum(layer.forward_flops for layer in self.layers[:-1])
        return (head + forward) / total if total else 0.0

    def by_layer(self) -> LayerTable:
        """A table of the layers: how long each was frozen and cached, how dense it is."""
        sieved = None if self.sieve is None else self.sieve.sieved_share
        return LayerTable(self.layers, self.book.steps, sieved)

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
                "peak_bytes": self.peak_bytes,
                "full_peak_bytes": self.full_peak_bytes,
            },
            **parts_to_dict(self.sieve, self.sparsity, self.run, self.paper_memory),
            "why": why,
            "cache": None if self.cache is None else dict(self.cache),
            "exchange": None if self.exchange is None else dict(self.exchange),
            "layers": [
                {
                    "name": layer.name,
                    "parameters": layer.parameters,
                    "forward_flops": layer.forward_flops,
                    "backward_flops": layer.backward_flops,
                    "state": layer.state,
                    "frozen_steps": layer.frozen_steps,
                    "frozen_share": share_of(layer.frozen_steps, book.steps),
                    "cached_share": share_of(layer.cached_steps, book.steps),
                    "density": layer.density,
                }
                for layer in self.layers
            ],
        }

    def _rows(self) -> list[list[str]]:
        book, why = self.book, self.why()
        # With sieve or masks "FLOPs by freezing" is a factor of all together; what the kernels did is another number.
        flops, of_what = ("FLOPs that ran", " of what ran") if self._has_parts else ("FLOPs", "")
        executed = f"{amount(book.executed_flops, 'FLOPs')} of {amount(book.full_flops, 'FLOPs')}"
        watching = f"{book.monitor_seconds:.1f} s in {book.steps:,} steps"
        if self.worker_seconds:
            watching += f", {self.waited_seconds:.1f} s of it waiting; {self.worker_seconds:.1f} s on the worker"
        kept = "–"
        if book.saved_bytes is not None and book.full_saved_bytes is not None:
            kept = f"{amount(book.saved_bytes, 'B')} of {amount(book.full_saved_bytes, 'B')} a step"
        return [
            [flops, percent(book.flops_saved_fraction), "counted, not timed", executed, why["flops"]],
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
                f"most that freezing can save{of_what}", percent(1 - self.always_active_share), "–",
                f"{percent(self.always_active_share)} of the FLOPs are the floor",
                f"{self.layers[-1].name}, the head, and every forward pass remain; only a cache saves more",
            ],
            *self._cache_rows(),
            *self._exchange_rows(),
            *self._part_rows(),
        ]  # fmt: skip

    def _exchange_rows(self) -> list[list[str]]:
        if self.exchange is None or not self.exchange["full_bytes"]:
            return []
        sent, full = self.exchange["bytes"], self.exchange["full_bytes"]
        now, all_of_it = self.exchange["step_bytes"], self.exchange["full_step_bytes"]
        why = (
            f"{amount(now, 'B')} of gradients a step on each of {int(self.exchange['ranks'])} ranks now, "
            f"{amount(all_of_it, 'B')} with nothing frozen; wrapped anew {int(self.exchange['rewraps'])} times, "
            f"{self.exchange['rewrap_seconds']:.2f} s in all"
        )
        return [["gradient exchange", percent(1 - now / all_of_it), percent(1 - sent / full), amount(sent, "B"), why]]

    def _cache_rows(self) -> list[list[str]]:
        if self.cache is None:
            return []
        hits, misses = int(self.cache["hits"]), int(self.cache["misses"])
        served = f"{hits:,} of {hits + misses:,} rows served, {amount(self.cache['num_bytes'], 'B')} on disk"
        reading, writing = self.cache["wait_seconds"], self.cache["write_seconds"]
        cost = f"{reading:.1f} s reading, {writing:.1f} s writing, within the step times"
        if not hits:
            cost = f"nothing served yet: a cache fills during the first pass after a freeze; {cost}"
        return [["activation cache", "in FLOPs", "in time", served, cost]]

    def _part_rows(self) -> list[list[str]]:
        rows = memory_rows(self.paper_memory, self.peak_bytes, self.full_peak_bytes)
        if self.run is not None and self._has_parts:
            rows = [*run_rows(self.run, self.sieve, self.sparsity), *rows]
        return rows

    def __repr__(self) -> str:
        return text_table(_HEAD, self._rows())

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._rows())


_HEAD: Sequence[str] = ("saved", "theoretical", "measured", "amount", "why")
