"""Prune samples of small loss at random and let the others of them weigh more, so that gradients stay unbiased.

Source: the idea of InfoBatch (Qin et al., "Lossless Training Speed Up by Unbiased Dynamic Data Pruning", ICLR 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class LossPruning:
    """The last loss of every sample, and the weights that make up for the pruned ones; 5 bytes a sample.

    Of the samples below the mean loss (the *group*, at least twice as many as are pruned, where there are so
    many), some are pruned, each with the same probability, and the others get the weight
    ``size of group / survivors of the group``. So the sum of the weighted gradients over a pass has the expectation of
    the sum over all samples.

    Args:
        num_samples: samples in the training set.

    Attributes:
        factor: weight of the survivors of the group, >= 1.

    Example:
        >>> pruning = LossPruning(6)
        >>> pruning.observe(torch.arange(6), torch.tensor([0.1, 0.1, 0.1, 0.1, 5.0, 5.0]))
        >>> removed = pruning.draw(torch.arange(6), 2, torch.Generator().manual_seed(0))
        >>> len(removed), bool((removed < 4).all()), pruning.factor
        (2, True, 2.0)
    """

    def __init__(self, num_samples: int) -> None:
        self.losses = torch.full((num_samples,), torch.nan)
        self.in_group = torch.zeros(num_samples, dtype=torch.bool)
        self.factor = 1.0

    def observe(self, ids: Tensor, losses: Tensor) -> None:
        """Take in the losses of one batch; of a sample that comes twice in it, one of the two."""
        self.losses[ids] = losses.float()

    def draw(self, candidates: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Draw the samples to prune and set the weights of the others.

        Args:
            candidates: ids that may be pruned, int64.
            count: how many, exactly; fewer only when fewer losses than twice that are known.
            generator: for the draw.

        Returns:
            int64 ids in random order.
        """
        known = candidates[~self.losses[candidates].isnan()]
        known = known[torch.randperm(len(known), generator=generator)]
        losses = self.losses[known].double()
        if len(known) < len(candidates):
            count = min(count, len(known) // 2)
        below = losses < losses.mean()
        enough = int(below.sum()) >= 2 * count
        # The ids were shuffled before, so equal losses do not go by id.
        group = known[below] if enough else known[losses.argsort(stable=True)[: 2 * count]]
        size = len(group)
        removed = group[torch.randperm(size, generator=generator)[:count]]
        self.in_group.zero_()
        self.in_group[group] = True
        self.factor = size / (size - count) if count else 1.0
        return removed

    def weights(self, ids: Tensor) -> Tensor | None:
        """Loss weight of each sample, float32, shape ``(b,)``; None when all are 1."""
        if self.factor == 1.0:
            return None
        return torch.where(self.in_group[ids], self.factor, 1.0)

    def reset(self) -> None:
        """Weigh all samples alike."""
        self.in_group.zero_()
        self.factor = 1.0

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors of its own and plain values."""
        return {"losses": self.losses.clone(), "in_group": self.in_group.clone(), "factor": self.factor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.losses.copy_(state["losses"])
        self.in_group.copy_(state["in_group"])
        self.factor = float(state["factor"])
