"""The suites that ``egeria-lab bench`` knows, by name."""

from __future__ import annotations

from collections.abc import Callable

from egeria_lab.benchmarks import cache, overhead, reference, spfde
from egeria_lab.benchmarks.harness import Result
from egeria_lab.errors import unknown_name

SUITES: dict[str, tuple[Callable[[bool], Result], str]] = {
    "overhead": (overhead.run, "our step against a hand-written loop, with and without plasticity readings"),
    "reference": (reference.run, "int8 against float32 reference: speed, rank correlation, freeze order"),
    "spfde": (spfde.run, "SpFDE, its parts, other sparse training and controls: accuracy, FLOPs, memory, time"),
    "cache": (cache.run, "a step with a frozen front: no cache, cold cache, warm cache"),
}


def suite(name: str) -> Callable[[bool], Result]:
    """The function that runs the suite called `name`.

    Raises:
        UnknownNameError: when there is none.

    Example:
        >>> suite("overhead") is overhead.run
        True
    """
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    return SUITES[name][0]
