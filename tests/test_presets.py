"""The keywords of each preset, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

import egeria_lab as lab


@pytest.mark.parametrize("lr", [-1, 0, float("inf"), float("nan"), "x", True])
def test_a_learning_rate_that_cannot_be_is_refused(lr: Any) -> None:
    with pytest.raises(lab.InvalidSettingError, match=r"fine_tuning\.lr must be a number > 0, got"):
        lab.presets.fine_tuning(lr=lr)


@pytest.mark.parametrize("preset", ["egeria", "fine_tuning"])
def test_the_cache_is_on_or_off(preset: str) -> None:
    make = lab.presets.PRESETS[preset]
    assert isinstance(make(cache=True)["cache"], lab.ActivationCache)
    assert make(cache=False)["cache"] is None
    for wrong in ("yes", 1, None):
        with pytest.raises(lab.InvalidSettingError, match=rf"{preset}\.cache must be True or False, got {wrong!r}"):
            make(cache=wrong)
