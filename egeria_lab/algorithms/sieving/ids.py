"""What users hand over as sample ids and labels, checked: one sentence for whatever is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from egeria_lab.errors import DataError

Ids = Tensor | Sequence[int]
_SHOWN = 5


def checked_ids(ids: Ids, num_samples: int) -> Tensor:
    """Ids as a one-dimensional int64 tensor on the CPU.

    Raises:
        DataError: when they are no whole numbers, or one of them does not exist.

    Example:
        >>> checked_ids([3, 1], 5)
        tensor([3, 1])
        >>> checked_ids([3, 7], 5)
        Traceback (most recent call last):
        egeria_lab.errors.DataError: there is no sample 7; ids of this training set are 0 to 4.
    """
    try:
        tensor = ids if isinstance(ids, Tensor) else torch.tensor(list(ids), dtype=None if len(ids) else torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            "sample ids must be whole numbers in a list or a one-dimensional tensor, got "
            f"{type(ids).__name__} of something else."
        ) from error
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not whole or tensor.dim() != 1:
        raise DataError(
            "sample ids must be whole numbers in a list or a one-dimensional tensor, got "
            f"{tensor.dim()}-d {tensor.dtype}."
        )
    tensor = tensor.detach().cpu().long()
    wrong = (tensor < 0) | (tensor >= num_samples)
    if bool(wrong.any()):
        raise DataError(
            f"there is no sample {some(tensor[wrong])}; ids of this training set are 0 to {num_samples - 1}."
        )
    return tensor


def check_named(verb: str, ids: Tensor, wrong: Tensor, what: str) -> None:
    """Refuse a call by hand that names no sample, or samples for which `wrong` holds.

    Raises:
        DataError: with the ids and what is the matter with them.
    """
    if len(ids) == 0:
        raise DataError(f"{verb} got no sample ids; name at least one.")
    if bool(wrong.any()):
        raise DataError(f"samples {some(ids[wrong])} {what}, so nothing was changed; leave them out of the call.")


def classes_of(labels: Ids | None, num_samples: int) -> tuple[list[int], Tensor | None]:
    """The labels that occur, ascending, and the place of each sample's label among them, int64.

    Raises:
        DataError: when there is not one whole number for each sample.

    Example:
        >>> classes_of([7, 2, 7], 3)
        ([2, 7], tensor([1, 0, 1]))
    """
    if labels is None:
        return [], None
    given = labels if isinstance(labels, Tensor) else torch.tensor(list(labels))
    if given.shape != (num_samples,) or given.is_floating_point():
        raise DataError(
            f"labels must be one whole number for each of {num_samples} samples, got {given.dtype} of shape "
            f"{tuple(given.shape)}."
        )
    values, places = torch.unique(given.cpu(), return_inverse=True)
    return values.tolist(), places


def number_of_samples(number: int) -> str:
    """``"1 sample"``, ``"2 samples"``, …

    Example:
        >>> number_of_samples(1)
        '1 sample'
    """
    return "1 sample" if number == 1 else f"{number} samples"


def some(ids: Tensor) -> str:
    """The first few ids in words.

    Example:
        >>> some(torch.arange(7))
        '0, 1, 2, 3, 4 and 2 more'
    """
    shown = ", ".join(str(i) for i in ids[:_SHOWN].tolist())
    return f"{shown} and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else shown
