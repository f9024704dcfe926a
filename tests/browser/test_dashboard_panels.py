"""Samples, sparsity, what-if, x axes and run buttons in real JupyterLab: they appear, act, and fit the page."""

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
    "mlp", "digits", epochs=14, batch_size=64, lr=0.05, seed=0,
    freeze=lab.Plasticity(interval_steps=2, window=6, patience=5, tolerance=0.001, reference="fp32"),
    sieve=lab.CirculantSieve(fraction=0.25, interval_epochs=2), sparsity=lab.MEST(sparsity=0.8),
)
dashboard = session.dashboard()
dashboard
"""
RUN = "session.start(); session.wait(150)"
PANELS = ["plasticity", "timeline", "loss", "whatif", "sparsity", "savings", "sieve", "attribution"]
Open = Callable[..., Any]


def shown(book: Any) -> list[str]:
    """Keys of the panels that can be seen."""
    return list(
        book.page.evaluate(
            """() => [...document.querySelector(".egl").querySelectorAll("[data-panel]")]
              .filter((panel) => !panel.hidden).map((panel) => panel.dataset.panel)"""
        )
    )


def too_wide(book: Any) -> list[str]:
    """Classes of the boxes whose content does not fit."""
    return list(
        book.page.evaluate(
            """() => [...document.querySelectorAll(".egl-body, .egl-run, .egl-settings, .egl-sheet, .egl-tuner")]
              .filter((box) => box.scrollWidth > box.clientWidth + 1)
              .map((box) => `${box.closest("section")?.dataset.panel} ${box.className}`)"""
        )
    )


def points(book: Any, panel: str, least: int = 1) -> None:
    """Wait until a chart holds at least so many points."""
    book.page.wait_for_function(
        """([panel, least]) => {
          const plot = document.querySelector(`.egl-${panel} .egl-plot`);
          return Number(plot?.dataset.points ?? 0) >= least;
        }""",
        arg=[panel, least],
        timeout=90_000,
    )


def test_all_panels_light_dark_narrow_wide(notebook: Open, screenshots: Path) -> None:
    book = notebook(BUILD, RUN, width=1600, height=2300)
    book.run_all()
    assert book.errors() == []
    for panel in ("loss", "sieve", "sparsity"):
        points(book, panel, 4)
    assert shown(book) == PANELS
    book.dashboard.locator(".egl-whatif .egl-beyond, .egl-whatif svg").first.wait_for()
    book.dashboard.get_by_label("what if tolerance").fill("260")
    book.dashboard.locator('.egl-whatif rect[data-kind="whatif"]').first.wait_for()
    assert "the run: 0.0 %" in book.dashboard.locator(".egl-whatif .egl-verdict").inner_text()
    book.dashboard.locator(".egl-sample").first.click()
    for theme in ("Light", "Dark"):
        book.command("apputils:change-theme", theme=f"JupyterLab {theme}")
        for width in (1600, 600):
            book.page.set_viewport_size({"width": width, "height": 2300 if width == 1600 else 4200})
            book.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
            book.page.wait_for_timeout(1500)
            assert too_wide(book) == []
            book.page.screenshot(path=screenshots / f"panels-{theme}-{width}.png")
    assert book.messages == []


def test_a_plain_run_shows_neither_samples_nor_sparsity_until_one_is_discarded(notebook: Open) -> None:
    plain = BUILD.split("    sieve=")[0] + ")\ndashboard = session.dashboard()\ndashboard\n"
    book = notebook(plain, "session.run(20, progress=False)")
    book.run_all()
    assert book.errors() == []
    points(book, "loss", 10)
    assert not {"sieve", "sparsity"} & set(shown(book))
    book.ask("session.discard([3, 5]).state")
    book.dashboard.locator('.egl-sieve [data-group="discarded"] [data-sample="3"]').wait_for()
    assert "sparsity" not in shown(book)


def test_what_a_session_cannot_do_is_not_offered(notebook: Open) -> None:
    plain = BUILD.split("    sieve=")[0] + ")\nsession.lacks = ('attribution', 'fork')\nsession.dashboard()\n"
    book = notebook(plain, "session.run(20, progress=False)")
    book.run_all()
    assert book.errors() == []
    points(book, "loss", 10)
    book.dashboard.locator(".egl-tuner").wait_for()
    assert "whatif" in shown(book)
    assert "attribution" not in shown(book)
    assert not book.dashboard.get_by_role("button", name="train a fork").is_visible()


def test_a_layer_that_settles_has_a_bar_of_its_own(notebook: Open) -> None:
    plain = BUILD.split("    sieve=")[0] + ")\nsession.dashboard()\n"
    book = notebook(plain, "session.run(20, progress=False)")
    book.run_all()
    assert book.errors() == []
    assert book.dashboard.locator(".egl-settles").count() == 0
    event = "lab.events.LayerSettling(step=5, by='rule', layer='layers.0', epochs=2.0, reason='stable')"
    book.ask(f"session.events.append({event})")
    book.dashboard.locator('.egl-settles[data-tip*="settles, trained less and less"]').wait_for()
    book.dashboard.get_by_text("layers.0 settles over 2 epochs, then it freezes: stable").wait_for()


def test_discard_restore_what_if_axes_and_run_buttons_do_what_they_say(notebook: Open, screenshots: Path) -> None:
    long = BUILD.replace("epochs=14", "epochs=400")
    book = notebook(long, "session.start()", width=1500, height=2400)
    book.run_all()
    points(book, "sieve", 4)
    press = lambda name: book.dashboard.get_by_role("button", name=name).first.click()  # noqa: E731
    press("Pause")
    book.until("session.state == 'paused'")

    before = book.ask("session.steps_done")
    press("Step")
    book.until(f"session.steps_done == {before + 1} and session.state == 'paused'")
    book.page.wait_for_timeout(300)
    assert book.ask("session.steps_done") == before + 1

    rate = book.ask("session.setting('optimizer.lr')")
    press("halve rate")
    book.until(f"session.setting('optimizer.lr') == {rate / 2}")
    planned = book.ask("session.planned_steps")
    press("+1 epoch")
    book.until(f"session.planned_steps > {planned}")

    first = book.dashboard.locator(".egl-sample").first
    chosen = first.get_attribute("data-sample")
    first.click()
    assert f"id {chosen}" in book.dashboard.locator(".egl-detail").inner_text()
    press(f"Discard sample {chosen}")
    book.until(f"session.sieve.discarded_ids().tolist() == [{chosen}]")
    assert book.ask("session.events.of(lab.events.SamplesDiscarded)[-1].by") == "dashboard"
    press(f"Restore sample {chosen}")
    book.until("session.sieve.discarded_ids().tolist() == []")

    tuner = book.dashboard.get_by_label("what if tolerance")
    tuner.fill("200")
    book.page.wait_for_function("() => /With these settings/.test(document.querySelector('.egl-verdict').textContent)")
    tried = book.ask("session.setting('freeze.tolerance')")
    assert tried == 0.001  # trying changes nothing
    press("apply to the run")
    book.until("session.setting('freeze.tolerance') > 0.01")
    book.dashboard.get_by_role("button", name="apply to the run").wait_for()

    titles = {"samples": "training samples seen", "FLOPs": "FLOPs", "seconds": "elapsed time", "epochs": "passes"}
    for axis, words in titles.items():
        book.dashboard.get_by_label("x axis").select_option(axis)
        book.dashboard.locator(".egl-loss .xtitle", has_text=words).wait_for()
    ends = book.page.evaluate("() => document.querySelector('.egl-loss .egl-plot').layout.xaxis.range[1]")
    assert ends == pytest.approx(1.01 * book.ask("session.history.steps.last()['epoch']"), rel=0.02)
    book.page.screenshot(path=screenshots / "acted.png")

    press("Resume")
    book.until("session.state == 'finished'", seconds=90)
    assert book.ask("session.steps_done == session.planned_steps")
    planned = book.ask("session.planned_steps")
    press("+1 epoch")
    book.until(f"session.state == 'finished' and session.steps_done > {planned}")
    assert book.messages == []


SIXTY = """
import torch
torch.set_num_threads(1)
import egeria_lab as lab
from torch import nn
blocks = [nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(58)]
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), *blocks, nn.Linear(24, 10))
session = lab.Session(
    model, "digits", epochs=4, batch_size=64, optimizer="adam", seed=0, sparsity=lab.MEST(sparsity=0.5),
    freeze=lab.Plasticity(interval_steps=2, window=4, patience=3, tolerance=0.001, reference="fp32"),
)
dashboard = session.dashboard()
dashboard
"""


def test_sixty_layers_are_drawn_as_pictures_and_the_what_if_answers_at_once(notebook: Open, screenshots: Path) -> None:
    book = notebook(SIXTY, "session.start(); session.wait(150)", width=1500, height=1900)
    book.run_all()
    assert book.errors() == []
    points(book, "sparsity", 60)
    kinds = "() => document.querySelector('.egl-sparsity .egl-plot').data.map((trace) => trace.type)"
    assert book.page.evaluate(kinds) == ["heatmap", "heatmap"]
    book.dashboard.get_by_label("what if tolerance").fill("330")
    book.page.wait_for_function("() => /With these settings/.test(document.querySelector('.egl-verdict').textContent)")
    assert book.dashboard.locator(".egl-whatif .egl-lane-label").count() == 60
    assert too_wide(book) == []
    book.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    book.page.wait_for_timeout(1500)
    book.page.screenshot(path=screenshots / "sixty-layers.png")
    assert book.messages == []
