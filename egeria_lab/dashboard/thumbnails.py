"""Training samples as small pictures, without an image library: arrays in, PNG out."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_PIXELS = 40
"""No side of a thumbnail is longer; larger images are thinned by leaving out rows and columns."""

LEAST_PIXELS, LARGEST_SIDE = 4, 4096


def image_of(sample: Any) -> NDArray[np.float32] | None:
    """The picture in a sample, or None when it holds none.

    Args:
        sample: an input, or a tuple that begins with one: shape ``(H, W)``, ``(1 or 3, H, W)`` or ``(H, W, 3)``.

    Returns:
        Shape ``(H, W)`` or ``(H, W, 3)``, float32, any range.

    Example:
        >>> image_of((np.zeros((1, 8, 8)), 3)).shape, image_of((np.zeros(5), 3)) is None
        ((8, 8), True)
    """
    first = sample[0] if isinstance(sample, (tuple, list)) and sample else sample
    try:
        array = np.asarray(first, dtype=np.float32)
    except (TypeError, ValueError):
        return None
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] != 3):
        return None
    inside = all(LEAST_PIXELS <= side <= LARGEST_SIDE for side in array.shape[:2])
    return array if inside else None


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file, grey or RGB, 8 bits a channel.

    Args:
        pixels: shape ``(H, W)`` or ``(H, W, 3)``.

    Source: Portable Network Graphics specification, W3C: signature, IHDR, IDAT, IEND, filter type 0.

    Example:
        >>> png(np.zeros((4, 4), np.uint8))[:4]
        b'\\x89PNG'
    """
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, -1)
    raw = np.hstack([np.zeros((height, 1), np.uint8), rows]).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if pixels.ndim == 2 else 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def thumbnail(image: NDArray[np.float32], low: float, high: float) -> str:
    """A small picture as a data address for ``<img src>``.

    Args:
        image: from `image_of`.
        low: value that becomes black.
        high: value that becomes white; the same for all pictures that stand side by side.

    Example:
        >>> thumbnail(np.zeros((8, 8), np.float32), 0, 1)[:22]
        'data:image/png;base64,'
    """
    step = max(1, -(-max(image.shape[:2]) // MOST_PIXELS))
    small = image[::step, ::step]
    scaled = np.nan_to_num((small - low) / max(high - low, 1e-12)).clip(0, 1) * 255
    data = png(np.ascontiguousarray(scaled.round().astype(np.uint8)))
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")
