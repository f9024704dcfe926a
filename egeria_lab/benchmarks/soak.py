"""Train very long with everything on, and see whether memory, step time and the journal grow."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.benchmarks.kills import tiny
from egeria_lab.checkpoint.journal import NAME
from egeria_lab.events import Event
from egeria_lab.session import Session

SAMPLES = 50
"""Measurements over the whole length."""
UNDO_BYTES = 1 << 24
MEGABYTE = 1 << 20
PER_STEPS = 10_000


def soak(steps: int, *, seconds: float | None = None) -> dict[str, Any]:
    """Train a tiny model with plasticity, sieve, masks, journal, checkpoints and a full undo ring.

    Some commands land in each block: a freeze, a thaw, another tolerance, an undo.

    Args:
        steps: steps to make, those that an undo takes back included.
        seconds: end earlier, after so much time, or None.

    Returns:
        ``steps``, ``seconds``; ``memory_bytes`` and ``record_bytes`` (tables and events, which grow by design) at the
        end; ``memory_slope_bytes`` and ``record_slope_bytes`` for each 10,000 steps, over the second half;
        ``step_milliseconds`` of processor time (median), saves included; ``step_time_ratio``, of the last fifth to the
        second; ``journal_bytes`` and ``journal_bytes_a_step``; ``undo_bytes``; NaN where the system does not tell.
    """
    with tempfile.TemporaryDirectory() as place:
        session = tiny(
            epochs=steps, freeze=Plasticity(tolerance=0.0, reference="fp32"), run_dir=place, undo_bytes=UNDO_BYTES,
            save_every_steps=max(500, steps // SAMPLES),
        )  # fmt: skip
        start, block = time.perf_counter(), max(1, steps // SAMPLES)
        times: list[float] = []
        marks: list[tuple[int, float, int]] = []
        while len(times) * block < steps and (seconds is None or time.perf_counter() - start < seconds):
            begun = time.process_time()
            session.step(block)
            times.append((time.process_time() - begun) / block)
            _commands(session, len(times))
            marks.append((len(times) * block, _resident_bytes(), _record_bytes(session)))
        undo, done, length = session.undo_ring.num_bytes, len(times) * block, time.perf_counter() - start
        session.close()
        journal = (Path(place) / NAME).stat().st_size
    number, resident, record = (np.array(values, dtype=np.float64) for values in zip(*marks, strict=True))
    return {
        "steps": done, "seconds": length, "memory_bytes": float(resident[-1]), "record_bytes": int(record[-1]),
        "memory_slope_bytes": _slope(number, resident), "record_slope_bytes": _slope(number, record),
        "step_milliseconds": 1000 * median(times), "step_time_ratio": _growth(times), "journal_bytes": journal,
        "journal_bytes_a_step": journal / done, "undo_bytes": undo,
    }  # fmt: skip


def _commands(session: Session, number: int) -> None:
    """What a user does now and then; the tolerance is 0, so that no layer freezes by itself."""
    layer = session.layers.names[number % 2]
    if number % 4 == 3:
        session.undo()
    elif session.layers[layer].frozen:
        session.thaw(layer)
    else:
        session.freeze(layer)
    session.override("freeze.window", 3 + number % 5)


def _record_bytes(session: Session) -> int:
    tables = sum(int(table.state_dict()["rows"].nbytes) for _, table in session.history.items())
    return tables + sum(_event_bytes(event) for event in session.events)


def _event_bytes(event: Event) -> int:
    """Of the event and what it holds; ids are numbers that events share."""
    return sys.getsizeof(event) + sum(sys.getsizeof(getattr(event, field.name)) for field in fields(event))


def _slope(steps: Any, values: Any) -> float:
    """Growth in `PER_STEPS` steps by a line through the second half: caches and rings are full then."""
    half = len(steps) // 2
    if len(steps) - half < 2:
        return float("nan")
    return float(np.polyfit(steps[half:], values[half:], 1)[0] * PER_STEPS)


def _growth(times: Sequence[float]) -> float:
    fifth = max(1, len(times) // 5)
    return median(times[-fifth:]) / median(times[fifth : 2 * fifth] or times)


def _resident_bytes() -> float:
    """Memory of this process now, or NaN where the system does not say so in a file.

    What the C library keeps of memory that was freed, to hand it out again, is given back first: after each save that
    is room for a checkpoint, which grows as the record does.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return float(fields["VmRSS"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float("nan")
