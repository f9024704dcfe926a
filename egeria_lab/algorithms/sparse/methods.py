"""The sparsity methods: MEST (elastic mutation), SET, RigL, and static masks.

They differ in what is dropped, where weights grow, and how much: each is its settings and two functions of
progress. `masked_training.SparseTraining` carries any of them out.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from egeria_lab.algorithms.sparse.settings import DynamicSparsity, SparsitySettings
from egeria_lab.errors import is_number, require, unknown_name

AVERAGES = ("signed", "magnitude")
RIGL_INTERVAL = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSparsity(SparsitySettings):
    """One mask, chosen before training and never changed: the baseline of every dynamic method.

    Attributes: those of `SparsitySettings`.

    Raises:
        InvalidSettingError, UnknownNameError: when made with a value outside its range.

    Example:
        >>> StaticSparsity(sparsity=0.8).mean_density()
        0.19999999999999996
        >>> StaticSparsity(sparsity=1.0)
        Traceback (most recent call last):
        egeria_lab.errors.InvalidSettingError: StaticSparsity.sparsity must be in [0, 1): the share of zeros, got 1.0.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MEST(DynamicSparsity):
    """MEST: drop by weight and gradient, grow at random, in amounts that shrink by phases.

    *Elastic mutation* (``soft_bound=False``) prunes below the target and grows back to it, so the density
    never exceeds the budget. *Elastic mutation & soft memory bound* (``soft_bound=True``) grows first, trains
    over budget for one interval, and prunes from the union; its mean density is higher, and is counted.

    The amounts are those of the papers at 90 % and 95 %, and follow one rule at any other sparsity s:
    without soft bound 20 % and then 10 % of the target density (at 90 %: prune to 0.92, then 0.91); with it
    0.05 and then 0.025 (train at 0.85, then 0.875), but no more than the target density 1 − s itself, so that
    a very sparse network does not train at many times its budget. Neither exceeds s/2, so that there is room
    to grow at low sparsity.

    Attributes:
        soft_bound: grow first and prune later (EM&S); False prunes first and grows later (EM).
        importance_weight: λ in the importance ``|w| + |λ · mean gradient|``, >= 0; 0 is magnitude alone.
        gradient_average: the gradient of an interval is averaged ``"signed"`` (its magnitude is taken of the
            mean, in which the noise of single batches cancels) or as ``"magnitude"`` (mean of |gradient|).
        phases: fractions of training at which the amount falls, increasing, in (0, 1].
        elastic: amount, in density, before each of `phases`; None for the rule above. After the last phase
            and from `stop_fraction` on it is 0.

    Raises:
        InvalidSettingError, UnknownNameError: when made with a value outside its range.

    Source: Yuan et al., "MEST", 2021 (arXiv 2110.14032), section 3; phases of SpFDE (2022), appendix.

    Example:
        >>> mest = MEST(sparsity=0.9)
        >>> [round(mest.sparsity_at(epoch / 160), 3) for epoch in (0, 89, 90, 119, 120, 160)]
        [0.85, 0.85, 0.875, 0.875, 0.9, 0.9]
        >>> round(mest.mean_density(), 3)    # not 0.1
        0.133
    """

    soft_bound: bool = True
    importance_weight: float = 0.01
    gradient_average: str = "signed"
    phases: tuple[float, ...] = (90 / 160, 120 / 160)
    elastic: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        DynamicSparsity.__post_init__(self)
        weight, phases = self.importance_weight, self.phases
        require(isinstance(self.soft_bound, bool), "MEST", "soft_bound", self.soft_bound, "True or False")
        require(is_number(weight) and weight >= 0, "MEST", "importance_weight", weight, "a number >= 0")
        if self.gradient_average not in AVERAGES:
            raise unknown_name("gradient average", self.gradient_average, AVERAGES)
        rising = isinstance(phases, (tuple, list)) and all(is_number(p) and 0 < p <= 1 for p in phases)
        rising = rising and bool(phases) and all(a < b for a, b in pairwise(phases))
        require(rising, "MEST", "phases", phases, "increasing fractions in (0, 1], at least one")
        object.__setattr__(self, "phases", tuple(phases))
        if self.elastic is not None:
            self._check_elastic()

    def _check_elastic(self) -> None:
        given = self.elastic
        room = self.sparsity if self.soft_bound else 1 - self.sparsity
        numbers = isinstance(given, (tuple, list)) and all(is_number(a) and 0 <= a < room for a in given)
        allowed = f"one amount in [0, {room:.4g}) for each of the {len(self.phases)} phases, or None"
        require(numbers and len(given or ()) == len(self.phases), "MEST", "elastic", given, allowed)
        object.__setattr__(self, "elastic", tuple(given or ()))

    def elastic_at(self, progress: float) -> float:
        """The amount of density that an update at this progress moves beyond the target."""
        phase = bisect_right(self.phases, progress)
        if phase == len(self.phases) or progress >= self.stop_fraction:
            return 0.0
        if self.elastic is not None:
            return self.elastic[phase]
        target = 1 - self.sparsity
        first = min(0.05 if self.soft_bound else 0.2 * target, target, self.sparsity / 2)
        return first * (1 - phase / len(self.phases))

    def sparsity_at(self, progress: float) -> float:
        """Sparsity that is trained at; under the soft bound lower than the target until the last phase."""
        return self.sparsity - self.elastic_at(progress) if self.soft_bound else self.sparsity

    def drop_share_at(self, progress: float) -> float:
        """Share of the target count that is dropped and grown back in one update; 0 under the soft bound."""
        return 0.0 if self.soft_bound else self.elastic_at(progress) / (1 - self.sparsity)

    def mutates_at(self, progress: float) -> bool:
        """True while the amount is above 0."""
        return self.elastic_at(progress) > 0

    def mean_density(self) -> float:
        """Density averaged over training: the ledger counts this, not the target."""
        edges = sorted({0.0, *self.phases, self.stop_fraction, 1.0})
        return sum((end - start) * (1 - self.sparsity_at(start)) for start, end in pairwise(edges))

    def update_steps(self, total_steps: int, steps_per_epoch: float) -> tuple[int, ...]:
        """After which steps masks are updated; under the soft bound with the last pruning.

        Example:
            >>> MEST(interval_epochs=5).update_steps(160, 1)[-3:]    # the last one only prunes
            (110, 115, 120)
            >>> MEST(interval_epochs=5, soft_bound=False).update_steps(160, 1)[-1]
            115
        """
        steps = DynamicSparsity.update_steps(self, total_steps, steps_per_epoch)
        if not self.soft_bound or not self.mutates_at(0.0):
            return steps
        end = next(step for step in range(1, total_steps + 1) if not self.mutates_at(step / total_steps))
        return (*steps, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class SET(DynamicSparsity):
    """Sparse evolutionary training: drop a fixed share of the smallest weights, grow as many at random.

    Attributes:
        drop_fraction: share of the live weights that an update exchanges, in (0, 1).

    Raises:
        InvalidSettingError, UnknownNameError: when made with a value outside its range.

    Source: Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse connectivity",
    2018; drops by magnitude, without the original's separate treatment of signs.

    Example:
        >>> SET(sparsity=0.9, interval_steps=50).drop_share_at(0.5)
        0.3
    """

    drop_fraction: float = 0.3

    def __post_init__(self) -> None:
        DynamicSparsity.__post_init__(self)
        _check_drop(self, self.drop_fraction)

    def drop_share_at(self, progress: float) -> float:
        """The fixed share, until `stop_fraction`."""
        return self.drop_fraction if progress < self.stop_fraction else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RigL(DynamicSparsity):
    """RigL: drop the smallest weights, grow where the gradient is largest, in shares that fall like a cosine.

    The dense gradient is taken once an update, from the batch of that step, and only then. Without an
    interval, masks are updated every 100 steps, or every 5/160 of the training where that is shorter.

    Attributes:
        drop_fraction: share of the live weights that an update exchanges at the start, in (0, 1).

    Raises:
        InvalidSettingError, UnknownNameError: when made with a value outside its range.

    Source: Evci et al., "Rigging the Lottery", 2020 (arXiv 1911.11134), section 3.

    Example:
        >>> [round(RigL().drop_share_at(p), 3) for p in (0.0, 0.375, 0.75)]
        [0.3, 0.15, 0.0]
    """

    drop_fraction: float = 0.3

    grows_by: ClassVar[str] = "gradient"

    def __post_init__(self) -> None:
        DynamicSparsity.__post_init__(self)
        _check_drop(self, self.drop_fraction)

    def drop_share_at(self, progress: float) -> float:
        """``drop_fraction / 2 · (1 + cos(π · progress / stop_fraction))``, 0 from `stop_fraction` on."""
        if progress >= self.stop_fraction:
            return 0.0
        return self.drop_fraction / 2 * (1 + math.cos(math.pi * progress / self.stop_fraction))

    def interval(self, total_steps: int, steps_per_epoch: float) -> int:
        """Steps between two updates, >= 1."""
        own = DynamicSparsity.interval(self, total_steps, steps_per_epoch)
        return min(RIGL_INTERVAL, own) if self.interval_epochs is None and self.interval_steps is None else own


def _check_drop(settings: SET | RigL, drop: float) -> None:
    allowed = is_number(drop) and 0 < drop < 1
    require(allowed, type(settings).__name__, "drop_fraction", drop, "in (0, 1)")
