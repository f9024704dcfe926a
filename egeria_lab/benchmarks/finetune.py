"""Fine-tuning a pretrained EfficientNet-Lite0, plain and with layers that freeze by plasticity and a cached front.

Both arms train on the same images in the same order with the same optimizer and schedule, turn about, three seeds. Time
is processor time of the training thread's process over all training steps, readings included, evaluation left out.
Accuracy is that of the validation set after the last pass, whatever it is. Source of the method: Egeria (EuroSys 2023).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

import torch

from egeria_lab.benchmarks.harness import Result, goal, result
from egeria_lab.data.datasets import ArrayDataset
from egeria_lab.data.registry import load
from egeria_lab.models.registry import build
from egeria_lab.presets import fine_tuning
from egeria_lab.session import Session

SEEDS = (0, 1, 2)
MODEL, DATA = "efficientnet-lite0", "blue-marble"
LEAST_RATIO = 1.4
ARMS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {**fine_tuning(cache=False), "freeze": None},
    "plasticity": lambda: fine_tuning(cache=False),
    "plasticity + cache": lambda: fine_tuning(),
}


def run(quick: bool) -> Result:
    """Fine-tune every arm with every seed.

    Args:
        quick: one seed, fewer images and passes, for a look: about four minutes on one core.

    Returns:
        The rows and the goals, see `egeria_lab.benchmarks.harness`.
    """
    images, tested, epochs = (480, 200, 6) if quick else (1600, 1000, 8)
    seeds, rows = SEEDS[:1] if quick else SEEDS, []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # processor time of several threads counts their waiting for each other
    try:
        for seed in seeds:
            for arm in ARMS if seed % 2 == 0 else reversed(ARMS):
                rows.append(fine_tuned(arm, seed, images, tested, epochs))
    finally:
        torch.set_num_threads(threads)
    return result("finetune", rows, goals(rows), list(seeds))


def fine_tuned(arm: str, seed: int, images: int, tested: int, epochs: int) -> dict[str, Any]:
    """One run: its accuracy, its seconds, what froze."""
    train, valid, classes = _samples(seed, images, tested)
    model = build(MODEL, input_shape=(3, 32, 32), num_classes=classes, seed=seed, size=64)
    session = Session(model, (train, valid), batch_size=16, epochs=epochs, seed=seed, undo_bytes=0, **ARMS[arm]())
    seconds = wall = 0.0
    try:
        while session.steps_done < session.planned_steps:
            started, clock = time.perf_counter(), time.process_time()
            record = session.step()
            if record.step % session.steps_per_epoch:  # the last step of a pass holds an evaluation
                wall, seconds = wall + time.perf_counter() - started, seconds + time.process_time() - clock
        scores = session.evaluate()
        return {
            "name": arm, "seed": seed, "accuracy": scores["accuracy"], "cpu_seconds": seconds, "wall_seconds": wall,
            "flops_saved_fraction": session.recorder.book.flops_saved_fraction,
            "frozen_layers": len(session.layers.frozen), "num_layers": len(session.layers), "images": images,
            "epochs": epochs,
        }  # fmt: skip
    finally:
        session.close()


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Time saved by freezing with a cache, and accuracy within the noise of the seeds.

    Example:
        >>> rows = [{"name": n, "seed": s, "accuracy": 0.5 + s / 100, "cpu_seconds": t}
        ...         for n, t in (("plain", 3.0), ("plasticity", 2.0), ("plasticity + cache", 1.5)) for s in SEEDS]
        >>> [(g["value"], g["met"]) for g in goals(rows)]
        [(2.0, True), (0.0, True)]
    """
    by_arm = {arm: [row for row in rows if row["name"] == arm] for arm in ARMS}
    plain, frozen = by_arm["plain"], by_arm["plasticity + cache"]
    times = {arm: {row["seed"]: row["cpu_seconds"] for row in of} for arm, of in by_arm.items()}
    ratio = mean(times["plain"][seed] / times["plasticity + cache"][seed] for seed in times["plain"])
    lost = mean(row["accuracy"] for row in plain) - mean(row["accuracy"] for row in frozen)
    noise = stdev(row["accuracy"] for row in plain) if len(plain) > 1 else 0.0
    return [
        goal("time of plain fine-tuning / with plasticity and cache", round(ratio, 3), LEAST_RATIO, ">="),
        goal("accuracy lost (at most the spread of plain over seeds)", round(lost, 4), round(noise, 4), "<="),
    ]


def _samples(seed: int, images: int, tested: int) -> tuple[ArrayDataset, ArrayDataset, int]:
    data = load(DATA)
    order = torch.Generator().manual_seed(seed)

    def some(part: Any, count: int) -> ArrayDataset:
        chosen = torch.randperm(len(part), generator=order)[:count]
        inputs, targets = part.gather(chosen)
        return ArrayDataset(inputs, targets)

    return some(data.train, images), some(data.valid, tested), int(data.num_classes or 0)
