"""Freeze and thaw completely, each the exact inverse of the other. Deciding is done elsewhere.

What touches a frozen tensor, and what does not:

=================================  =============================================================
optimizer step, weight decay,      nothing: the parameter has left its parameter group, so no
momentum, missing-gradient quirks  optimizer sees it, whatever ``zero_grad(set_to_none=…)`` left
``.grad``                          None from the moment of freezing: no clipping, no norm counts it
batch-norm statistics, dropout     eval mode, kept through any later ``model.train()``
optimizer state (moments, step)    parked by name, given back on thaw (or moved to CPU, or dropped)
parameter order in its group       restored on thaw
the user's own ``.eval()``         respected: thaw gives back the mode found at the freeze
=================================  =============================================================

The file is one piece because freezing, thawing and saving what is frozen are one list of things, read three times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from egeria_lab.errors import LayerError, require

PARKING = ("keep", "cpu", "drop")


@dataclass(slots=True)
class _Parked:
    """What one frozen layer needs to come back exactly as it was."""

    model_training: bool  # mode of the whole model at the freeze
    training: dict[nn.Module, bool]
    trainable: list[nn.Parameter]
    groups: dict[int, int] = field(default_factory=dict)  # id(parameter) → index of its group
    state: dict[int, Any] = field(default_factory=dict)  # id(parameter) → optimizer state


class Freezer:
    """Freezes and thaws named layers of one model under one optimizer.

    Args:
        model: the model; while anything is frozen, one forward pre-hook on it keeps frozen modules in
            eval mode. The hook goes with the last thaw or with `close`.
        layers: name → (modules, parameters) of each layer.
        optimizer: the optimizer that holds the parameters, or None.
        park_state: what becomes of optimizer state while a layer is frozen: ``"keep"`` it where it is,
            move it to the ``"cpu"``, or ``"drop"`` it (smallest, but a thawed layer starts its moments anew).

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> layers = {"0": ([model[0]], list(model[0].parameters()))}
        >>> freezer = Freezer(model, layers, optimizer)
        >>> freezer.freeze("0"), model[0].weight.requires_grad, len(optimizer.param_groups[0]["params"])
        (True, False, 2)
        >>> freezer.thaw("0"), model[0].weight.requires_grad, len(optimizer.param_groups[0]["params"])
        (True, True, 4)
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, tuple[list[nn.Module], list[nn.Parameter]]],
        optimizer: Optimizer | None = None,
        *,
        park_state: str = "keep",
    ) -> None:
        require(park_state in PARKING, "Freezer", "park_state", park_state, "one of " + ", ".join(PARKING))
        self.model = model
        self.layers = dict(layers)
        self.optimizer = optimizer
        self.park_state = park_state
        self._parked: dict[str, _Parked] = {}
        self._hook: RemovableHandle | None = None
        self._order = {
            id(parameter): position
            for group in (optimizer.param_groups if optimizer else [])
            for position, parameter in enumerate(group["params"])
        }

    def __repr__(self) -> str:
        return f"Freezer({len(self.layers)} layers, frozen: {', '.join(self.frozen) or 'none'})"

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the frozen layers, front to back."""
        return tuple(name for name in self.layers if name in self._parked)

    def check(self, name: str) -> None:
        """Raise what `freeze` would raise, and change nothing.

        Raises:
            LayerError: when the layer does not exist, or when nothing trainable would be left.
        """
        _, parameters = self._find(name)
        if name not in self._parked:
            self._check_something_left(name, [parameter for parameter in parameters if parameter.requires_grad])

    def freeze(self, name: str) -> bool:
        """Freeze one layer; False when it was frozen already.

        Raises:
            LayerError: when the layer does not exist, or when nothing trainable would be left.
        """
        modules, parameters = self._find(name)
        if name in self._parked:
            return False
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        self._check_something_left(name, trainable)
        held = {module for other in self._parked.values() for module in other.training}
        modes = {module: module.training for module in modules if module not in held}
        parked = _Parked(self.model.training, modes, trainable)
        for parameter in trainable:
            parameter.requires_grad_(False)
            parameter.grad = None
            self._park(parameter, parked)
        self._parked[name] = parked
        if self._hook is None:
            self._hook = self.model.register_forward_pre_hook(_ModeKeeper(self))
        self.hold()
        return True

    def thaw(self, name: str) -> bool:
        """Give one layer back exactly as it was frozen; False when it was not frozen.

        Raises:
            LayerError: when the layer does not exist.
        """
        self._find(name)
        parked = self._parked.pop(name, None)
        if parked is None:
            return False
        for other in self._parked:
            self._hand_over(parked, other)
        for parameter in parked.trainable:
            parameter.requires_grad_(True)
            self._give_back(parameter, parked)
        evaluated_now = parked.model_training and not self.model.training
        for module, training in parked.training.items():
            module.training = training and not evaluated_now
        if not self._parked:
            self._remove_hook()
        return True

    def hold(self) -> None:
        """Put the modules of frozen layers into eval mode (again)."""
        for parked in self._parked.values():
            for module in parked.training:
                module.training = False

    def parked_state_bytes(self) -> int:
        """Bytes of optimizer state held for frozen layers, wherever they lie."""
        tensors = (
            value
            for parked in self._parked.values()
            for state in parked.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def whole_optimizer_state(self) -> dict[str, Any]:
        """``optimizer.state_dict()`` as it would be with nothing frozen; what is frozen stays so.

        A fresh optimizer of the same model can load it, whatever is frozen now. Parked state that was dropped is not
        in it. Empty without an optimizer.
        """
        return self.whole_optimizer_states([self.optimizer])[0] if self.optimizer is not None else {}

    def whole_optimizer_states(self, parts: Sequence[Optimizer]) -> list[dict[str, Any]]:
        """As `whole_optimizer_state`, of each of the optimizers that this one is made of."""
        held = [(parameter, kept) for kept in self._parked.values() for parameter in kept.trainable]
        for parameter, kept in held:
            self._give_back(parameter, kept)
        try:
            return [part.state_dict() for part in parts]
        finally:
            for parameter, kept in held:
                self._park(parameter, kept)

    def state_dict(self, optimizer_state: bool = True) -> dict[str, Any]:
        """What is frozen and what a thaw will need, by name: plain values and tensors (the parked ones themselves).

        Args:
            optimizer_state: False leaves parked optimizer state out; see `whole_optimizer_state`.
        """
        modules = {module: name for name, module in self.model.named_modules()}
        parameters = {id(parameter): name for name, parameter in self.model.named_parameters()}
        parked = [
            {
                "layer": layer,
                "model_training": kept.model_training,
                "training": {modules[module]: mode for module, mode in kept.training.items()},
                "trainable": [parameters[id(parameter)] for parameter in kept.trainable],
            }
            | ({"state": {parameters[key]: state for key, state in kept.state.items()}} if optimizer_state else {})
            for layer, kept in self._parked.items()
        ]
        return {"parked": parked}

    def places(self) -> list[tuple[str, int]]:
        """Name of each parameter that has left the optimizer, and the position of the group it left."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [(names[key], index) for kept in self._parked.values() for key, index in kept.groups.items()]

    def order(self) -> dict[str, int]:
        """Position of each parameter in its group as the optimizer was given, by name."""
        return {n: self._order[id(p)] for n, p in self.model.named_parameters() if id(p) in self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Freeze exactly what was frozen then, with the optimizer state that was parked then; thaw what was not.

        Which group a parameter belongs to is what the optimizer says now. A state without optimizer state parks what
        the optimizer holds now.

        Raises:
            LayerError: when a layer, a module or a parameter of the state does not exist here.
        """
        self.close()
        modules, parameters = dict(self.model.named_modules()), dict(self.model.named_parameters())
        for entry in state["parked"]:
            self._find(entry["layer"])
            for name in [*entry["training"], *entry["trainable"]]:
                if name not in modules and name not in parameters:
                    raise LayerError(f"the state is that of another model: there is no {name!r} here.")
            training = {modules[name]: mode for name, mode in entry["training"].items()}
            trainable = [parameters[name] for name in entry["trainable"]]
            kept = _Parked(entry["model_training"], training, trainable)
            for parameter in trainable:
                parameter.requires_grad_(False)
                parameter.grad = None
                self._park(parameter, kept)
            if "state" in entry:
                kept.state = {}
            for name, values in entry.get("state", {}).items():
                on_cpu, group = self.park_state == "cpu", self._group_of(id(parameters[name]), kept)
                counted_there = group.get("capturable") or group.get("fused")
                device = torch.device("cpu") if on_cpu else parameters[name].device
                kept.state[id(parameters[name])] = _moved(values, device, skip="" if counted_there else "step")
            self._parked[entry["layer"]] = kept
        if self._parked:
            self._hook = self.model.register_forward_pre_hook(_ModeKeeper(self))
        self.hold()

    def close(self) -> None:
        """Thaw everything and leave nothing of ours in the model."""
        for name in list(self._parked):
            self.thaw(name)

    def _find(self, name: str) -> tuple[list[nn.Module], list[nn.Parameter]]:
        if name not in self.layers:
            raise LayerError(f"there is no layer {name!r}; layers: {', '.join(self.layers)}.")
        return self.layers[name]

    def _check_something_left(self, name: str, leaving: list[nn.Parameter]) -> None:
        gone = {id(parameter) for parameter in leaving}
        if any(p.requires_grad and id(p) not in gone for p in self.model.parameters()):
            return
        raise LayerError(
            f"{name} holds the last trainable parameters: freezing it would leave nothing to train. "
            "Thaw another layer first, or stop the run."
        )

    def _park(self, parameter: nn.Parameter, parked: _Parked) -> None:
        if self.optimizer is None:
            return
        for index, group in enumerate(self.optimizer.param_groups):
            kept = [p for p in group["params"] if p is not parameter]
            if len(kept) != len(group["params"]):
                group["params"] = kept
                parked.groups[id(parameter)] = index
        state = self.optimizer.state.pop(parameter, None)
        if state is not None and self.park_state != "drop":
            device = torch.device("cpu") if self.park_state == "cpu" else None
            parked.state[id(parameter)] = _moved(state, device)

    def _group_of(self, key: int, parked: _Parked) -> dict[str, Any]:
        if self.optimizer is None or key not in parked.groups:
            return {}
        return self.optimizer.param_groups[parked.groups[key]]

    def _give_back(self, parameter: nn.Parameter, parked: _Parked) -> None:
        if self.optimizer is None or id(parameter) not in parked.groups:
            return
        group = self.optimizer.param_groups[parked.groups[id(parameter)]]
        group["params"] = sorted([*group["params"], parameter], key=lambda p: self._order.get(id(p), 0))
        if id(parameter) in parked.state:
            # "step" stays where the optimizer had put it: Adam keeps it on the CPU on purpose.
            device = parameter.device if self.park_state == "cpu" else None
            self.optimizer.state[parameter] = _moved(parked.state[id(parameter)], device, skip="step")

    def _hand_over(self, parked: _Parked, other: str) -> None:
        """Let a layer that stays frozen keep what it shares with one that thaws (tied weights, a part of it)."""
        modules, parameters = self.layers[other]
        keeper = self._parked[other]
        for module in [m for m in modules if m in parked.training]:
            keeper.training[module] = parked.training.pop(module)
        shared = {id(parameter) for parameter in parameters}
        keeper.trainable += [p for p in parked.trainable if id(p) in shared]
        parked.trainable = [p for p in parked.trainable if id(p) not in shared]
        for key in shared & parked.groups.keys():
            keeper.groups[key] = parked.groups.pop(key)
        for key in shared & parked.state.keys():
            keeper.state[key] = parked.state.pop(key)

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _moved(state: dict[str, Any], device: torch.device | None, skip: str = "") -> dict[str, Any]:
    if device is None:
        return dict(state)
    return {
        key: value.to(device) if isinstance(value, Tensor) and key != skip else value for key, value in state.items()
    }


class _ModeKeeper:
    """The hook that keeps frozen modules in eval mode; a copied or pickled model gets one that does nothing."""

    def __init__(self, freezer: Freezer | None) -> None:
        self._freezer = freezer

    def __call__(self, _module: nn.Module, _inputs: object) -> None:
        if self._freezer is not None:
            self._freezer.hold()

    def __reduce__(self) -> tuple[type[_ModeKeeper], tuple[None]]:
        return _ModeKeeper, (None,)


def freeze_layers(
    model: nn.Module, names: Iterable[str], optimizer: Optimizer | None = None, *, park_state: str = "keep"
) -> Freezer:
    """Freeze submodules of a model in your own training loop, completely, and return the way back.

    Args:
        model: any module.
        names: qualified names of submodules, as in ``model.named_modules()``.
        optimizer: the optimizer of the loop; without it, frozen parameters are only cut from autograd.
        park_state: as in `Freezer`.

    Returns:
        A `Freezer`: call its ``thaw(name)`` or ``close()`` to undo.

    Raises:
        LayerError: for a name that is not a submodule, or when nothing trainable would be left.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        >>> freezer = freeze_layers(model, ["0", "1"])
        >>> _ = model.train()(torch.randn(4, 2))
        >>> freezer.frozen, int(model[1].num_batches_tracked)
        (('0', '1'), 0)
    """
    submodules = dict(model.named_modules())
    wanted = list(names)
    missing = [name for name in wanted if name not in submodules]
    if missing:
        raise LayerError(f"no submodule is called {missing[0]!r}; submodules: {', '.join(n for n in submodules if n)}.")
    layers = {name: (list(submodules[name].modules()), list(submodules[name].parameters())) for name in wanted}
    freezer = Freezer(model, layers, optimizer, park_state=park_state)
    try:
        for name in wanted:
            freezer.freeze(name)
    except LayerError:
        freezer.close()
        raise
    return freezer
