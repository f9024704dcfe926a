"""What the activation cache saves of a training step, and whether it changes a bit.

One model with a frozen prefix is trained on the same batches in four ways, in turn, batch by batch: without a
cache, with a cold one (every row is computed and written), with a warm one (every row is loaded), and with the
prefix's outputs lying in memory, which is the most that any cache could save. (The prefix timed by itself is no
measure: memory that a step reuses is asked of the system anew, which takes longer than the arithmetic.)
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from egeria_lab import models
from egeria_lab.algorithms.freezing import Freezer
from egeria_lab.algorithms.layers import LayerModules, layers
from egeria_lab.algorithms.prefix import PrefixRunner
from egeria_lab.benchmarks.harness import Result, Timing, goal, result
from egeria_lab.data.activation_cache import ActivationCache, CachedPrefix
from egeria_lab.data.cached_forward import CachedForward

SEED = 0
BATCH = 128
SHAPE, CLASSES = (1, 28, 28), 10
WARM_GOAL = 1.0  # a warm cache never costs time …
SHARE_GOAL = 0.8  # … and saves most of what could be saved
COLD_GOAL = 1.25  # while filling it costs little
READING_GOAL = 5.0  # the same as a share of 0.8, asked of each model
CASES = (("resnet8", 1), ("resnet14", 4), ("transformer", 2))  # name, boundary
QUICK_CASES = (("resnet8", 1), ("transformer", 2))


def run(quick: bool = False) -> Result:
    """Measure the four ways.

    Args:
        quick: fewer models and batches, about half a minute on one core; else two minutes.

    Example:
        >>> run(quick=True)["suite"]  # doctest: +SKIP
        'cache'
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = QUICK_CASES if quick else CASES
        rows = [
            _Case(name, boundary, "float32", batches=4 if quick else 10).measure(3 if quick else 5)
            for name, boundary in cases
        ]
        if not quick:
            rows += [_Case("resnet14", 4, dtype, batches=10).measure(3) for dtype in ("float16", "int8")]
        return result("cache", rows, _goals([row for row in rows if row["dtype"] == "float32"]), [SEED])
    finally:
        torch.set_num_threads(threads)


def _goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        goal("bit_equal loss traces", float(all(row["bit_equal"] for row in rows)), 1.0, ">="),
        goal("warm_step_ratio, worst", max(row["warm_step_ratio"] for row in rows), WARM_GOAL, "<="),
        goal("cold_step_ratio, worst", max(row["cold_step_ratio"] for row in rows), COLD_GOAL, "<="),
        goal(
            "recomputing_over_reading, worst: time of the prefix over what reading its outputs adds to a step",
            min(row["recomputing_over_reading"] for row in rows),
            READING_GOAL,
            ">=",
        ),
        goal(
            "saved_share_of_possible, mean",
            sum(row["saved_share_of_possible"] for row in rows) / len(rows),
            SHARE_GOAL,
            ">=",
        ),
    ]


