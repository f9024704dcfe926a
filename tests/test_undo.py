"""Undo, redo, fork, replay and export: a run can be taken back, doubled and done again, exactly."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import egeria_lab as lab
from egeria_lab import commands as c
from egeria_lab.engine.session_state import capture
from egeria_lab.engine.undo import MOST_APART
from egeria_lab.errors import CheckpointError, InvalidSettingError
from egeria_lab.events import CommandRedone, CommandRejected, CommandUndone, LayerFrozen

Make = Callable[..., lab.Session]
EAGER: dict[str, Any] = {
    "interval_steps": 2, "window": 3, "patience": 2, "tolerance": 1.2, "bootstrap_change": 5.0, "refresh_evals": 7,
    "reference": "fp32",
}  # fmt: skip


def digits(**options: Any) -> lab.Session:
    settings: dict[str, Any] = {
        "batch_size": 64, "epochs": 8, "lr": 0.05, "scheduler": "step", "seed": 1, "freeze": lab.Plasticity(**EAGER),
    }  # fmt: skip
    return lab.Session("mlp", "digits", **{**settings, **options})


def flat(tree: Any, path: str = "") -> dict[str, str]:
    """A state as comparable texts, without clocks and without what tells of undoing itself."""
    if isinstance(tree, dict):
        found: dict[str, str] = {}
        for key, value in tree.items():
            if key not in ("events", "history", "commands", "recorder", "seconds", "waited_seconds", "worker_seconds"):
                found.update(flat(value, f"{path}/{key}"))
        return found
    if isinstance(tree, (list, tuple)):
        return {k: v for i, value in enumerate(tree) for k, v in flat(value, f"{path}/{i}").items()}
    return {path: repr(tree.tolist()) if isinstance(tree, Tensor) else repr(tree)}


def snapshot(session: lab.Session) -> dict[str, str]:
    tree = capture(session).tree
    losses = tree["parts"]["history"]["steps"]["rows"][2].tolist()
    return {**flat(tree), "losses": repr(losses)}


def randomly(session: lab.Session, draw: random.Random) -> None:
    layer = draw.choice(session.layers.names[:-1])
    draw.choice(
        [
            lambda: session.freeze(layer),
            lambda: session.thaw(layer),
            lambda: session.pin(layer),
            lambda: session.unpin(layer),
            lambda: session.override("freeze.tolerance", draw.choice([0.2, 0.7, 2.0])),
            lambda: session.override("freeze.tolerance", draw.choice([0.2, 0.7]), layer=layer),
            lambda: session.override("optimizer.lr", draw.choice([0.01, 0.05])),
            lambda: session.reset("freeze.tolerance"),
            lambda: session.discard([draw.randrange(1000)]),
            lambda: session.extend(1),
        ]
    )()


@pytest.mark.parametrize("seed", range(20))
def test_undo_of_everything_is_the_start_and_redo_the_end(seed: int) -> None:
    draw = random.Random(seed)
    session = digits(optimizer=("sgd", "adam")[seed % 2], lr=None, seed=seed)
    session.step(draw.randrange(1, 30))
    states = [snapshot(session)]
    for _ in range(40):
        if len(states) > 7:
            break
        before = len(session._undo_ring.commands())
        at_rest = snapshot(session)
        randomly(session, draw)
        if len(session._undo_ring.commands()) == before:
            continue  # it had no effect
        states.append(at_rest)
        session.step(draw.randrange(1, 8))
    last = snapshot(session)
    done = len(states) - 1
    assert done > 3
    for expected in reversed(states[1:]):
        assert session.undo().state == "done"
        assert snapshot(session) == expected
    assert session.undo().state == "rejected"
    for _ in range(done):
        assert session.redo().state == "done"
    assert snapshot(session) == last
    assert session.redo().state == "rejected"
    session.close()


def test_undo_tells_what_it_did() -> None:
    session = digits(freeze=None)
    session.step(5)
    session.freeze("layers.0")
    session.step(4)
    receipt = session.undo()
    event = receipt.event
    assert isinstance(event, CommandUndone)
    assert (event.step, event.undone_from, event.by) == (5, 9, "user")
    assert "FreezeLayer" in event.sentence()
    assert "back from step 9 to 5" in event.sentence()
    assert session.steps_done == 5
    assert not session.layers.frozen
    assert len(session.history.steps) == 5
    assert not session.events.of(LayerFrozen)
    session.step(2)
    again = session.redo()
    assert isinstance(again.event, CommandRedone)
    assert (again.event.step, again.event.redone_from) == (9, 7)
    assert session.layers.frozen == ("layers.0",)
    session.undo()
    session.thaw("layers.0")  # rejected: nothing to do, so it does not stand in the way
    assert session.redo().state == "done"
    session.undo()
    session.pin("layers.1")
    assert session.redo().state == "rejected"
    session.close()


def test_only_commands_that_did_something_can_be_undone() -> None:
    session = digits(freeze=None)
    session.freeze("layers.0")
    session.freeze("layers.0")
    assert isinstance(session.events[-1], CommandRejected)
    assert [type(command) for command in session._undo_ring.commands()] == [c.FreezeLayer]
    session.undo()
    assert "there is nothing to undo" in str(session.undo())
    session.close()


def test_memory_is_bounded() -> None:
    session = digits(freeze=None)
    one = capture(session).num_bytes
    session.close()
    session = digits(freeze=None, undo_bytes=3 * one + one // 2)
    for number in range(10):
        session.override("optimizer.lr", 0.01 * (number + 1))
    assert session._undo_ring.num_bytes <= 3 * one + one // 2
    undone = 0
    while session.undo().state == "done":
        undone += 1
    assert undone == 3
    assert session.setting("optimizer.lr") == pytest.approx(0.07)
    session.close()
    for size, why in ((0, "nothing to undo"), (one // 2, "one state takes")):
        session = digits(freeze=None, undo_bytes=size)
        session.freeze("layers.0")
        assert why in str(session.undo())
        session.close()


def test_a_long_history_does_not_fill_the_ring() -> None:
    session = digits(freeze=None)
    one = capture(session).num_bytes
    session.close()
    session = digits(freeze=None, undo_bytes=4 * one)
    for _ in range(20_000):  # as after so many steps
        session.history.plasticity.append(step=0)
    assert session.history.plasticity._data.nbytes > 4 * one
    for number in range(3):
        session.override("optimizer.lr", 0.01 * (number + 1))
    ring = session.undo_ring
    assert len(ring.commands()) == 3
    assert 3 * one <= ring.num_bytes <= 4 * one
    session.history.plasticity._data = session.history.plasticity._data.copy()  # as when the table grows
    assert ring.num_bytes > 4 * one  # the states hold the old one alone
    session.history.plasticity.load_state_dict(ring._done[-1].before.tree["parts"]["history"]["plasticity"])
    assert session.undo().state == "done"
    assert session.setting("optimizer.lr") == pytest.approx(0.02)
    assert len(session.history.plasticity) == 20_000
    session.close()


def test_undo_while_a_run_is_under_way() -> None:
    session = digits(freeze=None, epochs=30)
    session.start()
    for _ in range(3):
        receipt = session.freeze("layers.0")
        assert receipt.wait(30)
        assert session.undo().wait(30)
    session.wait()
    assert session.steps_done == session.planned_steps
    assert not session.layers.frozen
    plain = digits(freeze=None, epochs=30)
    plain.step(plain.planned_steps)
    assert session.history["steps"]["loss"].tolist() == plain.history["steps"]["loss"].tolist()
    session.close()
    plain.close()


def test_the_newest_checkpoint_follows_an_undo(tmp_path: Path) -> None:
    session = digits(run_dir=tmp_path, save_every_steps=5, freeze=None)
    session.step(7)
    session.freeze("layers.0")
    session.step(10)
    session.undo()
    session._autosave = None  # killed
    again = lab.Session.load(tmp_path / "step-000000007.ckpt")
    assert sorted(p.name for p in tmp_path.glob("step*")) == ["step-000000005.ckpt", "step-000000007.ckpt"]
    assert not again.layers.frozen
    again.close()
    session.close()


# --- fork -------------------------------------------------------------------------------------------------


def trace(session: lab.Session) -> list[str]:
    events = [repr(e) for e in session.events]
    return [repr(session.history["steps"]["loss"].tolist()), *events, *snapshot(session).values()]


@pytest.mark.parametrize("k", [3, 61])
def test_a_fork_goes_on_as_the_original(k: int) -> None:
    session = digits(optimizer="adam", lr=None)
    session.step(k)
    session.freeze("layers.1")
    second = session.fork()
    assert trace(second) == trace(session)
    session.step(50)
    untouched = trace(session)
    second.step(50)
    assert trace(second) == untouched
    second.thaw("layers.1")
    second.step(20)
    assert trace(session) == untouched  # whatever becomes of the fork
    session.step(20)
    assert session.history["steps"]["loss"].tolist() != second.history["steps"]["loss"].tolist()
    second.close()
    session.step()
    session.close()


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs * self.temperature, targets)


def test_own_objects_are_doubled(make_session: Make, tiny_model: Callable[..., nn.Module]) -> None:
    model, loss = tiny_model(), Weighted()
    optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=0.01)
    session = make_session(model=model, loss=loss, optimizer=optimizer)
    session.step(4)
    session.freeze("first")
    session.step(4)
    second = session.fork()
    second.thaw("first")
    session.thaw("first")
    one, other = [session.step().loss for _ in range(9)], [second.step().loss for _ in range(9)]
    assert one == other
    assert float(loss.temperature.detach()) == float(second.trainer.loss.temperature.detach())  # type: ignore[attr-defined]
    mine = {id(p) for p in [*model.parameters(), *loss.parameters()]}
    assert not any(id(p) in mine for group in second.optimizer.param_groups for p in group["params"])
    second.close()
    assert not second.model._forward_pre_hooks
    assert [id(g) for g in model.parameters()] == [id(p) for p in session.model.parameters()]


def test_a_fork_may_be_made_otherwise(make_session: Make) -> None:
    session = make_session()
    session.step(3)
    second = session.fork(optimizer="adam", lr=1e-3)
    assert type(second.optimizer) is torch.optim.Adam
    second.step(3)
    second.close()
    ready = make_session(scheduler=None)
    ready._arguments["scheduler"] = torch.optim.lr_scheduler.StepLR(ready.optimizer, 3)
    with pytest.raises(InvalidSettingError, match="ready-made cannot be forked"):
        ready.fork()


def test_a_fork_of_a_fork_can_be_saved(tmp_path: Path) -> None:
    session = digits(run_dir=tmp_path / "run", freeze=None)
    session.step(3)
    second = session.fork()
    third = second.fork()
    again = lab.Session.load(third.save(tmp_path / "a.ckpt"))
    assert [s.step().loss for s in (session, second, third, again)] == [session.step(1).loss] * 0 + [
        session.history["steps"]["loss"][3]
    ] * 4
    for one in (session, second, third, again):
        one.close()


def test_sessions_and_their_forks_are_freed() -> None:
    session = digits(freeze=None)
    session.freeze("layers.0")
    session.step(2)
    second = session.fork()
    dead = [weakref.ref(session.model), weakref.ref(second.model)]
    session.close()
    second.close()
    del session, second
    import gc

    gc.collect()
    assert [ref() for ref in dead] == [None, None]


# --- replay -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_run_can_be_done_again(tmp_path: Path, seed: int) -> None:
    draw = random.Random(100 + seed)
    session = digits(run_dir=tmp_path, seed=seed, save_every_steps=50)
    for number in range(12):
        randomly(session, draw)
        if number % 4 == 3:
            session.undo()
        session.step(draw.randrange(1, 9))
    session.close()
    found = lab.replay(tmp_path)
    assert found.exact, found.difference
    assert found.steps == session.steps_done
    assert "every loss and every event the same" in repr(found)


def test_runs_of_all_kinds_can_be_done_again(tmp_path: Path) -> None:
    session = digits(run_dir=tmp_path, scheduler="cosine", epochs=None)
    session.start(epochs=3)  # decides the plan
    session.pin("layers.0")
    session.wait()
    session.run(steps=10, progress=False)  # lengthens it
    session.close()
    again = lab.Session.load(tmp_path)
    again.run(steps=5, progress=False)
    again.close()
    found = lab.replay(tmp_path)
    assert found.exact, found.difference
    assert (found.steps, found.commands) == (3 * 23 + 15, 1)


def test_a_replay_notices_what_differs(tmp_path: Path) -> None:
    from egeria_lab.checkpoint.file import read, write

    session = digits()
    session.step(20)
    session.freeze("layers.0")
    session.step(10)
    path = session.save(tmp_path / "a.ckpt")
    session.close()
    assert lab.replay(path).exact
    tree = read(path)
    rows = tree["state"]["parts"]["history"]["steps"]["rows"]
    rows[2, 24] += 1e-9
    write(tmp_path / "b.ckpt", tree)
    assert "the loss of step 25 is " in str(lab.replay(tmp_path / "b.ckpt").difference)
    tree = read(path)
    tree["state"]["parts"]["commands"]["entries"][-1]["fields"]["layer"] = "layers.1"
    write(tmp_path / "c.ckpt", tree)
    assert not lab.replay(tmp_path / "c.ckpt").exact
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        lab.replay(tmp_path / "nothing")


# --- export -----------------------------------------------------------------------------------------------


def test_export_loads_into_the_bare_architecture(make_session: Make, tiny_model: Callable[..., nn.Module]) -> None:
    """traps row 39."""
    model: Any = tiny_model()
    prune.l1_unstructured(model.first[0], "weight", 0.5)
    session = make_session(model=model)
    session.step(5)
    session.freeze("first")
    session.step(2)
    exported = session.export()
    bare = tiny_model(seed=9)
    bare.load_state_dict(exported.state_dict, strict=True)
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    training = {m: m.training for m in session.model.modules()}
    session.model.eval()
    with torch.no_grad():
        assert torch.allclose(bare.eval()(x), session.model(x), atol=1e-6)
        assert torch.equal(exported.model(x), bare(x))
    for module, mode in training.items():
        module.training = mode
    assert set(exported.state_dict) == set(tiny_model().state_dict())
    assert all(p.requires_grad for p in exported.model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in exported.model.modules())
    assert int((exported.state_dict["first.0.weight"] == 0).sum()) == 24
    session.step(2)


def test_export_of_attention_is_plain() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(32, 3))
    data = lab.data.load("synthetic", num_samples=16, num_valid=8, shape=(4, 8), num_classes=3)
    session = lab.Session(model, data, batch_size=8, freeze=None, lr=0.01)
    session.step(2)
    exported = session.export().model
    for plain, trained in zip(exported.modules(), model.modules(), strict=True):
        assert type(plain) is type(trained)
        assert set(vars(plain)) == set(vars(trained))
    session.close()


def test_export_of_masked_training_is_sparse_and_plain() -> None:
    session = digits(freeze=None, sparsity=lab.MEST(sparsity=0.8, soft_bound=False))
    session.step(10)
    tensors = session.export().state_dict
    bare = lab.models.build("mlp", input_shape=(1, 8, 8), num_classes=10, seed=3)
    bare.load_state_dict(tensors, strict=True)
    weights = [x for name, x in tensors.items() if x.dim() == 2]
    assert sum(int((x == 0).sum()) for x in weights) / sum(x.numel() for x in weights) > 0.7
    session.close()


def test_commands_from_many_threads_with_undo_and_fork() -> None:
    session = digits(epochs=40)
    session.start()
    receipts: list[Any] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(12):
                kind = draw.randrange(6)
                if kind == 0:
                    receipts.append(session.undo())
                elif kind == 1:
                    receipts.append(session.redo())
                elif kind == 2:
                    session.fork(freeze=None).close()
                elif kind == 3:
                    session.pause()
                    session.evaluate()
                    session.resume()
                else:
                    receipts.append(session.freeze(draw.choice(["layers.0", "layers.1"])))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert all(receipt.wait(60) for receipt in receipts)
    session.stop()
    session.wait(60)
    session.close()


def test_hundreds_of_commands_at_one_boundary_cost_a_few_states_and_are_undone_from_the_last_one_on() -> None:
    session = lab.Session("mlp", "digits", epochs=1, freeze=None)
    session.step()
    for _ in range(100):
        session.pin("layers.1")
        session.unpin("layers.1")
    assert len(session._undo_ring.commands()) == MOST_APART
    session.step()
    session.freeze("layers.0")
    session.undo()
    assert session.layers["layers.0"].state == "active"
    session.undo()
    assert len(session._undo_ring.commands()) == MOST_APART - 1
