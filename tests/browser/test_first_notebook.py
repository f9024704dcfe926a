"""Notebook 01 as a newcomer runs it, cell by cell, in real JupyterLab, with the controls used in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.browser,
    pytest.mark.notebook,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("browser"),
]

FIRST = Path(__file__).parents[2] / "notebooks" / "01_first_session.ipynb"
# a cell of its own in front, so that no cell of the notebook is edited: few steps, and one thread beside the browser
SHORTER = "import os\nos.environ['EGERIA_LAB_STEP_LIMIT'] = '200'\nimport torch\ntorch.set_num_threads(1)"


def code_cells() -> list[str]:
    cells = json.loads(FIRST.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_next(book: Any, wait: bool = True) -> None:
    book.command("notebook:run-cell-and-select-next")
    if wait:
        book.page.wait_for_timeout(300)
        book.page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'",
            timeout=120_000,
        )


def test_first_notebook_from_import_to_a_frozen_layer_and_a_moved_slider(
    notebook: Callable[..., Any], screenshots: Path
) -> None:
    cells = code_cells()
    book = notebook(SHORTER, *cells, height=1500)
    for _ in range(3):  # the settings above, the session, start and dashboard
        run_next(book)
    assert book.ask("session.state") == "running"  # the cell has returned, training goes on
    book.until("session.steps_done > 20", seconds=120)
    book.page.wait_for_function("() => Number(document.querySelector('.egl-loss .egl-plot')?.dataset.points ?? 0) > 5")

    slider = book.dashboard.locator("input[type=range]").first
    slider.focus()
    slider.press("ArrowRight")
    changed = book.until("[e.to_dict() for e in session.events if type(e).__name__ == 'SettingChanged']", seconds=60)
    assert changed[0]["name"] == "freeze.tolerance"
    assert changed[0]["by"] == "dashboard"
    assert changed[0]["step"] > 0

    book.dashboard.get_by_role("button", name="Freeze layers.0", exact=True).click()
    assert book.until("list(session.layers.frozen)", seconds=60) == ["layers.0"]
    book.page.wait_for_function("() => document.querySelectorAll('.egl-bar').length >= 1", timeout=90_000)

    book.page.screenshot(path=screenshots / "notebook-01-live.png")
    for _ in cells[2:]:
        run_next(book)
    book.until("session.state == 'finished'", seconds=200)
    assert book.errors() == []
    book.page.wait_for_timeout(2500)
    before = book.points()
    book.command("docmanager:save")
    book.page.wait_for_timeout(1000)
    book.load()
    book.page.wait_for_function(
        "(points) => Number(document.querySelector('.egl-loss .egl-plot')?.dataset.points ?? 0) >= points",
        arg=before["loss"],
        timeout=120_000,
    )
    book.page.wait_for_timeout(1500)
    assert book.points() == before
    book.page.screenshot(path=screenshots / "notebook-01-reloaded.png")
