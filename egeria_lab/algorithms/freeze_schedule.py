"""Freezing by schedule: when each layer freezes is known before training, whatever it has learned.

SpFDE's single-shot schedule solves its start from a FLOPs target, and so do its variants that thaw again;
*linear*, *FreezeOut* and *fixed* are the baselines that a measured rule should beat. Here are the settings;
what they ask for is worked out in `freeze_plans` and `schedule_solver`, and followed by `schedule_policy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from egeria_lab.algorithms.freeze_plans import (
    NEVER,
    STEMS,
    Stints,
    cycles,
    freezeout_times,
    group_blocks,
    linear_times,
    single_shot,
    whole_steps,
)
from egeria_lab.algorithms.schedule_solver import (
    Density,
    SavingMeter,
    StepCosts,
    beyond_the_ceiling,
    epoch_clocks,
    latest,
)
from egeria_lab.errors import InvalidSettingError, is_number, is_whole, require, unknown_name
from egeria_lab.tables import ShownAsTable

SOLVED = ("single_shot", "single_shot_resume", "periodic", "delayed_periodic")
VARIANTS = (*SOLVED, "linear", "freezeout", "fixed")
WHOLE_EPOCHS_FROM = 40
"""From so many epochs on, a solved single-shot schedule begins at the end of an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezePlan:
    """When each layer of a model is frozen.

    Attributes:
        blocks: names of the layers that freeze together, front to back; the head is the last block.
        stints: layer → when it is frozen, ``(from, until)`` in fractions of training; `NEVER` for the end.
        saving: share of the training FLOPs that it saves at least, by counted costs; None where the variant
            is not solved for one.
        ceiling: the most that the variant could save, in the same way.
    """

    blocks: tuple[tuple[str, ...], ...]
    stints: dict[str, Stints]
    saving: float | None = None
    ceiling: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(ShownAsTable):
    """Freeze by schedule.

    The first four variants are solved: of all plans that save `saving`, they take the one that trains longest.

    - ``"single_shot"`` (SpFDE): block 1 freezes at T_frz, one more every interval, for good.
    - ``"single_shot_resume"``: the same, but everything is thawed for the last `resume_fraction` of training,
      so that freezing begins earlier. Once thawed, layers follow the rate of the head.
    - ``"periodic"``: in each cycle (the interval) the front blocks train first, and then freeze together.
    - ``"delayed_periodic"``: such cycles, frozen for `frozen_share` of each, from a solved delay on.
    - ``"linear"`` and ``"freezeout"`` (cubic) begin at `start`; ``"fixed"`` freezes `layers` there.

    A block is one layer module (a residual block, an encoder layer), all layers of a block freeze at the same
    step, and a stem goes with the first block; see `freeze_plans.group_blocks` for how it is recognised.
    Times are fractions of training: a plan that is lengthened (`Session.extend`) solves nothing again, what
    has frozen stays frozen, and what is to come moves to the same fraction of the new length. So single-shot
    saves its target or more; a plan whose layers were thawed before it was lengthened saves less.

    Attributes:
        variant: one of the above.
        saving: wanted share of the training FLOPs, in (0, 1); for the solved variants.
        interval_epochs: epochs between two freezes, or of a cycle, > 0; None for 5/160 of the training, and
            for 1/8 of it, at least 8 steps, where there are cycles.
        interval_steps: the same in steps, a whole number >= 1; give one of the two.
        max_frozen: at most this share of the blocks, the head included, freezes, in (0, 1]; for the solved
            variants.
        resume_fraction: share of training at whose beginning everything thaws, in (0, 1).
        frozen_share: share of each cycle of ``"delayed_periodic"`` in which blocks are frozen, in (0, 1).
        start: fraction of training at which freezing begins, in [0, 1); for the variants that are not solved.
        level: share of the blocks frozen at the end, in (0, 1]; for ``"linear"``.
        layers: names of the layers to freeze at `start`; for ``"fixed"``.
        stem: ``"auto"`` lets a cheap first layer freeze with the second, ``"first"`` always does, ``"own"``
            never; ``"fixed"`` has no blocks.
        block_lr: ``"cosine"`` gives each layer its own cosine that ends where it freezes (``"single_shot"``,
            ``"single_shot_resume"`` and ``"freezeout"``; layers that come back in cycles have none of their
            own), ``"global"`` leaves the one schedule for all.

    Raises:
        InvalidSettingError, UnknownNameError: when made with a value outside these ranges.

    Source: SpFDE (NeurIPS 2022), section 3.2.

    Example:
        >>> Schedule(variant="linear", start=0.3).level
        1.0
        >>> plan = Schedule(saving=0.2, interval_steps=10).plan(
        ...     [("a",), ("b",), ("head",)], [9.0, 6.0, 4.0], total_steps=100, steps_per_epoch=10
        ... )
        >>> plan.stints["a"], round(plan.saving, 3), round(plan.ceiling, 3)
        (((0.6, inf),), 0.2, 0.527)
    """

    variant: str = "single_shot"
    saving: float = 0.25
    interval_epochs: float | None = None
    interval_steps: int | None = None
    max_frozen: float = 2 / 3
    resume_fraction: float = 0.1
    frozen_share: float = 0.75
    start: float = 0.5
    level: float = 1.0
    layers: tuple[str, ...] = ()
    stem: str = "auto"
    block_lr: str = "cosine"

    prefix: ClassVar[str] = "freeze"

    def __post_init__(self) -> None:
        for kind, value, known in (
            ("schedule variant", self.variant, VARIANTS),
            ("block_lr", self.block_lr, ("cosine", "global")),
            ("stem", self.stem, STEMS),
        ):
            if value not in known:
                raise unknown_name(kind, value, known)
        for name, low_open, high_open in (
            ("saving", True, True), ("max_frozen", True, False), ("start", False, True), ("level", True, False),
            ("resume_fraction", True, True), ("frozen_share", True, True),
        ):  # fmt: skip
            share = getattr(self, name)
            above = is_number(share) and (share > 0 if low_open else share >= 0)
            inside = above and (share < 1 if high_open else share <= 1)
            allowed = f"in {'(' if low_open else '['}0, 1{')' if high_open else ']'}"
            require(inside, "Schedule", name, share, allowed)
        epochs, steps = self.interval_epochs, self.interval_steps
        good = epochs is None or (is_number(epochs) and epochs > 0)
        require(good, "Schedule", "interval_epochs", epochs, "a number > 0 or None")
        good = steps is None or (is_whole(steps) and steps >= 1)
        require(good, "Schedule", "interval_steps", steps, "a whole number >= 1 or None")
        if epochs is not None and steps is not None:
            raise InvalidSettingError(
                f"Schedule: give interval_epochs or interval_steps, not both; got {epochs} and {steps}."
            )
        if self.variant == "fixed":
            named = isinstance(self.layers, (tuple, list)) and bool(self.layers)
            require(named, "Schedule", "layers", self.layers, "the names of the layers to freeze")

    @property
    def is_solved(self) -> bool:
        """True when the plan is solved from `saving`, which needs counted step costs."""
        return self.variant in SOLVED

    @property
    def has_own_rates(self) -> bool:
        """True when each layer has a cosine of its own."""
        return self.block_lr == "cosine" and self.variant in ("single_shot", "single_shot_resume", "freezeout")

    def blocks(self, names: Sequence[str], forward_costs: Sequence[float]) -> tuple[tuple[str, ...], ...]:
        """The layers that freeze together, from the names and forward FLOPs of all, front to back."""
        return group_blocks(names, forward_costs, "own" if self.variant == "fixed" else self.stem)

    def most_frozen(self, num_blocks: int) -> int:
        """How many of so many blocks, the head included, may be frozen."""
        return min(num_blocks - 1, math.floor(self.max_frozen * num_blocks + 1e-9))

    def plan(
        self,
        blocks: Sequence[Sequence[str]],
        step_costs: StepCosts,
        *,
        total_steps: int,
        steps_per_epoch: int,
        density_at: Density | None = None,
    ) -> FreezePlan:
        """When each layer is frozen.

        The saving holds for the FLOPs of the samples that are trained on, whatever the size of an epoch's last
        batch, if nobody steers and the training is as long as planned.

        Args:
            blocks: as from `blocks`; the head, which never freezes, is the last.
            step_costs: entry ``k`` is the cost of a step with the first `k` blocks frozen, for ``k`` from 0 to
                ``most_frozen(len(blocks))``; as one number, as one a layer, or as a function of progress. Only for
                solved variants.
            total_steps: planned steps.
            steps_per_epoch: steps in one epoch.
            density_at: as in `schedule_solver.SavingMeter`. A block that is pruned to a lower density when it
                freezes saves more than this counts; costs that are functions of progress can count that too.

        Raises:
            InvalidSettingError: when the target cannot be met; the message gives the ceiling.
            UnknownNameError: when a named layer does not exist or is the head.
        """
        if self.is_solved:
            return self._solved(blocks, step_costs, total_steps, steps_per_epoch, density_at)
        body = [tuple(block) for block in blocks[:-1]]
        if self.variant == "fixed":
            known = [name for block in body for name in block]
            for name in self.layers:
                if name not in known:
                    raise unknown_name("layer (the head cannot freeze by schedule)", name, known)
            times = [self.start if set(block) & set(self.layers) else NEVER for block in body]
        elif self.variant == "linear":
            times = linear_times(len(body), self.start, self.level)
        else:
            times = freezeout_times(len(blocks), self.start)[:-1]
        stints: list[Stints] = [((time, NEVER),) if time < 1 else () for time in times]
        return FreezePlan(blocks=tuple(map(tuple, blocks)), stints=_by_layer(blocks, stints))

    def _solved(
        self,
        blocks: Sequence[Sequence[str]],
        step_costs: StepCosts,
        total: int,
        steps_per_epoch: int,
        density_at: Density | None,
    ) -> FreezePlan:
        count = self.most_frozen(len(blocks))
        clocks = epoch_clocks(steps_per_epoch)
        meters = [SavingMeter(step_costs, total, density_at=density_at, work_at=clock) for clock in clocks]
        candidates, plan_of, most = self._search(count, total, self._interval(total, steps_per_epoch))

        def saving_of(candidate: float) -> float:
            return min(meter.saving(whole_steps(plan_of(candidate), total)) for meter in meters)

        chosen = None
        if self.variant.startswith("single_shot") and total >= WHOLE_EPOCHS_FROM * steps_per_epoch:
            chosen = latest(candidates[steps_per_epoch - 1 :: steps_per_epoch], saving_of, self.saving)
        if chosen is None:
            chosen = latest(candidates, saving_of, self.saving)
        ceiling = saving_of(candidates[0]) if candidates else 0.0
        if chosen is None:
            most = f"{count} of {len(blocks) - 1} blocks before the head {most}"
            raise beyond_the_ceiling(self.saving, ceiling, most)
        fractions = [
            tuple((start / total, end / total if end < total else NEVER) for start, end in block)
            for block in whole_steps(plan_of(chosen), total)
        ]
        return FreezePlan(
            blocks=tuple(map(tuple, blocks)),
            stints=_by_layer(blocks, fractions),
            saving=saving_of(chosen),
            ceiling=ceiling,
        )

    def _search(self, count: int, total: int, interval: float) -> tuple[range, Callable[[float], list[Stints]], str]:
        """What is searched, ascending with ever less saved; the plan of each; and the most, in words.

        A step is trained in full before a rule is asked for the first time, so nothing begins at 0.
        """
        if self.variant.startswith("single_shot"):
            end, resumed = total, ""
            if self.variant == "single_shot_resume":
                end = min(total - 1, math.ceil((1 - self.resume_fraction) * total - 1e-9))
                resumed = f" and all thawed for the last {total - end}"
            most = f"frozen one every {interval:.3g} steps of {total}{resumed}"
            return range(1, end), lambda start: single_shot(count, start, interval, end), most
        if interval < 2:
            raise InvalidSettingError(
                f"Schedule: a cycle of {interval:.3g} steps cannot hold a trained and a frozen part; give an interval "
                "of at least 2 steps."
            )
        if self.variant == "periodic":
            num = math.ceil(total / interval)
            # Trained steps of all cycles together, so that it is as fine as the training is long.
            candidates = range(num, math.ceil(interval * num))
            most = f"frozen for all but one step of each cycle of {interval:.3g} steps, over {total}"
            return candidates, lambda trained: cycles(count, 0, interval, trained / num, total), most
        trained = min(interval - 1, max(1.0, (1 - self.frozen_share) * interval))
        most = f"frozen for {1 - trained / interval:.0%} of each cycle of {interval:.3g} steps, over {total}"
        return range(total), lambda delay: cycles(count, delay, interval, trained, total), most

    def _interval(self, total: int, steps_per_epoch: int) -> float:
        if self.interval_steps is not None:
            return self.interval_steps
        if self.interval_epochs is not None:
            return self.interval_epochs * steps_per_epoch
        if "periodic" in self.variant:
            return max(2, min(total, max(8, round(total / 8))))
        return total * 5 / 160  # five of the paper's 160 epochs, so that short runs have a schedule too


def _by_layer(blocks: Sequence[Sequence[str]], plan: Sequence[Stints]) -> dict[str, Stints]:
    whole = [*plan, *[()] * (len(blocks) - len(plan))]
    return {name: stints for block, stints in zip(blocks, whole, strict=True) for name in block}
