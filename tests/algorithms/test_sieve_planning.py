"""How many steps so many passes take, found by playing the sieve itself through them; and what a sieve refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from egeria_lab.algorithms.sieving.ids import checked_ids
from egeria_lab.algorithms.sieving.planning import (
    Standing,
    first_exchange,
    passes_made,
    step_after,
    steps_for,
    why_idle,
)
from egeria_lab.algorithms.sieving.settings import (
    CirculantSieve,
    LossSieve,
    ManualSieve,
    OneShotSieve,
    RandomSieve,
    SieveSettings,
)
from egeria_lab.algorithms.sieving.sieve import Sieve
from egeria_lab.errors import DataError, InvalidSettingError

SAMPLES, BATCH = 120, 4


def played(settings: SieveSettings, planned: int) -> tuple[float, list[int]]:
    """Passes that the sieve itself makes in a plan, and the steps at which it acts."""
    one = Sieve(settings, SAMPLES, batch_size=BATCH, seed=0)
    step, passes, acted = 0, 0.0, []
    while step < planned:
        ids = one.kept_ids()
        length = math.ceil(len(ids) / BATCH)
        made = min(length, planned - step)
        step, passes = step + made, passes + made / length
        if made == length:
            known = torch.rand(len(ids), generator=torch.Generator().manual_seed(step))
            one.observe(ids, correct=known > 0.5, margin=known, loss=known)
            if one.after_pass(steps_done=step, planned_steps=planned) is not None:
                acted.append(step)
    return passes, acted


def start(settings: SieveSettings) -> Standing:
    one = Sieve(settings, SAMPLES, batch_size=BATCH, seed=0)
    known = one.standing(steps_done=0)
    full, short = (math.ceil(known.pop(name) / BATCH) for name in ("full", "short"))
    return Standing(full=full, short=short, length=math.ceil(one.members.num_kept / BATCH), **known)


@pytest.mark.parametrize("epochs", [0.5, 1, 1.5, 2, 2.3, 3, 4, 7, 10, 20])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.4, 0.6, 0.9])
def test_a_one_shot_plan_makes_the_passes_that_were_asked_for(epochs: float, fraction: float, share: float) -> None:
    settings = OneShotSieve(fraction=fraction, at=share)
    planned = steps_for(settings, start(settings), epochs)
    passes, acted = played(settings, planned)
    assert passes == pytest.approx(epochs, abs=0.5 / start(settings).short + 1e-9)
    if epochs == int(epochs):
        assert passes == pytest.approx(epochs, abs=1e-9)
    assert passes_made(settings, start(settings), planned) == pytest.approx(passes)
    assert first_exchange(settings, start(settings), planned) == (acted[0] if acted else None)
    assert (why_idle(settings, start(settings), planned) is None) == bool(acted)


@pytest.mark.parametrize("epochs", [1, 1.5, 2, 3, 4, 7, 10, 20])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.875, 1.0])
def test_a_loss_sieve_plan_comes_as_near_as_there_is_a_plan(epochs: float, fraction: float, share: float) -> None:
    settings = LossSieve(fraction=fraction, full_after=share)
    planned = steps_for(settings, start(settings), epochs)
    passes, acted = played(settings, planned)
    best = min(abs(played(settings, other)[0] - epochs) for other in range(max(1, planned - 40), planned + 40))
    assert abs(passes - epochs) == pytest.approx(best, abs=1e-9)
    assert abs(passes - epochs) <= fraction / 2 + 0.5 / start(settings).short + 1e-9
    assert passes_made(settings, start(settings), planned) == pytest.approx(passes)
    assert first_exchange(settings, start(settings), planned) == (acted[0] if acted else None)


@pytest.mark.parametrize("kind", [CirculantSieve, RandomSieve])
@pytest.mark.parametrize("more", [{"interval_epochs": 3}, {"interval_steps": 50}, {}, {"stop_fraction": 0.2}])
@pytest.mark.parametrize("epochs", [1, 2, 4, 9])
def test_circulating_sieves_are_foreseen_too(kind: Any, more: dict[str, Any], epochs: int) -> None:
    settings = kind(**more)
    planned = steps_for(settings, start(settings), epochs)
    passes, acted = played(settings, planned)
    assert passes == epochs
    assert first_exchange(settings, start(settings), planned) == (acted[0] if acted else None)


def test_a_run_within_the_plan_stops_where_its_passes_end() -> None:
    settings = OneShotSieve(fraction=0.5, at=0.3)
    begin = start(settings)
    planned = steps_for(settings, begin, 6)
    for epochs in (1, 2, 3, 5, 6):
        assert passes_made(settings, begin, planned) >= epochs
        step = step_after(settings, begin, planned, epochs)
        lengths = [30] * (first_exchange(settings, begin, planned) // 30) + [15] * 6  # type: ignore[operator]
        assert step == sum(lengths[:epochs])
    assert step_after(settings, begin, planned, 9) == planned


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        (CirculantSieve(interval_epochs=100), "interval_epochs=100"),
        (RandomSieve(interval_steps=5000), "interval_steps=5,000"),
        (CirculantSieve(interval_epochs=2, stop_fraction=0.1), "stop_fraction=0.1"),
        (OneShotSieve(at=0.95), "at=0.95"),
        (LossSieve(full_after=0.01), "full_after=0.01"),
    ],
)
def test_what_can_never_act_says_so_with_the_numbers(settings: SieveSettings, number: str) -> None:
    begin = start(settings)
    planned = steps_for(settings, begin, 3)
    why = why_idle(settings, begin, planned)
    assert why is not None
    assert number in why
    assert f"{planned} steps in 3 passes" in why
    assert not played(settings, planned)[1]
    assert why_idle(ManualSieve(), begin, planned) is None


# --- what is no input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, 2.5, True, None])
def test_sizes_are_checked(count: Any) -> None:
    with pytest.raises(InvalidSettingError, match=r"Sieve\.num_samples must be a whole number >= 1"):
        Sieve(None, count, batch_size=1, seed=0)
    with pytest.raises(InvalidSettingError, match=r"Sieve\.batch_size must be a whole number >= 1"):
        Sieve(None, 10, batch_size=count, seed=0)


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidSettingError, match=r"Sieve\.settings must be"):
        Sieve(0.2, 10, batch_size=1, seed=0)  # type: ignore[arg-type]


def test_what_is_observed_is_checked_and_then_nothing_is_counted() -> None:
    one = Sieve(CirculantSieve(), 20, batch_size=2, seed=0)
    ids, right, margin = torch.tensor([1, 2]), torch.tensor([True, False]), torch.zeros(2)
    for bad in (torch.tensor([1, 20]), torch.tensor([-1, 2])):
        with pytest.raises(DataError, match="there is no sample"):
            one.observe(bad, correct=right, margin=margin)
    for wrong in (right.float(), right.long()):
        with pytest.raises(DataError, match="`correct` must be truth values"):
            one.observe(ids, correct=wrong, margin=margin)
    with pytest.raises(DataError, match="`margin` of sample 2 is no finite number"):
        one.observe(ids, correct=right, margin=torch.tensor([0.0, torch.nan]))
    losses = Sieve(LossSieve(), 20, batch_size=2, seed=0)
    for number in (torch.nan, torch.inf):
        with pytest.raises(DataError, match="`loss` of sample 1 is no finite number"):
            losses.observe(ids, loss=torch.tensor([number, 1.0]))
    assert int(one.counts().presentations_total.sum()) == 0
    one.observe(ids, correct=right, margin=torch.tensor([torch.inf, -torch.inf]))  # a masked class
    assert int(one.counts().presentations_total.sum()) == 2


@pytest.mark.parametrize(("done", "planned"), [(1, 0), (1, -3), (-1, 5), (1.5, 5)])
def test_a_plan_without_steps_is_refused(done: Any, planned: int) -> None:
    with pytest.raises(InvalidSettingError, match=r"Sieve\.(planned_steps|steps_done) must be a whole number"):
        Sieve(CirculantSieve(), 20, batch_size=2, seed=0).after_pass(steps_done=done, planned_steps=planned)


@pytest.mark.parametrize("state", [{}, {"kind": "CirculantSieve"}, None])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(DataError, match=r"no state of a sieve: .*num_samples"):
        Sieve(CirculantSieve(), 20, batch_size=2, seed=0).load_state_dict(state)


@pytest.mark.parametrize("ids", [["a"], None, 3, [[1], [2, 3]]])
def test_what_is_no_list_of_ids_is_refused(ids: Any) -> None:
    with pytest.raises(DataError, match="sample ids must be whole numbers"):
        checked_ids(ids, 5)
