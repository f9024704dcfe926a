"""The savings ledger as rows of a table: theory and measurement side by side, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from egeria_lab.tables import amount, percent


def number(value: object) -> float | None:
    """`value` as a finite float, or None when it is missing or not a number.

    Example:
        >>> number(2), number(None), number(float("nan"))
        (2.0, None, None)
    """
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


def quantity(value: object, unit: str) -> str:
    """A quantity with a readable prefix, or a dash when it is missing.

    Example:
        >>> quantity(1_234_000_000, "FLOPs"), quantity(None, "s")
        ('1.23 GFLOPs', '–')
    """
    known = number(value)
    return "–" if known is None else amount(known, unit)


@dataclass(frozen=True, slots=True)
class SavingRow:
    """One line of the savings table; shares are fractions of training without freezing.

    Attributes:
        theoretical: what the cost model says, or None when it says nothing about this quantity.
        measured: what was measured, or None when it was not.
        absolute: the amounts behind the shares.
        why: the reason for a zero, a gap or a loss.
        is_cost: True for what is paid, not saved.
        unmeasured: what stands in place of a missing measurement.
    """

    quantity: str
    theoretical: float | None
    measured: float | None
    absolute: str
    why: str
    is_cost: bool = False
    unmeasured: str = "not measured"


def _part(ledger: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = ledger.get(name)
    return part if isinstance(part, Mapping) else {}


COUNTED, ON_PAPER = "counted, not timed", "on paper only"


def saving_rows(ledger: Mapping[str, object]) -> list[SavingRow]:
    """The ledger as rows: FLOPs, time, memory, what else is on (sieving, sparsity, all together), cost of monitoring.

    Args:
        ledger: `session.savings().to_dict()`.

    Example:
        >>> row = saving_rows({"flops": {"saved_fraction": 0.0, "why": "nothing is frozen"}})[0]
        >>> row.quantity, row.theoretical, row.measured, row.why
        ('Computation (FLOPs)', 0.0, None, 'nothing is frozen')
    """
    flops, time, memory = _part(ledger, "flops"), _part(ledger, "time"), _part(ledger, "memory")
    several = bool(_part(ledger, "sieve") or _part(ledger, "sparsity"))
    of_flops = f"{quantity(flops.get('executed'), 'FLOPs')} of {quantity(flops.get('without_freezing'), 'FLOPs')}"
    held = quantity(memory.get("saved_tensor_bytes"), "B")
    held_full = quantity(memory.get("full_saved_tensor_bytes"), "B")
    return [
        SavingRow(
            "Computation that ran (FLOPs)" if several else "Computation (FLOPs)",
            number(flops.get("saved_fraction")), None, of_flops,
            _why(flops, "counted from the operators that ran, not timed"), unmeasured=COUNTED,
        ),
        SavingRow(
            "Training time", number(time.get("predicted_saved_fraction")),
            number(time.get("measured_saved_fraction")),
            f"{quantity(time.get('train_seconds'), 's')} trained",
            _why(time),
        ),
        SavingRow(
            "Memory for backward (saved tensors)", number(memory.get("theoretical_saved_fraction")),
            number(memory.get("saved_fraction")), f"{held} of {held_full}", _why(memory),
        ),
        *_technique_rows(ledger),
        *_paper_memory_rows(ledger),
        SavingRow(
            "Cost of monitoring", None, number(time.get("monitor_fraction")),
            f"{quantity(time.get('monitor_seconds'), 's')} spent",
            "of all time spent; not subtracted above",
            is_cost=True,
        ),
    ]  # fmt: skip


def _technique_rows(ledger: Mapping[str, object]) -> list[SavingRow]:
    """What sieving and sparsity save of the computation, and all techniques together."""
    run, sieve, sparsity = _part(ledger, "run"), _part(ledger, "sieve"), _part(ledger, "sparsity")
    why, rows = _part(ledger, "why"), []
    if sieve:
        kept = f"{number(sieve.get('kept')) or 0:,.0f} of {number(sieve.get('total')) or 0:,.0f} samples a pass"
        rows.append(
            SavingRow("Computation by sieving (FLOPs)", number(run.get("saved_by_sieving")), None, kept,
                      str(why.get("sieving", "")), unmeasured=COUNTED)
        )  # fmt: skip
    if sparsity:
        live = f"{percent(number(sparsity.get('density')))} of the masked weights live"
        rows.append(
            SavingRow("Computation by sparsity (FLOPs)", number(run.get("saved_by_sparsity")), None, live,
                      str(why.get("sparsity", "")), unmeasured=ON_PAPER)
        )  # fmt: skip
        rows.append(_freezing_row(ledger))
    if rows:
        of_dense = f"{quantity(run.get('executed'), 'FLOPs')} of {quantity(run.get('dense'), 'FLOPs')}"
        rows.append(
            SavingRow("Computation, all together (FLOPs)", number(run.get("saved")), None, of_dense, _factors(run),
                      unmeasured=ON_PAPER if sparsity else COUNTED)
        )  # fmt: skip
    return rows


def _freezing_row(ledger: Mapping[str, object]) -> SavingRow:
    """What freezing saves where weights are masked: of the live weights on paper, of the dense operators in earnest."""
    run, flops = _part(ledger, "run"), _part(ledger, "flops")
    on_paper = (
        f"{quantity(run.get('after_freezing'), 'FLOPs')} of {quantity(run.get('after_sparsity'), 'FLOPs')} on paper"
    )
    ran = f"{quantity(flops.get('executed'), 'FLOPs')} of {quantity(flops.get('without_freezing'), 'FLOPs')} ran"
    return SavingRow(
        "Computation by freezing (FLOPs)", number(run.get("saved_by_freezing")), number(flops.get("saved_fraction")),
        f"{on_paper}; {ran}",
        "theory counts the live weights of what is not frozen; measured are the dense operators that ran, counted",
    )  # fmt: skip


def _factors(run: Mapping[str, object]) -> str:
    names = {"sieving": "saved_by_sieving", "sparsity": "saved_by_sparsity"}
    names |= {"freezing": "saved_by_freezing", "cache": "saved_by_caching"}
    shares = {name: number(run.get(key)) for name, key in names.items()}
    left = " × ".join(f"(1 − {percent(share)} {name})" for name, share in shares.items() if share)
    return f"what is left multiplies: {left}" if left else "0: nothing has been saved yet"


def _paper_memory_rows(ledger: Mapping[str, object]) -> list[SavingRow]:
    memory, why = _part(ledger, "paper_memory"), _part(ledger, "why")
    gradients = _part(memory, "gradients")
    if not memory:
        return []
    least = quantity(gradients.get("minimum"), "B")
    amount_ = f"{least} at least, {quantity(memory.get('full_bytes'), 'B')} with nothing frozen"
    mean = number(gradients.get("mean_saved"))
    reason = str(why.get("paper_memory", ""))
    return [SavingRow("Memory as the papers count it", mean, None, amount_, reason, unmeasured=ON_PAPER)]


def watching_costs(ledger: Mapping[str, object]) -> list[str]:
    """Time that counting forgetting and keeping masks took, where they are on.

    Example:
        >>> watching_costs({"sieve": {"seconds": 0.5}, "time": {"train_seconds": 9.5, "monitor_seconds": 0.5}})
        ['sieve 5.0 %']
    """
    time = _part(ledger, "time")
    spent = (number(time.get("train_seconds")) or 0.0) + (number(time.get("monitor_seconds")) or 0.0)
    costs = {"sieve": _part(ledger, "sieve").get("seconds"), "masks": _part(ledger, "sparsity").get("seconds")}
    known = {name: number(seconds) for name, seconds in costs.items()}
    return [f"{name} {percent(seconds / spent)}" for name, seconds in known.items() if seconds is not None and spent]


def _why(part: Mapping[str, object], otherwise: str = "") -> str:
    return str(part.get("why") or "") or otherwise
