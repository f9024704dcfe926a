"""Every transition of the rule's state machine, driven by hand with a rule small enough to follow on paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from egeria_lab.algorithms.decision import Decision
from egeria_lab.algorithms.freeze_policy import RELAXED_FLOOR, Plasticity, PlasticityPolicy
from egeria_lab.algorithms.plasticity import Reading
from egeria_lab.algorithms.thaw_rules import LearningRates, never_thaw, thaw_on_lr_drop
from egeria_lab.errors import InvalidSettingError, UnknownNameError

NAMES = ("a", "b", "c", "head")
QUICK: dict[str, Any] = {"window": 2, "patience": 2, "interval_steps": 1, "tolerance": 0.5}


class Driver:
    """Plays trainer and steering for a policy: carries out what it decides and keeps a diary."""

    def __init__(self, **settings: Any) -> None:
        self.policy = PlasticityPolicy(NAMES, Plasticity(**{**QUICK, **settings}))
        self.frozen: list[str] = []
        self.pinned: list[str] = []
        self.diary: list[Decision] = []
        self.passes = 2.0
        self.rate = 0.1

    def observe(self, loss: float = 1.0, rate: float | None = None) -> list[Decision]:
        self.rate = self.rate if rate is None else rate
        decisions = self.policy.observe(loss, self.rate, tuple(n for n in NAMES if n in self.frozen))
        self.carry_out(decisions)
        return decisions

    def evaluate(self, value: float, layers: Sequence[str] | None = None) -> dict[str, Reading]:
        wanted = layers if layers is not None else [n for n in NAMES if n not in self.frozen]
        readings, decisions = self.policy.evaluate(
            dict.fromkeys(wanted, value), frozen=self.frozen, pinned=self.pinned, passes=self.passes
        )
        self.carry_out(decisions)
        return readings

    def carry_out(self, decisions: list[Decision]) -> None:
        self.diary += decisions
        for decision in decisions:
            if decision.action == "freeze":
                self.frozen.append(decision.layer)
                self.policy.froze()
            elif decision.action == "thaw":
                self.frozen.remove(decision.layer)
        if any(decision.action == "thaw" for decision in decisions):
            self.policy.thawed()

    def round(self, value: float, loss: float = 1.0) -> dict[str, Reading]:
        self.observe(loss)
        return self.evaluate(value)

    def leave_bootstrapping(self) -> None:
        for _ in range(2 * self.policy.settings.window):
            self.round(0.0)
        assert not self.policy.bootstrapping

    def tune(self) -> None:
        """Readings that rise by 1 each: slopes settle at 1, and the tolerance is tuned."""
        self.leave_bootstrapping()
        for value in range(1, 8):
            self.round(float(value))
        assert self.policy.limit_of("a") is not None
        assert not self.frozen

    def stand_still(self, rounds: int, value: float = 7.0) -> None:
        for _ in range(rounds):
            self.round(value)

    def actions(self) -> list[tuple[str, str]]:
        return [(d.action, d.layer) for d in self.diary]


# --- bootstrapping ---------------------------------------------------------------------------------------


def test_bootstrapping_does_not_end_before_one_pass() -> None:
    driver = Driver()
    driver.passes = 0.99
    for _ in range(30):
        driver.round(1.0)
    assert driver.policy.bootstrapping
    assert driver.policy.loss_change == 0.0
    driver.passes = 1.0
    driver.round(1.0)
    assert not driver.policy.bootstrapping


def test_bootstrapping_does_not_end_while_the_learning_rate_is_high() -> None:
    driver = Driver(bootstrap_rate=0.5)
    driver.observe(rate=0.02)  # a warm-up: low, but not come down
    driver.observe(rate=0.2)
    for rate in (0.2, 0.15, 0.101):
        driver.rate = rate
        for _ in range(6):
            driver.round(1.0)
        assert driver.policy.bootstrapping
    kept = PlasticityPolicy(NAMES, driver.policy.settings)
    kept.load_state_dict(driver.policy.state_dict())
    for policy in (kept, driver.policy):
        policy.observe(1.0, 0.1, ())
        policy.evaluate({}, frozen=(), pinned=(), passes=2.0)
        assert not policy.bootstrapping
    driver.rate = 0.2  # a restart does not begin it anew
    driver.round(1.0)
    assert not driver.policy.bootstrapping


def test_bootstrapping_does_not_end_while_the_loss_falls() -> None:
    """A loss that falls by 10 % a reading: two windows of 2 differ by 1 − 0.9² = 19 %."""
    driver = Driver()
    for number in range(20):
        driver.round(1.0, loss=0.9**number)
    assert driver.policy.bootstrapping
    assert driver.policy.loss_change == pytest.approx(1 - 0.9**2)
    assert driver.diary == []


def test_bootstrapping_ends_when_two_windows_of_the_loss_differ_by_less_than_its_setting() -> None:
    driver = Driver(bootstrap_change=0.1)
    losses = [4.0, 3.0, 2.0, 2.0, 1.9, 1.9]
    # windows of 2: (4+3, 2+2) 43 %; (3+2, 2+1.9) 22 %; (2+2, 1.9+1.9) 5 %
    expected = [None, None, None, 3 / 7, 1.1 / 5, 0.05]
    for loss, change in zip(losses, expected, strict=True):
        driver.round(1.0, loss=loss)
        assert driver.policy.loss_change == (None if change is None else pytest.approx(change))
        assert driver.policy.bootstrapping == (change is None or change >= 0.1)


def test_a_rising_loss_is_change_too() -> None:
    driver = Driver()
    for number in range(10):
        driver.round(1.0, loss=1.2**number)
    assert driver.policy.bootstrapping


def test_the_loss_of_an_interval_is_the_mean_over_its_steps() -> None:
    driver = Driver()
    for losses in ((1.0, 3.0), (2.0, 2.0), (1.0, 3.0), (0.0, 4.0)):
        for loss in losses:
            driver.observe(loss)
        driver.evaluate(1.0)
    assert driver.policy.loss_change == 0.0
    assert not driver.policy.bootstrapping


def test_bootstrapping_never_comes_back_and_nothing_of_it_tunes_the_tolerance() -> None:
    driver = Driver()
    for number in range(10):
        readings = driver.round(1000.0 * number, loss=2.0**-number)
        assert {r.verdict for r in readings.values()} == {"warming up"}
        assert {r.tolerance for r in readings.values()} == {None}
    assert driver.policy.limit_of("a") is None
    driver.passes = 2
    driver.leave_bootstrapping()
    driver.tune()
    assert driver.policy.limit_of("a") is not None
    assert driver.policy.limit_of("a") < 100  # type: ignore[operator]
    driver.round(7.0, loss=50.0)
    assert not driver.policy.bootstrapping


# --- freezing from the front -----------------------------------------------------------------------------


def test_the_front_layer_freezes_after_patience_stable_readings_with_the_numbers() -> None:
    driver = Driver()
    driver.tune()
    driver.round(7.0)  # slope 0.5, not yet below the limit
    limit = driver.policy.limit_of("a")
    assert limit is not None
    driver.round(7.0)
    assert (driver.frozen, driver.policy.stable_of("a")) == ([], 1)
    driver.round(7.0)
    assert driver.actions() == [("freeze", "a")]
    decision = driver.diary[0]
    assert (decision.slope, decision.tolerance) == (0.0, limit)
    assert decision.reason == f"slope 0.0e+00 < tolerance {limit:.1e} for 2 of 2 readings"


def test_frozen_is_a_prefix_and_only_one_layer_freezes_a_reading() -> None:
    """All layers stand still from the same reading on; they freeze one after the other, front to back."""
    driver = Driver()
    driver.tune()
    previous = 0
    for _ in range(12):
        driver.round(7.0)
        assert driver.frozen == list(NAMES[: len(driver.frozen)])
        assert len(driver.frozen) - previous in (0, 1)
        previous = len(driver.frozen)
    assert driver.frozen == ["a", "b", "c"]


def test_a_stable_layer_behind_a_moving_front_does_not_freeze() -> None:
    driver = Driver()
    driver.tune()
    for number in range(20):
        driver.observe()
        values = {"a": 7.0 + number, "b": 7.0, "c": 7.0, "head": 7.0}
        readings, decisions = driver.policy.evaluate(values, frozen=[], pinned=[], passes=2)
        assert decisions == []
    assert readings["b"].verdict == "freeze"  # it would, but it is not its turn
    assert readings["a"].verdict == "moving"


def test_a_hole_frozen_by_hand_does_not_move_the_front() -> None:
    driver = Driver()
    driver.tune()
    driver.frozen = ["b"]
    driver.stand_still(4)
    assert driver.actions()[0] == ("freeze", "a")
    driver.stand_still(4)
    assert driver.actions()[1] == ("freeze", "c")


def test_the_head_is_never_frozen_and_says_so_once() -> None:
    driver = Driver()
    driver.tune()
    driver.stand_still(40)
    assert driver.actions() == [("freeze", "a"), ("freeze", "b"), ("freeze", "c"), ("blocked", "head")]
    assert driver.diary[-1].reason == "the head is never frozen by a rule"


def test_a_pinned_front_layer_blocks_all_behind_it_once_and_goes_on_after_unpinning() -> None:
    driver = Driver()
    driver.tune()
    driver.pinned = ["a"]
    driver.stand_still(20)
    assert driver.actions() == [("blocked", "a")]
    assert driver.diary[0].reason == "it is pinned"
    assert driver.round(7.0)["a"].verdict == "blocked"
    driver.pinned = []
    driver.round(7.0)
    assert driver.actions()[1] == ("freeze", "a")


def test_a_pin_behind_the_front_does_not_matter_yet() -> None:
    driver = Driver()
    driver.tune()
    driver.pinned = ["b"]
    driver.stand_still(20)
    assert driver.actions() == [("freeze", "a"), ("blocked", "b")]


@pytest.mark.parametrize(("cap", "allowed"), [(0.25, 1), (0.5, 2), (0.74, 2), (0.75, 3), (0.1, 0)])
def test_a_cap_holds_and_gives_one_event(cap: float, allowed: int) -> None:
    """traps row 20: 'would freeze, blocked by cap', once."""
    driver = Driver(max_frozen=cap)
    driver.tune()
    driver.stand_still(60)
    assert driver.frozen == list(NAMES[:allowed])
    blocked = [d for d in driver.diary if d.action == "blocked"]
    assert len(blocked) == 1
    if allowed < 3:
        assert blocked[0].reason == f"max_frozen={cap:.3g} allows at most {allowed} of 4 layers"


def test_a_raised_cap_lets_the_waiting_layer_freeze() -> None:
    driver = Driver(max_frozen=0.25)
    driver.tune()
    driver.stand_still(30)
    assert driver.frozen == ["a"]
    driver.policy.settings = Plasticity(**QUICK, max_frozen=0.5)
    driver.round(7.0)
    assert driver.frozen == ["a", "b"]


def test_layers_that_were_not_read_do_not_freeze() -> None:
    driver = Driver()
    driver.tune()
    for _ in range(10):
        driver.observe()
        driver.evaluate(7.0, layers=["b", "c"])
    assert driver.frozen == []


# --- tolerance -------------------------------------------------------------------------------------------


def test_tolerance_for_one_layer_and_for_all() -> None:
    driver = Driver()
    driver.tune()
    scale = driver.policy.limit_of("a") / 0.5  # type: ignore[operator]
    driver.policy.set_tolerance("a", 0.0)
    assert driver.policy.limit_of("a") == 0.0
    assert driver.policy.limit_of("b") == pytest.approx(0.5 * scale)
    driver.stand_still(10)
    assert driver.frozen == []
    driver.policy.set_tolerance("a", 2)
    driver.stand_still(2)
    assert driver.frozen == ["a"]
    driver.policy.settings = Plasticity(**{**QUICK, "tolerance": 0.1})
    assert driver.policy.limit_of("b") == pytest.approx(0.1 * scale)


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.2", True, None])
def test_a_layers_own_tolerance_is_checked(value: Any) -> None:
    with pytest.raises(InvalidSettingError, match=r"Plasticity.tolerance must be .*>= 0, got"):
        Driver().policy.set_tolerance("a", value)


def test_a_refresh_keeps_tolerances_and_starts_new_series() -> None:
    driver = Driver()
    driver.tune()
    limit = driver.policy.limit_of("a")
    driver.stand_still(2)
    driver.policy.restart()
    assert driver.policy.stable_of("a") == 0
    reading = driver.round(500.0)["a"]
    assert (reading.smoothed, reading.slope, reading.verdict) == (500.0, None, "warming up")
    assert driver.policy.limit_of("a") == limit
    assert driver.frozen == []
    driver.stand_still(2, value=500.0)
    assert driver.frozen == ["a"]


def test_restart_of_one_layer_leaves_the_others() -> None:
    driver = Driver()
    driver.tune()
    driver.observe()
    driver.policy.restart("a")
    readings = driver.evaluate(7.0)
    assert readings["a"].slope is None
    assert readings["b"].slope is not None


# --- thawing ---------------------------------------------------------------------------------------------


def frozen_driver(**settings: Any) -> Driver:
    driver = Driver(**settings)
    driver.tune()
    driver.stand_still(40)
    assert driver.frozen == ["a", "b", "c"]
    driver.diary.clear()
    return driver


def test_a_tenfold_step_drop_thaws_all() -> None:
    driver = frozen_driver()
    driver.observe(rate=0.01)
    assert driver.actions() == [("thaw", "a"), ("thaw", "b"), ("thaw", "c")]
    assert driver.frozen == []
    assert {d.reason for d in driver.diary} == {"the learning rate fell from 0.1 to 0.01"}
    assert driver.policy.relaxed
    driver.observe(rate=0.001)  # nothing is frozen, nothing to thaw
    assert len(driver.diary) == 3


def test_a_drop_by_less_does_not_thaw_and_two_drops_add_up() -> None:
    driver = frozen_driver()
    driver.observe(rate=0.05)
    driver.observe()
    driver.observe(rate=0.02)
    driver.observe()
    assert driver.diary == []
    driver.observe(rate=0.01)
    assert driver.actions()[0] == ("thaw", "a")


def test_the_drop_counts_from_the_last_freeze() -> None:
    driver = Driver()
    driver.tune()
    driver.stand_still(3)
    assert driver.frozen == ["a"]
    driver.observe(rate=0.02)
    driver.stand_still(6)
    assert "b" in driver.frozen  # frozen at 0.02
    driver.diary.clear()
    driver.observe(rate=0.01)  # a tenth of 0.1, but half of 0.02
    assert driver.diary == []
    driver.observe()
    driver.observe(rate=0.002)
    assert driver.actions()[0] == ("thaw", "a")


@pytest.mark.parametrize("interval", [1, 5])
def test_a_cosine_to_zero_does_not_thaw(interval: int) -> None:
    driver = frozen_driver(interval_steps=interval)
    steps = 500
    for step in range(steps + 1):
        driver.observe(rate=0.1 * 0.5 * (1 + math.cos(math.pi * step / steps)))
    assert driver.diary == []
    assert driver.frozen == ["a", "b", "c"]


@pytest.mark.parametrize("epochs", [5, 10, 20, 100])
def test_a_cosine_that_moves_once_an_epoch_does_not_thaw(epochs: int) -> None:
    """The rate stands still for a whole epoch each time, and near the end it falls by more than half."""
    driver = frozen_driver(interval_steps=2)
    for epoch in range(epochs + 1):
        for _ in range(10):
            driver.observe(rate=0.1 * 0.5 * (1 + math.cos(math.pi * epoch / epochs)))
    assert driver.diary == []


@pytest.mark.parametrize("gamma", [0.1, 0.2, 0.3, 0.5])
def test_a_rate_that_falls_in_steps_thaws_when_a_tenth_is_reached(gamma: float) -> None:
    driver = frozen_driver(interval_steps=2)
    rate = 0.1
    while rate > 0.01 * (1 + 1e-9):
        assert driver.diary == []
        rate *= gamma
        for _ in range(10):
            driver.observe(rate=rate)
    assert driver.actions() == [("thaw", "a"), ("thaw", "b"), ("thaw", "c")]


def test_a_warm_up_in_small_steps_does_not_make_the_steps_after_it_smooth() -> None:
    driver = Driver()
    for step in range(1, 11):
        driver.observe(rate=0.01 * step)
    driver.tune()
    driver.stand_still(40)
    driver.diary.clear()
    driver.observe(rate=0.01)
    assert driver.actions()[0] == ("thaw", "a")


def test_an_exponential_decay_every_step_does_not_thaw() -> None:
    driver = frozen_driver()
    for step in range(200):
        driver.observe(rate=0.1 * 0.95**step)
    assert driver.diary == []


def test_a_restart_thaws() -> None:
    driver = frozen_driver()
    for step in range(100):
        driver.observe(rate=0.1 * 0.5 * (1 + math.cos(math.pi * step / 100)))
    assert driver.diary == []
    driver.observe(rate=0.1)
    assert driver.actions()[0] == ("thaw", "a")
    assert "restarted" in driver.diary[0].reason


def test_a_jump_by_less_than_ten_does_not_thaw() -> None:
    driver = frozen_driver()
    driver.observe(rate=0.9)
    assert driver.diary == []
    driver.observe(rate=9.0)
    assert len(driver.diary) == 3


def test_criteria_are_relaxed_after_a_thaw() -> None:
    driver = frozen_driver(window=2, patience=2)
    assert (driver.policy.window, driver.policy.patience) == (2, 2)
    policy = PlasticityPolicy(NAMES, Plasticity())
    assert (policy.window, policy.patience) == (10, 10)
    policy.thawed()
    assert (policy.window, policy.patience) == (5, 5)
    policy.settings = Plasticity(window=4, patience=4)
    assert (policy.window, policy.patience) == (RELAXED_FLOOR, RELAXED_FLOOR)
    policy.settings = Plasticity(window=7, patience=9)
    assert (policy.window, policy.patience) == (3, 4)
    assert RELAXED_FLOOR == 3


def test_relaxed_criteria_never_ask_for_more_than_the_user_did() -> None:
    """The floor of 3 is for halving; a user who asked for a patience of 1 keeps it."""
    policy = PlasticityPolicy(NAMES, Plasticity(window=2, patience=1))
    policy.thawed()
    assert (policy.window, policy.patience) == (2, 1)


def test_layers_freeze_again_after_a_thaw_and_thaw_again_at_the_next_drop() -> None:
    driver = frozen_driver(window=6, patience=6)
    driver.observe(rate=0.01)
    driver.policy.restart()
    assert driver.frozen == []
    needed = 0
    while not driver.frozen:
        driver.round(7.0)
        needed += 1
    assert needed == 3 + 3 - 1  # window 3 until the first fit, patience 3
    driver.diary.clear()
    driver.observe(rate=0.001)
    assert driver.actions() == [("thaw", "a")]


def test_never_thaw_and_a_users_own_function() -> None:
    driver = frozen_driver(thaw="never")
    driver.observe(rate=0.0001)
    assert driver.diary == []
    seen: list[LearningRates] = []

    def own(rates: LearningRates) -> str | None:
        seen.append(rates)
        return "because I say so" if rates.now == 0.07 else None

    driver = frozen_driver(thaw=own)
    driver.observe(rate=0.001)
    assert driver.diary == []
    driver.observe(rate=0.07)
    assert driver.actions() == [("thaw", "a"), ("thaw", "b"), ("thaw", "c")]
    assert driver.diary[0].reason == "because I say so"
    assert (seen[-1].now, seen[-1].before, seen[-1].at_last_freeze) == (0.07, 0.001, 0.1)


def test_thaw_rules_by_hand() -> None:
    def rates(now: float, before: float, last: float | None = 0.1, still: bool = True) -> LearningRates:
        return LearningRates(now=now, before=before, at_last_freeze=last, stood_still=still)

    assert thaw_on_lr_drop(rates(0.01, 0.1)) is not None
    assert thaw_on_lr_drop(rates(0.1 * 0.1, 0.1)) is not None  # 0.1 × 0.1 is 0.010000000000000002
    assert thaw_on_lr_drop(rates(0.0101, 0.1)) is None
    assert thaw_on_lr_drop(rates(0.01, 0.1, still=False)) is None
    assert thaw_on_lr_drop(rates(0.01, 0.01)) is None  # it fell before, not now
    assert thaw_on_lr_drop(rates(0.01, 0.1, last=None)) is None
    assert thaw_on_lr_drop(rates(1.0, 0.1)) is not None
    assert thaw_on_lr_drop(rates(0.1, 0.0)) is None
    assert never_thaw(rates(0.0, 1.0)) is None


# --- settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("patience", 0, "a whole number >= 1, got 0"),
        ("patience", 1.5, "a whole number >= 1, got 1.5"),
        ("patience", True, "a whole number >= 1, got True"),
        ("window", 1, "a whole number >= 2, got 1"),
        ("interval_steps", 0, "a whole number >= 1, got 0"),
        ("probe_rows", 1, "a whole number >= 2, got 1"),
        ("tolerance", -1, ">= 0, got -1"),
        ("tolerance", math.nan, ">= 0, got nan"),
        ("tolerance", "0.2", ">= 0, got '0.2'"),
        ("bootstrap_change", 0, "> 0, got 0"),
        ("bootstrap_rate", 0, r"in \(0, 1\] or None, got 0"),
        ("bootstrap_rate", 1.5, r"in \(0, 1\] or None, got 1.5"),
        ("monitor_budget", 0, "> 0, got 0"),
        ("monitor_budget", 1.5, r"in \(0, 1\], got 1.5"),
        ("max_frozen", 0, r"in \(0, 1\] or None, got 0"),
        ("max_frozen", 1.01, r"in \(0, 1\] or None, got 1.01"),
        ("refresh_evals", 0, "a whole number >= 1 or None, got 0"),
    ],
)
def test_settings_check_themselves(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidSettingError, match=rf"Plasticity.{field} must be .*{message}"):
        Plasticity(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("distance", "spp", "Unknown distance 'spp'. Did you mean 'sp'?"),
        ("reference", "int9", "Unknown reference 'int9'"),
        ("thaw", "lr_dorp", "Unknown thaw rule 'lr_dorp'. Did you mean 'lr_drop'?"),
    ],
)
def test_unknown_choices_name_the_nearest(field: str, value: str, message: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        Plasticity(**{field: value})  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_readings_per_snapshot() -> None:
    assert Plasticity().readings_per_snapshot == 40
    assert Plasticity(window=4, patience=6).readings_per_snapshot == 20
    assert Plasticity(refresh_evals=5).readings_per_snapshot == 20  # never less than window + patience
    assert Plasticity(refresh_evals=500).readings_per_snapshot == 500


def rounds_with_a_freeze(**settings: object) -> list[list[str]]:
    """What froze in each round of a run whose layers all stand still."""
    driver = Driver(**settings)
    driver.tune()
    rounds = []
    for _ in range(20):
        before = len(driver.diary)
        driver.stand_still(1)
        rounds.append([d.layer for d in driver.diary[before:] if d.action == "freeze"])
    return [layers for layers in rounds if layers]


def test_layers_whose_verdicts_agree_freeze_together_when_asked_to() -> None:
    assert rounds_with_a_freeze() == [["a"], ["b"], ["c"]]
    assert rounds_with_a_freeze(freeze_together=True) == [["a", "b", "c"]]


def test_a_layer_that_still_moves_ends_the_group_that_freezes_together() -> None:
    driver = Driver(freeze_together=True)
    driver.tune()
    for n in range(8):
        driver.observe(1.0)
        values = {"a": 7.0, "b": 7.0, "c": 7.0 + n, "head": 7.0}
        readings, decisions = driver.policy.evaluate(
            {k: v for k, v in values.items() if k not in driver.frozen}, frozen=driver.frozen, pinned=[], passes=2.0
        )
        driver.carry_out(decisions)
    assert readings["c"].verdict == "moving"
    assert driver.actions() == [("freeze", "a"), ("freeze", "b")]


def test_a_cap_counts_the_layers_that_freeze_in_the_same_round() -> None:
    driver = Driver(freeze_together=True, max_frozen=0.5)
    driver.tune()
    driver.stand_still(20)
    assert driver.actions() == [("freeze", "a"), ("freeze", "b"), ("blocked", "c")]
