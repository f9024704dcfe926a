"""Every rule freezes through the same door: schedule, gradient norm, and the guard behind plasticity."""

from __future__ import annotations

import math

import pytest

import egeria_lab as lab
from egeria_lab.events import LayerFrozen, LayerThawed, SettingChanged


def frozen_at(session: lab.Session) -> dict[str, int]:
    return {e.layer: e.step for e in session.events.of(LayerFrozen) if isinstance(e, LayerFrozen)}


def test_fixed_list_freezes_at_its_start() -> None:
    rule = lab.Schedule(variant="fixed", layers=("layers.0", "layers.1"), start=0.5)
    session = lab.Session("mlp", "digits", epochs=2, freeze=rule)
    session.step(session.planned_steps)
    assert frozen_at(session) == {"layers.0": 12, "layers.1": 12}
    assert session.explain("layers.0").startswith("layers.0 is frozen since step 12 by rule: scheduled")


def test_linear_schedule_freezes_front_to_back() -> None:
    session = lab.Session("mlp", "digits", epochs=4, freeze=lab.Schedule(variant="linear", start=0.0))
    session.step(session.planned_steps)
    assert list(frozen_at(session)) == ["layers.0", "layers.1"]  # the third would freeze at the very end
    assert frozen_at(session)["layers.0"] == session.planned_steps / 3


def test_single_shot_meets_its_target_by_the_counter() -> None:
    session = lab.Session("resnet8", lab.data.load("synthetic", num_samples=64, shape=(1, 8, 8)), epochs=8,
                          batch_size=16, freeze=lab.Schedule(saving=0.2, max_frozen=0.8))  # fmt: skip
    session.step(session.planned_steps)
    saved = session.savings().book.flops_saved_fraction
    assert 0.17 <= saved <= 0.25  # the schedule counts three equal units, the counter what really ran


def test_gradient_norm_freezes_contiguously() -> None:
    session = lab.Session("mlp", "digits", epochs=6, freeze=lab.GradientNorm(interval_steps=6, percentile=80))
    session.step(session.planned_steps)
    frozen = session.layers.frozen
    assert frozen
    assert list(frozen) == session.layers.names[: len(frozen)]
    assert "gradient norm changed by" in session.layers[frozen[0]].reason


def test_schedule_is_announced_by_explain() -> None:
    session = lab.Session("mlp", "digits", epochs=2, freeze=lab.Schedule(variant="freezeout", start=0.5))
    assert "scheduled to freeze at step 12 (50.0% of training)" in session.explain("layers.0")
    assert "the schedule never freezes it" in session.explain("layers.3")


def test_settings_of_another_rule_cannot_be_overridden() -> None:
    session = lab.Session("mlp", "digits", epochs=2, freeze=lab.Schedule(variant="linear"))
    with pytest.raises(lab.InvalidSettingError, match="another one or none"):
        session.override("freeze.tolerance", 0.5)


def test_guard_thaws_and_backs_off_with_its_numbers() -> None:
    rule = lab.Plasticity(interval_steps=2, window=2, patience=1, tolerance=50.0, bootstrap_change=10.0, guard=0.01)
    session = lab.Session("mlp", "digits", epochs=8, freeze=rule)
    while not session.layers.frozen:
        session.step()
    assert session.rule is not None
    session.rule._guard.best = 1.0  # type: ignore[attr-defined] - as if accuracy had been perfect before
    session.step(session.steps_per_epoch)
    thawed = session.events.of(LayerThawed)
    assert thawed
    assert "below its best 100.0% (guard: 1.0)" in thawed[0].sentence()
    changed = [e for e in session.events.of(SettingChanged) if isinstance(e, SettingChanged)]
    assert (changed[0].old, changed[0].new, changed[0].by) == (50.0, 25.0, "rule")


def test_guard_leaves_layers_alone_that_the_user_froze() -> None:
    session = lab.Session("mlp", "digits", epochs=4, freeze=lab.Plasticity(guard=0.01))
    session.freeze("layers.0")
    assert session.rule is not None
    session.rule._guard.best = 1.0  # type: ignore[attr-defined]
    session.step(session.steps_per_epoch)
    assert session.layers.frozen == ("layers.0",)


def rates(session: lab.Session) -> dict[str, float]:
    return {group["layer"]: group["lr"] for group in session.optimizer.param_groups}


def test_each_layer_has_its_own_cosine_that_ends_at_its_freeze() -> None:
    session = lab.Session("mlp", "digits", epochs=4, freeze=lab.Schedule(variant="freezeout", start=0.5))
    times = session.rule.policy.times  # type: ignore[union-attr]
    session.step(12)
    assert rates(session)["layers.0"] == pytest.approx(0.1 * 0.5 * (1 + math.cos(math.pi * 0.25 / 0.5)))
    assert rates(session)["layers.3"] == pytest.approx(0.1 * 0.5 * (1 + math.cos(math.pi * 0.25)))
    step = math.ceil(times["layers.1"] * session.planned_steps)
    session.step(step - session.steps_done)
    assert "layers.1" in session.layers.frozen
    assert rates(session)["layers.1"] == pytest.approx(0.0, abs=1e-6)


def test_own_cosines_and_another_scheduler_contradict_each_other() -> None:
    with pytest.raises(lab.InvalidSettingError, match="block_lr='global'"):
        lab.Session("mlp", "digits", scheduler="step", freeze=lab.Schedule(variant="freezeout"))
    lab.Session("mlp", "digits", scheduler="step", freeze=lab.Schedule(variant="freezeout", block_lr="global"))


def test_one_rate_trace_a_layer_with_an_event_for_each_jump() -> None:
    """Trap 42: rates of layers drift apart and jump through freeze and thaw, and it can be seen why."""
    session = lab.Session("mlp", "digits", epochs=4, freeze=lab.Schedule(variant="freezeout", start=0.5))
    session.step(20)
    session.freeze("layers.2")
    session.step(10)
    session.thaw("layers.2")
    session.step(5)
    frame = session.history.frame("rates")
    at = {step: dict(zip(rows["layer"], rows["learning_rate"], strict=True)) for step, rows in frame.groupby("step")}
    assert at[20]["layers.0"] < at[20]["layers.1"] < at[20]["layers.3"]
    assert math.isnan(at[30]["layers.2"])
    assert at[31]["layers.2"] > 0
    assert [e.step for e in session.events if "layers.2" in e.sentence()] == [20, 30]