class _Way:
    """One copy of the model in training, with or without a cache."""

    def __init__(self, name: str, boundary: int, inputs: Tensor, cache: CachedPrefix | None) -> None:
        self.model = models.build(name, input_shape=SHAPE, num_classes=CLASSES, seed=SEED).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.found: LayerModules = layers(self.model, inputs[:2])
        frozen = {layer.name: (layer.modules, layer.parameters) for layer in self.found}
        freezer = Freezer(self.model, frozen, self.optimizer)
        for layer in self.found[: boundary + 1]:
            freezer.freeze(layer.name)
        self.boundary = boundary
        self.runner = PrefixRunner(self.model, self.found, inputs[:3])
        self.cache = cache
        self.forward = None if cache is None else CachedForward(self.runner, cache, BATCH)
        self.held: dict[int, Any] = {}  # first id of a batch → what crosses the cut
        self.losses: list[float] = []

    def hold(self, order: list[Tensor], inputs: Tensor) -> None:
        """Keep the outputs of the prefix in memory, and use them from now on."""
        self.held = {int(ids[0]): self.runner.run_until(self.boundary, inputs[ids]) for ids in order}

    def step(self, ids: Tensor, inputs: Tensor, targets: Tensor) -> float:
        """Train on one batch; answers with its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        outputs = self._outputs(ids, inputs)
        loss = cross_entropy(outputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        seconds = time.perf_counter() - start
        self.losses.append(loss.item())
        return seconds

    def _outputs(self, ids: Tensor, inputs: Tensor) -> Any:
        if self.held:
            return self.runner.run_from(self.boundary, self.held[int(ids[0])], inputs)
        if self.forward is None:
            return self.model(inputs)
        return self.forward(self.boundary, ids, torch.zeros_like(ids), inputs)


class _Case:
    """One model and boundary, measured in four ways."""

    def __init__(self, name: str, boundary: int, dtype: str, batches: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.name, self.boundary, self.dtype = name, boundary, dtype
        self.inputs = torch.randn(batches * BATCH, *SHAPE, generator=generator)
        self.targets = torch.randint(CLASSES, (len(self.inputs),), generator=generator)

    def measure(self, rounds: int) -> dict[str, Any]:
        """The row of the report."""
        order = [torch.arange(start, start + BATCH) for start in range(0, len(self.inputs), BATCH)]
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory())
            settings = ActivationCache(directory=folder, dtype=self.dtype, self_profiling=False)
            caches = [CachedPrefix(settings, num_samples=len(self.inputs)) for _ in range(2)]
            for cache in caches:
                stack.callback(cache.close)
            ways = {
                "none": _Way(self.name, self.boundary, self.inputs, None),
                "cold": _Way(self.name, self.boundary, self.inputs, caches[0]),
                "warm": _Way(self.name, self.boundary, self.inputs, caches[1]),
                "held": _Way(self.name, self.boundary, self.inputs, None),
            }
            ways["held"].hold(order, self.inputs)
            self._epoch(ways, order)  # fills the warm one, proves the boundary
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(rounds):
                caches[0].invalidate("the cold cache starts again")
                for way, taken in self._epoch(ways, order).items():
                    seconds[way] += taken
            timings = {way: Timing(tuple(taken)) for way, taken in seconds.items()}
            return self._row(ways, timings, caches[1])

    def _epoch(self, ways: dict[str, _Way], order: list[Tensor]) -> dict[str, list[float]]:
        for way in ways.values():
            if way.cache is not None:
                way.cache.announce([(ids, torch.zeros_like(ids)) for ids in order])
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number, ids in enumerate(order):
            batch = self.inputs[ids], self.targets[ids]
            names = list(ways)
            for name in names[number % 4 :] + names[: number % 4]:
                seconds[name].append(ways[name].step(ids, *batch))
        return seconds

    def _row(self, ways: dict[str, _Way], timings: dict[str, Timing], warm: CachedPrefix) -> dict[str, Any]:
        none, held = timings["none"].median_seconds, timings["held"].median_seconds
        statistics = warm.statistics
        return {
            "name": f"{self.name}, {self.boundary + 1} of {len(ways['none'].found)} layers frozen, {self.dtype}",
            "dtype": self.dtype,
            "no_cache_step_seconds": none,
            "cold_step_seconds": timings["cold"].median_seconds,
            "warm_step_seconds": timings["warm"].median_seconds,
            "warm_step_ratio": timings["warm"].ratio_to(timings["none"]),
            "cold_step_ratio": timings["cold"].ratio_to(timings["none"]),
            "held_in_memory_step_seconds": held,
            "saved_share_of_possible": (none - timings["warm"].median_seconds) / (none - held),
            "recomputing_over_reading": (none - held)
            / max(timings["warm"].median_seconds - held, 0.01 * (none - held)),  # × 100 is as good as for nothing
            "prefix_flops_share": self._flops_share(ways["none"]),
            "wait_seconds_per_row": statistics.wait_seconds / max(1, statistics.hits),
            "bytes_per_row": statistics.num_bytes // max(1, statistics.rows),
            "relative_error": statistics.relative_error,
            "bit_equal": all(way.losses == ways["none"].losses for way in ways.values()),
        }

    def _flops_share(self, way: _Way) -> float:
        """FLOPs of the prefix's forward pass as a share of a whole step without a cache."""
        inputs = self.inputs[:BATCH]
        way.runner.check(self.boundary)  # the proof runs the model too: not while counting
        with FlopCounterMode(display=False) as step:
            cross_entropy(way.model(inputs), self.targets[:BATCH]).backward()  # type: ignore[no-untyped-call]
        with FlopCounterMode(display=False) as prefix:
            way.runner.run_until(self.boundary, inputs)
        return float(prefix.get_total_flops()) / float(step.get_total_flops())
