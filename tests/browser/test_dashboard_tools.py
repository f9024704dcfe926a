"""Undo and redo, attribution, a fork trained in earnest and several runs compared, in real JupyterLab."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420), pytest.mark.xdist_group("browser")]

BUILD = """
import torch
torch.set_num_threads(1)
import egeria_lab as lab
session = lab.Session(
    "mlp", "digits", epochs=400, batch_size=64, lr=0.05, seed=0, sieve=lab.CirculantSieve(fraction=0.25),
    freeze=lab.Plasticity(interval_steps=2, window=6, patience=5, tolerance=0.001, reference="fp32"),
)
session.step(60)
dashboard = session.dashboard()
dashboard
"""
Open = Callable[..., Any]


def test_undo_and_redo_by_button_and_by_keyboard(notebook: Open) -> None:
    book = notebook(BUILD, width=1500, height=1800)
    book.run_all()
    assert book.errors() == []
    undo = book.dashboard.locator('[data-action="undo"]')
    redo = book.dashboard.locator('[data-action="redo"]')
    undo.wait_for()
    assert undo.is_disabled()
    assert undo.get_attribute("title") == "Nothing to undo: no command that did something is remembered"
    book.dashboard.get_by_role("button", name="Freeze layers.0", exact=True).click()
    book.until("session.layers['layers.0'].state == 'frozen'")
    book.dashboard.get_by_role("button", name="Undo: freeze layers.0").wait_for()
    undo.click()
    book.until("session.layers['layers.0'].state == 'active'")
    book.dashboard.get_by_role("button", name="Redo: freeze layers.0").wait_for()
    redo.focus()
    redo.press("Enter")
    book.until("session.layers['layers.0'].state == 'frozen'")
    assert book.ask("[e.by for e in session.events if 'Command' in type(e).__name__]") == ["dashboard"]
    book.dashboard.locator('.egl-bar[data-kind="hand"][data-lane="layers.0"]').wait_for()
    assert book.messages == []


def test_attribution_of_a_chosen_sample_at_rest_and_refused_while_training(notebook: Open, screenshots: Path) -> None:
    book = notebook(BUILD, width=1500, height=2600)
    book.run_all()
    book.dashboard.locator(".egl-sample").first.wait_for()
    chosen = book.dashboard.locator(".egl-sample").first.get_attribute("data-sample")
    book.dashboard.locator(".egl-sample").first.click()
    book.dashboard.get_by_role("button", name="Explain", exact=True).click()
    book.dashboard.locator(".egl-explained-item img").nth(1).wait_for(timeout=120_000)
    assert f"#{chosen}" in book.dashboard.locator(".egl-explained-item").inner_text()
    panel = book.dashboard.locator(".egl-attribution")
    assert "Step 60: integrated gradients of the inputs." in panel.inner_text()
    assert panel.locator(".egl-flow-row").count() == 4
    panel.get_by_label("sample ids").fill("1, 999999")
    panel.get_by_role("button", name="explain", exact=True).click()
    panel.get_by_text("there is no sample 999999").wait_for()
    book.ask("session.start()")
    panel.get_by_text("Pause the run first").first.wait_for()
    assert panel.get_by_role("button", name="explain", exact=True).is_disabled()
    book.ask("session.pause()")
    book.until("session.state == 'paused'")
    panel.get_by_label("sample ids").fill(str(chosen))
    panel.get_by_label("sample ids").press("Enter")
    panel.get_by_text("how far it moved since step 60").wait_for(timeout=90_000)
    panel.screenshot(path=screenshots / "attribution.png")
    assert book.messages == []


def test_a_fork_is_trained_beside_the_run_and_closed_again(notebook: Open, screenshots: Path) -> None:
    book = notebook(BUILD, width=1500, height=2600)
    book.run_all()
    panel = book.dashboard.locator(".egl-whatif")
    panel.get_by_label("what if tolerance").fill("300")
    panel.get_by_label("Try it in earnest, for").fill("90")
    panel.get_by_role("button", name="train a fork").click()
    panel.get_by_text("done: fork from step 60 to 150, closed again").wait_for(timeout=120_000)
    book.page.wait_for_function(
        "() => Number(document.querySelector('.egl-race-chart .egl-plot')?.dataset.points ?? 0) > 20", timeout=90_000
    )
    assert book.ask("(session.steps_done, session.setting('freeze.tolerance'))") == [150, 0.001]
    assert "accuracy" in panel.inner_text()
    panel.screenshot(path=screenshots / "fork.png")
    panel.get_by_label("Try it in earnest, for").fill("100000")
    panel.get_by_role("button", name="train a fork").click()
    panel.get_by_role("button", name="stop").click()
    panel.get_by_text("stopped: fork from step").wait_for(timeout=120_000)
    book.until("session.state == 'paused'")
    assert not book.ask("[t.name for t in __import__('threading').enumerate() if t.name == 'egeria-lab-race']")
    assert book.messages == []


COMPARE = """
plain = lab.Session("mlp", "digits", epochs=400, batch_size=64, lr=0.05, seed=0, freeze=None)
lab.compare(rule=session, plain=plain)
"""


def test_runs_compared_are_drawn_anew_in_place_and_kept_in_the_notebook(notebook: Open, screenshots: Path) -> None:
    book = notebook(BUILD.replace("dashboard = session.dashboard()\ndashboard\n", ""), COMPARE, height=1300)
    book.run_all()
    assert book.errors() == []
    shown = book.page.locator(".egeria-lab-compare")
    shown.get_by_text("Freeze timeline: rule").wait_for()
    book.ask("plain.start()")
    book.page.wait_for_function(
        """() => [...document.querySelectorAll(".egeria-lab-compare td")]
          .some((cell) => cell.textContent === "running")"""
    )
    book.ask("plain.pause()")
    book.until("plain.state == 'paused'")
    steps = f"{book.ask('plain.steps_done'):,}"
    book.page.wait_for_function(
        "(steps) => document.querySelector('.egeria-lab-compare').textContent.includes(steps)", arg=steps
    )
    assert shown.count() == 1
    shown.screenshot(path=screenshots / "compare.png")
    kept = book.outputs()[1]
    assert len(kept) == 1
    assert steps in "".join(kept[0]["data"]["text/html"])
    assert book.messages == []
