"""Leaving the interpreter in the middle of a background run ends the run, not the interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN = "import egeria_lab as lab, time\ns = lab.Session('mlp', 'digits', epochs=500)\ns.start()\ntime.sleep(1)\n"


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("s.stop()", 0), ("s.pause()", 0), ("raise SystemExit(3)", 3), ("raise ValueError('own')", 1)],
)
def test_the_exit_status_is_the_users_own(ending: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN + ending], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stderr
    assert "terminate called" not in done.stderr


def test_the_ten_lines_of_the_readme_run_as_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"```python\n(.*?)```", readme, re.S)[0]
    monkeypatch.setenv("EGERIA_LAB_STEP_LIMIT", "12")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    check = "\nassert session.state == 'finished', session.state\nprint(session.layers)"
    done = subprocess.run([sys.executable, "-c", lines + check], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "layers.2  block 16→32 /2" in done.stdout
    assert sum(line.strip() != "" for line in lines.splitlines()) <= 10
