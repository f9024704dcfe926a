"""One rank of a test: trains what its scenario says and writes down what it saw, as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import egeria_lab as lab
from egeria_lab.data.datasets import ArrayDataset

RANK = int(os.environ.get("RANK", "0"))
OUT = Path(sys.argv[2]) if __name__ == "__main__" else Path()


def main() -> None:
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    try:
        SCENARIOS[sys.argv[1]](seen)
    except lab.EgeriaLabError as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    (OUT / f"rank{RANK}.json").write_text(json.dumps(seen))


def digest(session: lab.Session) -> str:
    """All weights and buffers, and what the optimizer and the sieve know, to the bit."""
    hashed = hashlib.sha256()
    tensors = list(session.model.state_dict().values())
    tensors += [v for s in session.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    tensors += [session.sieve.kept_ids()]
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def everything(seen: dict[str, Any]) -> None:
    """Rule, sieve, masks, and commands by hand, over 100 steps."""
    session = lab.Session(
        "mlp", "digits", epochs=8, batch_size=60, save_every_minutes=None,
        freeze=lab.Plasticity(
            interval_steps=3, window=4, patience=2, tolerance=0.9, bootstrap_change=5.0, settle_epochs=0.5
        ),
        sieve=lab.CirculantSieve(fraction=0.2, interval_epochs=1), sparsity=lab.MEST(sparsity=0.5, interval_epochs=1),
        device="cpu",
    )  # fmt: skip
    losses, sent = [], []
    for step in range(1, 101):
        if step == 11:
            session.freeze("layers.0")
        if step == 21:
            session.thaw("layers.0")
        if step == 31:
            session.override("optimizer.lr", 0.05)
        if step == 41:
            session.discard([3, 5])
        record = session.step()
        losses.append(record.loss)
        layers = [layer for layer in session.layer_modules if layer.name not in record.frozen]
        trained = sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters)
        bytes_sent = session.ranks.exchange.step_bytes if session.ranks is not None else trained
        sent.append((len(record.frozen), bytes_sent, trained))
    seen |= {
        "losses": losses,
        "sent": sent,
        "digest": digest(session),
        "events": [f"{e.step} {type(e).__name__} {getattr(e, 'layer', '')}" for e in session.events],
        "masks": len(session.history.sparsity),
        "exchange": session.savings().to_dict()["exchange"],
        "evaluation": session.evaluate()["accuracy"],
    }
    session.close()
    seen["keys"] = list(session.model.state_dict())


class Net(nn.Module):
    """Batch norm and dropout, and a branch that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.ReLU())
        self.spare = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.front(x)))


def own_data() -> tuple[ArrayDataset, ArrayDataset]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(131, 8, generator=generator)
    y = (x[:, :3] + 0.3 * torch.randn(131, 3, generator=generator)).argmax(1)
    return ArrayDataset(x[:101], y[:101]), ArrayDataset(x[101:], y[101:])


def own_model(seen: dict[str, Any]) -> None:
    """Odd batch sizes, batch norm, dropout, an unused layer, a cache of the frozen front."""
    torch.manual_seed(RANK)  # rank 0's weights must win
    session = lab.Session(
        Net(), own_data(), epochs=6, batch_size=16, lr=0.05, freeze=None, cache=lab.ActivationCache(), device="cpu"
    )
    session.step(6)
    session.freeze(session.layers.names[0])
    session.step(22)
    frozen_statistics = session.model.front[1].running_mean.clone()
    session.step(8)
    seen |= {
        "digest": digest(session),
        "still": bool((session.model.front[1].running_mean == frozen_statistics).all()),
        "hits": session.savings().to_dict()["cache"]["hits"],
        "misses": session.savings().to_dict()["cache"]["misses"],
        "losses": [float(x) for x in session.history.steps["loss"]],
        "valid": session.history.epochs["valid_accuracy"].tolist(),
        "evaluation": session.evaluate()["accuracy"],
    }
    session.close()


class Failing(ArrayDataset):
    """Cannot hand out one sample."""

    def gather(self, ids: torch.Tensor) -> Any:
        if 40 in ids.tolist():
            raise RuntimeError("sample 40 is broken")
        return super().gather(ids)


def failing(seen: dict[str, Any]) -> None:
    """One rank's data cannot be read: all ranks end, and nothing was applied."""
    train, valid = own_data()
    session = lab.Session(
        Net(), (Failing(train.inputs, train.targets), valid), batch_size=16, epochs=2, freeze=None, device="cpu"
    )
    before = None
    try:
        for _ in range(12):
            before = digest(session)
            session.step()
    except Exception as error:
        seen |= {
            "raised": f"{type(error).__name__}: {error}",
            "step": session.steps_done,
            "same": digest(session) == before,
        }


def unequal(seen: dict[str, Any]) -> None:
    """The ranks are asked for different things."""
    lab.Session("mlp", "digits", lr=0.1 * (1 + RANK), freeze=None, device="cpu")


def killed(seen: dict[str, Any]) -> None:
    """Rank 1 dies in the middle of a step."""
    session = lab.Session(
        "mlp", "digits", epochs=2, freeze=None, run_dir=OUT / "run", save_every_steps=5, save_every_minutes=None,
        device="cpu",
    )  # fmt: skip
    session.step(7)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    session.run(progress=False)


def whole(seen: dict[str, Any]) -> None:
    """What the killed run would have been."""
    session = lab.Session("mlp", "digits", epochs=2, freeze=None, device="cpu")
    session.run(progress=False)
    seen["losses"] = [float(x) for x in session.history.steps["loss"]]


def resumed(seen: dict[str, Any]) -> None:
    """Go on with what the killed run left."""
    session = lab.Session.load(OUT.parent / "killed" / "run", run_dir=None)
    seen["from"] = session.steps_done
    session.run(progress=False)
    seen["losses"] = [float(x) for x in session.history.steps["loss"]]
    seen["digest"] = digest(session)


def steered(seen: dict[str, Any]) -> None:
    """A background run that rank 0 pauses, steers and stops."""
    session = lab.Session("mlp", "digits", epochs=4000, freeze=None, device="cpu")
    session.step()
    session.save(OUT / f"rank{RANK}.ckpt")  # at rest, each for itself: nobody waits for anybody
    if RANK == 1:
        session.save(OUT / "again.ckpt")
    try:
        session.fork()
    except lab.InvalidSettingError as error:
        seen["fork"] = str(error)
    session.step()
    session.start()
    if RANK == 0:
        receipt = session.freeze("layers.0")
        assert receipt.wait(60)
        session.pause()
        while session.state != "paused":
            pass
        receipt = session.freeze("layers.1")  # lands while the run stands still
        assert receipt.wait(60)
        session.resume()
        receipt = session.override("optimizer.lr", 0.01)
        assert receipt.wait(60)
        session.stop()
    else:
        rejected = session.freeze("layers.2")
        assert rejected.wait(60)
        seen["rejected"] = str(rejected)
    session.wait()
    seen |= {
        "state": session.state,
        "steps": session.steps_done,
        "digest": digest(session),
        "landed": [
            f"{e.step} {e.sentence()}"
            for e in session.events
            if e.by == "user" and not type(e).__name__.startswith(("Run", "Checkpoint"))
        ],
    }


SCENARIOS = {f.__name__: f for f in (everything, own_model, failing, unequal, killed, whole, resumed, steered)}

if __name__ == "__main__":
    main()
