"""What each sample of a training batch tells a sieve, on the training view: right or wrong, margin, loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egeria_lab.algorithms.sieving.forgetting import class_signals
from egeria_lab.errors import DataError


@dataclass(frozen=True, slots=True)
class SampleSignals:
    """Signals of the samples of one batch, on the CPU, in the order of its ids.

    Attributes:
        correct: right prediction or not, bool, shape ``(b,)``; None where the outputs are no class scores.
        margin: score of the true class minus the best other score, float32, shape ``(b,)``, or None.
        loss: loss of each sample, float32, shape ``(b,)``; None where the loss is one number a batch.
    """

    correct: Tensor | None
    margin: Tensor | None
    loss: Tensor | None


@torch.no_grad()
def sample_signals(outputs: Any, targets: Any, losses: Tensor) -> SampleSignals:
    """The signals of one batch.

    Args:
        outputs: what the model answered; class scores give `correct` and `margin`, as `class_signals` says.
        targets: their labels.
        losses: the loss before it was averaged.

    Example:
        >>> scores = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
        >>> signals = sample_signals(scores, torch.tensor([0, 2]), torch.tensor([0.4, 2.2]))
        >>> signals.correct.tolist(), signals.margin.tolist()
        ([True, False], [1.0, -2.0])
    """
    loss = losses.detach().float().cpu() if losses.dim() == 1 else None
    try:
        found = class_signals(outputs, targets)
    except DataError:
        return SampleSignals(None, None, loss)
    return SampleSignals(found.correct.cpu(), found.margin.cpu(), loss)
