"""What each way of freezing, sieving and caching is worth on the clock: accuracy against time, beside plain training.

All ways of one seed train side by side, a small share of each one's plan in turn, so that what slows the machine down
slows them all. Two figures for each way:

- *same budget*: time of plain training over its own time, each for its whole plan;
- *time to target*: time in which plain training first reached the target over the time in which this way did. The
  target is plain training's final accuracy less half its spread over seeds, and accuracies are means of two
  evaluations, so that one lucky evaluation reaches nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import torch

from egeria_lab import presets
from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.algorithms.freeze_schedule import Schedule
from egeria_lab.algorithms.gradient_norm import GradientNorm
from egeria_lab.algorithms.sieving.settings import CirculantSieve, LossSieve, RandomSieve
from egeria_lab.benchmarks.harness import Result, goal, result
from egeria_lab.data.activation_cache import ActivationCache
from egeria_lab.errors import MissingPackageError
from egeria_lab.session import Session

TURNS = 40
"""Into so many parts each training is cut, so that all ways run side by side."""
PLAIN = "plain"
RULE = Plasticity(interval_steps=5, window=6, patience=4, tolerance=0.3, refresh_on_freeze=False, freeze_together=True)


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained.

    Attributes:
        model, data: names.
        epochs: passes over the data.
        keywords: further arguments of `Session`, the same for every way.
    """

    model: str
    data: str
    epochs: float
    keywords: Mapping[str, Any]


TASKS = {
    "blue-marble": Task("resnet8", "blue-marble", 12, {"scheduler": "step"}),
    "pronounce": Task("transformer", "pronounce", 4, {"optimizer": "adamw", "scheduler": "step"}),
    "fashion-mini": Task("resnet8", "fashion-mini", 12, {"scheduler": "step"}),
}
QUICK_TASK = Task("resnet8", "fashion-mini", 4, {"scheduler": "step"})

WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "fixed list": {},  # the front half of the layers, from half of training on: named once the model is there
    "linear schedule": {"freeze": Schedule(variant="linear")},
    "FreezeOut, cubic": {"freeze": Schedule(variant="freezeout")},
    "gradient norm (AutoFreeze)": {"freeze": GradientNorm()},
    "loss sieve (InfoBatch)": {"sieve": LossSieve()},
    "random sieve 20 %": {"sieve": RandomSieve(fraction=0.2)},
    "circulant sieve 20 %": {"sieve": CirculantSieve(fraction=0.2)},
    "plasticity": {"freeze": RULE},
    "plasticity + cache": {"freeze": RULE, "cache": ActivationCache()},
    "SpFDE 25 + 25": presets.spfde(),
    "plasticity + cache + sieve": {"freeze": RULE, "cache": ActivationCache(), "sieve": CirculantSieve(fraction=0.2)},
    "everything": {**presets.everything(), "freeze": RULE},
}
QUICK_WAYS = (PLAIN, "linear schedule", "circulant sieve 20 %", "plasticity", "plasticity + cache")


@dataclass(slots=True)
class Curve:
    """One training.

    Attributes:
        seconds: measured time of its steps and readings up to each evaluation, evaluations not counted.
        accuracies: of the validation set at each evaluation, in percent.
        counted_saving: share of the FLOPs that did not run.
        frozen: layers that were frozen at the end.
    """

    seconds: list[float]
    accuracies: list[float]
    counted_saving: float
    frozen: int

    def smoothed(self) -> list[float]:
        """Means of each evaluation and the one before it."""
        return [mean(self.accuracies[max(0, i - 1) : i + 1]) for i in range(len(self.accuracies))]

    def seconds_to(self, target: float) -> float | None:
        """Time of the first evaluation at or above the target; None when there was none.

        Example:
            >>> Curve([1.0, 2.0, 3.0], [50.0, 70.0, 80.0], 0.0, 0).seconds_to(70)
            3.0
        """
        return next((s for s, a in zip(self.seconds, self.smoothed(), strict=True) if a >= target), None)


def run(quick: bool = False) -> Result:
    """Train every way on every task whose data are installed.

    Args:
        quick: one seed, few ways, four epochs of `fashion-mini`. In full, three seeds on each task: hours.
    """
    if quick:
        return compare({"fashion-mini": QUICK_TASK}, QUICK_WAYS, seeds=[0])
    return compare(TASKS, tuple(WAYS), seeds=[0, 1, 2])


