"""Built arrays are kept whole, for the same files and recipe only, and never stand in the way."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from egeria_lab.data.built_cache import Arrays, built_once, cache_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EGERIA_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Counts how often it builds."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Arrays:
        self.times += 1
        return {"a": np.arange(6).reshape(2, 3), "b": np.ones(4, np.uint8)}


def same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_the_second_time_is_read_and_equal(folder: Path) -> None:
    build = Builder()
    first, second = (built_once("x", "1", [], build) for _ in range(2))
    assert build.times == 1
    assert same(first, second)
    assert same(first, build())
    assert [path.suffix for path in folder.iterdir()] == [".npz"]  # nothing half written is left


def test_another_recipe_name_or_file_is_built_again(folder: Path, tmp_path: Path) -> None:
    build, source = Builder(), tmp_path / "source"
    for name, recipe, content in (("x", "1", b"a"), ("x", "2", b"a"), ("y", "1", b"a"), ("x", "1", b"b")):
        source.write_bytes(content)
        built_once(name, recipe, [source], build)
    assert build.times == 4
    built_once("x", "1", [source], build)
    assert build.times == 4


def flip(raw: bytes) -> bytes:
    """One bit of the first array's content is wrong."""
    at = raw.index(np.arange(6).tobytes()) + 8
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


@pytest.mark.parametrize("damage", [flip, lambda raw: raw[: len(raw) // 2], lambda _raw: b"", lambda _raw: b"PK no"])
def test_what_is_damaged_is_built_again_and_replaced(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    build = Builder()
    expected = built_once("x", "1", [], build)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert same(built_once("x", "1", [], build), expected)
    assert build.times == 2
    assert path.read_bytes() == whole


def test_a_file_of_other_arrays_is_not_taken(folder: Path) -> None:
    """As if somebody had written the file with another tool: whole, but without our checksum, or with a wrong one."""
    build = Builder()
    expected = built_once("x", "1", [], build)
    (path,) = folder.iterdir()
    for wrong in ({"a": np.zeros(2)}, {"a": np.zeros(2), "sha256": np.zeros(32, np.uint8)}):
        np.savez(path, **wrong)  # type: ignore[arg-type]
        assert same(built_once("x", "1", [], build), expected)
    assert build.times == 3


def test_a_folder_that_cannot_be_written_only_costs_time(folder: Path) -> None:
    folder.write_bytes(b"a file, not a folder")
    build = Builder()
    assert same(built_once("x", "1", [], build), built_once("x", "1", [], build))
    assert build.times == 2


def test_a_write_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert built_once("x", "1", [], Builder())["a"].shape == (2, 3)
    assert list(folder.iterdir()) == []


def test_an_error_of_the_build_is_the_users_and_keeps_nothing(folder: Path) -> None:
    def fail() -> Arrays:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        built_once("x", "1", [], fail)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the folder of Linux")
def test_the_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EGERIA_LAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "egeria_lab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "egeria_lab"
    monkeypatch.setenv("EGERIA_LAB_CACHE", os.path.join("~", "mine"))
    assert cache_folder() == tmp_path / "mine"
