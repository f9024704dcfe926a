"""A run can be stopped, moved, saved, loaded in a new process, and is exactly what it was."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import egeria_lab as lab
from egeria_lab.checkpoint.file import read, write
from egeria_lab.checkpoint.folder import RunFolder, checkpoints, latest
from egeria_lab.checkpoint.journal import NAME, recover
from egeria_lab.errors import CheckpointError, InvalidSettingError
from egeria_lab.events import CheckpointLoaded, CheckpointSaved, EpochFinished, SaveFailed

Make = Callable[..., lab.Session]
Losses = Callable[[lab.Session], list[float]]
EAGER: dict[str, Any] = {
    "interval_steps": 2, "window": 3, "patience": 2, "tolerance": 1.2, "bootstrap_change": 5.0, "refresh_evals": 7,
}  # fmt: skip


def digits(**options: Any) -> lab.Session:
    settings: dict[str, Any] = {
        "batch_size": 64, "epochs": 8, "lr": 0.05, "scheduler": "step", "seed": 1, "freeze": lab.Plasticity(**EAGER),
    }  # fmt: skip
    return lab.Session("mlp", "digits", **{**settings, **options})


def equal(a: nn.Module, b: nn.Module) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


CONTINUE = """
import json, sys, torch
torch.set_num_threads(1)
import egeria_lab as lab
session = lab.Session.load(sys.argv[1])
session.step(int(sys.argv[2]))
frozen = [row.name for row in session.layers if row.frozen]
events = [e.to_dict() for e in session.events if not type(e).__name__.startswith("Checkpoint")]
total = sum(float(p.detach().double().abs().sum()) for p in session.model.parameters())
print(json.dumps([session.history["steps"]["loss"].tolist(), frozen, events, total, repr(session.layers)]))
session.close()
"""


@pytest.mark.parametrize("frozen", [0, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_new_process_goes_on_to_the_bit(tmp_path: Path, frozen: int, optimizer: str) -> None:
    """traps rows 19 and 30."""
    session = digits(optimizer=optimizer, lr=None)
    session.step(20)
    for name in session.layers.names[:frozen]:
        session.freeze(name)
    session.step(5)
    session.save(tmp_path / "run.ckpt")
    session.step(30)
    code = [sys.executable, "-c", CONTINUE, str(tmp_path / "run.ckpt"), "30"]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    losses, layers, events, total, table = json.loads(done.stdout)
    assert losses == session.history["steps"]["loss"].tolist()
    assert layers == [row.name for row in session.layers if row.frozen]
    ours = [e.to_dict() for e in session.events if not type(e).__name__.startswith("Checkpoint")]
    assert events == json.loads(json.dumps(ours))
    assert total == sum(float(p.detach().double().abs().sum()) for p in session.model.parameters())
    assert table == repr(session.layers)
    session.close()


def test_load_goes_on_and_says_so(tmp_path: Path) -> None:
    session = digits()
    session.step(60)
    path = session.save(str(tmp_path / "run.ckpt"))
    saved = session.events[-1]
    assert isinstance(saved, CheckpointSaved)
    assert saved.num_bytes == path.stat().st_size
    again = lab.Session.load(path)
    assert again.steps_done == 60
    assert [e.sentence() for e in again.events.of(CheckpointLoaded)] == [f"Loaded from {path}."]
    assert repr(again.layers) == repr(session.layers)
    assert again.savings().book.executed_flops == session.savings().book.executed_flops
    session.step(40)
    again.step(40)
    assert equal(session.model, again.model)
    assert [float(x) for x in session.history["steps"]["loss"]] == [float(x) for x in again.history["steps"]["loss"]]
    session.close()
    again.close()


def test_save_at_every_step_of_freeze_thaw_freeze(tmp_path: Path, make_session: Make, losses: Losses) -> None:
    """traps rows 31 and 33: saving never raises, loading never sees a duplicate group."""

    def script(session: lab.Session) -> None:
        at = {2: session.freeze, 4: session.thaw, 6: session.freeze, 8: session.thaw}
        if session.steps_done in at:
            at[session.steps_done]("first")

    whole = make_session(optimizer="adam", lr=None)
    for _ in range(12):
        script(whole)
        whole.save(tmp_path / f"{whole.steps_done}.ckpt")
        whole.step()
    for step in range(12):
        again = lab.Session.load(
            tmp_path / f"{step}.ckpt", model=type(whole.model)(), data=whole.data
        )  # its weights are overwritten
        while again.steps_done < 12:
            if again.steps_done > step:
                script(again)
            again.step()
        assert losses(again) == losses(whole)
        assert equal(again.model, whole.model)
        again.close()


def test_own_objects_must_be_given_again(
    tmp_path: Path, make_session: Make, tiny_model: Callable[..., nn.Module]
) -> None:
    session = make_session(
        loss=nn.CrossEntropyLoss(reduction="none"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)
    )
    session.step(3)
    session.save(tmp_path / "a.ckpt")
    given: dict[str, Any] = {}
    for name, value in (
        ("model", tiny_model(seed=7)),
        ("data", session.data),
        ("loss", nn.CrossEntropyLoss(reduction="none")),
        ("optimizer", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)),
    ):
        with pytest.raises(
            CheckpointError, match=rf"made with {name}= of your own .* give it again, load\(…, {name}=…\)"
        ):
            lab.Session.load(tmp_path / "a.ckpt", **given)
        given[name] = value
    again = lab.Session.load(tmp_path / "a.ckpt", **given)
    assert again.step().loss == session.step().loss


def test_the_checkpoints_freeze_map_wins(
    tmp_path: Path, make_session: Make, tiny_model: Callable[..., nn.Module]
) -> None:
    """traps row 34: a model built with everything but the head frozen, or frozen elsewhere."""
    session = make_session(optimizer="adam", lr=None)
    session.step(3)
    session.freeze("second")
    session.step(3)
    session.save(tmp_path / "a.ckpt")
    other: Any = tiny_model(seed=3)
    for parameter in [*other.first.parameters(), *other.second.parameters()]:
        parameter.requires_grad_(False)
    again = lab.Session.load(tmp_path / "a.ckpt", model=other, data=session.data)
    note = again.events.of(CheckpointLoaded)[0].sentence()
    assert "the checkpoint's layers are the ones that are frozen (8 tensors changed, first.0.weight first)" in note
    assert [row.state for row in again.layers] == ["active", "frozen", "active"]
    session.thaw("second")
    again.thaw("second")
    assert [session.step().loss for _ in range(4)] == [again.step().loss for _ in range(4)]


def test_more_layers_frozen_after_loading(tmp_path: Path, make_session: Make) -> None:
    """traps row 35."""
    session = make_session(optimizer="adam", lr=None)
    session.step(3)
    session.save(tmp_path / "a.ckpt")
    again = lab.Session.load(tmp_path / "a.ckpt", model=type(session.model)(), data=session.data)
    again.freeze("first")
    again.freeze("second")
    session.freeze("first")
    session.freeze("second")
    assert [session.step().loss for _ in range(4)] == [again.step().loss for _ in range(4)]


def test_another_optimizer_lists_what_did_not_fit(tmp_path: Path, make_session: Make) -> None:
    session = make_session()
    session.step(3)
    session.save(tmp_path / "a.ckpt")
    again = lab.Session.load(
        tmp_path / "a.ckpt", model=type(session.model)(), data=session.data, optimizer="adamw", lr=1e-3
    )
    assert (
        "The optimizer was SGD and is AdamW: momentum_buffer of 10 parameters did not fit"
        in again.events[-1].sentence()
    )
    again.step(2)
    again.save(tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="went on from a checkpoint with another optimizer"):
        lab.replay(tmp_path / "b.ckpt", model=type(session.model)(), data=session.data)


def test_other_numbers_of_workers(tmp_path: Path, make_session: Make, tiny_data: lab.Data) -> None:
    def pair(workers: int) -> Any:
        loader = torch.utils.data.DataLoader(tiny_data.train, batch_size=8, shuffle=True, num_workers=workers)
        return loader, tiny_data.valid

    session = make_session(data=pair(0))
    session.step(5)
    session.save(tmp_path / "a.ckpt")
    again = lab.Session.load(tmp_path / "a.ckpt", model=type(session.model)(), data=pair(2))
    assert [session.step().loss for _ in range(6)] == [again.step().loss for _ in range(6)]


def test_a_cache_directory_from_a_file_is_not_used(tmp_path: Path) -> None:
    session = digits(cache=lab.ActivationCache(directory=tmp_path / "rows"), freeze=None)
    session.freeze("layers.0")
    session.step(3)
    session.save(tmp_path / "a.ckpt")
    session.close()
    again = lab.Session.load(tmp_path / "a.ckpt")
    again.step(30)
    assert "give cache= again for another" in again.events.of(CheckpointLoaded)[0].sentence()
    assert not any(tmp_path.glob("rows/*"))
    again.close()


def test_saving_while_a_run_is_under_way(tmp_path: Path) -> None:
    session = digits(freeze=None, epochs=20)
    session.start()
    for number in range(5):
        session.save(tmp_path / f"{number}.ckpt")
    session.wait()
    for number in range(5):
        again = lab.Session.load(tmp_path / f"{number}.ckpt")
        again.step(again.planned_steps - again.steps_done)
        assert equal(session.model, again.model)
        again.close()
    session.close()


def test_not_from_inside_a_step(tmp_path: Path) -> None:
    session = digits(freeze=None)
    problems: list[Exception] = []

    def on_epoch(_event: Any) -> None:
        for call in (lambda: session.save(tmp_path / "a.ckpt"), session.fork, session.export):
            try:
                call()
            except InvalidSettingError as error:
                problems.append(error)

    session.subscribe(on_epoch, EpochFinished)
    session.step(23)
    assert [str(p).split()[0] for p in problems] == ["save()", "fork()", "export()"]
    session.close()


# --- run directory -----------------------------------------------------------------------------------------


def test_autosave_by_steps_keeps_the_last_few(tmp_path: Path) -> None:
    session = digits(run_dir=tmp_path / "run", save_every_steps=10, keep_checkpoints=2)
    session.step(45)
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-000000030.ckpt", "step-000000040.ckpt"]
    session.close()
    assert checkpoints(tmp_path / "run")[-1].name == "step-000000045.ckpt"  # a clean end loses nothing
    again = lab.Session.load(tmp_path / "run")
    assert again.steps_done == 45
    again.close()


def test_autosave_by_minutes_follows_a_clock_that_does_not_jump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = digits(run_dir=tmp_path, freeze=None, save_every_minutes=1)
    now = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the wall clock jumps back to 1970
    session.step(3)
    assert not checkpoints(tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    session.step()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000000004.ckpt"]
    session.step()
    assert len(checkpoints(tmp_path)) == 1
    session.close()


def test_the_end_of_the_plan_is_saved(tmp_path: Path) -> None:
    session = digits(run_dir=tmp_path, freeze=None, epochs=1)
    session.run(progress=False)
    assert latest(tmp_path)[1]["state"]["step"] == 23
    session.close()


def test_a_run_directory_has_one_session(tmp_path: Path) -> None:
    first = digits(run_dir=tmp_path, freeze=None)
    with pytest.raises(CheckpointError, match=r"is in use by process \d+: close that session"):
        digits(run_dir=tmp_path, freeze=None)
    first.close()
    digits(run_dir=tmp_path, freeze=None).close()


def test_a_directory_that_goes_away_stops_nothing(tmp_path: Path, losses: Losses) -> None:
    plain = digits()
    plain.step(40)
    session = digits(run_dir=tmp_path / "run", save_every_steps=5)
    session.step(12)
    shutil.rmtree(tmp_path / "run")
    session.step(8)
    assert not session.events.of(SaveFailed)  # it was made again
    assert latest(tmp_path / "run")[1]["state"]["step"] == 20
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("no directory any more")
    session.step(15)
    failed = session.events.of(SaveFailed)
    assert len(failed) == 1  # not three times
    assert "could not be written" in failed[0].sentence()
    (tmp_path / "run").unlink()
    session.step(5)
    assert latest(tmp_path / "run")[1]["state"]["step"] == 40
    assert losses(session) == losses(plain)
    session.close()
    plain.close()


def test_a_directory_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"run_dir=.* cannot be used"):
        digits(run_dir=tmp_path / "file")


def test_the_newest_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    session = digits(run_dir=tmp_path, freeze=None, save_every_steps=5)
    session.step(10)
    session.close()
    newest = checkpoints(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    again = lab.Session.load(tmp_path)
    assert again.steps_done == 5
    assert "Passed over: " in again.events.of(CheckpointLoaded)[0].sentence()
    again.close()


def test_the_journal_has_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    session = digits(run_dir=tmp_path, save_every_steps=20)
    session.step(33)
    assert session._autosave is not None
    session._autosave.journal.flush()  # as after a second
    history, events = recover(tmp_path / NAME)
    for name in history:
        then, now = history[name].rows(), session.history[name].rows()
        assert all(repr(then[column].tolist()) == repr(now[column].tolist()) for column in now)
    assert [e.to_dict() for e in events] == [e.to_dict() for e in session.events]
    session.close()


def test_resuming_goes_on_with_the_journal(tmp_path: Path) -> None:
    session = digits(run_dir=tmp_path, save_every_steps=20)
    session.step(33)
    session._autosave.folder.close()  # type: ignore[union-attr]  # killed: nothing is saved at the end
    session._autosave = None
    again = lab.Session.load(tmp_path, save_every_steps=50)
    assert again.steps_done == 20
    again.step(30)
    again.close()
    history, events = recover(tmp_path / NAME)
    assert history.steps["step"].tolist() == list(range(1, 51))
    assert repr(history.steps["loss"].tolist()) == repr(again.history.steps["loss"].tolist())
    assert any(isinstance(e, CheckpointLoaded) for e in events)
    session.close()


CRASHED = """
import os, sys
import egeria_lab as lab
session = lab.Session("mlp", "digits", freeze=None, run_dir=sys.argv[1], save_every_steps=20)
session.step(20)
session.freeze("layers.0")
session.override("optimizer.lr", 0.07)
session.step(13)
session.thaw("layers.0")
os._exit(9)
"""


def test_commands_that_a_crash_took_are_named(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CRASHED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    again = lab.Session.load(tmp_path)
    (note,) = again.events.of(CheckpointLoaded)[0].notes
    assert note.startswith("13 steps and 3 commands after the checkpoint are lost: step 20: layers.0 frozen by user")
    assert "; step 20: optimizer.lr" in note
    assert "; step 33: layers.0 thawed by user" in note
    assert note.endswith(".")
    again.step(2)
    again.close()
    last = lab.Session.load(tmp_path)
    assert last.events.of(CheckpointLoaded)[-1].notes == ()  # closed in order: nothing is lost
    last.close()


def test_a_damaged_journal_says_nothing(tmp_path: Path) -> None:
    session = digits(run_dir=tmp_path)
    session.step(3)
    session.close()
    (tmp_path / NAME).write_text("rubbish")
    again = lab.Session.load(tmp_path)
    assert again.events.of(CheckpointLoaded)[0].notes == ()
    again.close()


def test_load_a_folder_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint that can be continued"):
        lab.Session.load(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        lab.Session.load(tmp_path / "nothing.ckpt")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("state"),
        lambda t: t.pop("arguments"),
        lambda t: t["state"].pop("model"),
        lambda t: t["state"].update(step="many"),
        lambda t: t["state"]["parts"].pop("freezer"),
        lambda t: t["state"]["parts"]["freezer"].update(parked=[{"trainable": ["nothing"]}]),
        lambda t: t["state"]["parts"]["schedule"].update(scheduler=7),
        lambda t: t["state"]["parts"]["history"]["steps"].update(rows=[1, 2]),
        lambda t: t["state"]["optimizer"].update(groups=[]),
        lambda t: t["state"]["model"]["parameters"].update({"head.weight": torch.zeros(1)}),
        lambda t: t["arguments"].update(freeze={"settings": "Popen", "fields": {"args": "ls"}}),
        lambda t: t["arguments"].update(freeze={"settings": "Plasticity", "fields": {"window": -1}}),
        lambda t: t["arguments"].update(model={"value": "no such model"}),
        lambda t: t["arguments"].update(surprise={"value": 1}),
    ],
)
def test_hostile_content_is_one_clear_error(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    session = digits(freeze=lab.Plasticity(reference="fp32"))
    session.step(2)
    path = session.save(tmp_path / "a.ckpt")
    session.close()
    tree = read(path)
    change(tree)
    write(path, tree)
    with pytest.raises(lab.EgeriaLabError) as found:
        lab.Session.load(path)
    assert str(found.value)
    assert threading.active_count() < 20


def test_settings_and_commands_survive(tmp_path: Path) -> None:
    session = digits()
    session.override("freeze.tolerance", 0.35)
    session.override("freeze.tolerance", 0.05, layer="layers.2")
    session.override("optimizer.lr", 0.02)
    session.pin("layers.1")
    session.extend(1)
    session.step(3)
    again = lab.Session.load(session.save(tmp_path / "a.ckpt"))
    assert again.settings() == session.settings()
    assert again.setting("freeze.tolerance", "layers.2") == 0.05
    assert again.layers["layers.1"].state == "pinned"
    assert again.planned_steps == session.planned_steps
    assert [again.explain(row.name) for row in again.layers] == [session.explain(row.name) for row in session.layers]
    again.reset("freeze.tolerance")
    assert again.setting("freeze.tolerance") == EAGER["tolerance"]
    session.close()
    again.close()


def test_folder_settings_are_checked(tmp_path: Path) -> None:
    for options in ({"keep_checkpoints": 0}, {"save_every_steps": 0}, {"save_every_minutes": -1}, {"undo_bytes": -1}):
        with pytest.raises(InvalidSettingError, match="must be"):
            digits(run_dir=tmp_path, freeze=None, **options)
    RunFolder(tmp_path).close()  # not locked by those that failed


def test_a_closed_session_is_not_saved(tmp_path: Path) -> None:
    session = digits()
    session.step(3)
    session.close()
    for call in (lambda: session.save(tmp_path / "a.ckpt"), session.fork, session.undo):
        with pytest.raises(InvalidSettingError, match="this session is closed"):
            call()
    assert session.export().state_dict


def test_commands_that_wait_are_saved_too(tmp_path: Path) -> None:
    session = digits(freeze=None)
    session.commands.on_put(lambda: None)  # nobody has looked into the queue yet
    session.pin("layers.0")
    assert not session.layers["layers.0"].pinned
    again = lab.Session.load(session.save(tmp_path / "a.ckpt"))
    assert again.layers["layers.0"].pinned
    session.close()
    again.close()


KILLED = """
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
import egeria_lab as lab
if sys.argv[3] == "new":
    rule = lab.Plasticity(interval_steps=2, window=3, patience=2, tolerance=1.2, bootstrap_change=5.0)
    session = lab.Session("mlp", "digits", batch_size=64, epochs=20, lr=0.05, scheduler="step", seed=1, freeze=rule,
                          run_dir=sys.argv[1], save_every_steps=2)
