"""Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747): the vendored part of it, and all of it from disk."""

from __future__ import annotations

import gzip
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from egeria_lab.data.datasets import ArrayDataset, Data
from egeria_lab.errors import DataError

FASHION_MEAN, FASHION_STD = 0.2860, 0.3530  # of the 60,000 training images, pixels scaled to [0, 1]
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
FASHION_SOURCE = "https://github.com/zalandoresearch/fashion-mnist"
FASHION_PACKAGE = "dataset-fashion-mnist"  # in Debian and Ubuntu


def fashion_mini() -> Data:
    """Fashion articles, 28x28 grey, 10 classes: 10,000 + 2,000 images of Fashion-MNIST, in this package."""
    with np.load(Path(__file__).with_name("fashion_mini.npz")) as arrays:
        train = _fashion_split(arrays["train_images"], arrays["train_labels"])
        valid = _fashion_split(arrays["valid_images"], arrays["valid_labels"])
    return _fashion_data("fashion-mini", train, valid)


def fashion(*, folder: str | Path | None = None) -> Data:
    """Fashion articles, 28x28 grey, 10 classes: 60,000 + 10,000 images of Fashion-MNIST, from your disk."""
    place = _fashion_folder(folder)
    train, valid = (
        _fashion_split(_read_idx(place, f"{split}-images-idx3-ubyte"), _read_idx(place, f"{split}-labels-idx1-ubyte"))
        for split in ("train", "t10k")
    )
    return _fashion_data("fashion", train, valid)


def _fashion_folder(folder: str | Path | None) -> Path:
    if folder is not None:
        places = [Path(folder).expanduser()]
    else:
        places = [Path(prefix, "share", "datasets", "fashion-mnist") for prefix in ("/usr", "/usr/local", sys.prefix)]
    for place in places:
        if any(place.glob("train-images-idx3-ubyte*")):
            return place
    raise DataError(
        f"Data set 'fashion' found no Fashion-MNIST files in {' or '.join(map(str, places))}; "
        f"install the Debian package {FASHION_PACKAGE}, or pass folder= with the four idx-ubyte files "
        f"of {FASHION_SOURCE}."
    )


def _read_idx(folder: Path, stem: str) -> NDArray[np.uint8]:
    """Read an IDX file, gzipped or not: two zeros, type 8 (bytes), number of dimensions, sizes, data."""
    path = next((p for p in (folder / f"{stem}.gz", folder / stem) if p.is_file()), None)
    if path is None:
        raise DataError(f"Data set 'fashion' lacks the file {stem}.gz in {folder}; put all four files there.")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, num_dims = struct.unpack_from(">HBB", raw)
        sizes = struct.unpack_from(f">{num_dims}I", raw, 4)
        if (zeros, kind, num_dims) != (0, 8, 3 if "idx3" in stem else 1):
            raise ValueError(f"not an IDX file of bytes with {stem.rpartition('-idx')[2][0]} dimensions")
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * num_dims).reshape(sizes)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise DataError(f"Data set 'fashion' cannot read {path} ({error}); fetch the file again.") from error


def _fashion_split(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> ArrayDataset:
    inputs = torch.tensor(images).unsqueeze(1).float().div_(255.0)
    return ArrayDataset(inputs.sub_(FASHION_MEAN).div_(FASHION_STD), torch.tensor(labels).long())


def _fashion_data(name: str, train: ArrayDataset, valid: ArrayDataset) -> Data:
    return Data(
        name=name,
        train=train,
        valid=valid,
        num_classes=10,
        input_shape=tuple(train.inputs.shape[1:]),
        classes=FASHION_CLASSES,
        source=f"Fashion-MNIST by Zalando, {FASHION_SOURCE}",
        licence="MIT",
    )
