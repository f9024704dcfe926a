"""The widget as a whole, with a fake front end in place of a browser."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from ipywidgets.widgets.widget import _instances
from pages import Page, told

import egeria_lab as lab
from egeria_lab.dashboard.app import Dashboard


class FrontEnd:
    """Stands in for comm and page of one dashboard: keeps what is sent, says what a page would."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.messages: list[tuple[dict, list[bytes]]] = []
        dashboard.comm.send = self._take
        self.page = Page(lambda content: dashboard._handle_custom_msg(content, []))

    def _take(self, data=None, metadata=None, buffers=None):
        self.messages.append((data, buffers or []))

    def custom(self, kind):
        return [(data["content"], buffers) for data, buffers in self.messages
                if data["method"] == "custom" and data["content"]["kind"] == kind]  # fmt: skip

    @property
    def frames(self):
        return self.custom("frame")


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def opened():
    made = []

    def open_dashboard(session, **how):
        made.append(Dashboard(session, **how))
        return made[-1], FrontEnd(made[-1])

    yield open_dashboard
    for dashboard in made:
        dashboard.close()


def small(**how):
    torch.set_num_threads(1)
    return lab.Session("mlp", "digits", **{"epochs": 400, "seed": 0, **how})


def test_the_state_is_complete_from_the_first_moment(opened):
    dashboard, _ = opened(told())
    state = dashboard.get_state()
    assert state["status"]["text"].startswith("step 1,400 of 1,400")
    assert [panel["key"] for panel in state["panels"]] == [
        "plasticity", "timeline", "loss", "whatif", "sparsity", "savings", "sieve", "attribution",
    ]  # fmt: skip
    assert len(state["layers"]) == 5
    assert state["settings"][0]["name"] == "freeze.tolerance"
    json.dumps({name: value for name, value in state.items() if name != "layout"})


def test_a_page_gets_one_full_frame_then_what_is_new(opened):
    session = told()
    _, front = opened(session)
    front.page.say("hello")
    until(lambda: front.frames)
    assert front.page.take(*front.frames[0])
    assert front.page.count["steps"] == 1400


def test_live_beside_a_real_run_and_the_same_for_a_view_opened_after(opened):
    session = small()
    dashboard, front = opened(session)
    front.page.say("hello")
    session.start()
    taken = 0
    end = time.monotonic() + 3
    while time.monotonic() < end:
        for header, buffers in front.frames[taken:]:
            front.page.take(header, buffers)
            front.page.acknowledge(header["seq"])
        taken = len(front.frames)
        time.sleep(0.05)
    session.pause()
    until(lambda: session.state == "paused" and dashboard.status["state"] == "paused")
    assert taken >= 3
    until(lambda: all(front.page.take(*frame) for frame in front.frames[taken:])
          and front.page.count["steps"] == session.steps_done)  # fmt: skip
    late, other = opened(session)
    other.page.say("hello")
    until(lambda: other.frames)
    other.page.take(*other.frames[0])
    assert other.page.count["steps"] == front.page.count["steps"]
    assert other.page.columns["steps"]["loss"][-1] == front.page.columns["steps"]["loss"][-1]
    assert late.status == dashboard.status
    session.stop()
    session.wait(10)


def test_silent_when_nobody_looks_and_training_is_bit_equal():
    plain, seen = small(epochs=3), small(epochs=3)
    dashboard = Dashboard(seen)
    front = FrontEnd(dashboard)
    plain.step(30)
    seen.step(30)
    assert front.frames == []
    dashboard.close()
    watching = small(epochs=3)
    dashboard = Dashboard(watching)
    front = FrontEnd(dashboard)
    front.page.say("hello")
    watching.step(30)
    until(lambda: front.frames)
    dashboard.close()
    losses = [session.history.steps["loss"].tolist() for session in (plain, seen, watching)]
    assert losses[0] == losses[1] == losses[2]


