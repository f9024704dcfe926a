"""Sessions that freeze by schedule: what the ledger counts, what rates do, and what happens to a longer plan."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

import egeria_lab as lab
from egeria_lab.algorithms.freeze_schedule import SOLVED
from egeria_lab.engine.rules import ScheduleRule
from egeria_lab.events import Event, FreezeBlocked, LayerFrozen, LayerThawed


@pytest.fixture(scope="module")
def images() -> lab.Data:
    """70 images: batches of 16 leave a last one of 6."""
    return lab.data.load("synthetic", num_samples=70, num_valid=16, shape=(1, 8, 8))


@pytest.fixture
def train(make_session: Any) -> Any:
    """Builds a session that freezes by the given schedule, and trains it to its end or for some steps."""

    def run(model: str, data: Any, steps: int | None = None, **options: Any) -> lab.Session:
        own = {key: options.pop(key) for key in ("epochs", "batch_size", "scheduler") if key in options}
        settings = {"epochs": 6, "batch_size": 128 if data == "digits" else 16, **own}
        session: lab.Session = make_session(model=model, data=data, freeze=lab.Schedule(**options), **settings)
        if steps != 0:
            session.step(session.planned_steps if steps is None else steps)
        return session

    return run


def at(session: lab.Session, kind: type[Event]) -> dict[str, list[int]]:
    """Layer → the steps at which an event of a kind happened to it."""
    found: dict[str, list[int]] = {}
    for event in session.events.of(kind):
        found.setdefault(event.layer, []).append(event.step)  # type: ignore[attr-defined]
    return found


def rates(session: lab.Session) -> dict[str, float]:
    return {group["layer"]: group["lr"] for group in session.optimizer.param_groups}


# --- what is saved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", SOLVED)
@pytest.mark.parametrize(("model", "saving"), [("mlp", 0.15), ("mlp", 0.3), ("resnet8", 0.15), ("resnet8", 0.3)])
def test_the_ledger_counts_the_target_or_at_most_two_points_more(
    train: Any, images: lab.Data, variant: str, model: str, saving: float
) -> None:
    data, epochs = ("digits", 6) if model == "mlp" else (images, 20)
    session = train(model, data, epochs=epochs, variant=variant, saving=saving)
    assert saving <= session.savings().book.flops_saved_fraction <= saving + 0.02
    assert at(session, LayerFrozen)


@pytest.mark.parametrize("epochs", [20 / 12, 8 / 12, 3 / 12])
def test_small_budgets_save_or_say_what_they_can(train: Any, epochs: float) -> None:
    steps = round(12 * epochs)
    session = train("mlp", "digits", epochs=epochs, saving=0.2)
    assert session.steps_done == steps
    assert session.savings().book.flops_saved_fraction >= 0.2
    with pytest.raises(lab.InvalidSettingError, match=rf"the ceiling is 0\.\d+, with 2 of 3 blocks .* of {steps}\."):
        train("mlp", "digits", epochs=epochs, saving=0.6)


def test_a_budget_of_one_step_has_a_ceiling_of_zero(train: Any) -> None:
    with pytest.raises(lab.InvalidSettingError, match="the ceiling is 0,"):
        train("mlp", "digits", epochs=1 / 12, saving=0.1)


def test_the_stem_freezes_with_the_first_block(train: Any, images: lab.Data) -> None:
    together = at(train("resnet8", images, saving=0.2), LayerFrozen)
    assert together["layers.0"] == together["layers.1"]
    assert together["layers.1"] < together["layers.2"]
    apart = at(train("resnet8", images, saving=0.2, stem="own", interval_steps=3, max_frozen=0.6), LayerFrozen)
    assert [steps[0] - apart["layers.0"][0] for steps in apart.values()] == [0, 3, 6]


def test_baselines_freeze_by_blocks_too(train: Any, images: lab.Data) -> None:
    for variant in ("linear", "freezeout"):
        frozen = at(train("resnet8", images, epochs=3, variant=variant, start=0.2), LayerFrozen)
        assert frozen["layers.0"] == frozen["layers.1"] < frozen["layers.2"]


# --- thaws -------------------------------------------------------------------------------------------------


def test_resume_thaws_everything_for_the_last_epochs(train: Any) -> None:
    session = train("mlp", "digits", variant="single_shot_resume", saving=0.2, resume_fraction=0.25)
    assert at(session, LayerThawed) == {"layers.0": [54], "layers.1": [54]}
    assert session.layers.frozen == ()
    assert "scheduled to be trained from 75.0% of training on" in session.layers["layers.0"].reason
    assert session.history.frame("steps")["num_frozen"].tolist()[53:] == [2] + [0] * 18


def test_periodic_freezes_and_thaws_in_turn(train: Any) -> None:
    session = train("mlp", "digits", variant="periodic", saving=0.2, interval_epochs=1)
    assert at(session, LayerThawed)["layers.0"] == [12, 24, 36, 48, 60]
    frozen = at(session, LayerFrozen)
    assert frozen["layers.0"] == frozen["layers.1"]
    assert all(12 * index < step < 12 * (index + 1) for index, step in enumerate(frozen["layers.0"]))
    assert session.layers.frozen == ("layers.0", "layers.1")


def test_delayed_periodic_begins_late(train: Any) -> None:
    session = train("mlp", "digits", variant="delayed_periodic", saving=0.2, interval_epochs=1)
    frozen = at(session, LayerFrozen)["layers.0"]
    assert frozen[0] > 18
    assert [b - a for a, b in pairwise(frozen)] == [12] * (len(frozen) - 1)


def test_weights_stand_still_while_frozen_and_move_after_the_thaw(train: Any) -> None:
    session = train("mlp", "digits", steps=0, variant="single_shot_resume", saving=0.2, resume_fraction=0.25)
    weight = session.model.get_parameter("layers.0.linear.weight")
    while not session.layers.frozen:
        session.step()
    kept = weight.detach().clone()
    session.step(54 - session.steps_done)
    assert weight.equal(kept)
    session.step()
    assert not weight.equal(kept)


# --- rates -------------------------------------------------------------------------------------------------


def test_after_a_scheduled_thaw_the_rate_is_that_of_the_head(train: Any) -> None:
    session = train("mlp", "digits", steps=0, variant="single_shot_resume", saving=0.2, resume_fraction=0.25)
    assert isinstance(session.rule, ScheduleRule)
    end = round(session.rule.policy.times["layers.0"] * session.planned_steps)
    session.step(end // 2)
    own = 0.05 * 0.5 * (1 + math.cos(math.pi * (end // 2) / end))
    assert rates(session)["layers.0"] == pytest.approx(own)
    assert rates(session)["layers.0"] < rates(session)["layers.1"] < rates(session)["layers.3"]
    session.step(end - session.steps_done)
    assert rates(session)["layers.0"] == pytest.approx(0.0, abs=1e-12)
    session.step(54 - session.steps_done)
    assert session.layers.frozen == ()
    for done in (54, 60, 71):
        session.step(done - session.steps_done) if done > session.steps_done else None
        assert len(set(rates(session).values())) == 1
        assert rates(session)["layers.0"] == pytest.approx(0.05 * 0.5 * (1 + math.cos(math.pi * done / 72)))


def test_layers_that_come_back_in_cycles_follow_the_one_schedule(train: Any) -> None:
    session = train("mlp", "digits", steps=30, variant="periodic", saving=0.2, scheduler="linear")
    assert [group["lr"] for group in session.optimizer.param_groups] == [pytest.approx(0.05 * (1 - 30 / 72))]
    assert at(session, LayerThawed)


@pytest.mark.parametrize("how", ["pinned", "thawed"])
def test_a_layer_kept_in_training_by_hand_has_the_rate_of_the_head(train: Any, how: str) -> None:
    session = train("mlp", "digits", steps=0, saving=0.2)
    if how == "pinned":
        session.pin("layers.0")
    weight = session.model.get_parameter("layers.0.linear.weight")
    end = math.ceil(session.rule.policy.times["layers.0"] * session.planned_steps)
    session.step(end)
    if how == "thawed":
        session.step(3)
        session.thaw("layers.0")
    session.step(2)
    before = weight.detach().clone()
    session.step()
    assert "layers.0" not in session.layers.frozen
    assert not weight.equal(before)
    assert rates(session)["layers.0"] == rates(session)["layers.3"] > 0


# --- hands -------------------------------------------------------------------------------------------------


def test_a_pinned_layer_is_reported_once_and_freezes_when_it_is_unpinned(train: Any) -> None:
    session = train("mlp", "digits", steps=0, saving=0.2)
    session.pin("layers.0")
    session.step(60)
    assert len(at(session, FreezeBlocked)["layers.0"]) == 1
    assert session.layers.frozen == ("layers.1",)
    assert "its time to freeze has come, but it may not. It is pinned" in session.explain("layers.0")
    session.unpin("layers.0")
    session.step()
    assert session.layers.frozen == ("layers.0", "layers.1")


def test_hands_are_respected_in_cycles(train: Any) -> None:
    session = train("mlp", "digits", steps=1, variant="periodic", saving=0.2, interval_epochs=1)
    session.freeze("layers.0")
    session.step(12)
    assert session.layers.frozen == ("layers.0",)  # frozen by hand: not thawed with layers.1
    assert at(session, LayerThawed) == {"layers.1": [12]}
    session.thaw("layers.0")
    session.step(11)
    assert session.layers.frozen == ()
    second = at(session, LayerFrozen)["layers.0"][-1]
    assert 12 < second < 24  # from the next cycle on it is the schedule's again
    assert at(session, LayerThawed)["layers.0"] == [13, 24]


def test_what_was_thawed_by_hand_is_not_frozen_again_at_the_next_step(train: Any) -> None:
    session = train("mlp", "digits", steps=60, saving=0.2)
    assert session.layers.frozen == ("layers.0", "layers.1")
    session.thaw("layers.0")
    session.step(5)
    assert session.layers.frozen == ("layers.1",)
    assert "the schedule does not freeze it again" in session.explain("layers.0")


# --- longer plans ------------------------------------------------------------------------------------------


def test_a_longer_plan_moves_what_is_to_come_to_the_same_fraction(train: Any) -> None:
    session = train("mlp", "digits", steps=5, saving=0.2)
    times = dict(session.rule.policy.times)
    session.extend(epochs=6)
    session.step(session.planned_steps - session.steps_done)
    assert session.steps_done == 144
    assert at(session, LayerFrozen) == {
        name: [math.ceil(time * 144 - 1e-9)] for name, time in times.items() if time < 1
    }
    assert session.rule.policy.times == times  # nothing was solved again
    assert 0.19 <= session.savings().book.flops_saved_fraction <= 0.24


def test_what_has_frozen_stays_frozen_in_a_longer_plan(train: Any) -> None:
    session = train("mlp", "digits", steps=0, saving=0.2)
    while not session.layers.frozen:
        session.step()
    first = session.steps_done
    session.extend(epochs=6)
    session.step(10)
    assert session.layers.frozen == ("layers.0",)
    session.step(session.planned_steps - session.steps_done)
    assert at(session, LayerFrozen)["layers.0"] == [first]
    assert at(session, LayerFrozen)["layers.1"][0] > 72
    assert session.savings().book.flops_saved_fraction > 0.22  # more than asked for


def test_a_plan_lengthened_after_its_thaw_trains_to_the_new_end(train: Any) -> None:
    session = train("mlp", "digits", steps=60, variant="single_shot_resume", saving=0.2, resume_fraction=0.25)
    session.extend(epochs=6)
    session.step(84)
    assert session.layers.frozen == ()
    assert len(at(session, LayerFrozen)["layers.0"]) == 1
    assert session.savings().book.flops_saved_fraction < 0.2


def test_an_undecided_length_keeps_the_fractions(train: Any, make_session: Any) -> None:
    session = make_session(model="mlp", data="digits", batch_size=128, epochs=None, freeze=lab.Schedule(saving=0.2))
    assert session.planned_steps == 240
    session.run(epochs=6, progress=False)
    assert session.steps_done == 72
    assert 0.19 <= session.savings().book.flops_saved_fraction <= 0.22


def test_a_rule_restored_goes_on_where_the_other_was(train: Any) -> None:
    session = train("mlp", "digits", steps=20, variant="periodic", saving=0.2, interval_epochs=1)
    other = train("mlp", "digits", steps=0, variant="periodic", saving=0.2, interval_epochs=1)
    assert isinstance(session.rule, ScheduleRule)
    assert isinstance(other.rule, ScheduleRule)
    other.rule.load_state_dict(session.rule.state_dict())
    assert other.rule.state_dict() == session.rule.state_dict()
    assert other.rule.explain("layers.0", other.layers) == session.rule.explain("layers.0", session.layers)
