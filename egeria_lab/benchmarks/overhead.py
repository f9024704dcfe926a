"""What our step costs beside a hand-written loop, feature by feature: same model, data, order and budget."""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F

from egeria_lab import data, models
from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.benchmarks.harness import Result, goal, interleave, result
from egeria_lab.session import Session

STEPS = 10
"""Steps in one timed block: the default interval between two readings, so that each block holds one."""


def run(quick: bool = False) -> Result:
    """Time blocks of steps, interleaved: by hand, session without a rule, with a journal, with the rule at two budgets.

    Args:
        quick: fewer rounds.

    Returns:
        One row a way, with the ratio to the hand-written loop and to the session without a rule.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # leaves the second core to the worker, as `egeria-lab demo` would choose
    folder = TemporaryDirectory()
    try:
        sessions = {
            "session, no rule": _session(None),
            "session with a journal": _session(None, run_dir=folder.name, save_every_minutes=None),
            "plasticity, budget 5 %": _session(Plasticity(tolerance=0.0, monitor_budget=0.05)),
            "plasticity, budget 2 %": _session(Plasticity(tolerance=0.0, monitor_budget=0.02)),
        }
        ways: dict[str, Callable[[], object]] = {"hand-written loop": _by_hand()}
        for name, session in sessions.items():
            ways[name] = lambda session=session: session.step(STEPS)  # type: ignore[misc]
        timings = interleave(ways, rounds=6 if quick else 40)
    finally:
        torch.set_num_threads(threads)
    hand, plain = timings["hand-written loop"], timings["session, no rule"]
    rows = []
    for name, timing in timings.items():
        row: dict[str, object] = {
            "name": name,
            "step_milliseconds": 1000 * timing.median_seconds / STEPS,
            "spread_milliseconds": 1000 * timing.spread_seconds / STEPS,
            "ratio_to_hand_written": timing.ratio_to(hand),
            "ratio_to_session_without_rule": timing.ratio_to(plain),
        }
        if name in sessions:
            row["monitor_share_by_own_ledger"] = sessions[name].savings().book.monitor_fraction
        rows.append(row)
    for session in sessions.values():
        session.close()
    folder.cleanup()
    journal = timings["session with a journal"]
    five, two = timings["plasticity, budget 5 %"], timings["plasticity, budget 2 %"]
    goals = [
        goal("session without a rule, ratio to a hand-written loop", plain.ratio_to(hand), 1.02, "<="),
        goal("with a journal, ratio to without", journal.ratio_to(plain), 1.01, "<="),
        goal("plasticity at a budget of 5 %, ratio to a hand-written loop", five.ratio_to(hand), 1.05, "<="),
        goal("plasticity at a budget of 2 %, ratio to no rule", two.ratio_to(plain), 1.02, "<="),
    ]
    return result("overhead", rows, goals, [0])


def _session(rule: Plasticity | None, **more: Any) -> Session:
    return Session("resnet8", "fashion-mini", epochs=1000, seed=0, freeze=rule, **more)


def _by_hand() -> Callable[[], object]:
    """The loop that anybody would write for the same work."""
    source = data.load("fashion-mini")
    inputs, targets = source.train.inputs, source.train.targets  # type: ignore[attr-defined]
    model = models.build("resnet8", input_shape=source.input_shape, num_classes=10, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    generator = torch.Generator().manual_seed(0)

    def block() -> None:
        for _ in range(STEPS):
            ids = torch.randint(len(inputs), (128,), generator=generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[ids]), targets[ids])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()

    return block
