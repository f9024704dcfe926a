"""A session trains exactly what it says: repeatable to the bit, in any portions, with any owner's parts."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import egeria_lab as lab
from egeria_lab.errors import TrainingError
from egeria_lab.events import EpochFinished, Event, RunFailed

Make = Callable[..., lab.Session]
Losses = Callable[[lab.Session], list[float]]
Tensors = Callable[[nn.Module], dict[str, Tensor]]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(before: list[Tensor], model: nn.Module) -> float:
    pairs_of = zip(before, model.parameters(), strict=True)
    return sum((a - b.detach()).square().sum().item() for a, b in pairs_of) ** 0.5


# --- repeatable ------------------------------------------------------------------------------------------


def test_fifty_and_fifty_steps_are_a_hundred(make_session: Make, losses: Losses, tensors: Tensors) -> None:
    """traps row 82."""
    whole, halves = make_session(dropout=0.3), make_session(dropout=0.3)
    whole.step(100)
    halves.step(50)
    halves.step(50)
    assert losses(whole) == losses(halves)
    assert equal(tensors(whole.model), tensors(halves.model))
    assert (whole.steps_done, halves.steps_done) == (100, 100)


def test_any_portions_are_the_same_run(make_session: Make, losses: Losses) -> None:
    whole, portions = make_session(), make_session()
    whole.step(30)
    for portion in (1, 1, 5, 7, 3, 8, 5):
        portions.step(portion)
    assert losses(whole) == losses(portions)


def test_the_same_seed_is_the_same_run_and_another_is_another() -> None:
    traces = []
    for seed in (3, 3, 4):
        session = lab.Session("mlp", "digits", epochs=1, seed=seed, freeze=None)
        session.step(4)
        traces.append(list(session.history["steps"]["loss"]))
    assert traces[0] == traces[1]
    assert all(a != b for a, b in zip(traces[0], traces[2], strict=True))


def test_the_seed_decides_order_and_dropout_of_ones_own_model(make_session: Make, losses: Losses) -> None:
    a, b = make_session(dropout=0.3, seed=1), make_session(dropout=0.3, seed=2)
    a.step(5)
    b.step(5)
    assert losses(a) != losses(b)


def test_steps_leave_global_generators_alone(make_session: Make) -> None:
    """Nothing reads or seeds them: not building, stepping, evaluating, reading plasticity or counting."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    session = make_session(dropout=0.5, freeze=lab.Plasticity(interval_steps=2, window=2, patience=1))
    session.step(20)
    session.evaluate()
    session.savings()
    lab.Session("mlp", "digits", epochs=1).step(2)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[2], strict=True))


def test_drawing_between_steps_changes_nothing(make_session: Make, losses: Losses) -> None:
    quiet, noisy = make_session(dropout=0.5), make_session(dropout=0.5)
    quiet.step(20)
    for number in range(20):
        torch.randn(number + 1)
        torch.manual_seed(number)
        random.random()
        np.random.rand()
        noisy.step()
    assert losses(quiet) == losses(noisy)


# --- records ---------------------------------------------------------------------------------------------


def test_a_record_says_what_the_step_did(make_session: Make) -> None:
    session = make_session(scheduler="linear", epochs=2)
    record = session.step()
    assert (record.step, record.frozen) == (1, ())
    assert record.epoch == pytest.approx(1 / 8)
    assert record.learning_rate == 0.05
    assert record.accuracy is not None
    assert 0 <= record.accuracy <= 1
    assert session.step().learning_rate == pytest.approx(0.05 * 15 / 16)
    session.freeze("first")
    assert session.step().frozen == ("first",)
    frame = session.history.frame("steps")
    assert frame["step"].tolist() == [1, 2, 3]
    assert frame["num_frozen"].tolist() == [0, 0, 1]
    assert frame["samples"].tolist() == [8, 16, 24]
    assert frame["loss"].iloc[0] == record.loss
    assert frame["epoch"].tolist() == pytest.approx([1 / 8, 2 / 8, 3 / 8])


