"""SpFDE and what it is compared with: accuracy, FLOPs, memory and wall time of every way, seed by seed.

All ways of one seed train side by side, a small share of each one's plan in turn, so that what slows the machine down
slows them all. FLOPs with masks are *on paper*: dense kernels do the work of dense layers. What the clock can confirm
is freezing and sieving, and it is asked to: measured saving over counted saving.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

import torch

from egeria_lab import presets
from egeria_lab.algorithms.freeze_schedule import Schedule
from egeria_lab.algorithms.sieving.settings import CirculantSieve, RandomSieve
from egeria_lab.algorithms.sparse.methods import MEST, SET, RigL, StaticSparsity
from egeria_lab.benchmarks.charts import Chart, chart
from egeria_lab.benchmarks.harness import Result, goal, result
from egeria_lab.errors import MissingPackageError
from egeria_lab.session import Session

MODEL = "resnet8"
TURNS = 40
"""Into so many parts each training is cut, so that all ways run side by side."""

WAYS: dict[str, dict[str, Any]] = {
    "dense": {},
    "static 90 %": {"sparsity": StaticSparsity(sparsity=0.9)},
    "SET 90 %": {"sparsity": SET(sparsity=0.9)},
    "RigL 90 %": {"sparsity": RigL(sparsity=0.9)},
    "MEST EM 90 %": {"sparsity": MEST(sparsity=0.9, soft_bound=False)},
    "MEST EM&S 90 %": {"sparsity": MEST(sparsity=0.9)},
    "MEST EM&S 95 %": {"sparsity": MEST(sparsity=0.95)},
    "freezing 25 %": {"freeze": Schedule(saving=0.25)},
    "sieve 25 %": {"sieve": CirculantSieve(fraction=0.25)},
    "random sieve 25 %": {"sieve": RandomSieve(fraction=0.25)},
    "SpFDE 15 + 15": presets.spfde(saving=0.15, sieve=0.15, sparsity=0.9),
    "SpFDE 20 + 20": presets.spfde(saving=0.20, sieve=0.20, sparsity=0.9),
    "SpFDE 25 + 25": presets.spfde(saving=0.25, sieve=0.25, sparsity=0.9),
}
QUICK_WAYS = ("dense", "MEST EM&S 90 %", "freezing 25 %", "sieve 25 %", "random sieve 25 %", "SpFDE 25 + 25")
CLOCKED = ("freezing 25 %", "sieve 25 %", "random sieve 25 %")
"""Ways that dense kernels can turn into time."""


def run(quick: bool = False) -> Result:
    """Train every way on every data set that is installed.

    Args:
        quick: one seed, few ways and epochs, `fashion-mini` only: about three minutes on two cores. In full, three
            seeds on `fashion-mini` and `blue-marble`: hours.

    Example:
        >>> run(quick=True)["suite"]  # doctest: +SKIP
        'spfde'
    """
    if quick:
        return compare(["fashion-mini"], QUICK_WAYS, seeds=[0], epochs=4)
    return compare(["fashion-mini", "blue-marble"], tuple(WAYS), seeds=[0, 1, 2], epochs=20)


def compare(datasets: Sequence[str], ways: Sequence[str], *, seeds: Sequence[int], epochs: float) -> Result:
    """One row a data set and way.

    Args:
        datasets: names; one whose package is missing is left out, and named in a row.
        ways: keys of `WAYS`, ``"dense"`` among them.
        seeds: one training each.
        epochs: passes over what is kept.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    goals: list[dict[str, Any]] = []
    plots: list[Chart] = []
    try:
        for name in datasets:
            found: dict[str, list[Figures]] = {way: [] for way in ways}
            try:
                for seed in seeds:
                    for way, figures in _side_by_side(name, ways, seed, epochs).items():
                        found[way].append(figures)
            except MissingPackageError as error:
                rows.append({"name": name, "skipped": str(error)})
                continue
            mine = [_row(name, way, found, epochs) for way in ways]
            rows += mine
            goals += _goals(name, found)
            points = {row["way"]: [(100 * row["paper_flops_share"], row["accuracy_percent"])] for row in mine}
            plots.append(chart(f"{name}: accuracy against work", "FLOPs on paper, % of dense", "accuracy, %", points))
    finally:
        torch.set_num_threads(threads)
    return result("spfde", rows, goals, seeds, plots)


