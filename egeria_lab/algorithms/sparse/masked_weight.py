"""One masked weight with its counts, and the records of what an update did."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from egeria_lab.algorithms.sparse.mutation import exchange
from egeria_lab.algorithms.sparse.schemes import Scheme
from egeria_lab.algorithms.sparse.weights import SparseWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskChange:
    """What one update did to one weight.

    Attributes:
        name: name of the weight.
        dropped: weights taken out.
        grown: weights put in; they start at zero.
        live: weights that are live now.
        total: weights in the tensor.
        churn: share of the live positions that were exchanged, in [0, 1]; dropped ÷ live where as many grew.
        due: an exchange was due. With a churn of 0 the mask stood still though it should not have.
    """

    name: str
    dropped: int
    grown: int
    live: int
    total: int
    churn: float
    due: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskUpdate:
    """What one update did to all masks that are not locked.

    Attributes:
        layers: one entry a weight.
        live: weights live now in all masked tensors, locked ones too.
        total: weights in all masked tensors.
        reason: why the update could not be made, or empty.

    Example:
        >>> a = MaskChange(name="a", dropped=2, grown=2, live=10, total=100, churn=0.2, due=True)
        >>> b = MaskChange(name="b", dropped=0, grown=0, live=1, total=10, churn=0.0, due=True)
        >>> update = MaskUpdate(layers=(a, b), live=11, total=110)
        >>> update.dropped, round(update.churn, 3), update.unchanged
        (2, 0.182, ('b',))
        >>> update.warning
        'No weight was exchanged in b though an update was due: too few live or free weights for one exchange.'
    """

    layers: tuple[MaskChange, ...]
    live: int
    total: int
    reason: str = ""

    @property
    def dropped(self) -> int:
        """Weights taken out, over all layers."""
        return sum(change.dropped for change in self.layers)

    @property
    def grown(self) -> int:
        """Weights put in, over all layers."""
        return sum(change.grown for change in self.layers)

    @property
    def churn(self) -> float:
        """Share of the live positions of the layers concerned that were exchanged, in [0, 1]."""
        live = sum(change.live for change in self.layers)
        return sum(change.churn * change.live for change in self.layers) / live if live else 0.0

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Weights whose mask stood still though an exchange was due."""
        return tuple(change.name for change in self.layers if change.due and change.churn == 0)

    @property
    def warning(self) -> str:
        """One sentence when masks stood still though an update was due, or empty."""
        if not self.unchanged:
            return ""
        where = ", ".join(self.unchanged[:3]) + (f" and {len(self.unchanged) - 3} more" if self.unchanged[3:] else "")
        why = self.reason or "too few live or free weights for one exchange"
        return f"No weight was exchanged in {where} though an update was due: {why}."


@dataclass(slots=True, eq=False)
class MaskedWeight:
    """A weight, its mask, and what has been learned about its gradient since the last update.

    Attributes:
        weight: the weight.
        scheme: how it is cut into units.
        target: units that are live at the asked sparsity.
        keep: 1 where live and 0 elsewhere, in the weight's own shape, dtype and device: a product applies it.
        live_units: units that are live now.
        locked: the layer is frozen: neither mask nor values are touched.
        gradient_sum: sum of the gradients (or their magnitudes) since the last update, or None.
        gradient_steps: how many were summed.
        dense_gradient: magnitude of the whole gradient, where one was asked for.
    """

    weight: SparseWeight
    scheme: Scheme
    target: int
    keep: Tensor
    live_units: int
    locked: bool = False
    gradient_sum: Tensor | None = None
    gradient_steps: int = 0
    dense_gradient: Tensor | None = None

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def held(self) -> bool:
        """True while neither mask nor values may be touched: locked here, or not trained (``requires_grad``)."""
        return self.locked or not self.weight.parameter.requires_grad

    @property
    def live(self) -> int:
        """Live weights."""
        return self.live_units * self.scheme.unit_size

    def keep_on(self, tensor: Tensor) -> Tensor:
        """`keep` where a tensor lies; a model that was moved takes its masks along."""
        if self.keep.device != tensor.device:
            if tensor is not self.weight.parameter:
                return self.keep.to(tensor.device)
            self.keep = self.keep.to(tensor.device)
        return self.keep

    def set_mask(self, mask: Tensor) -> None:
        """Take a mask (bool, the weight's own shape); values are not touched."""
        parameter = self.weight.parameter
        self.keep = mask.to(device=parameter.device, dtype=parameter.dtype)
        self.live_units = int(self.scheme.units(self.weight.outputs_first(mask)).sum())

    def importance(self, importance_weight: float) -> Tensor:
        """``|w| + |λ · mean gradient|`` of each weight, float32 or finer, the weight's own shape."""
        values = self.weight.parameter.detach().abs()
        values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        if self.gradient_sum is None or not self.gradient_steps:
            return values
        mean = self.gradient_sum.to(values.device).abs() / self.gradient_steps
        return values + importance_weight * mean

    def forget_gradient(self) -> None:
        """Begin a new interval."""
        self.gradient_sum, self.gradient_steps, self.dense_gradient = None, 0, None

    def mutate(
        self, bound: int, drop_share: float, *, importance_weight: float, allow_regrow: bool, generator: Generator
    ) -> tuple[MaskChange, Tensor]:
        """Drop to below the target, grow to `bound` units; values are not touched yet.

        Returns:
            The record, and the positions that must be zero now: dropped and grown ones, bool, own shape.
        """
        first = self.weight.outputs_first
        keep_units = self.target - round(drop_share * self.target)
        due = drop_share > 0 or bound != self.live_units
        drop = max(0, self.live_units - keep_units)
        if not allow_regrow:  # no more than there are free places to grow again
            drop = min(drop, self.scheme.num_units - bound)
        mask = self.keep_on(self.weight.parameter) != 0
        growth = self.dense_gradient
        done = exchange(
            self.scheme,
            first(mask),
            first(self.importance(importance_weight)),
            drop=drop,
            live_after=bound,
            generator=generator,
            growth=first(growth) if growth is not None else None,
            allow_regrow=allow_regrow,
        )
        before = self.live
        new = first(done.mask)
        self.set_mask(new)
        both = int((mask & new).sum())
        change = MaskChange(
            name=self.name,
            dropped=int(done.dropped.sum()),
            grown=int(done.grown.sum()),
            live=self.live,
            total=mask.numel(),
            churn=1 - both / max(before, self.live),
            due=due,
        )
        return change, first(done.dropped | done.grown)

    def untouched(self) -> MaskChange:
        """The record of an update that was due and could not be made."""
        total = self.keep.numel()
        return MaskChange(name=self.name, dropped=0, grown=0, live=self.live, total=total, churn=0.0, due=True)
