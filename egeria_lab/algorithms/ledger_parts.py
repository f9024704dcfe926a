"""The parts of the savings ledger that stand there only when their feature is on, and the rows they print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from egeria_lab.algorithms.memory_model import MemoryRun
from egeria_lab.algorithms.run_costs import RunFlops
from egeria_lab.tables import amount, html_table, percent, text_table

Row = list[str]

ON_PAPER = "on paper only: masks save no time and no memory on dense kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLayer:
    """What one layer module costs per sample, and how long it has been frozen.

    Attributes:
        name: its name.
        parameters: number of its parameters.
        forward_flops: FLOPs of its forward pass per sample, dense.
        backward_flops: FLOPs of its backward pass per sample, dense, with nothing frozen.
        state: ``"active"``, ``"frozen"`` or ``"pinned"``.
        frozen_steps: steps that were made while it was frozen.
        cached_steps: steps in which its forward pass was served from the cache; fractional where a part of
            the rows was.
        density: its effective density now, weighted by FLOPs, in [0, 1]; None where nothing is sparse.
    """

    name: str
    parameters: int
    forward_flops: float
    backward_flops: float
    state: str
    frozen_steps: int
    cached_steps: float = 0.0
    density: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SieveFigures:
    """What a sieve has done so far.

    Attributes:
        method: its name, for people.
        kept: samples trained on now.
        total: samples in the data set.
        updates: how often it exchanged samples.
        seconds: measured time that it took.
    """

    method: str
    kept: int
    total: int
    updates: int = 0
    seconds: float = 0.0

    @property
    def sieved_share(self) -> float:
        """Share of the data set that is left out now, in [0, 1]."""
        return 1 - self.kept / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsityFigures:
    """What sparse training has done so far.

    Attributes:
        method: its name, for people.
        density: share of the masked weights that is live now, in [0, 1].
        target_density: what was asked for.
        mean_density: mean over the steps made, above the target under a soft bound.
        maskable_share: share of the dense FLOPs, forward and backward, whose weights lie under masks, in [0, 1].
        updates: how often the masks changed.
        seconds: measured time of the updates and of keeping masked weights at zero.
    """

    method: str
    density: float
    target_density: float
    mean_density: float
    maskable_share: float
    updates: int = 0
    seconds: float = 0.0


def sieving_reason(run: RunFlops, sieve: SieveFigures) -> str:
    """Why sieving saves what it saves."""
    if run.saved_by_sieving > 0:
        now = ", though none is set aside now" if sieve.kept == sieve.total else ""
        return (
            f"{sieve.method}: passes with samples set aside have fewer steps, over the whole run{now}; on top of the "
            "time row, which compares equal steps"
        )
    if sieve.kept == sieve.total:
        return f"{sieve.method} has set no sample aside yet"
    return f"{sieve.method}: no step has been made since samples were set aside"


def sparsity_reason(run: RunFlops, sparsity: SparsityFigures) -> str:
    """Why sparsity saves what it saves."""
    if run.saved_by_sparsity > 0:
        return f"{sparsity.method}, {ON_PAPER}"
    if sparsity.density == 1:
        return f"0: every weight is live under {sparsity.method}"
    return f"0: no step has been made under the masks of {sparsity.method}"


def freezing_reason(run: RunFlops, sparsity: SparsityFigures | None) -> str:
    """What the share that freezing saves is a share of, where it is one of several techniques."""
    if run.saved_by_freezing <= 0:
        return "0: no step has been made in which a frozen layer spared work"
    return "of the same steps without freezing" + ("" if sparsity is None else f"; masks counted, {ON_PAPER}")


def memory_reason(memory: MemoryRun) -> str:
    """What the papers' memory figure stands for, with its second reading."""
    way = f"weights × density, product outputs and gradients, fp32, batch {memory.batch_size}; no indices, no optimizer"
    if memory.gradients.most_saved == 0:
        return f"0 B: no layer has been frozen yet ({way})"
    mean, most = percent(memory.outputs.mean_saved), percent(memory.outputs.most_saved)
    return f"gradients of frozen layers dropped; {mean}, at most {most}, without the frozen front's outputs too ({way})"


def run_rows(run: RunFlops, sieve: SieveFigures | None, sparsity: SparsityFigures | None) -> list[Row]:
    """Rows of sieving, sparsity, their overheads, freezing, and all techniques together."""
    rows: list[Row] = []
    if sieve is not None:
        made = f"{sieve.updates:,} updates in {sieve.seconds:.1f} s"
        kept = f"now {sieve.kept:,} of {sieve.total:,} samples a pass, {made}"
        saved = percent(run.saved_by_sieving)
        rows.append(["FLOPs by sieving", saved, "counted, not timed", kept, sieving_reason(run, sieve)])
    if sparsity is not None:
        live = f"{percent(sparsity.density)} live, {percent(sparsity.mean_density)} on average"
        saved = percent(run.saved_by_sparsity)
        rows.append(["FLOPs by sparsity", saved, "on paper only", live, sparsity_reason(run, sparsity)])
        rows += _overhead_rows(run, sparsity)
        floor = f"{percent(1 - sparsity.maskable_share)} of the FLOPs are the floor"
        why = "dense layers, and products without a weight such as attention scores, remain"
        rows.append(["most that sparsity can save", percent(sparsity.maskable_share), "–", floor, why])
    how = "counted, not timed" if sparsity is None else "on paper only"
    left_over = f"{amount(run.after_freezing, 'FLOPs')} of {amount(run.after_sparsity, 'FLOPs')}"
    rows.append(["FLOPs by freezing", percent(run.saved_by_freezing), how, left_over, freezing_reason(run, sparsity)])
    executed = f"{amount(run.executed, 'FLOPs')} of {amount(run.dense, 'FLOPs')}"
    factors = {"sieving": run.saved_by_sieving, "sparsity": run.saved_by_sparsity}
    factors |= {"freezing": run.saved_by_freezing, "cache": run.saved_by_caching}
    left = " × ".join(f"(1 − {percent(share)} {name})" for name, share in factors.items() if share)
    together = f"what is left multiplies: {left}" if left else "0: nothing has been saved yet"
    rows.append(["FLOPs, all together", percent(run.saved), how, executed, together])
    return rows


