"""Processes that read data are forked while other threads work: none of them may hold torch's seeding lock then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import egeria_lab as lab


def test_nothing_that_a_session_does_takes_the_lock_of_a_lazy_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader process seeds torch when it begins; forked from a process whose other thread seeds, it would hang."""
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda *given, **named: taken.append((given, named)))
    monkeypatch.setattr("torch.cuda.random._lazy_call", lambda *given, **named: taken.append((given, named)))
    torch.manual_seed(torch.initial_seed())
    assert taken, "torch.manual_seed no longer goes through torch.cuda._lazy_call: watch what it goes through now"
    taken.clear()

    rule = lab.Plasticity(
        interval_steps=2, window=2, patience=1, tolerance=5.0, bootstrap_change=5.0, bootstrap_epochs=0
    )
    session = lab.Session(
        "mlp", "digits", epochs=10, freeze=rule, sieve=lab.CirculantSieve(), cache=lab.ActivationCache()
    )
    session.step(30)
    assert session.layers.frozen
    second = session.fork()
    second.step()
    session.evaluate()
    session.attribute([1], method="gradient_shap")
    session.undo()
    session.export()
    second.close()
    session.close()
    assert taken == []
