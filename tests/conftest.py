"""What every test may count on: one thread, untouched global state, a tiny model, tiny data, a quick session."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import egeria_lab as lab

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def clean_global_state() -> Iterator[None]:
    """One torch thread, seeded global generators, and nothing left behind for the next test."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    interrupt = signal.getsignal(signal.SIGINT)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    assert torch.get_default_dtype() == dtype, "a test left another default dtype"
    assert torch.is_grad_enabled() == grad, "a test left gradients switched on or off"
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    if threading.current_thread() is threading.main_thread():
        assert signal.getsignal(signal.SIGINT) is interrupt, "a test left a signal handler"
    left = [t.name for t in threading.enumerate() if t.name == "egeria-lab-trainer" and not _ends(t)]
    assert not left, "a test left a training thread running"


def _ends(thread: threading.Thread) -> bool:
    thread.join(timeout=60)
    return not thread.is_alive()


class TinyNet(nn.Module):
    """Linear, batch norm, ReLU, dropout, twice, then a linear head; 6 features, 3 classes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.second(self.first(x)))
        return out


def build_tiny_model(dropout: float = 0.0, seed: int = 0) -> TinyNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyNet(dropout)


def build_tiny_data(num_samples: int = 64, num_valid: int = 24) -> lab.Data:
    return lab.data.load("synthetic", num_samples=num_samples, num_valid=num_valid, shape=(6,), num_classes=3)


@pytest.fixture
def tiny_model() -> Callable[..., TinyNet]:
    """Builds a tiny model with batch norm and dropout; the same seed gives the same weights."""
    return build_tiny_model


@pytest.fixture
def tiny_data() -> lab.Data:
    """64 training and 24 validation samples of 6 features in 3 classes."""
    return build_tiny_data()


@pytest.fixture
def make_session() -> Iterator[Callable[..., lab.Session]]:
    """Builds quick sessions (8 steps an epoch) and closes them at the end of the test."""
    made: list[lab.Session] = []

    def make(**options: Any) -> lab.Session:
        dropout = options.pop("dropout", 0.0)
        model = options.pop("model", None)
        data = options.pop("data", None)
        settings: dict[str, Any] = {"batch_size": 8, "epochs": 50, "freeze": None, "lr": 0.05}
        session = lab.Session(
            build_tiny_model(dropout) if model is None else model,
            build_tiny_data() if data is None else data,
            **{**settings, **options},
        )
        made.append(session)
        return session

    yield make
    for session in made:
        session.close()


@pytest.fixture
def losses() -> Callable[[lab.Session], list[float]]:
    """The loss of every finished step of a session, exactly."""
    return lambda session: [float(x) for x in session.history["steps"]["loss"]]


@pytest.fixture
def tensors() -> Callable[[nn.Module], dict[str, torch.Tensor]]:
    """A copy of every parameter and buffer of a module, by name."""
    return lambda module: {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
