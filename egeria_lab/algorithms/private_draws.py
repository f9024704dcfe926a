"""Random numbers for a model that runs beside training, from a generator of its own.

torch's default generator is shared by all threads: a model that draws on a second thread (noise or dropout
that is on in eval mode) would change the training run, and seeding it there would too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from egeria_lab.errors import LayerError

_LIKE = {"rand_like": torch.rand, "randn_like": torch.randn}


class PrivateDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside the block, and on this thread alone, CPU draws come from a private generator.

    Args:
        seed: seed of the private generator, >= 0.

    Attributes:
        used: True once something was drawn.

    Example:
        >>> before = torch.get_rng_state()
        >>> with PrivateDraws(0) as draws:
        ...     first = torch.rand(2)
        >>> with PrivateDraws(0):
        ...     second = torch.rand(2)
        >>> torch.equal(first, second), draws.used, torch.equal(before, torch.get_rng_state())
        (True, True, True)
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used = False
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or _without_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        self.used = True
        name = func._schema.name.partition("::")[2]
        if name in _LIKE:
            like = args[0]
            dtype = kwargs.get("dtype") or like.dtype
            return _LIKE[name](like.shape, generator=self._generator, dtype=dtype)
        return self._with_generator(func, args, kwargs)

    def _with_generator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        wanted = [*_arguments(func)]
        if "generator" in wanted:
            return func(*args, **{**kwargs, "generator": kwargs.get("generator") or self._generator})
        packet = func.overloadpacket
        for overload in (getattr(packet, name) for name in packet.overloads()):
            names = _arguments(overload)
            if "generator" in names and [name for name in names if name != "generator"] == wanted:
                return overload(*args, **kwargs, generator=self._generator)
        raise LayerError(
            f"the model draws random numbers in eval mode by {func}, which cannot be given a generator of "
            "its own, so it cannot run beside training; use reference='fp32'."
        )


def _without_dropout(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """True for fused attention, which counts as an op that draws, when its dropout is off."""
    names = _arguments(func)
    if "dropout_p" not in names:
        return False
    position = names.index("dropout_p")
    given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(given == 0)


def _arguments(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]
