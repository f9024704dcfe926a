"""A schedule's settings, and the plan that each variant makes of them."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from egeria_lab.algorithms.freeze_plans import NEVER, Stints
from egeria_lab.algorithms.freeze_schedule import SOLVED, FreezePlan, Schedule
from egeria_lab.algorithms.schedule_solver import SavingMeter, solve_start, three_unit_costs
from egeria_lab.errors import InvalidSettingError, UnknownNameError

FORWARD = [2.0, 3.0, 4.0, 3.0, 2.0, 1.0]
BLOCKS = [("stem", "a"), ("b",), ("c",), ("d",), ("e",), ("head",)]


def plan_of(schedule: Schedule, total: int = 100, per_epoch: int = 10) -> FreezePlan:
    costs = three_unit_costs(FORWARD, schedule.most_frozen(len(BLOCKS)))
    return schedule.plan(BLOCKS, costs, total_steps=total, steps_per_epoch=per_epoch)


def steps(plan: FreezePlan, total: int) -> list[Stints]:
    """The stints of each block in steps; every one must be a whole number of them."""
    result: list[Stints] = []
    for block in plan.blocks[:-1]:
        assert len({plan.stints[name] for name in block}) == 1, "a block freezes at once"
        times = tuple((a * total, min(b, 1.0) * total) for a, b in plan.stints[block[0]])
        assert all(abs(time - round(time)) < 1e-9 for stint in times for time in stint)
        result.append(tuple((round(a), round(b)) for a, b in times))
    return result


def saving_by_steps(plan: FreezePlan, total: int) -> float:
    """Step by step, all batches of the same size."""
    frozen, costs = steps(plan, total), three_unit_costs(FORWARD, len(BLOCKS))
    spent = 0.0
    for step in range(total):
        flags = [any(a <= step < b for a, b in block) for block in frozen]
        spent += sum(costs[flags.index(False)])
    return 1 - spent / (total * sum(costs[0]))


@pytest.mark.parametrize("variant", SOLVED)
@pytest.mark.parametrize("saving", [0.05, 0.2, 0.3])
@pytest.mark.parametrize(("total", "per_epoch"), [(100, 10), (37, 10), (20, 50), (23, 1), (400, 7)])
def test_every_solved_plan_meets_its_target_and_trains_as_long_as_it_can(
    variant: str, saving: float, total: int, per_epoch: int
) -> None:
    plan = plan_of(Schedule(variant=variant, saving=saving), total, per_epoch)
    saved = saving_by_steps(plan, total)
    assert plan.saving is not None
    assert plan.ceiling is not None
    assert saving <= plan.saving <= saved + 1e-9
    assert plan.saving <= plan.ceiling
    slack = 4.0 if "periodic" in variant else 2.0  # steps: each border of a stint may cost a part of one
    assert saved - saving <= slack * plan.ceiling / total + 0.02 * (total >= 280)
    assert plan.stints["head"] == plan.stints["e"] == ()  # 4 of 6 blocks freeze
    assert plan.stints["a"] == plan.stints["stem"]


def test_single_shot_freezes_one_by_one_for_good() -> None:
    plan = plan_of(Schedule(saving=0.2, interval_steps=5))
    start = steps(plan, 100)[0][0][0]
    assert steps(plan, 100) == [((start + 5 * index, 100),) for index in range(4)] + [()]
    assert plan.stints["b"][0][1] == NEVER
    exact = solve_start(three_unit_costs(FORWARD, 4), 0.2, 5, 100)
    assert exact - 1 <= start <= exact


def test_a_long_plan_begins_at_the_end_of_an_epoch() -> None:
    plan = plan_of(Schedule(saving=0.2, interval_epochs=2), total=500)
    assert [block[0][0] % 10 for block in steps(plan, 500)[:4]] == [0, 0, 0, 0]
    ceiling = plan.ceiling
    assert ceiling is not None
    earliest = plan_of(Schedule(saving=ceiling, interval_epochs=2), total=500)
    assert steps(earliest, 500)[0][0][0] == 1  # no end of an epoch is early enough


def test_resume_thaws_everything_for_the_last_part() -> None:
    plan = plan_of(Schedule(variant="single_shot_resume", saving=0.2, resume_fraction=0.15))
    single = plan_of(Schedule(saving=0.2))
    assert {block[0][1] for block in steps(plan, 100)[:4]} == {85}
    assert plan.stints["a"][0][1] == 0.85
    assert steps(plan, 100)[0][0][0] <= steps(single, 100)[0][0][0] - 12


def test_periodic_trains_first_in_each_cycle_and_then_freezes_together() -> None:
    plan = plan_of(Schedule(variant="periodic", saving=0.2, interval_steps=20))
    first, *others = steps(plan, 100)[:4]
    assert others == [first] * 3
    assert [end for _, end in first] == [20, 40, 60, 80, 100]
    assert all(end - 20 < begin < end for begin, end in first)
    assert plan.stints["a"][-1][1] == NEVER


def test_delayed_cycles_have_their_share_and_begin_as_late_as_they_can() -> None:
    plan = plan_of(Schedule(variant="delayed_periodic", saving=0.2, interval_steps=10, frozen_share=0.7))
    first = steps(plan, 100)[0]
    assert [end - begin for begin, end in first[:-1]] == [7] * (len(first) - 1)
    assert [b[0] - a[0] for a, b in pairwise(first)] == [10] * (len(first) - 1)
    assert first[0][0] > 20
    less = plan_of(Schedule(variant="delayed_periodic", saving=0.1, interval_steps=10, frozen_share=0.7))
    assert steps(less, 100)[0][0][0] > first[0][0]


def test_intervals_in_steps_and_in_epochs_are_the_same() -> None:
    for variant in SOLVED:
        assert (
            plan_of(Schedule(variant=variant, saving=0.2, interval_epochs=0.5)).stints
            == plan_of(Schedule(variant=variant, saving=0.2, interval_steps=5)).stints
        )


def test_the_default_intervals() -> None:
    assert steps(plan_of(Schedule(saving=0.2), total=320), 320)[1][0][0] % 10 == (
        steps(plan_of(Schedule(saving=0.2), total=320), 320)[0][0][0] % 10
    )
    begins = [block[0][0] for block in steps(plan_of(Schedule(saving=0.2), total=320), 320)[:4]]
    assert [b - a for a, b in pairwise(begins)] == [10, 10, 10]  # 5 / 160
    assert len(plan_of(Schedule(variant="periodic", saving=0.2)).stints["a"]) == 8


def test_costs_that_vary_are_counted() -> None:
    schedule, costs = Schedule(saving=0.2), three_unit_costs(FORWARD, 4)
    plan = schedule.plan(
        BLOCKS, costs, total_steps=100, steps_per_epoch=10, density_at=lambda p: 1.0 if p < 0.5 else 0.3
    )
    assert plan.stints["a"][0][0] < plan_of(schedule).stints["a"][0][0]
    meter = SavingMeter(costs, 100, density_at=lambda p: 1.0 if p < 0.5 else 0.3)
    assert meter.saving(steps(plan, 100)[:4]) >= 0.2


@pytest.mark.parametrize("variant", SOLVED)
@pytest.mark.parametrize("total", [1, 2, 3, 7, 100])
def test_a_target_beyond_the_ceiling_gives_one_that_can_be_met(variant: str, total: int) -> None:
    with pytest.raises(
        InvalidSettingError, match=r"saving=0.99 .* the ceiling is [\d.]+, with 4 of 5 blocks"
    ) as caught:
        plan_of(Schedule(variant=variant, saving=0.99), total)
    ceiling = float(re.findall(r"ceiling is ([\d.]+),", str(caught.value))[0])
    if ceiling == 0:
        assert total <= 2
    else:
        assert saving_by_steps(plan_of(Schedule(variant=variant, saving=ceiling), total), total) >= ceiling


def test_a_model_without_a_layer_before_its_head_has_a_ceiling_of_zero() -> None:
    with pytest.raises(InvalidSettingError, match="the ceiling is 0, with 0 of 0 blocks"):
        Schedule().plan([("head",)], [3.0], total_steps=100, steps_per_epoch=10)
    with pytest.raises(InvalidSettingError, match="the ceiling is 0, with 0 of 5 blocks"):
        plan_of(Schedule(max_frozen=0.1))


def test_a_cycle_of_one_step_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="a cycle of 1 steps cannot hold"):
        plan_of(Schedule(variant="periodic", interval_steps=1))


@pytest.mark.parametrize("max_frozen", [0.3, 2 / 3, 1.0])
def test_max_frozen_counts_blocks(max_frozen: float) -> None:
    frozen = sum(bool(block) for block in steps(plan_of(Schedule(saving=0.05, max_frozen=max_frozen)), 100))
    assert frozen == {0.3: 1, 2 / 3: 4, 1.0: 5}[max_frozen]
    assert [Schedule().most_frozen(n) for n in (1, 2, 3, 6, 16)] == [0, 1, 2, 4, 10]


def test_baselines_by_blocks() -> None:
    linear = plan_of(Schedule(variant="linear", start=0.5))
    assert [linear.stints[name] for name in ("stem", "a", "b")] == [((0.6, NEVER),)] * 2 + [((0.7, NEVER),)]
    assert linear.stints["e"] == ()  # it would freeze at the very end
    cubic = plan_of(Schedule(variant="freezeout", start=0.2))
    assert cubic.stints["stem"] == cubic.stints["a"]
    assert cubic.stints["a"][0][0] == pytest.approx(0.2)
    assert cubic.stints["a"] < cubic.stints["b"] < cubic.stints["e"] < ((1.0, NEVER),)
    assert cubic.saving is None


def test_a_fixed_list_names_layers_and_not_blocks() -> None:
    schedule = Schedule(variant="fixed", layers=("stem", "c"), start=0.25)
    names = ["stem", "a", "b", "c", "head"]
    blocks = schedule.blocks(names, [1, 100, 100, 100, 1])
    plan = schedule.plan(blocks, [], total_steps=10, steps_per_epoch=10)
    assert plan.stints == {"stem": ((0.25, NEVER),), "a": (), "b": (), "c": ((0.25, NEVER),), "head": ()}
    for wrong in ("head", "d"):
        with pytest.raises(UnknownNameError, match="the head cannot freeze"):
            Schedule(variant="fixed", layers=(wrong,)).plan(blocks, [], total_steps=10, steps_per_epoch=10)


def test_blocks_follow_the_stem_option() -> None:
    names, costs = ["a", "b", "head"], [1.0, 100.0, 1.0]
    assert Schedule().blocks(names, costs)[0] == ("a", "b")
    assert Schedule(stem="own").blocks(names, costs)[0] == ("a",)


def test_layers_that_come_back_in_cycles_have_no_rate_of_their_own() -> None:
    own = [variant for variant in (*SOLVED, "linear", "freezeout") if Schedule(variant=variant).has_own_rates]
    assert own == ["single_shot", "single_shot_resume", "freezeout"]
    assert not Schedule(block_lr="global").has_own_rates


@pytest.mark.parametrize(
    "wrong",
    [
        {"saving": 0.0}, {"saving": 1.0}, {"max_frozen": 0}, {"max_frozen": 1.1}, {"start": 1.0}, {"level": 0},
        {"variant": "cubic"}, {"variant": "fixed"}, {"variant": "fixed", "layers": "abc"}, {"interval_epochs": 0},
        {"interval_steps": 0}, {"interval_steps": 2.5}, {"interval_epochs": 1, "interval_steps": 1}, {"stem": "no"},
        {"block_lr": "step"}, {"resume_fraction": 0}, {"resume_fraction": 1}, {"frozen_share": 1.0},
        {"saving": "a"}, {"saving": None}, {"start": float("nan")}, {"interval_steps": "5"},
    ],
)  # fmt: skip
def test_bad_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((InvalidSettingError, UnknownNameError)) as caught:
        Schedule(**wrong)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