def test_the_first_loss_is_that_of_the_untrained_model_on_the_first_batch(
    make_session: Make, tiny_model: Callable[..., nn.Module]
) -> None:
    session = make_session()
    batch = next(session._train_source.epoch(0))
    model = tiny_model().train()
    expected = F.cross_entropy(model(batch.content[0]), batch.content[1])
    assert session.step().loss == pytest.approx(expected.item(), rel=1e-6)


def test_a_session_is_plain_training(make_session: Make, losses: Losses, tiny_model: Callable[..., nn.Module]) -> None:
    """The same batches through an ordinary loop give the same losses to the bit."""
    session = make_session(scheduler=None, optimizer=lambda p: SGD(p, lr=0.05, momentum=0.9))
    session.step(24)
    model = tiny_model().train()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    expected = []
    for epoch in range(3):
        for batch in session._train_source.epoch(epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.content[0]), batch.content[1], reduction="none").mean()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    assert losses(session) == expected


def test_epochs_are_recorded_with_weighted_means(make_session: Make) -> None:
    session = make_session(batch_size=24)  # 24, 24, 16 samples
    session.step(session.steps_per_epoch)
    steps, epochs = session.history["steps"], session.history.frame("epochs")
    weights = np.diff([0, *steps["samples"]])
    assert weights.tolist() == [24, 24, 16]
    assert epochs["train_loss"].tolist() == pytest.approx([np.average(steps["loss"], weights=weights)])
    valid = session.evaluate()
    assert epochs["valid_loss"].tolist() == [valid["loss"]]
    assert epochs["valid_accuracy"].tolist() == [valid["accuracy"]]
    assert [e.epoch for e in session.events.of(EpochFinished)] == [1]  # type: ignore[attr-defined]


def test_evaluate_by_hand(make_session: Make) -> None:
    session = make_session(dropout=0.4)
    session.step(5)
    session.model.eval()
    inputs, targets = session.data.valid.inputs, session.data.valid.targets  # type: ignore[attr-defined]
    with torch.no_grad():
        outputs = session.model(inputs)
    session.model.train()
    result = session.evaluate()
    assert result["loss"] == pytest.approx(float(F.cross_entropy(outputs, targets)), rel=1e-5)
    assert result["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))
    on_train = session.evaluate(session.data.train)
    assert on_train["loss"] != result["loss"]


def test_a_good_seed_learns() -> None:
    session = lab.Session("mlp", "digits", epochs=3)
    session.step(session.planned_steps)
    accuracy = session.evaluate()["accuracy"]
    assert accuracy is not None
    assert accuracy > 0.9
    assert session.state == "finished"


# --- budget and schedule ---------------------------------------------------------------------------------


def test_the_budget_ends_with_a_sentence_and_extend_goes_on(make_session: Make) -> None:
    session = make_session(epochs=1)
    session.step(8)
    with pytest.raises(TrainingError, match=r"budget of 8 steps is used up; session.extend\(epochs=1\)"):
        session.step()
    session.extend(0.5)
    assert session.planned_steps == 12
    session.step(4)
    with pytest.raises(TrainingError, match=r"budget of 12 steps"):
        session.step()


@pytest.mark.parametrize("name", ["cosine", "linear", "step", "constant"])
def test_extend_plans_a_named_schedule_again(make_session: Make, name: str) -> None:
    """traps rows 43, 140: progress counts in fractions; a longer budget stretches what is left."""
    session = make_session(scheduler=name, epochs=2)
    session.step(4)
    session.extend(2)
    session.step(28)
    longer = make_session(scheduler=name, epochs=4)
    longer.step(32)
    rates, expected = (s.history["steps"]["learning_rate"] for s in (session, longer))
    assert rates[5:].tolist() == expected[5:].tolist()  # step 5 was planned before the command landed
    assert session.steps_done == 32


def test_a_run_longer_than_the_plan_lengthens_it(make_session: Make) -> None:
    session = make_session(epochs=1)
    session.run(steps=20, progress=False)
    assert session.planned_steps == 20
    session.run(epochs=1, progress=False)
    assert session.steps_done == 28


def test_the_first_run_decides_an_undecided_plan(make_session: Make) -> None:
    session = make_session(epochs=None, scheduler="linear")
    assert session.planned_steps == 160
    session.start(epochs=1)
    session.wait(30)
    assert session.planned_steps == 8
    assert session.history["steps"]["learning_rate"][-1] == pytest.approx(0.05 / 8)


def test_override_scales_a_named_schedule(make_session: Make) -> None:
    """traps rows 139, 145: the shape stays, nothing is reset."""
    plain, halved = make_session(scheduler="cosine", epochs=2), make_session(scheduler="cosine", epochs=2)
    plain.step(16)
    halved.step(4)
    halved.override("optimizer.lr", 0.025)
    halved.step(12)
    expected, rates = (s.history["steps"]["learning_rate"] for s in (plain, halved))
    assert rates[:4].tolist() == expected[:4].tolist()
    assert rates[4:].tolist() == pytest.approx((expected[4:] / 2).tolist())
    assert halved.setting("optimizer.lr") == 0.025


def sequential(optimizer: torch.optim.Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, 1.0, total_iters=4), CosineAnnealingLR(optimizer, 12, eta_min=0.001)]
    return SequentialLR(optimizer, parts, milestones=[4])