def _overhead_rows(run: RunFlops, sparsity: SparsityFigures) -> list[Row]:
    rows: list[Row] = []
    if run.soft_bound > 0:
        share = percent(-run.soft_bound / run.executed)
        more = f"density {percent(sparsity.mean_density)} on average, {percent(sparsity.target_density)} asked for"
        why = "trained above the target under a soft memory bound; counted above"
        rows.append(["cost of the soft bound", share, "–", more, why])
    if run.dense_gradients > 0:
        share, flops = percent(-run.dense_gradients / run.executed), amount(run.dense_gradients, "FLOPs")
        why = "growing by gradient needs dense weight gradients; counted above"
        rows.append(["cost of dense gradients", share, "–", flops, why])
    made = f"{sparsity.seconds:.1f} s in {sparsity.updates:,} updates"
    rows.append(["cost of masks", "–", "in time", made, "choosing weights and keeping the others at zero"])
    return rows


def memory_rows(memory: MemoryRun | None, peak: int | None, full_peak: int | None) -> list[Row]:
    """The papers' figure, and beside it what the device's allocator measured."""
    rows: list[Row] = []
    if memory is not None:
        least = memory.gradients.minimum or 0.0
        range_ = f"{amount(memory.mean_bytes, 'B')} on average with nothing frozen, {amount(least, 'B')} at least"
        saved = f"{percent(memory.gradients.mean_saved)}, at most {percent(memory.gradients.most_saved)}"
        rows.append(["memory, as the papers count", saved, "–", range_, memory_reason(memory)])
    if peak is not None:
        share = percent(1 - peak / full_peak) if full_peak else "–"
        of = f"{amount(peak, 'B')}" + (f" of {amount(full_peak, 'B')}" if full_peak else "")
        why = "of the device's allocator in a step, weights and optimizer state included"
        rows.append(["peak memory", "–", share, of, why])
    return rows


def parts_to_dict(
    sieve: SieveFigures | None, sparsity: SparsityFigures | None, run: RunFlops | None, memory: MemoryRun | None
) -> dict[str, object]:
    """The optional parts as JSON-able plain data, None where a feature is off."""
    return {
        "run": None if run is None else run.to_dict(),
        "sieve": None if sieve is None else {**asdict(sieve), "sieved_share": sieve.sieved_share},
        "sparsity": None if sparsity is None else {**asdict(sparsity), "note": ON_PAPER},
        "paper_memory": None if memory is None else memory.to_dict(),
    }


class LayerTable:
    """The ledger layer by layer: density, frozen share, cached share; prints as a table.

    Args:
        layers: the rows, front to back.
        steps: steps made so far.
        sieved_share: share of the samples left out, the same for every layer; None without a sieve.

    Example:
        >>> row = LedgerLayer(
        ...     name="stem", parameters=160, forward_flops=2e6, backward_flops=2e6, state="frozen", frozen_steps=5)
        >>> LayerTable([row], steps=20)
        layer  parameters  FLOPs a sample  state   frozen
        stem          160     4 MFLOPs      frozen  25.0 %
    """

    def __init__(self, layers: Sequence[LedgerLayer], steps: int, sieved_share: float | None = None) -> None:
        self._layers = list(layers)
        self._steps = steps
        self._sieved = sieved_share

    def _columns(self) -> dict[str, list[str]]:
        layers = self._layers
        columns = {
            "layer": [layer.name for layer in layers],
            "parameters": [f"{layer.parameters:,}" for layer in layers],
            "FLOPs a sample": [amount(layer.forward_flops + layer.backward_flops, "FLOPs") for layer in layers],
            "state": [layer.state for layer in layers],
            "frozen": [percent(share_of(layer.frozen_steps, self._steps)) for layer in layers],
        }
        if any(layer.cached_steps for layer in layers):
            columns["cached"] = [percent(share_of(layer.cached_steps, self._steps)) for layer in layers]
        if any(layer.density is not None for layer in layers):
            columns["density"] = [percent(layer.density) for layer in layers]
        if self._sieved is not None:
            columns["samples left out"] = [percent(self._sieved)] * len(layers)
        return columns

    def __repr__(self) -> str:
        columns = self._columns()
        return text_table(list(columns), [list(row) for row in zip(*columns.values(), strict=True)])

    def _repr_html_(self) -> str:
        columns = self._columns()
        return html_table(list(columns), [list(row) for row in zip(*columns.values(), strict=True)])


def share_of(steps: float, total: int) -> float:
    """Share of the steps made, in [0, 1]; 0 before the first."""
    return steps / total if total else 0.0
