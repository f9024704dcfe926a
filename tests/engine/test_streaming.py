"""A session whose data are a stream: everything that needs no sample ids works, the rest is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import egeria_lab as lab
from egeria_lab.dashboard.app import Dashboard
from egeria_lab.data.loaders import BatchSource
from egeria_lab.events import (
    BatchSkipped,
    BootstrapFinished,
    CheckpointLoaded,
    CommandRejected,
    EpochFinished,
    LayerFrozen,
    MaskUpdated,
    Notice,
    RolledBack,
)

DIGITS = lab.data.load("digits")
QUICK = lab.Plasticity(interval_steps=1, window=3, patience=2, tolerance=0.9, bootstrap_change=0.5)


class Shuffled(IterableDataset[Any]):
    """Some digits as single samples, in an order that the global generator of torch draws at each reading."""

    def __init__(self, part: Any = DIGITS.train, count: int = 160) -> None:
        self.part, self.count = part, count

    def __iter__(self) -> Iterator[Any]:
        for i in torch.randperm(len(self.part))[: self.count].tolist():
            yield self.part[i]


class Told(Shuffled):
    def __len__(self) -> int:
        return self.count


class Unread(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it may not be read")


VALID = Shuffled(DIGITS.valid, 60)


def mlp() -> nn.Module:
    return lab.models.build("mlp", input_shape=(1, 8, 8), num_classes=10, seed=1)


def session(train: Any = None, valid: Any = VALID, **options: Any) -> lab.Session:
    options = {"batch_size": 16, "steps": 40, "freeze": None, **options}
    return lab.Session(options.pop("model", None) or mlp(), (Shuffled() if train is None else train, valid), **options)


def losses(of: lab.Session) -> list[float]:
    return [float(x) for x in of.history.steps["loss"]]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def events(of: lab.Session, kind: type[Any]) -> list[Any]:
    return [event for event in of.events if isinstance(event, kind)]


# --- what works --------------------------------------------------------------------------------------------


def test_the_same_batches_train_the_same_model_as_a_map_style_set() -> None:
    """Bit-equal in loss, frozen layers, evaluation and counted work, only without ids."""
    source, reading = BatchSource(DIGITS.train, 64, seed=3), iter(range(99))

    def stream() -> Iterator[Any]:
        return (batch.content for batch in source.epoch(next(reading)))

    plain = lab.Session(mlp(), (DIGITS.train, DIGITS.valid), batch_size=64, seed=3, freeze=QUICK, steps=60)
    by_stream = lab.Session(mlp(), (stream, DIGITS.valid), batch_size=64, seed=3, freeze=QUICK, steps=60)
    plain.step(60), by_stream.step(60)
    assert losses(plain) == losses(by_stream)
    assert same(plain.model, by_stream.model)
    frozen = [[(e.step, e.layer) for e in events(s, LayerFrozen)] for s in (plain, by_stream)]
    assert frozen[0] == frozen[1]
    assert frozen[0], "something froze"
    assert plain.history["epochs"]["valid_accuracy"].tolist() == by_stream.history["epochs"]["valid_accuracy"].tolist()
    saved = [s.savings().to_dict() for s in (plain, by_stream)]
    for name in ("steps", "flops", "memory"):
        assert saved[0][name] == saved[1][name], name
    assert saved[1]["flops"]["saved_fraction"] > 0


@pytest.mark.parametrize(
    "freeze",
    [QUICK, lab.Schedule(saving=0.25), lab.Schedule(saving=0.25, interval_steps=4), lab.GradientNorm(interval_steps=5)],
    ids=lambda rule: repr(rule)[:20],
)
def test_every_rule_freezes_on_a_stream(freeze: Any) -> None:
    one = session(freeze=freeze)
    one.step(40)
    assert one.layers.frozen
    assert one.recorder.book.flops_saved_fraction > 0


@pytest.mark.parametrize("sparsity", [lab.MEST(sparsity=0.5), lab.SET(sparsity=0.5, interval_steps=5)])
def test_sparse_training_on_a_stream(sparsity: Any) -> None:
    one = session(sparsity=sparsity)
    one.step(40)
    assert events(one, MaskUpdated)
    density = sum(int((p != 0).sum()) for p in one.model.parameters()) / sum(p.numel() for p in one.model.parameters())
    assert density < 0.7


def test_accumulation_dict_batches_and_augmentation() -> None:
    def stream() -> Iterator[Any]:
        return ({"x": x, "y": y} for x, y in DataLoader(Shuffled(count=70), 8))

    def forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return model(batch["x"]), batch["y"]

    valid = [{"x": DIGITS.valid[i][0], "y": DIGITS.valid[i][1]} for i in range(40)]
    by_dict = session(stream, valid, forward=forward, accumulate=2)
    record = by_dict.step(10)
    assert by_dict.steps_per_epoch == 5  # 9 batches
    assert (record.epoch, by_dict.history["steps"]["samples"][-1]) == (2.0, 140)
    moved = session(augment=lab.Augment(crop_padding=1, views=4))
    moved.step(4)
    assert losses(moved) != losses_of(session(), 4)


def losses_of(one: lab.Session, steps: int) -> list[float]:
    one.step(steps)
    return losses(one)


def test_evaluation_of_streams() -> None:
    one, rows = session(), [DIGITS.valid[i] for i in range(50)]
    one.step(3)
    trace = losses_of(session(), 8)

    def stream() -> Iterator[Any]:
        return iter(DataLoader(rows, 20))  # type: ignore[arg-type]

    assert one.evaluate(stream)["accuracy"] == pytest.approx(one.evaluate(rows)["accuracy"])
    assert one.evaluate(stream)["loss"] == pytest.approx(one.evaluate(rows)["loss"])
    assert one.evaluate() == one.evaluate()
    with pytest.raises(lab.DataError, match="the validation stream yielded no batch"):
        one.evaluate(lambda: iter([]))
    one.step(5)
    assert losses(one) == trace, "evaluating changes nothing"


def test_dashboard_report_and_table_of_a_stream(tmp_path: Path) -> None:
    one = session(freeze=QUICK)
    view = Dashboard(one)
    one.step(40)
    page = one.report(tmp_path / "run.html").read_text(encoding="utf-8")
    assert "FLOPs" in page
    view.close()
    later = Dashboard(one)
    assert "step 40 of 40, epoch 4.0" in later.status["text"]
    assert [row["state"] for row in later.layers].count("frozen") == len(one.layers.frozen) > 0
    assert later.sieve == {}
    later.close()
    assert losses(one) == losses_of(session(freeze=QUICK), 40)


def test_names_of_models_work_with_data_that_tell_their_shape() -> None:
    data = lab.Data(name="digits by stream", train=Told(), valid=VALID, num_classes=10, input_shape=(1, 8, 8))
    one = lab.Session("mlp", data, batch_size=16, epochs=2, freeze=None)
    assert (one.steps_per_epoch, one.planned_steps) == (10, 20)
    assert one.name == "mlp on digits by stream"


def test_background_training_reads_the_same() -> None:
    one = session()
    one.start()
    assert one.wait(60)
    assert losses(one) == losses_of(session(), 40)
    one.close()


# --- how long ----------------------------------------------------------------------------------------------


def test_a_pass_ends_with_the_stream_and_the_next_begins_it_again() -> None:
    one = session()
    assert one.step(9).epoch == pytest.approx(9 / 40), "the plan stands for a pass while nobody knows its length"
    assert one.step().epoch == 1.0
    one.step(10)
    assert [event.step for event in events(one, EpochFinished)] == [10, 20]
    assert one.history["epochs"]["epoch"].tolist() == [1, 2]
    assert one.step(5).epoch == 2.5


def test_a_stream_that_does_not_tell_its_length_says_what_waits() -> None:
    said = [event.message for event in events(session(freeze=lab.Plasticity()), Notice)]
    assert len(said) == 1
    assert "does not tell its length: a pass ends when it does" in said[0]
    assert "Plasticity(bootstrap_epochs=1) freezes nothing" in said[0]
    assert "Plasticity" not in events(session(freeze=None), Notice)[0].message
    assert not events(session(Told()), Notice)
    assert not events(session(steps_per_epoch=4), Notice)


def test_an_endless_stream_is_cut_into_passes() -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield from DataLoader(Shuffled(), 16)

    one = session(endless, steps=None, epochs=6, steps_per_epoch=5, freeze=QUICK)
    assert one.planned_steps == 30
    one.step(30)
    assert [event.step for event in events(one, EpochFinished)] == [5, 10, 15, 20, 25, 30]
    assert 5 <= events(one, BootstrapFinished)[0].step <= 6
    assert one.layers.frozen


def test_epochs_are_counted_as_soon_as_a_pass_has_ended() -> None:
    one = session(steps=12)
    for ask in (lambda: one.run(epochs=1, progress=False), lambda: one.start(epochs=1)):
        with pytest.raises(lab.InvalidSettingError, match=r"epochs=1 cannot be counted.*give steps= to run\(\)"):
            ask()
    assert "cannot be counted" in one.extend(epochs=1).event.reason  # type: ignore[union-attr]
    one.run(steps=11, progress=False)
    one.run(epochs=2, progress=False)
    assert (one.steps_done, one.planned_steps) == (31, 31)
    assert one.extend(epochs=1).state == "done"
    assert one.planned_steps == 41
    one.run(epochs=0.5, progress=False)
    assert one.steps_done == 36


def test_steps_are_a_plan_of_map_style_data_too() -> None:
    one = lab.Session("mlp", "digits", steps=7, freeze=None)
    assert one.planned_steps == 7
    one.run(progress=False)
    assert (one.steps_done, one.state) == (7, "finished")
    with pytest.raises(lab.InvalidSettingError, match="give steps or epochs, not both"):
        lab.Session("mlp", "digits", steps=7, epochs=1)
    assert lab.Session.from_config(one.config).planned_steps == 7


# --- the place in it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"steps_per_epoch": 4}, {"train": Told()}])
@pytest.mark.parametrize("stop", [3, 10, 14])
def test_a_run_is_gone_on_with_to_the_bit(tmp_path: Path, options: dict[str, Any], stop: int) -> None:
    options = {"freeze": QUICK, **options}
    whole, part = session(**options), session(**options)
    whole.step(24)
    part.step(stop)
    part.save(tmp_path / "run.ckpt")
    data = (options.get("train") or Shuffled(), VALID)
    again = lab.Session.load(tmp_path / "run.ckpt", model=mlp(), data=data)
    again.step(24 - stop)
    assert losses(again) == losses(whole)
    assert same(again.model, whole.model)
    assert again.epoch == whole.epoch
    assert not [event for event in events(again, Notice) if "does not repeat" in event.message]
    notes = " ".join(events(again, CheckpointLoaded)[0].notes)
    between_readings = stop * options.get("accumulate", 1) % 10 == 0
    assert ("The place in the training stream is found by reading its first" in notes) is not between_readings


def test_a_stream_that_is_another_when_read_again_is_told(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)  # of the user's own: it goes on from reading to reading

    def stream() -> Iterator[Any]:
        order = torch.randperm(len(DIGITS.train), generator=generator)
        return (DIGITS.train.gather(ids) for ids in torch.split(order[:160], 16))  # type: ignore[attr-defined]

    one = session(stream)
    one.step(4)
    one.save(tmp_path / "run.ckpt")
    again = lab.Session.load(tmp_path / "run.ckpt", model=mlp(), data=(stream, VALID))
    again.step()
    said = [event.message for event in events(again, Notice) if "does not repeat" in event.message]
    assert len(said) == 1
    assert "its batch 4 of pass 1" in said[0]
    again.step(20)
    assert len([event for event in events(again, Notice) if "does not repeat" in event.message]) == 1


def test_undo_and_redo_read_again() -> None:
    one, plain = session(), session()
    one.step(4)
    one.freeze("layers.0")
    one.step(9)
    frozen = losses(one)
    one.undo()
    assert one.steps_done == 4
    one.step(9)
    plain.step(13)
    assert losses(one) == losses(plain)
    one.undo()
    assert "nothing to undo" in events(one, CommandRejected)[-1].reason
    again = session()
    again.step(4), again.freeze("layers.0"), again.step(9), again.undo(), again.redo()
    again.step(3)
    other = session()
    other.step(4), other.freeze("layers.0"), other.step(12)
    assert losses(again) == losses(other)
    assert losses(again)[:13] == frozen


def test_a_fork_reads_for_itself() -> None:
    loader = DataLoader(Shuffled(), 16)
    one = session(loader)
    one.step(14)
    second = one.fork()
    one.step(6), second.step(8), one.step(6)
    assert losses(one) == losses_of(session(loader), 26)
    assert losses(second) == losses(one)[:22]
    assert "found by reading its first" in events(second, CheckpointLoaded)[0].notes[0]


def test_a_recorded_run_can_be_done_again(tmp_path: Path) -> None:
    one = session()
    one.step(6), one.freeze("layers.0"), one.step(8)
    path = one.save(tmp_path / "run.ckpt")
    assert lab.replay(path, model=mlp(), data=(Shuffled(), VALID)).exact


def test_a_checkpoint_of_a_stream_is_not_gone_on_with_on_a_set(tmp_path: Path) -> None:
    session().save(tmp_path / "stream.ckpt")
    with pytest.raises(lab.CheckpointError, match=r"data with an untold number of samples, and this has 1437"):
        lab.Session.load(tmp_path / "stream.ckpt", model=mlp(), data=(DIGITS.train, DIGITS.valid))
    lab.Session(mlp(), (DIGITS.train, DIGITS.valid), batch_size=16, epochs=1).save(tmp_path / "set.ckpt")
    with pytest.raises(lab.CheckpointError, match=r"1437 samples, and this has an untold number of"):
        lab.Session.load(tmp_path / "set.ckpt", model=mlp(), data=(Told(), VALID))


def test_a_run_directory_of_a_stream(tmp_path: Path) -> None:
    one = session(run_dir=tmp_path, save_every_steps=6)
    one.step(15)
    one._autosave = None  # as if the process had ended here
    again = lab.Session.load(tmp_path, model=mlp(), data=(Shuffled(), VALID), run_dir=None)
    assert again.steps_done == 12
    again.step(3)
    assert losses(again) == losses(one)


# --- steps that cannot be made -----------------------------------------------------------------------------


def test_an_error_of_the_stream_stops_before_its_batch_and_goes_on() -> None:
    failures = [True]

    def shaky() -> Iterator[Any]:
        for number, batch in enumerate(DataLoader(Shuffled(), 16)):
            if number == 3 and failures:
                failures.clear()
                raise OSError("the line is down")
            yield batch

    one = session(shaky)
    one.step(3)
    with pytest.raises(OSError, match="the line is down"):
        one.step()
    assert one.steps_done == 3
    one.step(10)
    assert losses(one) == losses_of(session(shaky), 13), "nothing fails any more"


def spoiled(at: int) -> Callable[[], Iterator[Any]]:
    """A stream whose batch with this number holds NaN, once."""

    def stream() -> Iterator[Any]:
        for number, (x, y) in enumerate(DataLoader(Shuffled(), 16)):
            yield (torch.full_like(x, float("nan")) if number == at else x), y

    return stream


@pytest.mark.parametrize("policy", ["stop", "skip", "roll_back"])
def test_bad_losses_on_a_stream(policy: str) -> None:
    one = session(spoiled(4), on_bad_loss=policy, model=no_statistics())
    one.step(4)
    if policy == "stop":
        for _ in range(2):
            with pytest.raises(lab.TrainingError, match="the loss is nan at step 5"):
                one.step()
        return
    if policy == "skip":
        one.step(4)
        assert [(e.position, e.in_pass) for e in events(one, BatchSkipped)] == [(4, 0)]
        assert one.epoch == pytest.approx(9 / 40)
        return
    with pytest.raises(lab.TrainingError, match="went back 5 times"):
        one.step(40)
    assert events(one, RolledBack)


def no_statistics() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def test_a_label_that_is_none_is_named_by_its_place() -> None:
    def stream() -> Iterator[Any]:
        yield torch.zeros(4, 1, 8, 8), torch.zeros(4).long()
        yield torch.zeros(4, 1, 8, 8), torch.tensor([1, 2, 11, 3])

    one = session(stream)
    one.step()
    with pytest.raises(lab.DataError, match="sample 6 has label 11"):
        one.step()


# --- refused at construction, in one sentence --------------------------------------------------------------

IDS = "the training data are a stream, whose samples have none: give a map-style data set"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (Unread(), {"sieve": lab.RandomSieve(fraction=0.25)}, f"sieve= leaves samples out by their ids, and {IDS}"),
    (DataLoader(Unread()), {"sieve": lab.LossSieve(fraction=0.25)}, "sieve= leaves samples out by their ids, and"),
    (Unread(), {"cache": lab.ActivationCache()}, f"cache= finds the outputs of a sample by its id, and {IDS}"),
    (Unread(), {"steps": None}, "the default number of epochs cannot be counted: the training data are a stream"),
    (Unread(), {"steps": None, "epochs": 3}, "epochs=3 cannot be counted: the training data are a stream that"),
    (Unread(), {"epochs": 3}, "give steps or epochs, not both"),
    (Unread(), {"steps": 0}, "Session.steps must be a whole number >= 1 or None, got 0"),
    (Unread(), {"steps_per_epoch": 1.5}, "Session.steps_per_epoch must be a whole number >= 1 or None, got 1.5"),
    (Unread(), {"sparsity": lab.SET(sparsity=0.5, interval_epochs=2)}, "sparsity= has interval_epochs=2, and the"),
    (Unread(), {"freeze": lab.Schedule(saving=0.2, interval_epochs=1)}, "freeze= has interval_epochs=1, and the"),
    (DIGITS.train, {"steps_per_epoch": 5}, "steps_per_epoch=5 is for data that come as a stream, and these"),
    (iter([1]), {}, "is an iterator (list_iterator), which can be read only once"),
    (lambda: iter([]), {}, "the training stream yielded no batch; give one with at least one"),
    ({1, 2}, {}, "train must be map-style (with __len__ and __getitem__) or iterable, got set"),
]  # fmt: skip


@pytest.mark.parametrize(("train", "options", "words"), REFUSED, ids=[words[:50] for *_, words in REFUSED])
def test_what_cannot_be_is_refused_before_anything_is_read(train: Any, options: dict[str, Any], words: str) -> None:
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(lab.EgeriaLabError) as caught:
        session(train, model=model, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("which", ["train", "valid"])
def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    data = {"train": DIGITS.train, "valid": DIGITS.valid, which: Unread()}
    role = "training" if which == "train" else "validation"
    with pytest.raises(lab.InvalidSettingError, match=f"by their ids, and the {role} data are a stream"):
        session(data["train"], data["valid"], steps=5)


NO_IDS = "are a stream, whose samples have no ids by which they could be chosen or found again"


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.attribute([0, 1]), lambda s: s.sieve.kept_ids(), lambda s: s.sieve.removed_ids(),
        lambda s: s.sieve.counts([0]), lambda s: s.sieve.samples([0]), lambda s: s.sieve.subset(),
    ],
)  # fmt: skip
def test_looking_up_samples_is_refused(ask: Callable[[lab.Session], Any]) -> None:
    one = session()
    with pytest.raises(lab.DataError, match=NO_IDS):
        ask(one)


def test_discarding_is_refused_and_training_goes_on() -> None:
    one = session()
    assert repr(one.sieve) == "no sieve: all samples are trained on"
    one.step(3)
    for receipt in (one.discard([3]), one.restore([3])):
        assert receipt.state == "rejected"
        assert NO_IDS in receipt.event.reason  # type: ignore[union-attr]
    one.step(5)
    assert losses(one) == losses_of(session(), 8)


def test_inputs_can_be_attributed_without_ids() -> None:
    one = session()
    one.step(2)
    inputs: Tensor = DIGITS.valid.gather(torch.arange(2))[0]  # type: ignore[attr-defined]
    shown = one.attribute(inputs, method="saliency")
    assert shown is not None
    one.step(3)
    assert losses(one) == losses_of(session(), 5)
