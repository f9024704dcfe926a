"""The dashboard in real JupyterLab: live, steerable, the same picture after a reload, small when saved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from egeria_lab.dashboard.frames import thin

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420), pytest.mark.xdist_group("browser")]

BUILD = """
import torch
torch.set_num_threads(1)
import egeria_lab as lab
rule = lab.Plasticity(patience=1_000_000)  # layers freeze by hand only, yet are watched
session = lab.Session("mlp", "digits", epochs=4000, lr=0.05, seed=0, freeze=rule)
dashboard = session.dashboard()
dashboard
"""
START = "session.start()"
Open = Callable[..., Any]


def drawn(book: Any, least: int = 1) -> dict[str, int]:
    """Wait until the loss is drawn with at least so many points; the points of each chart."""
    book.page.wait_for_function(
        """(least) => Number(document.querySelector(".egl-loss .egl-plot")?.dataset.points ?? 0) >= least""",
        arg=least,
        timeout=90_000,
    )
    return dict(book.points())


def settled(book: Any) -> dict[str, int]:
    """The points of each chart once they have stopped changing."""
    before: dict[str, int] = {}
    while (now := drawn(book)) != before:
        before = now
        book.page.wait_for_timeout(1300)
    return now


def bars(book: Any) -> list[list[str]]:
    """The frozen bars of the timeline: kind and layer."""
    found = book.dashboard.locator(".egl-bar").evaluate_all("(b) => b.map((r) => [r.dataset.kind, r.dataset.lane])")
    return sorted(found)


def test_curves_appear_while_the_training_cell_has_returned(notebook: Open, screenshots: Path) -> None:
    book = notebook(BUILD, START)
    book.run_all()
    assert book.errors() == []
    assert book.ask("session.state") == "running"
    first = drawn(book, 20)
    assert drawn(book, first["loss"] + 20)["loss"] > first["loss"]
    line = book.dashboard.get_by_role("status").first
    assert re.match(r"step [\d,]+ of 48,000, epoch [\d.]+, loss [\d.e-]+, \d of 4 layers frozen", line.inner_text())
    assert "dashboard" in book.dashboard.locator(".egl-cost").inner_text()
    book.page.screenshot(path=screenshots / "live.png")
    assert book.messages == []


def test_all_cells_run_at_once_and_the_last_one_keeps_the_kernel(notebook: Open) -> None:
    book = notebook(BUILD, START, "import time; time.sleep(100)")
    book.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")  # not to its end
    drawn(book, 20)
    last = "window.jupyterapp.shell.currentWidget.content.model.cells.get(2)"
    book.page.wait_for_function(f"() => {last}.executionState !== 'idle'", timeout=30_000)  # it has not ended
    assert "not connected" not in book.dashboard.inner_text()
    assert book.messages == []


def test_moving_the_slider_lands_as_one_setting_changed(notebook: Open) -> None:
    book = notebook(BUILD, START)
    book.run_all()
    drawn(book)
    slider = book.dashboard.get_by_label("tolerance", exact=True)
    slider.focus()
    slider.press("ArrowRight")
    book.until("len(session.events.of(lab.events.SettingChanged)) == 1")
    (event,) = book.ask("[e.to_dict() for e in session.events.of(lab.events.SettingChanged)]")
    assert (event["name"], event["by"], event["layer"]) == ("freeze.tolerance", "dashboard", None)
    assert 0 < event["step"] <= book.ask("session.steps_done")
    assert event["new"] == book.ask("session.setting('freeze.tolerance')") > event["old"]
    book.dashboard.get_by_label("Layer that the tolerance is set for").select_option("layers.1")
    slider.fill("100")
    book.until("len(session.events.of(lab.events.SettingChanged)) == 2")
    last = book.ask("session.events.of(lab.events.SettingChanged)[-1].to_dict()")
    assert last["layer"] == "layers.1"
    assert last["new"] == book.ask("session.setting('freeze.tolerance', 'layers.1')")
    book.dashboard.locator(".egl-setting .egl-pending").first.wait_for(state="hidden")
    book.dashboard.locator(".egl-words li", has_text="freeze.tolerance for layers.1").wait_for()


def test_pressing_freeze_freezes_and_the_timeline_shows_it(notebook: Open, screenshots: Path) -> None:
    book = notebook(BUILD, START)
    book.run_all()
    drawn(book)
    book.dashboard.get_by_role("button", name="Freeze layers.0", exact=True).click()
    book.until("session.layers['layers.0'].state == 'frozen'")
    book.dashboard.locator('.egl-bar[data-kind="hand"][data-lane="layers.0"]').wait_for()
    assert book.ask("session.events.of(lab.events.LayerFrozen)[0].by") == "dashboard"
    book.dashboard.get_by_role("button", name="Pin layers.1", exact=True).click()
    book.dashboard.get_by_role("button", name="Unpin layers.1", exact=True).wait_for()
    book.page.screenshot(path=screenshots / "frozen.png")
    book.dashboard.get_by_role("button", name="Thaw layers.0", exact=True).click()
    book.until("session.layers['layers.0'].state == 'active'")
    book.dashboard.get_by_role("button", name="Freeze layers.0", exact=True).wait_for()
    assert book.messages == []


def test_play_pause_stop_and_a_late_and_a_reloaded_view_show_the_same(notebook: Open) -> None:
    book = notebook(BUILD, START, "session.dashboard()")
    book.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.activeCellIndex = 0")
    book.run_all()
    drawn(book, 200)
    book.dashboard.get_by_role("button", name="Freeze layers.0", exact=True).click()
    book.until("session.layers['layers.0'].state == 'frozen'")
    book.dashboard.get_by_role("button", name="Pause", exact=True).click()
    book.until("session.state == 'paused'")
    book.dashboard.get_by_role("button", name="Resume", exact=True).wait_for()
    followed, shown = settled(book), bars(book)
    assert shown == [["hand", "layers.0"]]
    line = book.dashboard.get_by_role("status").first.inner_text()
    second = book.page.locator(".egl").nth(1)
    second.scroll_into_view_if_needed()
    book.page.wait_for_function(
        """(n) => {
          const second = document.querySelectorAll(".egl")[1];
          return Number(second.querySelector(".egl-loss .egl-plot").dataset.points) === n;
        }""",
        arg=followed["loss"],
    )
    book.command("docmanager:save")
    book.page.wait_for_timeout(500)
    book.load()
    book.dashboard.scroll_into_view_if_needed()
    assert settled(book) == followed
    assert bars(book) == shown
    assert book.dashboard.get_by_role("status").first.inner_text() == line
    book.dashboard.get_by_role("button", name="Resume", exact=True).click()
    book.until("session.state == 'running'")
    drawn(book, followed["loss"] + 1)
    book.dashboard.get_by_role("button", name="Stop", exact=True).click()
    book.until("session.state == 'stopped'")


def test_a_saved_notebook_is_small_and_shows_the_run_without_its_kernel(notebook: Open, screenshots: Path) -> None:
    book = notebook(BUILD.replace("4000", "20"), START, "session.wait()")
    book.run_all()
    drawn(book, 200)
    book.until("len(dashboard.snapshot) > 1000")
    book.command("@jupyter-widgets/jupyterlab-manager:saveWidgetState")
    book.page.wait_for_timeout(500)
    book.command("docmanager:save")
    book.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
    saved = book.path.read_text(encoding="utf-8")
    (state,) = [
        one["state"]
        for one in json.loads(saved)["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"][
            "state"
        ].values()
        if "snapshot" in one["state"]
    ]
    assert len(state["snapshot"]) > 1000
    assert len(saved) < 300_000
    book.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    book.load()
    kept = book.dashboard.locator(".egl-kept")
    kept.get_by_text("saved picture, kernel not connected").wait_for(timeout=90_000)
    assert kept.locator("svg").count() >= 3
    assert book.dashboard.get_by_role("button", name="Play", exact=True).is_disabled()
    book.page.screenshot(path=screenshots / "saved.png")


def test_the_page_thins_as_the_kernel_does(lab: Any) -> None:
    source = files("egeria_lab.dashboard").joinpath("static/data.js").read_text(encoding="utf-8")
    random = np.random.default_rng(0)
    step = np.cumsum(random.integers(1, 4, 5000)).astype(float)
    key = random.normal(size=5000).round(1)
    page = lab.browser.new_page()
    call = "thin(step, key, step.map((_, i) => i), most, step.at(-1))"
    run = f"([step, key, most]) => {{ {source}; return {call}; }}"
    whole = page.evaluate(run, [step.tolist(), key.tolist(), 200])
    kept = thin(step, key, np.zeros(5000), 1024)
    again = page.evaluate(run, [step[kept].tolist(), key[kept].tolist(), 200])
    page.close()
    assert whole == thin(step, key, np.zeros(5000), 200).tolist()
    assert [int(kept[i]) for i in again] == whole
    assert len(whole) <= 402


TOLD = """
import sys
sys.path.insert(0, {folder!r})
from pages import told
from egeria_lab.dashboard.app import Dashboard
dashboard = Dashboard(told({layers}))
dashboard
"""


def colours(book: Any) -> list[str]:
    """Colours of the text in a chart and of the panel behind it."""
    return list(
        book.page.evaluate(
            """() => {
              const text = document.querySelector(".egl-loss .xtick text");
              const panel = document.querySelector(".egl-loss");
              return [getComputedStyle(text).fill, getComputedStyle(panel).backgroundColor];
            }"""
        )
    )


def brightness(colour: str) -> float:
    red, green, blue = (float(part) for part in re.findall(r"[\d.]+", colour)[:3])
    return 0.299 * red + 0.587 * green + 0.114 * blue


@pytest.mark.parametrize("layers", [3, 60])
def test_light_dark_narrow_wide(notebook: Open, screenshots: Path, layers: int) -> None:
    folder = str(Path(__file__).parents[1] / "dashboard")
    book = notebook(TOLD.format(folder=folder, layers=layers), width=1600, height=1500)
    book.run_all()
    drawn(book, 100)
    assert book.dashboard.get_by_role("button", name=re.compile("^(Freeze|Thaw) layers")).count() == layers
    for theme, is_dark in (("JupyterLab Light", False), ("JupyterLab Dark", True)):
        book.command("apputils:change-theme", theme=theme)
        for width in (1600, 600):
            book.page.set_viewport_size({"width": width, "height": 1500})
            book.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
            book.page.wait_for_timeout(1500)
            text, paper = colours(book)
            assert (brightness(text) > brightness(paper) + 100) == is_dark
            assert (brightness(paper) > brightness(text) + 100) != is_dark
            wide = book.page.evaluate(
                """() => [...document.querySelectorAll(".egl-body, .egl-run, .egl-settings")]
                  .filter((box) => box.scrollWidth > box.clientWidth + 1).length"""
            )
            assert wide == 0, f"{wide} boxes wider than their panel at {width} px"
            columns = book.page.evaluate(
                """() => getComputedStyle(document.querySelector(".egl-grid")).gridTemplateColumns.split(" ").length"""
            )
            assert columns == (2 if width == 1600 else 1)
            book.page.screenshot(path=screenshots / f"{layers}-layers-{theme.split()[1]}-{width}.png")
    assert book.messages == []


def test_hovering_tells_value_slope_tolerance_and_verdict(notebook: Open) -> None:
    folder = str(Path(__file__).parents[1] / "dashboard")
    book = notebook(TOLD.format(folder=folder, layers=3), height=1300)
    book.run_all()
    drawn(book, 100)
    book.page.get_by_role("button", name="slope vs tolerance").click()
    book.page.wait_for_timeout(500)
    lines = book.page.locator(".egl-plasticity .egl-plot").evaluate(
        "(plot) => plot.data.filter((trace) => trace.line).map(({line}) => [line.color, line.dash ?? 'solid'])"
    )
    assert sorted(dash for _, dash in lines) == ["dash"] * 3 + ["solid"] * 3
    assert {tuple(line[:1]) for line in lines[::2]} == {tuple(line[:1]) for line in lines[1::2]}
    box = book.page.locator(".egl-plasticity .egl-plot").bounding_box()
    tip = book.dashboard.get_by_role("tooltip")
    for i in range(1, 20):
        book.page.mouse.move(box["x"] + box["width"] * i / 20, box["y"] + box["height"] * 0.4)
        book.page.wait_for_timeout(80)
        if tip.is_visible():
            break
    assert re.search(r"layers\.\d, step [\d,]+: (warming up|moving|stable)", tip.inner_text())
    assert re.search(r"plasticity \S+, smoothed \S+\nslope \S+, tolerance \S+, stable for \d+", tip.inner_text())


def test_out_of_sight_nothing_is_sent_and_back_in_sight_it_is_whole(notebook: Open) -> None:
    book = notebook(BUILD, START, "print('\\n'.join(map(str, range(400))))\n")
    book.run_all()
    book.dashboard.scroll_into_view_if_needed()
    drawn(book, 50)
    book.page.evaluate(
        """() => {
          const outer = document.querySelector(".jp-WindowedPanel-outer");
          outer.scrollTop = outer.scrollHeight;
        }"""
    )
    book.page.wait_for_timeout(1500)
    frames, steps = book.ask("[dashboard._publisher._seq, session.steps_done]")
    book.page.wait_for_timeout(2500)
    later, done = book.ask("[dashboard._publisher._seq, session.steps_done]")
    assert done > steps
    assert later == frames
    book.page.evaluate("() => { document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0; }")
    book.until(f"dashboard._publisher._seq > {frames}")
    book.dashboard.get_by_role("button", name="Pause", exact=True).click()
    book.until("session.state == 'paused'")
    followed = settled(book)
    book.command("docmanager:save")
    book.page.wait_for_timeout(500)
    book.load()
    book.dashboard.scroll_into_view_if_needed()
    assert settled(book) == followed
