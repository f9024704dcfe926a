"""Generated data of any shape and size, learnable, and the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from egeria_lab.data.datasets import ArrayDataset, Data
from egeria_lab.errors import require

SIGNAL = 4.0  # length of a class pattern, where the noise has standard deviation 1 in every direction


def synthetic(
    *,
    num_samples: int = 2000,
    num_valid: int = 500,
    shape: Sequence[int] = (1, 16, 16),
    num_classes: int = 10,
    noise: float = 1.0,
    seed: int = 0,
) -> Data:
    """One random pattern a class plus Gaussian noise: any shape and size, for load, soak and speed tests.

    With many more values an input than classes, two patterns lie about 5.7 / `noise` standard deviations
    apart whatever the shape, so that `noise` sets the best accuracy possible;
    larger inputs take longer to learn.
    """
    for field, value in (
        ("num_samples", num_samples),
        ("num_valid", num_valid),
        ("num_classes", num_classes),
    ):
        require(isinstance(value, int) and value >= 1, "synthetic", field, value, "a whole number >= 1")
    sizes = tuple(shape)
    whole = bool(sizes) and all(isinstance(size, int) and size >= 1 for size in sizes)
    require(whole, "synthetic", "shape", shape, "one or more whole numbers >= 1, such as (3, 32, 32)")
    require(0 <= noise < float("inf"), "synthetic", "noise", noise, "a finite number >= 0")
    require(isinstance(seed, int) and seed >= 0, "synthetic", "seed", seed, "a whole number >= 0")
    patterns = _patterns(num_classes, sizes, _generator(seed, stream=0))
    return Data(
        name="synthetic",
        train=_noisy(patterns, num_samples, noise, _generator(seed, stream=1)),
        valid=_noisy(patterns, num_valid, noise, _generator(seed, stream=2)),
        num_classes=num_classes,
        input_shape=sizes,
        source="Generated: one pattern a class plus Gaussian noise",
        licence="none needed",
    )


def _patterns(num_classes: int, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One pattern a class, each of length `SIGNAL`; in images smooth, so that convolutions see it."""
    if len(sizes) == 3:
        channels, height, width = sizes
        coarse = torch.randn(num_classes, channels, min(height, 4), min(width, 4), generator=generator)
        patterns = interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    else:
        patterns = torch.randn(num_classes, *sizes, generator=generator)
    lengths = torch.linalg.vector_norm(patterns.flatten(1), dim=1).reshape(-1, *[1] * len(sizes))
    scaled: Tensor = SIGNAL * patterns / lengths
    return scaled


def _noisy(patterns: Tensor, num_samples: int, noise: float, generator: torch.Generator) -> ArrayDataset:
    num_classes = len(patterns)
    targets = torch.arange(num_samples) % num_classes  # balanced, then shuffled
    targets = targets[torch.randperm(num_samples, generator=generator)]
    inputs = torch.randn(num_samples, *patterns.shape[1:], generator=generator).mul_(noise)
    return ArrayDataset(inputs.add_(patterns[targets]), targets)


def _generator(seed: int, stream: int = 0) -> torch.Generator:
    """A generator of our own; different streams of one seed do not overlap."""
    return torch.Generator().manual_seed(4 * seed + stream)
