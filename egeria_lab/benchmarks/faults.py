"""Kills, a very long run, and steering from many threads: what may be lost, what may grow, what may be left."""

from __future__ import annotations

from typing import Any

import torch

from egeria_lab.benchmarks.harness import Result, goal, result
from egeria_lab.benchmarks.kills import kill_again_and_again
from egeria_lab.benchmarks.soak import MEGABYTE, soak
from egeria_lab.benchmarks.stress import stress

KILLS, QUICK_KILLS = 200, 10
STEPS, QUICK_STEPS = 100_000, 2_000
SECONDS, QUICK_SECONDS = 60.0, 6.0
SHOULD_BE_ZERO = (
    "commands_lost", "errors", "stuck_threads", "threads_left", "processes_left", "sessions_left",
)  # fmt: skip


def run(quick: bool = False) -> Result:
    """Kill a training process at random moments, train very long, and steer one session from four threads.

    Args:
        quick: 10 kills, 2,000 steps and 6 seconds in place of 200, 100,000 and 60; memory and time of so short a run
            say little, so they have no goal then.

    Returns:
        One row a part; the goals are that nothing is lost, nothing is left, and memory and step time are flat.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kills = kill_again_and_again(QUICK_KILLS if quick else KILLS)
        steered = stress(QUICK_SECONDS if quick else SECONDS)
        long = soak(QUICK_STEPS if quick else STEPS)
    finally:
        torch.set_num_threads(threads)
    rows = [{"name": "kills", **kills}, {"name": "four threads", **steered}, {"name": "soak", **long}]
    goals = [*_kill_goals(kills), *_steering_goals(steered), *([] if quick else _soak_goals(long))]
    return result("faults", rows, goals, [0])


def _kill_goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        goal("share of kills after which all goes on to the bit", found["exact"] / found["kills"], 1, ">="),
        goal("half files taken for whole", found["half_files"], 0, "<="),
        goal("journals that tell another run", found["wrong_journals"], 0, "<="),
    ]


def _steering_goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [goal(name.replace("_", " "), found[name], 0, "<=") for name in SHOULD_BE_ZERO]


def _soak_goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    beside_the_record = (found["memory_slope_bytes"] - found["record_slope_bytes"]) / MEGABYTE
    return [
        goal("memory growth beside the record, MB in 10,000 steps", beside_the_record, 1.0, "<="),
        goal("step time, last fifth to second fifth", found["step_time_ratio"], 1.1, "<="),
    ]
