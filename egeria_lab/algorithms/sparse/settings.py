"""What every sparsity method can be told: how sparse, where, in which shapes, and when masks change.

The methods themselves are in `methods`. Everything here and there is a pure function of progress (the
fraction of training that is done) and of the number of steps: no object counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from egeria_lab.algorithms.sparse.density import DENSITIES
from egeria_lab.algorithms.sparse.masks import n_of_m
from egeria_lab.errors import InvalidSettingError, is_number, is_whole, require, unknown_name
from egeria_lab.tables import ShownAsTable

INITS = ("random", "magnitude")
DEFAULT_INTERVAL = 5 / 160
"""Fraction of training between two updates when no interval is given: the papers' 5 of 160 epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsitySettings(ShownAsTable):
    """What is common to all sparsity methods; not used by itself.

    Attributes:
        sparsity: share of the masked weights that is zero, in [0, 1). Layers that stay dense do not count.
        density: how it is shared among the layers: ``"uniform"`` or ``"erk"``.
        scheme: ``"unstructured"``, ``"block"``, ``"pattern"``, or N of M such as ``"2:4"`` (whose sparsity must
            then be 1 − N/M; ``"pattern"`` needs at least 5/9 on 3 × 3 layers).
        block_size: consecutive outputs in one block of the ``"block"`` scheme, >= 2.
        init: the first mask is ``"random"``, or keeps the weights of largest ``"magnitude"``.
        dense_first: the first convolution stays dense.
        dense_shortcuts: 1 × 1 convolutions of residual shortcuts (known by name) stay dense.
        dense_last: the last layer stays dense.
        dense_depthwise: depthwise convolutions stay dense.
        dense: names of weights or modules that stay dense, whatever the rules say.
        sparse: names of weights or modules that are masked, whatever the rules say.
    """

    sparsity: float = 0.9
    density: str = "uniform"
    scheme: str = "unstructured"
    block_size: int = 4
    init: str = "random"
    dense_first: bool = True
    dense_shortcuts: bool = True
    dense_last: bool = True
    dense_depthwise: bool = True
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()

    prefix: ClassVar[str] = "sparsity"
    changes_masks: ClassVar[bool] = False
    grows_by: ClassVar[str] = "random"
    """What decides where weights grow: ``"random"``, or ``"gradient"``, which needs a dense gradient at updates."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        sparsity = self.sparsity
        require(is_number(sparsity) and 0 <= sparsity < 1, owner, "sparsity", sparsity, "in [0, 1): the share of zeros")
        if self.density not in DENSITIES:
            raise unknown_name("layer density", self.density, DENSITIES)
        if self.init not in INITS:
            raise unknown_name("init", self.init, INITS)
        size = self.block_size
        require(is_whole(size) and size >= 2, owner, "block_size", size, "a whole number >= 2")
        for name in ("dense_first", "dense_shortcuts", "dense_last", "dense_depthwise"):
            require(isinstance(getattr(self, name), bool), owner, name, getattr(self, name), "True or False")
        for name in ("dense", "sparse"):
            value = getattr(self, name)
            names = isinstance(value, (tuple, list)) and all(isinstance(part, str) for part in value)
            require(names, owner, name, value, "a tuple of names")
            object.__setattr__(self, name, tuple(value))
        self._check_ratio(owner)

    def _check_ratio(self, owner: str) -> None:
        ratio = n_of_m(self.scheme)
        if ratio is None:
            return
        wanted = 1 - ratio[0] / ratio[1]
        if abs(self.sparsity - wanted) > 1e-9 or self.density != "uniform":
            raise InvalidSettingError(
                f"{owner}: the scheme {self.scheme} keeps {ratio[0]} of {ratio[1]} weights in every layer, so it needs "
                f"sparsity={wanted:g} and density='uniform', got sparsity={self.sparsity:g} and "
                f"density={self.density!r}."
            )

    def sparsity_at(self, progress: float) -> float:
        """Sparsity that is trained at after an update at this progress in [0, 1]."""
        return self.sparsity

    def drop_share_at(self, progress: float) -> float:
        """Share of a layer's target count that an update at this progress drops below the target, then grows back."""
        return 0.0

    def mean_density(self) -> float:
        """Density averaged over the whole training, in (0, 1]; of the masked layers."""
        return 1 - self.sparsity


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSparsity(SparsitySettings):
    """What is common to the methods whose masks change; not used by itself.

    Attributes:
        interval_epochs: epochs between two updates, > 0.
        interval_steps: the same in steps; give one of the two, or neither for 5/160 of the training.
        stop_fraction: no mask changes from this fraction of training on, in (0, 1].
        allow_regrow: a weight dropped in an update may grow again in the same update (from zero).
    """

    interval_epochs: float | None = None
    interval_steps: int | None = None
    stop_fraction: float = 0.75
    allow_regrow: bool = False

    changes_masks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        SparsitySettings.__post_init__(self)
        owner = type(self).__name__
        epochs, steps, stop = self.interval_epochs, self.interval_steps, self.stop_fraction
        require(epochs is None or (is_number(epochs) and epochs > 0), owner, "interval_epochs", epochs, "> 0 or None")
        whole = steps is None or (is_whole(steps) and steps >= 1)
        require(whole, owner, "interval_steps", steps, "a whole number >= 1 or None")
        if epochs is not None and steps is not None:
            raise InvalidSettingError(
                f"{owner}: give interval_epochs or interval_steps, not both; got {epochs} and {steps}."
            )
        require(is_number(stop) and 0 < stop <= 1, owner, "stop_fraction", stop, "in (0, 1]")
        require(isinstance(self.allow_regrow, bool), owner, "allow_regrow", self.allow_regrow, "True or False")

    def interval(self, total_steps: int, steps_per_epoch: float) -> int:
        """Steps between two updates, >= 1, also in a run of a few steps.

        Example:
            >>> from egeria_lab.algorithms.sparse.methods import MEST
            >>> MEST(interval_epochs=5).interval(160 * 391, 391), MEST().interval(64, 8), MEST().interval(3, 3)
            (1955, 2, 1)
        """
        if self.interval_steps is not None:
            return self.interval_steps
        if self.interval_epochs is not None:
            return max(1, round(self.interval_epochs * steps_per_epoch))
        return max(1, round(DEFAULT_INTERVAL * total_steps))

    def mutates_at(self, progress: float) -> bool:
        """True while updates at this progress exchange weights, beyond bringing a mask back to its target."""
        return progress < self.stop_fraction

    def update_steps(self, total_steps: int, steps_per_epoch: float) -> tuple[int, ...]:
        """After which steps (counted from 1) masks are updated in a run of this length.

        Under a soft memory bound the last one, which only prunes, comes at the first step at which nothing is
        over budget any more. An empty tuple means that the masks would never change.

        Example:
            >>> from egeria_lab.algorithms.sparse.methods import SET
            >>> SET(interval_steps=10).update_steps(60, 10)
            (10, 20, 30, 40)
        """
        interval = self.interval(total_steps, steps_per_epoch)
        return tuple(s for s in range(interval, total_steps + 1, interval) if self.mutates_at(s / total_steps))

    def standstill(self, total_steps: int, steps_per_epoch: float) -> str:
        """One sentence when no weight is ever exchanged in a run of this length, with the numbers; or empty.

        Example:
            >>> from egeria_lab.algorithms.sparse.methods import SET
            >>> SET(interval_steps=100).standstill(60, 10)[:83]
            'SET never changes its masks in this run: they are due every 100 steps, the run has '
            >>> SET(interval_steps=10).standstill(60, 10)
            ''
        """
        if DynamicSparsity.update_steps(self, total_steps, steps_per_epoch):
            return ""
        owner, interval = type(self).__name__, self.interval(total_steps, steps_per_epoch)
        last = next((step for step in range(total_steps, 0, -1) if self.mutates_at(step / total_steps)), 0)
        if not last:
            return f"{owner} never changes its masks in this run of {total_steps:,} steps: it exchanges 0 weights."
        return (
            f"{owner} never changes its masks in this run: they are due every {interval:,} steps, the run has "
            f"{total_steps:,} and exchanges end after step {last:,} (stop_fraction={self.stop_fraction:g}); give "
            f"interval_steps of at most {last:,}."
        )
