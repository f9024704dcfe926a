"""Freezing by schedule: when each layer freezes is known before training, whatever it has learned.

SpFDE's single-shot schedule solves its start from a FLOPs target; *linear*, *FreezeOut* and *fixed* are
the baselines that a measured rule should beat. All are pure functions of the layer costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from egeria_lab.algorithms.freeze_policy import Decision
from egeria_lab.errors import InvalidSettingError, is_number, require, unknown_name

VARIANTS = ("single_shot", "linear", "freezeout", "fixed")
NEVER = math.inf


def single_shot_saving(costs: Sequence[float], start: float, interval: float, total: float, max_blocks: int) -> float:
    """Share of the training FLOPs that a single-shot schedule saves.

    Block 1 freezes at `start`, each further one `interval` later; a frozen block saves two of its three
    FLOPs units (input and weight gradient).

    Args:
        costs: forward cost of each block, front to back, in any unit.
        start: epoch at which the first block freezes.
        interval: epochs between two freezes.
        total: epochs of training.
        max_blocks: blocks that may be frozen.

    Source: SpFDE (NeurIPS 2022), section 3.2.

    Example:
        >>> round(single_shot_saving([1.0, 1.0], start=50, interval=10, total=100, max_blocks=1), 4)
        0.1667
    """
    saved = sum(
        2 * cost * max(0.0, total - (start + index * interval)) for index, cost in enumerate(costs[:max_blocks])
    )
    return saved / (3 * sum(costs) * total)


def solve_start(
    costs: Sequence[float], saving: float, interval: float, total: float, max_blocks: int, grid: float = 1.0
) -> float:
    """The latest start of a single-shot schedule that still meets a saving target.

    Args:
        costs: forward cost of each block, front to back.
        saving: wanted share of the training FLOPs, in (0, 1).
        interval: epochs between two freezes.
        total: epochs of training.
        max_blocks: blocks that may be frozen.
        grid: the start is a multiple of this.

    Raises:
        InvalidSettingError: when even freezing from the first epoch on saves less.

    Example:
        >>> solve_start([1.0, 1.0], saving=0.1667, interval=10, total=100, max_blocks=1)
        49.0
    """
    most = single_shot_saving(costs, 0.0, interval, total, max_blocks)
    if saving > most:
        raise InvalidSettingError(
            f"saving={saving:.3g} is more than this model can save: at most {most:.3g} with {max_blocks} of "
            f"{len(costs)} layers frozen one every {interval:.3g} epochs over {total:.3g} epochs. Lower the "
            "target, shorten the interval, raise max_frozen, or train longer."
        )
    low, high = 0, math.floor(total / grid)
    while low < high:  # savings fall as the start moves back, so the latest good start is found by halving
        middle = (low + high + 1) // 2
        if single_shot_saving(costs, middle * grid, interval, total, max_blocks) >= saving:
            low = middle
        else:
            high = middle - 1
    return low * grid


def linear_times(count: int, start: float, level: float) -> list[float]:
    """When each of `count` layers freezes, as a fraction of training, under a linear schedule.

    From `start` on the frozen share of the layers grows linearly and would reach `level` at the end.

    Source: the schedule of MosaicML Composer's layer freezing.

    Example:
        >>> linear_times(4, start=0.5, level=1.0)
        [0.625, 0.75, 0.875, 1.0]
    """
    return [
        start + (1 - start) * (index + 1) / (count * level) if index + 1 <= count * level else NEVER
        for index in range(count)
    ]


def freezeout_times(count: int, start: float) -> list[float]:
    """When each of `count` layers freezes under FreezeOut's cubic schedule, as a fraction of training.

    The i-th time is ``(start^(1/3) + i/(count−1) · (1 − start^(1/3)))³``: front layers freeze in quick
    succession, later ones last longer; the last layer trains to the end.

    Source: Brock et al., "FreezeOut", 2017, section 3 (cubic scheduling).

    Example:
        >>> [round(t, 3) for t in freezeout_times(3, start=0.5)]
        [0.5, 0.721, 1.0]
    """
    if count == 1:
        return [1.0]
    root = start ** (1 / 3)
    return [(root + index / (count - 1) * (1 - root)) ** 3 for index in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Freeze by schedule.

    Attributes:
        variant: ``"single_shot"`` (SpFDE: solved from `saving`), ``"linear"``, ``"freezeout"``, ``"fixed"``.
        saving: wanted share of the training FLOPs, in (0, 1); for ``"single_shot"``.
        interval_epochs: epochs between two freezes, > 0; for ``"single_shot"``.
        interval_steps: the same in steps; give one of the two.
        max_frozen: at most this share of the layers freezes, in (0, 1].
        start: fraction of training at which freezing begins, in [0, 1); for the other variants.
        level: share of the layers frozen at the end, in (0, 1]; for ``"linear"``.
        layers: names of the layers to freeze at `start`; for ``"fixed"``.
        block_lr: ``"cosine"`` gives each layer its own cosine that ends at its freeze (``"single_shot"``
            and ``"freezeout"``), ``"global"`` leaves the one schedule for all.

    Raises:
        InvalidSettingError, UnknownNameError: when made with a value outside these ranges.

    Example:
        >>> Schedule(variant="linear", start=0.3).level
        1.0
    """

    variant: str = "single_shot"
    saving: float = 0.25
    interval_epochs: float | None = None
    interval_steps: int | None = None
    max_frozen: float = 2 / 3
    start: float = 0.5
    level: float = 1.0
    layers: tuple[str, ...] = ()
    block_lr: str = "cosine"

    prefix: ClassVar[str] = "freeze"

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise unknown_name("schedule variant", self.variant, VARIANTS)
        if self.block_lr not in ("cosine", "global"):
            raise unknown_name("block_lr", self.block_lr, ("cosine", "global"))
        for name, low_open, high_open in (
            ("saving", True, True), ("max_frozen", True, False), ("start", False, True), ("level", True, False),
        ):  # fmt: skip
            value = getattr(self, name)
            above = is_number(value) and (value > 0 if low_open else value >= 0)
            inside = above and (value < 1 if high_open else value <= 1)
            allowed = f"in {'(' if low_open else '['}0, 1{')' if high_open else ']'}"
            require(inside, "Schedule", name, value, allowed)
        for name in ("interval_epochs", "interval_steps"):
            value = getattr(self, name)
            require(value is None or (is_number(value) and value > 0), "Schedule", name, value, "> 0 or None")
        if self.interval_epochs is not None and self.interval_steps is not None:
            raise InvalidSettingError(
                f"Schedule: give interval_epochs or interval_steps, not both; got {self.interval_epochs} and "
                f"{self.interval_steps}."
            )
        if self.variant == "fixed":
            require(bool(self.layers), "Schedule", "layers", self.layers, "the names of the layers to freeze")

    @property
    def has_own_rates(self) -> bool:
        """True when each layer has a cosine of its own."""
        return self.block_lr == "cosine" and self.variant in ("single_shot", "freezeout")

    def freeze_times(
        self, names: Sequence[str], forward_costs: Sequence[float], epochs: float, steps_per_epoch: int
    ) -> dict[str, float]:
        """When each layer freezes, as a fraction of training; `NEVER` for those that do not.

        Args:
            names: layer names, front to back; the last one (the head) never freezes.
            forward_costs: forward FLOPs of each layer.
            epochs: planned epochs.
            steps_per_epoch: steps in one epoch.

        Raises:
            InvalidSettingError: when the target cannot be met.
            UnknownNameError: when a named layer does not exist or is the head.
        """
        body = list(names[:-1])
        if self.variant == "fixed":
            for name in self.layers:
                if name not in body:
                    raise unknown_name("layer (the head cannot freeze by schedule)", name, body)
            times = [self.start if name in self.layers else NEVER for name in body]
        elif self.variant == "linear":
            times = linear_times(len(body), self.start, self.level)
        elif self.variant == "freezeout":
            times = freezeout_times(len(names), self.start)[:-1]
        else:
            times = self._single_shot_times(len(body), forward_costs, epochs, steps_per_epoch)
        cap = math.floor(self.max_frozen * len(names)) if self.variant == "single_shot" else len(body)
        limited = [time if index < cap else NEVER for index, time in enumerate(times)]
        return {**dict(zip(body, limited, strict=True)), names[-1]: NEVER}

    def _single_shot_times(
        self, count: int, costs: Sequence[float], epochs: float, steps_per_epoch: int
    ) -> list[float]:
        interval = self.interval_epochs
        if self.interval_steps is not None:
            interval = self.interval_steps / steps_per_epoch
        if interval is None:  # five of the paper's 160 epochs, so that short runs have a schedule too
            interval = epochs * 5 / 160
        cap = min(count, math.floor(self.max_frozen * len(costs)))
        grid = 1.0 if epochs >= 40 else 1 / steps_per_epoch
        start = solve_start(costs, self.saving, interval, epochs, cap, grid)
        return [min(1.0, (start + index * interval) / epochs) for index in range(count)]


