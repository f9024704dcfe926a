"""What a `LoopFreezer` takes: each check says in one sentence what was given, what is allowed, and what to do."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.algorithms.freeze_schedule import Schedule
from egeria_lab.config import derive_seed
from egeria_lab.data.private_generator import private_generator
from egeria_lab.engine.optimizer_set import OptimizerSet
from egeria_lab.errors import DataError, InvalidSettingError, is_whole, require

_open: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Model → who freezes it in a loop; an entry keeps neither alive."""


def batch_rows(batch: Any) -> int:
    """Samples in a batch: the length of the first tensor in it.

    Raises:
        DataError: when there is no tensor in it, or no sample.

    Example:
        >>> batch_rows({"input_ids": torch.zeros(3, 7), "labels": torch.zeros(3)})
        3
    """
    content = dict(batch) if isinstance(batch, Mapping) else batch
    first = next((leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor) and leaf.dim()), None)
    if first is None:
        raise DataError(f"a batch must hold a tensor whose rows are its samples; got {type(batch).__name__}.")
    if not len(first):
        raise DataError("a batch must hold at least one sample, got one of 0 rows; leave empty batches out.")
    return len(first)


def claim(model: nn.Module, owner: object) -> None:
    """Note that `owner` freezes layers of this model from now on; it is forgotten when `owner` is gone.

    Raises:
        InvalidSettingError: when somebody else does so.

    Example:
        >>> class Owner: pass
        >>> model, first = nn.Linear(1, 1), Owner()
        >>> claim(model, first), release(model, first), claim(model, Owner())
        (None, None, None)
    """
    check_unclaimed(model)
    _open[model] = weakref.ref(owner)


def check_unclaimed(model: nn.Module) -> None:
    """Raise what `claim` would raise."""
    held = _open.get(model)
    if held is not None and held() is not None:
        raise InvalidSettingError(
            f"another LoopFreezer freezes layers of this {type(model).__name__}: close() that one first, or go on "
            "with it."
        )


def release(model: nn.Module, owner: object) -> None:
    """Forget it, where it was `owner`."""
    held = _open.get(model)
    if held is not None and held() is owner:
        del _open[model]


def check_single_process(world_size: int) -> None:
    """Raise when a trainer of another package runs on several ranks.

    Raises:
        InvalidSettingError: for more than one.

    Example:
        >>> check_single_process(1)
    """
    if world_size > 1:
        raise InvalidSettingError(
            f"FreezeCallback trains in one process, and there are {world_size}: ranks that decide alone would freeze "
            "different layers. Use a Session under torchrun, or one device."
        )


def check_model(model: Any) -> None:
    """Raise for what is no module, and for a model in which another one freezes layers.

    Raises:
        InvalidSettingError: with what to give.
    """
    if not isinstance(model, nn.Module):
        raise InvalidSettingError(
            f"LoopFreezer.model must be a torch Module, got {model!r}; lab.models.build makes one from a name."
        )
    check_unclaimed(model)


def one_optimizer(optimizer: Optimizer | Sequence[Optimizer] | None, model: nn.Module) -> Optimizer:
    """The optimizer, or several as one.

    Raises:
        InvalidSettingError: when it is none, or that of another model.
    """
    if optimizer is None:  # nobody's: only its groups are looked at
        return torch.optim.SGD(model.parameters(), lr=1.0)
    made = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not made or not all(isinstance(one, Optimizer) for one in made):
        raise InvalidSettingError(
            f"LoopFreezer.optimizer must be a torch Optimizer or a list of them, got {optimizer!r}."
        )
    own = {id(parameter) for parameter in model.parameters()}
    held = (id(parameter) for one in made for group in one.param_groups for parameter in group["params"])
    if own.isdisjoint(held):
        raise InvalidSettingError(
            "LoopFreezer.optimizer holds no parameter of the model: give the optimizer that trains it, or None."
        )
    return made[0] if len(made) == 1 else OptimizerSet(made)


def check_plan(freeze: Any, sieve: Any, steps_per_epoch: Any, total_steps: Any, dataset: Any, batch_size: Any) -> None:
    """Raise for settings that do not go together.

    Raises:
        InvalidSettingError: with what to give.
    """
    for name, steps in (("steps_per_epoch", steps_per_epoch), ("total_steps", total_steps)):
        valid = steps is None or (is_whole(steps) and steps >= 1)
        require(valid, "LoopFreezer", name, steps, "a whole number >= 1 or None")
    if isinstance(freeze, Plasticity) and steps_per_epoch is None:
        raise InvalidSettingError(
            "Plasticity begins after the first pass over the data: give example=loader, or steps_per_epoch=."
        )
    if isinstance(freeze, Plasticity) and freeze.settle_epochs:
        raise InvalidSettingError(
            f"settle_epochs={freeze.settle_epochs:g} trains layers less and less, and in a loop of your own the "
            "updates are yours; choose Plasticity(settle_epochs=0)."
        )
    if isinstance(freeze, Schedule):
        if total_steps is None:
            raise InvalidSettingError("a Schedule freezes at shares of the training: give total_steps=.")
        if freeze.has_own_rates:
            raise InvalidSettingError(
                "block_lr='cosine' gives each layer a learning rate of its own, and in a loop of your own the rates "
                "are yours; choose Schedule(…, block_lr='global')."
            )
    if sieve is not None and (dataset is None or batch_size is None or total_steps is None):
        raise InvalidSettingError("a sieve needs dataset=, batch_size= and total_steps= beside it.")


def loader_length(loader: DataLoader[Any]) -> int | None:
    """Batches in a pass, where that is known."""
    try:
        return len(loader)
    except TypeError:  # iterable data without a length
        return None


def two_samples(loader: DataLoader[Any], seed: int) -> Any:
    """The first two samples, collated; what data set and collate draw comes from a generator of ours.

    Raises:
        DataError: when there are none to look at.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            "an iterable data set has no first samples to look at twice: give example=batch, one batch of it."
        )
    dataset: Any = loader.dataset
    if not len(dataset):
        raise DataError("the data set of example=loader is empty: give one with at least one sample.")
    with private_generator(derive_seed(seed, "example")):
        return loader.collate_fn([dataset[i] for i in range(min(2, len(dataset)))])


def as_number(name: str, value: Any) -> float:
    """A number, or the one in a tensor.

    Raises:
        InvalidSettingError: for anything else.

    Example:
        >>> as_number("after_step(…): loss", torch.tensor(0.5))
        0.5
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if isinstance(value, (float, Real)) and type(value) is not bool:
        return float(value)
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise InvalidSettingError(f"{name} must be one number, or a tensor with one; got {got}.")


def bad_loss_notice(loss: float, step: int) -> str | None:
    """What to say about the loss of an update that is made already; None for a loss as it should be.

    Example:
        >>> bad_loss_notice(0.5, 3) is None
        True
    """
    if math.isfinite(loss):
        return None
    return (
        f"The loss of step {step} is {loss:g}. The loop has made this update already, so that the weights may be no "
        "numbers any more: go back to a state that was saved before, with a lower learning rate."
    )


def check_no_sieve_arguments(**given: Any) -> None:
    """Raise for what only a sieve looks at, where there is none.

    Raises:
        InvalidSettingError: with the name.
    """
    for name, value in given.items():
        if value is not None:
            raise InvalidSettingError(
                f"after_step(…): {name}= is looked at by a sieve only, and this LoopFreezer has none: leave it out, "
                "or give LoopFreezer(…, sieve=…)."
            )
