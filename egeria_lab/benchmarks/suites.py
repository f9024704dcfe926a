"""The suites that ``egeria-lab bench`` knows, by name."""

from __future__ import annotations

from collections.abc import Callable

from egeria_lab.benchmarks import (
    cache,
    dashboard,
    ddp,
    faults,
    finetune,
    freezing,
    memory,
    overhead,
    reference,
    scale,
    spfde,
)
from egeria_lab.benchmarks.harness import Result
from egeria_lab.errors import unknown_name

KEEPS_PARTS = frozenset({"freezing"})
"""Suites of hours: their `run` also takes the folder of the results, and keeps there what is done."""

SUITES: dict[str, tuple[Callable[..., Result], str]] = {
    "overhead": (overhead.run, "our step against a hand-written loop, with and without plasticity readings"),
    "reference": (reference.run, "int8 against float32 reference: speed, rank correlation, freeze order"),
    "memory": (memory.run, "what autograd keeps for the backward pass as layers freeze"),
    "scale": (scale.run, "how what we add grows with layers, weights, samples and history"),
    "freezing": (freezing.run, "every way of freezing, sieving and caching on the clock: same budget, time to target"),
    "spfde": (spfde.run, "SpFDE, its parts, other sparse training and controls: accuracy, FLOPs, memory, time"),
    "dashboard": (
        dashboard.run,
        "what-if, traffic, training beside the dashboard, commands; in a browser where there is one",
    ),
    "cache": (cache.run, "a step with a frozen front: no cache, cold cache, warm cache"),
    "finetune": (
        finetune.run,
        "a pretrained EfficientNet-Lite0: plain, with plasticity, with plasticity and cache: accuracy and time",
    ),
    "ddp": (ddp.run, "1, 2 and 4 processes: bytes and time that frozen layers spare, and the model that predicts it"),
    "faults": (
        faults.run,
        "kills at random moments, a very long run, steering from four threads: what is lost or grows",
    ),
}


def suite(name: str) -> Callable[..., Result]:
    """The function that runs the suite called `name`; its first argument is whether to be quick.

    Raises:
        UnknownNameError: when there is none.

    Example:
        >>> suite("overhead") is overhead.run
        True
    """
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    return SUITES[name][0]