SCHEDULERS: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str]] = {
    "step": (lambda o: StepLR(o, 3, gamma=0.5), "step"),
    "multi step": (lambda o: MultiStepLR(o, [2, 9], gamma=0.1), "step"),
    "cosine to a floor": (lambda o: CosineAnnealingLR(o, 16, eta_min=0.01), "step"),
    "one cycle": (lambda o: OneCycleLR(o, max_lr=0.1, total_steps=20), "auto"),
    "cyclic": (lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=4), "auto"),
    "warm-up, then cosine": (sequential, "step"),
    "plateau": (lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5), "epoch"),
    "by epoch": (lambda o: StepLR(o, 1, gamma=0.5), "auto"),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_override_scales_ones_own_scheduler(make_session: Make, kind: str) -> None:
    scheduler, every = SCHEDULERS[kind]
    options: dict[str, Any] = {
        "optimizer": lambda p: SGD(p, lr=0.1, momentum=0.9), "scheduler": scheduler, "scheduler_every": every,
    }  # fmt: skip
    plain, halved = make_session(**options), make_session(**options)
    plain.step(16)
    halved.step(6)
    peak = float(halved.setting("optimizer.lr"))  # type: ignore[arg-type]
    assert peak == pytest.approx(0.1)
    halved.override("optimizer.lr", peak / 2)
    halved.step(10)
    expected, rates = (s.history["steps"]["learning_rate"] for s in (plain, halved))
    assert rates[:6].tolist() == expected[:6].tolist()
    assert rates[6:].tolist() == pytest.approx((expected[6:] / 2).tolist(), rel=1e-6)


def test_a_one_cycle_survives_freezing_thawing_and_a_longer_budget(make_session: Make) -> None:
    """traps rows 41, 43."""
    session = make_session(
        epochs=2, optimizer=lambda p: SGD(p, lr=0.1), scheduler=lambda o: OneCycleLR(o, max_lr=0.1, total_steps=16)
    )
    session.step(5)
    session.freeze("first")
    session.step(5)
    session.thaw("first")
    session.step(6)
    last = session.history["steps"]["learning_rate"][-1]
    session.extend(1)
    session.step(8)
    rates = session.history["steps"]["learning_rate"]
    assert session.steps_done == len(rates) == 24
    assert np.all(rates[17:] <= last)  # the owner's schedule is over: its last rate holds


def test_rates_do_not_drift_apart_through_freeze_and_thaw(make_session: Make) -> None:
    """traps row 42: one rate a group, moved by the schedule alone."""
    plain, steered = make_session(epochs=3), make_session(epochs=3)
    plain.step(24)
    for number in range(24):
        if number % 5 == 2:
            steered.freeze("first")
        if number % 5 == 4:
            steered.thaw("first")
        steered.step()
    expected, rates = (s.history["steps"]["learning_rate"].tolist() for s in (plain, steered))
    assert rates == expected
    assert len(steered.optimizer.param_groups) == 1


