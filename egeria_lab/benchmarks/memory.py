"""Memory that autograd keeps for the backward pass, measured as layers freeze: at its peak, and over a run."""

from __future__ import annotations

from typing import Any

import torch

from egeria_lab import presets
from egeria_lab.benchmarks.harness import Result, goal, result
from egeria_lab.session import Session

SHARES = {"nothing frozen": 0.0, "a third frozen": 1 / 3, "two thirds frozen": 2 / 3}


def run(quick: bool = False) -> Result:
    """Measure storage kept for backward with 0, 1/3 and 2/3 of a ResNet frozen, and over a run of SpFDE 25 + 25.

    On a GPU the allocator's peak is measured as well.

    Args:
        quick: `resnet20` and a shorter run instead of `resnet32`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peaks = _peaks("resnet20" if quick else "resnet32")
        share, counted = _over_a_run(2 if quick else 8)
    finally:
        torch.set_num_threads(threads)
    rows = [
        *peaks,
        {"name": "SpFDE 25 + 25 on resnet8, mean over the run", "kept_ratio": share, "paper_ratio": counted},
    ]
    last = peaks[-1]
    goals = [
        goal("kept for backward with two thirds frozen, against nothing frozen", last["kept_ratio"], 0.25, "<="),
        goal("kept for backward over a run of SpFDE 25 + 25, against plain training", share, 0.75, "<="),
    ]
    return result("memory", rows, goals, [0])


def _peaks(model: str) -> list[dict[str, Any]]:
    session = Session(model, "fashion-mini", epochs=1, batch_size=32, freeze=None, undo_bytes=0)
    names = session.layers.names
    session.step(2)
    rows: list[dict[str, Any]] = []
    for name, share in SHARES.items():
        for layer in names[: round(share * len(names))]:
            if layer not in session.layers.frozen:
                session.freeze(layer)
        peak = _allocator_peak(session)
        book = session.savings().book
        kept, full = float(book.saved_bytes or 0), float(book.full_saved_bytes or 0)
        rows.append(
            {
                "name": f"{model}, {name}",
                "kept_bytes": kept,
                "kept_ratio": kept / full,
                "allocator_peak_bytes": peak,
                "allocator_ratio": None if peak is None or not rows else peak / rows[0]["allocator_peak_bytes"],
            }
        )
    session.close()
    return rows


def _allocator_peak(session: Session) -> int | None:
    if session.device.type != "cuda":
        session.step(2)
        return None
    torch.cuda.reset_peak_memory_stats(session.device)
    session.step(2)
    return int(torch.cuda.max_memory_allocated(session.device))


def _over_a_run(epochs: float) -> tuple[float, float]:
    """Mean over steps of what was kept, and of memory as the papers count it, both against plain training."""
    keywords: dict[str, Any] = {"epochs": epochs, "batch_size": 64, "undo_bytes": 0}
    session = Session("resnet8", "fashion-mini", **keywords, **presets.spfde())
    kept: list[float] = []
    while session.steps_done < session.planned_steps:
        session.step()
        kept.append(float(session.recorder.book.saved_bytes or 0))
    full = float(session.recorder.book.full_saved_bytes or 0)
    _, memory = session.recorder.techniques.totals()
    counted = 1 - (memory.gradients.mean_saved or 0.0)
    session.close()
    return sum(kept) / len(kept) / full, counted
