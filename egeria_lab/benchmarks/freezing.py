"""What each way of freezing, sieving and caching is worth on the clock: accuracy against time, beside plain training.

All ways of one seed train side by side, a small share of each one's plan in turn, so that what slows the machine down
slows them all. Two figures for each way:

- *same budget*: time of plain training over its own time, each for its whole plan; once more in processor time of
  all threads, which other programs on the machine disturb less;
- *time to target*: time in which plain training first reached the target over the time in which this way did. The
  target is the final accuracy of plain training with the same seed (seeds differ by more than ways do), less half the
  spread of plain training over seeds; accuracies are means of two evaluations, so that one lucky evaluation reaches
  nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from egeria_lab import presets
from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.algorithms.freeze_schedule import Schedule
from egeria_lab.algorithms.gradient_norm import GradientNorm
from egeria_lab.algorithms.sieving.settings import CirculantSieve, LossSieve, RandomSieve
from egeria_lab.benchmarks.charts import Chart
from egeria_lab.benchmarks.freezing_figures import PLAIN, Curve, goals_of, plot_of, row_of
from egeria_lab.benchmarks.harness import Result, machine, result, versions
from egeria_lab.benchmarks.kept_parts import KeptParts
from egeria_lab.data import load
from egeria_lab.data.activation_cache import ActivationCache
from egeria_lab.data.datasets import Data
from egeria_lab.errors import MissingPackageError
from egeria_lab.session import Session

Pair = NDArray[np.float64]

TURNS = 40
"""Into so many parts each training is cut, so that all ways run side by side."""
SETTLED: Plasticity = presets.settled(epochs=1)["freeze"]
"""Ways with plasticity settle for the share of their plan that this says; see `_keywords`."""
THIRD: Plasticity = presets.settled(epochs=1, settle=1 / 3, bootstrap_rate=None)["freeze"]
QUARTER: Plasticity = presets.settled(epochs=1, settle=1 / 4, bootstrap_rate=None)["freeze"]
"""These do not wait for the learning rate to fall."""
AT_ONCE = replace(QUARTER, settle_epochs=0.0)
"""What settling is for is shown by doing without."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained.

    Attributes:
        model, data: names.
        epochs: passes over the data.
        keywords: further arguments of `Session`, the same for every way.
        options: further arguments of `data.load`.
        channels_last: keep images with their channels innermost, which convolutions on most processors are fastest
            with: plain training shall be the best plain training.
    """

    model: str
    data: str
    epochs: float
    keywords: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    channels_last: bool = False


TASKS = {
    "blue-marble": Task("resnet8", "blue-marble", 12, {"scheduler": "step"}, channels_last=True),
    "pronounce": Task(
        "transformer",
        "pronounce",
        10,
        {"optimizer": "adamw", "scheduler": "step"},
        {"form": "joined", "num_pairs": 20_000},
    ),
    "fashion-mini": Task("resnet8", "fashion-mini", 12, {"scheduler": "step"}, channels_last=True),
}
QUICK_TASK = Task("resnet8", "fashion-mini", 4, {"scheduler": "step"}, channels_last=True)

HALF = "plain, half the passes"
"""What is cheaper than any method and asks for nothing: to plan a shorter training. A method has to beat it."""
COSINE = "plain, cosine schedule"
"""For the two ways in which each layer follows a cosine of its own, which no schedule in steps can give them."""
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    HALF: {},
    COSINE: {"scheduler": "cosine"},
    "fixed list": {},  # the front half of the layers, from half of training on: named once the model is there
    "linear schedule": {"freeze": Schedule(variant="linear")},
    "FreezeOut, cubic": {"freeze": Schedule(variant="freezeout"), "scheduler": "cosine"},
    "gradient norm (AutoFreeze)": {"freeze": GradientNorm()},
    "loss sieve (InfoBatch)": {"sieve": LossSieve()},
    "random sieve 20 %": {"sieve": RandomSieve(fraction=0.2)},
    "circulant sieve 20 %": {"sieve": CirculantSieve(fraction=0.2)},
    "plasticity + cache, without settling": {"freeze": AT_ONCE, "cache": ActivationCache()},
    "plasticity + cache, a third from the start": {"freeze": THIRD, "cache": ActivationCache()},
    "plasticity + cache, a quarter from the start": {"freeze": QUARTER, "cache": ActivationCache()},
    "plasticity": {"freeze": SETTLED},
    "plasticity + cache": {"freeze": SETTLED, "cache": ActivationCache()},
    "SpFDE 25 + 25": {**presets.spfde(), "scheduler": "cosine"},
    "plasticity + cache + sieve": {
        "freeze": SETTLED,
        "cache": ActivationCache(),
        "sieve": CirculantSieve(fraction=0.2),
    },
    "everything": presets.everything(sieve=0.3, sparsity=0.5, epochs=1, settle=1 / 4),
}
COMPOSER = "linear schedule (Composer's own code)"
"""Composer's function decides what of a session without a rule is frozen, at each end of a pass as its trainer does.
There where its package (mosaicml, on PyPI) is installed."""
QUICK_WAYS = (PLAIN, "linear schedule", "circulant sieve 20 %", "plasticity", "plasticity + cache")


def run(quick: bool = False, folder: str | Path | None = None) -> Result:
    """Train every way on every task whose data are installed.

    Args:
        quick: one seed, few ways, four epochs of `fashion-mini`. In full, three seeds on each task: hours.
        folder: each finished seed is kept in there until the last one is done: a run that was stopped goes on.
    """
    if quick:
        return compare({"fashion-mini": QUICK_TASK}, QUICK_WAYS, seeds=[0])
    ways = (*WAYS, *([COMPOSER] if find_spec("composer") else []))
    return compare(TASKS, ways, seeds=[0, 1, 2], folder=None if folder is None else Path(folder) / "freezing.parts")


def compare(
    tasks: Mapping[str, Task], ways: Sequence[str], *, seeds: Sequence[int], folder: Path | None = None
) -> Result:
    """One row a task and way.

    Args:
        tasks: by name; one whose data are not installed is left out, and named in a row.
        ways: keys of `WAYS`, ``"plain"`` among them.
        seeds: one training each.
        folder: where finished seeds are kept meanwhile.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = {way: repr(WAYS.get(way)) for way in ways}
    kept = KeptParts(folder, {"machine": machine(), "versions": versions(), "settings": settings})
    rows: list[dict[str, Any]] = []
    goals: list[dict[str, Any]] = []
    plots: list[Chart] = []
    try:
        for name, task in tasks.items():
            try:
                found = _all_seeds(name, task, ways, seeds, kept)
            except MissingPackageError as error:
                rows.append({"name": name, "skipped": str(error)})
                continue
            mine = [row_of(name, way, found) for way in ways]
            rows += mine
            goals += goals_of(name, {row["way"]: row for row in mine})
            plots.append(plot_of(name, found))
    finally:
        torch.set_num_threads(threads)
    kept.clear()
    return result("freezing", rows, goals, seeds, plots)


