"""Data sets by name, and the two classes for your own.

Example:
    >>> load("digits").num_classes
    10
"""

from egeria_lab.data.datasets import ArrayDataset, Data, MapDataset
from egeria_lab.data.registry import describe, load, names

__all__ = ["ArrayDataset", "Data", "MapDataset", "describe", "load", "names"]


def __dir__() -> list[str]:
    return __all__
