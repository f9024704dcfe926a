"""Kill a training process again and again, at random moments, and see what its run directory is worth.

The process is forked from a server that has everything imported, so that a kill costs a fraction of a second. It
saves every other step, so that most kills fall into a save.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.algorithms.sieving.settings import CirculantSieve
from egeria_lab.algorithms.sparse.methods import MEST
from egeria_lab.checkpoint.folder import checkpoints, latest
from egeria_lab.checkpoint.journal import NAME, recover
from egeria_lab.errors import CheckpointError
from egeria_lab.events import CheckpointSaved
from egeria_lab.session import Session

STEPS_AHEAD = 3
"""Steps that are made from each checkpoint and compared."""
SAVE_EVERY_STEPS = 2
_PATIENCE_SECONDS = 300.0
_MOST_SAVES = 4
_LOADED_LATE = ("sklearn.datasets", "torch._dynamo")
"""What the first session of a process imports; the server has it already."""


def tiny(**options: Any) -> Session:
    """A small session in which everything that a checkpoint has to hold is at work."""
    settings: dict[str, Any] = {
        "batch_size": 64, "epochs": 12, "lr": 0.05, "scheduler": "step", "seed": 1,
        "freeze": Plasticity(interval_steps=2, window=3, patience=2, tolerance=1.2, bootstrap_change=5.0),
        "sieve": CirculantSieve(fraction=0.25, interval_epochs=1), "sparsity": MEST(sparsity=0.8, interval_steps=7),
    }  # fmt: skip
    return Session("mlp", "digits", **{**settings, **options})


def digest(session: Session) -> str:
    """What all weights and buffers are, to the bit."""
    found = hashlib.sha256()
    for name, tensor in session.model.state_dict().items():
        found.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def kill_again_and_again(count: int, *, seed: int = 0, longest_seconds: float = 0.05) -> dict[str, Any]:
    """Train and kill `count` times; each time load the last checkpoint and go on from it beside a run without kills.

    Args:
        count: kills, >= 1.
        seed: decides the moments.
        longest_seconds: a kill falls at most so long after training has gone on, or after one of the first saves.

    Returns:
        Counts by name: ``kills``, ``exact`` (loaded and went on to the bit), ``half_files`` (a newest checkpoint that
        could not be read), ``wrong_journals``, ``runs``, ``steps_lost_most`` and ``half_files_left`` (temporary files
        that a kill left behind: it fell into a write).
    """
    draw, whole = random.Random(seed), _without_kills()
    found = dict.fromkeys(
        ("kills", "exact", "half_files", "wrong_journals", "runs", "steps_lost_most", "half_files_left"), 0
    )
    with tempfile.TemporaryDirectory() as place:
        folder, newest = Path(place) / "0", 0
        while found["kills"] < count:
            saves = draw.randrange(0 if newest else 1, _MOST_SAVES)
            finished = _train_and_kill(folder, saves, draw.uniform(0.0, longest_seconds))
            if finished or newest >= len(whole) - STEPS_AHEAD - 1:
                found["runs"] += 1
                folder, newest = Path(place) / str(found["runs"]), 0
                continue
            found["kills"] += 1
            found["half_files_left"] += len(list(folder.glob(".*.tmp")))
            newest = _look(folder, whole, newest, found)
    return found


def _without_kills() -> list[tuple[float, str]]:
    """Loss and digest behind each step of the run without kills, from the beginning."""
    session = tiny()
    steps = [(float("nan"), digest(session))]
    while session.steps_done < session.planned_steps:
        steps.append((session.step().loss, digest(session)))
    session.close()
    return steps


def _look(folder: Path, whole: list[tuple[float, str]], before: int, found: dict[str, int]) -> int:
    """Go on from the newest checkpoint and compare; answers with its step."""
    _, tree, notes = latest(folder)
    step = int(tree["state"]["step"])
    found["half_files"] += bool(notes) or step < before
    try:
        history, _ = recover(folder / NAME)
        steps, losses = history.steps["step"].tolist(), history.steps["loss"].tolist()
        right = steps == list(range(1, len(steps) + 1)) and losses == [loss for loss, _ in whole[1 : len(steps) + 1]]
        found["wrong_journals"] += not right
        found["steps_lost_most"] = max(found["steps_lost_most"], len(steps) - step)
    except CheckpointError:
        found["wrong_journals"] += 1
    session = Session.load(checkpoints(folder)[-1])
    exact = session.steps_done == step and digest(session) == whole[step][1]
    for number in range(step + 1, step + STEPS_AHEAD + 1):
        if number < len(whole):
            exact = exact and (session.step().loss, digest(session)) == whole[number]
    session.close()
    found["exact"] += exact
    return step


def _train_and_kill(folder: Path, saves: int, seconds: float) -> bool:
    """Kill so many seconds after so many saves; True when training came to its end before."""
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(str(folder), theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        for _ in range(1 + saves):
            if not ours.poll(_PATIENCE_SECONDS):
                raise CheckpointError(f"the training process did nothing for {_PATIENCE_SECONDS:.0f} seconds.")
            ours.recv()
        process.join(seconds)
        return not process.is_alive()
    except EOFError:
        return True
    finally:
        process.kill()
        process.join()
        ours.close()


def _train(folder: str, tell: Connection) -> None:
    """Tells when it begins, and of each save."""
    torch.set_num_threads(1)
    autosave: Mapping[str, Any] = {"save_every_steps": SAVE_EVERY_STEPS}
    session = Session.load(folder, **autosave) if checkpoints(folder) else tiny(run_dir=folder, **autosave)
    session.subscribe(lambda _event: tell.send("saved"), CheckpointSaved)
    tell.send("training")
    session.run(progress=False)
    session.close()


def _context() -> Any:
    """Where processes come from: a server that has this module imported already, where the system can fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_LOADED_LATE])
    return context
