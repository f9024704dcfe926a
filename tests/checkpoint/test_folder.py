"""A run directory keeps the last few checkpoints, cleans up after a kill, and belongs to one session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from egeria_lab.checkpoint.folder import RunFolder, checkpoints, latest
from egeria_lab.errors import CheckpointError, InvalidSettingError


def steps(path: Path) -> list[int]:
    return [int(p.name[5:14]) for p in checkpoints(path)]


def test_the_last_few_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run", keep=3)
    for step in range(7):
        folder.save(step, {"step": step})
    assert steps(folder.path) == [4, 5, 6]
    assert latest(folder.path)[1] == {"step": 6}
    folder.save(6, {"step": 6, "again": True})
    assert steps(folder.path) == [4, 5, 6]
    folder.close()
    folder.close()


def test_what_was_left_behind_is_not_the_newest(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, keep=3)
    for step in (10, 20, 30):
        folder.save(step, {"step": step})
    folder.save(15, {"step": 15, "after": "an undo"})
    assert steps(tmp_path) == [10, 15]
    assert latest(tmp_path)[1]["after"] == "an undo"
    assert sorted(p.name for p in tmp_path.glob("left-*")) == ["left-step-000000020.ckpt", "left-step-000000030.ckpt"]
    folder.close()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("step-x.ckpt", "step-1.txt", "mine.ckpt", ".mine.ckpt.tmp"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "step-000000099.ckpt").mkdir()
    folder = RunFolder(tmp_path, keep=1)
    for step in range(3):
        folder.save(step, {})
    assert steps(tmp_path) == [2]
    assert {p.name for p in tmp_path.iterdir()} >= {"step-x.ckpt", "step-1.txt", "mine.ckpt", ".mine.ckpt.tmp"}
    folder.close()


def test_half_files_of_a_killed_process_go(tmp_path: Path) -> None:
    (tmp_path / ".step-000000003.ckpt.123.0.tmp").write_text("half")
    RunFolder(tmp_path).close()
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


def test_another_process_is_kept_out_until_it_dies(tmp_path: Path) -> None:
    code = "import sys, time\nfrom egeria_lab.checkpoint.folder import RunFolder\n"
    code += "folder = RunFolder(sys.argv[1]); print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError, match=f"is in use by process {process.pid}: close that session"):
        RunFolder(tmp_path)
    process.kill()
    process.wait()
    RunFolder(tmp_path).close()


def test_bad_places_and_numbers(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettingError, match="keep_checkpoints must be a whole number >= 1"):
        RunFolder(tmp_path, keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used"):
        RunFolder(tmp_path / "file")
    with pytest.raises(CheckpointError, match="there is no run directory"):
        latest(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        latest(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="cannot be used"):
        RunFolder(tmp_path / "run")
    tmp_path.chmod(0o700)
