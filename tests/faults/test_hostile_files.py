"""Checkpoints, journals and settings of anybody: an error of ours or a correct load, never a crash, a hang, or code."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import egeria_lab as lab
from egeria_lab.checkpoint.file import read, write
from egeria_lab.checkpoint.folder import RunFolder, latest
from egeria_lab.checkpoint.journal import NAME, lines, recover
from egeria_lab.errors import EgeriaLabError

FILES, TREES, JOURNALS, CONFIGS = 250, 70, 120, 60
"""Mutations of each kind; 500 in all."""
EAGER: dict[str, Any] = {
    "interval_steps": 2, "window": 3, "patience": 2, "tolerance": 1.2, "bootstrap_change": 5.0, "reference": "fp32",
}  # fmt: skip
MOST_SECONDS, MOST_LETTERS = 30.0, 20_000
HOSTILE: list[Any] = [
    None, True, -1, 0, 2**63, -(2**70), 1e308, float("nan"), float("inf"), "", "../../etc/passwd", "\x00", "$tensor",
    "x" * 10_000, [], [[]], {}, {"$tensor": "nowhere"}, {"$event": {"event": "Popen", "step": 1}}, {"own": "os.system"},
    {"settings": "Popen", "fields": {"args": "touch executed"}}, torch.zeros(0), torch.full((3,), float("nan")),
]  # fmt: skip


class Bomb:
    """What a pickle that executes something is made of."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run in which there is something of everything."""
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("run")
    session = lab.Session(
        "mlp", "digits", batch_size=256, epochs=6, run_dir=place, save_every_steps=20, seed=1,
        freeze=lab.Plasticity(**EAGER),
        sieve=lab.CirculantSieve(fraction=0.2, interval_epochs=1), sparsity=lab.MEST(sparsity=0.5, interval_steps=5),
        on_bad_loss="roll_back",
    )  # fmt: skip
    session.step(10)
    session.override("freeze.tolerance", 0.4, layer="layers.1")
    session.freeze("layers.0")
    session.discard([3, 4])
    session.step(12)
    session.close()
    return place


def mutated_bytes(content: bytes, draw: random.Random) -> bytes:
    kind, data = draw.randrange(6), bytearray(content)
    spot = draw.choice([draw.randrange(len(data)), draw.randrange(min(len(data), 400))])
    if kind == 0:
        data[spot] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data[spot:]
    elif kind == 2:
        data[spot:spot] = draw.randbytes(draw.randrange(1, 64))
    elif kind == 3:
        del data[spot : spot + draw.randrange(1, 64)]
    elif kind == 4:
        data[:8] = struct.pack("<Q", draw.choice([0, 1, 2**63, len(data), len(data) - 8, 2**20]))
    else:
        other = draw.randrange(len(data))
        data[spot : spot + 32] = data[other : other + 32]
    return bytes(data)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, (list, tuple)) and len(tree) < 100:
        items = list(enumerate(tree))
    return [found for key, value in items for found in [(*path, key), *places(value, (*path, key))]]


def mutated_tree(tree: Any, draw: random.Random, spots: list[tuple[Any, ...]]) -> Any:
    """The tree with one to three values exchanged, swapped, removed or added; a tuple becomes a list on the way."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.randrange(1, 4)):
        *path, last = draw.choice(spots)
        node = tree
        try:
            for key in path:
                if isinstance(node[key], tuple):
                    node[key] = list(node[key])
                node = node[key]
            kind = draw.randrange(4)
            if kind == 0:
                del node[last]
            elif kind == 1 and isinstance(node[last], torch.Tensor):
                node[last] = node[last].reshape(-1)[:-1].to(draw.choice([torch.int8, torch.float64]))
            elif kind == 2 and isinstance(node, dict):
                node[f"{last}x"] = node.pop(last)
            else:
                node[last] = draw.choice(HOSTILE)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier exchange took the place away
    return tree


def tried(load: Callable[[], Any]) -> str:
    """What became of it; anything but an error of ours or a result is raised."""
    start = time.perf_counter()
    try:
        result = load()
    except EgeriaLabError as error:
        words = str(error)
        assert words
        assert len(words) < MOST_LETTERS
        answer = "refused"
    else:
        answer = "loaded"
        if isinstance(result, lab.Session):
            result.close()
    assert time.perf_counter() - start < MOST_SECONDS
    return answer


def test_checkpoints_with_changed_bytes_are_refused(run: Path, tmp_path: Path) -> None:
    draw, newest = random.Random(0), latest(run)[0]
    whole, path = newest.read_bytes(), tmp_path / "a.ckpt"
    for _ in range(FILES):
        changed = mutated_bytes(whole, draw)
        path.write_bytes(changed)
        assert tried(lambda: read(path)) == ("loaded" if changed == whole else "refused")


def test_checkpoints_with_changed_content_are_refused_or_loaded(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksum is right here: somebody who knows the format made the file."""
    monkeypatch.chdir(tmp_path)
    draw, tree = random.Random(1), latest(run)[1]
    spots, answers = places(tree), []
    for _ in range(TREES):
        write(tmp_path / "a.ckpt", mutated_tree(tree, draw, spots))
        answers.append(tried(lambda: lab.Session.load(tmp_path / "a.ckpt")))
    assert answers.count("refused") > TREES / 4
    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt"}, "something was written or executed"


