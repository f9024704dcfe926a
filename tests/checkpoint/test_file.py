"""A checkpoint file is whole or is refused, whatever happens while it is written and whatever is in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from egeria_lab.checkpoint import file as checkpoint_file
from egeria_lab.checkpoint.file import read, write
from egeria_lab.checkpoint.tree import copied, join, split
from egeria_lab.errors import CheckpointError
from egeria_lab.events import LayerFrozen

TREE: dict[str, Any] = {
    "step": 3, "none": None, "yes": True, "rate": 0.1, "text": "ä\n", "nan": float("nan"), "inf": float("-inf"),
    "tuple": (1, (2.5, "x")), "numbers": {1: "one", 2: [3]}, "$odd": {"$tensor": "no name"},
    "tensors": [torch.arange(6).reshape(2, 3), torch.tensor(2.5), torch.empty(0, 4), torch.tensor([True, False])],
    "half": torch.tensor([1.5, -2]).half(), "brain": torch.tensor([3.25]).bfloat16(),
    "bytes": torch.tensor([1, 255]).byte(),
    "complex": torch.tensor([1 + 2j]), "turned": torch.arange(6.0).reshape(2, 3).t(),
    "array": np.array([[0.5, np.nan]]),
    "events": (LayerFrozen(step=3, by="rule", layer="a", slope=1e-9, reason="so"),),
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    size = write(tmp_path / "a.ckpt", TREE)
    assert size == (tmp_path / "a.ckpt").stat().st_size
    assert same(read(tmp_path / "a.ckpt"), TREE)
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_any_reader_of_safetensors_can_look_into_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    write(tmp_path / "a.ckpt", {"model": {"weight": torch.arange(3.0)}, "half": torch.ones(1).half()})
    tensors = safetensors.load_file(tmp_path / "a.ckpt")
    assert tensors["tensors/model/weight"].tolist() == [0, 1, 2]
    assert json.loads(tensors["document"].numpy().tobytes())["half"] == {"$tensor": "half"}


def test_copies_are_independent() -> None:
    tree = {"x": torch.zeros(2), "events": TREE["events"]}
    other = copied(tree)
    tree["x"] += 1
    assert other["x"].tolist() == [0, 0]
    assert other["events"] is tree["events"]


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, np.zeros(1, dtype=np.int8), b"bytes", Path("x")])
def test_what_cannot_be_saved_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"parts/scheduler/0 is a .*, which cannot be saved"):
        write(tmp_path / "a.ckpt", {"parts": {"scheduler": [value]}})
    with pytest.raises(CheckpointError, match="which a checkpoint cannot hold"):
        write(tmp_path / "a.ckpt", {"x": torch.eye(2).to_sparse()})
    assert not any(tmp_path.iterdir())


# --- faults ------------------------------------------------------------------------------------------------


def count_calls(path: Path) -> int:
    calls = 0
    originals = {name: getattr(os, name) for name in ("open", "write", "fsync", "close", "replace")}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            return originals[name](*args, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in originals:
            patch.setattr(checkpoint_file.os, name, counting(name))
        write(path, TREE)
    return calls


@pytest.mark.parametrize("kind", ["disk full", "short write", "interrupt"])
def test_a_fault_at_any_call_leaves_the_old_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.ckpt"
    old = {"step": 1, "x": torch.ones(1000)}
    total = count_calls(path)
    assert total >= 15
    outcomes = set()
    for failing in range(total):
        write(path, old)
        calls = -1
        originals = {name: getattr(os, name) for name in ("open", "write", "fsync", "close", "replace")}

        def faulty(name: str, failing: int = failing, originals: Any = originals) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls != failing:
                    return originals[name](*args, **more)
                if name == "close":
                    originals[name](*args)
                if kind == "short write" and name == "write":
                    return originals[name](args[0], bytes(args[1])[: len(args[1]) // 2 + 1])
                if kind == "interrupt":
                    raise KeyboardInterrupt
                raise OSError(28, "No space left on device")

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in originals:
                patch.setattr(checkpoint_file.os, name, faulty(name))
            try:
                write(path, TREE)
                outcomes.add("written")
            except CheckpointError as error:
                said = str(error)
                outcomes.add("refused" if "No space left on device" in said and "is untouched" in said else said)
            except KeyboardInterrupt:
                outcomes.add("interrupted")
        found = read(path)
        assert same(found, old) or same(found, TREE)
        assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"], "a half file was left behind"
    expected = {"interrupt": {"interrupted"}}.get(kind, {"written", "refused"})
    assert outcomes == expected  # when only the flush of the directory fails, the file is there


def test_it_is_on_the_disk_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("write", "fsync", "close", "replace"):
        original = getattr(os, name)

        def call(*args: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(checkpoint_file.os, name, call)
    write(tmp_path / "a.ckpt", TREE)
    assert list(dict.fromkeys(calls)) == ["write", "fsync", "close", "replace"]
    assert calls[-2:] == ["fsync", "close"]  # the directory, so that the name lasts too


KILLED = """
import sys, torch
from egeria_lab.checkpoint.file import write
x = torch.full((200_000,), 1.0)
print("go", flush=True)
for step in range(10**6):
    write(sys.argv[1], {"step": step, "x": x * step})
