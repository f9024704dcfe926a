"""A second session from the very step where a first one stands; and the plain model out of a session."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from egeria_lab.algorithms.model_copy import MADE_OF, plain_copy
from egeria_lab.engine.adopting import note_changes
from egeria_lab.engine.arguments import check_names
from egeria_lab.engine.saving import set_flags
from egeria_lab.engine.session_state import capture, check_between_steps, restore
from egeria_lab.errors import InvalidSettingError
from egeria_lab.events import CheckpointLoaded

OWN_PARTS = ("model", "loss", "optimizer")
"""Arguments that hold weights or state: a fork has its own."""


def fork(session: Any, make: Callable[..., Any], **changes: Any) -> Any:
    """An independent copy of a session: its own model, optimizer, rule and place in the same data.

    Args:
        session: the session; it goes on as if nothing had been.
        make: builds a session from keyword arguments.
        changes: arguments of `Session` that are to be others in the copy.

    Raises:
        UnknownNameError: for a change that is no argument of `Session`.
        InvalidSettingError: from inside a step, or when a scheduler was given ready-made, which cannot be copied.
        CheckpointError: when the copy cannot go on from here with what is asked for.
    """
    check_names("fork()", make, changes)
    session._check_open()
    check_between_steps(session, "fork()")
    if session.ranks is not None:
        raise InvalidSettingError(
            "fork() works in a single process, not with several ranks: save(path) on rank 0, and load the file in a "
            "session of its own."
        )
    with session._lock:
        session.land_commands()  # what was asked before counts for both
        state = capture(session)
        arguments = dict(session._arguments)
        if isinstance(arguments.get("scheduler"), LRScheduler):
            raise InvalidSettingError(
                "a session whose scheduler was given ready-made cannot be forked; give scheduler=function(optimizer)."
            )
        own = _copied_together(session, arguments)
    if isinstance(own.get("model"), nn.Module):
        set_flags(own["model"], state.tree)
    if isinstance(arguments.get("data"), str):
        own["data"] = session.data  # loaded already
    second = make(**{**arguments, "run_dir": None, "paused": False, **own, **changes})
    try:
        notes = restore(second, state, asked=changes)
        note_changes(second, changes)
    except BaseException:
        second.close()
        raise
    second._arguments.update({name: value for name, value in arguments.items() if name == "data"} | changes)
    if notes:
        second.events.append(CheckpointLoaded(step=state.step, path="the session that was forked", notes=tuple(notes)))
    return second


def _copied_together(session: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Model, loss and optimizer of the user's own, copied so that the copies belong to each other."""
    memo: dict[int, Any] = {}
    own: dict[str, Any] = {}
    if isinstance(arguments.get("model"), nn.Module):
        own["model"] = without_our_hooks(copy.deepcopy(session.model, memo))
    if isinstance(arguments.get("loss"), nn.Module):
        own["loss"] = copy.deepcopy(arguments["loss"], memo)
    optimizer = arguments.get("optimizer")
    made = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    if all(isinstance(one, Optimizer) for one in made):
        if "model" not in own:
            raise InvalidSettingError("a session with a model by name and a ready-made optimizer cannot be forked.")
        own["optimizer"] = copied = copy.deepcopy(optimizer, memo)
        copies: list[Any] = list(copied) if isinstance(copied, (list, tuple)) else [copied]
        groups = [group for one in copies for group in one.param_groups]
        for name, index in session._steering.freezer.places():  # frozen parameters have left their groups
            parameter = dict(own["model"].named_parameters())[name]
            groups[index]["params"].append(parameter)
        order = session._steering.freezer.order()
        names = {id(p): n for n, p in own["model"].named_parameters()}
        for group in groups:
            group["params"].sort(key=lambda p: order.get(names.get(id(p), ""), 0))
    return own


def without_our_hooks(model: nn.Module) -> nn.Module:
    """A copied model without the hook that a freezer had left in the original."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if type(hook).__module__.startswith("egeria_lab."):
                del module._forward_pre_hooks[key]
    return model


class Exported(NamedTuple):
    """A model without anything of ours in it.

    Attributes:
        model: a copy on the CPU in eval mode, every weight trainable that was, under its plain name.
        state_dict: its tensors; they load into the bare architecture with ``strict=True``.
    """

    model: nn.Module
    state_dict: dict[str, Tensor]

    def __repr__(self) -> str:
        numbers = sum(tensor.numel() for tensor in self.state_dict.values())
        return (
            f"Exported(model: {type(self.model).__name__} in eval mode on the CPU, "
            f"state_dict: {len(self.state_dict)} tensors, {numbers:,} numbers)"
        )


def export(session: Any, ema: bool = False) -> Exported:
    """The plain model: no hooks, no masks or re-parametrisations, dense weights under their usual names.

    Args:
        session: the session.
        ema: take the running average of the weights.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", epochs=1)
        >>> list(export(session).state_dict)[:2]
        ['layers.0.linear.weight', 'layers.0.linear.bias']
    """
    check_between_steps(session, "export()")
    with session._lock:
        with session.trainer.lent_average(ema):
            model = plain_copy(session.model, steady=False)
        parked = {name for entry in session._steering.freezer.state_dict()["parked"] for name in entry["trainable"]}
        trainable = {name for name, p in session.model.named_parameters() if p.requires_grad} | parked
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        inside = f"{path}.parametrizations.{last}." if path else f"parametrizations.{last}."
        sources = [name, *(f"{name}{suffix}" for suffix in MADE_OF)]
        parameter.requires_grad_(any(t in sources or t.startswith(inside) for t in trainable))
    return Exported(model, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
