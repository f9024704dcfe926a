"""Layers that settle: how much of each update is left, what stops it, and that nothing of it is lost or left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import egeria_lab as lab
from egeria_lab.algorithms.settling import settling_factor
from egeria_lab.engine.monitor import PlasticityMonitor
from egeria_lab.errors import InvalidSettingError
from egeria_lab.events import FreezeBlocked, LayerFrozen, LayerSettling, LayerThawed, Notice, SettlingEnded
from egeria_lab.integrations.loop import LoopFreezer

RULE: dict[str, Any] = {
    "interval_steps": 2, "window": 3, "patience": 2, "tolerance": 0.6, "bootstrap_change": 0.5,
    "monitor_budget": 1.0, "reference": "fp32", "settle_epochs": 2.0,
}  # fmt: skip
PER_EPOCH = 23
Make = Callable[..., lab.Session]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[lab.Session] = []

    def session(rule: dict[str, Any] | None = None, **more: Any) -> lab.Session:
        torch.set_num_threads(1)
        model = lab.models.build("mlp", input_shape=(1, 8, 8), num_classes=10, seed=0, hidden=(16,) * 5)
        freeze = lab.Plasticity(**{**RULE, **(rule or {})})
        keywords = {"epochs": 20, "batch_size": 64, "lr": 0.05, "scheduler": "constant", "freeze": freeze, **more}
        made.append(lab.Session(model, "digits", **keywords))
        return made[-1]

    yield session
    for one in made:
        one.close()


def until_it_settles(session: lab.Session) -> str:
    while not session.events.of(LayerSettling):
        session.step()
    (event,) = session.events.of(LayerSettling)
    assert isinstance(event, LayerSettling)
    return event.layer


def weights(session: lab.Session, layer: str) -> list[torch.Tensor]:
    found = next(one for one in session.layer_modules if one.name == layer)
    return [parameter.detach().clone() for parameter in found.parameters]


def test_a_layer_settles_for_so_many_passes_and_then_freezes(make: Make) -> None:
    session = make()
    layer = until_it_settles(session)
    begun = session.steps_done
    assert layer == "layers.0"
    assert layer not in session.layers.frozen
    assert "settles since epoch" in session.explain(layer)
    while layer not in session.layers.frozen:
        session.step()
    assert 0 <= session.steps_done - begun - 2 * PER_EPOCH < 2 + RULE["interval_steps"]
    frozen = session.events.of(LayerFrozen)[0]
    assert isinstance(frozen, LayerFrozen)
    assert "settled since epoch" in frozen.reason
    assert frozen.slope is not None


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_of_each_update_the_half_cosine_is_left(make: Make, optimizer: str) -> None:
    """Beside the same run that does not settle: one step further, its update is the whole of which this is a part."""
    session = make(optimizer=optimizer, lr=0.01)
    layer = until_it_settles(session)
    session.step(PER_EPOCH)
    whole = session.fork()
    for name in whole.layers.names:
        whole._steering.settler.end(name)  # type: ignore[union-attr]
    before, epoch = weights(session, layer), session.epoch
    head = session.layers.names[-1]  # it never settles
    others = weights(session, head)
    session.step()
    whole.step()
    start = session.policy.settling.begun[layer].passes  # type: ignore[union-attr]
    left = settling_factor((epoch - start) / 2.0)
    assert 0.3 < left < 0.7
    for old, mine, full in zip(before, weights(session, layer), weights(whole, layer), strict=True):
        assert not torch.equal(old, full)
        torch.testing.assert_close(mine - old, left * (full - old), rtol=1e-3, atol=1e-7)
    for old, mine, full in zip(others, weights(session, head), weights(whole, head), strict=True):
        assert torch.equal(mine, full)  # nothing else is touched
        assert not torch.equal(old, mine)
    assert session.history.rates.rows()["learning_rate"][0] == pytest.approx(0.01)
    whole.close()


def test_at_the_end_it_stands_still_before_it_freezes(make: Make) -> None:
    session = make({"interval_steps": 10})
    layer = until_it_settles(session)
    session.step(2 * PER_EPOCH)
    before = weights(session, layer)
    session.step()
    assert layer not in session.layers.frozen
    assert all(torch.equal(a, b) for a, b in zip(before, weights(session, layer), strict=True))


def test_a_pin_ends_it_and_the_layer_trains_as_before(make: Make) -> None:
    session = make()
    layer = until_it_settles(session)
    session.step(PER_EPOCH)
    session.pin(layer)
    session.step(2 * RULE["interval_steps"])
    (ended,) = session.events.of(SettlingEnded)
    assert isinstance(ended, SettlingEnded)
    assert (ended.layer, ended.reason) == (layer, "it is pinned")
    assert session._steering.settler.factor(layer) == 1.0  # type: ignore[union-attr]
    session.step(3 * PER_EPOCH)
    assert layer not in session.layers.frozen


def test_a_thaw_by_hand_in_front_ends_it_front_to_back_holds(make: Make) -> None:
    session = make()
    while len(session.events.of(LayerSettling)) < 2:
        session.step()
    first, second = (event.layer for event in session.events.of(LayerSettling)[:2])  # type: ignore[attr-defined]
    session.freeze(first)
    session.step(RULE["interval_steps"])
    assert second in session.policy.settling.begun  # type: ignore[union-attr]
    session.thaw(first)
    session.step(2 * RULE["interval_steps"])
    assert second not in session.policy.settling.begun  # type: ignore[union-attr]
    assert session.events.of(SettlingEnded)[0].layer == second  # type: ignore[attr-defined]


def test_a_thaw_by_the_rule_ends_all_of_it(make: Make) -> None:
    now: list[str] = []
    session = make({"thaw": lambda rates: now[0] if now else None})
    while not (session.layers.frozen and session.policy.settling.begun):  # type: ignore[union-attr]
        session.step()
    now.append("asked for by a test")
    session.step()
    now.clear()
    assert session.events.of(LayerThawed)
    assert session.events.of(SettlingEnded)
    settler = session._steering.settler
    assert settler is not None
    assert not session.policy.settling.begun  # type: ignore[union-attr]
    assert all(settler.factor(layer) == 1.0 for layer in session.layers.names)


def test_a_drop_of_the_rate_ends_it_though_nothing_is_frozen_yet(make: Make) -> None:
    session = make()
    layer = until_it_settles(session)
    session.step(4)
    assert not session.layers.frozen
    session.override("optimizer.lr", 0.001)
    session.step(2)
    (ended,) = session.events.of(SettlingEnded)
    assert isinstance(ended, SettlingEnded)
    assert ended.layer == layer
    assert "learning rate fell" in ended.reason
    assert session._steering.settler.factor(layer) == 1.0  # type: ignore[union-attr]


def test_the_guard_ends_it_though_nothing_is_frozen_yet(make: Make) -> None:
    session = make({"guard": 0.01})
    layer = until_it_settles(session)
    rule = session.rule
    assert isinstance(rule, PlasticityMonitor)
    assert rule.after_evaluation(0.9, session.layers) == []
    decisions = rule.after_evaluation(0.5, session.layers)
    assert [(one.action, one.layer) for one in decisions] == [("unsettle", layer), ("set", "freeze.tolerance")]
    assert not rule.policy.settling.begun


def test_frozen_and_thawed_by_hand_between_two_readings_it_does_not_settle_any_more(make: Make) -> None:
    session = make({"interval_steps": 6})
    layer = until_it_settles(session)
    session.step()
    session.freeze(layer)
    session.step()
    session.thaw(layer)
    session.step()
    assert layer not in session.policy.settling.begun  # type: ignore[union-attr]
    assert session._steering.settler.factor(layer) == 1.0  # type: ignore[union-attr]
    assert "settles" not in session.explain(layer)


def test_the_layer_whose_turn_it_is_is_read_each_time_and_nothing_once_only_the_head_is_left(make: Make) -> None:
    session = make({"monitor_budget": 0.02, "settle_epochs": 6.0})
    until_it_settles(session)
    begun = session.steps_done
    session.step(40)
    rows = session.history.plasticity.rows()
    read = {layer: int(((rows["layer"] == layer) & (rows["step"] > begun + 2)).sum()) for layer in (0, 1)}
    assert read[1] >= 12 > read[0]
    settling = session.policy.settling  # type: ignore[union-attr]
    while len(settling.begun) < 5:
        session.step()
    begun = session.steps_done
    session.step(20)
    assert session.history.plasticity.rows()["step"].max() <= begun
    assert not session.events.of(FreezeBlocked)


@pytest.mark.parametrize("other", [0.0, 6.0])
def test_gone_on_with_another_length_what_has_begun_keeps_its_own(make: Make, other: float) -> None:
    session = make()
    layer = until_it_settles(session)
    session.step(PER_EPOCH)
    fork = session.fork(freeze=lab.Plasticity(**{**RULE, "settle_epochs": other}))
    if other:
        fork.step(PER_EPOCH + 2 * RULE["interval_steps"])
        assert layer in fork.layers.frozen
    else:
        assert not fork.policy.settling.begun
        assert fork._steering.settler is None
    fork.close()


def test_the_cache_waits_until_nothing_settles_and_changes_no_bit(make: Make, tmp_path: Path) -> None:
    plain, cached = make(), make(cache=lab.ActivationCache(directory=tmp_path, self_profiling=False))
    frozen_while_others_settle = 0
    for _ in range(400):
        plain.step()
        cached.step()
        if cached._steering.settler.is_busy:  # type: ignore[union-attr]
            frozen_while_others_settle += bool(cached.layers.frozen)
            assert cached.cache.statistics.rows == 0  # type: ignore[union-attr]
    assert frozen_while_others_settle > 10
    assert len(cached.layers.frozen) == 5
    assert cached.cache.statistics.hits > 1000  # type: ignore[union-attr]
    assert plain.history.steps["loss"].tolist() == cached.history.steps["loss"].tolist()


def test_longer_than_the_plan_is_said_at_the_start(make: Make) -> None:
    (notice,) = make({"settle_epochs": 30.0}).events.of(Notice)
    assert "is as long as the whole plan of 20 epochs" in notice.sentence()
    assert not make({"settle_epochs": 2.0}).events.of(Notice)


def test_what_if_can_be_shown_in_words(make: Make) -> None:
    session = make()
    until_it_settles(session)
    assert "begins to settle" in repr(session.what_if())
    assert "begins to settle" in session.what_if()._repr_html_()


def test_frozen_by_hand_on_its_way_what_if_stays_exact(make: Make) -> None:
    session = make({"interval_steps": 4})
    layer = until_it_settles(session)
    session.step(5)
    session.freeze(layer)
    session.step(20)
    assert session.what_if().exact_until is None


def test_saved_and_resumed_in_the_middle_it_goes_on_to_the_bit(make: Make, tmp_path: Path) -> None:
    session = make()
    layer = until_it_settles(session)
    session.step(PER_EPOCH)
    session.save(tmp_path / "middle.ckpt")
    session.step(2 * PER_EPOCH)
    model = lab.models.build("mlp", input_shape=(1, 8, 8), num_classes=10, seed=5, hidden=(16,) * 5)
    other = lab.Session.load(tmp_path / "middle.ckpt", model=model, data="digits")
    other.step(2 * PER_EPOCH)
    assert session.layers.frozen == other.layers.frozen
    assert layer in other.layers.frozen
    for name in session.layers.names:
        assert all(torch.equal(a, b) for a, b in zip(weights(session, name), weights(other, name), strict=True))
    kinds = (LayerSettling, LayerFrozen, SettlingEnded)
    assert session.events.of(*kinds) == other.events.of(*kinds)
    other.close()


def test_undo_goes_back_into_the_middle_of_it(make: Make) -> None:
    session = make()
    layer = until_it_settles(session)
    session.step(PER_EPOCH)
    expected = session.fork()
    expected.step(5)
    session.freeze(layer)
    session.step(3)
    session.undo()
    session.step(5 - (session.steps_done - expected.steps_done + 5))
    assert session.steps_done == expected.steps_done
    for name in session.layers.names:
        assert all(torch.equal(a, b) for a, b in zip(weights(session, name), weights(expected, name), strict=True))
    expected.close()


def test_with_masks_nothing_under_one_is_ever_moved(make: Make) -> None:
    # growing masks keep a sparse layer moving, how long depends on the processor's rounding: settle early for sure
    session = make({"tolerance": 5.0}, sparsity=lab.MEST(sparsity=0.8))
    while not session.events.of(LayerSettling):
        session.step()
    layer = session.events.of(LayerSettling)[0].layer  # type: ignore[attr-defined]
    assert session.sparse is not None
    parameters = dict(session.model.named_parameters())
    mine = [name for name in session.sparse.masks.masks if name.startswith(f"{layer}.")]
    assert mine
    first = {name: session.sparse.masks.masks[name].clone() for name in mine}
    for _ in range(2 * PER_EPOCH):
        session.step()
        masks = session.sparse.masks.masks
        assert all(not parameters[name][~masks[name]].any() for name in mine)
    assert any(not torch.equal(first[name], masks[name]) for name in mine)  # else nothing was shown


def test_without_it_no_step_is_looked_at(make: Make) -> None:
    session = make({"settle_epochs": 0.0})
    session.step(120)
    assert session.layers.frozen
    assert session.trainer.settler is None
    assert not session.events.of(LayerSettling)


def test_bad_values_and_loops_of_ones_own_are_refused() -> None:
    with pytest.raises(InvalidSettingError, match=r"settle_epochs must be a number >= 0, got -1"):
        lab.Plasticity(settle_epochs=-1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidSettingError, match="settle_epochs"):
        LoopFreezer(
            model, optimizer, freeze=lab.Plasticity(settle_epochs=1.0), example=torch.zeros(2, 4), steps_per_epoch=5
        )


def test_the_preset_settles_for_a_tenth_of_the_plan_once_the_rate_has_fallen() -> None:
    rule = lab.presets.settled(epochs=20, tolerance=0.4)["freeze"]
    assert (rule.settle_epochs, rule.tolerance, rule.bootstrap_rate, rule.thaw) == (2.0, 0.4, 0.5, "never")
    assert lab.presets.settled(bootstrap_rate=None)["freeze"].bootstrap_rate is None
    assert lab.presets.settled(cache=False)["cache"] is None
    assert lab.presets.settled(epochs=12, settle=0.25)["freeze"].settle_epochs == 3.0
    with pytest.raises(InvalidSettingError, match=r"settled\.epochs must be a number > 0, got 0"):
        lab.presets.settled(epochs=0)
    with pytest.raises(InvalidSettingError, match=r"settled\.settle must be a number in \(0, 1\), got 1"):
        lab.presets.settled(settle=1)


@pytest.mark.parametrize(("scheduler", "rate", "told"), [("constant", 0.5, 1), ("constant", None, 0), ("step", 0.5, 0)])
def test_a_rate_that_never_falls_is_told_at_the_start(
    make: Make, scheduler: str, rate: float | None, told: int
) -> None:
    session = make({"bootstrap_rate": rate}, scheduler=scheduler)
    found = [one.message for one in session.events.of(Notice) if isinstance(one, Notice)]
    assert sum("nothing will be frozen by the rule" in message for message in found) == told


def test_everything_settles_where_it_is_told_the_plan() -> None:
    at_once, settled = lab.presets.everything(), lab.presets.everything(epochs=12, settle=0.25, sparsity=0.5)
    assert (at_once["freeze"].settle_epochs, at_once["freeze"].tolerance) == (0.0, 0.2)
    assert settled["freeze"] == lab.presets.settled(epochs=12, settle=0.25, bootstrap_rate=None)["freeze"]
    assert lab.presets.everything(epochs=12, settle=0.25, tolerance=0.4)["freeze"].tolerance == 0.4
    assert set(at_once) == set(settled)
    for given in ({"epochs": 12}, {"settle": 0.25}):
        with pytest.raises(InvalidSettingError, match="given both or neither"):
            lab.presets.everything(**given)  # type: ignore[arg-type]