def _all_seeds(
    name: str, task: Task, ways: Sequence[str], seeds: Sequence[int], kept: KeptParts
) -> dict[str, list[Curve]]:
    found: dict[str, list[Curve]] = {way: [] for way in ways}
    for seed in seeds:
        part = f"{name}.{seed}"
        held = kept.get(part)
        if held is not None and held["task"] == repr(task):
            curves = {way: Curve(**held["curves"][way]) for way in ways}
        else:
            curves = side_by_side(task, ways, seed)
            kept.put(part, {"task": repr(task), "curves": {way: asdict(curve) for way, curve in curves.items()}})
        for way, curve in curves.items():
            found[way].append(curve)
    return found


def side_by_side(task: Task, ways: Sequence[str], seed: int) -> dict[str, Curve]:
    """All ways of one seed, a part of each one's plan in turn."""
    base = {"epochs": task.epochs, "seed": seed, "freeze": None, "undo_bytes": 0, "channels_last": task.channels_last}
    source = load(task.data, **task.options)
    sessions = {
        way: Session(task.model, source, **{**base, **task.keywords, **_keywords(task, way, source)}) for way in ways
    }
    clocks = {way: _Clock(session) for way, session in sessions.items()}
    if COMPOSER in clocks:
        clocks[COMPOSER].after_pass = _composed(sessions[COMPOSER])
    for turn in range(TURNS):
        order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for way in order:
            session = sessions[way]
            clocks[way].train(round(session.planned_steps * (turn + 1) / TURNS))
    curves = {way: clock.curve() for way, clock in clocks.items()}
    if COMPOSER in curves:
        curves[COMPOSER].flops = float("nan")  # what it froze behind our back was counted as trained
    for session in sessions.values():
        session.close()
    sessions.clear()
    clocks.clear()
    gc.collect()  # a session refers to itself in a ring; the next seed's have the memory to themselves
    return curves


def _keywords(task: Task, way: str, source: Data) -> dict[str, Any]:
    if way == HALF:
        return {"epochs": task.epochs / 2}
    if way != "fixed list":
        keywords = WAYS.get(way, {})
        rule = keywords.get("freeze")
        if isinstance(rule, Plasticity):
            keywords = {**keywords, "freeze": replace(rule, settle_epochs=rule.settle_epochs * task.epochs)}
        return keywords
    session = Session(task.model, source, freeze=None, undo_bytes=0, **task.keywords)
    front = session.layers.names[: len(session.layers) // 2]
    session.close()
    return {"freeze": Schedule(variant="fixed", start=0.5, layers=tuple(front))}


def _composed(session: Session) -> Callable[[], object]:
    """What Composer's `LayerFreezing` does at the end of a pass."""
    from composer.algorithms.layer_freezing import freeze_layers

    return lambda: freeze_layers(session.model, session.optimizer, session.steps_done / session.planned_steps)


class _Clock:
    """Trains a session and notes when each evaluation came, without counting evaluations."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.after_pass: Callable[[], object] = lambda: None
        self._evaluations: list[Pair] = []
        evaluate = session.trainer.evaluate

        def timed(*arguments: Any, **options: Any) -> Any:
            start = _now()
            answer = evaluate(*arguments, **options)
            self._evaluations.append(self._so_far(start))
            self._paused += _now() - start
            self.after_pass()
            return answer

        self._paused, self._spent = np.zeros(2), np.zeros(2)
        self._started = _now()
        session.trainer.evaluate = timed  # type: ignore[method-assign]

    def train(self, until: int) -> None:
        self._started, self._paused = _now(), np.zeros(2)
        while self.session.steps_done < until:
            self.session.step()
        self._spent = self._so_far(_now())

    def _so_far(self, now: Pair) -> Pair:
        return self._spent + now - self._started - self._paused

    def curve(self) -> Curve:
        session = self.session
        accuracies = [100 * float(a) for a in session.history.epochs["valid_accuracy"]]
        taken = self._evaluations[: len(accuracies)]
        cache = session.cache.statistics if session.cache is not None else None
        cache_seconds = 0.0 if cache is None else cache.wait_seconds + cache.write_seconds
        return Curve(
            [float(clock) for clock, _ in taken], accuracies, float(session.recorder.book.executed_flops),
            len(session.layers.frozen), float(taken[-1][1]), session.recorder.book.monitor_fraction, cache_seconds,
        )  # fmt: skip


def _now() -> Pair:
    """Seconds by the clock, and of processor time of all threads."""
    return np.array([time.perf_counter(), time.process_time()])
