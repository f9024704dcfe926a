"""Every notebook runs from a clean kernel, no cell edited; one environment variable shortens the training."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(300)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_from_a_clean_kernel(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGERIA_LAB_STEP_LIMIT", "40")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
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
