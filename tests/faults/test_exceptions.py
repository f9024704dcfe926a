"""Whatever raises (data, model, loss, subscriber, reading, autosave): the run goes on behind it, to the bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import egeria_lab as lab
from egeria_lab.checkpoint.folder import RunFolder, checkpoints
from egeria_lab.events import EpochFinished, LayerFrozen, SaveFailed, SubscriberFailed

STEPS = 60
EAGER: dict[str, Any] = {
    "interval_steps": 2, "window": 3, "patience": 2, "tolerance": 1.2, "bootstrap_change": 5.0, "refresh_evals": 7,
}  # fmt: skip


class FaultError(Exception):
    """Of the user's own."""


class Switch:
    """Raises once, the next time that the place is come to."""

    def __init__(self) -> None:
        self.armed: set[str] = set()

    def __call__(self, place: str) -> None:
        if place in self.armed:
            self.armed.discard(place)
            raise FaultError(place)


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, part: Any, switch: Switch, place: str) -> None:
        self.part, self.switch, self.place = part, switch, place

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, i: int) -> Any:
        self.switch(self.place)
        return self.part[i]


class Net(nn.Module):
    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 10)
        self.switch = switch

    def __deepcopy__(self, memo: Any) -> Net:
        copy = Net(Switch())  # a reference does not take part
        copy.load_state_dict(self.state_dict())
        return copy

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x.flatten(1)))
        if self.training:
            self.switch("model")
        out: Tensor = self.head(x)
        return out


def build(switch: Switch, **options: Any) -> lab.Session:
    digits = lab.data.load("digits")

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        if scores.requires_grad:
            switch("loss")
        return nn.functional.cross_entropy(scores, targets, reduction="none")

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net(switch)
    data = (Samples(digits.train, switch, "data"), Samples(digits.valid, switch, "validation"))
    settings: dict[str, Any] = {
        "batch_size": 128, "epochs": 8, "lr": 0.02, "optimizer": "adamw", "scheduler": "step", "seed": 3,
        "sieve": lab.CirculantSieve(fraction=0.2, interval_epochs=1),
        "sparsity": lab.MEST(sparsity=0.5, interval_steps=5), "freeze": lab.Plasticity(**EAGER, reference="fp32"),
    }  # fmt: skip
    return lab.Session(model, data, loss=loss, **{**settings, **options})


def outcome(session: lab.Session) -> tuple[Any, ...]:
    kinds = (LayerFrozen, EpochFinished, lab.events.SamplesSieved, lab.events.MaskUpdated)
    weights = {name: tensor.tolist() for name, tensor in session.model.state_dict().items()}
    events = [repr(event) for event in session.events.of(*kinds)]
    return session.history["steps"]["loss"].tolist(), events, weights, session.epoch


@pytest.fixture(scope="module")
def whole() -> tuple[Any, ...]:
    """What comes out without a fault."""
    torch.set_num_threads(1)
    session = build(Switch())
    session.step(STEPS)
    found = outcome(session)
    assert session.events.of(LayerFrozen)
    session.close()
    return found


def test_faults_at_every_place_change_no_bit(whole: tuple[Any, ...]) -> None:
    switch, draw = Switch(), random.Random(0)
    session = build(switch)
    met: dict[str, int] = {}
    while session.steps_done < STEPS:
        place = draw.choice(["data", "model", "loss", "validation"])
        switch.armed = {place}
        try:
            session.step()
        except FaultError:
            met[place] = met.get(place, 0) + 1
            switch.armed = set()
        if draw.random() < 0.1 and session.steps_done < STEPS:
            switch.armed = set()
            session.step()
    assert set(met) == {"data", "model", "loss", "validation"}
    switch.armed = set()
    session.step() if len(session.events.of(EpochFinished)) < int(session.epoch) else None
    found = outcome(session)
    assert found[0][:STEPS] == whole[0]
    assert found[1][: len(whole[1])] == whole[1]
    session.close()


def test_a_fault_at_the_end_of_a_pass_is_made_up_for_also_after_a_stop(whole: tuple[Any, ...], tmp_path: Path) -> None:
    switch = Switch()
    session = build(switch)
    switch.armed = {"validation"}
    with pytest.raises(FaultError):
        session.step(STEPS)
    made = session.steps_done
    assert not session.events.of(EpochFinished)
    session.save(tmp_path / "a.ckpt")
    session.step(STEPS - made)
    assert outcome(session) == whole
    session.close()
    fresh = build(Switch())
    again = lab.Session.load(
        tmp_path / "a.ckpt", model=fresh.model, data=(fresh._train_source.dataset, fresh._valid_source.dataset),
        loss=nn.CrossEntropyLoss(reduction="none"),
    )  # fmt: skip
    fresh.close()
    again.step(STEPS - made)
    assert outcome(again) == whole
    again.close()


def test_failed_background_runs_go_on_to_the_bit(whole: tuple[Any, ...]) -> None:
    switch = Switch()
    session = build(switch)
    for place in ("data", "model", "loss"):
        session.step(5)
        switch.armed = {place}
        session.start(steps=10)
        with pytest.raises(FaultError):
            session.wait()
        assert session.state == "failed"
    session.start(steps=STEPS - session.steps_done)
    session.wait()
    assert outcome(session) == whole
    session.close()


