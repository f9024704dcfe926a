"""The freezing rules behind one interface: plasticity, schedule, gradient norm. Deciding only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from egeria_lab.algorithms.costs import StepFlops
from egeria_lab.algorithms.decision import Decision
from egeria_lab.algorithms.freeze_policy import Plasticity, PlasticityPolicy
from egeria_lab.algorithms.freeze_schedule import Schedule
from egeria_lab.algorithms.gradient_norm import GradientNorm, GradientNormPolicy
from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.algorithms.planned_costs import PlannedCost
from egeria_lab.algorithms.schedule_policy import SchedulePolicy
from egeria_lab.algorithms.schedule_solver import Density, StepCosts
from egeria_lab.data.loaders import Batch
from egeria_lab.engine.budget import Budget
from egeria_lab.engine.layer_board import LayerBoard
from egeria_lab.engine.monitor import PlasticityMonitor
from egeria_lab.engine.recorder import Recorder
from egeria_lab.events import EventLog

FreezeSettings = Plasticity | Schedule | GradientNorm


class Rule(Protocol):
    """Decides after each step which layers to freeze or thaw."""

    def after_step(
        self,
        batch: Batch,
        *,
        step: int,
        passes: float,
        loss: float,
        learning_rate: float,
        board: LayerBoard,
        flops: StepFlops,
    ) -> list[Decision]:
        """Look at a finished step and answer with decisions."""

    def after_evaluation(self, accuracy: float | None, board: LayerBoard) -> list[Decision]:
        """Look at the validation accuracy at the end of an epoch and answer with decisions."""

    def frozen_set_changed(self, reason: str, *, thawed: bool) -> None:
        """Note that a layer was frozen or thawed, by whomever."""

    def carried_out(self, decision: Decision) -> None:
        """Note that a decision of this rule was carried out."""

    def explain(self, layer: str, board: LayerBoard) -> str:
        """What an active layer still lacks, in one clause with the numbers."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what the rule does next: plain values and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another rule of the same kind and layers was."""

    def close(self) -> None:
        """End threads and give up files, if there are any."""