@dataclass(slots=True)
class Figures:
    """What one training gave.

    Attributes:
        accuracy: on the validation set, in percent.
        flops: of the whole run, with masks on paper.
        counted: of the whole run, as dense kernels execute it.
        seconds: measured time of the steps, without evaluations.
        paper_bytes: memory as the papers count it, mean over the run.
        least_paper_bytes: the same at its minimum.
        saved_bytes: measured bytes kept for backward at the end.
    """

    accuracy: float = 0.0
    flops: float = 0.0
    counted: float = 0.0
    seconds: float = 0.0
    paper_bytes: float = 0.0
    least_paper_bytes: float = 0.0
    saved_bytes: float = 0.0
    turns: list[float] = field(default_factory=list)


def _side_by_side(data: str, ways: Sequence[str], seed: int, epochs: float) -> dict[str, Figures]:
    """All ways of one seed, in turn."""
    base: dict[str, Any] = {"epochs": epochs, "seed": seed, "freeze": None}
    sessions = {way: Session(MODEL, data, **{**base, **WAYS[way]}) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TURNS):
        order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for way in order:
            session = sessions[way]
            until = round(session.planned_steps * (turn + 1) / TURNS)
            seconds[way].append(_timed(lambda session=session, until=until: _advance(session, until)))  # type: ignore[misc]
    figures = {way: _figures(session, seconds[way]) for way, session in sessions.items()}
    for session in sessions.values():
        session.close()
    sessions.clear()
    gc.collect()  # a session refers to itself in a ring; the next seed's have the memory to themselves
    return figures


def _advance(session: Session, until: int) -> None:
    if until > session.steps_done:
        session.step(until - session.steps_done)


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _figures(session: Session, turns: list[float]) -> Figures:
    ledger = session.savings()
    run, memory = session.recorder.techniques.totals()
    book = ledger.book
    accuracy = session.evaluate()["accuracy"]
    return Figures(
        accuracy=100 * (accuracy or 0.0),
        flops=run.executed,
        counted=book.executed_flops,
        seconds=book.train_seconds + book.monitor_seconds,
        paper_bytes=memory.gradients.bytes_times_samples / memory.samples,
        least_paper_bytes=memory.gradients.minimum or 0.0,
        saved_bytes=float(book.saved_bytes or 0),
        turns=turns,
    )


def _row(data: str, way: str, found: dict[str, list[Figures]], epochs: float) -> dict[str, Any]:
    mine, dense = found[way], found["dense"]

    def share(of: Callable[[Figures], float]) -> float:
        return mean(of(a) / of(b) for a, b in zip(mine, dense, strict=True))

    accuracies = [figures.accuracy for figures in mine]
    return {
        "name": f"{data}: {way}",
        "data": data,
        "way": way,
        "epochs": epochs,
        "seeds": len(mine),
        "accuracy_percent": mean(accuracies),
        "accuracy_spread_percent": stdev(accuracies) if len(accuracies) > 1 else None,
        "paper_flops_share": share(lambda f: f.flops),
        "counted_flops_share": share(lambda f: f.counted),
        "time_share": share(lambda f: f.seconds),
        "seconds": mean(f.seconds for f in mine),
        "paper_memory_share": share(lambda f: f.paper_bytes),
        "least_paper_memory_share": share(lambda f: f.least_paper_bytes),
        "measured_backward_bytes_share": share(lambda f: f.saved_bytes),
    }


def _goals(data: str, found: dict[str, list[Figures]]) -> list[dict[str, Any]]:
    goals = []

    def accuracy(way: str) -> float:
        return mean(figures.accuracy for figures in found[way])

    both, soft, sparser = "SpFDE 25 + 25", "MEST EM&S 90 %", "MEST EM&S 95 %"
    if both in found and soft in found:
        gap = accuracy(soft) - accuracy(both)
        goals.append(goal(f"{data}: points that 25 + 25 loses against EM&S 90 %", gap, 0.5, "<="))
        flops = mean(a.flops / b.flops for a, b in zip(found[both], found[soft], strict=True))
        goals.append(goal(f"{data}: FLOPs of 25 + 25 against EM&S 90 %", flops, 0.5625, "<="))
    if both in found and sparser in found:
        ahead = accuracy(both) - accuracy(sparser)
        goals.append(goal(f"{data}: points that 25 + 25 is ahead of EM&S 95 %", ahead, 0.0, ">="))
    for way in CLOCKED:
        if way in found:
            kept = _confirmed(found[way], found["dense"])
            goals.append(goal(f"{data}: {way}, measured saving over counted saving", kept, 0.9, ">="))
    return goals


def _confirmed(mine: Sequence[Figures], dense: Sequence[Figures]) -> float:
    """How much of the counted saving the clock confirms."""
    measured = mean(1 - a.seconds / b.seconds for a, b in zip(mine, dense, strict=True))
    counted = mean(1 - a.counted / b.counted for a, b in zip(mine, dense, strict=True))
    return measured / counted
