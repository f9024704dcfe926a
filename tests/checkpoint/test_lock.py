"""The lock of a run directory, on systems that lock files and on those that do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from egeria_lab.checkpoint import lock as module
from egeria_lab.checkpoint.folder import RunFolder
from egeria_lab.checkpoint.lock import RunLock
from egeria_lab.errors import CheckpointError

HOLD = """
import sys
from pathlib import Path
from egeria_lab.checkpoint import lock
if sys.argv[2] == "none":
    lock.fcntl = None
held = lock.RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def fake_msvcrt() -> Any:
    """Locks one byte of a file as Windows does: against other handles of the same process, too."""
    held: dict[tuple[int, int, int], int] = {}

    def locking(descriptor: int, mode: int, count: int) -> None:
        place = os.fstat(descriptor)
        key = (place.st_dev, place.st_ino, os.lseek(descriptor, 0, os.SEEK_CUR))
        assert count == 1
        assert key[2] > 1000, "the text that says who holds it could not be read"
        if mode == 0:
            if held.pop(key, None) is None:
                raise OSError(13, "Permission denied")
        elif key in held:
            raise OSError(36, "Resource deadlock avoided")
        else:
            held[key] = descriptor

    return SimpleNamespace(locking=locking, LK_NBLCK=2, LK_UNLCK=0)


@pytest.fixture(params=["fcntl", "msvcrt", "none"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kind of system; what is not there is missing."""
    if request.param != "fcntl":
        monkeypatch.setattr(module, "fcntl", None)
    if request.param == "msvcrt":
        monkeypatch.setattr(module, "msvcrt", fake_msvcrt())
    return str(request.param)


def test_one_at_a_time(tmp_path: Path, system: str) -> None:
    first = RunLock(tmp_path)
    assert first.path.read_text() == f"process {os.getpid()}"
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()}: close that session, or give"):
            RunLock(tmp_path)
    first.close()
    first.close()  # twice is once
    second = RunLock(tmp_path)
    with pytest.raises(CheckpointError, match="in use"):
        RunLock(tmp_path)
    second.close()


def test_a_folder_is_usable_on_every_system(tmp_path: Path, system: str) -> None:
    folder = RunFolder(tmp_path)
    folder.save(1, {"step": 1})
    with pytest.raises(CheckpointError, match="in use"):
        RunFolder(tmp_path)
    folder.close()
    RunFolder(tmp_path).close()


@pytest.mark.parametrize("kind", ["fcntl", "none"])
def test_a_process_that_was_killed_holds_nothing(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "none":
        monkeypatch.setattr(module, "fcntl", None)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError, match=rf"in use by process {other.pid}"):
        RunLock(tmp_path)
    other.kill()
    other.wait()
    RunLock(tmp_path).close()


def test_a_file_of_nobody_is_taken_over_and_one_of_somebody_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "fcntl", None)
    path = tmp_path / module.NAME
    for left in ("", "process 4194999", f"process {2**70}"):
        path.write_text(left)
        if left.endswith(str(2**70)):
            with pytest.raises(CheckpointError, match="in use"):
                RunLock(tmp_path)
        else:
            RunLock(tmp_path).close()
    path.write_text("somebody's notes")
    with pytest.raises(CheckpointError, match="in use by somebody's notes"):
        RunLock(tmp_path)
    assert path.read_text() == "somebody's notes"
