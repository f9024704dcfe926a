"""Can what was computed for a sample once be used again? Asked of transforms and of data sets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import Subset, TensorDataset

from egeria_lab.data.augment import Augment, Replayable
from egeria_lab.data.datasets import ArrayDataset

# Of torchvision's transforms, by class name: those that draw numbers without saying so in their name …
_RANDOM = {
    "AugMix", "AutoAugment", "ColorJitter", "CutMix", "ElasticTransform", "GaussianBlur", "GaussianNoise",
    "JPEG", "MixUp", "RandAugment", "ScaleJitter", "TrivialAugmentWide",
}  # fmt: skip
# … and those that never do.
_FIXED = {
    "CenterCrop", "ConvertImageDtype", "FiveCrop", "Grayscale", "Identity", "LinearTransformation",
    "Normalize", "PILToTensor", "Pad", "Resize", "TenCrop", "ToDtype", "ToImage", "ToPILImage",
    "ToPureTensor", "ToTensor",
}  # fmt: skip
_FIX = (
    "Use egeria_lab.data.augment.Augment(crop_padding=, flip=, cutout=, noise=), or wrap your own pure "
    "function of (inputs, ids, views) in Replayable(function, views=8)"
)
_TRIES = 4


def is_replayable(transform: Any) -> tuple[bool, str]:
    """Whether a transform gives a sample the same result when it is asked again.

    Recognised: None; `Augment` and `Replayable`; anything with an attribute ``replayable = True`` (your word
    that it draws no number); torchvision's transforms without randomness; sequences of those.

    Returns:
        ``(True, "")`` or ``(False, reason)``; the reason names the transform and the fix.

    Example:
        >>> is_replayable(Augment(flip=True))
        (True, '')
        >>> class RandomHorizontalFlip:
        ...     pass
        >>> print(is_replayable(RandomHorizontalFlip())[1])
        RandomHorizontalFlip draws new numbers at every call, so stored activations would repeat one draw for
        ever. Use egeria_lab.data.augment.Augment(...
    """
    if transform is None or isinstance(transform, (Augment, Replayable)):
        return True, ""
    name = str(getattr(transform, "__qualname__", None) or type(transform).__name__)
    declared = getattr(transform, "replayable", None)
    if declared is not None:
        return bool(declared), "" if declared else f"{name} says that it is not replayable. {_FIX}."
    if name.startswith("Random") or name in _RANDOM:
        return False, (
            f"{name} draws new numbers at every call, so stored activations would repeat one draw for ever. "
            f"{_FIX}, or train without the cache."
        )
    inner = _members(transform)
    if inner is not None:
        answers = (is_replayable(member) for member in inner)
        return next((answer for answer in answers if not answer[0]), (True, ""))
    if name in _FIXED and type(transform).__module__.startswith(("torchvision.", "torch.nn")):
        return True, ""
    return False, (
        f"{name} may draw numbers; nobody can tell from outside. If it does not, set "
        f"`transform.replayable = True` on it. {_FIX}."
    )


def _members(transform: Any) -> list[Any] | None:
    if isinstance(transform, (list, tuple, nn.Sequential)):
        return list(transform)
    members = getattr(transform, "transforms", None)  # torchvision's Compose
    if isinstance(members, (list, tuple, nn.ModuleList)):
        return list(members)
    pair = [getattr(transform, field, None) for field in ("transform", "target_transform")]
    return pair if type(transform).__name__ == "StandardTransform" else None


def dataset_is_replayable(dataset: Any) -> tuple[bool, str]:
    """Whether a data set hands out the same sample each time: its transforms are asked, then it is tried.

    Some samples are taken several times; a data set that draws its own numbers is found out with near
    certainty. The global generators of torch, NumPy and Python are given back as they were.

    Returns:
        ``(True, "")`` or ``(False, reason)``.

    Example:
        >>> dataset_is_replayable(ArrayDataset(torch.zeros(3, 2), torch.zeros(3)))
        (True, '')
    """
    if isinstance(dataset, (ArrayDataset, TensorDataset)):
        return True, ""
    if isinstance(dataset, Subset):
        return dataset_is_replayable(dataset.dataset)
    for field in ("transforms", "transform", "target_transform"):
        transform = getattr(dataset, field, None)
        if transform is not None:
            allowed, reason = is_replayable(transform)
            if not allowed:
                return False, reason
    with _generators_given_back():
        index = _changing_sample(dataset)
    if index is None:
        return True, ""
    return False, (
        f"{type(dataset).__name__} returned two different results for sample {index}: it draws numbers "
        f"inside __getitem__. Return the plain sample there. {_FIX}."
    )


def _changing_sample(dataset: Any) -> int | None:
    count = len(dataset)
    for index in sorted({0, count // 3, (2 * count) // 3, count - 1}):
        first = dataset[index]
        if not all(_same(first, dataset[index]) for _ in range(_TRIES)):
            return index
    return None


@contextmanager
def _generators_given_back() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _same(a: Any, b: Any) -> bool:
    leaves_a, leaves_b = tree_flatten(a)[0], tree_flatten(b)[0]
    return len(leaves_a) == len(leaves_b) and all(_equal(x, y) for x, y in zip(leaves_a, leaves_b, strict=True))


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return isinstance(x, Tensor) and isinstance(y, Tensor) and torch.equal(x, y)
    if hasattr(x, "tobytes") and hasattr(y, "tobytes"):  # NumPy arrays and PIL images
        return bool(x.tobytes() == y.tobytes())
    return bool(x == y)
