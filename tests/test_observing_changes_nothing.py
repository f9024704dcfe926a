"""traps rows 81 and 82 and the fourth rule of the house: whoever watches may not change what it watches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import egeria_lab as lab
from egeria_lab.events import EpochFinished, Event, SubscriberFailed

Make = Callable[..., lab.Session]
Losses = Callable[[lab.Session], list[float]]

STEPS = 30


@pytest.fixture
def plain(make_session: Make, losses: Losses) -> list[float]:
    """The loss trace of a run that nobody looks at."""
    session = make_session(dropout=0.3)
    session.step(STEPS)
    return losses(session)


def other_loader() -> None:
    data = TensorDataset(torch.randn(20, 2))
    for _ in DataLoader(data, batch_size=4, shuffle=True):
        pass


WATCHERS: dict[str, Callable[[lab.Session], object]] = {
    "evaluate": lambda s: s.evaluate(),
    "evaluate on training data": lambda s: s.evaluate(s.data.train),
    "evaluate with a shuffled loader": lambda s: s.evaluate(DataLoader(s.data.valid, 5, shuffle=True)),  # type: ignore[arg-type]
    "another loader": lambda s: other_loader(),
    "the global generators": lambda s: (torch.manual_seed(0), random.random(), np.random.rand(3)),
    "savings": lambda s: repr(s.savings()),
    "explain": lambda s: [s.explain(name) for name in s.layers.names],
    "tables": lambda s: (repr(s), repr(s.layers), repr(s.events), s.history.frame("steps"), s.settings()),
    "layers": lambda s: lab.layers(s.model, torch.randn(2, 6)),
    "the example batch": lambda s: s._train_source.example(4),
    "a forward pass in eval mode": lambda s: (s.model.eval(), s.model(torch.randn(4, 6)), s.model.train()),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_watching_after_every_step_changes_no_bit(
    make_session: Make, losses: Losses, plain: list[float], watcher: str
) -> None:
    session = make_session(dropout=0.3)
    for _ in range(STEPS):
        WATCHERS[watcher](session)
        session.step()
    assert losses(session) == plain


def test_watching_while_a_layer_is_frozen_changes_no_bit(make_session: Make, losses: Losses) -> None:
    quiet, watched = make_session(dropout=0.3), make_session(dropout=0.3)
    for session in (quiet, watched):
        session.step(5)
        session.freeze("first")
        session.step(5)
        if session is watched:
            for watch in WATCHERS.values():
                watch(session)
        session.thaw("first")
        session.step(5)
    assert losses(watched) == losses(quiet)


@pytest.mark.parametrize("distance", ["sp", "cka", "cosine", "relative_l2"])
def test_reading_plasticity_changes_no_bit_while_nothing_freezes(
    make_session: Make, losses: Losses, plain: list[float], distance: str
) -> None:
    rule = lab.Plasticity(
        distance=distance, interval_steps=1, window=2, patience=1, tolerance=0, monitor_budget=1.0, refresh_evals=5
    )
    session = make_session(dropout=0.3, freeze=rule)
    session.step(STEPS)
    assert losses(session) == plain
    assert len(session.history["plasticity"]) == 3 * (STEPS - 1)  # a reading is on record at the one after it
    assert session.layers.frozen == ()


def test_a_seldom_read_layer_changes_no_decision_about_the_front(make_session: Make, losses: Losses) -> None:
    """A small monitoring budget reads the layers behind the front less often, and nothing else differs."""
    traces = []
    for budget in (1.0, 0.02):
        rule = lab.Plasticity(
            interval_steps=2,
            window=3,
            patience=2,
            bootstrap_change=0.9,
            tolerance=2.0,
            monitor_budget=budget,
            max_frozen=0.34,
        )
        session = make_session(freeze=rule, lr=0.01)
        session.step(100)
        frame = session.history.frame("plasticity")
        traces.append((losses(session), frame.query("layer == 'first'")["value"].tolist(), len(frame)))
    assert traces[0][:2] == traces[1][:2]
    assert traces[0][2] > traces[1][2]


def test_subscribers_change_no_bit(make_session: Make, losses: Losses, plain: list[float]) -> None:
    session = make_session(dropout=0.3)
    seen: list[Event] = []

    def busy(event: Event) -> None:
        seen.append(event)
        torch.randn(5)
        session.evaluate()

    session.subscribe(busy)
    session.subscribe(lambda e: None, EpochFinished)
    session.step(STEPS)
    assert losses(session) == plain
    assert [type(e) for e in seen] == [EpochFinished] * (STEPS // 8)


def test_a_failing_subscriber_is_detached_reported_and_changes_no_bit(
    make_session: Make, losses: Losses, plain: list[float]
) -> None:
    session = make_session(dropout=0.3)
    calls = []

    def broken(_event: Event) -> None:
        calls.append(1)
        raise ValueError("my plot broke")

    session.subscribe(broken)
    session.step(STEPS)
    assert losses(session) == plain
    assert calls == [1]
    failed = session.events.of(SubscriberFailed)
    assert len(failed) == 1
    assert isinstance(failed[0], SubscriberFailed)
    assert failed[0].error == "ValueError: my plot broke"
    assert "broken" in failed[0].subscriber
    assert failed[0].step == 8


def test_validation_with_dropout_and_noise_changes_no_bit(make_session: Make, losses: Losses) -> None:
    """A model that draws in eval mode too."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            out: torch.Tensor = self.head(hidden + 0.1 * torch.randn_like(hidden))
            return out

    quiet = make_session(model=Noisy())
    watched = make_session(model=Noisy(), freeze=lab.Plasticity(interval_steps=1, tolerance=0, monitor_budget=1.0))
    quiet.step(20)
    for _ in range(20):
        assert watched.evaluate() == watched.evaluate()
        watched.step()
    assert losses(watched) == losses(quiet)