# --- ones own parts --------------------------------------------------------------------------------------


def pairs(rows: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator))


def test_ones_own_optimizer_object_is_the_real_one(tiny_model: Callable[..., nn.Module], make_session: Make) -> None:
    model = tiny_model()
    optimizer = Adam(model.parameters(), lr=0.003)
    session = make_session(model=model, optimizer=optimizer, scheduler=None)
    session.step(3)
    assert session.model is model
    assert session.optimizer is optimizer
    assert session.setting("optimizer.lr") == 0.003
    assert int(optimizer.state[next(model.parameters())]["step"]) == 3


def test_scalar_and_per_sample_losses_are_the_same_run(make_session: Make, losses: Losses) -> None:
    traces = []
    for loss in (None, F.cross_entropy, lambda o, t: F.cross_entropy(o, t, reduction="none")):
        session = make_session(loss=loss)
        session.step(10)
        traces.append(losses(session))
    assert traces[0] == traces[2]
    assert traces[0] == pytest.approx(traces[1], rel=1e-5)


def test_a_regression_has_no_accuracy(make_session: Make) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 6, generator=generator), torch.randn(40, 3, generator=generator))
    session = make_session(data=(data, data), loss=F.mse_loss)
    record = session.step(5)
    assert record.accuracy is None
    assert session.evaluate()["accuracy"] is None
    assert np.isnan(session.history["epochs"]["train_accuracy"]).all()
    assert session.history.frame("steps")["accuracy"].isna().all()


def test_dict_batches_through_forward(make_session: Make, losses: Losses, tiny_model: Callable[..., nn.Module]) -> None:
    class Rows:
        def __init__(self) -> None:
            self.data = pairs()

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> dict[str, Any]:
            x, y = self.data[index]
            return {"pixel_values": x, "labels": y, "text": f"row {index}"}

    class Wants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = tiny_model()

        def forward(self, *, pixel_values: Tensor) -> dict[str, Tensor]:
            return {"logits": self.body(pixel_values)}

    def forward(model: nn.Module, batch: dict[str, Any]) -> tuple[Any, Any]:
        return model(pixel_values=batch["pixel_values"])["logits"], batch["labels"]

    rule = lab.Plasticity(interval_steps=2, probe_rows=4)
    session = make_session(model=Wants(), data=(Rows(), Rows()), forward=forward, freeze=rule)
    session.step(10)
    plain = make_session(data=(pairs(), pairs()), freeze=None)
    plain.step(10)
    assert losses(session) == losses(plain)
    assert session.freeze("body.first").state == "done"
    session.step(2)
    assert len(session.history["plasticity"]) > 0


