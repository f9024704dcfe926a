"""What each sample of a training batch tells a sieve, on the training view: right or wrong, margin, loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egeria_lab.algorithms.sieving.forgetting import class_signals
from egeria_lab.engine.losses import loss_of_each
from egeria_lab.errors import DataError


@dataclass(frozen=True, slots=True)
class SampleSignals:
    """Signals of the samples of one batch, on the CPU, in the order of its ids.

    Attributes:
        correct: right prediction or not, bool, shape ``(b,)``; None where the outputs are no class scores.
        margin: score of the true class minus the best other score, float32, shape ``(b,)``, or None.
        loss: loss of each sample, float32, shape ``(b,)``; None where samples cannot be told apart in it.
        loss_shape: shape of what the loss returned.
    """

    correct: Tensor | None
    margin: Tensor | None
    loss: Tensor | None
    loss_shape: tuple[int, ...] = ()


@torch.no_grad()
def sample_signals(outputs: Any, targets: Any, losses: Tensor, samples: int | None = None) -> SampleSignals:
    """The signals of one batch.

    Args:
        outputs: what the model answered; class scores give `correct` and `margin`, as `class_signals` says.
        targets: their labels.
        losses: the loss before it was averaged; of each sample the mean over further dimensions counts.
        samples: samples in the batch; default: as many as losses.

    Example:
        >>> scores = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
        >>> signals = sample_signals(scores, torch.tensor([0, 2]), torch.tensor([0.4, 2.2]))
        >>> signals.correct.tolist(), signals.margin.tolist()
        ([True, False], [1.0, -2.0])
    """
    samples = samples if samples is not None else losses.shape[0] if losses.dim() else 0
    shape = tuple(losses.shape)
    each = loss_of_each(losses.detach(), samples)
    loss = None if each is None else each.float().cpu()
    try:
        found = class_signals(outputs, targets)
    except DataError:
        return SampleSignals(None, None, loss, shape)
    if samples and len(found.correct) != samples:  # rows of another kind, such as tokens
        return SampleSignals(None, None, loss, shape)
    return SampleSignals(found.correct.cpu(), found.margin.cpu().nan_to_num(0.0), loss, shape)


def joined(parts: Sequence[SampleSignals | None]) -> SampleSignals | None:
    """The signals of a batch from those of its parts, in order; what one part lacks the batch lacks.

    Example:
        >>> one = SampleSignals(None, None, torch.ones(2), (2,))
        >>> joined([one, one]).loss.tolist(), joined([None]) is None
        ([1.0, 1.0, 1.0, 1.0], True)
    """
    known = [part for part in parts if part is not None]
    if len(known) <= 1:
        return known[0] if known else None

    def column(name: str) -> Tensor | None:
        values = [getattr(part, name) for part in known]
        return None if any(value is None for value in values) else torch.cat(values)

    return SampleSignals(column("correct"), column("margin"), column("loss"), known[0].loss_shape)
