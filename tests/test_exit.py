"""Leaving the interpreter in the middle of a background run ends the run, not the interpreter."""

from __future__ import annotations

import subprocess
import sys

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