class ScheduleRule:
    """Freezes and thaws layers at their scheduled fractions of training.

    A longer plan (`Session.extend`) solves nothing again: what is to come moves to the same fraction of the new
    length, and what has frozen stays frozen.

    Args:
        policy: when each layer freezes and thaws.
        budget: tells the progress, also after the plan was lengthened.
        own_rates: each layer has a cosine of its own that ends at its freeze.
    """

    def __init__(self, policy: SchedulePolicy, budget: Budget, own_rates: bool = False) -> None:
        self.policy = policy
        self.budget = budget
        self.own_rates = own_rates

    def after_step(self, batch: Batch, *, step: int, board: LayerBoard, **_facts: object) -> list[Decision]:
        """What the schedule freezes and thaws at this step; what somebody froze by hand it leaves frozen."""
        progress = step / self.budget.total_steps
        by_hand = tuple(row.name for row in board if row.frozen and row.by != "rule")
        return self.policy.due(progress, frozen=board.frozen, pinned=board.pinned, by_hand=by_hand)

    def after_evaluation(self, accuracy: float | None, board: LayerBoard) -> list[Decision]:
        """A schedule looks at progress only."""
        return []

    def frozen_set_changed(self, reason: str, *, thawed: bool) -> None:
        """A schedule looks at progress only."""

    def carried_out(self, decision: Decision) -> None:
        """A schedule looks at progress only."""

    def explain(self, layer: str, board: LayerBoard) -> str:
        """When the layer is scheduled to freeze."""
        if not self.policy.stints[layer]:
            return "the schedule never freezes it"
        if self.policy.is_waiting(layer):
            return "its time to freeze has come, but it may not"
        time = self.policy.next_freeze(layer)
        if time is None:
            return "the schedule does not freeze it again"
        step = math.ceil(time * self.budget.total_steps - 1e-9)
        return f"scheduled to freeze at step {step} ({time:.1%} of training)"

    def state_dict(self) -> dict[str, Any]:
        """How far the schedule has been followed, as plain values."""
        return self.policy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another rule of the same layers was."""
        self.policy.load_state_dict(state)

    def close(self) -> None:
        """Nothing to end."""


class GradientNormRule:
    """Feeds AutoFreeze's rule with the gradients of every step.

    Args:
        policy: sums gradients and decides.
    """

    def __init__(self, policy: GradientNormPolicy) -> None:
        self.policy = policy

    def after_step(self, batch: Batch, *, step: int, board: LayerBoard, **_facts: object) -> list[Decision]:
        """Sum gradients, and decide at the end of an interval."""
        self.policy.observe(board.frozen)
        if step % self.policy.settings.interval_steps:
            return []
        return self.policy.evaluate(frozen=board.frozen, pinned=board.pinned)

    def after_evaluation(self, accuracy: float | None, board: LayerBoard) -> list[Decision]:
        """This rule looks at gradients only."""
        return []

    def frozen_set_changed(self, reason: str, *, thawed: bool) -> None:
        """Gradients of frozen layers are left out by themselves."""

    def carried_out(self, decision: Decision) -> None:
        """Gradients of frozen layers are left out by themselves."""

    def explain(self, layer: str, board: LayerBoard) -> str:
        """How much the layer's gradient norm changed over the last interval."""
        change = self.policy.changes.get(layer)
        if change is None:
            interval = self.policy.settings.interval_steps
            return f"its gradient norm is compared after 2 intervals of {interval} steps"
        return f"its gradient norm changed by {change:.1%} over the last interval"

    def state_dict(self) -> dict[str, Any]:
        """Sums and norms so far: plain values and tensors."""
        return self.policy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another rule of the same layers was."""
        self.policy.load_state_dict(state)

    def close(self) -> None:
        """Nothing to end."""


def make_rule(
    settings: FreezeSettings | None,
    *,
    policy: PlasticityPolicy | None,
    layers: LayerModules,
    recorder: Recorder,
    events: EventLog,
    budget: Budget,
    deterministic: bool = False,
    density_at: Density | None = None,
) -> Rule | None:
    """The rule that some settings ask for, or None to freeze by hand only.

    Args:
        settings: `Plasticity`, `Schedule`, `GradientNorm` or None.
        policy: the state machine of `Plasticity` settings.
        layers: the layer modules.
        recorder: counts the FLOPs that a schedule is solved with, and holds trainer and history.
        events: where refreshes of the reference go.
        budget: tells the progress.
        deterministic: no load gate.

    Raises:
        InvalidSettingError: when a schedule's saving target cannot be met.
    """
    if policy is not None:
        gate = None if deterministic else policy.settings.load_gate
        return PlasticityMonitor(recorder.trainer, layers, policy, recorder.history, events, load_gate=gate)
    if isinstance(settings, Schedule):
        solved = schedule_policy(settings, layers, recorder.flops, budget, density_at)
        return ScheduleRule(solved, budget, own_rates=settings.has_own_rates)
    if isinstance(settings, GradientNorm):
        return GradientNormRule(gradient_norm_policy(settings, layers))
    return None


def schedule_policy(
    settings: Schedule,
    layers: LayerModules,
    flops_of: Callable[[Sequence[str]], StepFlops],
    budget: Budget,
    density_at: Density | None = None,
) -> SchedulePolicy:
    """Solve a freezing schedule for a model, from the FLOPs counted with each prefix of its blocks frozen.

    Args:
        settings: what is wanted.
        layers: the layer modules.
        flops_of: counts the FLOPs of a step with some layers frozen, such as `Recorder.flops`.
        budget: planned length of the training.
        density_at: density of each layer at a progress in [0, 1], or one for all; None for dense layers. A
            `PlannedCost` is asked for whole steps, so that pruning at a freeze and dense gradients are counted.

    Raises:
        InvalidSettingError: when its saving target cannot be met.
    """
    blocks = settings.blocks(layers.names, flops_of(()).forward)
    counts = range(settings.most_frozen(len(blocks)) + 1 if settings.is_solved else 0)
    fronts = [[name for block in blocks[:count] for name in block] for count in counts]
    costs: StepCosts
    if isinstance(density_at, PlannedCost):
        costs, density_at = [partial(density_at.of_step, front) for front in fronts], None
    else:
        counted = [flops_of(front) for front in fronts]
        costs = [[f + b for f, b in zip(flops.forward, flops.backward, strict=True)] for flops in counted]
    plan = settings.plan(
        blocks, costs, total_steps=budget.total_steps, steps_per_epoch=budget.steps_per_epoch, density_at=density_at
    )
    return SchedulePolicy(plan.stints)


def gradient_norm_policy(settings: GradientNorm, layers: LayerModules) -> GradientNormPolicy:
    """AutoFreeze's rule for a model."""
    return GradientNormPolicy({layer.name: layer.parameters for layer in layers}, settings)
