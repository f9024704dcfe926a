"""One training step and one evaluation: forward, loss, backward, update. Nothing decides here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from egeria_lab.algorithms.layers import LayerModules, layers
from egeria_lab.algorithms.reference import evaluating
from egeria_lab.config import derive_seed
from egeria_lab.data.loaders import Batch, BatchSource
from egeria_lab.errors import DataError, InvalidSettingError, TrainingError, unknown_name

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
Loss = Callable[[Any, Any], Tensor]

PRECISIONS = ("auto", "fp32", "bf16")


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy per sample; class scores lie in dimension 1, or last for sequences of tokens.

    Example:
        >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3])).shape
        torch.Size([2])
    """
    if outputs.dim() == targets.dim() + 1 and outputs.dim() > 2 and outputs.shape[:-1] == targets.shape:
        outputs = outputs.movedim(-1, 1)
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step measured.

    Attributes:
        loss: mean loss of the batch.
        accuracy: share of right predictions in [0, 1], or None where the outputs are no class scores.
        seconds: time of the step.
        outputs: the model's outputs, detached.
    """

    loss: float
    accuracy: float | None
    seconds: float
    outputs: Any


class Trainer:
    """Trains one model on one device.

    Args:
        model: the model, already on `device`.
        optimizer: its optimizer.
        loss: ``loss(outputs, targets)``, a scalar or one value per sample; None for cross-entropy.
        forward: ``forward(model, batch) -> (outputs, targets)``; None for batches ``(inputs, targets)``.
        device: where the model is.
        precision: ``"auto"`` or ``"fp32"`` for float32, ``"bf16"`` for autocast.
        max_grad_norm: clip the gradient norm of active parameters to this, or None.
        seed: decides dropout and other draws inside the model, together with the step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss: Loss | None,
        forward: Forward | None,
        device: torch.device,
        precision: str = "auto",
        max_grad_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        if precision not in PRECISIONS:
            raise unknown_name("precision", precision, PRECISIONS)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise InvalidSettingError(f"max_grad_norm must be > 0 or None, got {max_grad_norm!r}.")
        self.model = model
        self.optimizer = optimizer
        self.loss: Loss = loss if loss is not None else cross_entropy
        self.checks_labels = loss is None
        self.forward = forward
        self.device = device
        self.precision = precision
        self.max_grad_norm = max_grad_norm
        self.seed = seed

    def to_device(self, content: Any) -> Any:
        """Every tensor of a (nested) batch on the training device."""
        if self.device.type == "cpu":
            return content
        return tree_map(lambda x: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x, content)

    def run_model(self, model: nn.Module, content: Any) -> tuple[Any, Any]:
        """The model's outputs and the targets for one batch on the device.

        Raises:
            DataError: when the batch is no ``(inputs, targets)`` pair and there is no `forward`.
        """
        if self.forward is not None:
            return self.forward(model, content)
        if not isinstance(content, (tuple, list)) or len(content) != 2:
            kind = f"{type(content).__name__} of {len(content)}" if hasattr(content, "__len__") else type(content)
            raise DataError(
                f"a batch must be a pair (inputs, targets), got {kind}; for other batches give "
                "forward=function(model, batch) -> (outputs, targets)."
            )
        return model(content[0]), content[1]

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast block of the chosen precision."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def step(self, batch: Batch, number: int, around_forward: AbstractContextManager[Any]) -> StepResult:
        """Train on one batch.

        Args:
            batch: the batch.
            number: number of the step, from 1; decides the draws inside the model.
            around_forward: entered for the forward pass alone (measuring; may not change values).

        Raises:
            TrainingError: when the loss is not finite; the weights are then those of before the step.
            DataError: when a label is no class of the model.
        """
        start = time.perf_counter()
        self._set_train_mode()
        content = self.to_device(batch.content)
        with self.private_draws("step", number):
            self.optimizer.zero_grad(set_to_none=True)
            with self.autocast(), around_forward:
                outputs, targets = self.run_model(self.model, content)
                losses = self.checked_loss(outputs, targets, batch)
            loss = losses.mean()
            value = loss.item()
            if value != value or abs(value) == float("inf"):
                raise TrainingError(self._not_finite(value, number))
            loss.backward()  # type: ignore[no-untyped-call]
        if self.max_grad_norm is not None:
            active = [p for p in self.model.parameters() if p.grad is not None]
            nn.utils.clip_grad_norm_(active, self.max_grad_norm)
        self.optimizer.step()
        accuracy = _accuracy(outputs, targets)
        return StepResult(value, accuracy, time.perf_counter() - start, outputs)

    def evaluate(self, source: BatchSource) -> tuple[float, float | None]:
        """Mean loss and accuracy over a data set in eval mode; nothing about training changes."""
        losses, right, count = 0.0, 0.0, 0
        has_accuracy = True
        with evaluating(self.model), self.private_draws("evaluate", 0):
            for batch in source.epoch(0):
                with self.autocast():
                    outputs, targets = self.run_model(self.model, self.to_device(batch.content))
                    loss = self.checked_loss(outputs, targets, batch).mean()
                accuracy = _accuracy(outputs, targets)
                has_accuracy = has_accuracy and accuracy is not None
                losses += float(loss) * len(batch)
                right += (accuracy or 0.0) * len(batch)
                count += len(batch)
        return losses / count, right / count if has_accuracy else None

    def checked_loss(self, outputs: Any, targets: Any, batch: Batch) -> Tensor:
        """The loss; bad labels are reported by sample id before they reach the kernel."""
        if self.checks_labels:
            _check_labels(outputs, targets, batch)
        loss = self.loss(outputs, targets)
        if not isinstance(loss, Tensor):
            raise InvalidSettingError(f"loss must return a tensor, got {type(loss).__name__}.")
        return loss.float()

    def find_layers(self, example: Batch, names: list[str] | None = None) -> LayerModules:
        """The layer modules of the model, found by running a small batch through it.

        Raises:
            LayerError, UnknownNameError: when the model cannot be cut as asked.
        """
        content = self.to_device(example.content)
        with self.private_draws("trace", 0):
            return layers(self.model, content, names=names, forward=lambda m, x: self.run_model(m, x)[0])

    @contextmanager
    def private_draws(self, *purpose: str | int) -> Iterator[None]:
        """Seed the generators that modules draw from for the length of a block, then give them back."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive_seed(self.seed, *purpose))
            yield

    def _set_train_mode(self) -> None:
        if self.model.training:
            return  # modules that the user put into eval mode inside a training model stay so
        self.model.train()

    def _not_finite(self, value: float, number: int) -> str:
        rate = self.optimizer.param_groups[0]["lr"]
        return (
            f"the loss is {value} at step {number} (learning rate {rate:.3g}). The step was not applied. "
            "Lower the learning rate (session.override('optimizer.lr', …)) or check the inputs for values "
            "that are not finite."
        )


def _check_labels(outputs: Any, targets: Any, batch: Batch) -> None:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        raise DataError(
            f"cross-entropy needs tensors of class scores and labels, got {type(outputs).__name__} and "
            f"{type(targets).__name__}; give loss= (and forward=) for other outputs."
        )
    if targets.is_floating_point() or targets.numel() == 0:
        return
    token_scores = outputs.dim() == targets.dim() + 1 and outputs.dim() > 2
    classes = outputs.shape[-1] if token_scores and outputs.shape[:-1] == targets.shape else outputs.shape[1]
    wrong = ((targets < 0) | (targets >= classes)) & (targets != -100)
    if not bool(wrong.any()):
        return
    row = int(wrong.flatten(1).any(1).nonzero()[0]) if wrong.dim() > 1 else int(wrong.nonzero()[0])
    label = int(targets[wrong][0])
    raise DataError(
        f"sample {int(batch.ids[row])} has label {label}, but the model has {classes} outputs "
        f"(labels 0 … {classes - 1}); fix the label or give the model more outputs."
    )


def _accuracy(outputs: Any, targets: Any) -> float | None:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    with torch.no_grad():
        if outputs.dim() == targets.dim() + 1 and outputs.dim() > 2 and outputs.shape[:-1] == targets.shape:
            outputs = outputs.movedim(-1, 1)
        if outputs.dim() != targets.dim() + 1:
            return None
        counted = targets != -100
        right = (outputs.argmax(1) == targets) & counted
        return float(right.sum()) / max(1, int(counted.sum()))


def choose_device(device: str | torch.device) -> torch.device:
    """The device to train on: ``"auto"`` takes a GPU when there is one.

    Raises:
        InvalidSettingError: when the device is not there.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidSettingError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidSettingError(f"device={device!r} was asked for, but torch finds no GPU; use 'auto' or 'cpu'.")
    return chosen