def test_random_augmentation_is_repeatable_and_not_disturbed(make_session: Make, losses: Losses) -> None:
    """A data set that draws from torch, NumPy and random in __getitem__; three sources, one trace."""

    class Augmented:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            noise = torch.rand(6) + float(np.random.rand()) + random.random()
            return noise + index % 3, index % 3

    traces = []
    for watch in (False, True):
        session = make_session(data=(Augmented(), Augmented()))
        for number in range(12):
            if watch:
                torch.manual_seed(number)
                np.random.seed(number)
                random.seed(number)
                session.evaluate()
            session.step()
        traces.append(losses(session))
    assert traces[0] == traces[1]
    assert len(set(traces[0])) == 12


def test_measuring_memory_and_flops_changes_no_bit(make_session: Make, losses: Losses, plain: list[float]) -> None:
    """The first step of each frozen set is measured; without measuring the trace is the same."""
    session = make_session(dropout=0.3)
    session.recorder._measured[()] = 1  # measured already: it is not done again
    session.step(STEPS)
    assert losses(session) == plain


def test_nothing_is_left_in_the_model_by_watching(make_session: Make) -> None:
    """traps row 132."""
    session = make_session(dropout=0.3, freeze=lab.Plasticity(interval_steps=1))
    attributes = {name: sorted(module.__dict__) for name, module in session.model.named_modules()}
    for watch in WATCHERS.values():
        watch(session)
        session.step()
    assert {name: sorted(module.__dict__) for name, module in session.model.named_modules()} == attributes
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in session.model.modules()]
    assert sum(hooks) == 0


def test_looking_never_runs_the_model(make_session: Callable[..., lab.Session]) -> None:
    """A view asks from its own thread: whatever it asks for, the model stands still meanwhile."""
    session = make_session()
    calls: list[int] = []
    handle = session.model.register_forward_pre_hook(lambda _module, _inputs: calls.append(1))
    for _ in range(2):
        calls.clear()
        for look in (session.savings, session.settings, lambda: repr(session.layers), lambda: repr(session.savings())):
            look()
        for name in session.layers.names:
            session.explain(name)
        session.savings().to_dict()
        session.history.frame("steps")
        assert calls == []
        session.step(3)
        session.freeze(session.layers.names[0])
        session.step(1)
    handle.remove()
