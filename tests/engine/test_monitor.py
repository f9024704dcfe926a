"""Readings: when, of which layers, on which rows, against which snapshot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import egeria_lab as lab
from egeria_lab.events import ReferenceRefreshed

Make = Callable[..., lab.Session]


def rule(**settings: Any) -> lab.Plasticity:
    return lab.Plasticity(**{"interval_steps": 3, "tolerance": 0, "monitor_budget": 1.0, **settings})


def test_a_reading_every_interval_of_every_active_layer(make_session: Make) -> None:
    session = make_session(freeze=rule())
    session.step(10)
    frame = session.history.frame("plasticity")
    assert frame["step"].tolist() == [3] * 3 + [6] * 3 + [9] * 3
    assert frame["layer"].tolist() == ["first", "second", "head"] * 3
    session.override("freeze.interval_steps", 5)
    session.step(10)
    assert sorted(set(session.history.frame("plasticity")["step"])) == [3, 6, 9, 15, 20]


def test_right_after_a_snapshot_the_distance_is_zero_and_then_it_grows(make_session: Make) -> None:
    session = make_session(freeze=rule(interval_steps=1))
    session.step(6)
    values = session.history.frame("plasticity").query("layer == 'second'")["value"].tolist()
    assert values[0] == 0
    assert all(value > 0 for value in values[1:])
    assert values[-1] > values[1]


def test_the_value_is_the_distance_of_the_two_models_on_the_first_rows(make_session: Make) -> None:
    """By hand: SP distance between the snapshot of step 3 and the model of step 6, both in eval mode, 5 rows."""
    session = make_session(freeze=rule(probe_rows=5), dropout=0.3)
    session.step(3)
    snapshot = {name: tensor.clone() for name, tensor in session.model.state_dict().items()}
    session.step(3)
    batch = list(session._train_source.epoch(0))[5].content[0][:5]
    live = {name: tensor.clone() for name, tensor in session.model.state_dict().items()}

    def output(state: dict[str, Tensor]) -> Tensor:
        session.model.load_state_dict(state)
        session.model.eval()
        with torch.no_grad():
            out: Tensor = session.model.first(batch)  # type: ignore[operator]
        session.model.train()
        return out

    expected = lab.sp_distance(output(live), output(snapshot))
    got = session.history.frame("plasticity").query("layer == 'first' and step == 6")["value"].iloc[0]
    assert got == float(expected)
    session.model.load_state_dict(live)


def test_the_front_is_read_every_time_and_others_as_the_budget_allows(make_session: Make) -> None:
    """A reading of 8 of 8 rows costs 2 forward passes; with one every step the training costs about 3."""
    session = make_session(freeze=rule(interval_steps=1, monitor_budget=0.2))
    session.step(24)
    frame = session.history.frame("plasticity")
    counts = frame["layer"].value_counts()
    assert counts["first"] == 24
    assert counts["second"] == counts["head"]
    flops = session.recorder.flops(())
    ratio = 2 * sum(flops.forward) / flops.total
    every = int(np.ceil(ratio / 0.2))
    assert counts["second"] == 24 // every
    session.freeze("first")
    session.step(8)
    later = session.history.frame("plasticity").query("step > 24")["layer"].value_counts()
    assert later["second"] == 8  # it is the front now
    assert "first" not in later


def test_a_snapshot_is_replaced_after_its_readings_and_after_each_change(make_session: Make) -> None:
    session = make_session(freeze=rule(interval_steps=1, window=2, patience=2, refresh_evals=6))
    session.step(14)
    session.freeze("first")
    session.step(1)
    session.thaw("first")
    session.step(1)
    refreshed = session.events.of(ReferenceRefreshed)
    assert [e.step for e in refreshed] == [1, 7, 13, 15, 16]
    assert [e.generation for e in refreshed] == [1, 2, 3, 4, 5]  # type: ignore[attr-defined]
    reasons = [e.reason for e in refreshed]  # type: ignore[attr-defined]
    assert reasons[1] == "6 readings were made against the last one"
    assert reasons[3:] == ["first was frozen", "first was thawed"]
    frame = session.history.frame("plasticity").query("layer == 'head'")
    assert frame["generation"].tolist() == [1] * 6 + [2] * 6 + [3] * 2 + [4, 5]


def test_one_reading_a_step_with_gradient_checkpointing(make_session: Make) -> None:
    """traps rows 53, 55: recomputation fires hooks again; a reading counts once, and freezing still works."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
            self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.first, x, use_reentrant=False)
            out: Tensor = self.head(checkpoint(self.second, hidden, use_reentrant=False))
            return out

    session = make_session(model=Checkpointed(), freeze=rule(interval_steps=1))
    session.step(4)
    assert len(session.history["plasticity"]) == 12
    session.freeze("first.0" if "first.0" in session.layers.names else "first")
    before = session.model.first[0].weight.detach().clone()  # type: ignore[index,union-attr,operator]
    second = session.model.second[0].weight.detach().clone()  # type: ignore[index,union-attr,operator]
    session.step(4)
    assert torch.equal(session.model.first[0].weight, before)  # type: ignore[index,union-attr,arg-type]
    assert not torch.equal(session.model.second[0].weight, second)  # type: ignore[index,union-attr,arg-type]


def test_readings_keep_scalars_only(make_session: Make) -> None:
    """traps row 131: nothing of the activations stays."""
    import gc

    session = make_session(freeze=rule(interval_steps=1))
    session.step(10)
    gc.collect()
    before = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
    session.step(40)
    gc.collect()
    assert sum(issubclass(type(o), Tensor) for o in gc.get_objects()) <= before + 5


@pytest.mark.parametrize("distance", ["sp", "cka", "cosine", "relative_l2"])
def test_every_distance_gives_finite_readings(make_session: Make, distance: str) -> None:
    session = make_session(freeze=rule(distance=distance, interval_steps=1))
    session.step(6)
    values = session.history["plasticity"]["value"]
    assert np.isfinite(values).all()
    assert (values >= 0).all()


def test_a_last_batch_smaller_than_the_probe(make_session: Make) -> None:
    session = make_session(freeze=rule(interval_steps=1, probe_rows=64), batch_size=24)
    session.step(6)
    assert len(session.history["plasticity"]) == 18
