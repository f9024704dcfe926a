"""Every command by widget does what the same command by code does: the effect, the event, and the undo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import egeria_lab as lab
from egeria_lab.commands import Discard, Extend, FreezeLayer
from egeria_lab.dashboard.controls import LAYER_COMMANDS, MEMORY_COMMANDS, SAMPLE_COMMANDS, Controls
from egeria_lab.dashboard.feed import Feed
from egeria_lab.dashboard.undo_words import command_words

Say = Callable[[Any], Any]
CASES: dict[str, tuple[list[Say], Say, dict[str, Any]]] = {
    # name: what is done before by code, the command by code, the same as the page asks for it
    "freeze": ([], lambda s: s.freeze("layers.0"), {"layer": "layers.0"}),
    "thaw": ([lambda s: s.freeze("layers.0")], lambda s: s.thaw("layers.0"), {"layer": "layers.0"}),
    "pin": ([], lambda s: s.pin("layers.1"), {"layer": "layers.1"}),
    "unpin": ([lambda s: s.pin("layers.1")], lambda s: s.unpin("layers.1"), {"layer": "layers.1"}),
    "set": ([], lambda s: s.override("freeze.patience", 4), {"name": "freeze.patience", "value": 4, "layer": None}),
    "set for a layer": (
        [],
        lambda s: s.override("freeze.tolerance", 0.4, layer="layers.1"),
        {"do": "set", "name": "freeze.tolerance", "value": 0.4, "layer": "layers.1"},
    ),
    "reset": (
        [lambda s: s.override("freeze.tolerance", 0.4)],
        lambda s: s.reset("freeze.tolerance"),
        {"name": "freeze.tolerance", "layer": None},
    ),
    "reset for a layer": (
        [lambda s: s.override("freeze.tolerance", 0.4, layer="layers.1")],
        lambda s: s.reset("freeze.tolerance", layer="layers.1"),
        {"do": "reset", "name": "freeze.tolerance", "layer": "layers.1"},
    ),
    "set the fraction set aside": (
        [],
        lambda s: s.override("sieve.fraction", 0.5),
        {"do": "set", "name": "sieve.fraction", "value": 0.5, "layer": None},
    ),
    "halve_rate": ([], lambda s: s.override("optimizer.lr", s.setting("optimizer.lr") / 2), {}),
    "discard": ([], lambda s: s.discard([3, 5]), {"ids": [3, 5]}),
    "restore": ([lambda s: s.discard([3, 5])], lambda s: s.restore([3, 5]), {"ids": [3, 5]}),
    "extend": ([], lambda s: s.extend(2.0), {"epochs": 2}),
    "undo": ([lambda s: s.freeze("layers.0"), lambda s: s.step(2)], lambda s: s.undo(), {}),
    "redo": ([lambda s: s.freeze("layers.0"), lambda s: s.step(2), lambda s: s.undo()], lambda s: s.redo(), {}),
}


def made() -> lab.Session:
    torch.set_num_threads(1)
    return lab.Session(
        "mlp", "digits", epochs=2, lr=0.05, seed=0, sieve=lab.CirculantSieve(fraction=0.25),
        freeze=lab.Plasticity(interval_steps=2, reference="fp32"),
    )  # fmt: skip


def told(session: lab.Session) -> list[dict[str, Any]]:
    """All events without times and without who it was."""
    skip = ("by", "time", "seconds", "elapsed_seconds", "num_bytes")
    plain = [{k: v for k, v in e.to_dict().items() if k not in skip} for e in session.events]
    return [{k: str(v).replace("by='dashboard'", "by='user'") for k, v in row.items()} for row in plain]


def standing(session: lab.Session) -> dict[str, Any]:
    """Everything that a command may change."""
    return {
        "layers": [(row.name, row.state, row.since_step, row.reason) for row in session.layers],
        "settings": [(row.name, row.value) for row in session.settings()],
        "own": dict(session.settings_book.per_layer),
        "discarded": session.sieve.discarded_ids().tolist(),
        "plan": session.planned_steps,
        "step": session.steps_done,
        "losses": session.history.steps["loss"].tolist(),
        "weights": [parameter.detach().clone().tolist() for parameter in session.model.parameters()],
        "memory": [str(c).replace("'dashboard'", "'user'") for c in session.undo_ring.commands()],
    }


def test_every_command_that_the_page_can_ask_for_is_compared() -> None:
    asked = {case[2].get("do", name) for name, case in CASES.items()}
    assert asked >= {*LAYER_COMMANDS, *SAMPLE_COMMANDS, *MEMORY_COMMANDS, "set", "reset", "extend", "halve_rate"}


@pytest.mark.parametrize("name", CASES)
def test_by_widget_as_by_code(name: str) -> None:
    before, by_code, request = CASES[name]
    pair = made(), made()
    controls = Controls(pair[1])
    for session in pair:
        session.step(3)
        for say in before:
            say(session)
    untouched = standing(pair[0])
    assert by_code(pair[0]).state == "done"
    controls.handle({"do": name, **request, "number": "7"})
    (row,) = controls.report()["landed"]
    assert (row["number"], row["as"]) == ("7", "done")
    assert standing(pair[0]) != untouched
    assert standing(pair[1]) == standing(pair[0])
    assert told(pair[1]) == told(pair[0])
    assert (pair[0].events[-1].by, pair[1].events[-1].by) == ("user", "dashboard")
    for session in pair:
        session.step(3)
    assert standing(pair[1]) == standing(pair[0])
    if name not in ("undo", "redo"):  # and both are undone alike, exactly
        pair[0].undo()
        controls.handle({"do": "undo", "number": "8"})
        assert controls.report()["landed"][-1]["as"] == "done"
        assert standing(pair[0]) == standing(pair[1]) == untouched


def test_the_buttons_are_told_what_they_would_take_back_or_why_there_is_nothing() -> None:
    session = made()
    feed, controls = Feed(session), Controls(session)
    session.step(2)
    nothing = feed.state()["status"]
    assert (nothing["undo"], nothing["redo"]) == ("", "")
    assert nothing["why_no_undo"] == "no command that did something is remembered"
    controls.handle({"do": "freeze", "layer": "layers.0", "number": "1"})
    assert feed.state()["status"]["undo"] == "freeze layers.0"
    controls.handle({"do": "undo", "number": "2"})
    status = feed.state()["status"]
    assert (status["undo"], status["redo"]) == ("", "freeze layers.0")
    controls.handle({"do": "undo", "number": "3"})
    refused = controls.report()["landed"][-1]
    assert refused["as"] == "rejected"
    assert "nothing to undo" in refused["why"]
    forgetful = lab.Session("mlp", "digits", epochs=1, undo_bytes=0)
    assert Feed(forgetful).state()["status"]["why_no_undo"] == "undo_bytes=0 keeps no states"


def test_commands_have_plain_words() -> None:
    commands = [Extend(epochs=1), Discard(ids=(4,)), FreezeLayer(layer="a.b")]
    assert [command_words(c) for c in commands] == ["lengthen the plan by 1 epoch", "discard sample 4", "freeze a.b"]
