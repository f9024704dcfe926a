"""Augmentations that can be replayed: pure functions of (seed, sample id, view), never of the global generator.

Each sample draws its augmentation from a finite set of `views`, so that what was computed for a sample under
a view can be stored and found again. All random numbers come from a counter-based hash in integer arithmetic
(the mixing steps of SplitMix64, Steele et al. 2014), and pixels only move, vanish or get one addition: a
sample comes out bit for bit the same in whatever batch it stands and with any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from egeria_lab.errors import DataError, require
from egeria_lab.tables import ShownAsTable

_QUANTILE_BITS = 16
# One stream of random numbers for each purpose; a new purpose gets a new number.
_VIEW, _SHIFT_Y, _SHIFT_X, _FLIP, _HOLE_Y, _HOLE_X, _NOISE = range(1, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Augment(ShownAsTable):
    """Pad and crop, horizontal flip, cutout and Gaussian noise, for images ``(batch, channels, h, w)``.

    Args:
        crop_padding: pixels of zeros around the image before a crop of the old size is taken, >= 0.
        flip: mirror left and right with probability 1/2.
        cutout: side of a square of zeros at a random place (DeVries & Taylor 2017), 0 for none; it may hang
            over the border.
        noise: standard deviation of noise added to each value, >= 0; works for inputs of any shape.
        views: number of augmentations a sample draws from, >= 1. More views augment more, fewer views are
            found in the cache sooner: after `e` epochs a draw was seen before with probability
            ``1 - (1 - 1/views)**e``.
        seed: decides everything.

    Raises:
        InvalidSettingError: for a value out of range.

    Example:
        >>> augment = Augment(crop_padding=2, flip=True, views=4)
        >>> images, ids = torch.randn(8, 1, 6, 6), torch.arange(8)
        >>> views = augment.view_of(3, ids)
        >>> alone = augment(images[5:6], ids[5:6], views[5:6])
        >>> torch.equal(augment(images, ids, views)[5:6], alone)
        True
    """

    crop_padding: int = 0
    flip: bool = False
    cutout: int = 0
    noise: float = 0.0
    views: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for field, low in (("crop_padding", 0), ("cutout", 0), ("views", 1), ("seed", 0)):
            given = getattr(self, field)
            whole = isinstance(given, int) and not isinstance(given, bool) and given >= low
            require(whole, owner, field, given, f"a whole number >= {low}")
        require(isinstance(self.flip, bool), owner, "flip", self.flip, "True or False")
        number = isinstance(self.noise, (int, float)) and not isinstance(self.noise, bool)
        require(number and 0 <= self.noise < float("inf"), owner, "noise", self.noise, "a number >= 0")

    @property
    def key(self) -> str:
        """What the transform is, in words that change whenever its results would."""
        return f"1:{self!r}"

    def view_of(self, epoch: int, ids: Tensor) -> Tensor:
        """The view that each sample gets in an epoch, drawn uniformly.

        Args:
            epoch: number of the epoch, >= 0.
            ids: int64 sample ids, shape ``(b,)``.

        Returns:
            int64, shape ``(b,)``, each in ``[0, views)``.

        Example:
            >>> Augment(views=4).view_of(0, torch.arange(6))
            tensor([...])
        """
        return _below(_hash(self.seed, _VIEW, ids.cpu(), torch.tensor(epoch)), self.views)

    def __call__(self, inputs: Tensor, ids: Tensor, views: Tensor) -> Tensor:
        """The augmented inputs.

        Args:
            inputs: shape ``(b, channels, h, w)``; any shape ``(b, ...)`` when only noise is added.
            ids: int64 sample ids, shape ``(b,)``.
            views: int64, shape ``(b,)``, as from `view_of`.

        Returns:
            A tensor like `inputs`; `inputs` itself when there is nothing to do.

        Raises:
            DataError: when the inputs are no images, or integers that noise cannot be added to.
        """
        if len(ids) != len(inputs) or len(views) != len(inputs):
            raise DataError(f"Augment got {len(inputs)} inputs, {len(ids)} ids and {len(views)} views; give one each.")
        base = _mixed(_hash(self.seed, 0, ids.cpu()) ^ views.cpu())
        if self.crop_padding or self.flip or self.cutout:
            inputs = self._moved(inputs, base)
        if self.noise:
            inputs = self._noisy(inputs, base)
        return inputs

    def _moved(self, images: Tensor, base: Tensor) -> Tensor:
        """Crop, flip and cutout in one gather: for each new pixel the old one it comes from."""
        if images.dim() != 4:
            raise DataError(
                f"Augment crops, flips and cuts images (batch, channels, h, w); got shape "
                f"{tuple(images.shape)}. For other inputs use noise alone, or your own Replayable(...)."
            )
        batch, channels, height, width = images.shape
        rows, columns = torch.arange(height).expand(batch, -1), torch.arange(width).expand(batch, -1)
        hole = torch.zeros(batch, height, width, dtype=torch.bool)
        if self.cutout:
            hole = (
                self._in_hole(rows, base, _HOLE_Y, height)[:, :, None]
                & self._in_hole(columns, base, _HOLE_X, width)[:, None, :]
            )
        if self.flip:
            mirrored = _below(_stream(base, _FLIP), 2).bool()[:, None]
            columns = torch.where(mirrored, width - 1 - columns, columns)
        if self.crop_padding:
            span = 2 * self.crop_padding + 1
            rows = rows + (_below(_stream(base, _SHIFT_Y), span) - self.crop_padding)[:, None]
            columns = columns + (_below(_stream(base, _SHIFT_X), span) - self.crop_padding)[:, None]
        outside = ((rows < 0) | (rows >= height))[:, :, None] | ((columns < 0) | (columns >= width))[:, None]
        source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
        source = source.reshape(batch, 1, -1).expand(-1, channels, -1).to(images.device)
        moved = images.reshape(batch, channels, -1).gather(2, source).view(images.shape)
        return moved.masked_fill_((outside | hole)[:, None].to(images.device), 0)

    def _in_hole(self, positions: Tensor, base: Tensor, stream: int, size: int) -> Tensor:
        start = _below(_stream(base, stream), size)[:, None] - self.cutout // 2
        return (positions >= start) & (positions < start + self.cutout)

    def _noisy(self, inputs: Tensor, base: Tensor) -> Tensor:
        if not inputs.is_floating_point():
            raise DataError(f"Augment adds noise to floating point inputs, got {inputs.dtype}; convert them.")
        values = inputs[0].numel() if len(inputs) else 0
        counters = torch.arange((values + 3) // 4) * _GOLDEN
        bits = _mixed(_stream(base, _NOISE)[:, None] + counters)
        # Four indices of 16 bits lie in each 64-bit word.
        quarters = torch.stack([(bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48)], dim=-1)
        index = quarters.view(len(inputs), -1)[:, :values].to(inputs.device)
        # Scaled before the look-up: one addition a value rounds alike in every position of a vector.
        table = (_normal_quantiles() * self.noise).to(inputs.device, inputs.dtype)
        return inputs + table[index].view(inputs.shape)


class Replayable:
    """Your own augmentation, declared to be a pure function of inputs, sample ids and views.

    Args:
        function: ``function(inputs, ids, views) -> inputs``; it must give the same result for a sample
            whenever id and view are the same.
        views: number of views a sample draws from, >= 1; 1 for a transform without randomness.
        key: what the transform is, in words that change whenever its results would; default: its name.
        seed: decides which view a sample gets in an epoch.

    Example:
        >>> brighter = Replayable(lambda x, ids, views: x + views[:, None], views=3, key="brighter")
        >>> brighter(torch.zeros(2, 1), torch.tensor([0, 1]), torch.tensor([0, 2])).tolist()
        [[0.0], [2.0]]
    """

    def __init__(
        self,
        function: Callable[[Any, Tensor, Tensor], Any],
        *,
        views: int = 1,
        key: str | None = None,
        seed: int = 0,
    ) -> None:
        require(callable(function), "Replayable", "function", function, "a function (inputs, ids, views)")
        self._draws = Augment(views=views, seed=seed)
        self.function = function
        self.views = views
        self.key = key if key is not None else f"{_name(function)}, {views} views, seed {seed}"

    def view_of(self, epoch: int, ids: Tensor) -> Tensor:
        """As `Augment.view_of`."""
        return self._draws.view_of(epoch, ids)

    def __call__(self, inputs: Any, ids: Tensor, views: Tensor) -> Any:
        """The function's result."""
        return self.function(inputs, ids, views)


_GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number
_MIX_1, _MIX_2 = -4658895280553007687, -7723592293110705685


def _mixed(x: Tensor) -> Tensor:
    """Scramble the bits of int64 numbers; each step can be undone, so that no two inputs meet."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1  # the mask makes the signed shift a logical one
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _hash(seed: int, stream: int, *parts: Tensor) -> Tensor:
    """int64 random bits, a pure function of the arguments."""
    state = _mixed(torch.tensor(seed % 2**63) + _wrapped(_GOLDEN * (stream + 1)))
    for part in parts:
        state = _mixed((state ^ part.to(torch.int64)) + _GOLDEN)
    return state


def _stream(base: Tensor, stream: int) -> Tensor:
    return _mixed(base + _wrapped(stream * _MIX_1))


def _wrapped(number: int) -> int:
    """The number modulo 2^64, as a signed one."""
    return (number + 2**63) % 2**64 - 2**63


def _below(bits: Tensor, limit: int) -> Tensor:
    """Uniform whole numbers in [0, limit): the upper 31 bits, scaled (bias below limit / 2^31)."""
    return (((bits >> 33) & 0x7FFFFFFF) * limit) >> 31


@lru_cache(maxsize=1)
def _normal_quantiles() -> Tensor:
    """The standard normal distribution as 2^16 equally likely float64 values (extremes ±4.3).

    A table, because logarithm and cosine are not rounded alike in every position of a vector register.
    """
    count = 1 << _QUANTILE_BITS
    normal = NormalDist()
    upper = [normal.inv_cdf((i + 0.5) / count) for i in range(count // 2, count)]
    half = torch.tensor(upper, dtype=torch.float64)
    return torch.cat([-half.flip(0), half])


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)
