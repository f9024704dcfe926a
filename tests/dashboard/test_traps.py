"""What goes wrong in other tools' notebooks: each row of the list that a machine without that front end can check."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import egeria_lab as lab
from egeria_lab.commands import Override
from egeria_lab.dashboard.app import Dashboard
from egeria_lab.dashboard.controls import Controls
from egeria_lab.dashboard.explainer import Explainer
from egeria_lab.dashboard.feed import Feed
from egeria_lab.dashboard.setting_sliders import describe_settings
from egeria_lab.events import FreezeBlocked, SettingChanged

PACKAGE = Path(lab.__file__).parent
OURS = [path for path in PACKAGE.rglob("*.py") if "benchmarks" not in path.parts]


def made(**how: Any) -> lab.Session:
    torch.set_num_threads(1)
    rule = lab.Plasticity(interval_steps=2, window=4, patience=3, reference="fp32")
    return lab.Session("mlp", "digits", **{"epochs": 400, "lr": 0.05, "seed": 0, "freeze": rule, **how})


def until(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def test_start_returns_so_that_widgets_are_served_and_pause_lands_within_a_step() -> None:
    """Traps 92, 93: nothing polls the kernel; the cell returns at once, and a pause is at the next boundary."""
    session = made()
    start = time.monotonic()
    session.start()
    assert time.monotonic() - start < 5
    until(lambda: session.steps_done > 3)
    Controls(session).handle({"do": "pause", "number": "1"})
    asked = session.steps_done
    until(lambda: session.state == "paused")
    assert session.steps_done <= asked + 1
    session.close()
    assert not any("ui_poll" in path.read_text(encoding="utf-8") for path in OURS)


def test_a_fast_drag_from_many_threads_lands_in_order_each_once_with_its_step() -> None:
    """Trap 95: callbacks run beside each other on subshell threads."""
    session = made(undo_bytes=0)
    put: list[float] = []
    lock = threading.Lock()
    receipts = []

    def drag(first: int) -> None:
        for move in range(40):
            value = 0.1 + 0.001 * (100 * first + move)
            with lock:  # to know the order in which they were put
                put.append(value)
                receipts.append(session.commands.put(Override(name="freeze.tolerance", value=value, by="dashboard")))

    session.start()
    threads = [threading.Thread(target=drag, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(receipt.wait(30) for receipt in receipts)
    changed = session.events.of(SettingChanged)
    assert [event.new for event in changed] == put
    steps = [event.step for event in changed]
    assert steps == sorted(steps)
    assert session.setting("freeze.tolerance") == put[-1]
    session.close()


def test_evaluating_and_explaining_while_a_step_is_under_way_share_its_lock() -> None:
    """Trap 98."""
    session = made()
    session.start()
    explainer = Explainer(session)
    for _ in range(5):
        assert session.evaluate()["loss"] is not None
        session.attribute([1, 2], method="saliency")
        assert "pause the run first" in explainer.answer({"ids": [1], "method": "saliency"})["problem"]
    assert session.error is None
    assert session.state == "running"
    session.close()


def test_after_close_nothing_holds_the_session() -> None:
    """Trap 102: also not a dashboard, a comparison or an attribution."""
    session = made()
    session.step(2)
    dashboard, comparison = session.dashboard(), lab.compare(session)
    dashboard._publisher._feed.explainer.answer({"ids": [1], "method": "saliency"})
    dashboard.close()
    comparison.close()
    session.close()
    mine, model = weakref.ref(session), weakref.ref(session.model)
    del session, dashboard, comparison
    gc.collect()
    assert mine() is None
    assert model() is None


def test_an_error_inside_a_step_ends_the_thread_and_is_shown() -> None:
    """Trap 103."""
    torch.set_num_threads(1)
    calls = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("the loss broke")
        return torch.nn.functional.cross_entropy(outputs, targets)

    session = lab.Session("mlp", "digits", epochs=4, loss=loss, freeze=None)
    feed = Feed(session)
    session.start()
    until(lambda: session.state == "failed")
    assert "the loss broke" in str(feed.state()["status"])
    assert "the loss broke" in str(session.error)
    until(lambda: not any(thread.name == "egeria-lab-trainer" for thread in threading.enumerate()))


def test_what_watching_costs_is_said() -> None:
    """Traps 116, 133: the share of the dashboard, of readings, of the sieve."""
    session = made()
    session.step(12)
    words = Feed(session).ledger(0.03)["watching"]
    assert re.search(r"monitoring [\d.]+ %, dashboard 3.0 %", str(words))


def test_no_cdn_no_port_no_cell_hooks_no_insights_nothing_polled() -> None:
    """Traps 125, 127, 128, 130, 135."""
    static = "".join(
        path.read_text(encoding="utf-8") for path in files("egeria_lab.dashboard").joinpath("static").iterdir()
    )
    assert not [address for address in re.findall(r"https?://[^\s\"'`]+", static) if "w3.org" not in address]
    assert "import(" not in static
    views = [path for path in OURS if "dashboard" in path.parts]
    code = "".join(path.read_text(encoding="utf-8") for path in views)
    for word in (
        "pre_run_cell",
        "post_run_cell",
        "http.server",
        "import socket",
        "FigureWidget",
        'include_plotlyjs="cdn"',
    ):
        assert word not in code, word
    everything = "".join(path.read_text(encoding="utf-8") for path in OURS)
    assert "captum.insights" not in everything


def test_where_no_widget_manager_answers_the_output_is_a_picture_that_says_so() -> None:
    """Traps 122, 124, 126, 129: the same output holds the live view and a picture for everywhere else."""
    session = made()
    session.step(12)
    dashboard = Dashboard(session)
    shown, _ = dashboard._repr_mimebundle_()
    assert "A still picture; it does not move." in shown["text/html"]
    assert "step 12 of" in shown["text/html"]
    assert "<script" not in shown["text/html"]
    dashboard.close()


def test_stopping_at_a_step_is_having_asked_for_so_many() -> None:
    """Traps 137, 141."""
    stopped, asked = made(), made()
    stopped.start()
    until(lambda: stopped.steps_done > 20)
    Controls(stopped).handle({"do": "stop", "number": "1"})
    until(lambda: stopped.state == "stopped")
    asked.step(stopped.steps_done)
    pairs = zip(stopped.model.parameters(), asked.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_each_control_says_when_it_applies() -> None:
    """Trap 143."""
    session = made(sieve=lab.CirculantSieve(fraction=0.25))
    rows = describe_settings(session)
    assert {row["name"] for row in rows} >= {"freeze.tolerance", "sieve.fraction", "optimizer.lr"}
    assert all(str(row["applies"]).startswith("next ") for row in rows)
    assert all(row["help"] for row in rows)
    page = files("egeria_lab.dashboard").joinpath("static/controls.js").read_text(encoding="utf-8")
    assert "`applies: ${setting.applies}`" in page


@pytest.mark.parametrize("name", ["optimizer.lr", "freeze.tolerance", "freeze.patience", "freeze.interval_steps"])
def test_a_setting_resets_neither_weights_nor_counters(name: str) -> None:
    """Trap 145."""
    session = made()
    session.step(10)
    before = [parameter.detach().clone() for parameter in session.model.parameters()]
    momentum = [state["momentum_buffer"].clone() for state in session.optimizer.state.values()]
    session.override(name, 3 if name in ("freeze.patience", "freeze.interval_steps") else 0.02)
    assert all(torch.equal(a, b) for a, b in zip(before, session.model.parameters(), strict=True))
    kept = [state["momentum_buffer"] for state in session.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(momentum, kept, strict=True))
    assert session.steps_done == 10


def test_freezing_twice_is_frozen_and_not_thawed() -> None:
    """Trap 146: a set, not a toggle."""
    session = made()
    controls = Controls(session)
    for number in ("1", "2"):
        controls.handle({"do": "freeze", "layer": "layers.0", "number": number})
    assert session.layers["layers.0"].state == "frozen"
    first, second = controls.report()["landed"]
    assert (first["as"], second["as"]) == ("done", "rejected")
    assert "frozen already" in second["why"]


def test_a_cap_that_stops_a_freeze_is_told_once_in_words() -> None:
    """Trap 20."""
    rule = lab.Plasticity(interval_steps=1, window=3, patience=2, tolerance=50.0, max_frozen=0.25, reference="fp32")
    session = made(freeze=rule, epochs=4)
    feed = Feed(session)
    session.run(progress=False)
    assert session.events.of(FreezeBlocked)
    words = [row for row in feed.state()["words"] if row["kind"] == "FreezeBlocked"]
    assert "max_frozen" in str(words[0]["text"]) or "at most" in str(words[0]["text"])
    assert len({row["about"] for row in words}) == len(words)