"""


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / "a.ckpt")], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        while not (tmp_path / "a.ckpt").exists():
            time.sleep(0.01)
        time.sleep(draw.random() * 0.1)
        process.kill()
        process.wait()
        found = read(tmp_path / "a.ckpt")
        assert found["x"].unique().tolist() == [found["step"]]


# --- what is in a file ----------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "a.ckpt"
    write(path, {"step": 3, "x": torch.arange(50.0), "y": [torch.ones(3).half()]})
    return path


def test_every_truncation_is_refused(whole: Path) -> None:
    content = whole.read_bytes()
    for length in range(len(content)):
        whole.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"is cut short|is no checkpoint|is damaged") as found:
            read(whole)
        if length > 200:
            assert "is cut short" in str(found.value)


def test_every_changed_byte_is_refused(whole: Path) -> None:
    content = bytearray(whole.read_bytes())
    for place in range(len(content)):
        content[place] ^= 0x41
        whole.write_bytes(content)
        with pytest.raises(CheckpointError):
            read(whole)
        content[place] ^= 0x41
    whole.write_bytes(content + b"more")
    with pytest.raises(CheckpointError, match="is damaged"):
        read(whole)
    whole.write_bytes(content)
    assert read(whole)["step"] == 3


def signed(path: Path, change: Callable[[dict[str, Any], bytearray], None]) -> None:
    """Change a header or the data and put the right checksum under it, as somebody who means harm would."""
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length : -32]
    change(header, data)
    head = json.dumps(header).encode()
    body = len(head).to_bytes(8, "little") + head + bytes(data)
    path.write_bytes(body + hashlib.sha256(body).digest())


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "huge shape": lambda h, d: h["tensors/x"].update(shape=[10**12]),
    "negative shape": lambda h, d: h["tensors/x"].update(shape=[-1, -50]),
    "endless shape": lambda h, d: h["tensors/x"].update(shape=[2**62, 2**62]),
    "place outside": lambda h, d: h["tensors/x"].update(data_offsets=[10**9, 10**9 + 200]),
    "place backwards": lambda h, d: h["tensors/x"].update(data_offsets=[200, 0]),
    "other type": lambda h, d: h["tensors/x"].update(dtype="PICKLE"),
    "no type": lambda h, d: h["tensors/x"].pop("dtype"),
    "no document": lambda h, d: h.pop("document"),
    "no tensor": lambda h, d: h.pop("tensors/x"),
    "texts": lambda h, d: h["tensors/x"].update(shape="many", data_offsets="all"),
    "a document of rubbish": lambda h, d: d.__setitem__(slice(-9, -1), b"\xff" * 8),
    "version of rubbish": lambda h, d: h["__metadata__"].update(version="latest"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_hostile_headers_are_refused(whole: Path, name: str) -> None:
    signed(whole, CHANGES[name])
    with pytest.raises(CheckpointError):
        read(whole)


@pytest.mark.parametrize(
    "document",
    [
        {"$tensor": "nothing"}, {"$tensor": {}}, {"$event": {"event": "Popen"}}, {"$event": 3}, {"$items": 3},
        {"$array": 1},
    ],
)  # fmt: skip
def test_hostile_documents_are_refused(document: Any) -> None:
    with pytest.raises((CheckpointError, ValueError, TypeError, AttributeError)):
        join(document, {})


def test_deep_documents_are_refused(tmp_path: Path) -> None:
    tree: Any = []
    for _ in range(100):
        tree = [tree]
    document, _ = split(tree)
    assert same(join(document, {}), tree)
    write(tmp_path / "a.ckpt", {"x": 1})
    text = b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"

    def change(header: dict[str, Any], data: bytearray) -> None:
        data[:] = text
        header["document"].update(shape=[len(text)], data_offsets=[0, len(text)])
        header["sha256"].update(data_offsets=[len(text), len(text) + 32])

    signed(tmp_path / "a.ckpt", change)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(tmp_path / "a.ckpt")


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("echo boom > /tmp/egeria_lab_bomb",)


def test_a_pickle_bomb_executes_nothing(tmp_path: Path) -> None:
    for number, content in enumerate(
        [pickle.dumps(Bomb()), b"PK\x03\x04" + pickle.dumps(Bomb()), b"", b"\x00" * 100, b"{}", os.urandom(5000)]
    ):
        path = tmp_path / f"{number}.ckpt"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is no checkpoint of egeria_lab"):
            read(path)
    torch.save({"x": Bomb()}, tmp_path / "torch.ckpt")
    with pytest.raises(CheckpointError, match="can carry code"):
        read(tmp_path / "torch.ckpt")
    assert not Path("/tmp/egeria_lab_bomb").exists()


def test_other_versions(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed(whole, lambda h, d: h["__metadata__"].update(version="2"))
    with pytest.raises(CheckpointError, match=r"newer version of egeria_lab \(format 2, this one reads up to 1\)"):
        read(whole)
    monkeypatch.setattr(checkpoint_file, "VERSION", 3)
    with pytest.raises(CheckpointError, match=r"older version of egeria_lab \(format 2\)"):
        read(whole)
    monkeypatch.setitem(checkpoint_file.MIGRATIONS, 2, lambda tree: {**tree, "step": tree["step"] + 1})
    assert read(whole)["step"] == 4


def test_places_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is a folder"):
        read(tmp_path)
    with pytest.raises(CheckpointError, match="could not be written"):
        write(tmp_path / "no" / "folder" / "a.ckpt", {})
    with pytest.raises(CheckpointError, match="could not be written"):
        write(tmp_path, {})


def test_random_damage_is_an_error_of_ours_or_nothing(whole: Path) -> None:
    """500 files with random bytes changed, cut out, doubled, under a right checksum or a wrong one."""
    draw = random.Random(1)
    original = whole.read_bytes()
    for _ in range(500):
        content = bytearray(original[:-32])
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(len(content))
            kind = draw.randrange(3)
            if kind == 0:
                content[place] = draw.randrange(256)
            elif kind == 1:
                del content[place : place + draw.randrange(20)]
            else:
                content[place:place] = content[place : place + draw.randrange(20)]
        tail = hashlib.sha256(content).digest() if draw.random() < 0.8 else original[-32:]
        whole.write_bytes(content + tail)
        with contextlib.suppress(CheckpointError):
            read(whole)
