"""Several processes: bytes and time that frozen layers spare them, and whether the model that predicts it holds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

from egeria_lab.benchmarks.ddp_worker import DATA, MODEL, SHARES, SIZES
from egeria_lab.benchmarks.harness import Result, goal, result
from egeria_lab.distributed.prediction import MeasuredCosts, Prediction, predict, ring_seconds
from egeria_lab.engine.threads import available_cores
from egeria_lab.errors import TrainingError
from egeria_lab.session import Session

BATCH = 128
MANY = (8, 64, 1024)


def run(quick: bool = False) -> Result:
    """Train the same global batch on 1, 2 and 4 local processes, each turn with another share frozen.

    Args:
        quick: 1 and 2 processes and fewer turns.

    Returns:
        A row for each number of processes and share frozen, and a predicted one for 8, 64 and 1,024 ranks.
    """
    sizes, rounds = ((1, 2), 2) if quick else ((1, 2, 4), 10)
    found = {size: _processes(size, rounds, BATCH) for size in sizes}
    halves = _processes(1, rounds, BATCH // 2)
    costs = _costs(found, halves)
    joined = found[2]["step_seconds"]["nothing frozen"] - predict(costs, 2).seconds
    costs = replace(costs, joined_seconds=max(0.0, joined))  # told by one row, tried on all others
    rows, goals = [], []
    for size, measured in found.items():
        plain = measured["step_seconds"]["nothing frozen"]
        for name in SHARES:
            predicted = _prediction(costs, found[1], name, size, max(1.0, size / available_cores())).seconds
            rows.append(
                {
                    "name": f"{size} process{'es' if size > 1 else ''}, {name}",
                    "step_milliseconds": 1000 * measured["step_seconds"][name],
                    "step_ratio_to_nothing_frozen": measured["step_seconds"][name] / plain,
                    "gradient_bytes": measured["sent_bytes"][name],
                    "gradient_bytes_ratio": measured["sent_bytes"][name] / measured["full_bytes"],
                    "predicted_milliseconds": 1000 * predicted,
                    "predicted_to_measured": predicted / measured["step_seconds"][name],
                    "oversubscribed": size > available_cores(),
                }
            )
    most, exact = max(sizes), _trained_bytes()
    for name in SHARES:
        goals.append(
            goal(
                f"{most} processes, {name}: gradient bytes over those of its trained layers",
                found[most]["sent_bytes"][name] / exact[name], 1.0, "<=",
            )
        )  # fmt: skip
    goals.append(
        goal(
            "2 processes: step with two thirds frozen over nothing frozen",
            found[2]["step_seconds"]["two thirds frozen"] / found[2]["step_seconds"]["nothing frozen"], 1.0, "<=",
        )
    )  # fmt: skip
    rows += [_far(costs, found[1], size, name) for size in MANY for name in SHARES]
    rows.append({"name": "measured costs", **_named(costs)})
    return result("ddp", rows, goals, [0])


def _costs(found: dict[int, dict[str, Any]], halves: dict[str, Any]) -> MeasuredCosts:
    """Fixed and per-row compute from two batch sizes on one process; latency and bandwidth from two processes."""
    whole, half = found[1]["step_seconds"]["nothing frozen"], halves["step_seconds"]["nothing frozen"]
    row = max(0.0, (whole - half) / (BATCH - BATCH // 2))
    times = {int(size): seconds for size, seconds in found[2]["all_reduce_seconds"].items()}
    small, large = times[SIZES[0]], times[SIZES[-1]]
    hop = small / 2  # of two ranks: 2 hops, and next to no bytes
    bandwidth = SIZES[-1] / max(large - small, 1e-9)
    return MeasuredCosts(
        fixed_seconds=max(0.0, whole - row * BATCH), row_seconds=row, batch_rows=BATCH,
        gradient_bytes=found[2]["full_bytes"], hop_seconds=hop, bytes_per_second=bandwidth,
        rewrap_seconds=found[2]["rewrap_seconds"],
    )  # fmt: skip


def _prediction(
    costs: MeasuredCosts, alone: dict[str, Any], name: str, size: int, ranks_a_core: float = 1.0
) -> Prediction:
    saved = 1 - alone["step_seconds"][name] / alone["step_seconds"]["nothing frozen"]
    share = 1 - _trained_bytes()[name] / costs.gradient_bytes
    return predict(
        costs, size, frozen_bytes_share=min(1.0, max(0.0, share)), saved_compute=min(1.0, max(0.0, saved)),
        ranks_a_core=ranks_a_core,
    )  # fmt: skip


def _far(costs: MeasuredCosts, alone: dict[str, Any], size: int, name: str) -> dict[str, Any]:
    step = _prediction(costs, alone, name, size)
    return {
        "name": f"predicted: {size:,} ranks, {name}",
        "step_milliseconds": 1000 * step.seconds,
        "exchange_milliseconds": 1000 * step.exchange_seconds,
        "control_milliseconds": 1000 * step.control_seconds,
        "sent_bytes_a_rank": step.exchanged_bytes,
    }


def _named(costs: MeasuredCosts) -> dict[str, float]:
    return {
        "fixed_milliseconds": 1000 * costs.fixed_seconds,
        "row_milliseconds": 1000 * costs.row_seconds,
        "hop_microseconds": 1e6 * costs.hop_seconds,
        "bandwidth_megabytes_per_second": costs.bytes_per_second / 1e6,
        "rewrap_milliseconds": 1000 * costs.rewrap_seconds,
        "joined_milliseconds": 1000 * costs.joined_seconds,
        "ring_of_4_mebibytes_on_2_ranks_milliseconds": 1000
        * ring_seconds(SIZES[-1], 2, costs.hop_seconds, costs.bytes_per_second),
    }


@cache
def _trained_bytes() -> dict[str, int]:
    """Bytes of the parameters that are trained, for each share frozen: what must be sent, and no more."""
    session = Session(MODEL, DATA, freeze=None, device="cpu", distributed=False)
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters) for layer in session.layer_modules]
    session.close()
    return {name: sum(sizes[round(share * len(sizes)) :]) for name, share in SHARES.items()}


def _processes(size: int, rounds: int, batch_size: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launched = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if size > 1 else {}
    command = [sys.executable, "-m", "egeria_lab.benchmarks.ddp_worker", str(rounds), str(batch_size)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **launched, "RANK": str(rank)})
        for rank in range(size)
    ]
    printed = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise TrainingError(f"a process of bench ddp ended with status {[p.returncode for p in started]}.")
    seen: list[dict[str, Any]] = [json.loads(text.splitlines()[-1]) for text in printed]
    if len({one["digest"] for one in seen}) != 1:
        raise TrainingError("the ranks of bench ddp ended with different weights.")
    return seen[0]
