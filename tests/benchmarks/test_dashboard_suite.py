"""The dashboard's suite measures what it says: its parts in small, its goals, and what it says without a browser."""

from __future__ import annotations

import pytest

from egeria_lab.benchmarks import dashboard, dashboard_browser
from egeria_lab.benchmarks.suites import SUITES
from egeria_lab.dashboard.app import Dashboard
from egeria_lab.dashboard.tuner import Tuner


def test_it_is_known_by_name() -> None:
    assert SUITES["dashboard"][0] is dashboard.run


def test_the_record_is_as_long_as_asked_and_settles_layer_after_layer() -> None:
    session = dashboard.recorded(6, 400)
    assert len(session.history.plasticity) == 6 * 400
    answer = Tuner(session).answer({"tolerance": 0.4})
    assert answer["readings"] == 400
    frozen = [layer for layer, *_ in answer["spans"]]
    assert frozen[:2] == [0, 1]  # front to back
    session.close()


def test_the_page_that_counts_is_sent_a_frame_and_counts_it() -> None:
    session = dashboard.recorded(4, 50)
    view = Dashboard(session)
    page = dashboard.FakePage(view)
    view._publisher.tick()
    view.close()
    session.close()
    assert page.messages >= 1
    assert page.bytes > 4 * 50 * 4


def test_commands_are_timed_to_their_event() -> None:
    (row,), goals = dashboard._commands(5)
    assert row["moves"] == 5
    assert 0 < row["milliseconds"] <= row["p95_milliseconds"]
    assert [one["sense"] for one in goals] == ["<=", "<="]


def test_without_a_browser_the_row_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_browser, "sync_playwright", None)
    rows, goals = dashboard_browser.measure(True)
    assert goals == []
    assert "playwright or jupyterlab is not installed" in rows[0]["skipped"]
    monkeypatch.setattr(dashboard_browser, "sync_playwright", object())
    monkeypatch.setattr(dashboard_browser, "_chromium", lambda: None)
    assert "no chromium" in dashboard_browser.measure(True)[0][0]["skipped"]
