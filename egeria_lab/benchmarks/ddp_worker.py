"""One rank of `egeria-lab bench ddp`: times steps with none, a third and two thirds of the layers frozen, in turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from egeria_lab.session import Session

MODEL, DATA = "resnet8", "fashion-mini"
SHARES = {"nothing frozen": 0.0, "a third frozen": 1 / 3, "two thirds frozen": 2 / 3}
STEPS = 6
"""Timed steps of a turn; the one before them, which wraps the model anew, is not timed."""
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
"""Bytes of the all-reduces that tell latency and bandwidth."""


def measure(rounds: int, batch_size: int) -> dict[str, Any]:
    """What this rank measures; rank 0's is the one that counts."""
    torch.set_num_threads(1)
    session = Session(MODEL, DATA, epochs=10_000, batch_size=batch_size, freeze=None, undo_bytes=0, device="cpu")
    names = session.layers.names
    fronts = {name: names[: round(share * len(names))] for name, share in SHARES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in SHARES}
    sent: dict[str, int] = {}
    for turn in range(rounds):
        for name in [*SHARES][turn % 3 :] + [*SHARES][: turn % 3]:
            _freeze_exactly(session, fronts[name])
            session.step()
            for _ in range(STEPS):
                start = time.perf_counter()
                session.step()
                seconds[name].append(time.perf_counter() - start)
            sent[name] = 0 if session.ranks is None else session.ranks.exchange.step_bytes
    exchange = None if session.ranks is None else session.ranks.exchange
    found = {
        "step_seconds": {name: median(values) for name, values in seconds.items()},
        "sent_bytes": sent,
        "full_bytes": sum(p.numel() * p.element_size() for p in session.model.parameters()),
        "rewrap_seconds": 0.0 if exchange is None else exchange.rewrap_seconds / exchange.rewraps,
        "all_reduce_seconds": {} if exchange is None else {size: _timed_all_reduce(size) for size in SIZES},
        "digest": float(sum(p.detach().double().sum() for p in session.model.parameters())),
    }
    session.close()
    return found


def _freeze_exactly(session: Session, front: list[str]) -> None:
    for name in session.layers.names:
        if name in front and name not in session.layers.frozen:
            session.freeze(name)
        if name not in front and name in session.layers.frozen:
            session.thaw(name)


def _timed_all_reduce(num_bytes: int, rounds: int = 15) -> float:
    tensor = torch.zeros(num_bytes // 4)
    return _timed(lambda: dist.all_reduce(tensor), rounds)


def _timed(function: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return median(taken)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
