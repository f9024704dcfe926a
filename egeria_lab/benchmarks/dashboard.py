"""What the dashboard costs and how fast it answers: what-if, traffic, training beside it, commands, a real browser."""

from __future__ import annotations

import gc
import json
import threading
import time
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from torch import nn

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.benchmarks import dashboard_browser
from egeria_lab.benchmarks.harness import Result, goal, result
from egeria_lab.dashboard.app import Dashboard
from egeria_lab.dashboard.tuner import Tuner
from egeria_lab.events import LayerFrozen, ReferenceRefreshed, SettingChanged
from egeria_lab.session import Session

LAYERS, READINGS = 60, 5000
LAYERS_SENT = 20
HISTORIES = (100, 1_000, 10_000)
SECONDS = 6.0


def run(quick: bool = False) -> Result:
    """Measure all of it; the rows of a browser are skipped, with the reason, where there is none.

    Args:
        quick: fewer rounds, one minute of memory instead of thirty.

    Returns:
        One row a figure; goals as the project sets them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as `egeria-lab demo` would choose for so small a model
    try:
        parts = [
            _what_if(10 if quick else 40),
            _same_steps(),
            _traffic(SECONDS if quick else 4 * SECONDS),
            _beside(6 if quick else 24),
            _commands(60 if quick else 300),
            dashboard_browser.measure(quick),
        ]
    finally:
        torch.set_num_threads(threads)
    rows = [row for rows, _ in parts for row in rows]
    return result("dashboard", rows, [one for _, goals in parts for one in goals], [0])


def p95(values: list[float]) -> float:
    """The value that 95 of 100 stay below.

    Example:
        >>> p95([1.0] * 99 + [50.0])
        1.0
    """
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


Part = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def recorded(num_layers: int, readings: int) -> Session:
    """A session that was never trained, with so many readings in its tables: each layer settles later than the last."""
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(num_layers - 2)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), *blocks, nn.Linear(24, 10))
    rule = Plasticity(interval_steps=1, window=10, patience=10, tolerance=0.0, reference="fp32")
    session = Session(model, "digits", epochs=1000, freeze=rule)
    session.events.append(ReferenceRefreshed(step=1, generation=1, engine="fp32", reason="start of the run"))
    random, layers = np.random.default_rng(0), np.arange(num_layers)
    for step in range(1, readings + 1):
        _count_step(session, step, random)
        age = step / (readings * (0.05 + 0.9 * (layers + 1) / num_layers))
        values = 1e-3 * np.exp(-6 * age) * random.uniform(0.9, 1.1, num_layers)
        for layer in range(num_layers):
            session.history.plasticity.append(step=step, layer=layer, value=float(values[layer]), generation=1)
    return session


def _count_step(session: Session, step: int, random: np.random.Generator) -> None:
    session.history.steps.append(
        step=step, epoch=step / 12, loss=0.2 + 2 * np.exp(-step / 50) + random.normal(0, 0.02), accuracy=0.5,
        learning_rate=0.05, samples=128 * step, num_frozen=0, step_seconds=0.01, monitor_seconds=0.0,
        train_flops=3e9, full_flops=3e9, elapsed_seconds=0.01 * step,
    )  # fmt: skip


def _what_if(rounds: int) -> Part:
    """Moves of the tuner's sliders on a long record: what a page waits for."""
    session = recorded(LAYERS, READINGS)
    tuner = Tuner(session)
    start = time.perf_counter()
    tuner.answer({"tolerance": 0.2})
    first = time.perf_counter() - start
    took, frozen = [], 0
    for move in range(rounds):
        start = time.perf_counter()
        answer = tuner.answer({"tolerance": 0.1 + 0.02 * move, "patience": 5 + move % 10})
        took.append(1e3 * (time.perf_counter() - start))
        frozen = max(frozen, answer["num_frozen"])
    session.close()
    row: dict[str, Any] = {
        "name": f"what-if, {LAYERS} layers × {READINGS:,} readings", "milliseconds": median(took),
        "p95_milliseconds": p95(took), "first_answer_milliseconds": 1e3 * first, "layers_frozen_at_most": frozen,
    }  # fmt: skip
    return [row], [goal("what-if answers, median milliseconds", row["milliseconds"], 100, "<=")]


