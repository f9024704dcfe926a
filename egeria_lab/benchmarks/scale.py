"""How what we add to a step grows: with layers, with weights, with samples, with the length of the history.

Each quantity is grown tenfold and more while the others stand still. The exponent of growth is the slope of the
logarithms between the smallest and the largest size: 1 is linear. What we add is the time of a session's step less
that of the same step by hand, in turn in one process; the median over rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.algorithms.sieving.settings import CirculantSieve
from egeria_lab.algorithms.sieving.sieve import Sieve
from egeria_lab.benchmarks.charts import chart
from egeria_lab.benchmarks.harness import Result, goal, interleave, result
from egeria_lab.data.datasets import ArrayDataset
from egeria_lab.data.loaders import BatchSource
from egeria_lab.history import History
from egeria_lab.session import Session

MOST_GROWTH = 1.15
"""An exponent at or below this counts as linear: a timing is never exact."""


def run(quick: bool = False) -> Result:
    """Grow layers 8 → 400, weights, samples 10⁴ → 10⁷, history 10³ → 10⁶ rows.

    Args:
        quick: stop at 100 layers, 10⁶ samples and 10⁵ rows.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = 5 if quick else 11
        grown: dict[str, tuple[Callable[[int], dict[str, float]], tuple[int, ...]]] = {
            "layers": (_step_by_layers(rounds), (8, 32, 100) if quick else (8, 32, 100, 400)),
            "weights": (_step_by_width(rounds), (16, 64, 256)),
            "samples": (_pass_by_samples, (10**4, 10**5, 10**6) if quick else (10**4, 10**5, 10**6, 10**7)),
            "history rows": (_history, (10**3, 10**4, 10**5) if quick else (10**3, 10**4, 10**5, 10**6)),
        }
        rows: list[dict[str, Any]] = []
        goals, plots = [], []
        for what, (measure, sizes) in grown.items():
            mine: list[dict[str, Any]] = [{"name": f"{size:,} {what}", "size": size, **measure(size)} for size in sizes]
            rows += mine
            growth = _growth(mine)
            goals += [goal(f"{what}: growth of {name}", value, MOST_GROWTH, "<=") for name, value in growth.items()]
            lines = {
                name.replace("_", " "): [(float(row["size"]), float(row[name])) for row in mine] for name in growth
            }
            plots.append(chart(f"what grows with the number of {what}", what, "milliseconds", lines, log=True))
    finally:
        torch.set_num_threads(threads)
    return result("scale", rows, goals, [0], plots)


def _growth(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Exponent of each figure between the first row and the last."""
    first, last = rows[0], rows[-1]
    span = math.log(last["size"] / first["size"])
    figures = [name for name in first if name not in ("name", "size")]
    return {name: math.log(max(last[name], 1e-12) / max(first[name], 1e-12)) / span for name in figures}


class _Stack(nn.Module):
    """So many linear layers of one width."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        scores: torch.Tensor = self.head(x)
        return scores


def _step_by_layers(rounds: int) -> Callable[[int], dict[str, float]]:
    return lambda layers: _added(layers, 8, rounds)


def _step_by_width(rounds: int) -> Callable[[int], dict[str, float]]:
    return lambda width: {name: value for name, value in _added(8, width, rounds).items() if "added" in name}


def _added(layers: int, width: int, rounds: int, steps: int = 10) -> dict[str, float]:
    """Milliseconds of a step by hand, and what a session adds to it without a rule and with readings."""
    generator = torch.Generator().manual_seed(0)
    data = ArrayDataset(torch.randn(640, width, generator=generator), torch.randint(4, (640,), generator=generator))
    own: dict[str, Any] = {"batch_size": 64, "epochs": 10**6, "undo_bytes": 0, "lr": 1e-4}
    plain = Session(_Stack(layers, width), (data, data), freeze=None, **own)
    ruled = Session(_Stack(layers, width), (data, data), freeze=Plasticity(tolerance=0.0, reference="fp32"), **own)
    ways: dict[str, Callable[[], object]] = {
        "by hand": _by_hand(_Stack(layers, width), data, steps),
        "no rule": partial(plain.step, steps),
        "readings": partial(ruled.step, steps),
    }
    timings = interleave(ways, rounds=rounds)
    plain.close()
    ruled.close()
    by_hand = timings["by hand"].median_seconds / steps
    return {
        "step_milliseconds": 1000 * by_hand,
        "added_milliseconds": 1000 * max(1e-6, timings["no rule"].median_seconds / steps - by_hand),
        "added_milliseconds_with_readings": 1000 * max(1e-6, timings["readings"].median_seconds / steps - by_hand),
    }


def _by_hand(model: nn.Module, data: ArrayDataset, steps: int) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=5e-4)
    inputs, targets = data.inputs, data.targets

    def block() -> None:
        for i in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[64 * i : 64 * i + 64]), targets[64 * i : 64 * i + 64])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()

    return block


def _pass_by_samples(samples: int) -> dict[str, float]:
    """Milliseconds to plan a pass and to exchange samples, and bytes of the sieve's state."""
    data = ArrayDataset(torch.zeros(samples, 1), torch.zeros(samples, dtype=torch.int64))
    source = BatchSource(data, 128, seed=0)
    sieve = Sieve(CirculantSieve(fraction=0.2, interval_epochs=1), samples, batch_size=128, seed=0)
    ids = sieve.kept_ids()[:1000]
    sieve.observe(ids, correct=torch.ones(len(ids), dtype=torch.bool), margin=torch.zeros(len(ids)))
    start = time.perf_counter()
    sieve.after_pass(steps_done=1, planned_steps=10**9)
    exchanged = time.perf_counter()
    source.keep(sieve.kept_ids())
    source.steps_in(1)
    planned = time.perf_counter()
    return {
        "exchange_milliseconds": 1000 * (exchanged - start),
        "plan_milliseconds": 1000 * (planned - exchanged),
    }


def _history(rows: int) -> dict[str, float]:
    """Milliseconds to write so many rows, and bytes they take; reading the newest ten does not hang on how many."""
    history = History([f"layers.{i}" for i in range(8)])
    start = time.perf_counter()
    for step in range(rows):
        history.steps.append(step=step, loss=1.0, learning_rate=0.1, elapsed_seconds=0.1)
    written = time.perf_counter() - start
    reads = []
    for _ in range(200):
        start = time.perf_counter()
        history.steps.rows(rows - 10)
        reads.append(time.perf_counter() - start)
    return {"write_milliseconds": 1000 * written, "read_newest_milliseconds": 1000 * median(reads)}