def test_sequences_with_scores_last_or_on_dimension_one(make_session: Make) -> None:
    class Tokens(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.last, self.embed, self.head = last, nn.Embedding(7, 8), nn.Linear(8, 7)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(self.embed(x))
            return scores if self.last else scores.transpose(1, 2)

    ids = torch.randint(0, 7, (32, 5), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(1, 1)
    targets[:, 0] = -100  # padding is ignored
    data = TensorDataset(ids, targets)
    results = []
    for last in (True, False):
        session = make_session(model=Tokens(last), data=(data, data))
        record = session.step(4)
        results.append((record.loss, record.accuracy))
    assert results[0] == results[1]


def test_map_style_data_sets_of_ones_own(make_session: Make, losses: Losses) -> None:
    class Rows:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            x, y = pairs()[index]
            return x, int(y)

    session, same = make_session(data=(Rows(), Rows())), make_session(data=(pairs(), pairs()))
    session.step(12)
    same.step(12)
    assert losses(session) == losses(same)


def test_a_pair_of_loaders(make_session: Make, losses: Losses) -> None:
    traces = []
    for _ in range(2):
        train = DataLoader(pairs(), batch_size=10, shuffle=True)
        session = make_session(data=(train, DataLoader(pairs(), batch_size=7)))
        assert session.steps_per_epoch == 4
        session.step(9)
        assert session.evaluate()["loss"] is not None
        traces.append(losses(session))
    assert traces[0] == traces[1]


def test_a_weighted_sampler_keeps_its_weights(make_session: Make) -> None:
    """traps row 71: the user's sampler decides; ids of samples with weight 0 never come."""
    weights = [0.0] * 20 + [1.0] * 20
    sampler = WeightedRandomSampler(weights, num_samples=40)
    seen = []

    def forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        if model.training:
            seen.append(batch[0].clone())
        return model(batch[0]), batch[1]

    data = pairs()
    session = make_session(data=(DataLoader(data, 8, sampler=sampler), data), forward=forward)
    session.step(15)
    assert len(seen) == 15
    rows = torch.cat(seen)
    assert not any(bool((row == data.tensors[0][:20]).all(1).any()) for row in rows)


def test_a_last_batch_of_one_row_joins_the_one_before(make_session: Make) -> None:
    """Batch norm cannot train on one sample: 33 samples in batches of 8 are 8, 8, 8, 9."""
    session = make_session(data=(pairs(33), pairs(5)))
    assert session.steps_per_epoch == 4
    session.step(8)
    assert np.diff([0, *session.history["steps"]["samples"]]).tolist() == [8, 8, 8, 9] * 2


def test_layers_named_by_hand(make_session: Make) -> None:
    session = make_session(layers=["first"])
    assert session.layers.names == ["first", "second"]
    assert session.layers["first"].num_parameters == 6 * 8 + 8 + 16


def test_gradient_clipping_leaves_frozen_layers_out(make_session: Make) -> None:
    """traps row 6: the norm is that of active parameters."""
    session = make_session(max_grad_norm=1e-3, optimizer=lambda p: SGD(p, lr=1.0), scheduler=None)
    before = [p.detach().clone() for p in session.model.parameters()]
    session.step()
    moved = distance(before, session.model)
    assert moved == pytest.approx(1e-3, rel=1e-3)
    session.freeze("first")
    before = [p.detach().clone() for p in session.model.parameters()]
    session.step()
    moved = distance(before, session.model)
    assert moved == pytest.approx(1e-3, rel=1e-3)


# --- modes -----------------------------------------------------------------------------------------------


def test_a_part_in_eval_mode_stays_so(tiny_model: Callable[..., nn.Module], make_session: Make) -> None:
    """traps row 23, over two epochs, evaluations, and a model.eval() of the user's own."""
    model = tiny_model()
    model.first[1].eval()  # type: ignore[index]
    session = make_session(model=model)
    statistics = model.first[1].running_mean.clone()  # type: ignore[index,union-attr,operator]
    session.step(8)
    model.eval()
    session.step(8)
    assert model.training
    assert not model.first[1].training  # type: ignore[index]
    assert model.second[1].training  # type: ignore[index]
    assert torch.equal(model.first[1].running_mean, statistics)  # type: ignore[index,union-attr,arg-type]


def test_a_model_given_in_eval_mode_is_trained(tiny_model: Callable[..., nn.Module], make_session: Make) -> None:
    model = tiny_model().eval()
    session = make_session(model=model)
    session.step(2)
    assert all(m.training for m in model.modules())


def test_a_frozen_layer_stays_in_eval_mode_when_the_user_calls_train(make_session: Make, tensors: Tensors) -> None:
    """traps rows 21, 25, 26."""
    session = make_session(dropout=0.5)
    session.step(4)
    session.freeze("first")
    before = tensors(session.model.first)
    for _ in range(20):
        session.model.train()
        session.step()
    assert equal(tensors(session.model.first), before)
    session.thaw("first")
    session.step()
    assert not equal(tensors(session.model.first), before)


# --- failures --------------------------------------------------------------------------------------------


class Trouble:
    """A loss that fails or is not finite when told to."""

    def __init__(self) -> None:
        self.what = ""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, targets)
        if self.what == "raise":
            raise OSError("the disk is on fire")
        return loss * float(self.what) if self.what else loss


@pytest.mark.parametrize("what", ["nan", "inf", "-inf", "raise"])
def test_a_failing_step_is_not_applied_and_the_run_goes_on_exactly(
    make_session: Make, losses: Losses, tensors: Tensors, what: str
) -> None:
    """Weights, momentum, batch-norm statistics, counters and order are those of before the failed step."""
    trouble = Trouble()
    plain, failing = make_session(dropout=0.3), make_session(dropout=0.3, loss=trouble)
    plain_loss = Trouble()
    plain.trainer.loss = plain_loss
    plain.step(20)
    failing.step(11)
    before = tensors(failing.model)
    trouble.what = what
    for _ in range(2):
        with pytest.raises(OSError if what == "raise" else TrainingError):
            failing.step()
    assert equal(tensors(failing.model), before)
    assert failing.steps_done == 11
    assert len(failing.history["steps"]) == 11
    trouble.what = ""
    failing.step(9)
    assert losses(failing) == losses(plain)
    assert equal(tensors(failing.model), tensors(plain.model))


def test_a_huge_learning_rate_gives_one_sentence_and_history_is_kept(make_session: Make) -> None:
    session = make_session(lr=1e5, optimizer=lambda p: SGD(p, lr=1e30), scheduler=None)
    with pytest.raises(
        TrainingError, match=r"the loss is (nan|inf) at step \d+ \(learning rate 1e\+30\).*was not applied"
    ):
        session.step(50)
    done = session.steps_done
    assert len(session.history["steps"]) == done
    with pytest.raises(TrainingError):
        session.run(steps=5, progress=False)
    assert session.state == "failed"
    assert isinstance(session.error, TrainingError)
    assert [type(e) for e in session.events][-1] is RunFailed
    assert session.override("optimizer.lr", 0.01).state == "done"
    assert session.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_the_session_goes_on_after_lowering_the_rate(make_session: Make) -> None:
    """A loss that blows up at a high rate and not at a low one."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(outputs, targets)
        return value * float("nan") if session.schedule.learning_rate > 1 else value

    session = make_session(loss=loss, optimizer=lambda p: SGD(p, lr=0.05), scheduler=None)
    session.step(3)
    session.override("optimizer.lr", 5.0)
    with pytest.raises(TrainingError, match=r"Lower the learning rate"):
        session.step()
    session.override("optimizer.lr", 0.05)
    assert session.step(3).step == 6
    assert len(session.history["steps"]) == 6


def test_data_that_fails_once_is_read_again(make_session: Make, losses: Losses) -> None:
    class Flaky:
        fails = False

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            if self.fails:
                raise OSError("network drive gone")
            return pairs()[index]

    flaky = Flaky()
    session, plain = make_session(data=(flaky, pairs())), make_session(data=(pairs(), pairs()))
    session.step(2)
    flaky.fails = True
    for _ in range(2):
        with pytest.raises(OSError, match=r"network drive gone"):
            session.step()
    flaky.fails = False
    session.step(8)
    plain.step(10)
    assert losses(session) == losses(plain)


def test_activations_that_are_not_finite_stop_the_run_with_the_step_on_record(make_session: Make) -> None:
    """The step was made; its row is there, and what follows counts on from it."""
    session = make_session(freeze=lab.Plasticity(interval_steps=3))
    session.step(3)
    statistics = session.model.first[1]  # type: ignore[index]
    statistics.running_var.fill_(float("nan"))  # train mode does not use it
    with pytest.raises(TrainingError, match=r"activations of .* are not finite"):
        session.step(10)
    done = session.steps_done
    assert session.history["steps"]["step"].tolist() == list(range(1, done + 1))
    statistics.running_var.fill_(1.0)
    session.step(2)
    assert session.history["steps"]["step"].tolist() == list(range(1, done + 3))


# --- closing ---------------------------------------------------------------------------------------------


def test_close_leaves_nothing_in_the_model(tiny_model: Callable[..., nn.Module], make_session: Make) -> None:
    model = tiny_model(0.2)
    model.first[3].eval()  # type: ignore[index]
    attributes = {name: sorted(module.__dict__) for name, module in model.named_modules()}
    modes = [m.training for m in model.modules()]
    keys = list(model.state_dict())
    session = make_session(model=model, freeze=lab.Plasticity(interval_steps=2))
    session.step(6)
    session.freeze("first")
    session.freeze("second")
    session.step(4)
    session.evaluate()
    session.savings()
    session.close()
    session.close()
    assert {name: sorted(module.__dict__) for name, module in model.named_modules()} == attributes
    assert [m.training for m in model.modules()] == modes
    assert list(model.state_dict()) == keys
    assert all(p.requires_grad for p in model.parameters())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    assert sum(hooks) == 0
    inside = {id(p) for group in session.optimizer.param_groups for p in group["params"]}
    assert inside == {id(p) for p in model.parameters()}
    assert [row.state for row in session.layers] == ["active"] * 3  # the table agrees with the model


def test_a_closed_session_is_collected() -> None:
    """traps row 102."""
    import gc
    import weakref

    session = lab.Session("mlp", "digits", epochs=1)
    session.step(2)
    session.freeze("layers.0")
    session.step()
    model = weakref.ref(session.model)
    session.close()
    del session
    gc.collect()
    assert model() is None


def test_repr_and_layers_table(make_session: Make) -> None:
    session = make_session(epochs=2)
    session.step(3)
    session.freeze("first")
    assert repr(session) == "Session(TinyNet on synthetic, idle, step 3 of 16, 1 of 3 layers frozen)"
    assert "frozen" in repr(session.layers)
    assert "asked for" in session.layers._repr_html_()


def test_a_closed_session_says_so(make_session: Make) -> None:
    session = make_session()
    session.step(2)
    session.close()
    calls = (session.step, session.start, lambda: session.run(steps=1, progress=False), lambda: session.freeze("first"))
    for call in calls:
        with pytest.raises(lab.InvalidSettingError, match="this session is closed"):
            call()
    assert len(session.history["steps"]) == 2
    assert not session.model._forward_pre_hooks


def test_a_copy_of_a_model_with_a_frozen_layer_is_free(make_session: Make) -> None:
    """What is copied or pickled while a layer is frozen trains like any other module."""
    session = make_session(dropout=0.3)
    session.step(2)
    session.freeze("first")
    session.step(1)
    for free in (copy.deepcopy(session.model), pickle.loads(pickle.dumps(session.model))):
        free.requires_grad_(True).train()
        free(torch.zeros(4, 6))
        assert all(module.training for module in free.modules())
    session.close()


def test_an_interrupt_while_a_start_is_announced_leaves_the_session_usable(make_session: Make) -> None:
    session, told = make_session(), []

    def interrupt(event: Event) -> None:
        if not told:
            told.append(event)
            raise KeyboardInterrupt

    session.subscribe(interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.start(steps=3)
    assert session.state == "stopped"
    session.start(steps=3)
    assert session.wait(30)
    assert session.steps_done == 3


def test_subscribe_checks_what_it_is_given(make_session: Make) -> None:
    session = make_session()
    for wrong in ((None, None), (print, "LayerFrozen"), (print, int)):
        with pytest.raises(lab.InvalidSettingError):
            session.subscribe(*wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda y: y.float(), "labels are float32.*int64"),
        (lambda y: y.int(), "labels are int32.*int64"),
        (lambda y: y[:, None], "one class label a sample"),
    ],
)
def test_labels_of_a_wrong_kind_get_a_sentence(
    make_session: Make, change: Callable[[Tensor], Tensor], sentence: str
) -> None:
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    data = lab.ArrayDataset(x, change(y))
    session = make_session(data=(data, data))
    with pytest.raises(lab.DataError, match=sentence):
        session.step()


@pytest.mark.parametrize("forward", [lambda m, b: m(b[0]), lambda m, b: None])
def test_a_forward_that_returns_no_pair_gets_a_sentence(make_session: Make, forward: Any) -> None:
    with pytest.raises(lab.DataError, match=r"forward must return \(outputs, targets\)"):
        make_session(forward=forward).step()


def test_layers_must_be_a_list_of_names(make_session: Make) -> None:
    for wrong in ("first", 5, [1, 2]):
        with pytest.raises(lab.InvalidSettingError, match="a list of submodule names"):
            make_session(layers=wrong)
