"""Settings check themselves, and phases, amounts, intervals and mean densities are the papers'."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from egeria_lab.algorithms.sparse.methods import MEST, SET, RigL, StaticSparsity
from egeria_lab.algorithms.sparse.settings import DynamicSparsity, SparsitySettings
from egeria_lab.errors import EgeriaLabError, InvalidSettingError

METHODS: list[type[SparsitySettings]] = [MEST, SET, RigL, StaticSparsity]
DYNAMIC: list[type[DynamicSparsity]] = [MEST, SET, RigL]


def at_epochs(settings: SparsitySettings, *epochs: int) -> list[float]:
    return [round(settings.sparsity_at(epoch / 160), 6) for epoch in epochs]


@pytest.mark.parametrize(("sparsity", "expected"), [(0.9, [0.85, 0.875, 0.9]), (0.95, [0.9, 0.925, 0.95])])
def test_soft_bound_trains_at_the_published_sparsities(sparsity: float, expected: list[float]) -> None:
    mest = MEST(sparsity=sparsity)
    assert at_epochs(mest, 0, 90, 120) == expected
    assert at_epochs(mest, 89, 119, 160) == expected
    assert mest.drop_share_at(0.1) == 0.0


@pytest.mark.parametrize(("sparsity", "expected"), [(0.9, [0.92, 0.91, 0.9]), (0.95, [0.96, 0.955, 0.95])])
def test_elastic_mutation_prunes_to_the_published_sparsities(sparsity: float, expected: list[float]) -> None:
    mest = MEST(sparsity=sparsity, soft_bound=False)
    pruned = [1 - (1 - sparsity) * (1 - mest.drop_share_at(epoch / 160)) for epoch in (0, 90, 120)]
    assert pruned == pytest.approx(expected)
    assert at_epochs(mest, 0, 90, 120) == [sparsity] * 3


@pytest.mark.parametrize(("sparsity", "mean"), [(0.9, 0.133), (0.95, 0.083)])
def test_mean_density_of_the_soft_bound(sparsity: float, mean: float) -> None:
    mest = MEST(sparsity=sparsity, interval_epochs=5)
    assert round(mest.mean_density(), 3) == mean
    epochs = [1 - mest.sparsity_at(epoch / 160) for epoch in range(160)]
    assert sum(epochs) / 160 == pytest.approx(mest.mean_density())


@pytest.mark.parametrize("settings", [MEST(soft_bound=False), SET(), RigL(), StaticSparsity()])
def test_mean_density_of_the_others_is_the_target(settings: SparsitySettings) -> None:
    assert settings.mean_density() == pytest.approx(0.1)


def test_stopping_early_ends_the_soft_bound_early() -> None:
    mest = MEST(stop_fraction=0.5)
    assert at_epochs(mest, 79, 80) == [0.85, 0.9]
    assert mest.mean_density() == pytest.approx(0.5 * 0.15 + 0.5 * 0.10)


@pytest.mark.parametrize("sparsity", [0.0, 0.01, 0.1, 0.5, 0.8, 0.99, 0.999])
@pytest.mark.parametrize("soft", [True, False])
def test_the_rule_for_other_sparsities_stays_within_its_bounds(sparsity: float, soft: bool) -> None:
    mest = MEST(sparsity=sparsity, soft_bound=soft)
    target = 1 - sparsity
    amounts = [mest.elastic_at(p) for p in (0.0, 0.6, 0.8)]
    assert amounts[1] == pytest.approx(amounts[0] / 2)
    assert amounts[2] == 0.0
    assert amounts[0] <= min(target, sparsity / 2) + 1e-12
    assert 0 <= mest.sparsity_at(0.0) <= sparsity
    assert 0 <= mest.drop_share_at(0.0) < 1


def test_own_amounts_and_phases() -> None:
    mest = MEST(sparsity=0.8, phases=(0.2, 0.4, 0.6), elastic=(0.1, 0.06, 0.01))
    assert [round(mest.sparsity_at(p), 3) for p in (0.1, 0.2, 0.5, 0.6)] == [0.7, 0.74, 0.79, 0.8]
    assert MEST(phases=(0.1, 0.2, 0.3, 0.4)).elastic_at(0.35) == pytest.approx(0.05 / 4)


def test_rigl_share_falls_like_a_cosine_and_stops_at_three_quarters() -> None:
    shares = [RigL().drop_share_at(p) for p in (0.0, 0.25, 0.375, 0.5, 0.7499, 0.75, 1.0)]
    assert shares == pytest.approx([0.3, 0.225, 0.15, 0.075, 0.0, 0.0, 0.0], abs=1e-6)
    assert RigL(stop_fraction=1.0, drop_fraction=0.5).drop_share_at(0.5) == pytest.approx(0.25)


def test_set_share_is_constant_until_it_stops() -> None:
    assert [SET(drop_fraction=0.2).drop_share_at(p) for p in (0.0, 0.74, 0.75)] == [0.2, 0.2, 0.0]


@pytest.mark.parametrize("kind", DYNAMIC)
def test_intervals_in_epochs_steps_or_neither(kind: type[DynamicSparsity]) -> None:
    assert kind(interval_epochs=5).interval(16000, 100) == 500
    assert kind(interval_epochs=0.001).interval(16000, 100) == 1
    assert kind(interval_steps=7).interval(16000, 100) == 7
    assert kind().interval(1600, 10) == 50  # 5 of 160 epochs
    assert [kind().interval(steps, 1) for steps in (1, 3, 64)] == [1, 1, 2]


def test_rigl_waits_a_hundred_steps_in_a_long_run() -> None:
    assert RigL().interval(160 * 391, 391) == 100
    assert MEST().interval(160 * 391, 391) == SET().interval(160 * 391, 391) == 1955


def test_update_steps_of_the_published_run() -> None:
    every_five = tuple(range(5, 120, 5))
    assert MEST(interval_epochs=5, soft_bound=False).update_steps(160, 1) == every_five
    assert MEST(interval_epochs=5).update_steps(160, 1) == (*every_five, 120)
    assert SET(interval_epochs=5).update_steps(160, 1) == every_five
    assert MEST(interval_epochs=7).update_steps(160, 1)[-2:] == (119, 120)
    assert MEST(sparsity=0.0).update_steps(160, 1) == ()


def test_masks_that_never_change_are_told_with_the_numbers() -> None:
    assert SET(interval_steps=100).standstill(60, 10) == (
        "SET never changes its masks in this run: they are due every 100 steps, the run has 60 and exchanges end "
        "after step 44 (stop_fraction=0.75); give interval_steps of at most 44."
    )
    assert SET(interval_steps=45).standstill(60, 10)
    assert not SET(interval_steps=44).standstill(60, 10)
    assert "every 1,000 steps" in RigL(interval_epochs=100).standstill(60, 10)
    assert MEST(interval_steps=50).standstill(60, 10)  # its last pruning exchanges nothing
    assert "exchanges 0 weights" in MEST(sparsity=0.0).standstill(60, 10)
    for total in (2, 37, 6000):
        assert not any(kind().standstill(total, 10) for kind in DYNAMIC)


@pytest.mark.parametrize("kind", DYNAMIC)
@pytest.mark.parametrize("total", [2, 4, 10, 37])
def test_short_runs_have_updates_too(kind: type[DynamicSparsity], total: int) -> None:
    steps = kind().update_steps(total, total)
    assert steps
    assert steps[-1] <= total


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("sparsity", [1.0, 1, 1.5, -0.1, float("nan"), float("inf"), "0.9", None, True])
def test_impossible_sparsities_are_refused(kind: type[SparsitySettings], sparsity: Any) -> None:
    with pytest.raises(
        InvalidSettingError, match=rf"{kind.__name__}\.sparsity must be in \[0, 1\): the share of zeros"
    ):
        kind(sparsity=sparsity)


BAD: list[tuple[type[SparsitySettings], dict[str, Any], str]] = [
    (SET, {"density": "erdos"}, "Unknown layer density 'erdos'. Did you mean 'erk'? Known: uniform, erk."),
    (SET, {"scheme": "n:m"}, "Unknown scheme 'n:m'"),
    (SET, {"scheme": 4}, "Unknown scheme 4"),
    (SET, {"scheme": "2:4"}, "needs sparsity=0.5 and density='uniform', got sparsity=0.9 and density='uniform'"),
    (SET, {"scheme": "2:4", "sparsity": 0.5, "density": "erk"}, "needs sparsity=0.5 and density='uniform'"),
    (SET, {"init": "zeros"}, "Unknown init 'zeros'"),
    (SET, {"block_size": 1}, "SET.block_size must be a whole number >= 2, got 1."),
    (SET, {"dense_first": 1}, "SET.dense_first must be True or False, got 1."),
    (SET, {"dense": "layers.0"}, "SET.dense must be a tuple of names, got 'layers.0'."),
    (StaticSparsity, {"sparse": (1,)}, "StaticSparsity.sparse must be a tuple of names"),
    (SET, {"interval_epochs": 0}, "SET.interval_epochs must be > 0 or None, got 0."),
    (RigL, {"interval_steps": 1.5}, "RigL.interval_steps must be a whole number >= 1 or None, got 1.5."),
    (MEST, {"interval_steps": 10, "interval_epochs": 1}, "MEST: give interval_epochs or interval_steps, not both"),
    (MEST, {"stop_fraction": 0}, r"MEST.stop_fraction must be in (0, 1], got 0."),
    (MEST, {"allow_regrow": "yes"}, "MEST.allow_regrow must be True or False"),
    (MEST, {"soft_bound": None}, "MEST.soft_bound must be True or False, got None."),
    (MEST, {"importance_weight": -1}, "MEST.importance_weight must be a number >= 0, got -1."),
    (MEST, {"gradient_average": "mean"}, "Unknown gradient average 'mean'"),
    (MEST, {"phases": (0.5, 0.5)}, "MEST.phases must be increasing fractions in (0, 1], at least one"),
    (MEST, {"phases": ()}, "MEST.phases must be increasing"),
    (MEST, {"phases": (0.5, 1.5)}, "MEST.phases must be increasing"),
    (MEST, {"elastic": (0.1,)}, "MEST.elastic must be one amount in [0, 0.9) for each of the 2 phases, or None"),
    (MEST, {"elastic": (0.2, 0.1), "soft_bound": False}, "MEST.elastic must be one amount in [0, 0.1)"),
    (SET, {"drop_fraction": 1.0}, "SET.drop_fraction must be in (0, 1), got 1.0."),
    (RigL, {"drop_fraction": float("nan")}, "RigL.drop_fraction must be in (0, 1), got nan."),
]


@pytest.mark.parametrize(("kind", "options", "sentence"), BAD)
def test_bad_settings_give_one_clear_sentence(
    kind: type[SparsitySettings], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(EgeriaLabError) as caught:
        kind(**options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", METHODS)
def test_settings_are_frozen_slotted_and_can_be_rebuilt(kind: type[SparsitySettings]) -> None:
    settings = kind(sparsity=0.5, dense=["a"])  # type: ignore[arg-type]
    assert settings.dense == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.sparsity = 0.1  # type: ignore[misc]
    assert not hasattr(settings, "__dict__")
    assert kind(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}) == settings
    assert kind.prefix == "sparsity"
