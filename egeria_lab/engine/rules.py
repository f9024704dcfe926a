"""The freezing rules behind one interface: plasticity, schedule, gradient norm. Deciding only."""

from __future__ import annotations

from typing import Protocol

from egeria_lab.algorithms.costs import StepFlops
from egeria_lab.algorithms.freeze_policy import Decision, Plasticity, PlasticityPolicy
from egeria_lab.algorithms.freeze_schedule import NEVER, Schedule, SchedulePolicy
from egeria_lab.algorithms.gradient_norm import GradientNorm, GradientNormPolicy
from egeria_lab.algorithms.layers import LayerModules
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

    def close(self) -> None:
        """End threads and give up files, if there are any."""


class ScheduleRule:
    """Freezes layers at their scheduled fractions of training.

    Args:
        policy: when each layer freezes.
        budget: tells the progress, also after the plan was lengthened.
        own_rates: each layer has a cosine of its own that ends at its freeze.
    """

    def __init__(self, policy: SchedulePolicy, budget: Budget, own_rates: bool = False) -> None:
        self.policy = policy
        self.budget = budget
        self.own_rates = own_rates

    def after_step(self, batch: Batch, *, step: int, board: LayerBoard, **_facts: object) -> list[Decision]:
        """What the schedule freezes at this step."""
        progress = step / self.budget.total_steps
        return self.policy.due(progress, frozen=board.frozen, pinned=board.pinned)

    def after_evaluation(self, accuracy: float | None, board: LayerBoard) -> list[Decision]:
        """A schedule looks at progress only."""
        return []

    def frozen_set_changed(self, reason: str, *, thawed: bool) -> None:
        """A schedule looks at progress only."""

    def carried_out(self, decision: Decision) -> None:
        """A schedule looks at progress only."""

    def explain(self, layer: str, board: LayerBoard) -> str:
        """When the layer is scheduled to freeze."""
        time = self.policy.times[layer]
        if time == NEVER or time >= 1:
            return "the schedule never freezes it"
        step = round(time * self.budget.total_steps)
        return f"scheduled to freeze at step {step} ({time:.1%} of training)"

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
        solved = schedule_policy(settings, layers, recorder.flops(()), budget)
        return ScheduleRule(solved, budget, own_rates=settings.has_own_rates)
    if isinstance(settings, GradientNorm):
        return GradientNormRule(gradient_norm_policy(settings, layers))
    return None


def schedule_policy(settings: Schedule, layers: LayerModules, flops: StepFlops, budget: Budget) -> SchedulePolicy:
    """Solve a freezing schedule for a model.

    Raises:
        InvalidSettingError: when its saving target cannot be met.
    """
    epochs = budget.total_steps / budget.steps_per_epoch
    return SchedulePolicy(settings.freeze_times(layers.names, flops.forward, epochs, budget.steps_per_epoch))


def gradient_norm_policy(settings: GradientNorm, layers: LayerModules) -> GradientNormPolicy:
    """AutoFreeze's rule for a model."""
    return GradientNormPolicy({layer.name: layer.parameters for layer in layers}, settings)
