"""Several optimizers of one model as one, so that freezing, schedules, loss scaling and checkpoints see one.

Parameter groups are the very dictionaries of the optimizers that it is made of, one after the other; state is looked
up in the optimizer that a parameter was given to, also while the parameter is frozen and has left its group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from egeria_lab.errors import InvalidSettingError


class OptimizerSet(Optimizer):
    """Several optimizers that step together.

    An optimizer without a gradient to work on, because all its parameters are frozen, is left out of a step. Under loss
    scaling all of them step or none: one overflow anywhere skips the step.

    Args:
        parts: two or more optimizers, each with parameters of its own.

    Raises:
        InvalidSettingError: when two of them hold the same parameter.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> both = OptimizerSet([torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.AdamW(model[1].parameters())])
        >>> [group["lr"] for group in both.param_groups], kind_of(both)
        ([0.1, 0.001], 'SGD + AdamW')
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        self._owner: dict[int, Optimizer] = {}
        for part in self.parts:
            for parameter in (p for group in part.param_groups for p in group["params"]):
                if id(parameter) in self._owner:
                    raise InvalidSettingError(
                        f"a parameter of shape {tuple(parameter.shape)} is in two of the optimizers, so it would be "
                        "moved twice a step; give each parameter to one of them."
                    )
                self._owner[id(parameter)] = part
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.state = _States(self.parts, self._owner)  # type: ignore[assignment]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Let each optimizer step that has a gradient."""
        for part in self.parts:
            if any(p.grad is not None for group in part.param_groups for p in group["params"]):
                part.step()
        return None

    def set_groups(self, part: int, groups: list[dict[str, Any]]) -> None:
        """Give one of the optimizers other parameter groups of the same parameters."""
        self.parts[part].param_groups[:] = groups
        self.param_groups[:] = [group for one in self.parts for group in one.param_groups]


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers: by parameter; texts get the number of their optimizer in front."""

    def __init__(self, parts: Sequence[Optimizer], owner: dict[int, Optimizer]) -> None:
        self._parts = parts
        self._owner = owner

    def _place(self, key: Any) -> tuple[Any, Any]:
        if isinstance(key, Tensor):
            if id(key) not in self._owner:
                raise KeyError(key)
            return self._owner[id(key)].state, key
        number, _, name = str(key).partition(".")
        if not number.isdigit() or int(number) >= len(self._parts):
            raise KeyError(key)
        return self._parts[int(number)].state, name

    def __getitem__(self, key: Any) -> Any:
        state, name = self._place(key)
        if name not in state:
            raise KeyError(key)  # a defaultdict would make an entry
        return state[name]

    def __setitem__(self, key: Any, value: Any) -> None:
        state, name = self._place(key)
        state[name] = value

    def __delitem__(self, key: Any) -> None:
        state, name = self._place(key)
        del state[name]

    def __iter__(self) -> Iterator[Any]:
        for number, part in enumerate(self._parts):
            for key in list(part.state):
                yield key if isinstance(key, Tensor) else f"{number}.{key}"

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that one is made of; itself where it is one.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> len(parts_of(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)))
        1
    """
    return optimizer.parts if isinstance(optimizer, OptimizerSet) else [optimizer]


def kind_of(optimizer: Optimizer) -> str:
    """The class of an optimizer, or the classes of several: what a saved state must be of to fit.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> kind_of(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))
        'SGD'
    """
    return " + ".join(type(part).__name__ for part in parts_of(optimizer))
