"""What our step costs beside a hand-written loop, feature by feature: same model, data, order and budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F

from egeria_lab import data, models
from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.benchmarks.harness import Result, Timing, goal, interleave, result
from egeria_lab.session import Session

STEPS = 10
"""Steps in one timed block with readings: the default interval between two, so that each block holds one."""
HAND, BARE, JOURNAL = "hand-written loop", "session, no rule", "session with a journal"
FIVE, TWO = "plasticity, budget 5 %", "plasticity, budget 2 %"


def run(quick: bool = False) -> Result:
    """Time steps in turn: by hand, session without a rule, with a journal; then blocks with readings at two budgets.

    What costs the same in every step is timed step by step, which leaves a busy machine the least time to change in
    between; readings come every tenth step, and are timed in blocks of ten.

    Args:
        quick: fewer rounds.

    Returns:
        One row a way, with the ratio to the hand-written loop and to the session without a rule, each with the range
        in which the true median lies in 19 of 20 measurements.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # leaves the second core to the worker, as `egeria-lab demo` would choose
    folder = TemporaryDirectory()
    try:
        sessions = {
            BARE: _session(None),
            JOURNAL: _session(None, run_dir=folder.name, save_every_minutes=None),
            FIVE: _session(Plasticity(tolerance=0.0, monitor_budget=0.05)),
            TWO: _session(Plasticity(tolerance=0.0, monitor_budget=0.02)),
        }
        by_hand = _by_hand()
        single = _timed(by_hand, {name: sessions[name] for name in (BARE, JOURNAL)}, 1, 40 if quick else 400)
        blocks = _timed(by_hand, {name: sessions[name] for name in (BARE, FIVE, TWO)}, STEPS, 6 if quick else 40)
    finally:
        torch.set_num_threads(threads)
    rows = [_row(name, single, 1) for name in (HAND, BARE, JOURNAL)]
    rows += [{**_row(name, blocks, STEPS), **_ledger(sessions[name])} for name in (FIVE, TWO)]
    for session in sessions.values():
        session.close()
    folder.cleanup()
    goals = [
        goal("session without a rule, ratio to a hand-written loop", single[BARE].ratio_to(single[HAND]), 1.02, "<="),
        goal("with a journal, ratio to without", single[JOURNAL].ratio_to(single[BARE]), 1.01, "<="),
        goal(
            "plasticity at a budget of 5 %, ratio to a hand-written loop",
            blocks[FIVE].ratio_to(blocks[HAND]), 1.05, "<=",
        ),
        goal("plasticity at a budget of 2 %, ratio to no rule", blocks[TWO].ratio_to(blocks[BARE]), 1.02, "<="),
    ]  # fmt: skip
    return result("overhead", rows, goals, [0])


def _timed(
    by_hand: Callable[[int], None], sessions: Mapping[str, Session], steps: int, rounds: int
) -> dict[str, Timing]:
    ways: dict[str, Callable[[], object]] = {HAND: lambda: by_hand(steps)}
    for name, session in sessions.items():
        ways[name] = lambda session=session: session.step(steps)  # type: ignore[misc]
    return interleave(ways, rounds=rounds)


def _row(name: str, timings: Mapping[str, Timing], steps: int) -> dict[str, Any]:
    timing = timings[name]
    row: dict[str, Any] = {
        "name": name,
        "step_milliseconds": 1000 * timing.median_seconds / steps,
        "spread_milliseconds": 1000 * timing.spread_seconds / steps,
    }
    for key, other in (("hand_written", timings[HAND]), ("session_without_rule", timings[BARE])):
        low, high = timing.ratio_range(other)
        row |= {f"ratio_to_{key}": timing.ratio_to(other), f"range_to_{key}": f"{low:.3f} to {high:.3f}"}
    return row


def _ledger(session: Session) -> dict[str, float]:
    return {"monitor_share_by_own_ledger": session.savings().book.monitor_fraction}


def _session(rule: Plasticity | None, **more: Any) -> Session:
    return Session("resnet8", "fashion-mini", epochs=1000, seed=0, freeze=rule, **more)


def _by_hand() -> Callable[[int], None]:
    """The loop that anybody would write for the same work."""
    source = data.load("fashion-mini")
    inputs, targets = source.train.inputs, source.train.targets  # type: ignore[attr-defined]
    model = models.build("resnet8", input_shape=source.input_shape, num_classes=10, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    generator = torch.Generator().manual_seed(0)

    def block(steps: int) -> None:
        for _ in range(steps):
            ids = torch.randint(len(inputs), (128,), generator=generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[ids]), targets[ids])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()

    return block