class SchedulePolicy:
    """Turns freeze times into decisions, front to back, as training progresses.

    Args:
        times: layer → fraction of training at which it freezes.

    Example:
        >>> policy = SchedulePolicy({"a": 0.5, "b": NEVER})
        >>> [d.layer for d in policy.due(0.6, frozen=(), pinned=())]
        ['a']
    """

    def __init__(self, times: Mapping[str, float]) -> None:
        self.times = dict(times)
        self._announced: set[str] = set()

    def due(self, progress: float, *, frozen: Sequence[str], pinned: Sequence[str]) -> list[Decision]:
        """What freezes at this progress in [0, 1]; a pinned layer is reported once as blocked."""
        decisions = []
        for name, time in self.times.items():
            if progress < time or name in frozen or time >= 1:
                continue
            if name in pinned:
                if name not in self._announced:
                    self._announced.add(name)
                    decisions.append(Decision(action="blocked", layer=name, reason="it is pinned"))
                continue
            reason = f"scheduled for {time:.1%} of training"
            decisions.append(Decision(action="freeze", layer=name, reason=reason))
        return decisions

    def rate_factor(self, layer: str, progress: float) -> float:
        """Factor on the peak learning rate of a layer whose own cosine ends at its freeze.

        Source: SpFDE (NeurIPS 2022), section 3.2; FreezeOut (2017), section 3.

        Example:
            >>> round(SchedulePolicy({"a": 0.5}).rate_factor("a", 0.25), 6)
            0.5
        """
        end = min(1.0, self.times.get(layer, 1.0))
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress / end))) if end > 0 else 0.0