def _same_steps() -> Part:
    """A record without a freeze and a real run with the tolerance that is tried: first freeze at the same step?"""
    wished: dict[str, Any] = {"interval_steps": 2, "window": 4, "patience": 3, "reference": "fp32", "refresh_evals": 20}
    tried = [0.3, 0.6, 1.0]
    recorded_run = _trained(Plasticity(tolerance=0.0, **wished))
    same, steps = [], []
    for tolerance in tried:
        real = _trained(Plasticity(tolerance=tolerance, **wished))
        frozen = [(event.step, event.layer) for event in real.events if isinstance(event, LayerFrozen)][:1]
        answer = recorded_run.what_if(tolerance=tolerance)
        replayed = [(one.step, one.layer) for one in answer.happenings if one.action == "freeze"][:1]
        same.append(frozen == replayed)
        steps.append(frozen[0][0] if frozen else None)
        real.close()
    recorded_run.close()
    row: dict[str, Any] = {
        "name": "what-if against real runs", "tolerances": str(tried), "first_freeze_steps": str(steps),
        "same_share": sum(same) / len(same),
    }  # fmt: skip
    return [row], [
        goal("first freeze of what-if and of a real run, share that is the same", row["same_share"], 1, ">=")
    ]


def _trained(rule: Plasticity) -> Session:
    session = Session("mlp", "digits", epochs=12, lr=0.05, seed=0, freeze=rule)
    session.run(progress=False)
    return session


class FakePage:
    """Stands for a browser: takes what the dashboard sends, counts it, acknowledges twice a second."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.messages = self.bytes = 0
        self._dashboard = dashboard
        self._answered_at = -1e9
        dashboard.comm.send = self._take
        self.say("hello")

    def say(self, kind: str, **more: object) -> None:
        """What the page's own code would send."""
        self._dashboard._handle_custom_msg({"kind": kind, "view": "bench", "visible": True, **more}, [])

    def _take(self, data: Any = None, metadata: Any = None, buffers: Any = None) -> None:
        self.messages += 1
        self.bytes += len(json.dumps(data, default=str)) + sum(len(part) for part in buffers or [])
        content = data.get("content", {}) if isinstance(data, dict) else {}
        if content.get("kind") == "frame":
            wait = max(0.0, self._answered_at + 0.5 - time.monotonic())
            self._answered_at = time.monotonic() + wait
            answer = threading.Timer(wait, self.say, ("ack",), {"seq": content["seq"], "draw_ms": 20.0})
            answer.daemon = True
            answer.start()


def _traffic(seconds: float) -> Part:
    """Bytes and messages a second for 20 layers, as new points come to a short and to a long history."""
    rows: list[dict[str, Any]] = []
    for length in HISTORIES:
        session = recorded(LAYERS_SENT, length)
        dashboard = Dashboard(session)
        page = FakePage(dashboard)
        random, end = np.random.default_rng(1), time.monotonic() + 2 + seconds
        start, before, step = None, (0, 0), length
        while (now := time.monotonic()) < end:
            step += 1
            _count_step(session, step, random)
            if step % 10 == 0:
                for layer in range(LAYERS_SENT):
                    session.history.plasticity.append(step=step, layer=layer, value=1e-5, generation=1)
            if start is None and now > end - seconds:  # the first frame, which is whole, is over
                start, before = now, (page.bytes, page.messages)
            time.sleep(0.02)
        spent = time.monotonic() - (start or end)
        dashboard.close()
        session.close()
        rows.append({
            "name": f"traffic, {LAYERS_SENT} layers, {length:,} steps before, 50 steps a second",
            "kilobytes_per_second": (page.bytes - before[0]) / spent / 1e3,
            "messages_per_second": (page.messages - before[1]) / spent,
        })  # fmt: skip
    sent = [row["kilobytes_per_second"] for row in rows]
    return rows, [
        goal("kB a second, most", max(sent), 15, "<="),
        goal("kB a second with the longest history, ratio to the shortest", sent[-1] / sent[0], 1.25, "<="),
        goal("messages a second, most", max(row["messages_per_second"] for row in rows), 4, "<="),
    ]  # fmt: skip


