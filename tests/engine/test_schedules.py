"""Optimizers by name, budgets, and learning-rate schedules by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from egeria_lab.engine.budget import Budget
from egeria_lab.engine.schedulers import SCHEDULES
from egeria_lab.engine.schedules import DEFAULT_RATES, Schedule, make_optimizer
from egeria_lab.errors import InvalidSettingError, TrainingError, UnknownNameError


def rates(name: str | None, steps: int, total: int, peak: float = 0.1) -> list[float]:
    optimizer = make_optimizer("sgd", nn.Linear(1, 1), peak)
    schedule = Schedule(name, optimizer, Budget(1, total))
    seen = []
    for _ in range(steps):
        seen.append(schedule.learning_rate)
        optimizer.step()
        schedule.after_step()
    return seen


def test_named_schedules_by_hand() -> None:
    assert rates("linear", 4, 4) == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert rates("constant", 3, 4) == [0.1] * 3
    assert rates("step", 8, 8) == pytest.approx([0.1] * 4 + [0.01] * 2 + [0.001] * 2)
    assert rates("cosine", 5, 4) == pytest.approx([0.05 * (1 + math.cos(math.pi * i / 4)) for i in range(5)])
    assert rates(None, 3, 4) == [0.1] * 3


def test_named_schedules_start_at_the_peak_and_stay_in_range_beyond_the_end() -> None:
    for name, factor in SCHEDULES.items():
        assert factor(0.0) == 1.0
        assert all(0 <= rate <= 0.1 for rate in rates(name, 12, 8))


def test_optimizers_by_name() -> None:
    model = nn.Linear(2, 1)
    sgd = make_optimizer("sgd", model, None)
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["momentum"], sgd.defaults["weight_decay"], sgd.defaults["lr"]) == (0.9, 5e-4, 0.1)
    assert isinstance(make_optimizer("adam", model, None), torch.optim.Adam)
    assert isinstance(make_optimizer("adamw", model, 0.5), torch.optim.AdamW)
    for name, rate in DEFAULT_RATES.items():
        assert make_optimizer(name, model, None).param_groups[0]["lr"] == rate
        assert len(make_optimizer(name, model, None).param_groups[0]["params"]) == 2
    own = torch.optim.SGD(model.parameters(), lr=7.0)
    assert make_optimizer(own, model, 0.1) is own
    assert own.param_groups[0]["lr"] == 7.0


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), "0.1"])
def test_bad_rates(rate: object) -> None:
    with pytest.raises(InvalidSettingError, match=r"lr must be a finite number > 0"):
        make_optimizer("sgd", nn.Linear(1, 1), rate)  # type: ignore[arg-type]


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown optimizer 'sdg'. Did you mean 'sgd'"):
        make_optimizer("sdg", nn.Linear(1, 1), 0.1)
    optimizer = make_optimizer("sgd", nn.Linear(1, 1), 0.1)
    with pytest.raises(UnknownNameError, match=r"Unknown scheduler 'cosinus'. Did you mean 'cosine'"):
        Schedule("cosinus", optimizer, Budget(1, 4))
    with pytest.raises(UnknownNameError, match=r"Unknown scheduler_every"):
        Schedule(lambda o: torch.optim.lr_scheduler.StepLR(o, 1), optimizer, Budget(1, 4), every="day")


def test_scaling_every_group_keeps_their_ratio() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.4}]
    )
    schedule = Schedule("linear", optimizer, Budget(1, 10))
    optimizer.step()
    schedule.after_step()
    schedule.scale(0.5)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.045, 0.18])
    schedule.after_step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.04, 0.16])


def test_epoch_schedulers_move_at_epochs_only() -> None:
    optimizer = make_optimizer("sgd", nn.Linear(1, 1), 0.1)
    schedule = Schedule(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5), optimizer, Budget(4, 8))
    for _ in range(4):
        schedule.after_step()
    assert schedule.learning_rate == 0.1
    optimizer.step()
    schedule.after_epoch(1.0)
    assert schedule.learning_rate == 0.05


def test_a_plateau_looks_at_the_validation_loss() -> None:
    optimizer = make_optimizer("sgd", nn.Linear(1, 1), 0.1)
    schedule = Schedule(
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.1), optimizer, Budget(4, 8)
    )
    seen = []
    for loss in (3.0, 2.0, 2.0, 1.0):
        schedule.after_epoch(loss)
        seen.append(schedule.learning_rate)
    assert seen == pytest.approx([0.1, 0.1, 0.01, 0.01])


def test_the_peak_is_known_before_a_warm_up() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.2)
    schedule = Schedule(lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.01), optimizer, Budget(1, 9), "step")
    assert schedule.learning_rate == pytest.approx(0.002)
    assert schedule.peak_rate == 0.2
    assert Schedule(None, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.3), Budget(1, 9)).peak_rate == 0.3


# --- budget ----------------------------------------------------------------------------------------------


def test_targets_by_hand() -> None:
    budget = Budget(steps_per_epoch=10, total_steps=40)
    assert budget.target(5) == 40
    assert budget.target(5, steps=7) == 12
    assert budget.target(5, epochs=0.5) == 10
    assert budget.target(35, epochs=2) == 55
    assert budget.total_steps == 55
    assert budget.target(0, epochs=0.001) == 1  # at least one step


def test_an_undecided_budget_is_decided_by_the_first_epochs() -> None:
    budget = Budget(10, 200, decided=False)
    assert budget.target(0, steps=5) == 5
    assert budget.total_steps == 200
    assert budget.target(0, epochs=3) == 30
    assert (budget.total_steps, budget.decided) == (30, True)
    assert budget.target(0, epochs=1) == 10
    assert budget.total_steps == 30


def test_a_used_up_budget() -> None:
    budget = Budget(10, 20)
    budget.check_left(19)
    with pytest.raises(TrainingError, match=r"budget of 20 steps is used up"):
        budget.check_left(20)
    with pytest.raises(TrainingError, match=r"used up"):
        budget.target(20)
    budget.extend(0.5)
    assert budget.target(20) == 25


@pytest.mark.parametrize("epochs", [0, -1, float("nan"), float("inf"), "2", True])
def test_bad_extensions_change_nothing(epochs: object) -> None:
    budget = Budget(10, 20)
    with pytest.raises(InvalidSettingError, match=r"Session.extend.epochs must be a number > 0"):
        budget.extend(epochs)  # type: ignore[arg-type]
    assert budget.total_steps == 20
