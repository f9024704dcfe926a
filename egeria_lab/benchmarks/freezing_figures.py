"""The figures of the freezing suite: accuracy against time of every way, and what is asked of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from egeria_lab.benchmarks.charts import Chart, chart
from egeria_lab.benchmarks.harness import goal

PLAIN = "plain"
CONFIRMED = 0.9
"""Of the counted saving, the share that the clock is asked to confirm."""
LEAST_COUNTED = 0.02
"""A smaller counted saving is lost in what the clock varies."""
GOALS = {"plasticity + cache": (1.8, 1.43), "everything": (2.5, 2.0)}
"""Ways that something is asked of: same budget, time to target."""
OURS = frozenset(
    {
        *GOALS,
        "plasticity",
        "plasticity + cache, without settling",
        "plasticity + cache, a third from the start",
        "plasticity + cache, a quarter from the start",
        "plasticity + cache + sieve",
        "circulant sieve 20 %",
        "SpFDE 25 + 25",
    }
)
"""Ways that are no peers: their methods have no other public code."""


@dataclass(slots=True)
class Curve:
    """One training.

    Attributes:
        seconds: measured time of its steps and readings up to each evaluation, evaluations not counted.
        cpu_seconds: processor time of the same, to the last evaluation.
        reading_share: share of its time that plasticity readings took.
        cache_seconds: time it waited for the activation cache and wrote to it.
        accuracies: of the validation set at each evaluation, in percent.
        flops: counted for all its steps as they ran, masks not taken off; NaN where nobody counted.
        frozen: layers that were frozen at the end.
    """

    seconds: list[float]
    accuracies: list[float]
    flops: float
    frozen: int
    cpu_seconds: float = float("nan")
    reading_share: float = 0.0
    cache_seconds: float = 0.0

    def smoothed(self) -> list[float]:
        """Means of each evaluation and the one before it."""
        return [mean(self.accuracies[max(0, i - 1) : i + 1]) for i in range(len(self.accuracies))]

    def accuracy_at(self, seconds: float) -> float | None:
        """Smoothed accuracy of the last evaluation in so much time; None when there was none.

        Example:
            >>> Curve([1.0, 2.0, 3.0], [50.0, 70.0, 80.0], 0.0, 0).accuracy_at(2.5)
            60.0
        """
        reached = [a for s, a in zip(self.seconds, self.smoothed(), strict=True) if s <= seconds]
        return reached[-1] if reached else None

    def seconds_to(self, target: float) -> float | None:
        """Time of the first evaluation at or above the target; None when there was none.

        Example:
            >>> Curve([1.0, 2.0, 3.0], [50.0, 70.0, 80.0], 0.0, 0).seconds_to(70)
            3.0
        """
        return next((s for s, a in zip(self.seconds, self.smoothed(), strict=True) if a >= target), None)


def row_of(task: str, way: str, found: Mapping[str, list[Curve]]) -> dict[str, Any]:
    mine, plain = found[way], found[PLAIN]
    finals = [curve.smoothed()[-1] for curve in mine]
    plain_finals = [curve.smoothed()[-1] for curve in plain]
    half_spread = stdev(plain_finals) / 2 if len(plain_finals) > 1 else 0.0
    ratios = []
    for curve, other, final in zip(mine, plain, plain_finals, strict=True):
        own, theirs = curve.seconds_to(final - half_spread), other.seconds_to(final - half_spread)
        if own is not None and theirs is not None:
            ratios.append(theirs / own)
    times = [a.seconds[-1] / b.seconds[-1] for a, b in zip(mine, plain, strict=True)]
    share = mean(a.flops / b.flops for a, b in zip(mine, plain, strict=True))
    counted = None if math.isnan(share) else 1 - share
    measured = 1 - mean(times)
    confirmed = measured / counted if counted else None
    peer, peers_accuracy = _best_peer(way, found)
    return {
        "name": f"{task}: {way}",
        "task": task,
        "way": way,
        "seeds": len(mine),
        "accuracy_percent": mean(finals),
        "accuracy_spread_percent": stdev(finals) if len(finals) > 1 else None,
        "seconds": mean(curve.seconds[-1] for curve in mine),
        "best_peer_in_its_time": peer,
        "best_peer_accuracy_percent": peers_accuracy,
        "same_budget_ratio": mean(1 / share for share in times),
        "same_budget_processor_ratio": mean(b.cpu_seconds / a.cpu_seconds for a, b in zip(mine, plain, strict=True)),
        "time_to_target_ratio": mean(ratios) if len(ratios) == len(mine) else None,
        "seeds_that_reached_the_target": len(ratios),
        "counted_saving": counted,
        "measured_saving": measured,
        "measured_over_counted": confirmed,
        "where_the_rest_went": _where_it_went(mine) if confirmed is not None and confirmed < CONFIRMED else "",
        "frozen_layers_at_the_end": mean(curve.frozen for curve in mine),
    }


def _best_peer(way: str, found: Mapping[str, list[Curve]]) -> tuple[str | None, float | None]:
    """Which peer's curve is highest where this way ends; each seed at its own end."""
    ends = [curve.seconds[-1] for curve in found[way]]
    accuracies: dict[str, float] = {}
    for peer in found.keys() - OURS - {way}:
        reached = [curve.accuracy_at(end) for curve, end in zip(found[peer], ends, strict=True)]
        known = [accuracy for accuracy in reached if accuracy is not None]
        if len(known) == len(ends):
            accuracies[peer] = mean(known)
    if not accuracies:
        return None, None
    best = max(accuracies, key=lambda peer: (accuracies[peer], peer))
    return best, accuracies[best]


