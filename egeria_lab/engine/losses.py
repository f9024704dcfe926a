"""The default loss, accuracy, and the check of labels before they reach a kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from egeria_lab.data.loaders import Batch
from egeria_lab.errors import DataError

IGNORED = -100
"""Label of positions that do not count, as in torch's own cross-entropy."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy per sample; class scores lie in dimension 1, or last for sequences of tokens.

    Example:
        >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3])).shape
        torch.Size([2])
    """
    if outputs.dim() == targets.dim() + 1 and outputs.dim() > 2 and outputs.shape[:-1] == targets.shape:
        outputs = outputs.movedim(-1, 1)
    losses = F.cross_entropy(outputs, targets, reduction="none")
    if losses.dim() == 1:
        return losses
    if targets.is_floating_point():
        return losses.flatten(1).mean(1)
    counted = (targets != IGNORED).flatten(1).sum(1).clamp(min=1)
    return losses.flatten(1).sum(1) / counted  # padded positions cost nothing, and make no row weigh less


def loss_of_each(losses: Tensor, samples: int) -> Tensor | None:
    """One loss a sample, the mean over further dimensions; None where samples cannot be told apart.

    Args:
        losses: what a loss returned, shape ``(b,)`` or ``(b, …)``.
        samples: samples in the batch.

    Example:
        >>> loss_of_each(torch.tensor([[1.0, 3.0], [2.0, 2.0]]), 2).tolist()
        [2.0, 2.0]
        >>> loss_of_each(torch.tensor(1.0), 2) is None
        True
    """
    if losses.dim() == 0 or len(losses) != samples:
        return None
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


def check_labels(outputs: Any, targets: Any, batch: Batch) -> None:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        raise DataError(
            f"cross-entropy needs tensors of class scores and labels, got {type(outputs).__name__} and "
            f"{type(targets).__name__}; give loss= (and forward=) for other outputs."
        )
    if outputs.dim() < 2:
        raise DataError(
            f"cross-entropy needs class scores of shape (samples, classes), got outputs of shape "
            f"{tuple(outputs.shape)}; give the model one output a class, or give loss= for another task."
        )
    if targets.dim() == 0 or len(outputs) != len(targets):
        given = len(targets) if targets.dim() else "no sample"
        raise DataError(
            f"the model gave outputs for {len(outputs)} samples and labels for {given} came with them; return one "
            "row of scores a sample, or give loss= for another task."
        )
    probabilities = targets.is_floating_point() and targets.shape == outputs.shape
    if probabilities or targets.numel() == 0:
        return
    if targets.dtype != torch.int64:
        raise DataError(
            f"labels are {str(targets.dtype).removeprefix('torch.')}, and cross-entropy needs int64 class labels (or "
            "probabilities, one a class): convert them with .long(), or give loss= for another task."
        )
    if targets.dim() == outputs.dim() and targets.shape[1:] != outputs.shape[1:]:
        raise DataError(
            f"labels have shape {tuple(targets.shape)} for outputs of shape {tuple(outputs.shape)}: give one class "
            "label a sample, shape (samples,), for example with .squeeze(1)."
        )
    token_scores = outputs.dim() == targets.dim() + 1 and outputs.dim() > 2
    classes = outputs.shape[-1] if token_scores and outputs.shape[:-1] == targets.shape else outputs.shape[1]
    wrong = ((targets < 0) | (targets >= classes)) & (targets != IGNORED)
    if not bool(wrong.any()):
        return
    row = int(wrong.flatten(1).any(1).nonzero()[0]) if wrong.dim() > 1 else int(wrong.nonzero()[0])
    label = int(targets[wrong][0])
    raise DataError(
        f"sample {int(batch.ids[row])} has label {label}, but the model has {classes} outputs "
        f"(labels 0 … {classes - 1}); fix the label or give the model more outputs."
    )


def accuracy_of(outputs: Any, targets: Any) -> float | None:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    with torch.no_grad():
        if outputs.dim() == targets.dim() + 1 and outputs.dim() > 2 and outputs.shape[:-1] == targets.shape:
            outputs = outputs.movedim(-1, 1)
        if outputs.dim() != targets.dim() + 1:
            return None
        counted = targets != IGNORED
        right = (outputs.argmax(1) == targets) & counted
        return float(right.sum()) / max(1, int(counted.sum()))
