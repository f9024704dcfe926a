"""Train, save, load in a new process, train on: bit-equal to a run without a stop, in every combination.

Run as a script, this file is the new process: ``python test_resume_matrix.py FOLDER`` continues every checkpoint
in a folder and prints what came out as JSON.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

import egeria_lab as lab

FIRST, SECOND = 40, 40
EAGER: dict[str, Any] = {
    "interval_steps": 2, "window": 3, "patience": 2, "tolerance": 1.2, "bootstrap_change": 5.0, "refresh_evals": 7,
}  # fmt: skip
RULE = lab.Plasticity(**EAGER)
CACHE, AUGMENT = lab.ActivationCache(self_profiling=False), lab.Augment(noise=0.1, views=2)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"freeze": None},
    "freezing": {"freeze": RULE},
    "thawed": {"freeze": RULE},
    "masks": {"freeze": None, "sparsity": lab.MEST(sparsity=0.8, interval_steps=7)},
    "sieve": {"freeze": None, "sieve": lab.CirculantSieve(fraction=0.25, interval_epochs=1)},
    "cache": {"freeze": None, "cache": CACHE, "augment": AUGMENT},
    "bf16": {"freeze": RULE, "precision": "bf16"},
    "accumulation": {"freeze": RULE, "accumulate": 4, "batch_size": 16},
    "ema": {"freeze": RULE, "ema": 0.9},
    "everything": {
        "freeze": RULE, "sieve": lab.CirculantSieve(fraction=0.25, interval_epochs=1), "cache": CACHE,
        "augment": AUGMENT, "sparsity": lab.MEST(sparsity=0.8, interval_steps=7), "accumulate": 2, "batch_size": 32,
        "ema": 0.9,
    },
}  # fmt: skip
OWN: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=FIRST + SECOND + 10),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}
BY_HAND = {"thawed": (12, 30), "cache": (8, 300)}
"""Step at which the front freezes by hand and at which it thaws."""


def drive(session: lab.Session, kind: str, until: int) -> None:
    freeze, thaw = BY_HAND.get(kind, (-1, -1))
    while session.steps_done < until:
        if session.steps_done == freeze:
            session.freeze("layers.0")
        if session.steps_done == thaw:
            session.thaw("layers.0")
        session.step()


def outcome(session: lab.Session) -> dict[str, Any]:
    digest = hashlib.sha256()
    for name, tensor in session.model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    if session.config["ema"] is not None:
        for tensor in session.export(ema=True).state_dict.values():
            digest.update(tensor.numpy().tobytes())
    ours = [e.to_dict() for e in session.events if not type(e).__name__.startswith(("Checkpoint", "Cache"))]
    losses = [float(x).hex() for x in session.history["steps"]["loss"]]
    return {"losses": losses, "events": json.loads(json.dumps(ours)), "weights": digest.hexdigest()}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_combination_resumes_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    whole: dict[str, dict[str, Any]] = {}
    for kind, options in KINDS.items():
        for scheduler in ("cosine", "step", *OWN):
            session = lab.Session(
                "mlp", "digits", epochs=6, optimizer=optimizer, lr=0.02 if optimizer == "sgd" else None,
                scheduler=OWN.get(scheduler, scheduler), seed=2, **{"batch_size": 64, **options},
            )  # fmt: skip
            drive(session, kind, FIRST)
            name = f"{kind} {scheduler}"
            session.save(tmp_path / f"{name}.ckpt")
            drive(session, kind, FIRST + SECOND)
            whole[name] = outcome(session)
            session.close()
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    resumed = json.loads(done.stdout)
    assert list(resumed) == sorted(whole)
    different = [
        f"{name}: {part}" for name in whole for part in whole[name] if whole[name][part] != resumed[name][part]
    ]
    assert not different
    frozen = [e for e in whole["everything step"]["events"] if e["event"] == "LayerFrozen"]
    assert frozen  # by the rule


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    for path in sorted(folder.glob("*.ckpt")):
        kind, _, scheduler = path.stem.partition(" ")
        given = {"scheduler": OWN[scheduler]} if scheduler in OWN else {}
        session = lab.Session.load(path, **given)
        drive(session, kind, FIRST + SECOND)
        found[path.stem] = outcome(session)
        session.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
