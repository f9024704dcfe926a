"""What is asked for in a fork or a load holds, or is refused or noted in words; it is never overwritten in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import egeria_lab as lab
from egeria_lab.errors import CheckpointError, InvalidSettingError, UnknownNameError
from egeria_lab.events import CheckpointLoaded

Again = Callable[..., lab.Session]


@pytest.fixture(params=["fork", "load"])
def again(request: pytest.FixtureRequest, tmp_path: Path) -> Again:
    """The two ways of going on elsewhere with other arguments."""

    def fork(session: lab.Session, **changes: Any) -> lab.Session:
        return session.fork(**changes)

    def load(session: lab.Session, **changes: Any) -> lab.Session:
        return lab.Session.load(session.save(tmp_path / "a.ckpt"), **changes)

    return fork if request.param == "fork" else load


def digits(steps: int = 10, **options: Any) -> lab.Session:
    session = lab.Session("mlp", "digits", **{"epochs": 6, "freeze": None, **options})
    session.step(steps)
    return session


def notes(session: lab.Session) -> str:
    return " ".join(note for event in session.events.of(CheckpointLoaded) for note in event.notes)


# --- rates and plan ---------------------------------------------------------------------------------------


def test_a_fork_as_it_was_has_nothing_to_say() -> None:
    assert notes(digits().fork()) == ""


def test_layers_get_schedules_of_their_own_at_the_place_where_training_is(again: Again) -> None:
    first = digits(20)
    second = again(first, freeze=lab.Schedule(saving=0.3))
    rates = {group["layer"]: group["lr"] for group in second.optimizer.param_groups}
    policy = second.rule.policy  # type: ignore[union-attr]
    progress = 20 / first.planned_steps
    assert rates == {name: pytest.approx(0.1 * policy.rate_factor(name, progress)) for name in rates}
    assert len(set(rates.values())) > 1
    assert second.schedule.learning_rate == pytest.approx(first.schedule.learning_rate)  # the head's
    assert "from 20 steps on" in notes(second)
    second.step(30)


def test_layers_give_up_schedules_of_their_own(again: Again) -> None:
    first = digits(12, freeze=lab.Schedule(saving=0.3))
    first.freeze("layers.0")
    second = again(first, freeze=None)
    assert len(second.optimizer.param_groups) == 1
    assert second.schedule.learning_rate == pytest.approx(first.schedule.learning_rate)
    assert second.step().learning_rate == pytest.approx(first.step().learning_rate)
    assert second.schedule.learning_rate == pytest.approx(first.schedule.learning_rate)
    second.thaw("layers.0")
    second.step(2)
    assert "All layers follow one learning-rate schedule now, from 12 steps on." in notes(second)


def test_frozen_layers_find_their_own_schedule_again() -> None:
    first = digits(12, freeze=lab.Schedule(saving=0.3))
    first.freeze("layers.1")
    second = first.fork(lr=0.05)
    mine, theirs = second.optimizer.param_groups, first.optimizer.param_groups
    assert [g["layer"] for g in mine] == [g["layer"] for g in theirs]
    assert [g["lr"] for g in mine] == [pytest.approx(0.5 * g["lr"]) for g in theirs]


def test_the_rate_asked_for_holds(again: Again) -> None:
    first = digits()
    second = again(first, lr=0.01)
    assert second.schedule.learning_rate == pytest.approx(first.schedule.learning_rate / 10)
    assert (second.setting("optimizer.lr"), second.settings_book.default("optimizer.lr")) == (0.01, 0.01)
    assert second.step().learning_rate == pytest.approx(first.step().learning_rate / 10)
    assert second.step().learning_rate == pytest.approx(first.step().learning_rate / 10)


def test_the_rate_asked_for_wins_over_one_set_by_hand(again: Again) -> None:
    first = digits(scheduler="constant")
    first.override("optimizer.lr", 0.02)
    assert again(first).schedule.learning_rate == pytest.approx(0.02)
    assert again(first, lr=0.1).schedule.learning_rate == pytest.approx(0.1)


def test_the_plan_asked_for_holds(again: Again) -> None:
    first = digits()
    second = again(first, epochs=12)
    assert second.planned_steps == 2 * first.planned_steps
    half = lab.Session("mlp", "digits", epochs=12, freeze=None)
    half.step(10)
    assert second.schedule.learning_rate == pytest.approx(half.schedule.learning_rate)
    with pytest.raises(CheckpointError, match=r"epochs=0\.1 plans \d+ steps, and 10 are made already"):
        again(first, epochs=0.1)


def test_the_scheduler_asked_for_holds(again: Again) -> None:
    first = digits(40)
    assert again(first, scheduler="constant").step().learning_rate == pytest.approx(0.1)
    other = again(first, scheduler=None)
    assert other.step().learning_rate == pytest.approx(0.1)
    assert "another kind" in notes(other)


def test_the_optimizer_asked_for_holds(again: Again) -> None:
    first = digits(scheduler="constant")
    second = again(first, optimizer=lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.5))
    group = second.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (pytest.approx(0.03), 0.5)
    assert second.optimizer.state  # momentum itself goes on
    second.step()


def test_each_group_of_the_optimizer_asked_for_has_its_own_rate(again: Again) -> None:
    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        front, *rest = list(parameters)
        return torch.optim.SGD([{"params": [front], "lr": 0.01}, {"params": rest}], lr=0.2)

    first = digits()
    share = first.schedule.learning_rate / 0.1
    second = again(first, optimizer=two_groups)
    assert [g["lr"] for g in second.optimizer.param_groups] == [pytest.approx(0.01 * share), pytest.approx(0.2 * share)]
    assert "All layers" not in notes(second)
    second.step()


def test_a_changed_fork_cannot_be_done_again_from_its_record(tmp_path: Path) -> None:
    second = digits().fork(lr=0.01)
    with pytest.raises(CheckpointError, match="went on from a checkpoint with another lr"):
        lab.replay(second.save(tmp_path / "a.ckpt"))


# --- freezing ---------------------------------------------------------------------------------------------


def test_the_settings_of_a_rule_asked_for_hold(again: Again) -> None:
    first = digits(freeze=lab.Plasticity(tolerance=0.3))
    first.override("freeze.tolerance", 0.9, layer="layers.1")
    second = again(first, freeze=lab.Plasticity(tolerance=0.7))
    assert second.policy is not None
    assert second.policy.settings.tolerance == second.setting("freeze.tolerance", "layers.1") == 0.7
    assert "layers.1" not in second.policy.tolerances
    assert "freeze.tolerance of layers.1" in notes(second)
    assert again(first).setting("freeze.tolerance", "layers.1") == 0.9


def test_another_schedule_is_followed_from_its_beginning(again: Again) -> None:
    first = digits(30, freeze=lab.Schedule(saving=0.3))
    second = again(first, freeze=lab.Schedule(saving=0.2))
    assert "The freezing schedule is the one asked for" in notes(second)
    second.step(30)


# --- sieve ------------------------------------------------------------------------------------------------


def test_a_sieve_of_the_same_kind_takes_the_settings_asked_for(again: Again) -> None:
    first = digits(sieve=lab.CirculantSieve(fraction=0.2, interval_epochs=1))
    asked = lab.CirculantSieve(fraction=0.5, interval_epochs=1)
    second = again(first, sieve=asked)
    assert second.sieve.settings == second.settings_book.sieve == asked
    assert second.sieve.sieved_share == pytest.approx(0.2, abs=0.01)  # until the next exchange
    second.step(15)
    assert second.sieve.sieved_share == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("now", [lab.RandomSieve(fraction=0.4), lab.LossSieve(), None])
@pytest.mark.parametrize("then", [lab.CirculantSieve(fraction=0.2), None])
def test_a_sieve_of_another_kind_begins_anew(again: Again, then: Any, now: Any) -> None:
    first = digits(sieve=lab.OneShotSieve() if then is now else then)
    first.discard([3, 4])
    second = again(first, sieve=now)
    assert second.sieve.settings == now
    assert second.sieve.discarded_ids().tolist() == [3, 4]
    assert "begins anew with the next pass over the data" in notes(second)
    assert "Manual" not in notes(second)
    second.step(12)  # into the next pass
    ids = torch.cat(second._train_source.plans[second._passes.number])
    assert torch.equal(ids.sort().values, second.sieve.kept_ids())
    again(second).step(3)


# --- masks ------------------------------------------------------------------------------------------------


def test_masks_go_on_where_the_settings_agree(again: Again) -> None:
    first = digits(sparsity=lab.MEST(sparsity=0.8, soft_bound=False))
    second = again(first, sparsity=lab.SET(sparsity=0.8))
    then, now = first.sparse.masks.masks, second.sparse.masks.masks  # type: ignore[union-attr]
    assert all(torch.equal(then[name], now[name]) for name in then)
    third = again(digits(sparsity=lab.MEST(sparsity=0.8)), sparsity=lab.StaticSparsity(sparsity=0.8))
    assert third.savings().sparsity.density == pytest.approx(0.2, abs=0.001)  # type: ignore[union-attr]
    assert "beyond the target of the masks were dropped" in notes(third)


@pytest.mark.parametrize(
    "now",
    [
        lab.StaticSparsity(sparsity=0.5),
        lab.StaticSparsity(sparsity=0.8, density="erk"),
        lab.StaticSparsity(sparsity=0.8, scheme="block"),
        lab.StaticSparsity(sparsity=0.8, dense=("layers.1",)),
        lab.StaticSparsity(sparsity=0.5, scheme="2:4"),
    ],
)
@pytest.mark.parametrize("then", [lab.MEST(sparsity=0.8), None])
def test_masks_of_other_settings_are_made_anew(again: Again, then: Any, now: Any) -> None:
    second = again(digits(sparsity=then), sparsity=now)
    assert second.sparse is not None
    masks = second.sparse.masks
    assert masks.densities() == masks.target_densities()
    for name, mask in masks.masks.items():
        assert not (dict(second.model.named_parameters())[name].detach()[~mask]).any()
        if now.scheme == "block":
            blocks = mask.reshape(-1, 4, mask.shape[1])
            assert torch.equal(blocks.any(1), blocks.all(1))
    assert "made anew" in notes(second)
    assert second.savings().sparsity.density == pytest.approx(1 - now.sparsity, abs=0.01)  # type: ignore[union-attr]
    second.step(3)


def test_other_masks_are_refused_while_layers_are_frozen(again: Again) -> None:
    first = digits(sparsity=lab.MEST(sparsity=0.8))
    first.freeze("layers.1")
    with pytest.raises(CheckpointError, match=r"cannot be made while layers are frozen \(layers\.1\)"):
        again(first, sparsity=lab.MEST(sparsity=0.5))
    assert notes(again(first, sparsity=lab.MEST(sparsity=0.8))) == ""


def test_sparse_training_can_end(again: Again) -> None:
    second = again(digits(sparsity=lab.MEST(sparsity=0.8)), sparsity=None)
    assert notes(second) == "There are no masks here: every weight trains from now on."
    second.step(2)


# --- bad input --------------------------------------------------------------------------------------------


def test_arguments_that_are_none_are_named() -> None:
    session = digits(1)
    with pytest.raises(UnknownNameError, match=r"Unknown argument of fork\(\) 'epoch'\. Did you mean 'epochs'\?"):
        session.fork(epoch=1)
    for call in (session.save, lab.Session.load, lab.replay, lambda p: lab.Session("mlp", "digits", run_dir=p)):
        with pytest.raises(InvalidSettingError, match=r"must be a path \(a text or a pathlib\.Path\), got 5\."):
            call(5)
