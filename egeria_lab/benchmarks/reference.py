"""Is the int8 reference fast enough, and does it see the same plasticity as a float32 one?

Speed: forward passes of all layer modules, 64 rows, one thread, int8 and float32 in turn. Agreement: while a
model trains, the same model of the moment is read against an int8 and a float32 snapshot of the same step;
compared are the ranks of the layers within each reading, and what Egeria's rule would freeze on either series.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from egeria_lab import data, models
from egeria_lab.algorithms.distances import sp_distance
from egeria_lab.algorithms.freeze_policy import Plasticity, PlasticityPolicy
from egeria_lab.algorithms.layers import LayerModules, layers
from egeria_lab.algorithms.model_twin import ModelTwin
from egeria_lab.algorithms.reference_model import ReferenceModel
from egeria_lab.benchmarks.harness import Result, goal, interleave, result

ROWS = 64
SEED = 0
SPEED_GOAL = 2.0
RANK_GOAL = 0.9
CONVOLUTIONAL = ("resnet8", "resnet20", "resnet56")
SETTINGS = Plasticity(window=4, patience=3, interval_steps=5, bootstrap_change=0.5)
"""Short windows and the tolerance as shipped: a run of a minute freezes nearly all layers."""


def run(quick: bool = False) -> Result:
    """Measure speed and agreement.

    Args:
        quick: smaller images and fewer steps, below two minutes on one core.

    Example:
        >>> run(quick=True)["suite"]  # doctest: +SKIP
        'reference'
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        speeds = [_speed(name, quick) for name in ("resnet8", "resnet20", "resnet56", "mlp", "transformer")]
        agreements = [_agreement(name, quick) for name in ("resnet20", "transformer")]
        return result("reference", [*speeds, *agreements], _goals(speeds, agreements), [SEED])
    finally:
        torch.set_num_threads(threads)


