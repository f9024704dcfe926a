"""What a mask may keep: a weight cut into units that live and die together.

A scheme is bound to one shape, holds no random state of its own, and leaves counting and choosing to others.
Weights come with the output dimension first and the input dimension second (`SparseWeight` sees to that).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Generator, Tensor

from egeria_lab.errors import InvalidSettingError


class Scheme(ABC):
    """One weight cut into units.

    Attributes:
        shape: shape of the weight, output dimension first.
        num_units: how many units it has.
        unit_size: weights in one live unit.
        max_density: the highest density a mask of this scheme can have.
        group: units that share a quota, or None; `quota` of each group are live in a mask at its target.
    """

    unit_size = 1
    max_density = 1.0
    group: int | None = None
    quota = 0

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.num_units = math.prod(self.shape)

    @abstractmethod
    def scores(self, values: Tensor) -> Tensor:
        """Sum of each unit's values: weight shape → ``(num_units,)``; of the best pattern where there are several."""

    @abstractmethod
    def units(self, mask: Tensor) -> Tensor:
        """Which units are live: bool, weight shape → ``(num_units,)``."""

    @abstractmethod
    def weights(self, units: Tensor) -> Tensor:
        """The weights of the given units: bool, ``(num_units,)`` → weight shape; not for new pattern kernels."""

    def new(self, units: Tensor, values: Tensor | None, generator: Generator) -> Tensor:
        """The weights that come to life with new units: bool, ``(num_units,)`` → weight shape.

        Args:
            units: the units, bool.
            values: decide the pattern where there are several; None for a random one.
            generator: for random patterns and ties.
        """
        return self.weights(units)


class Unstructured(Scheme):
    """Every weight for itself.

    Example:
        >>> Unstructured((2, 3)).num_units
        6
    """

    def scores(self, values: Tensor) -> Tensor:
        return values.reshape(-1)

    def units(self, mask: Tensor) -> Tensor:
        return mask.reshape(-1)

    def weights(self, units: Tensor) -> Tensor:
        return units.reshape(self.shape)


class Block(Scheme):
    """`rows` consecutive outputs × one column (one input channel at one kernel position).

    Raises:
        InvalidSettingError: when the outputs do not divide into blocks.

    Source: MEST (2021, arXiv 2110.14032), section 4.1.

    Example:
        >>> block = Block((8, 3), name="fc", rows=4)
        >>> block.num_units, block.unit_size
        (6, 4)
    """

    def __init__(self, shape: Sequence[int], *, name: str, rows: int) -> None:
        super().__init__(shape)
        if self.shape[0] % rows:
            raise InvalidSettingError(
                f"{name} has {self.shape[0]} output channels, and the block scheme needs a multiple of "
                f"block_size={rows}; keep the layer dense (dense=({name!r},)), change its channels, or choose "
                "another block_size or scheme."
            )
        self.unit_size = rows
        self.num_units //= rows

    def _blocks(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.shape[0] // self.unit_size, self.unit_size, -1)

    def scores(self, values: Tensor) -> Tensor:
        return self._blocks(values).sum(1).reshape(-1)

    def units(self, mask: Tensor) -> Tensor:
        return self._blocks(mask).any(1).reshape(-1)

    def weights(self, units: Tensor) -> Tensor:
        rows = units.reshape(self.shape[0] // self.unit_size, 1, -1)
        return rows.expand(-1, self.unit_size, -1).reshape(self.shape)
