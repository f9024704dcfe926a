"""Attributions as pictures over an image, and as bars where there is no image."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from egeria_lab.dashboard.thumbnails import png

FOR, AGAINST = (230, 159, 0), (86, 180, 233)
"""Okabe and Ito's orange and sky blue: what speaks for the class and what speaks against it."""

LONGEST_SIDE = 64
MOST_BARS = 12
STRONGEST = 0.9
"""Opacity of the colour where the attribution is greatest."""

Image = NDArray[np.float32]


def heat_over(image: Image, values: Image) -> str:
    """An image in grey with its attributions over it, as a data address for ``<img src>``.

    Args:
        image: shape ``(H, W)`` or ``(H, W, 3)``, any range.
        values: attributions, shape ``(h, w)``; spread over the image when smaller. Their sign is the colour,
            their size against the greatest one the opacity.

    Example:
        >>> heat_over(np.zeros((8, 8), np.float32), np.ones((2, 2), np.float32))[:22]
        'data:image/png;base64,'
    """
    step = max(1, -(-max(image.shape[:2]) // LONGEST_SIDE))
    grey = (image if image.ndim == 2 else image.mean(axis=2))[::step, ::step]
    low, high = float(np.nanmin(grey)), float(np.nanmax(grey))
    shade = 40 + 190 * (np.nan_to_num(grey) - low) / max(high - low, 1e-12)  # between, so that both colours show
    spread = _spread(np.nan_to_num(values), grey.shape)
    opacity = STRONGEST * np.abs(spread) / max(float(np.abs(spread).max()), 1e-12)
    colour = np.where(spread[..., None] >= 0, np.array(FOR, np.float32), np.array(AGAINST, np.float32))
    mixed = shade[..., None] * (1 - opacity[..., None]) + colour * opacity[..., None]
    data = png(np.ascontiguousarray(mixed.round().clip(0, 255).astype(np.uint8)))
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


def _spread(values: Image, shape: tuple[int, ...]) -> Image:
    """The nearest value at each place of the larger (or smaller) picture."""
    rows = (np.arange(shape[0]) * values.shape[0]) // shape[0]
    columns = (np.arange(shape[1]) * values.shape[1]) // shape[1]
    spread: Image = values[rows][:, columns]
    return spread


def bars(values: NDArray[np.float32], names: Sequence[str]) -> list[tuple[str, float]]:
    """The greatest attributions by name: in their own order when all of them fit, else the greatest first.

    Args:
        values: shape ``(n,)``.
        names: name of each.

    Example:
        >>> bars(np.array([1.0, -3.0], np.float32), ["a", "b"])
        [('a', 1.0), ('b', -3.0)]
    """
    order = np.arange(len(values)) if len(values) <= MOST_BARS else np.argsort(-np.abs(values))[:MOST_BARS]
    return [(names[int(i)], float(f"{float(values[i]):.4g}")) for i in order]
