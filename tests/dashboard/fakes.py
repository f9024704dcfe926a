"""A session that trains nothing: realistic numbers and events, made by the rule's arithmetic in miniature."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from egeria_lab.commands import Command, CommandQueue
from egeria_lab.events import (
    BootstrapFinished,
    CommandRejected,
    EpochFinished,
    EventLog,
    LayerFrozen,
    LayerPinned,
    LayerThawed,
    ReferenceRefreshed,
    RunPaused,
    RunResumed,
    RunStarted,
    RunStopped,
    SettingChanged,
)
from egeria_lab.history import VERDICTS, History

TITLES = ("stem", "stage 1 block 0", "stage 2 block 0", "stage 3 block 0")


@dataclass
class FakeLayer:
    """A row of `session.layers`."""

    name: str
    title: str
    state: str = "active"
    since_step: int | None = None
    reason: str = ""
    by: str = ""
    num_parameters: int = 1000


@dataclass
class FakeSetting:
    """A row of `session.settings()`."""

    name: str
    value: object
    default: object
    low: float | None = None
    high: float | None = None
    unit: str = ""
    log_scale: bool = False
    integer: bool = False
    per_layer: bool = False
    applies: str = "next plasticity reading"
    help: str = ""


class FakeRing:
    """What `session.undo_ring` tells."""

    def __init__(self) -> None:
        self.done: list[Command] = []
        self.back: list[Command] = []

    def commands(self) -> list[Command]:
        return self.done

    def undone(self) -> list[Command]:
        return self.back

    def why_nothing(self) -> str:
        return "" if self.done else "no command that did something is remembered"


class FakeLedger:
    """What `session.savings()` returns."""

    def __init__(self, content: dict[str, object]) -> None:
        self._content = content

    def to_dict(self) -> dict[str, object]:
        return self._content


@dataclass
class FakeSession:
    """Has the attributes that the pictures read."""

    history: History
    events: EventLog
    layers: list[FakeLayer]
    ledger: dict[str, object]
    name: str = "resnet8 on fashion-mini"
    state: str = "finished"
    error: BaseException | None = None
    planned_steps: int = 0
    steps_per_epoch: int = 47
    device: str = "cpu"
    sieve: object = None
    commands: CommandQueue = field(default_factory=CommandQueue)
    overrides: dict[tuple[str, str], float] = field(default_factory=dict)
    undo_ring: FakeRing = field(default_factory=FakeRing)
    _arguments: dict[str, object] = field(default_factory=dict)

    @property
    def steps_done(self) -> int:
        return int(self.history.steps.last().get("step", 0))

    @property
    def epoch(self) -> float:
        return self.history.steps.last().get("epoch", 0.0)

    def settings(self) -> list[FakeSetting]:
        return [
            FakeSetting("freeze.tolerance", 0.35, 0.2, 0.001, 10, "× first slopes", True, per_layer=True,
                        help="Freeze a layer when its slope falls below this share of its first slopes."),
            FakeSetting("freeze.patience", 10, 10, 1, 100, "readings", integer=True,
                        help="... for this many readings in a row."),
            FakeSetting("freeze.max_frozen", None, None, help="Most layers that a rule may freeze."),
        ]  # fmt: skip

    def setting(self, name: str, layer: str | None = None) -> object:
        own = self.overrides.get((name, layer or ""))
        return own if own is not None else next(s.value for s in self.settings() if s.name == name)

    def savings(self) -> FakeLedger:
        return FakeLedger(self.ledger)


def empty_session(num_layers: int = 5) -> FakeSession:
    """A session that has not made a step."""
    layers = [FakeLayer(f"layers.{i}", _title(i, num_layers)) for i in range(num_layers)]
    ledger: dict[str, object] = {
        "steps": 0,
        "flops": {"executed": 0, "without_freezing": 0, "saved_fraction": None, "why": "no step yet"},
        "time": {"train_seconds": 0.0, "monitor_seconds": 0.0, "predicted_saved_fraction": None,
                 "measured_saved_fraction": None, "monitor_fraction": None, "why": "no step yet"},
        "memory": {"saved_tensor_bytes": 0, "full_saved_tensor_bytes": 0, "saved_fraction": None,
                   "theoretical_saved_fraction": None, "why": "no step yet"},
        "layers": [],
    }  # fmt: skip
    return FakeSession(History([row.name for row in layers]), EventLog(), layers, ledger, state="idle")


def _title(index: int, num_layers: int) -> str:
    return "head" if index == num_layers - 1 else TITLES[index] if index < len(TITLES) else f"block {index}"


class _Story:
    """Writes one run, step by step, into a fake session."""

    def __init__(self, num_layers: int, steps: int, per_epoch: int, seed: int) -> None:
        self.session = empty_session(num_layers)
        self.session.planned_steps, self.session.steps_per_epoch = steps, per_epoch
        self.random = np.random.default_rng(seed)
        self.steps, self.interval, self.generation = steps, 10, 0
        self.window = self.patience = max(3, min(10, steps // (30 * num_layers)))
        self.values: list[list[float]] = [[] for _ in range(num_layers)]
        self.smooth: list[list[float]] = [[] for _ in range(num_layers)]
        self.slopes: list[list[float]] = [[] for _ in range(num_layers)]
        self.tolerance: list[float | None] = [None] * num_layers
        self.stable = [0] * num_layers
        self.elapsed = 0.0
        self.settled = steps // 6

    def frozen(self) -> list[int]:
        return [i for i, row in enumerate(self.session.layers) if row.state == "frozen"]

    def freeze(self, step: int, index: int, by: str, reason: str, slope: float | None = None) -> None:
        row = self.session.layers[index]
        row.state, row.since_step, row.by, row.reason = "frozen", step, by, reason
        event = LayerFrozen(
            step=step, by=by, layer=row.name, slope=slope, tolerance=self.tolerance[index], reason=reason
        )
        self.session.events.append(event)
        self.refresh(step, f"{row.name} froze")

    def thaw(self, step: int, index: int, by: str, reason: str) -> None:
        row = self.session.layers[index]
        row.state, row.since_step, row.by, row.reason = "active", step, by, reason
        self.session.events.append(LayerThawed(step=step, by=by, layer=row.name, reason=reason))
        self.refresh(step, f"{row.name} thawed")

    def refresh(self, step: int, reason: str) -> None:
        self.generation += 1
        for lists in (self.values, self.smooth, self.slopes):
            for one in lists:
                one.clear()
        self.session.events.append(
            ReferenceRefreshed(step=step, generation=self.generation, engine="fp32", reason=reason)
        )

    def train(self, step: int) -> None:
        done, per_epoch = step / self.steps, self.session.steps_per_epoch
        share = 0.62 * sum(1 / len(self.session.layers) for _ in self.frozen())
        seconds = 0.05 * (1 - 0.8 * share) * self.random.uniform(0.9, 1.2)
        monitor = 0.012 if step % self.interval == 0 else 0.0
        self.elapsed += seconds + monitor
        loss = 0.35 + 1.95 * np.exp(-7 * done) + self.random.normal(0, 0.06)
        accuracy = float(np.clip(0.90 - 0.8 * np.exp(-7 * done) + self.random.normal(0, 0.03), 0, 1))
        self.session.history.steps.append(
            step=step, epoch=step / per_epoch, loss=loss, accuracy=accuracy, samples=128 * step,
            learning_rate=0.05 * (1 + np.cos(np.pi * done)), num_frozen=len(self.frozen()),
            step_seconds=seconds, monitor_seconds=monitor, train_flops=3e9 * (1 - share), full_flops=3e9,
            elapsed_seconds=self.elapsed,
        )  # fmt: skip

    def read(self, step: int) -> None:
        for index, row in enumerate(self.session.layers):
            if row.state == "frozen":
                continue
            depth = (index + 1) / len(self.session.layers)
            level = 3e-4 * depth * np.exp(-5 * (step / self.steps) / depth**0.7) + 2e-7
            age = len(self.values[index])
            value = level * (1 - np.exp(-(age + 1) / 6)) * np.exp(self.random.normal(0, 0.15))
            self._reading(step, index, float(value))

    def _reading(self, step: int, index: int, value: float) -> None:
        values, smooth, slopes = self.values[index], self.smooth[index], self.slopes[index]
        values.append(value)
        smooth.append(float(np.mean(values[-self.window :])))
        slope = None
        if len(smooth) >= self.window:
            slope = abs(float(np.polyfit(np.arange(self.window), smooth[-self.window :], 1)[0]))
            slopes.append(slope)
            if self.tolerance[index] is None and len(slopes) == 5:
                self.tolerance[index] = 0.35 * float(np.mean(slopes))
        bound = self.tolerance[index]
        quiet = slope is not None and bound is not None and slope < bound
        self.stable[index] = self.stable[index] + 1 if quiet else 0
        verdict = "warming up" if slope is None else "stable" if quiet else "moving"
        self.session.history.plasticity.append(
            step=step, layer=index, value=value, smoothed=smooth[-1], slope=slope, tolerance=bound,
            stable=self.stable[index], verdict=VERDICTS.index(verdict), generation=self.generation,
        )  # fmt: skip

    def decide(self, step: int) -> None:
        front = next((i for i, row in enumerate(self.session.layers[:-1]) if row.state == "active"), None)
        if front is None or step < self.settled or self.stable[front] < self.patience:
            return
        slope, bound = self.slopes[front][-1], self.tolerance[front]
        self.stable[front] = 0
        reason = f"slope {slope:.1e} < tolerance {bound:.1e} for {self.patience} of {self.patience} readings"
        self.freeze(step, front, "rule", reason, slope)

    def epoch(self, step: int) -> None:
        steps, per_epoch = self.session.history.steps, self.session.steps_per_epoch
        number, loss = step // per_epoch, float(np.mean(steps["loss"][-per_epoch:]))
        accuracy = float(np.mean(steps["accuracy"][-per_epoch:]))
        figures = {"train_loss": loss, "train_accuracy": accuracy, "valid_loss": loss + 0.03,
                   "valid_accuracy": accuracy - 0.012}  # fmt: skip
        self.session.history.epochs.append(epoch=number, step=step, seconds=2.5, **figures)
        self.session.events.append(EpochFinished(step=step, epoch=number, **figures))

    def account(self, step: int) -> None:
        rows = self.session.history.steps.rows()
        flops = 1 - rows["train_flops"].sum() / rows["full_flops"].sum()
        watching = rows["monitor_seconds"].sum() / self.elapsed
        full, held = 41_000_000.0, 41_000_000.0 * (1 - 0.9 * len(self.frozen()) / len(self.session.layers))
        self.session.history.savings.append(
            step=step, flops_saved_fraction=flops, time_saved_fraction=0.8 * flops - watching,
            saved_tensor_bytes=held, full_saved_tensor_bytes=full, monitor_fraction=watching,
        )  # fmt: skip
        self.session.ledger = {
            "steps": step,
            "flops": {"executed": float(rows["train_flops"].sum()),
                      "without_freezing": float(rows["full_flops"].sum()), "saved_fraction": float(flops),
                      "why": "" if flops else "nothing has been frozen for a whole step"},
            "time": {"train_seconds": self.elapsed, "monitor_seconds": float(rows["monitor_seconds"].sum()),
                     "predicted_saved_fraction": 0.8 * float(flops),
                     "measured_saved_fraction": float(0.8 * flops - watching),
                     "monitor_fraction": float(watching), "why": ""},
            "memory": {"saved_tensor_bytes": held, "full_saved_tensor_bytes": full,
                       "saved_fraction": 1 - held / full,
                       "theoretical_saved_fraction": 1 - held / full, "why": ""},
            "layers": [{"name": row.name, "parameters": row.num_parameters, "forward_flops": 1e9 / (i + 1),
                        "backward_flops": 2e9 / (i + 1), "state": row.state, "frozen_steps": 0}
                       for i, row in enumerate(self.session.layers)],
        }  # fmt: skip


def told_session(num_layers: int = 5, steps: int = 1400, per_epoch: int = 140, seed: int = 3) -> FakeSession:
    """A run with everything in it: bootstrapping, freezes by rule and hand, a thaw, a pin, a slider.

    Args:
        num_layers: layer modules, >= 3.
        steps: length of the run, >= 100.
        per_epoch: steps an epoch.
        seed: of the noise.
    """
    story = _Story(num_layers, steps, per_epoch, seed)
    session, log = story.session, story.session.events
    log.append(RunStarted(step=0, planned_steps=steps, device="cpu", threads=1))
    story.refresh(0, "start of the run")
    for index, row in enumerate(session.layers):
        row.num_parameters = 448 * 4 ** min(index, 5)
    for step in range(1, steps + 1):
        story.train(step)
        if step % story.interval == 0:
            story.read(step)
            story.decide(step)
            story.account(step)
        if step % per_epoch == 0:
            story.epoch(step)
        _act(story, step)
    session.state = "finished"
    log.append(RunStopped(step=steps, reason="the budget is used up"))
    return session


def _act(story: _Story, step: int) -> None:
    """What the user does, and when, as a share of the run."""
    session, log, steps = story.session, story.session.events, story.steps
    moment = {round(share * steps): name for share, name in (
        (1 / 6, "settled"), (0.25, "pin"), (0.3, "slider"), (0.4, "pause"), (0.36, "hand"),
        (0.75, "thaw"), (0.8, "no"),
    )}.get(step)  # fmt: skip
    pinned, by_hand = len(session.layers) - 2, 1 if len(session.layers) == 3 else len(session.layers) - 3
    match moment:
        case "settled":
            log.append(BootstrapFinished(step=step, loss_change=0.083))
        case "pin" if len(session.layers) > 3:
            session.layers[pinned].state, session.layers[pinned].since_step = "pinned", step
            session.layers[pinned].by = "dashboard"
            log.append(LayerPinned(step=step, by="dashboard", layer=session.layers[pinned].name))
        case "slider":
            session.overrides[("freeze.tolerance", "layers.1")] = 0.05
            log.append(SettingChanged(step=step, by="dashboard", name="freeze.tolerance", old=0.2, new=0.35))
        case "pause":
            log.append(RunPaused(step=step, by="user"))
            log.append(RunResumed(step=step, by="user"))
        case "hand" if session.layers[by_hand].state == "active":
            story.freeze(step, by_hand, "user", "asked for; trainable layers lie before it")
        case "thaw" if story.frozen():
            story.thaw(step, story.frozen()[0], "dashboard", "asked for")
        case "no":
            log.append(
                CommandRejected(step=step, by="user", command="freeze", reason="the head is the last trainable layer")
            )
