"""Readings: when, of which layers, on which rows, against which snapshot."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import egeria_lab as lab
from egeria_lab.events import ReferenceFallback, ReferenceRefreshed

Make = Callable[..., lab.Session]


def rule(**settings: Any) -> lab.Plasticity:
    return lab.Plasticity(
        **{"interval_steps": 3, "tolerance": 0, "monitor_budget": 1.0, "reference": "fp32", **settings}
    )


def test_a_reading_every_interval_of_every_active_layer(make_session: Make) -> None:
    """A reading is asked for when it is due and on record at the one after it, under the step it is of."""
    session = make_session(freeze=rule())
    session.step(12)
    frame = session.history.frame("plasticity")
    assert frame["step"].tolist() == [3] * 3 + [6] * 3 + [9] * 3
    assert frame["layer"].tolist() == ["first", "second", "head"] * 3
    session.override("freeze.interval_steps", 5)
    session.step(13)
    assert sorted(set(session.history.frame("plasticity")["step"])) == [3, 6, 9, 12, 15, 20]


def test_right_after_a_snapshot_the_distance_is_zero_and_then_it_grows(make_session: Make) -> None:
    session = make_session(freeze=rule(interval_steps=1))
    session.step(7)
    values = session.history.frame("plasticity").query("layer == 'second'")["value"].tolist()
    assert values[0] == 0
    assert all(value > 0 for value in values[1:])
    assert values[-1] > values[1]


def test_the_value_is_the_distance_of_the_two_models_on_the_first_rows(
    make_session: Make, tiny_model: Callable[..., nn.Module]
) -> None:
    """By hand: SP distance between the model of step 3 and that of step 6, both in eval mode, 5 rows."""
    session = make_session(freeze=rule(probe_rows=5), dropout=0.3)
    rows = list(session._train_source.epoch(0))[5].content[0][:5]

    def output_of_first() -> Tensor:
        twin = tiny_model(0.3).eval()
        twin.load_state_dict(session.model.state_dict())
        with torch.no_grad():
            out: Tensor = twin.first(rows)  # type: ignore[operator]
        return out

    session.step(3)
    snapshot = output_of_first()
    session.step(3)
    live = output_of_first()
    session.step(3)
    got = session.history.frame("plasticity").query("layer == 'first' and step == 6")["value"].iloc[0]
    assert got == pytest.approx(float(lab.sp_distance(live, snapshot)), rel=1e-5)


def test_the_front_is_read_every_time_and_others_as_the_budget_allows(make_session: Make) -> None:
    """A reading of 8 of 8 rows costs 2 forward passes; with one every step the training costs about 3."""
    session = make_session(freeze=rule(interval_steps=1, monitor_budget=0.2))
    session.step(25)
    counts = session.history.frame("plasticity")["layer"].value_counts()
    flops = session.recorder.flops(())
    every = int(np.ceil(2 * sum(flops.forward) / flops.total / 0.2))
    assert every > 1
    assert counts["first"] == 24
    assert counts["second"] == counts["head"] == int(np.ceil(24 / every))
    session.freeze("first")
    session.step(8)
    later = session.history.frame("plasticity").query("step > 25")["layer"].value_counts()
    assert later["second"] == 7  # it is the front now
    assert "first" not in later


def test_a_snapshot_is_replaced_after_its_readings_and_after_each_change(make_session: Make) -> None:
    session = make_session(freeze=rule(interval_steps=1, window=2, patience=2, refresh_evals=6))
    session.step(14)
    session.freeze("first")
    session.step(1)
    session.thaw("first")
    session.step(2)
    refreshed = session.events.of(ReferenceRefreshed)
    assert [e.step for e in refreshed] == [1, 7, 13, 15, 16]
    assert [e.generation for e in refreshed] == [1, 2, 3, 4, 5]  # type: ignore[attr-defined]
    reasons = [e.reason for e in refreshed]  # type: ignore[attr-defined]
    assert reasons[1] == "6 readings were made against the last one"
    assert reasons[3:] == ["first was frozen", "first was thawed"]
    frame = session.history.frame("plasticity").query("layer == 'head'")
    assert frame["step"].tolist() == list(range(1, 17))
    assert frame["generation"].tolist() == [1] * 6 + [2] * 6 + [3] * 2 + [4, 5]


def test_one_reading_a_step_with_gradient_checkpointing(make_session: Make) -> None:
    """traps rows 53, 55: recomputation fires hooks again; a reading counts once, and freezing still works."""

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

    model = Checkpointed()
    session = make_session(model=model, freeze=rule(interval_steps=1))
    session.step(5)
    assert len(session.history["plasticity"]) == 12
    session.freeze("first")
    first, second = (part[0].weight.detach().clone() for part in (model.first, model.second))
    session.step(4)
    assert torch.equal(model.first[0].weight, first)
    assert not torch.equal(model.second[0].weight, second)


class Noisy(nn.Module):
    """Draws in eval mode too; may refuse to be copied."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.copies = copies

    def __deepcopy__(self, memo: Any) -> Noisy:
        if not self.copies:
            raise RuntimeError("no copies of me")
        twin = Noisy(True)
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = hidden + 0.5 * torch.randn_like(hidden)
        out: Tensor = self.head(hidden)
        return out


