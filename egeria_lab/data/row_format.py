"""The tensors of a batch as rows of bytes and back, bit for bit or smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Rows = npt.NDArray[np.uint8]
"""Shape ``(b, bytes of a row)``."""

DTYPES = {
    "float32": None,  # as computed, bit for bit
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
_ALIGN = 16
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class LeafFormat:
    """How one tensor of a row is laid out, in memory and in the file.

    Attributes:
        shape: of one sample.
        dtype: as computed.
        order: dimensions of the batched tensor from outermost to innermost in memory, so that a restored
            tensor has the strides that later kernels saw before (channels-last, transposed).
        stored: dtype in the file.
        offset: first byte within the row.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    stored: torch.dtype
    offset: int

    @property
    def values(self) -> int:
        """Numbers per sample."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def num_bytes(self) -> int:
        """Bytes per sample in the file, the scale of int8 included."""
        size = self.values * self.stored.itemsize
        return size + (-size % _SCALE_BYTES) + _SCALE_BYTES if self.scaled else size

    @property
    def scaled(self) -> bool:
        """True when a scale per sample is kept."""
        return self.stored is torch.int8 and self.dtype is not torch.int8


class RowFormat:
    """Turns the tensors of a batch into rows of bytes and back.

    Args:
        tensors: one batch, each tensor of shape ``(b, ...)``.
        dtype: ``"float32"`` keeps every tensor as it is; the others shrink floating point tensors.

    Example:
        >>> rows = RowFormat([torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)])
        >>> rows.num_bytes
        32
        >>> [x.tolist() for x in rows.decode(rows.encode([torch.ones(1, 3), torch.tensor([7])]))]
        [[[1.0, 1.0, 1.0]], [7]]
    """

    def __init__(self, tensors: Sequence[Tensor], dtype: str = "float32") -> None:
        self.leaves: list[LeafFormat] = []
        offset = 0
        for tensor in tensors:
            stored = DTYPES[dtype] if tensor.is_floating_point() else None
            leaf = LeafFormat(tuple(tensor.shape[1:]), tensor.dtype, _order(tensor), stored or tensor.dtype, offset)
            self.leaves.append(leaf)
            offset += leaf.num_bytes + (-leaf.num_bytes % _ALIGN)
        self.num_bytes = self.leaves[0].num_bytes if len(self.leaves) == 1 else offset

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """True when these tensors have the shapes, dtypes and memory order that the rows were made for."""
        return len(tensors) == len(self.leaves) and all(
            tuple(x.shape[1:]) == leaf.shape
            and x.dtype == leaf.dtype
            and (len(x) == 1 or _order(x) == leaf.order)  # one sample has no order of its own
            for x, leaf in zip(tensors, self.leaves, strict=True)
        )

    def encode(self, tensors: Sequence[Tensor]) -> Rows:
        """The rows as uint8 of shape ``(b, num_bytes)``."""
        rows = len(tensors[0])
        parts = [_encoded(x.detach().cpu(), leaf) for x, leaf in zip(tensors, self.leaves, strict=True)]
        if len(parts) == 1:
            return parts[0].numpy()
        packed = torch.zeros(rows, self.num_bytes, dtype=torch.uint8)
        for part, leaf in zip(parts, self.leaves, strict=True):
            packed[:, leaf.offset : leaf.offset + leaf.num_bytes] = part
        return packed.numpy()

    def decode(self, packed: Rows) -> list[Tensor]:
        """The tensors of rows from `encode`; a single exact tensor shares memory with `packed`."""
        return [self._decoded(torch.from_numpy(packed), leaf) for leaf in self.leaves]

    def _decoded(self, packed: Tensor, leaf: LeafFormat) -> Tensor:
        part = packed[:, leaf.offset : leaf.offset + leaf.num_bytes]
        if len(self.leaves) > 1:
            part = part.contiguous()
        size = leaf.values * leaf.stored.itemsize
        flat = part[:, :size].view(leaf.stored)
        if leaf.scaled:
            flat = flat.to(torch.float32) * part[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
        return _in_order(flat.to(leaf.dtype), leaf)


def round_trip(tensors: Sequence[Tensor], dtype: str = "float32") -> list[Tensor]:
    """The tensors as they would come back from the file, on their device.

    Example:
        >>> round_trip([torch.tensor([[1.0, 1.0001]])], "float16")
        [tensor([[1., 1.]])]
    """
    form = RowFormat(tensors, dtype)
    restored = form.decode(form.encode(tensors))
    return [x.to(like.device) for x, like in zip(restored, tensors, strict=True)]


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the largest stride to the smallest.

    Between equal strides the larger dimension lies outside: so one of size 1 gets back the stride that it had,
    which is what tells kernels apart that prefer channels-last.
    """
    strides: tuple[int, ...] = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], -tensor.shape[d], d)))


def _encoded(tensor: Tensor, leaf: LeafFormat) -> Tensor:
    inner = [d for d in leaf.order if d != 0]
    flat = tensor.permute(0, *inner).reshape(len(tensor), leaf.values)
    if not leaf.scaled:
        return _as_bytes(flat.to(leaf.stored).contiguous())
    flat = flat.to(torch.float32)
    largest = flat.abs().amax(1, keepdim=True) if leaf.values else flat.new_zeros(len(flat), 1)
    scale = largest / 127
    # A scale of 0 means a row of zeros; NaN and infinity come back as NaN, as they should be seen.
    whole = torch.where(scale > 0, flat / scale, 0).round().to(torch.int8)
    gap = -whole.shape[1] % _SCALE_BYTES
    padding = torch.zeros(len(flat), gap, dtype=torch.uint8)
    return torch.cat([_as_bytes(whole), padding, _as_bytes(scale)], 1)


def _as_bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8) if flat.shape[1] else flat.new_zeros(len(flat), 0, dtype=torch.uint8)


def _in_order(flat: Tensor, leaf: LeafFormat) -> Tensor:
    """Flat rows as a tensor with the memory order of the one they were taken from."""
    inner = [d for d in leaf.order if d != 0]
    ordered = flat.reshape(len(flat), *(leaf.shape[d - 1] for d in inner))
    back = [0, *(1 + inner.index(d) for d in range(1, len(leaf.order)))]
    tensor = ordered.permute(back)
    if leaf.order[0] == 0:
        return tensor
    shape = (len(flat), *leaf.shape)
    outside_in = torch.empty([shape[d] for d in leaf.order], dtype=flat.dtype)
    place = outside_in.permute([leaf.order.index(d) for d in range(len(leaf.order))])
    return place.copy_(tensor)
