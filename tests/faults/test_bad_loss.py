"""A loss that is NaN or infinite: the step is not applied, and what comes next is what was chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import egeria_lab as lab
from egeria_lab.checkpoint.folder import checkpoints
from egeria_lab.engine.bad_loss import MOST_ROLL_BACKS, MOST_SKIPPED
from egeria_lab.errors import BadLossError, TrainingError, UnknownNameError
from egeria_lab.events import BatchSkipped, EpochFinished, RolledBack, SettingChanged

BAD_IDS = (70, 500, 900)
EAGER: dict[str, Any] = {
    "interval_steps": 2, "window": 3, "patience": 2, "tolerance": 1.2, "bootstrap_change": 5.0, "refresh_evals": 7,
}  # fmt: skip


def spoiled(ids: tuple[int, ...] = BAD_IDS) -> lab.Data:
    """The digits, with a few samples that are no numbers."""
    data = lab.data.load("digits")
    inputs, targets = data.train.inputs.clone(), data.train.targets  # type: ignore[attr-defined]
    inputs[list(ids)] = float("nan")
    return replace(data, train=lab.ArrayDataset(inputs, targets))


def digits(data: Any = None, **options: Any) -> lab.Session:
    settings: dict[str, Any] = {
        "batch_size": 64, "epochs": 4, "lr": 0.05, "scheduler": "step", "seed": 1, "freeze": lab.Plasticity(**EAGER),
    }  # fmt: skip
    return lab.Session("mlp", spoiled() if data is None else data, **{**settings, **options})


def losses(session: lab.Session) -> list[float]:
    return [float(x) for x in session.history["steps"]["loss"]]


def weights(session: lab.Session) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in session.model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class BreaksDown:
    """Cross-entropy that is infinite in a few calls of training, counted from 1."""

    def __init__(self, at: int, times: int = 1) -> None:
        self.at, self.times, self.calls = at, times, 0

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        self.calls += scores.requires_grad
        bad = self.at <= self.calls < self.at + self.times and scores.requires_grad
        loss = nn.functional.cross_entropy(scores, targets, reduction="none")
        return loss + float("inf") if bad else loss


def test_by_default_it_stops_and_the_batch_comes_again() -> None:
    session = digits()
    before = None
    for _ in range(3):
        with pytest.raises(BadLossError, match=r"the loss is nan at step \d+ .*The step was not applied") as found:
            session.step(100)
        assert set(BAD_IDS) & set(found.value.sample_ids)
        assert before is None or same(before, weights(session))
        before = weights(session)
    assert not session.events.of(BatchSkipped)
    session.close()


def test_unknown_policies_are_named() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown on_bad_loss 'skipp'. Did you mean 'skip'\?"):
        digits(on_bad_loss="skipp")


def test_skip_passes_over_the_batch_and_keeps_the_plan() -> None:
    session = digits(on_bad_loss="skip")
    session.run(progress=False)
    assert session.steps_done == session.planned_steps
    skipped = session.events.of(BatchSkipped)
    assert len(skipped) >= 4 * len(BAD_IDS) - 4  # three bad samples a pass, seldom two in one batch
    first = skipped[0]
    assert (first.loss, first.samples, len(first.sample_ids)) == ("nan", 64, 5)
    assert "passed over: its loss is nan (learning rate 0.05, 64 samples: " in first.sentence()
    assert all(x == x and abs(x) < 1e6 for x in losses(session))
    passes = session.events.of(EpochFinished)
    assert [event.epoch for event in passes] == list(range(1, len(passes) + 1))
    per_pass = session.steps_per_epoch
    made = per_pass * len(passes) - sum(e.in_pass < len(passes) for e in skipped)
    assert passes[-1].step == made  # each pass is so many made steps shorter
    # The schedule counts made steps: its place is that of a run without bad samples at the same step.
    clean = digits("digits")
    clean.run(progress=False)
    assert session.history["steps"]["learning_rate"].tolist() == clean.history["steps"]["learning_rate"].tolist()
    session.close()
    clean.close()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sieve": lab.CirculantSieve(fraction=0.25, interval_epochs=1)},
        {"sieve": lab.LossSieve(), "ema": 0.9},
        {"accumulate": 4, "ema": 0.9, "batch_size": 16},
    ],
)
def test_skip_resumes_and_replays_to_the_bit(tmp_path: Path, more: dict[str, Any]) -> None:
    options = {"on_bad_loss": "skip", "epochs": 3, **more}
    session = digits(**options)
    paths = []
    while session.steps_done < session.planned_steps:
        if session.steps_done % 9 == 0:
            paths.append(session.save(tmp_path / f"{session.steps_done}.ckpt"))
        session.step()
    assert session.events.of(BatchSkipped)
    for path in paths:
        again = lab.Session.load(path, data=spoiled())
        again.run(progress=False)
        assert losses(again) == losses(session)
        assert same(weights(again), weights(session))
        ours = [e for e in session.events if not type(e).__name__.startswith(("Checkpoint", "Run"))]
        theirs = [e for e in again.events if not type(e).__name__.startswith(("Checkpoint", "Run"))]
        assert repr(ours) == repr(theirs)
        again.close()
    session.save(tmp_path / "end.ckpt")
    assert lab.replay(tmp_path / "end.ckpt", data=spoiled()).exact
    session.close()


def test_skip_stops_after_so_many_in_a_row_with_nothing_changed() -> None:
    ids = tuple(range(len(spoiled().train)))
    session = digits(spoiled(ids[100:]), on_bad_loss="skip", freeze=None)
    before, place = weights(session), session.epoch
    with pytest.raises(TrainingError, match=rf"{MOST_SKIPPED} batches in a row had such a loss"):
        session.step()
    assert (session.steps_done, session.epoch) == (0, place)
    assert same(before, weights(session))
    session.close()


def test_a_pass_of_bad_batches_only_ends_as_any_other() -> None:
    session = digits(spoiled(tuple(range(1000))), batch_size=400, on_bad_loss="skip", freeze=None, epochs=1)
    with pytest.raises(TrainingError, match="in a row"):
        session.step()
    assert not session.events.of(EpochFinished)  # put back
    session.close()


def test_another_error_after_a_skip_leaves_the_place_before_it() -> None:
    loss = BreaksDown(at=4, times=1)

    def failing(scores: Tensor, targets: Tensor) -> Tensor:
        each = loss(scores, targets)
        if loss.calls == 5 and scores.requires_grad:
            raise ValueError("of the user's own")
        return each

    session = digits("digits", loss=failing, on_bad_loss="skip", freeze=None)
    with pytest.raises(ValueError, match="of the user's own"):
        session.step(10)
    assert session.steps_done == 3
    assert not session.events.of(BatchSkipped)
    plain = digits("digits", freeze=None)
    plain.step(10)
    session.step(7)  # the cause is gone: the batch that was passed over comes again
    assert losses(session) == losses(plain)
    session.close()
    plain.close()


# --- roll back ---------------------------------------------------------------------------------------------


def test_roll_back_goes_on_from_the_last_pass_with_half_the_rate(tmp_path: Path) -> None:
    session = digits("digits", loss=BreaksDown(at=40), on_bad_loss="roll_back")
    per_pass = session.steps_per_epoch
    session.step(30)
    session.freeze("layers.0")
    session.step(9)
    session.step(20)
    (event,) = session.events.of(RolledBack)
    assert event.step == 30  # after the newest command, so that none is lost
    assert (event.from_step, event.loss, event.count, event.commands_lost) == (39, "inf", 1, 0)
    assert (event.old_learning_rate, event.learning_rate) == (0.05, 0.025)
    assert event.sentence().startswith("Rolled back from step 39 to 30, time 1: the loss was inf; learning rate 0.05")
    assert session.layers["layers.0"].frozen
    assert session.steps_done == 30 + 20
    steps = session.history["steps"]["step"].tolist()
    assert steps == list(range(1, 51))
    assert session.setting("optimizer.lr") == 0.025
    assert per_pass < 30
    session.save(tmp_path / "a.ckpt")
    again = lab.Session.load(tmp_path / "a.ckpt", loss=nn.CrossEntropyLoss(reduction="none"))
    again.step(20)
    session.step(20)
    assert losses(again) == losses(session)
    again.close()
    # What is recorded is a run with the rate halved by command; without the bad loss it comes out the same.
    replayed = lab.replay(tmp_path / "a.ckpt", loss=nn.CrossEntropyLoss(reduction="none"))
    assert replayed.exact, replayed
    session.close()


def test_roll_back_is_the_same_as_halving_by_hand() -> None:
    session = digits("digits", loss=BreaksDown(at=37), on_bad_loss="roll_back")
    session.step(60)
    (event,) = session.events.of(RolledBack)
    assert event.step == session.steps_per_epoch
    plain = digits("digits", loss=nn.CrossEntropyLoss(reduction="none"))
    plain.step(event.step)
    plain.override("optimizer.lr", 0.025)
    plain.step(60 - event.step)
    assert losses(session) == losses(plain)[: session.steps_done]
    session.close()
    plain.close()


def test_roll_backs_have_a_limit() -> None:
    session = digits("digits", loss=BreaksDown(at=10, times=10**6), on_bad_loss="roll_back", freeze=None)
    with pytest.raises(TrainingError, match=rf"The run went back {MOST_ROLL_BACKS} times already"):
        session.step(20)
    assert session.setting("optimizer.lr") == 0.05 / 2**MOST_ROLL_BACKS
    assert len(session.events.of(SettingChanged)) == MOST_ROLL_BACKS
    session.close()


def test_roll_back_goes_to_the_newest_checkpoint_and_resuming_does_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {"on_bad_loss": "roll_back", "run_dir": tmp_path / "run", "save_every_steps": 8}
    loss = BreaksDown(at=29)
    session = digits("digits", loss=loss, **options)
    session.step(26)
    session.save(tmp_path / "in between.ckpt")
    session.step(2)
    copies = [p.read_bytes() for p in checkpoints(tmp_path / "run")]
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "step-000000024.ckpt").write_bytes(copies[-1])
    session.step(30)
    (event,) = session.events.of(RolledBack)
    assert event.step == 26
    newest = [p.name for p in checkpoints(tmp_path / "run")]
    assert newest == ["step-000000034.ckpt", "step-000000042.ckpt", "step-000000050.ckpt"]  # counted from step 26
    session.close()
    late = BreaksDown(at=3)
    again = lab.Session.load(tmp_path / "in between.ckpt", loss=late)
    again.step(32)
    assert again.events.of(RolledBack)[0].step == 26
    assert losses(again)[:56] == losses(session)[:56]
    again.close()
    from_folder = lab.Session.load(tmp_path / "copy", loss=BreaksDown(at=5), save_every_steps=8)
    from_folder.step(10)
    assert from_folder.events.of(RolledBack)[0].step == 24
    assert from_folder.bad_loss.roll_backs == 1
    from_folder.close()


def test_a_state_whose_weights_are_no_numbers_is_not_kept() -> None:
    session = digits("digits", on_bad_loss="roll_back", freeze=None)
    session.step(23)
    with torch.no_grad():
        next(session.model.parameters()).fill_(float("nan"))
    session.pin("layers.0")  # a command: a state would be kept now
    session.step(2)
    (event,) = session.events.of(RolledBack)
    assert (event.step, event.commands_lost) == (23, 1)
    assert "1 command(s) since were taken back" in event.sentence()
    assert not session.layers["layers.0"].pinned
    session.close()


def test_no_state_to_go_back_to() -> None:
    session = digits("digits", on_bad_loss="roll_back", freeze=None)
    with torch.no_grad():
        next(session.model.parameters()).fill_(float("nan"))
    with pytest.raises(TrainingError, match="There is no state with finite weights"):
        session.step()
    session.close()


def test_undo_after_a_roll_back_gives_the_rate_back_and_does_not_jump_ahead(
    make_session: Callable[..., lab.Session],
) -> None:
    session = digits("digits", loss=BreaksDown(at=30), on_bad_loss="roll_back", freeze=None)
    session.step(5)
    session.pin("layers.1")
    session.step(30)
    assert session.setting("optimizer.lr") == 0.025
    assert session.undo().state == "done"
    assert session.setting("optimizer.lr") == 0.05
    assert session.steps_done == session.steps_per_epoch
    assert session.undo().state == "done"
    assert session.steps_done == 5
    assert session.bad_loss.roll_backs == 0
    session.step(3)
    assert session.steps_done == 8
    session.close()


@pytest.mark.parametrize("policy", ["stop", "skip", "roll_back"])
def test_choosing_a_policy_changes_no_bit(policy: str) -> None:
    plain, chosen = digits("digits"), digits("digits", on_bad_loss=policy)
    plain.step(60)
    chosen.step(60)
    assert losses(plain) == losses(chosen)
    assert same(weights(plain), weights(chosen))
    plain.close()
    chosen.close()


def test_fp16_scaling_and_masks_are_put_back(make_session: Callable[..., lab.Session]) -> None:
    for options in ({"sparsity": lab.MEST(sparsity=0.8, interval_steps=5)}, {"precision": "bf16"}):
        session = digits(on_bad_loss="skip", **options)
        session.run(progress=False)
        assert session.events.of(BatchSkipped)
        assert session.steps_done == session.planned_steps
        session.close()


class SpoilsGradient:
    """Cross-entropy whose value is fine and whose gradient is not, in one call of training."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(scores, targets)
        self.calls += scores.requires_grad
        spoils = scores.requires_grad and self.calls == self.at
        return loss + (scores.sum() * 0).sqrt() if spoils else loss


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped_too() -> None:
    session = digits(lab.data.load("digits"), loss=SpoilsGradient(5), on_bad_loss="skip")
    session.step(10)
    skipped = [event for event in session.events if isinstance(event, BatchSkipped)]
    assert [event.step for event in skipped] == [4]
    assert all(bool(torch.isfinite(p).all()) for p in session.model.parameters())


def test_when_nobody_looks_at_gradients_the_message_says_that_weights_are_broken() -> None:
    session = digits(lab.data.load("digits"), loss=SpoilsGradient(5), freeze=None)
    with pytest.raises(BadLossError, match=r"so are weights already \(layers\.0.*a gradient of an earlier step"):
        session.step(10)