def test_a_model_that_cannot_be_copied_is_read_in_the_calling_thread_with_draws_of_its_own(make_session: Make) -> None:
    """Both sides of a reading see the same noise, and the global generator does not move."""
    state = torch.get_rng_state()
    session = make_session(model=Noisy(copies=False), freeze=rule(interval_steps=1))
    session.step(4)
    assert torch.equal(torch.get_rng_state(), state)
    values = session.history.frame("plasticity").query("layer == 'head'")["value"].tolist()
    assert values[0] == 0
    assert all(value > 0 for value in values[1:])
    assert session.events.of(ReferenceRefreshed)[0].engine == "fp32"  # type: ignore[attr-defined]


def test_readings_keep_scalars_only(make_session: Make) -> None:
    """traps row 131: nothing of the activations stays."""
    session = make_session(freeze=rule(interval_steps=1))

    def tensors_alive() -> int:
        time.sleep(0.3)  # the worker comes to rest: in the middle of a reading it holds activations
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    session.step(10)
    before = tensors_alive()
    session.step(40)
    assert tensors_alive() <= before + 5


@pytest.mark.parametrize("distance", ["sp", "cka", "cosine", "relative_l2"])
def test_every_distance_gives_finite_readings(make_session: Make, distance: str) -> None:
    session = make_session(freeze=rule(distance=distance, interval_steps=1))
    session.step(6)
    values = session.history["plasticity"]["value"]
    assert np.isfinite(values).all()
    assert (values >= 0).all()


def test_a_last_batch_smaller_than_the_probe(make_session: Make) -> None:
    session = make_session(freeze=rule(interval_steps=1, probe_rows=64), batch_size=24)
    session.step(7)
    assert len(session.history["plasticity"]) == 18


def test_a_layer_that_is_not_quantised_is_named_once_with_its_reason() -> None:
    session = lab.Session("transformer", "digits", epochs=1, freeze=lab.Plasticity(interval_steps=2))
    session.step(8)
    told = [e for e in session.events.of(ReferenceFallback) if isinstance(e, ReferenceFallback)]
    assert [(e.layer, e.engine) for e in told] == [("layers.0", "fp32")]
    assert "Conv2d" in told[0].reason
    asked = lab.Session("mlp", "digits", epochs=1, freeze=lab.Plasticity(interval_steps=2, reference="fp32"))
    asked.step(8)
    assert asked.events.of(ReferenceFallback) == []
    for one in (session, asked):
        one.close()


def test_a_model_that_cannot_be_copied_says_why_and_is_read_all_the_same(make_session: Make) -> None:
    session = make_session(model=Noisy(copies=False), freeze=rule(interval_steps=1, reference="auto"))
    session.step(4)
    told = [e for e in session.events.of(ReferenceFallback) if isinstance(e, ReferenceFallback)]
    assert {e.layer for e in told} == set(session.layers.names)
    assert "no copies of me" in told[0].reason
    assert len(session.history["plasticity"]) > 0


@pytest.mark.parametrize("refresh", [True, False])
def test_a_freeze_takes_a_new_snapshot_only_where_that_is_asked_for(make_session: Make, refresh: bool) -> None:
    session = make_session(freeze=rule(interval_steps=1, refresh_on_freeze=refresh))
    session.step(5)
    session.freeze("first")
    session.step(3)
    session.thaw("first")
    session.step(3)
    reasons = [e.reason for e in session.events.of(ReferenceRefreshed)]  # type: ignore[attr-defined]
    assert ("first was frozen" in reasons) is refresh
    assert "first was thawed" in reasons  # always: the layer has begun to move again


def test_with_only_the_head_left_nothing_is_read_until_a_layer_thaws(make_session: Make) -> None:
    session = make_session(freeze=rule(interval_steps=1))
    session.step(4)
    session.freeze("first")
    session.freeze("second")
    session.step(2)
    before, spent = len(session.history.plasticity), session.rule.worker_seconds
    session.step(6)
    assert len(session.history.plasticity) == before
    assert session.rule.worker_seconds == spent
    session.thaw("second")
    session.step(4)
    frame = session.history.frame("plasticity").iloc[before:]
    assert set(frame["layer"]) == {"second", "head"}
    assert frame["value"].iloc[0] == 0  # against a snapshot of after the thaw
