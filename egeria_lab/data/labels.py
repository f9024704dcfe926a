"""The class of every training sample, where a data set has it at hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from egeria_lab.data.private_generator import private_generator


def labels_of(dataset: Any, *, read: bool = False) -> Tensor | None:
    """The class of every sample, where a data set has them at hand.

    Looks at ``targets`` and ``labels``, at the last tensor of a `TensorDataset`, and through `Subset` and
    `ConcatDataset`.

    Args:
        dataset: map-style data.
        read: when they are not at hand, go through the data set once and take the labels out of its samples
            ``(inputs, label)``; no generator is moved by it.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> labels_of(TensorDataset(torch.zeros(2, 1), torch.tensor([3, 1]))).tolist()
        [3, 1]
    """
    if isinstance(dataset, Subset):
        whole = labels_of(dataset.dataset)
        if whole is not None:
            return whole[torch.as_tensor(list(dataset.indices), dtype=torch.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [labels_of(part) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            return torch.cat(known)
    tensors = getattr(dataset, "tensors", None)
    candidates = [getattr(dataset, "targets", None), getattr(dataset, "labels", None), tensors[-1] if tensors else None]
    for found in candidates:
        if found is None or not hasattr(found, "__len__") or len(found) != len(dataset):
            continue
        try:
            labels = torch.as_tensor(np.asarray(found))
        except (TypeError, ValueError):
            continue
        if labels.dim() == 1 and not labels.is_floating_point() and not labels.is_complex():
            return labels.long()
    return _read(dataset) if read else None


def _read(dataset: Any) -> Tensor | None:
    labels = []
    with private_generator(0):  # what a data set draws for its samples is drawn aside
        for index in range(len(dataset)):
            sample = dataset[index]
            label = sample[1] if isinstance(sample, (tuple, list)) and len(sample) == 2 else None
            if isinstance(label, (Tensor, np.ndarray)) and label.shape == ():
                label = label.item()
            if isinstance(label, bool) or not isinstance(label, (int, np.integer)):
                return None
            labels.append(int(label))
    return torch.tensor(labels)
