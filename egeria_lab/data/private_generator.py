"""Draw from the global generators without anybody noticing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class private_generator:  # noqa: N801 - used like a function
    """Seed the global generators (torch, NumPy, random) for a block and give them back untouched.

    Generators in `own` (of a sampler) are treated alike.

    Example:
        >>> state = torch.get_rng_state()
        >>> with private_generator(7):
        ...     drawn = torch.rand(1)
        >>> torch.equal(torch.get_rng_state(), state)
        True
    """

    def __init__(self, seed: int, own: Sequence[Any] = ()) -> None:
        self._seed = seed
        distinct = {id(generator): generator for generator in own if isinstance(generator, torch.Generator)}
        # torch.manual_seed would seed every accelerator's generator as well.
        self._generators = [torch.default_generator, *distinct.values()]

    def __enter__(self) -> None:
        self._states = [generator.get_state() for generator in self._generators]
        self._others = random.getstate(), np.random.get_state()
        for generator in self._generators:
            generator.manual_seed(self._seed)
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)

    def __exit__(self, *error: Any) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        random.setstate(self._others[0])
        np.random.set_state(self._others[1])
