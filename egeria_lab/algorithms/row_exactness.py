"""In batches of which size does a sample's result come out bit for bit the same?

A sample's activations are stored in one batch and used in another one, so a cache is exact only if the result
of a row depends neither on its position, nor on its neighbours, nor on the number of rows. Kernels keep the
first two promises nearly always and the third one often, but not always. Measured with torch 2.13 on an
AVX-512 CPU, against batches of 128:

==============================================  ==========================================================
convolution, batch norm in eval mode            all sizes equal but 1 (a 1-channel stem: 1 too)
attention, layer norm, linear on (b, length, d)  all sizes equal
linear on (b, d), one thread                    sizes of 16 and more equal, smaller ones differ
linear 784 → 256, two threads                   112 to 128 equal, 96 and fewer differ
tanh or silu on rows of odd length              position alone decides (vector body or remainder)
==============================================  ==========================================================

So nothing is assumed: every size is proved on a real batch before it is used, once. Missing rows are filled
up to the next proven size, and a batch of a size that differs (the rest of an epoch) does without the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Compute = Callable[[Tensor], list[Tensor]]
"""The tensors that the rows `index` (int64) of the batch at hand give, one row each in their first dimension."""

_STEPS = 8  # sizes tried for missing rows: eighths of the batch
CLOSE = 1e-2  # largest difference, relative to the largest value, where bit-equality is not asked for


class RowExactness:
    """Finds and remembers the batch sizes whose rows equal those of a reference size.

    Args:
        reference: the usual batch size, whose results are the standard.
        exact: ask for bit-equality; False only for a result that is about the same.

    Example:
        >>> x = torch.randn(32, 3)
        >>> rows = RowExactness(32)
        >>> rows.holds(8, lambda index: [x[index] * 2], available=32)
        True
        >>> rows.holds(8, lambda index: [x[index] - x[index].mean(0)], available=32)  # kept from before
        True
        >>> RowExactness(32).holds(32, lambda index: [x[index] - x[index].mean(0)], available=32)
        False
    """

    def __init__(self, reference: int, *, exact: bool = True) -> None:
        self.reference = reference
        self.exact = exact
        self._proven: dict[int, bool] = {}

    def holds(self, size: int, compute: Compute, available: int) -> bool:
        """True when rows computed `size` at a time equal those of the reference size.

        Args:
            size: number of rows, >= 1.
            compute: computes rows of the batch at hand; called up to three times when `size` is new.
            available: number of rows in the batch at hand.
        """
        if size not in self._proven:
            self._proven[size] = self._prove(size, compute, available)
        return self._proven[size]

    def size_for(self, missing: int, compute: Compute, available: int) -> int:
        """How many rows to compute when `missing` ones are needed: the smallest size that holds.

        At most `available`, which then means the whole batch as it is.
        """
        step = max(1, -(-self.reference // _STEPS))
        for size in range(-(-missing // step) * step, available, step):
            if self.holds(size, compute, available):
                return size
        return available

    def _prove(self, size: int, compute: Compute, available: int) -> bool:
        standard = compute(torch.arange(self.reference) % available)
        generator = torch.Generator().manual_seed(size)
        # Drawn with repetition: other positions, and other neighbours too.
        chosen = torch.randint(self.reference, (size,), generator=generator)
        found = compute(chosen % available)
        if size == self.reference:
            return self._alike(standard, chosen, found)
        in_order = torch.arange(size) % self.reference
        return self._alike(standard, chosen, found) and self._alike(standard, in_order, compute(in_order % available))

    def _alike(self, standard: list[Tensor], index: Tensor, found: list[Tensor]) -> bool:
        for whole, part in zip(standard, found, strict=True):
            expected = whole[index.to(whole.device)]
            if torch.equal(expected, part):
                continue
            if self.exact or not whole.is_floating_point():
                return False
            scale = float(expected.abs().max())
            if not float((expected - part).abs().max()) <= CLOSE * scale:
                return False
        return True
