"""The state of an optimizer by parameter name, so that it fits whatever is frozen then and now.

torch's own `state_dict` counts positions in parameter groups; those change with every freeze, which is why
freezing and resuming do not go together there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria_lab.engine.optimizer_set import kind_of

RATES = ("lr", "initial_lr", "max_lr", "min_lr")
_NOT_OPTIONS = ("params", "param_names")


def names_of(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Name → parameter, of the model and of what the optimizer trains besides (a loss with weights, say).

    Example:
        >>> model = nn.Linear(1, 1)
        >>> list(names_of(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)))
        ['weight', 'bias', 'optimizer.0']
    """
    named = dict(model.named_parameters())
    own = {id(parameter) for parameter in named.values()}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    return {**named, **{f"optimizer.{number}": parameter for number, parameter in enumerate(others)}}


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Options of each group, state of each active parameter by name, and parameters that are not the model's.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> optimizer_state(model, torch.optim.SGD(model.parameters(), lr=0.1))["groups"][0]["params"]
        ['weight', 'bias']
    """
    named = names_of(model, optimizer)
    names = {id(parameter): name for name, parameter in named.items()}
    groups = [
        {
            "options": {key: value for key, value in group.items() if key not in _NOT_OPTIONS},
            "params": [names[id(parameter)] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    shared: dict[Any, Any] = dict(optimizer.state)  # some optimizers keep state of no parameter under a text
    by_parameter = {k: v for k, v in optimizer.state.items() if isinstance(k, Tensor) and id(k) in names}
    return {
        "kind": kind_of(optimizer),
        "groups": groups,
        "state": {names[id(parameter)]: dict(values) for parameter, values in by_parameter.items()},
        "shared": {key: value for key, value in shared.items() if isinstance(key, str)},
        "others": {name: p.detach() for name, p in named.items() if name.startswith("optimizer.")},
    }


def same_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> bool:
    """True when saved groups are these, one by one: as many, and each of the same layer where they are split by layer.

    Example:
        >>> same_groups([{"options": {"lr": 0.1}}], [{"lr": 0.2}]), same_groups([{"options": {}}], [{"layer": "a"}])
        (True, False)
    """
    return [group["options"].get("layer") for group in saved] == [group.get("layer") for group in groups]


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], *, own_options: bool = False
) -> list[str]:
    """Take over a state of `optimizer_state`; who is in which group stays as it is now.

    Args:
        model: the model.
        optimizer: its optimizer.
        state: from `optimizer_state`.
        own_options: momentum and the like stay as this optimizer has them.

    Returns:
        What did not fit, in sentences. Learning rates and the like are taken over in any case.
    """
    notes: list[str] = []
    named = names_of(model, optimizer)
    kind = kind_of(optimizer)
    same_kind = state["kind"] == kind
    _load_groups(optimizer, state, named, same_kind and not own_options)
    if not same_groups(state["groups"], optimizer.param_groups):
        notes.append(
            f"The optimizer has {len(optimizer.param_groups)} parameter groups and had {len(state['groups'])}: each "
            "group took the rates of its first parameter."
        )
    with torch.no_grad():
        for name, value in state["others"].items():
            if name in named and named[name].shape == value.shape:
                named[name].copy_(value)
            else:
                notes.append(f"{name}, a parameter that is not the model's, has no place here.")
    optimizer.state.clear()
    if not same_kind:
        kept = sorted({key for values in state["state"].values() for key in values})
        notes.append(
            f"The optimizer was {state['kind']} and is {kind}: {', '.join(kept) or 'no state'} of "
            f"{len(state['state'])} parameters did not fit and starts anew."
        )
        return notes
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    unfit = [name for name, value in state["others"].items() if name in named and named[name].shape != value.shape]
    for name, values in state["state"].items():
        parameter = named.get(name)
        if parameter is None or id(parameter) not in held:
            unfit.append(name)
        elif name not in unfit:
            optimizer.state[parameter] = placed(values, parameter, _on_device(optimizer, parameter))
    for key, value in state["shared"].items():
        optimizer.state[key] = value
    if unfit:
        notes.append(f"Optimizer state without a place here was left out: {', '.join(sorted(unfit))}.")
    return notes


def placed(values: Mapping[str, Any], parameter: Tensor, step_on_device: bool = False) -> dict[str, Any]:
    """One parameter's state on its device and in its memory layout; the count of steps stays on the CPU if it was."""

    def put(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [put(key, item) for item in value]
        if not isinstance(value, Tensor) or (key == "step" and not step_on_device):
            return value
        if value.shape != parameter.shape:
            return value.to(parameter.device)
        like = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        return like.copy_(value)

    with torch.no_grad():
        return {key: put(key, value) for key, value in values.items()}


def _load_groups(
    optimizer: Optimizer, state: Mapping[str, Any], named: Mapping[str, nn.Parameter], same_kind: bool
) -> None:
    names = {id(parameter): name for name, parameter in named.items()}
    saved = state["groups"]
    home = {name: group["options"] for group in saved for name in group["params"]}
    for index, group in enumerate(optimizer.param_groups):
        aligned = same_groups(saved, optimizer.param_groups)
        own = [
            g["options"]
            for g in saved
            if group.get("layer") is not None and g["options"].get("layer") == group["layer"]
        ]
        away = own[0] if own else saved[0]["options"]  # all that was in this group is frozen
        first = next((home[names[id(p)]] for p in group["params"] if names[id(p)] in home), away)
        options = saved[index]["options"] if aligned else first
        if same_kind and aligned:
            for key in [key for key in group if key not in options and key not in _NOT_OPTIONS]:
                del group[key]
            group.update(options)
        else:  # the rates only: the rest belongs to this optimizer
            group.update({key: options[key] for key in RATES if key in options})


def _on_device(optimizer: Optimizer, parameter: Tensor) -> bool:
    for group in optimizer.param_groups:
        if any(other is parameter for other in group["params"]):
            return bool(group.get("capturable") or group.get("fused"))
    return False