def open_look_and_close(session):
    """What is left of a dashboard that was looked at and closed: weak reference, thread, number of the widget."""
    before = set(threading.enumerate())
    dashboard = Dashboard(session)
    front = FrontEnd(dashboard)
    front.page.say("hello")
    until(lambda: front.frames)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    assert len(session.events._subscribers) == 1
    dashboard.close()
    dashboard.close()
    return weakref.ref(dashboard), thread, dashboard._model_id


def test_close_ends_the_thread_and_the_subscription_and_lets_go_of_everything():
    session = told()
    dashboard, thread, model = open_look_and_close(session)
    assert not thread.is_alive()
    assert session.events._subscribers == []
    gc.collect()
    assert dashboard() is None
    assert model not in _instances


def test_opening_ten_times_leaves_nothing():
    session = told()
    gc.collect()  # what earlier tests closed
    before, threads = len(_instances), threading.active_count()
    for _ in range(10):
        Dashboard(session).close()
    gc.collect()
    assert len(_instances) == before
    assert threading.active_count() == threads


def test_many_views_of_one_session(opened):
    session = told()
    views = [opened(session) for _ in range(3)]
    for _, front in views:
        front.page.say("hello")
    for _, front in views:
        until(lambda front=front: front.frames)
        front.page.take(*front.frames[0])
    counts = [front.page.count for _, front in views]
    assert counts[0] == counts[1] == counts[2]


def test_a_click_becomes_a_command_at_once_in_the_callback(opened):
    session = told()
    _, front = opened(session)
    front.page.say("do", do="freeze", layer="layers.4", number="1")
    (command,) = session.commands.pending()
    assert (command.layer, command.by) == ("layers.4", "dashboard")


def test_a_failed_run_is_told_in_one_sentence(opened):
    session = told()
    session.state = "failed"
    session.error = lab.errors.TrainingError("Step 12: the loss is NaN; lower the learning rate.\ndetails")
    dashboard, _ = opened(session)
    assert dashboard.status["error"] == "Step 12: the loss is NaN; lower the learning rate."


def test_a_fault_in_watching_is_shown_and_does_not_end_it(opened):
    session = told()
    dashboard, front = opened(session)
    good = session.savings
    session.savings = lambda: 1 / 0
    front.page.say("hello")
    until(lambda: "ZeroDivisionError" in dashboard.notice)
    session.savings = good
    front.page.say("hello")
    until(lambda: front.frames)


def test_what_a_saved_notebook_holds_is_small(opened):
    dashboard, front = opened(told(60))
    until(lambda: dashboard.snapshot)
    front.page.say("hello")
    front.page.say("plotly")
    until(lambda: front.custom("plotly") and front.frames)
    saved = json.dumps({k: v for k, v in dashboard.get_state().items() if isinstance(v, (str, dict, list))})
    shown, _ = dashboard._repr_mimebundle_()
    assert len(saved) + len(json.dumps(shown)) < 400_000
    assert "plotly.js v" not in saved


def test_other_front_ends_get_a_still_picture(opened):
    dashboard, _ = opened(told())
    shown, _ = dashboard._repr_mimebundle_()
    assert "<svg" in shown["text/html"]
    assert shown["application/vnd.jupyter.widget-view+json"]["model_id"] == dashboard.model_id
    assert shown["text/plain"] == "Dashboard of resnet8 on fashion-mini, finished at step 1,400"


def test_the_run_s_picture_is_kept_when_it_comes_to_rest(opened):
    session = small(epochs=2)
    dashboard, front = opened(session)
    assert dashboard.snapshot == ""
    session.start()
    session.wait(30)
    until(lambda: "<svg" in dashboard.snapshot)
    assert dashboard.status["state"] == "finished"
    assert front.frames == []


def test_the_package_itself_loads_no_widget_library():
    code = (
        "import sys, egeria_lab, egeria_lab.dashboard;"
        "print([m for m in ('anywidget', 'ipywidgets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_session_has_one_dashboard_until_it_is_closed() -> None:
    """Trap 119: running the cell again adds a view, not a widget."""
    session = lab.Session("mlp", "digits", epochs=1)
    first = session.dashboard()
    assert session.dashboard() is first
    first.close()
    second = session.dashboard()
    assert second is not first
    second.close()