def test_subscribers_and_autosave_that_raise(
    whole: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = build(Switch(), run_dir=tmp_path, save_every_steps=7)

    def subscriber(_event: Any) -> None:
        raise FaultError("a watcher")

    session.subscribe(subscriber, EpochFinished)
    session.step(10)
    save = RunFolder.save
    monkeypatch.setattr(RunFolder, "save", lambda *_: (_ for _ in ()).throw(MemoryError("no room for a copy")))
    session.step(20)
    assert [e.reason for e in session.events.of(SaveFailed)] == ["MemoryError: no room for a copy"]
    monkeypatch.setattr(RunFolder, "save", save)
    session.step(STEPS - session.steps_done)
    assert len(session.events.of(SubscriberFailed)) == 1
    assert outcome(session) == whole
    assert checkpoints(tmp_path)[-1].name == "step-000000056.ckpt"
    session.close()


@pytest.mark.parametrize("reference", ["int8", "fp32"])
def test_a_reading_that_fails_costs_no_more_than_readings(reference: str) -> None:
    """The step was made; nothing of training is touched, and the next reading has a snapshot of its own."""
    options: dict[str, Any] = {"freeze": lab.Plasticity(interval_steps=3, tolerance=0.0, reference=reference)}
    plain, session = build(Switch(), **options), build(Switch(), **options)
    plain.step(STEPS)
    session.step(8)
    reader: Any = session.rule.reader  # type: ignore[union-attr]
    collect = reader.collect

    def fail(*_: Any) -> Any:
        collect()
        reader.collect = collect
        raise FaultError("in the worker")

    reader.collect = fail
    with pytest.raises(FaultError):
        session.step(3)
    assert session.steps_done == 9
    assert len(session.history["steps"]["loss"]) == 9
    session.step(STEPS - 9)
    assert outcome(session) == outcome(plain)
    reasons = [event.reason for event in session.events.of(lab.events.ReferenceRefreshed)]
    assert "the last reading failed" in reasons
    asked = {float(step) for step in session.history["plasticity"]["step"]}
    others = {float(step) for step in plain.history["plasticity"]["step"]}
    assert others - asked == {6.0, 9.0}  # the one that failed, and the one that would have been asked for behind it
    plain.close()
    session.close()


# --- clocks ------------------------------------------------------------------------------------------------


def test_jumping_clocks_neither_storm_nor_stop_the_autosave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = build(Switch(), run_dir=tmp_path, save_every_minutes=1, freeze=None)
    draw, steady = random.Random(0), time.monotonic()
    saved = []
    for number in range(30):
        jump = draw.choice([-1e9, 1e9, 0.0, 3600.0, -3600.0])
        monkeypatch.setattr(time, "time", lambda jump=jump: 1.7e9 + jump)
        monkeypatch.setattr(time, "monotonic", lambda number=number: steady + 10.0 * number)
        session.step()
        saved.append(len(checkpoints(tmp_path)) and checkpoints(tmp_path)[-1].name)
    names = [name for name in dict.fromkeys(saved) if name]
    assert len(names) in (4, 5)  # five minutes by the clock that does not jump
    monkeypatch.undo()
    session.close()


# --- interrupts --------------------------------------------------------------------------------------------

PROGRAM = """
import json, multiprocessing, signal, sys, torch
from torch.utils.data import DataLoader
torch.set_num_threads(1)
import egeria_lab as lab
digits = lab.data.load("digits")
model = lab.models.build("mlp", input_shape=digits.input_shape, num_classes=10, seed=0)
train = DataLoader(digits.train, batch_size=64, shuffle=True, num_workers=int(sys.argv[1]))
session = lab.Session(model, (train, digits.valid), epochs=3, lr=0.05, freeze=None, seed=1)
interrupts = failed = 0
print("ready", flush=True)
while session.steps_done < session.planned_steps:
    try:
        session.run(progress=False)
        interrupts += session.state == "paused"
    except KeyboardInterrupt:
        interrupts += 1
    except Exception as error:
        print("failed", type(error).__name__, str(error)[:200], file=sys.stderr)
        failed += 1
signal.signal(signal.SIGINT, signal.SIG_IGN)
workers = [child.pid for child in multiprocessing.active_children()]
session.close()
left = [child.pid for child in multiprocessing.active_children()]
print(json.dumps([session.history["steps"]["loss"].tolist(), interrupts, failed, left]), flush=True)
"""


def calm_data() -> Any:
    """The same batches, read in this process."""
    digits: Any = lab.data.load("digits")
    return torch.utils.data.DataLoader(digits.train, batch_size=64, shuffle=True), digits.valid


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are looked up in /proc")
@pytest.mark.parametrize("workers", [2, 4])
def test_interrupts_at_random_moments_with_workers(workers: int, tmp_path: Path) -> None:
    """Ctrl-C and a kernel's stop button reach the whole group of processes, the reading ones included."""

    def run(draw: random.Random) -> list[Any]:
        code = [sys.executable, "-c", PROGRAM, str(workers)]
        log = (tmp_path / "log").open("w+")
        process = subprocess.Popen(code, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        answer: list[str] = []
        reading = threading.Thread(target=lambda: answer.append(process.stdout.read()))  # type: ignore[union-attr]
        reading.start()
        seen: set[int] = set()
        for _ in range(6):
            time.sleep(0.05 + draw.random() * 0.3)
            if process.poll() is not None or answer:
                break
            seen |= set(children_of(process.pid))
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait(120) == 0, (tmp_path / "log").read_text()
        reading.join()
        log.close()
        gone = [
            pid
            for pid in seen
            if Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
        ]
        assert not gone, "a reading process was left behind"
        found: list[Any] = json.loads(answer[0])
        return found

    calm = lab.Session(
        lab.models.build("mlp", input_shape=(1, 8, 8), num_classes=10, seed=0), calm_data(), epochs=3, lr=0.05,
        freeze=None, seed=1,
    )  # fmt: skip
    calm.run(progress=False)
    losses, interrupts, failed, left = run(random.Random(workers))
    assert losses == calm.history["steps"]["loss"].tolist()
    assert interrupts > 0
    assert failed == 0, (tmp_path / "log").read_text()
    assert not left
    calm.close()