def test_journals_with_changed_bytes_or_lines_are_refused_or_shorter(run: Path, tmp_path: Path) -> None:
    draw, whole, path = random.Random(2), (run / NAME).read_bytes(), tmp_path / NAME
    length = len(recover(run / NAME)[0].steps["step"])
    records = list(lines(run / NAME))
    for number in range(JOURNALS):
        if number % 2:
            path.write_bytes(mutated_bytes(whole, draw))
        else:  # lines with a right checksum
            chosen = [mutated_tree(record, draw, places(record)) for record in draw.sample(records, 5)]
            at = draw.randrange(len(records))
            texts = [json.dumps(r, default=str) for r in [*records[:at], *chosen, *records[at:]]]
            path.write_text("".join(f"{zlib.crc32(text.encode()):08x} {text}\n" for text in texts))
        if tried(lambda: recover(path)) == "loaded" and number % 2:
            assert len(recover(path)[0].steps["step"]) <= length


def test_a_damaged_journal_never_stops_a_load(run: Path, tmp_path: Path) -> None:
    draw, whole, newest = random.Random(3), (run / NAME).read_bytes(), latest(run)[0]
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / newest.name).write_bytes(newest.read_bytes())
        (folder / NAME).write_bytes(mutated_bytes(mutated_bytes(whole, draw), draw))
        assert tried(lambda folder=folder: lab.Session.load(folder)) == "loaded"


def test_settings_of_anybody_are_refused_or_checked(run: Path, tmp_path: Path) -> None:
    """Arguments are data: names of settings that exist, with values that their own checks accept."""
    draw, tree = random.Random(4), latest(run)[1]
    arguments = tree["arguments"]
    spots = places(arguments)
    for _ in range(CONFIGS):
        changed = {**tree, "arguments": mutated_tree(arguments, draw, spots)}
        write(tmp_path / "a.ckpt", changed)
        tried(lambda: lab.Session.load(tmp_path / "a.ckpt"))
    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt"}


@pytest.mark.parametrize("kind", ["pickle", "torch", "zip with our header", "inside the document", "inside a tensor"])
def test_a_pickle_bomb_executes_nothing(run: Path, tmp_path: Path, kind: str) -> None:
    executed, path = tmp_path / "executed", tmp_path / "step-000000099.ckpt"
    bomb = pickle.dumps(Bomb(executed))
    if kind == "pickle":
        path.write_bytes(bomb)
    elif kind == "torch":
        torch.save({"state": Bomb(executed)}, path)
    elif kind == "zip with our header":
        content = io.BytesIO()
        torch.save(Bomb(executed), content)
        whole = latest(run)[0].read_bytes()
        path.write_bytes(whole[: len(whole) // 2] + content.getvalue())
    else:
        tree = copy.deepcopy(latest(run)[1])
        packed = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
        if kind == "inside a tensor":
            tree["state"]["parts"]["trainer"]["scaler"] = packed
            tree["state"]["optimizer"]["state"]["bomb"] = {"momentum_buffer": packed}
        else:
            tree["arguments"]["loss"] = {"value": bomb.decode("latin-1")}
            tree["arguments"]["freeze"] = {"settings": "Bomb", "fields": {"path": str(executed)}}
        write(path, tree)
    for load in (lambda: read(path), lambda: lab.Session.load(path), lambda: lab.replay(path), lambda: recover(path)):
        tried(load)
    RunFolder(tmp_path).close()  # opening a directory reads nothing that could run either
    assert not executed.exists()