def compare(tasks: Mapping[str, Task], ways: Sequence[str], *, seeds: Sequence[int]) -> Result:
    """One row a task and way.

    Args:
        tasks: by name; one whose data are not installed is left out, and named in a row.
        ways: keys of `WAYS`, ``"plain"`` among them.
        seeds: one training each.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    goals: list[dict[str, Any]] = []
    try:
        for name, task in tasks.items():
            try:
                found = _all_seeds(task, ways, seeds)
            except MissingPackageError as error:
                rows.append({"name": name, "skipped": str(error)})
                continue
            mine = [_row(name, way, found) for way in ways]
            rows += mine
            goals += _goals(name, {row["way"]: row for row in mine})
    finally:
        torch.set_num_threads(threads)
    return result("freezing", rows, goals, seeds)


def _all_seeds(task: Task, ways: Sequence[str], seeds: Sequence[int]) -> dict[str, list[Curve]]:
    found: dict[str, list[Curve]] = {way: [] for way in ways}
    for seed in seeds:
        for way, curve in side_by_side(task, ways, seed).items():
            found[way].append(curve)
    return found


def side_by_side(task: Task, ways: Sequence[str], seed: int) -> dict[str, Curve]:
    """All ways of one seed, a part of each one's plan in turn."""
    base = {"epochs": task.epochs, "seed": seed, "freeze": None, "undo_bytes": 0, **task.keywords}
    sessions = {way: Session(task.model, task.data, **{**base, **_keywords(task, way)}) for way in ways}
    clocks = {way: _Clock(session) for way, session in sessions.items()}
    for turn in range(TURNS):
        order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for way in order:
            session = sessions[way]
            clocks[way].train(round(session.planned_steps * (turn + 1) / TURNS))
    curves = {way: clock.curve() for way, clock in clocks.items()}
    for session in sessions.values():
        session.close()
    sessions.clear()
    clocks.clear()
    gc.collect()  # a session refers to itself in a ring; the next seed's have the memory to themselves
    return curves


def _keywords(task: Task, way: str) -> dict[str, Any]:
    if way != "fixed list":
        return WAYS[way]
    session = Session(task.model, task.data, freeze=None, undo_bytes=0, **task.keywords)
    front = session.layers.names[: len(session.layers) // 2]
    session.close()
    return {"freeze": Schedule(variant="fixed", start=0.5, layers=tuple(front))}


class _Clock:
    """Trains a session and notes when each evaluation came, without counting evaluations."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._evaluations: list[float] = []
        evaluate = session.trainer.evaluate

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            answer = evaluate(*arguments, **options)
            self._paused += time.perf_counter() - start
            self._evaluations.append(self._so_far(start))
            return answer

        self._paused = self._spent = 0.0
        self._started = time.perf_counter()
        session.trainer.evaluate = timed  # type: ignore[method-assign]

    def train(self, until: int) -> None:
        self._started, self._paused = time.perf_counter(), 0.0
        while self.session.steps_done < until:
            self.session.step()
        self._spent = self._so_far(time.perf_counter())

    def _so_far(self, now: float) -> float:
        return self._spent + now - self._started - self._paused

    def curve(self) -> Curve:
        session = self.session
        accuracies = [100 * float(a) for a in session.history.epochs["valid_accuracy"]]
        return Curve(
            self._evaluations[: len(accuracies)], accuracies, session.savings().book.flops_saved_fraction or 0.0,
            len(session.layers.frozen),
        )  # fmt: skip


def _row(task: str, way: str, found: Mapping[str, list[Curve]]) -> dict[str, Any]:
    mine, plain = found[way], found[PLAIN]
    finals = [curve.smoothed()[-1] for curve in mine]
    plain_finals = [curve.smoothed()[-1] for curve in plain]
    target = mean(plain_finals) - (stdev(plain_finals) / 2 if len(plain_finals) > 1 else 0.0)
    reached = [(curve.seconds_to(target), other.seconds_to(target)) for curve, other in zip(mine, plain, strict=True)]
    ratios = [theirs / own for own, theirs in reached if own is not None and theirs is not None]
    times = [a.seconds[-1] / b.seconds[-1] for a, b in zip(mine, plain, strict=True)]
    counted = mean(curve.counted_saving for curve in mine)
    measured = 1 - mean(times)
    return {
        "name": f"{task}: {way}",
        "task": task,
        "way": way,
        "seeds": len(mine),
        "accuracy_percent": mean(finals),
        "accuracy_spread_percent": stdev(finals) if len(finals) > 1 else None,
        "seconds": mean(curve.seconds[-1] for curve in mine),
        "same_budget_ratio": mean(1 / share for share in times),
        "time_to_target_ratio": mean(ratios) if len(ratios) == len(mine) else None,
        "seeds_that_reached_the_target": len(ratios),
        "counted_saving": counted,
        "measured_saving": measured,
        "measured_over_counted": measured / counted if counted else None,
        "frozen_layers_at_the_end": mean(curve.frozen for curve in mine),
    }


def _goals(task: str, rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    plain = rows[PLAIN]
    goals = []
    wanted = {"plasticity + cache": (1.8, 1.43), "everything": (2.5, 2.0)}
    for way, (budget, target) in wanted.items():
        if way not in rows:
            continue
        row = rows[way]
        reached = row["time_to_target_ratio"]
        goals += [
            goal(f"{task}: {way}, same budget", row["same_budget_ratio"], budget, ">="),
            goal(f"{task}: {way}, time to target", reached if reached is not None else float("nan"), target, ">="),
            goal(
                f"{task}: {way}, points lost against plain",
                plain["accuracy_percent"] - row["accuracy_percent"], plain["accuracy_spread_percent"] or 0.5, "<=",
            ),
        ]  # fmt: skip
    for way, row in rows.items():
        if row["measured_over_counted"] is not None and row["counted_saving"] > 0.02:
            goals.append(goal(f"{task}: {way}, measured over counted saving", row["measured_over_counted"], 0.9, ">="))
    return goals
