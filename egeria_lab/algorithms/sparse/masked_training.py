"""Train with masked weights: hold the masks through every step, collect importance, drop and grow.

Masks are kept *beside* the model and applied to its own leaf tensors. `torch.nn.utils.prune`,
`torch.nn.utils.parametrize` and `torch.ao.pruning` (which builds on the latter) put another tensor in the
place of the weight. Tried on torch 2.13, that renames it in the ``state_dict`` (``weight_orig`` and
``weight_mask``; ``parametrizations.weight.original``), makes ``module.weight`` no leaf (under ``prune`` a model
that was run cannot even be copied by ``deepcopy``), adds a product to every forward pass, keeps the old value of a
dropped weight to come back with, and leaves the optimizer's state under the mask. With masks on leaves the
names stay plain, the optimizer holds the true tensors, a compiled model needs no hook, and there is nothing to
take out of the model at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria_lab.algorithms.sparse.mask_set import MaskSet, Weights
from egeria_lab.algorithms.sparse.masked_weight import MaskChange, MaskedWeight, MaskUpdate
from egeria_lab.algorithms.sparse.methods import MEST
from egeria_lab.algorithms.sparse.settings import DynamicSparsity, SparsitySettings
from egeria_lab.errors import TrainingError, is_number, is_whole, require


class SparseTraining(MaskSet):
    """Binds sparsity settings to one model and its optimizer, for any training loop.

    In the loop, once an optimizer step (after the last of several accumulated backward passes)::

        loss.backward()
        due = sparse.due(step, total_steps, steps_per_epoch)
        sparse.after_backward(update_due=due)    # before gradient clipping
        optimizer.step()
        sparse.after_step()
        if due:
            record = sparse.update(step / total_steps)

    With a ``GradScaler``, call ``scaler.unscale_(optimizer)`` before `after_backward`, or pass ``grad_scale``.
    A step that the scaler skips harms nothing: gradients that are not finite are no part of the importance.
    A frozen layer (`freeze_layers`, or ``requires_grad_(False)``) keeps mask and values by itself, and takes part
    again once it is thawed.
    Under data parallel training every process makes the same masks from the same seed and the same averaged
    gradients.

    Args:
        model: the model; a compiled one is masked through the module inside it.
        settings: `MEST`, `SET`, `RigL` or `StaticSparsity`.
        optimizer: the optimizer whose state is kept zero under masks, or None. Of its state, tensors of the
            weight's shape are masked; factored ones have no entry of their own for a weight.
        seed: decides the first masks, random growth and ties.
        state: a saved `state_dict` to start from, instead of new masks. Use it where the model holds trained
            weights already: new masks would zero other ones.

    Raises:
        InvalidSettingError, LayerError, UnknownNameError: when the settings do not fit the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> sparse = SparseTraining(model, MEST(sparsity=0.75, soft_bound=False), optimizer=optimizer)
        >>> sparse.live_counts(), int(model[0].weight.count_nonzero())
        ({'0.weight': 16}, 16)
        >>> for step in range(1, 5):
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     sparse.after_backward()
        ...     optimizer.step()
        ...     sparse.after_step()
        >>> record = sparse.update(progress=0.1)
        >>> record.dropped, record.grown, record.live
        (3, 3, 16)
    """

    def __init__(
        self,
        model: nn.Module,
        settings: SparsitySettings,
        *,
        optimizer: Optimizer | None = None,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._asked_for_gradient = False
        super().__init__(model, settings, optimizer=optimizer, seed=seed, state=state)

    def __repr__(self) -> str:
        return (
            f"{type(self.settings).__name__}: {self.live:,} of {self.total:,} maskable weights live "
            f"({self.live / self.total:.1%}) in {len(self._weights)} tensors"
        )

    @torch.no_grad()
    def after_backward(self, *, update_due: bool = False, grad_scale: float = 1.0) -> None:
        """Take in the gradients, then zero them under masks. Call it before gradients are clipped.

        Args:
            update_due: masks are updated after this step; a method that grows by gradient needs to know.
            grad_scale: what the gradients are multiplied by, where a loss scaler has not undone it yet.
        """
        for masked in self._weights.values():
            if masked.held:
                masked.forget_gradient()
        by_gradient = update_due and self.settings.grows_by == "gradient"
        self._asked_for_gradient = self._asked_for_gradient or by_gradient
        pairs = [(m, m.weight.parameter.grad) for m in self._active()]
        active = [masked for masked, grad in pairs if grad is not None]
        grads = [grad for _, grad in pairs if grad is not None]
        if not grads:
            return
        finite = _all_finite(grads)
        if by_gradient and finite:
            for masked, magnitude in zip(active, torch._foreach_abs(grads), strict=True):
                masked.dense_gradient = magnitude
        keeps = [masked.keep_on(grad) for masked, grad in zip(active, grads, strict=True)]
        if finite:
            torch._foreach_mul_(grads, keeps)
        else:  # a product with zero would keep what is not finite
            for grad, keep in zip(grads, keeps, strict=True):
                grad.masked_fill_(keep == 0, 0)
            finite = _all_finite(grads)
        if finite and isinstance(self.settings, MEST) and self.settings.importance_weight:
            self._add_to_importance(self.settings, active, grads, grad_scale)

    def after_step(self) -> None:
        """Zero whatever lies under masks: weights, and optimizer state of the weights' shape."""
        self.apply()

    def due(self, step: int, total_steps: int, steps_per_epoch: float) -> bool:
        """Whether masks are updated after this step, counted from 1.

        True at every interval while the method exchanges weights, and once more when it has stopped and a
        layer is still over its budget (the last pruning under a soft memory bound; also of a layer that was
        frozen at that moment and is thawed later).

        Args:
            step: finished steps, this one included, >= 1.
            total_steps: planned steps, >= 1.
            steps_per_epoch: steps in one epoch, > 0.

        Raises:
            InvalidSettingError: for a number out of these ranges.
        """
        require(is_whole(step) and step >= 1, "SparseTraining.due", "step", step, "a whole number >= 1")
        whole = is_whole(total_steps) and total_steps >= 1
        require(whole, "SparseTraining.due", "total_steps", total_steps, "a whole number >= 1")
        above = is_number(steps_per_epoch) and steps_per_epoch > 0
        require(above, "SparseTraining.due", "steps_per_epoch", steps_per_epoch, "a number > 0")
        settings = self.settings
        if not isinstance(settings, DynamicSparsity):
            return False
        if settings.mutates_at(step / total_steps):
            return step % settings.interval(total_steps, steps_per_epoch) == 0
        return any(masked.live_units > masked.target for masked in self._active())

    @torch.no_grad()
    def update(self, progress: float) -> MaskUpdate:
        """Drop and grow in every layer that is not frozen.

        Args:
            progress: fraction of training that is done, in [0, 1].

        Returns:
            What was exchanged in each of these layers; its `MaskUpdate.warning` says where masks stood still
            though they should not have.

        Raises:
            TrainingError: when the method needs the dense gradient of this step and was not told so.
            InvalidSettingError: for a progress out of range.
        """
        inside = is_number(progress) and 0 <= progress <= 1
        allowed = "the fraction of training that is done, in [0, 1]"
        require(inside, "SparseTraining.update", "progress", progress, allowed)
        share = self.settings.drop_share_at(progress)
        by_gradient = self.settings.grows_by == "gradient" and share > 0
        if by_gradient and not self._asked_for_gradient:
            raise TrainingError(
                "this update grows where the gradient is largest, and no gradient was kept; call "
                "after_backward(update_due=True) in the step that it follows."
            )
        bounds = self.unit_counts(self.settings.sparsity_at(progress))
        blind = [m for m in self._active() if by_gradient and m.dense_gradient is None]
        changes = [
            masked.untouched() if masked in blind else self._mutate(masked, bounds[masked.name], share)
            for masked in (self._active() if isinstance(self.settings, DynamicSparsity) else [])
        ]
        for masked in self._active():
            masked.forget_gradient()
        self._asked_for_gradient = False
        return self._record(changes, "there was no finite gradient in this step" if blind else "")

    @torch.no_grad()
    def prune_to_target(self, weights: Weights) -> MaskUpdate:
        """Prune layers that train over budget to their target; for EM&S, at the moment they freeze.

        Call it *before* `lock` and before the optimizer's state is parked. It never grows a weight, and does
        nothing to a layer at its target.

        Args:
            weights: parameters, their ``id()``, or their names; those that are not masked are passed over.

        Raises:
            TrainingError: when a layer is locked and over its target: its mask is fixed.

        Source: a decision of ours; SpFDE (2022) does not say what becomes of the soft bound at a freeze.
        """
        over = [masked for masked in self._find(weights) if masked.live_units > masked.target]
        for masked in over:
            if masked.locked:
                raise TrainingError(f"{masked.name} is locked, so its mask is fixed; prune it before it is locked.")
        return self._record([self._mutate(masked, masked.target, 0.0) for masked in over])

    def _mutate(self, masked: MaskedWeight, bound: int, share: float) -> MaskChange:
        settings = self.settings
        change, changed = masked.mutate(
            bound,
            share,
            importance_weight=settings.importance_weight if isinstance(settings, MEST) else 0.0,
            allow_regrow=settings.allow_regrow if isinstance(settings, DynamicSparsity) else False,
            generator=self._generator,
        )
        for tensor in self._tensors_of(masked):
            tensor.masked_fill_(changed.to(tensor.device), 0)
        return change

    def _record(self, changes: Iterable[MaskChange], reason: str = "") -> MaskUpdate:
        return MaskUpdate(layers=tuple(changes), live=self.live, total=self.total, reason=reason)

    def _add_to_importance(
        self, settings: MEST, active: Sequence[MaskedWeight], grads: list[Tensor], grad_scale: float
    ) -> None:
        for masked, grad in zip(active, grads, strict=True):
            masked.gradient_steps += 1
            if masked.gradient_sum is None:
                masked.gradient_sum = torch.zeros_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
            masked.gradient_sum = masked.gradient_sum.to(grad.device)  # the same tensor, unless the model was moved
        sums = [masked.gradient_sum for masked in active if masked.gradient_sum is not None]
        terms = torch._foreach_abs(grads) if settings.gradient_average == "magnitude" else grads
        torch._foreach_add_(sums, terms, alpha=1 / grad_scale)


def _all_finite(tensors: list[Tensor]) -> bool:
    """One number for all of them, so that a GPU is waited for once."""
    norms = torch._foreach_norm(tensors)
    return bool(torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite().all())
