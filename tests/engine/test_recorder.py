"""What is counted and measured in a session, against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import egeria_lab as lab
from egeria_lab.engine import recorder

Make = Callable[..., lab.Session]


def tanh_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def rows(count: int = 40) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4), torch.randint(0, 3, (count,)))


# FLOPs a sample: forward 2 × (32 + 48 + 18); backward without the first layer's input gradient.
FORWARD = 2 * (32 + 48 + 18)
FULL = FORWARD + 2 * (32 + 2 * 48 + 2 * 18)
FIRST_FROZEN = FORWARD + 2 * (48 + 2 * 18)
HOLE = FORWARD + 2 * (32 + 48 + 2 * 18)
# Bytes kept for backward a sample: both tanh outputs, the log-softmax; and one float of the loss a batch.
KEPT, KEPT_FROZEN = 4 * (8 + 6 + 3), 4 * (8 + 6 + 3)
KEPT_TWO_FROZEN = 4 * (6 + 3)


def test_flops_by_hand_through_freezing(make_session: Make) -> None:
    session = make_session(model=tanh_net(), data=(rows(), rows()))
    session.step(3)
    session.freeze("0")
    session.step(2)
    session.thaw("0")
    session.freeze("2")
    session.step(1)
    steps = session.history["steps"]
    assert steps["train_flops"].tolist() == [8.0 * x for x in (FULL, FULL, FULL, FIRST_FROZEN, FIRST_FROZEN, HOLE)]
    assert steps["full_flops"].tolist() == [8.0 * FULL] * 6
    executed = 3 * FULL + 2 * FIRST_FROZEN + HOLE
    plain = session.savings().to_dict()
    assert plain["flops"]["executed"] == 8 * executed
    assert plain["flops"]["without_freezing"] == 8 * 6 * FULL
    assert plain["flops"]["saved_fraction"] == pytest.approx(1 - executed / (6 * FULL))
    assert [layer["frozen_steps"] for layer in plain["layers"]] == [2, 1, 0]
    assert [layer["state"] for layer in plain["layers"]] == ["active", "frozen", "active"]


def test_kept_bytes_by_hand_measured_and_predicted(make_session: Make) -> None:
    session = make_session(model=tanh_net(), data=(rows(), rows()))
    session.step(1)
    full = 8 * KEPT + 4
    ledger = session.savings()
    assert ledger.book.full_saved_bytes == ledger.book.saved_bytes == full
    assert ledger.memory_saved_fraction == 0
    session.freeze("0")
    session.freeze("2")
    session.step(1)
    ledger = session.savings()
    frozen = 8 * KEPT_TWO_FROZEN + 4
    assert ledger.book.saved_bytes == frozen
    assert ledger.memory_saved_fraction == pytest.approx(1 - frozen / full)
    assert ledger.memory_predicted_fraction == pytest.approx(1 - frozen / full)
    session.thaw("2")
    session.thaw("0")
    session.step(1)
    assert session.savings().memory_saved_fraction == 0


def test_a_frozen_hole_saves_no_memory_and_says_why(make_session: Make) -> None:
    """traps row 69."""
    session = make_session(model=tanh_net(), data=(rows(), rows()))
    session.step(1)
    session.freeze("2")
    session.step(1)
    ledger = session.savings()
    assert ledger.memory_predicted_fraction == 0
    assert "trainable layers lie before" in ledger.why()["memory"]


def test_samples_and_times_are_totals(make_session: Make) -> None:
    session = make_session(model=tanh_net(), data=(rows(20), rows()), batch_size=8)
    session.step(6)  # 8, 8, 4 an epoch
    steps = session.history["steps"]
    assert steps["samples"].tolist() == [8, 16, 20, 28, 36, 40]
    assert steps["train_flops"].tolist() == [FULL * n for n in (8, 8, 4, 8, 8, 4)]
    assert np.all(steps["step_seconds"] > 0)
    assert np.all(steps["monitor_seconds"] >= 0)
    assert steps["elapsed_seconds"][-1] == pytest.approx(
        float((steps["step_seconds"] + steps["monitor_seconds"]).sum())
    )
    book = session.savings().book
    assert book.steps == 6
    assert book.train_seconds == pytest.approx(float(steps["step_seconds"].sum()))
    assert book.full_steps == 6
    assert book.full_step_seconds == steps["step_seconds"][5:].tolist()
    assert book.frozen_seconds == 0


def test_the_savings_table_gets_a_row_at_each_new_frozen_set_and_every_tenth_step(make_session: Make) -> None:
    session = make_session(model=tanh_net(), data=(rows(), rows()))
    session.step(12)
    session.freeze("0")
    session.step(3)
    assert session.history["savings"]["step"].tolist() == [1, 10, 13]
    assert session.history["savings"]["flops_saved_fraction"].tolist()[0] == 0
    assert session.history["savings"]["flops_saved_fraction"][-1] > 0


def test_a_ledger_before_the_first_step(make_session: Make) -> None:
    session = make_session(model=tanh_net(), data=(rows(), rows()))
    plain = session.savings().to_dict()
    assert plain["steps"] == 0
    assert plain["flops"]["saved_fraction"] == 0
    assert plain["time"]["measured_saved_fraction"] is None
    assert plain["memory"]["saved_fraction"] is None
    assert plain["flops"]["why"] == "no layer has been frozen yet"
    assert [layer["forward_flops"] for layer in plain["layers"]] == [64, 96, 36]
    repr(session.savings())


def test_weights_that_their_owner_froze_are_no_saving_of_ours(make_session: Make) -> None:
    model = tanh_net()
    model[0].requires_grad_(False)
    session = make_session(model=model, data=(rows(), rows()))
    session.step(2)
    assert session.history["steps"]["train_flops"].tolist() == [8.0 * FIRST_FROZEN] * 2
    assert session.savings().book.flops_saved_fraction == 0
    session.freeze("0")
    session.step(2)
    assert session.savings().book.flops_saved_fraction == 0


def test_each_frozen_set_is_measured_and_counted_once(make_session: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """traps row 133: watching may not make training crawl."""
    made = {"measured": 0, "counted": 0}
    measure, count = recorder.measure_saved_tensors, recorder.count_flops

    def measuring(*args: Any) -> Any:
        made["measured"] += 1
        return measure(*args)

    def counting(*args: Any) -> Any:
        made["counted"] += 1
        return count(*args)

    monkeypatch.setattr(recorder, "measure_saved_tensors", measuring)
    monkeypatch.setattr(recorder, "count_flops", counting)
    session = make_session(model=tanh_net(), data=(rows(), rows()))
    for _ in range(3):
        session.step(3)
        session.freeze("0")
        session.step(3)
        session.thaw("0")
    assert made == {"measured": 2, "counted": 2}


def test_a_baseline_run_beside_it_is_what_time_is_measured_against(make_session: Make) -> None:
    """One output never holds two different measured times: ledger, report and demo use the same figure."""
    session = make_session()
    session.step(20)
    book = session.recorder.book
    book.baseline_seconds = 2 * (book.train_seconds + book.monitor_seconds)
    ledger = session.savings()
    assert ledger.to_dict()["time"]["measured_saved_fraction"] == pytest.approx(0.5)
    session.freeze("first")
    session.step()
    assert "beside the same run without freezing" in session.savings().why()["time"]