else:
    session = lab.Session.load(sys.argv[1], save_every_steps=2)
print("go", flush=True)
session.run(progress=False)
session.close()
"""


def test_killed_again_and_again_it_comes_to_the_same_end(tmp_path: Path) -> None:
    whole = digits(
        epochs=20, freeze=lab.Plasticity(interval_steps=2, window=3, patience=2, tolerance=1.2, bootstrap_change=5.0)
    )
    whole.step(whole.planned_steps)
    draw, how, done = random.Random(0), "new", 0
    for _ in range(5):
        code = [sys.executable, "-c", KILLED, str(tmp_path / "run"), str(Path.cwd()), how]
        process = subprocess.Popen(code, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        while how == "new" and not checkpoints(tmp_path / "run"):
            time.sleep(0.01)
        time.sleep(draw.random() * 0.5)
        process.kill()
        process.wait()
        _, tree, notes = latest(tmp_path / "run")
        assert not notes, "a half file was taken for whole"
        assert tree["state"]["step"] >= done
        done, how = tree["state"]["step"], "old"
        history, events = recover(tmp_path / "run" / NAME)
        steps = history.steps["step"].tolist()
        assert steps == list(range(1, len(steps) + 1))
        losses = whole.history["steps"]["loss"].tolist()
        assert history.steps["loss"].tolist() == losses[: len(steps)]
        assert events
    assert done > 0
    again = lab.Session.load(tmp_path / "run")
    again.run(progress=False)
    assert again.history["steps"]["loss"].tolist() == whole.history["steps"]["loss"].tolist()
    assert equal(again.model, whole.model)
    again.close()
    whole.close()
