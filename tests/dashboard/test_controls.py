"""Every control puts one command, or asks the session to run or rest, and nothing else."""

from __future__ import annotations

import copy

import pytest
from pages import told

import egeria_lab as lab
from egeria_lab.commands import FreezeLayer, Override, PinLayer, Reset, ThawLayer, UnpinLayer
from egeria_lab.dashboard.controls import NUM_REMEMBERED, Controls
from egeria_lab.dashboard.setting_sliders import describe_settings
from egeria_lab.events import CommandRejected, LayerFrozen, SettingChanged


def session_state(session):
    """Everything about a fake session that a watcher must not change."""
    return (
        session.state, session.steps_done, len(session.events), copy.deepcopy(session.layers),
        dict(session.overrides), [len(table) for table in session.history.values()],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "command"),
    [
        ({"do": "freeze", "layer": "layers.0"}, FreezeLayer(layer="layers.0", by="dashboard")),
        ({"do": "thaw", "layer": "layers.0"}, ThawLayer(layer="layers.0", by="dashboard")),
        ({"do": "pin", "layer": "layers.2"}, PinLayer(layer="layers.2", by="dashboard")),
        ({"do": "unpin", "layer": "layers.2"}, UnpinLayer(layer="layers.2", by="dashboard")),
        ({"do": "set", "name": "freeze.tolerance", "value": 0.3, "layer": None},
         Override(name="freeze.tolerance", value=0.3, by="dashboard")),
        ({"do": "set", "name": "freeze.tolerance", "value": 0.3, "layer": "layers.1"},
         Override(name="freeze.tolerance", value=0.3, layer="layers.1", by="dashboard")),
        ({"do": "reset", "name": "freeze.tolerance", "layer": None},
         Reset(name="freeze.tolerance", by="dashboard")),
    ],
)  # fmt: skip
def test_each_control_puts_exactly_one_command_and_touches_nothing(request_, command):
    session = told()
    before = session_state(session)
    Controls(session).handle({**request_, "number": "1"})
    assert session.commands.pending() == [command]
    assert session_state(session) == before
    assert session.called == []


@pytest.mark.parametrize(
    ("state", "wish", "called"),
    [
        ("idle", "play", "start"), ("stopped", "play", "start"), ("finished", "play", "start"),
        ("paused", "play", "resume"), ("running", "pause", "pause"), ("running", "stop", "stop"),
    ],
)  # fmt: skip
def test_play_pause_stop(state, wish, called):
    session = told()
    session.state = state
    Controls(session).handle({"do": wish, "number": "1"})
    assert session.called == [called]
    assert len(session.commands) == 0


def test_whole_settings_stay_whole_and_others_are_fractions():
    session = told()
    controls = Controls(session)
    controls.handle({"do": "set", "name": "freeze.patience", "value": 7.0, "layer": None, "number": "1"})
    controls.handle({"do": "set", "name": "freeze.tolerance", "value": 1, "layer": None, "number": "2"})
    values = [command.value for command in session.commands.pending()]
    assert [(type(value), value) for value in values] == [(int, 7), (float, 1.0)]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"do": "dance"}, "name"),
        ({"do": "dance", "name": "x"}, "Unknown request 'dance'"),
        ({"do": "set", "name": "freeze.tolerance", "value": "many"}, "freeze.tolerance must be a number"),
        ({"do": "set", "name": "freeze.tolerance", "value": float("nan")}, "must be a number"),
        ({"do": "freeze"}, "layer"),
    ],
)
def test_a_request_that_makes_no_sense_is_rejected_with_a_sentence(request_, words):
    session = told()
    controls = Controls(session)
    controls.handle({**request_, "number": "9"})
    assert len(session.commands) == 0
    (landed,) = controls.report()["landed"]
    assert (landed["number"], landed["as"]) == ("9", "rejected")
    assert words in landed["why"]


def test_a_call_that_the_session_refuses_is_reported():
    session = told()

    def refuse():
        raise lab.errors.TrainingError("The budget of 5 steps is used up; call extend().")

    session.start = refuse
    controls = Controls(session)
    controls.handle({"do": "play", "number": "1"})
    assert controls.report()["landed"][0]["why"] == "The budget of 5 steps is used up; call extend()."


def test_pending_until_landed_and_then_reported_with_the_reason():
    session = told()
    controls = Controls(session)
    controls.handle({"do": "freeze", "layer": "layers.4", "number": "1"})
    controls.handle({"do": "set", "name": "freeze.tolerance", "value": 0.3, "layer": None, "number": "2"})
    assert controls.report() == {"pending": ["layer:layers.4", "set:freeze.tolerance:"], "landed": []}
    freeze, override = session.commands.drain()
    freeze.land(CommandRejected(step=3, command="freeze layers.4", reason="it is the last trainable layer"))
    assert controls.report()["pending"] == ["set:freeze.tolerance:"]
    override.land(SettingChanged(step=3, name="freeze.tolerance", old=0.2, new=0.3))
    report = controls.report()
    assert report["pending"] == []
    assert [(row["number"], row["as"]) for row in report["landed"]] == [("1", "rejected"), ("2", "done")]
    assert "last trainable layer" in report["landed"][0]["why"]


def test_what_is_remembered_is_bounded():
    session = told()
    controls = Controls(session)
    for number in range(3 * NUM_REMEMBERED):
        controls.handle({"do": "freeze", "layer": "layers.0", "number": str(number)})
        for receipt in session.commands.drain():
            receipt.land(LayerFrozen(step=1, layer="layers.0"))
        controls.report()
    assert len(controls.report()["landed"]) == NUM_REMEMBERED


def test_settings_are_described_for_sliders():
    session = told()
    tolerance, patience = describe_settings(session)  # the third is no number: no slider
    assert tolerance["primary"]
    assert not patience["primary"]
    assert tolerance["layers"] == {"layers.1": 0.05}
    assert {"low", "high", "unit", "applies", "help", "log", "integer"} <= set(tolerance)


def test_a_slider_move_on_a_real_session_is_one_override_and_one_event():
    session = lab.Session("mlp", "digits", epochs=1)
    controls = Controls(session)
    controls.handle({"do": "set", "name": "freeze.tolerance", "value": 0.35, "layer": None, "number": "1"})
    session.step()
    (event,) = session.events.of(SettingChanged)
    assert (event.new, event.by) == (0.35, "dashboard")
    assert session.setting("freeze.tolerance") == 0.35
    controls.handle({"do": "freeze", "layer": "layers.0", "number": "2"})
    session.step()
    (frozen,) = session.events.of(LayerFrozen)
    assert (frozen.layer, frozen.by) == ("layers.0", "dashboard")
    assert controls.report()["pending"] == []
