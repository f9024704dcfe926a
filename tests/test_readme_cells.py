"""README promises: five cells from nothing to a layer that freezes earlier, and one call for a slide."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from egeria_lab import cli

README = Path(__file__).parent.parent / "README.md"


def section() -> str:
    return README.read_text(encoding="utf-8").partition("### Five cells")[2].partition("\nTwo published systems")[0]


@pytest.mark.notebook
@pytest.mark.timeout(300)
def test_five_cells_show_a_layer_that_freezes_earlier(tmp_path: Path) -> None:
    """They run as they stand there, in one namespace, and their comments tell what comes out."""
    cells = re.findall(r"```python\n(.*?)```", section(), re.S)
    assert len(cells) <= 5
    space: dict[str, Any] = {}
    for cell in cells:
        exec(compile(cell, "README.md", "exec"), space)
    said = [int(step) for step in re.findall(r"layers\.0: frozen since step (\d+)", section())]
    usual, bolder = space["usual"], space["bolder"]
    assert [usual.layers["layers.0"].since_step, bolder.layers["layers.0"].since_step] == said
    assert said[1] < said[0]
    (call,) = re.findall(r"`(usual\.report\(\"slide\.html\"\))`", section())
    page = eval(call.replace("slide.html", str(tmp_path / "slide.html")), space)
    assert "<svg" in page.read_text(encoding="utf-8") or "plotly" in page.read_text(encoding="utf-8")
    usual.close(), bolder.close()


def test_at_most_three_commands_come_before_the_first_cell(capsys: pytest.CaptureFixture[str]) -> None:
    before = README.read_text(encoding="utf-8").partition("### Five cells")[0]
    commands = [line for block in re.findall(r"```bash\n(.*?)```", before, re.S) for line in block.splitlines()]
    assert "python -m pip install . && egeria-lab demo" in commands
    assert "`egeria-lab lab`" in before
    with pytest.raises(SystemExit) as end:
        cli.main(["lab", "--help"])
    assert end.value.code == 0
    assert "usage: egeria-lab lab" in capsys.readouterr().out