def _goals(speeds: Sequence[dict[str, Any]], agreements: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    slowest = min(row["int8_speed_ratio"] for row in speeds if row["name"] in CONVOLUTIONAL)
    goals = [goal("int8_speed_ratio of convolutional nets", slowest, SPEED_GOAL, ">=")]
    for row in agreements:
        goals.append(goal(f"rank_correlation: {row['name']}", row["rank_correlation"], RANK_GOAL, ">="))
        same = float(row["frozen_by_int8"] == row["frozen_by_fp32"] != "")
        goals.append(goal(f"same freeze order: {row['name']}", same, 1.0, ">="))
    return goals


def _call(model: nn.Module, content: Any) -> object:
    return model(content)


def _build(name: str, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    options: dict[str, Any] = {"depth": 6} if name == "transformer" else {}
    return models.build(name, input_shape=input_shape, num_classes=num_classes, seed=SEED, **options)


def _speed(name: str, quick: bool) -> dict[str, Any]:
    shape = (3, 16, 16) if quick else (3, 32, 32)
    model = _build(name, shape, 10)
    content = torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(SEED))
    found = layers(model, content[:2])
    start = time.thread_time()
    int8 = ReferenceModel(model, found, _call, engine="int8")
    building = time.thread_time() - start
    fp32 = ReferenceModel(model, found, _call, engine="fp32")
    state = int8.state_of(model)
    fp32.refresh(state, content)
    int8.refresh(state, content)
    start = time.thread_time()
    int8.refresh(state, content)
    refreshing = time.thread_time() - start
    last = found.names[-1:]
    timings = interleave(
        {"fp32": lambda: fp32.activations(content, last), "int8": lambda: int8.activations(content, last)},
        rounds=5 if quick else 15,
        clock=time.thread_time,
    )
    return {
        "name": name,
        "rows": ROWS,
        "image": "×".join(map(str, shape)),
        "fp32_cpu_seconds": timings["fp32"].median_seconds,
        "int8_cpu_seconds": timings["int8"].median_seconds,
        "int8_spread_cpu_seconds": timings["int8"].spread_seconds,
        "int8_speed_ratio": timings["fp32"].ratio_to(timings["int8"]),
        "build_cpu_seconds": building,
        "refresh_cpu_seconds": refreshing,
        "float32_layers": sum(engine == "fp32" for _, engine, _ in int8.describe()),
        "layers": len(found),
    }


@dataclass(slots=True)
class _Series:
    """One reference beside the training, and the rule that reads it."""

    reference: ReferenceModel
    policy: PlasticityPolicy
    frozen: list[str] = field(default_factory=list)
    readings: list[list[float]] = field(default_factory=list)
    frozen_at: list[int] = field(default_factory=list)

    def read(self, now: dict[str, Tensor], content: Tensor, loss: float, passes: float) -> None:
        before = self.reference.activations(content, list(now))
        values = {name: float(sp_distance(now[name], before[name])) for name in now}
        self.readings.append(list(values.values()))
        for _ in range(SETTINGS.interval_steps):
            self.policy.observe(loss, 0.1, self.frozen)
        active = {name: value for name, value in values.items() if name not in self.frozen}
        _, decisions = self.policy.evaluate(active, frozen=self.frozen, pinned=(), passes=passes)
        for decision in decisions:
            if decision.action == "freeze":
                self.frozen.append(decision.layer)
                self.frozen_at.append(len(self.readings))


def _agreement(name: str, quick: bool) -> dict[str, Any]:
    source = data.load("digits" if quick else "fashion-mini")
    assert source.num_classes is not None
    model = _build(name, source.input_shape, source.num_classes)
    inputs, targets = _tensors(source, 1437 if quick else 4000)
    found = layers(model, inputs[:2])
    series = [
        _Series(ReferenceModel(model, found, _call, engine=engine), PlasticityPolicy(found.names, SETTINGS))
        for engine in ("int8", "fp32")
    ]
    steps = 400 if quick else 800
    fresh = _train(model, found, series, inputs, targets, steps)
    compared = [i for i in range(len(fresh)) if not fresh[i]]  # right at a snapshot float32 reads zero
    correlations = [spearman(series[0].readings[i], series[1].readings[i]) for i in compared]
    over_time = [
        spearman([series[0].readings[i][k] for i in compared], [series[1].readings[i][k] for i in compared])
        for k in range(len(found))
    ]
    shifts = [abs(a - b) for a, b in zip(series[0].frozen_at, series[1].frozen_at, strict=False)]
    return {
        "name": f"{name}, trained on {source.name}",
        "rows": ROWS,
        "steps": steps,
        "rank_correlation": mean(correlations),
        "lowest_rank_correlation": min(correlations),
        "lowest_rank_correlation_over_time_of_a_layer": min(over_time),
        "frozen_by_int8": " ".join(series[0].frozen),
        "frozen_by_int8_at_readings": " ".join(map(str, series[0].frozen_at)),
        "frozen_by_fp32": " ".join(series[1].frozen),
        "frozen_by_fp32_at_readings": " ".join(map(str, series[1].frozen_at)),
        "largest_shift_readings": max(shifts, default=0),
    }


def _train(
    model: nn.Module,
    found: LayerModules,
    series: Sequence[_Series],
    inputs: Tensor,
    targets: Tensor,
    steps: int,
) -> list[bool]:
    """Train and let every series read; answers for each reading whether it was the first of a snapshot."""
    twin = ModelTwin(model, {layer.name: layer.output for layer in found}, _call)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    generator = torch.Generator().manual_seed(SEED)
    fresh: list[bool] = []
    for step in range(1, steps + 1):
        rows = torch.randint(len(inputs), (ROWS,), generator=generator)
        loss = cross_entropy(model.train()(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % SETTINGS.interval_steps:
            continue
        state = series[0].reference.state_of(model)
        fresh.append(len(fresh) % SETTINGS.readings_per_snapshot == 0)
        if fresh[-1]:
            for each in series:
                each.reference.refresh(state, inputs[rows])
                each.policy.restart()
        twin.load(state)
        now = twin.run(inputs[rows], found.names)
        for each in series:
            each.read(now, inputs[rows], loss.item(), step * ROWS / len(inputs))
    return fresh


def _tensors(source: data.Data, most: int) -> tuple[Tensor, Tensor]:
    pairs = [source.train[i] for i in range(min(most, len(source.train)))]
    return torch.stack([torch.as_tensor(x) for x, _ in pairs]), torch.tensor([int(y) for _, y in pairs])


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation in [-1, 1]; equal values share the mean of their ranks; 0 when one side is constant.

    Example:
        >>> spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]), spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])
        (1.0, -1.0)
    """
    x, y = _ranks(a), _ranks(b)
    centre = (len(x) - 1) / 2
    cross = sum((p - centre) * (q - centre) for p, q in zip(x, y, strict=True))
    norm = sum((p - centre) ** 2 for p in x) * sum((q - centre) ** 2 for q in y)
    return float(cross / norm**0.5) if norm else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    below: Callable[[float], int] = lambda value: sum(other < value for other in values)  # noqa: E731
    return [below(value) + (sum(other == value for other in values) - 1) / 2 for value in values]
