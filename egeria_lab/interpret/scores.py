"""What is explained: one number a sample, as a function of the inputs or of what a layer put out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from egeria_lab.algorithms.activations import first_tensor
from egeria_lab.data.datasets import IGNORED_LABEL
from egeria_lab.errors import DataError

Forward = Callable[[nn.Module, Tensor], object]
Targets = int | Sequence[int] | Tensor | None


class Scores:
    """Runs the model and answers with the score of the target class of each sample.

    Args:
        model: the model, in eval mode.
        forward: ``forward(model, inputs)`` runs it.
        start: a submodule whose output is given instead of the inputs (for token ids), or None.
    """

    def __init__(self, model: nn.Module, forward: Forward, start: nn.Module | None = None) -> None:
        self._model = model
        self._forward = forward
        self._start = start

    def outputs(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The model's outputs, float32; `x` stands for the inputs, or for the output of the start."""
        x = x.clone()  # the module behind may work in place on what it gets
        if self._start is None:
            return _scores_in(self._forward(self._model, x))
        # In front of all other hooks, so that they see what is put in and not what the module made.
        handle = self._start.register_forward_hook(lambda _module, _inputs, _output: x, prepend=True)
        try:
            return _scores_in(self._forward(self._model, inputs))
        finally:
            handle.remove()

    def __call__(self, x: Tensor, targets: Tensor, inputs: Tensor) -> Tensor:
        """Shape (samples,)."""
        outputs = self.outputs(x, inputs)
        if outputs.dim() == 1 or outputs.shape[1] == 1:
            return outputs.flatten(1).mean(1) if outputs.dim() > 1 else outputs
        outputs = _classes_second(outputs, targets)
        wanted = targets.reshape(*targets.shape, *[1] * (outputs.dim() - 1 - targets.dim()))
        wanted = wanted.expand(len(outputs), *outputs.shape[2:])
        counted = wanted != IGNORED_LABEL
        picked = outputs.gather(1, wanted.clamp_min(0).unsqueeze(1)).squeeze(1) * counted
        return picked.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp_min(1) if picked.dim() > 1 else picked


def target_classes(outputs: Tensor, targets: Targets, count: int) -> Tensor:
    """The class to explain for each sample: what is given, or what the model predicts.

    Raises:
        DataError: when there is not one whole number for each sample (or position), or one is no class.

    Example:
        >>> target_classes(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), None, 2)
        tensor([1, 0])
    """
    if outputs.dim() == 0 or len(outputs) != count:
        raise DataError(f"the model gave outputs of shape {tuple(outputs.shape)} for {count} samples: one row each.")
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        return torch.zeros(count, dtype=torch.int64, device=outputs.device)  # one output: it is what is explained
    if targets is None:
        return outputs.flatten(2).mean(2).argmax(1) if outputs.dim() > 2 else outputs.argmax(1)
    given = torch.as_tensor(targets, device=outputs.device)
    given = given.expand(count) if given.dim() == 0 else given
    if given.is_floating_point() or given.dtype == torch.bool or len(given) != count:
        raise DataError(
            f"targets must be one class number for each of {count} samples, or None for what the model predicts; "
            f"got {given.dtype} of shape {tuple(given.shape)}."
        )
    classes = _classes_second(outputs, given).shape[1]
    if bool(((given < 0) & (given != IGNORED_LABEL) | (given >= classes)).any()):
        raise DataError(
            f"targets must be classes from 0 to {classes - 1}, got {sorted(set(given.flatten().tolist()))}."
        )
    return given.to(torch.int64)


def _scores_in(outputs: object) -> Tensor:
    logits = getattr(outputs, "logits", None)
    tensor = logits if isinstance(logits, Tensor) else first_tensor(outputs)
    if tensor is None:
        raise DataError(f"the model must put out a tensor of scores, got {type(outputs).__name__}; give forward=.")
    return tensor.float()


def _classes_second(outputs: Tensor, targets: Tensor) -> Tensor:
    """Scores of tokens may have their classes last: (samples, length, classes) with targets (samples, length)."""
    last = outputs.dim() == targets.dim() + 1 > 2 and outputs.shape[:-1] == targets.shape
    return outputs.movedim(-1, 1) if last else outputs