def _where_it_went(mine: Sequence[Curve]) -> str:
    readings = mean(curve.reading_share for curve in mine)
    cache = mean(curve.cache_seconds / curve.seconds[-1] for curve in mine)
    return (
        f"readings {readings:.1%} and the activation cache {cache:.1%} of its time; the rest is work whose time does "
        "not go by its FLOPs (normalisation, activations, updates, memory)"
    )


def plot_of(task: str, found: Mapping[str, Sequence[Curve]]) -> Chart:
    """Accuracy against time; each evaluation's means over the seeds."""
    lines = {}
    for way, curves in found.items():
        evaluations = range(min(len(curve.accuracies) for curve in curves))
        lines[way] = [(mean(c.seconds[i] for c in curves), mean(c.smoothed()[i] for c in curves)) for i in evaluations]
    return chart(f"{task}: accuracy against time", "seconds of training", "validation accuracy, %", lines)


def goals_of(task: str, rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    plain = rows[PLAIN]
    goals = []
    spread = plain["accuracy_spread_percent"] or 0.5
    for way, (budget, target) in GOALS.items():
        if way not in rows:
            continue
        row = rows[way]
        reached = row["time_to_target_ratio"]
        goals += [
            goal(f"{task}: {way}, same budget", row["same_budget_ratio"], budget, ">="),
            goal(f"{task}: {way}, time to target", reached if reached is not None else float("nan"), target, ">="),
            goal(
                f"{task}: {way}, points lost against plain",
                plain["accuracy_percent"] - row["accuracy_percent"], spread, "<=",
            ),
        ]  # fmt: skip
        if row["best_peer_in_its_time"] is not None:
            below = row["best_peer_accuracy_percent"] - row["accuracy_percent"]
            goals.append(goal(f"{task}: {way}, points below the best peer's curve", below, spread, "<="))
    for way, row in rows.items():
        if row["measured_over_counted"] is not None and row["counted_saving"] > LEAST_COUNTED:
            goals.append(
                goal(f"{task}: {way}, measured over counted saving", row["measured_over_counted"], CONFIRMED, ">=")
            )
    return goals
