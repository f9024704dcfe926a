"""Every notebook runs from a clean kernel, no cell edited; one environment variable shortens the training.

The hidden solution of the exercise runs after the last cell, in the same kernel.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

MOST_COLUMNS = 105
"""As many fit in a cell of JupyterLab in a window of 1,100 pixels."""
NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(300)]


def solution(notebook: nbformat.NotebookNode) -> str:
    """The code in the folded part of the last cell."""
    hidden = notebook.cells[-1].source.partition("<details>")[2]
    return "\n".join(re.findall(r"```python\n(.*?)```", hidden, re.S))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_asks_before_it_answers_and_says_what_to_see(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert cells[0].source.startswith(f"# {int(path.stem[:2])} · ")
    assert "**Before you" in text[0]
    assert sum("**What you should see" in part for part in text) >= 2
    assert sum(part.count("?") for part in text) >= 3
    assert "**Exercise.**" in text[-1]
    assert "</details>" in text[-1]
    for before, cell in pairwise(cells):  # a picture is followed by what it should show, before the next idea begins
        if before.cell_type == "code" and cell.cell_type == "markdown":
            assert "What you should see" in cell.source or "answer" in cell.source or path.stem.startswith("01_")


def test_there_is_a_notebook_for_each_lesson() -> None:
    lessons = [
        "01_first_session", "02_plasticity", "03_freezing", "04_cache_and_ledger", "05_data_sieve",
        "06_sparse_training_and_spfde", "07_your_own_model", "08_many_processes",
    ]  # fmt: skip
    assert [path.stem for path in NOTEBOOKS] == lessons


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_code_fits_a_cell_and_nothing_is_saved_in_it(path: Path) -> None:
    """A line that is cut at the right edge cannot be read; outputs come from running, in the docs from the text."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert max(len(line) for line in cell.source.splitlines()) <= MOST_COLUMNS
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_from_a_clean_kernel(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGERIA_LAB_STEP_LIMIT", "40")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(solution(notebook)))
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)


def test_first_notebook_needs_at_most_six_code_cells() -> None:
    first = nbformat.read(NOTEBOOKS[0], as_version=4)
    assert sum(cell.cell_type == "code" for cell in first.cells) <= 6


def test_first_notebook_shows_a_frozen_layer_and_a_moved_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGERIA_LAB_STEP_LIMIT", "40")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    check = (
        "print('frozen', session.layers.frozen)\n"
        "print('changed', [e.to_dict() for e in session.events if type(e).__name__ == 'SettingChanged'])"
    )
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    text = notebook.cells[-1].outputs[0].text
    assert "frozen ('layers.0',)" in text
    assert "'name': 'freeze.tolerance', 'old': 0.2, 'new': 0.5" in text