def _beside(rounds: int) -> Part:
    """Steps a second of processor time and of the clock, with the dashboard open and closed, in turn."""
    session = Session("mlp", "digits", epochs=100_000, seed=0, freeze=Plasticity(tolerance=0.0))
    session.start()
    time.sleep(1)
    found: dict[str, list[tuple[float, float]]] = {"open": [], "closed": []}
    for number in range(rounds):
        for name in ("open", "closed") if number % 2 else ("closed", "open"):
            dashboard = Dashboard(session) if name == "open" else None
            if dashboard is not None:
                FakePage(dashboard)
                time.sleep(1)
            found[name].append(_pace(session, 2.0))
            if dashboard is not None:
                dashboard.close()
            gc.collect()
    session.close()
    ratio = [[a[i] / b[i] for a, b in zip(found["open"], found["closed"], strict=True)] for i in (0, 1)]
    row: dict[str, Any] = {
        "name": "training beside the dashboard (no browser)",
        "steps_per_cpu_second_open": median(pace[0] for pace in found["open"]),
        "steps_per_cpu_second_closed": median(pace[0] for pace in found["closed"]),
        "cpu_ratio": median(ratio[0]), "clock_ratio": median(ratio[1]),
    }  # fmt: skip
    return [row], [goal("steps a kernel-CPU-second, open ÷ closed", row["cpu_ratio"], 0.97, ">=")]


def _pace(session: Session, seconds: float) -> tuple[float, float]:
    """Steps a second of this process's processor time, and of the clock."""
    steps, cpu, clock = session.steps_done, time.process_time(), time.perf_counter()
    time.sleep(seconds)
    made = session.steps_done - steps
    return made / (time.process_time() - cpu), made / (time.perf_counter() - clock)


def _commands(number: int) -> Part:
    """A slider's message in the widget's callback, to the event of the command, while training runs."""
    session = Session("mlp", "digits", epochs=100_000, seed=0, freeze=Plasticity(tolerance=0.0), undo_bytes=0)
    landed = threading.Event()
    end = session.subscribe(lambda _event: landed.set(), SettingChanged)
    dashboard = Dashboard(session)
    page = FakePage(dashboard)
    session.start()
    time.sleep(1)
    waited, called, late, pause = [], [], 0, np.random.default_rng(0)
    for move in range(number):
        time.sleep(float(pause.uniform(0.01, 0.05)))
        landed.clear()
        steps, start = session.steps_done, time.perf_counter()
        page.say("do", do="set", name="freeze.patience", value=2 + move % 30, layer=None, number=str(move))
        called.append(1e3 * (time.perf_counter() - start))
        landed.wait(10)
        waited.append(1e3 * (time.perf_counter() - start))
        late += session.events.of(SettingChanged)[-1].step > steps + 1
    end()
    dashboard.close()
    session.close()
    row: dict[str, Any] = {
        "name": "slider in the callback → event", "milliseconds": median(waited), "p95_milliseconds": p95(waited),
        "in_the_callback_p95_milliseconds": p95(called), "later_than_the_next_boundary": late, "moves": number,
    }  # fmt: skip
    return [row], [
        goal("callback to landing, p95 milliseconds", row["p95_milliseconds"], 60, "<="),
        goal("commands that landed later than at the next step boundary", late, 0, "<="),
    ]
