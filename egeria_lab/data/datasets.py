"""What a session trains on: `Data`, a pair of map-style data sets with their facts, and `ArrayDataset`.

A sample's id is its position in the data set, an int64 that never changes during a run; see
`egeria_lab.data.registry` for the sets that come by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from egeria_lab.data.streams import check_begins_anew, is_stream
from egeria_lab.errors import DataError

IGNORED_LABEL = -100  # what torch's cross-entropy skips by default, as padding in token targets


class MapDataset(Protocol):
    """Anything with a length whose item `i` is a sample, normally a pair ``(input, target)``."""

    def __len__(self) -> int:
        """The number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """The sample with this id, ``0 <= index < len(self)``."""


class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """A map-style data set that lies in memory and can hand out a whole batch at once.

    Args:
        inputs: shape (samples, ...), any dtype.
        targets: shape (samples, ...), int64 class labels or float values.

    Raises:
        DataError: when the two lengths differ or there is no sample.

    Example:
        >>> dataset = ArrayDataset(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0]))
        >>> dataset[1]
        (tensor([2., 3.]), tensor(1))
        >>> dataset.gather(torch.tensor([2, 0]))[1]
        tensor([0, 0])
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        if inputs.dim() == 0 or targets.dim() == 0:
            raise DataError("ArrayDataset needs tensors whose first dimension counts the samples, got a single number.")
        if len(inputs) != len(targets):
            raise DataError(f"ArrayDataset got {len(inputs)} inputs and {len(targets)} targets; give one target each.")
        if len(inputs) == 0:
            raise DataError("ArrayDataset got no sample; give at least one.")
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        inputs, targets = (
            f"{' × '.join(map(str, part.shape[1:])) or 'one number'}, {str(part.dtype).removeprefix('torch.')}"
            for part in (self.inputs, self.targets)
        )
        return f"ArrayDataset({len(self):,} samples; inputs: {inputs}; targets: {targets})"

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def gather(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The samples with these ids as one batch, in the order asked for: one copy, no collating.

        Args:
            ids: int64, shape (batch,), each in ``[0, len(self))``; an id may come twice.

        Returns:
            Inputs of shape (batch, ...) and targets of shape (batch, ...).

        Raises:
            DataError: when `ids` is not a one-dimensional int64 tensor.
        """
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise DataError(f"Sample ids must be a one-dimensional int64 tensor, got {ids.dim()}-d {ids.dtype}.")
        return self.inputs.index_select(0, ids), self.targets.index_select(0, ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Training and validation data with what a model and a reader need to know about them.

    Attributes:
        name: how messages and figures call it.
        train: map-style; item `i` is the training sample with id `i`. Or a stream, see `egeria_lab.data.streams`.
        valid: the same; only evaluated on.
        num_classes: number of classes, >= 1; None when the task is not classification.
        input_shape: shape of one input without the batch dimension.
        classes: the name of each class in label order, or empty.
        source: where the samples come from, one sentence.
        licence: the licence of the samples.

    Raises:
        DataError: when a part is neither map-style nor a stream, or empty, a label of an `ArrayDataset` lies outside
            ``[0, num_classes)``, or the facts contradict each other.

    Example:
        >>> pair = ArrayDataset(torch.zeros(4, 3), torch.tensor([0, 1, 1, 0]))
        >>> Data(name="mine", train=pair, valid=pair, num_classes=1, input_shape=(3,))
        Traceback (most recent call last):
        egeria_lab.errors.DataError: Data 'mine': label 1 of train sample 1 is out of range; with
        num_classes = 1 labels are 0 to 0.
    """

    name: str
    train: MapDataset
    valid: MapDataset
    num_classes: int | None
    input_shape: tuple[int, ...]
    classes: tuple[str, ...] = ()
    source: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        if self.num_classes is not None and self.num_classes < 1:
            raise DataError(f"Data {self.name!r}: num_classes must be >= 1 or None, got {self.num_classes}.")
        if self.classes and len(self.classes) != self.num_classes:
            raise DataError(
                f"Data {self.name!r}: got {len(self.classes)} class names for {self.num_classes} classes; "
                "name each class or none."
            )
        for split, dataset in (("train", self.train), ("valid", self.valid)):
            _check_map_style(self.name, split, dataset)
            if isinstance(dataset, ArrayDataset) and self.num_classes is not None:
                _check_labels(self.name, split, dataset.targets, self.num_classes)


def _check_map_style(name: str, split: str, dataset: object) -> None:
    if is_stream(dataset):  # it tells its samples only when it is read
        check_begins_anew(dataset, f"Data {name!r}: {split}")
        return
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"Data {name!r}: {split} must be map-style (with __len__ and __getitem__) or iterable, "
            f"got {type(dataset).__name__}; put the samples in a list."
        )
    if len(dataset) == 0:
        raise DataError(f"Data {name!r}: {split} is empty; give at least one sample.")


def _check_labels(name: str, split: str, targets: Tensor, num_classes: int) -> None:
    if targets.is_floating_point():  # class probabilities, or a regression: no label to check
        return
    wrong = ((targets < 0) | (targets >= num_classes)) & (targets != IGNORED_LABEL)
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise DataError(
            f"Data {name!r}: label {int(targets[place])} of {split} sample {place[0]} is out of range; "
            f"with num_classes = {num_classes} labels are 0 to {num_classes - 1}."
        )
