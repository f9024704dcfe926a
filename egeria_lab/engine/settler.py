"""Train settling layers less and less: what the optimizer does to them is scaled down, whichever optimizer it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.algorithms.settling import settling_factor


class Settler:
    """Looks at every update of a trainer from inside (`trainer.UpdateHooks`).

    Args:
        layers: the layer modules.
        passes: tells the passes over the data so far.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> from egeria_lab.algorithms.layers import layers
        >>> now = [3.0]
        >>> settler = Settler(layers(model, torch.zeros(1, 2)), lambda: now[0])
        >>> settler.begin("0", epochs=2.0)
        >>> now[0] = 4.0
        >>> round(settler.factor("0"), 2), settler.factor("1")
        (0.5, 1.0)
    """

    def __init__(self, layers: LayerModules, passes: Callable[[], float]) -> None:
        self._parameters: dict[str, list[nn.Parameter]] = {layer.name: list(layer.parameters) for layer in layers}
        self._passes = passes
        self._begun: dict[str, tuple[float, float]] = {}  # layer → passes when it began, how many it settles
        self._before: list[tuple[float, nn.Parameter, Tensor]] = []

    @property
    def is_busy(self) -> bool:
        """Whether any layer settles."""
        return bool(self._begun)

    def begin(self, layer: str, epochs: float) -> None:
        """From the next step on, train a layer less and less, to nothing after so many passes."""
        self._begun[layer] = self._passes(), epochs

    def end(self, layer: str) -> None:
        """Train a layer as all others, or not at all: what it was."""
        self._begun.pop(layer, None)

    def factor(self, layer: str) -> float:
        """What is left of the updates of a layer now, in [0, 1]."""
        if layer not in self._begun:
            return 1.0
        start, epochs = self._begun[layer]
        return settling_factor((self._passes() - start) / epochs)

    def after_backward(self) -> None:
        """Keep what the optimizer is about to move."""
        self._before = [
            (self.factor(layer), parameter, parameter.detach().clone())
            for layer in self._begun
            for parameter in self._parameters[layer]
            if parameter.grad is not None
        ]

    def after_step(self) -> None:
        """Take back the rest of each update."""
        with torch.no_grad():
            for factor, parameter, before in self._before:
                parameter.copy_(before.lerp_(parameter, factor))
        self._before = []

    def state_dict(self) -> dict[str, Any]:
        """Who settles since when, as plain values."""
        return {"begun": {layer: list(found) for layer, found in self._begun.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._begun = {layer: (start, epochs) for layer, (start, epochs) in state["begun"].items()}
