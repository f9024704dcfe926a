"""The reference model: a snapshot of the training model that plasticity is measured against.

Egeria (EuroSys 2023), section 4.1. The snapshot copies tensors, not modules, so that a hooked or masked
model can be snapshotted too; it runs through the training model's own code with its tensors swapped in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from egeria_lab.algorithms.activations import capture


class _Called(nn.Module):
    """Lets a model be run through the caller's own `forward(model, inputs)` under swapped tensors."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, object], object]) -> None:
        super().__init__()
        self.model = model
        self._call = forward

    def forward(self, inputs: object) -> object:
        return self._call(self.model, inputs)


class Reference:
    """A float32 snapshot of a model, run in the calling thread.

    Args:
        model: the training model; it is read and never changed.
        outputs: name → submodule whose output is wanted.
        forward: ``forward(model, inputs)`` runs the model.

    Attributes:
        generation: number of the snapshot, from 1.
        engine: numeric format of the snapshot.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> reference = Reference(model, {"0": model[0]}, lambda m, x: m(x))
        >>> reference.refresh()
        >>> before = reference.activations(torch.ones(1, 2))["0"]
        >>> _ = nn.init.zeros_(model[0].weight)
        >>> torch.equal(before, reference.activations(torch.ones(1, 2))["0"])
        True
    """

    engine = "fp32"

    def __init__(
        self,
        model: nn.Module,
        outputs: Mapping[str, nn.Module],
        forward: Callable[[nn.Module, object], object],
    ) -> None:
        self.generation = 0
        self._called = _Called(model, forward)
        self._outputs = dict(outputs)
        self._state: dict[str, Tensor] = {}

    def refresh(self) -> None:
        """Take a new snapshot of the training model."""
        with torch.no_grad():
            state = {**dict(self._called.named_parameters()), **dict(self._called.named_buffers())}
            self._state = {name: tensor.detach().clone() for name, tensor in state.items()}
        self.generation += 1

    def state_dict(self) -> dict[str, Any]:
        """The snapshot: its number and its tensors."""
        return {"generation": self.generation, "tensors": dict(self._state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the snapshot of `state_dict`, on the device of the training model; the tensors are taken over."""
        now = {**dict(self._called.named_parameters()), **dict(self._called.named_buffers())}
        self._state = {name: tensor.to(now[name].device) for name, tensor in state["tensors"].items()}
        self.generation = state["generation"]

    def activations(self, inputs: object, stop_after: nn.Module | None = None) -> dict[str, Tensor]:
        """Outputs of the wanted submodules in eval mode under the snapshot's tensors.

        Args:
            inputs: what `forward` takes.
            stop_after: leave out everything behind this submodule; its output is still delivered.
        """
        return self._run(lambda: functional_call(self._called, self._state, (inputs,)), stop_after)

    def current(self, inputs: object, stop_after: nn.Module | None = None) -> dict[str, Tensor]:
        """The same outputs under the training model's tensors of this moment, also in eval mode."""
        return self._run(lambda: self._called(inputs), stop_after)

    def _run(self, call: Callable[[], object], stop_after: nn.Module | None) -> dict[str, Tensor]:
        with evaluating(self._called), capture(self._outputs) as outputs:
            handle = stop_after.register_forward_hook(_stop) if stop_after is not None else None
            try:
                call()
            except _Enough:
                pass
            finally:
                if handle is not None:
                    handle.remove()
        return outputs


class _Enough(Exception):  # noqa: N818 - a signal, not an error
    """Raised inside a forward pass when everything wanted has been computed."""


def _stop(_module: nn.Module, _inputs: object, _output: object) -> None:
    raise _Enough


class evaluating:  # noqa: N801 - used like a function
    """Run a block with every module in eval mode and without gradients; modes come back exactly.

    Example:
        >>> model = nn.Dropout()
        >>> with evaluating(model):
        ...     model.training
        False
        >>> model.training
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modes: dict[nn.Module, bool] = {}
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        self._modes = {module: module.training for module in self._model.modules()}
        for module in self._modes:
            module.training = False
        self._no_grad.__enter__()

    def __exit__(self, *error: object) -> None:
        self._no_grad.__exit__(*error)
        for module, training in self._modes.items():
            module.training = training
