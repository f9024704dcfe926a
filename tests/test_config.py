"""Settings by name: what holds now and at the start, for all layers or one; and seeds for every purpose."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.config import LEARNING_RATE, Settings, derive_seed
from egeria_lab.errors import InvalidSettingError, UnknownNameError


def test_names_values_and_defaults() -> None:
    settings = Settings(Plasticity(tolerance=0.3), learning_rate=0.1)
    assert "freeze.tolerance" in settings.names()
    assert LEARNING_RATE == "optimizer.lr"
    assert settings.value("freeze.tolerance") == 0.3
    assert settings.value("optimizer.lr") == 0.1
    settings.change("freeze.tolerance", 0.4)
    settings.change("optimizer.lr", 0.2)
    assert (settings.value("freeze.tolerance"), settings.default("freeze.tolerance")) == (0.4, 0.3)
    assert (settings.value("optimizer.lr"), settings.default("optimizer.lr")) == (0.2, 0.1)


def test_every_listed_setting_is_a_field_of_its_owner_and_its_range_is_valid() -> None:
    settings = Settings(Plasticity(), learning_rate=0.1)
    owners = {f"freeze.{field.name}" for field in fields(Plasticity)} | {LEARNING_RATE}
    for setting in settings.list():
        assert setting.name in owners
        assert setting.low < setting.high
        assert setting.help.endswith(".")
        assert setting.applies
        for value in (setting.low, setting.high):
            settings.check(setting.name, int(value) if setting.integer else value)
            if setting.integer:
                settings.check(setting.name, float(value))  # what a slider sends


def test_one_layer_can_have_its_own_tolerance() -> None:
    settings = Settings(Plasticity(), learning_rate=0.1)
    settings.change("freeze.tolerance", 0.05, layer="a")
    assert settings.value("freeze.tolerance", "a") == 0.05
    assert settings.value("freeze.tolerance", "b") == 0.2
    assert settings.value("freeze.tolerance") == 0.2
    settings.change("freeze.tolerance", 0.4)
    assert settings.value("freeze.tolerance", "a") == 0.05
    settings.forget("freeze.tolerance", "a")
    settings.forget("freeze.tolerance", "a")
    assert settings.value("freeze.tolerance", "a") == 0.4


@pytest.mark.parametrize(
    ("name", "value", "layer", "message"),
    [
        ("freeze.tolerance", -1, None, ">= 0, got -1"),
        ("freeze.tolerance", None, None, ">= 0, got None"),
        ("freeze.tolerance", "0.1", "a", ">= 0, got '0.1'"),
        ("freeze.window", 2.5, None, "a whole number >= 2, got 2.5"),
        ("freeze.window", True, None, "a whole number >= 2, got True"),
        ("freeze.patience", float("nan"), None, "a whole number >= 1, got nan"),
        ("freeze.window", 5, "a", "holds for all layers and cannot be set for a; one layer can have freeze.tolerance"),
        ("optimizer.lr", 0, None, "a number > 0, got 0"),
        ("optimizer.lr", float("inf"), None, "a number > 0, got inf"),
        ("optimizer.lr", "0.1", None, "a number > 0, got '0.1'"),
        ("optimizer.lr", True, None, "a number > 0, got True"),
        ("optimizer.lr", 0.1, "a", "holds for all layers"),
    ],
)
def test_bad_values_change_nothing(name: str, value: Any, layer: str | None, message: str) -> None:
    settings = Settings(Plasticity(), learning_rate=0.1)
    before = [(s.name, s.value) for s in settings.list()]
    for call in (settings.check, settings.change):
        with pytest.raises(InvalidSettingError) as caught:
            call(name, value, layer)
        assert message in str(caught.value)
    assert [(s.name, s.value) for s in settings.list()] == before
    assert settings.per_layer == {}


def test_unknown_names() -> None:
    settings = Settings(Plasticity(), learning_rate=0.1)
    for call in (settings.value, settings.default, lambda name: settings.change(name, 1)):
        with pytest.raises(
            UnknownNameError, match=r"Unknown setting 'freeze.tolerence'. Did you mean 'freeze.tolerance'"
        ):
            call("freeze.tolerence")
    with pytest.raises(UnknownNameError):
        settings.value("tolerance_of_nothing")
    with pytest.raises(UnknownNameError):
        settings.change("freeze.distance", "cka")  # no setting for mid-run


def test_without_a_rule_only_the_rate_may_change() -> None:
    settings = Settings(None, learning_rate=0.1)
    assert settings.names() == [LEARNING_RATE]
    with pytest.raises(InvalidSettingError, match=r"freeze=lab.Plasticity\(\)"):
        settings.value("freeze.tolerance")


def test_changing_does_not_touch_the_users_own_object() -> None:
    own = Plasticity()
    settings = Settings(own, learning_rate=0.1)
    settings.change("freeze.window", 3)
    assert own.window == 10
    assert settings.freeze is not own


def test_seeds_are_stable_and_differ_by_purpose() -> None:
    """The number is part of what makes a run repeatable: it may not change between versions or machines."""
    assert derive_seed(0, "order", 0) == derive_seed(0, "order", 0)
    made = {derive_seed(seed, purpose, number) for seed in range(5) for purpose in ("a", "b") for number in range(50)}
    assert len(made) == 500
    assert all(0 <= seed < 2**63 for seed in made)
    assert derive_seed(1, 2, 3) != derive_seed(12, 3)
    assert derive_seed(0, "order", 1) == 2961819992523135983
    assert derive_seed(7, "model") == 8166156339554369481
