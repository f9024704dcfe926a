"""The digits of scikit-learn: small enough to train on in seconds."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from egeria_lab.data.datasets import ArrayDataset, Data
from egeria_lab.errors import MissingPackageError

DIGITS_MEAN, DIGITS_STD = 0.3053, 0.3760  # of all 1,797 images, pixels scaled to [0, 1]
DIGITS_NUM_VALID = 360


def digits() -> Data:
    """Handwritten digits, 8x8 grey, 10 classes: 1,437 + 360 images from scikit-learn."""
    try:  # not at the top: scikit-learn takes a second to import, and nothing else here needs it
        datasets = import_module("sklearn.datasets")
    except ModuleNotFoundError as error:
        raise MissingPackageError("Data set 'digits' needs scikit-learn: pip install scikit-learn.") from error
    pixels, labels = datasets.load_digits(return_X_y=True)
    inputs = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8).div_(16.0)
    inputs.sub_(DIGITS_MEAN).div_(DIGITS_STD)
    targets = torch.tensor(labels, dtype=torch.int64)
    train_ids, valid_ids = _stratified_split(targets, DIGITS_NUM_VALID, seed=0)
    return Data(
        name="digits",
        train=ArrayDataset(inputs[train_ids], targets[train_ids]),
        valid=ArrayDataset(inputs[valid_ids], targets[valid_ids]),
        num_classes=10,
        input_shape=(1, 8, 8),
        classes=tuple(str(digit) for digit in range(10)),
        source="Optical recognition of handwritten digits (UCI), as in scikit-learn's load_digits",
        licence="BSD-3-Clause",
    )


def _stratified_split(targets: Tensor, num_valid: int, seed: int) -> tuple[Tensor, Tensor]:
    """Split the ids so that each class has its share of both parts, to within one sample.

    Each sample gets a random quantile inside its own class; the `num_valid` lowest ones are for validation.
    """
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    quantiles = torch.empty(len(targets), dtype=torch.float64)
    for label in range(int(targets.max()) + 1):
        members = order[targets[order] == label]
        quantiles[members] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
    ranked = quantiles.argsort(stable=True)
    return ranked[num_valid:].sort().values, ranked[:num_valid].sort().values
