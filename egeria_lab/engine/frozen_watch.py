"""Find out whether an optimizer leaves frozen weights alone, and put them back where it does not.

A frozen parameter has left its group, and torch's own optimizers look nowhere else. Others may keep a list of their
own: they move weights without a gradient (decay, momentum), or fail for want of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria_lab.engine.optimizer_set import kind_of, parts_of
from egeria_lab.errors import TrainingError


class FrozenWatch:
    """Steps an optimizer; the first step after each freeze is looked at, unless the optimizer is one of torch's own.

    Args:
        optimizer: the optimizer.
        parameters: those of the model.

    Attributes:
        moves_frozen: it was seen to move a frozen weight; frozen weights are put back after each step since.
        tell: called once with a sentence when that is seen.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> FrozenWatch(torch.optim.SGD(layer.parameters(), lr=0.1), list(layer.parameters())).moves_frozen
        False
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.parameters = list(parameters)
        self.moves_frozen = False
        self.tell: Callable[[str], None] = lambda message: None
        self._known = all(type(part).__module__.startswith("torch.optim") for part in parts_of(optimizer))
        self._seen: tuple[int, ...] = ()

    def step(self, make: Callable[[], object]) -> None:
        """Let the optimizer step by calling `make`.

        Raises:
            TrainingError: when it fails for want of a gradient; every weight is then what it was.
        """
        frozen = [] if self._known else [p for p in self.parameters if not p.requires_grad]
        key = tuple(id(p) for p in frozen)
        new, self._seen = key != self._seen and bool(frozen), key
        if not new and not (self.moves_frozen and frozen):
            make()
            return
        watched = self.parameters if new else frozen
        before = [p.detach().clone() for p in watched]
        try:
            make()
        except Exception as error:
            _put_back(watched, before)
            self._seen = ()
            raise TrainingError(self._cannot(error)) from error
        moved = [(p, old) for p, old in zip(watched, before, strict=True) if not p.requires_grad and _differ(p, old)]
        _put_back([p for p, _ in moved], [old for _, old in moved])
        if moved and not self.moves_frozen:
            self.moves_frozen = True
            self.tell(
                f"{kind_of(self.optimizer)} moves weights that are frozen and have left its groups, because it keeps a "
                "list of its own: they are put back after each step."
            )

    def state_dict(self) -> dict[str, Any]:
        """What was found out, as a plain value."""
        return {"moves_frozen": self.moves_frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with it; the next step with something frozen is looked at again."""
        self.moves_frozen, self._seen = bool(state["moves_frozen"]), ()

    def _cannot(self, error: Exception) -> str:
        return (
            f"{kind_of(self.optimizer)} cannot train with frozen layers: it failed on parameters that have left its "
            f"groups ({type(error).__name__}: {error}). The step was not applied; thaw what is frozen, or choose an "
            "optimizer that goes by its param_groups."
        )


def _differ(now: Tensor, before: Tensor) -> bool:
    return not torch.equal(now, before)


@torch.no_grad()
def _put_back(parameters: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for parameter, old in zip(parameters, before, strict=True):
        parameter.copy_(old)
