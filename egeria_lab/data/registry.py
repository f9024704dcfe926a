"""The data sets that come by name: none needs the network, and none touches the global generators.

Images are float32, shape (channels, height, width), normalised by fixed constants that stand beside each set;
labels and tokens are int64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from egeria_lab.data.blue_marble import blue_marble
from egeria_lab.data.datasets import Data
from egeria_lab.data.digits import digits
from egeria_lab.data.fashion import fashion, fashion_mini
from egeria_lab.data.pronounce import pronounce
from egeria_lab.data.python_docs import python_docs
from egeria_lab.data.synthetic import synthetic
from egeria_lab.errors import unknown_name

_LOADERS: dict[str, Callable[..., Data]] = {
    "fashion-mini": fashion_mini,
    "digits": digits,
    "synthetic": synthetic,
    "fashion": fashion,
    "blue-marble": blue_marble,
    "python-docs": python_docs,
    "pronounce": pronounce,
}


def names() -> tuple[str, ...]:
    """The name of every data set that `load` knows.

    Example:
        >>> names()
        ('fashion-mini', 'digits', 'synthetic', 'fashion', 'blue-marble', 'python-docs', 'pronounce')
    """
    return tuple(_LOADERS)


def describe(name: str) -> str:
    """What a data set is, in one sentence: the first line of its loader's docstring.

    Example:
        >>> describe("digits")
        'Handwritten digits, 8x8 grey, 10 classes: 1,437 + 360 images from scikit-learn.'
    """
    return inspect.cleandoc(_loader(name).__doc__ or "").partition("\n")[0]


def load(name: str, **options: Any) -> Data:
    """Load a data set by its name; twice the same call gives equal tensors.

    Args:
        name: one of `names()`.
        **options: ``fashion`` takes `folder`; ``synthetic`` takes `num_samples`, `num_valid`, `shape`,
            `num_classes`, `noise` and `seed`; ``python-docs`` takes `length`; ``pronounce`` takes `form`,
            `num_pairs` and `seed`; the other sets take none.

    Raises:
        UnknownNameError: for an unknown data set or option.
        InvalidSettingError: for an option out of range.
        DataError: when files are missing or damaged.
        MissingPackageError: when an optional package is missing; the message has the command that installs it.

    Example:
        >>> data = load("synthetic", num_samples=8, num_valid=4, shape=(3, 8, 8))
        >>> len(data.train), len(data.valid), data.train[0][0].shape
        (8, 4, torch.Size([3, 8, 8]))
    """
    loader = _loader(name)
    known = list(inspect.signature(loader).parameters)
    for option in options:
        if option not in known:
            raise unknown_name(f"option of data set {name!r}:", option, known)
    return loader(**options)


def _loader(name: str) -> Callable[..., Data]:
    if name not in _LOADERS:
        raise unknown_name("data set", name, _LOADERS)
    return _LOADERS[name]
