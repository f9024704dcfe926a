"""Settings check themselves; fractions that leave no batch are refused with the largest that does."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from egeria_lab.algorithms.sieving.settings import (
    CirculantSieve,
    LossSieve,
    ManualSieve,
    OneShotSieve,
    RandomSieve,
    check_batches,
    is_due,
)
from egeria_lab.algorithms.sieving.sieve import Sieve
from egeria_lab.errors import InvalidSettingError, UnknownNameError

KINDS = [CirculantSieve, RandomSieve, OneShotSieve, LossSieve]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan"), True, "0.2", None])
def test_the_fraction_lies_between_0_and_1(kind: Any, fraction: Any) -> None:
    with pytest.raises(InvalidSettingError, match=rf"^{kind.__name__}.fraction must be in \(0, 1\), got "):
        kind(fraction=fraction)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CirculantSieve(interval_epochs=0), r"interval_epochs must be a number > 0 or None, got 0"),
        (lambda: RandomSieve(interval_steps=0.5), r"interval_steps must be a whole number >= 1 or None"),
        (lambda: RandomSieve(interval_epochs=5, interval_steps=9), r"not both; got 5 and 9"),
        (lambda: CirculantSieve(stop_fraction=0), r"stop_fraction must be in \(0, 1\], got 0"),
        (lambda: CirculantSieve(class_shares=1), r"class_shares must be True or False"),
        (lambda: CirculantSieve(across_borders="no"), r"across_borders must be True or False"),
        (lambda: OneShotSieve(at=1.0), r"OneShotSieve.at must be in \(0, 1\), got 1.0"),
        (lambda: LossSieve(full_after=1.2), r"LossSieve.full_after must be in \(0, 1\], got 1.2"),
    ],
)
def test_other_settings_are_checked(make: Any, message: str) -> None:
    with pytest.raises(InvalidSettingError, match=message):
        make()


@pytest.mark.parametrize("wrong", [{"ties": "margins"}, {"never_correct": "evr"}])
def test_a_misspelt_choice_gets_the_nearest(wrong: dict[str, str]) -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean '(margin|ever)'"):
        CirculantSieve(**wrong)  # type: ignore[arg-type]


def test_settings_are_frozen_and_belong_to_the_sieve() -> None:
    for kind in [*KINDS, ManualSieve]:
        assert kind.prefix == "sieve"
        assert isinstance(kind().needs, tuple)
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
            kind().fraction = 0.5
        with pytest.raises(TypeError):
            kind(0.3)


def test_what_each_needs() -> None:
    assert CirculantSieve(ties="random").needs == ("correct",)
    assert Sieve(CirculantSieve(), 100, batch_size=1, seed=0).needs == ("correct", "margin")
    assert Sieve(RandomSieve(), 100, batch_size=1, seed=0).needs == Sieve(None, 9, batch_size=1, seed=0).needs == ()
    assert Sieve(LossSieve(), 100, batch_size=1, seed=0).needs == ("loss",)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("samples", "batch"), [(60_000, 128), (1000, 100), (17, 4), (1797, 64)])
def test_the_largest_fraction_of_the_message_works(kind: Any, samples: int, batch: int) -> None:
    with pytest.raises(InvalidSettingError, match="fewer than one batch of") as caught:
        Sieve(kind(fraction=0.9999), samples, batch_size=batch, seed=0)
    largest = float(re.search(r"at most ([\d.]+) here", str(caught.value)).group(1))  # type: ignore[union-attr]
    assert samples - check_batches(kind(fraction=largest), samples, batch) >= batch
    with pytest.raises(InvalidSettingError):
        check_batches(kind(fraction=min(0.9999, largest + 1.5 / samples + 1e-4)), samples, batch)


def test_when_one_batch_is_everything_no_fraction_is_offered() -> None:
    with pytest.raises(InvalidSettingError, match="one batch is all the data, so lower the batch size"):
        check_batches(CirculantSieve(), 100, 100)


def test_a_fraction_of_less_than_one_sample_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match=r"fraction=0.01 leaves out none of 10 samples; give at least 0.1"):
        check_batches(CirculantSieve(fraction=0.01), 10, 1)


@pytest.mark.parametrize(
    ("settings", "passes", "steps", "planned", "due"),
    [
        (RandomSieve(interval_epochs=5), 4, 400, 10_000, False),
        (RandomSieve(interval_epochs=5), 5, 500, 10_000, True),
        (RandomSieve(interval_epochs=2.5), 2, 200, 10_000, False),
        (RandomSieve(interval_epochs=2.5), 3, 300, 10_000, True),
        (RandomSieve(interval_epochs=0.1), 1, 100, 10_000, True),
        (CirculantSieve(interval_steps=250), 2, 200, 10_000, False),
        (CirculantSieve(interval_steps=250), 3, 300, 10_000, True),
        (CirculantSieve(), 4, 400, 16_000, False),  # the papers' run: 5 of 160 passes
        (CirculantSieve(), 5, 500, 16_000, True),
        (CirculantSieve(), 1, 100, 1_000, True),  # a small budget: each pass
    ],
)
def test_intervals(settings: Any, passes: int, steps: int, planned: int, due: bool) -> None:
    assert is_due(settings, passes=passes, steps=steps, planned_steps=planned) is due
