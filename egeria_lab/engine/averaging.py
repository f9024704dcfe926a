"""A running average of the weights (EMA), kept beside the model and lent to it for an evaluation.

Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992), with exponential weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from egeria_lab.errors import InvalidSettingError, is_number, require

BUFFERS = ("copy", "average")


class WeightAverage:
    """``average = decay · average + (1 - decay) · weights`` after each optimizer step, from the first one on.

    Every floating-point parameter takes part, frozen ones too: theirs comes to rest at the frozen value. Under masks
    the average holds a share of what a dropped weight was, so it is denser than the weights.

    Args:
        model: whose weights.
        decay: in (0, 1); 0.999 remembers about the last 1,000 steps.
        buffers: batch-norm statistics and other floating-point buffers: ``"copy"``, the default, evaluates with those
            of the model, ``"average"`` averages them like weights. Whole numbers are always those of the model.

    Raises:
        InvalidSettingError: for a value out of range.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> average = WeightAverage(model, 0.75)
        >>> for value in (1.0, 3.0):
        ...     _ = nn.init.constant_(model.weight, value)
        ...     average.update()
        >>> with average.lent():
        ...     model.weight.item()
        1.5
        >>> model.weight.item()
        3.0
    """

    def __init__(self, model: nn.Module, decay: float, buffers: str = "copy") -> None:
        require(is_number(decay) and 0 < decay < 1, "Session", "ema", decay, "a number in (0, 1) or None")
        require(buffers in BUFFERS, "Session", "ema_buffers", buffers, "one of " + ", ".join(BUFFERS))
        self.model = model
        self.decay = decay
        self.buffers = buffers
        self._average: dict[str, Tensor] | None = None

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are after a step; the first ones are the average."""
        now = self._tensors()
        average = self._average
        if average is None or any(average[name].shape != tensor.shape for name, tensor in now.items()):
            self._average = {name: tensor.detach().clone() for name, tensor in now.items()}
            return
        torch._foreach_lerp_([average[name] for name in now], [t.detach() for t in now.values()], 1 - self.decay)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The model has the average in place of its weights while the block runs.

        Raises:
            InvalidSettingError: before the first step, when there is no average.
        """
        if self._average is None:
            raise InvalidSettingError(
                "there is no average of the weights before the first step; train one, or ema=False."
            )
        tensors = self._tensors()
        own = {name: tensor.data for name, tensor in tensors.items()}
        try:
            for name, tensor in tensors.items():
                tensor.data = self._average[name]
            yield
        finally:
            for name, tensor in tensors.items():
                tensor.data = own[name]

    def state_dict(self) -> dict[str, Any]:
        """The average by name, or None before the first step."""
        return {"average": None if self._average is None else dict(self._average), "buffers": self.buffers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved average; what it lacks (buffers that were not averaged) begins with what is now."""
        if state["average"] is None:
            self._average = None
            return
        saved = state["average"]
        self._average = {
            name: saved[name].to(tensor.device) if name in saved else tensor.detach().clone()
            for name, tensor in self._tensors().items()
        }

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if p.is_floating_point()}
        if self.buffers == "average":
            tensors |= {n: b for n, b in self.model.named_buffers() if b.is_floating_point()}
        return tensors
