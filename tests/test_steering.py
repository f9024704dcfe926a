"""Every call is one command, every command one event; twice is once; nothing is reset on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import egeria_lab as lab
from egeria_lab import commands as c
from egeria_lab.errors import InvalidSettingError, UnknownNameError
from egeria_lab.events import (
    BootstrapFinished,
    CommandRejected,
    Event,
    FreezeBlocked,
    LayerFrozen,
    LayerPinned,
    LayerThawed,
    LayerUnpinned,
    ReferenceRefreshed,
    SettingChanged,
)

Make = Callable[..., lab.Session]
Losses = Callable[[lab.Session], list[float]]
Tensors = Callable[[nn.Module], dict[str, Tensor]]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- one command, one event ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "event", "again"),
    [
        (lambda s: s.freeze("first"), LayerFrozen, "first is frozen already, since step 2: nothing to do"),
        (lambda s: s.pin("first"), LayerPinned, "first is pinned already: nothing to do"),
        (lambda s: s.override("freeze.tolerance", 0.5), SettingChanged, "freeze.tolerance is 0.5 already"),
        (lambda s: s.override("optimizer.lr", 0.01), SettingChanged, "optimizer.lr is 0.01 already"),
        (lambda s: s.override("freeze.max_frozen", 0.5), SettingChanged, "freeze.max_frozen is 0.5 already"),
        (
            lambda s: s.override("freeze.tolerance", 0.5, layer="second"),
            SettingChanged,
            "freeze.tolerance for second is 0.5 already",
        ),
    ],
)
def test_each_command_gives_one_event_and_twice_is_once(
    make_session: Make, tensors: Tensors, ask: Callable[[lab.Session], Any], event: type[Event], again: str
) -> None:
    """traps row 146: an idempotent set, not a toggle; a call without effect says why."""
    session = make_session(freeze=lab.Plasticity())
    session.step(2)
    before = len(session.events)
    receipt = ask(session)
    assert len(session.events) == before + 1
    assert type(session.events[before]) is event
    assert receipt.event is session.events[before]
    assert (receipt.state, receipt.event.step, receipt.event.by) == ("done", 2, "user")
    state = [(row.state, row.since_step, row.by) for row in session.layers], [s.value for s in session.settings()]
    second = ask(session)
    assert len(session.events) == before + 2
    assert second.state == "rejected"
    assert isinstance(second.event, CommandRejected)
    assert again in second.event.reason
    assert (
        [(row.state, row.since_step, row.by) for row in session.layers],
        [s.value for s in session.settings()],
    ) == state
    session.step(2)
    json.dumps([e.to_dict() for e in session.events])


def test_thaw_and_unpin_and_reset(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity())
    session.freeze("first")
    session.pin("second")
    session.override("freeze.window", 5)
    kinds = []
    for ask in (
        lambda: session.thaw("first"),
        lambda: session.unpin("second"),
        lambda: session.reset("freeze.window"),
    ):
        first, second = ask(), ask()
        kinds.append(type(first.event))
        assert second.state == "rejected", second
        assert isinstance(second.event, CommandRejected)
        assert "nothing to do" in second.event.reason
    assert kinds == [LayerThawed, LayerUnpinned, SettingChanged]
    assert session.setting("freeze.window") == 10
    assert [row.state for row in session.layers] == ["active"] * 3


def test_old_and_new_are_in_the_event(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity(tolerance=0.2))
    events = [
        session.override("freeze.tolerance", 0.35).event,
        session.override("freeze.tolerance", 0.05, layer="first").event,
        session.override("freeze.tolerance", 0.06, layer="first").event,
        session.reset("freeze.tolerance", layer="first").event,
        session.reset("freeze.tolerance").event,
    ]
    assert [(e.old, e.new, e.layer) for e in events] == [  # type: ignore[union-attr]
        (0.2, 0.35, None),
        (0.35, 0.05, "first"),
        (0.05, 0.06, "first"),
        (0.06, 0.35, "first"),
        (0.35, 0.2, None),
    ]


def test_a_slider_that_sends_a_float_sets_a_whole_number(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity())
    session.commands.put(c.Override(name="freeze.window", value=6.0, by="dashboard"))
    assert session.setting("freeze.window") == 6
    assert isinstance(session.setting("freeze.window"), int)
    assert session.events[-1].by == "dashboard"


def test_bad_commands_put_directly_are_rejected_and_the_next_one_lands(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity())
    bad = [
        c.FreezeLayer(layer="no such layer"),
        c.Override(name="freeze.tolerence", value=0.1),
        c.Override(name="freeze.tolerance", value="much"),
        c.Override(name="freeze.tolerance", value=None),
        c.Override(name="freeze.window", value=2.5),
        c.Override(name="freeze.window", value=5, layer="first"),
        c.Override(name="optimizer.lr", value=float("nan")),
        c.Override(name="optimizer.lr", value=-1),
        c.Reset(name="freeze.nothing"),
        c.Extend(epochs=float("nan")),
        c.Extend(epochs=-3),
        c.Extend(epochs=float("inf")),
        c.Command(),
    ]
    planned = session.planned_steps
    for command in bad:
        receipt = session.commands.put(command)
        assert receipt.state == "rejected", command
        assert isinstance(receipt.event, CommandRejected)
        assert receipt.event.reason
        assert "Traceback" not in receipt.event.reason
    assert session.freeze("first").state == "done"
    assert session.planned_steps == planned
    assert len(session.events) == len(bad) + 1
    session.step(2)


def test_calls_with_unknown_names_raise_at_once_and_leave_no_event(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity())
    for call in (session.freeze, session.thaw, session.pin, session.unpin, session.explain):
        with pytest.raises(UnknownNameError, match=r"Unknown layer 'frist'. Did you mean 'first'"):
            call("frist")
    with pytest.raises(UnknownNameError, match=r"Unknown layer 'frist'"):
        session.override("freeze.tolerance", 0.1, layer="frist")
    with pytest.raises(UnknownNameError, match=r"Unknown layer 'frist'"):
        session.reset("freeze.tolerance", layer="frist")
    with pytest.raises(UnknownNameError, match=r"Unknown setting 'freeze.tolerence'. Did you mean 'freeze.tolerance'"):
        session.override("freeze.tolerence", 0.1)
    with pytest.raises(UnknownNameError, match=r"Unknown setting"):
        session.reset("nothing")
    with pytest.raises(InvalidSettingError, match=r"tolerance must be .*>= 0, got -1"):
        session.override("freeze.tolerance", -1)
    with pytest.raises(InvalidSettingError, match=r"holds for all layers"):
        session.override("freeze.window", 5, layer="first")
    with pytest.raises(InvalidSettingError, match=r"holds for all layers"):
        session.reset("optimizer.lr", layer="first")
    assert len(session.events) == 0
    assert len(session.commands) == 0


def test_a_session_without_a_rule_freezes_by_hand_only(make_session: Make) -> None:
    session = make_session(freeze=None)
    assert [s.name for s in session.settings()] == ["optimizer.lr"]
    with pytest.raises(InvalidSettingError, match=r"belongs to .* rule"):
        session.override("freeze.tolerance", 0.1)
    assert "only freeze() by hand" in session.explain("first")
    assert session.freeze("first").state == "done"
    assert session.pin("second").state == "done"
    session.step(3)
    assert len(session.history["plasticity"]) == 0


# --- what freezing by hand does --------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_frozen_layer_is_bit_identical_over_20_more_steps(make_session: Make, tensors: Tensors, kind: str) -> None:
    """traps rows 1, 2, 10, 21: in a session, batch-norm buffers too, and the others do move."""
    session = make_session(optimizer=MAKERS[kind], dropout=0.2)
    session.step(5)
    session.freeze("first")
    frozen, rest = tensors(session.model.first), tensors(session.model.second)  # type: ignore[arg-type]
    session.step(20)
    assert equal(frozen, tensors(session.model.first))  # type: ignore[arg-type]
    assert not any(torch.equal(rest[k], v) for k, v in tensors(session.model.second).items() if k.endswith("weight"))  # type: ignore[arg-type]
    session.optimizer.state_dict()
    session.thaw("first")
    session.step()
    assert not equal(frozen, tensors(session.model.first))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("park_state", ["keep", "cpu"])
def test_freeze_and_thaw_at_once_changes_no_bit(
    make_session: Make, losses: Losses, tensors: Tensors, kind: str, park_state: str
) -> None:
    plain = make_session(optimizer=MAKERS[kind], dropout=0.3)
    steered = make_session(optimizer=MAKERS[kind], dropout=0.3, park_state=park_state)
    plain.step(10)
    steered.step(5)
    for order in (("first", "second"), ("second", "first")):
        for name in order:
            steered.freeze(name)
        for name in ("first", "second"):
            steered.thaw(name)
    steered.step(5)
    assert losses(plain) == losses(steered)
    assert equal(tensors(plain.model), tensors(steered.model))


def test_freezing_everything_is_refused_with_the_reason(make_session: Make) -> None:
    """traps row 17."""
    session = make_session()
    assert session.freeze("first").state == "done"
    assert session.freeze("second").state == "done"
    receipt = session.freeze("head")
    assert receipt.state == "rejected"
    assert isinstance(receipt.event, CommandRejected)
    assert "last trainable" in receipt.event.reason
    session.step(3)
    assert [row.state for row in session.layers] == ["frozen", "frozen", "active"]
    session.thaw("first")
    assert session.freeze("head").state == "done"  # by hand the head may be frozen, as long as something trains
    session.step(3)


def test_a_hole_is_allowed_and_says_what_it_saves(make_session: Make) -> None:
    session = make_session()
    session.freeze("second")
    assert "trainable layers lie before it, so only weight gradients are saved" in session.layers["second"].reason
    session.step(3)
    assert "save weight gradients only" in session.savings().why()["flops"]
    assert "trainable layers lie before" in session.savings().why()["memory"]


def test_the_table_always_says_state_since_why_and_by_whom(make_session: Make) -> None:
    """traps rows 8, 19."""
    session = make_session(freeze=lab.Plasticity())
    session.step(3)
    session.freeze("first")
    session.pin("second")
    session.commands.put(c.PinLayer(layer="first", by="dashboard"))
    rows = {row.name: row for row in session.layers}
    assert (rows["first"].state, rows["first"].since_step, rows["first"].by) == ("frozen", 3, "user")
    assert rows["first"].reason == "asked for"
    assert (rows["second"].state, rows["second"].since_step) == ("pinned", 3)
    assert (rows["head"].state, rows["head"].since_step, rows["head"].by) == ("active", 0, "session")
    session.thaw("first")
    assert rows["first"].state == "pinned"
    session.step(1)
    inside = {id(p) for group in session.optimizer.param_groups for p in group["params"]}
    for layer in session.layer_modules:
        frozen = rows[layer.name].frozen
        assert all(p.requires_grad != frozen and (id(p) in inside) != frozen for p in layer.parameters)


# --- overrides reset nothing -----------------------------------------------------------------------------


def test_no_override_touches_weights_counters_or_state(make_session: Make, tensors: Tensors) -> None:
    """traps row 145."""
    session = make_session(freeze=lab.Plasticity(interval_steps=2, window=2, patience=2, bootstrap_change=0.9))
    session.step(30)
    session.freeze("first")
    weights = tensors(session.model)
    momentum = {id(p): s["momentum_buffer"].clone() for p, s in session.optimizer.state.items()}
    facts = session.steps_done, len(session.history["plasticity"]), session.layers["first"].since_step
    for setting in session.settings():
        value = {"freeze.max_frozen": 0.5, "optimizer.lr": 0.01}.get(setting.name, setting.high / 2)
        value = int(value) if setting.integer else value
        receipt = session.override(setting.name, value)
        assert receipt.state == "done", receipt
        assert session.setting(setting.name) == value
    for name in [s.name for s in session.settings()]:
        session.reset(name)
    assert equal(weights, tensors(session.model))
    assert {id(p): s["momentum_buffer"] for p, s in session.optimizer.state.items()}.keys() == momentum.keys()
    assert all(torch.equal(s["momentum_buffer"], momentum[id(p)]) for p, s in session.optimizer.state.items())
    assert (session.steps_done, len(session.history["plasticity"]), session.layers["first"].since_step) == facts
    assert [(s.value, s.default) for s in session.settings()] == [(s.default, s.default) for s in session.settings()]


def test_override_and_reset_of_the_rate_is_the_run_without(make_session: Make) -> None:
    session, plain = make_session(), make_session()
    session.override("optimizer.lr", 0.02)
    session.reset("optimizer.lr")
    session.step(5)
    plain.step(5)
    rates, expected = (s.history["steps"]["learning_rate"] for s in (session, plain))
    assert rates.tolist() == pytest.approx(expected.tolist(), rel=1e-12)


# --- the rule inside a session ---------------------------------------------------------------------------

RULE = {
    "interval_steps": 2,
    "window": 3,
    "patience": 2,
    "bootstrap_change": 0.9,
    "tolerance": 2.0,
    "monitor_budget": 1.0,
}


def test_the_rule_freezes_from_the_front_and_explain_carries_the_numbers(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity(**RULE), lr=0.01)
    assert "bootstrapping goes on until the loss changes by less than 90%" in session.explain("first")
    assert "it is the head, which no rule freezes" in session.explain("head")
    session.run(steps=200, until=lambda _r: bool(session.layers.frozen), progress=False)
    assert session.layers.frozen == ("first",)
    event = session.events.of(LayerFrozen)[0]
    assert isinstance(event, LayerFrozen)
    assert event.by == "rule"
    assert event.slope is not None
    assert event.tolerance is not None
    assert event.slope < event.tolerance
    assert f"slope {event.slope:.1e} < tolerance {event.tolerance:.1e} for 2 of 2 readings" in event.reason
    assert session.explain("first") == f"first is frozen since step {event.step} by rule: {event.reason}."
    row = session.history.frame("plasticity").query("layer == 'first'").iloc[-1]
    assert row["verdict"] == "freeze"
    assert (row["slope"], row["tolerance"], row["stable"]) == (event.slope, event.tolerance, 2)
    finished = session.events.of(BootstrapFinished)
    assert len(finished) == 1
    assert finished[0].step <= event.step
    assert finished[0].step >= session.steps_per_epoch  # not before one pass
    assert session.step().frozen == ("first",)
    assert "second" not in session.layers.frozen
    second = session.explain("second")
    assert second.startswith("second is trained: ")
    assert "warming up" in second or "slope" in second or "not been read" in second


def test_the_whole_run_is_a_contiguous_prefix_and_the_head_stays(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity(**RULE), lr=0.01)
    names = session.layers.names
    for _ in range(50):
        session.step(4)
        frozen = session.layers.frozen
        assert list(frozen) == names[: len(frozen)]
    assert session.layers.frozen == ("first", "second")
    assert session.layers["head"].state == "active"
    frozen_steps = [event.step for event in session.events.of(LayerFrozen)]
    assert frozen_steps == sorted(frozen_steps)
    refreshed = [e.step for e in session.events.of(ReferenceRefreshed)]
    # A refresh follows each freeze, until only the head is left.
    assert all(any(0 < r - step <= 2 for r in refreshed) for step in frozen_steps[:-1])
    assert max(refreshed) < frozen_steps[-1]


def test_readings_of_different_references_are_not_mixed(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity(**RULE, refresh_evals=5), lr=0.01)
    session.pin("first")
    session.step(120)
    frame = session.history.frame("plasticity").query("layer == 'first'")
    assert frame["generation"].nunique() > 3
    for _, series in frame.groupby("generation"):
        assert series["smoothed"].iloc[0] == series["value"].iloc[0]
        assert series["slope"].iloc[:2].isna().all()  # no fit before `window` readings of this snapshot
        for position in range(len(series)):
            last = series["value"].iloc[max(0, position - 2) : position + 1]
            assert series["smoothed"].iloc[position] == pytest.approx(last.mean())
        if len(series) >= 3:
            slope = np.polyfit(range(3), series["smoothed"].iloc[:3], 1)[0]
            assert series["slope"].iloc[2] == pytest.approx(abs(slope), rel=1e-6, abs=1e-15)
    tolerances = frame["tolerance"].dropna()
    assert tolerances.nunique() == 1  # tuned once, kept through every refresh


def test_a_pin_holds_until_unpinned(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity(**RULE), lr=0.01)
    session.pin("first")
    session.step(200)
    assert session.layers.frozen == ()
    blocked = session.events.of(FreezeBlocked)
    assert [(e.layer, e.reason) for e in blocked] == [("first", "it is pinned")]  # type: ignore[attr-defined]
    assert "It is pinned, so no rule may freeze it." in session.explain("first")
    session.unpin("first")
    session.step(40)
    assert session.layers["first"].frozen


def test_the_cap_is_one_event(make_session: Make) -> None:
    """traps row 20."""
    session = make_session(freeze=lab.Plasticity(**RULE, max_frozen=0.34), lr=0.01)
    session.step(250)
    assert session.layers.frozen == ("first",)
    blocked = session.events.of(FreezeBlocked)
    assert len(blocked) == 1
    assert "max_frozen=0.34 allows at most 1 of 3 layers" in blocked[0].sentence()
    assert "would freeze, but" in blocked[0].sentence()


def test_three_tolerances_give_three_runs(make_session: Make, losses: Losses) -> None:
    """traps row 10: freezing is not a no-op."""
    traces = []
    for tolerance in (0.0, 0.02, 5.0):
        session = make_session(freeze=lab.Plasticity(**{**RULE, "tolerance": tolerance}), lr=0.05)
        session.step(150)
        traces.append((losses(session), session.layers.frozen, [e.step for e in session.events.of(LayerFrozen)]))
    assert traces[0][1] == ()
    assert traces[2][1] == ("first", "second")
    assert traces[1][2] != traces[2][2]
    assert len({tuple(trace[0]) for trace in traces}) == 3


def test_a_tolerance_moved_mid_run_freezes_the_layer(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity(**{**RULE, "tolerance": 0.0}), lr=0.01)
    session.step(100)
    assert session.layers.frozen == ()
    session.override("freeze.tolerance", 50.0, layer="first")
    session.step(20)
    assert session.layers.frozen == ("first",)
    assert session.setting("freeze.tolerance", "first") == 50.0
    assert session.setting("freeze.tolerance") == 0.0


def test_a_tenfold_drop_of_the_rate_thaws_all_and_relaxes(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity(**RULE), lr=0.01, scheduler="constant", epochs=100)
    session.step(200)
    assert session.layers.frozen == ("first", "second")
    session.override("optimizer.lr", 0.001)
    session.step(1)
    assert session.layers.frozen == ()
    thawed = session.events.of(LayerThawed)
    assert [(e.layer, e.by) for e in thawed] == [("first", "rule"), ("second", "rule")]  # type: ignore[attr-defined]
    assert "the learning rate fell from 0.01 to 0.001" in thawed[0].sentence()
    assert session.policy is not None
    assert session.policy.relaxed
    session.step(150)
    assert "first" in session.layers.frozen


def test_a_cosine_to_zero_thaws_nothing(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity(**RULE), lr=0.01, epochs=40)
    session.step(session.planned_steps)
    assert session.layers.frozen == ("first", "second")
    assert session.events.of(LayerThawed) == []


def test_a_users_own_thaw_function(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity(**RULE, thaw=lambda r: "spring" if r.now == 0.02 else None), lr=0.01,
                           scheduler="constant")  # fmt: skip
    session.step(150)
    assert session.layers.frozen
    session.override("optimizer.lr", 0.0001)
    session.step(1)
    assert session.layers.frozen
    session.override("optimizer.lr", 0.02)
    session.step(1)
    assert session.layers.frozen == ()
    assert "spring" in session.events.of(LayerThawed)[0].sentence()


def test_a_layer_thawed_by_hand_starts_a_new_series(make_session: Make) -> None:
    session = make_session(freeze=lab.Plasticity(**RULE), lr=0.01)
    session.step(150)
    assert session.layers["first"].frozen
    session.thaw("first")
    session.pin("first")
    step = session.steps_done
    session.step(10)
    rows = session.history.frame("plasticity").query(f"layer == 'first' and step > {step}")
    assert rows["slope"].iloc[:2].isna().all()
    assert rows["smoothed"].iloc[0] == rows["value"].iloc[0]


def test_a_run_replays_from_seed_settings_and_commands(make_session: Make, losses: Losses) -> None:
    def drive() -> lab.Session:
        session = make_session(freeze=lab.Plasticity(**RULE), dropout=0.2, lr=0.01)
        session.step(30)
        session.override("freeze.tolerance", 1.0)
        session.step(30)
        session.freeze("second")
        session.step(20)
        session.thaw("second")
        session.override("optimizer.lr", 0.02)
        session.step(40)
        return session

    one, two = drive(), drive()
    assert losses(one) == losses(two)
    assert [e.to_dict() for e in one.events] == [e.to_dict() for e in two.events]
    assert one.history.frame("plasticity").equals(two.history.frame("plasticity"))
