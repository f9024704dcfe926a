"""Notebooks 03 and 05 as they are, in real JupyterLab: every cell, every picture, and the solution folded away.

Only one environment variable, set in the kernel, shortens the training; the file on the page is a copy, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.browser,
    pytest.mark.notebook,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("browser"),
]

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
STEPS = "120"  # enough for notebook 03 to freeze nothing and draw everything, and for 05 to exchange samples
NOT_RUN = """() => {
  const cells = window.jupyterapp.shell.currentWidget.content.model.cells;
  return Array.from({length: cells.length}, (_, i) => i).filter((i) => {
    const cell = cells.get(i);
    return cell.type === "code" && !(cell.executionCount > 0);
  });
}"""
# cells far from the view are not in the page: each is brought there before it is looked at
BRING = """(i) => window.jupyterapp.shell.currentWidget.content.scrollToItem(i, "center")"""
MARKS = "path.point, .point path, path.js-line, .heatmaplayer image, .imagelayer image"
DRAWN = f"""(i) => {{
  const cell = window.jupyterapp.shell.currentWidget.content.widgets[i].node;
  const plots = [...cell.querySelectorAll(".js-plotly-plot")];
  return plots.length > 0 && plots.every((plot) => plot.querySelectorAll("{MARKS}").length > 0);
}}"""


def pictures(outputs: list[list[dict[str, Any]]]) -> list[int]:
    """Positions of the cells whose output is a Plotly figure."""
    plotly = "application/vnd.plotly.v1+json"
    return [i for i, cell in enumerate(outputs) if any(plotly in one.get("data", {}) for one in cell)]


def run_everything(book: Any) -> list[list[dict[str, Any]]]:
    """Run all cells of a fresh page; no cell may fail, warn or be left out."""
    book.ask(f"__import__('os').environ.update(EGERIA_LAB_STEP_LIMIT='{STEPS}')")
    book.run_all()
    assert book.errors() == []
    assert book.page.evaluate(NOT_RUN) == []
    outputs: list[list[dict[str, Any]]] = book.outputs()
    assert [one["text"] for cell in outputs for one in cell if one.get("name") == "stderr"] == []
    return outputs


def look_at_pictures(book: Any, outputs: list[list[dict[str, Any]]], at_least: int) -> None:
    """Every figure has marks in it once it is in view."""
    found = pictures(outputs)
    assert len(found) >= at_least
    for position in found:
        book.page.evaluate(BRING, position)
        book.page.wait_for_function(DRAWN, arg=position, timeout=60_000)


def open_solution(book: Any, part_of_it: str) -> None:
    """The exercise stands there, its solution does not, until somebody clicks."""
    last = book.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.cells.length - 1")
    book.page.evaluate(BRING, last)
    folded = book.page.locator(".jp-MarkdownOutput details")
    folded.wait_for(timeout=30_000)
    assert book.page.locator(".jp-MarkdownOutput strong", has_text="Exercise.").is_visible()
    solution = folded.locator("pre", has_text=part_of_it)
    assert not solution.is_visible()
    folded.locator("summary").click()
    solution.wait_for(state="visible", timeout=30_000)


def test_notebook_03_shows_timelines_and_a_live_dashboard(lesson: Callable[..., Any], screenshots: Path) -> None:
    book = lesson(NOTEBOOKS / "03_freezing.ipynb", height=1500)
    outputs = run_everything(book)
    look_at_pictures(book, outputs, at_least=2)
    widget = "application/vnd.jupyter.widget-view+json"
    position = next(i for i, cell in enumerate(outputs) if any(widget in one.get("data", {}) for one in cell))
    book.page.evaluate(BRING, position)
    book.dashboard.wait_for(timeout=60_000)
    book.page.wait_for_function("() => Number(document.querySelector('.egl-loss .egl-plot')?.dataset.points ?? 0) > 5")
    assert all(points > 0 for name, points in book.points().items() if name in ("loss", "plasticity"))
    tuner = book.dashboard.get_by_label("what if tolerance", exact=True)
    assert tuner.is_enabled()
    book.page.screenshot(path=screenshots / "notebook-03.png")
    open_solution(book, "def accuracy(freeze, seed):")
    assert book.messages == []


def test_notebook_05_shows_what_the_sieve_chose(lesson: Callable[..., Any], screenshots: Path) -> None:
    book = lesson(NOTEBOOKS / "05_data_sieve.ipynb", height=1500)
    outputs = run_everything(book)
    look_at_pictures(book, outputs, at_least=5)
    position = pictures(outputs)[2]
    book.page.evaluate(BRING, position)
    book.page.get_by_text("the hardest", exact=True).first.wait_for(timeout=30_000)
    book.page.screenshot(path=screenshots / "notebook-05.png")
    open_solution(book, "bold = {")
    assert book.messages == []
