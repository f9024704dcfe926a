"""Schemes with a structure inside: 3 × 3 kernels of eight patterns, and N of M inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from egeria_lab.algorithms.sparse.schemes import Scheme
from egeria_lab.errors import InvalidSettingError

PATTERNS = torch.tensor(
    [
        [1, 1, 0, 1, 1, 0, 0, 0, 0],  # the four squares of 2 x 2 that hold the centre
        [0, 1, 1, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 0, 1, 1],
        [0, 1, 0, 1, 1, 1, 0, 0, 0],  # the centre with three of its four neighbours
        [0, 1, 0, 1, 1, 0, 0, 1, 0],
        [0, 1, 0, 0, 1, 1, 0, 1, 0],
        [0, 0, 0, 1, 1, 1, 0, 1, 0],
    ],
    dtype=torch.bool,
)
"""The eight patterns of a 3 x 3 kernel, each with four live positions; closed under turning and mirroring."""


class Pattern(Scheme):
    """Each live 3 × 3 kernel keeps four of nine positions in one of `PATTERNS`; other kernels are dropped whole.

    In a layer with kernels of another size a kernel is kept or dropped as it is: for 1 × 1 convolutions and
    linear layers, whose kernels are single weights, that is the unstructured scheme. A kernel's pattern is
    chosen when it comes to life and stays until it is dropped.

    Source: MEST (2021), section 4.1, and the pattern-based pruning it builds on; the set of eight is ours.

    Example:
        >>> pattern = Pattern((2, 5, 3, 3))
        >>> pattern.num_units, pattern.unit_size, round(pattern.max_density, 4)
        (10, 4, 0.4444)
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(shape)
        self.patterned = self.shape[2:] == (3, 3)
        self.kernel = math.prod(self.shape[2:])
        self.num_units = self.shape[0] * self.shape[1]
        self.unit_size = 4 if self.patterned else self.kernel
        self.max_density = self.unit_size / self.kernel

    def _by_pattern(self, values: Tensor) -> Tensor:
        return values.reshape(-1, self.kernel) @ PATTERNS.to(values).T  # (kernels, 8)

    def scores(self, values: Tensor) -> Tensor:
        if self.patterned:
            return self._by_pattern(values).amax(1)
        return values.reshape(-1, self.kernel).sum(1)

    def units(self, mask: Tensor) -> Tensor:
        return mask.reshape(-1, self.kernel).any(1)

    def weights(self, units: Tensor) -> Tensor:
        return units[:, None].expand(-1, self.kernel).reshape(self.shape)

    def new(self, units: Tensor, values: Tensor | None, generator: Generator) -> Tensor:
        if not self.patterned:
            return self.weights(units)
        if values is None:
            chosen = torch.randint(len(PATTERNS), (self.num_units,), generator=generator).to(units.device)
        else:
            chosen = self._by_pattern(values).argmax(1)
        return (PATTERNS.to(units.device)[chosen] & units[:, None]).reshape(self.shape)


class NOfM(Scheme):
    """N of M consecutive inputs, for each output and kernel position.

    Over budget (under a soft memory bound) some groups hold more than N; each pruning brings them back.

    Raises:
        InvalidSettingError: when the inputs do not divide into groups.

    Source: Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021 (2:4).

    Example:
        >>> scheme = NOfM((8, 16, 3, 3), name="conv", quota=2, group=4)
        >>> scheme.quota, scheme.group
        (2, 4)
    """

    def __init__(self, shape: Sequence[int], *, name: str, quota: int, group: int) -> None:
        super().__init__(shape)
        if self.shape[1] % group:
            raise InvalidSettingError(
                f"{name} has {self.shape[1]} input channels, and the scheme {quota}:{group} needs a multiple of "
                f"{group}; keep the layer dense (dense=({name!r},)), change its channels, or choose another scheme."
            )
        self.quota, self.group = quota, group
        self._inputs_last = (self.shape[0], *self.shape[2:], self.shape[1])

    def scores(self, values: Tensor) -> Tensor:
        return values.movedim(1, -1).reshape(-1)

    def units(self, mask: Tensor) -> Tensor:
        return mask.movedim(1, -1).reshape(-1)

    def weights(self, units: Tensor) -> Tensor:
        return units.reshape(self._inputs_last).movedim(-1, 1)
