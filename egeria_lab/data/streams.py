"""Data that can only be read in order: what they are, and one reading of them from their start.

A stream is an `IterableDataset`, a `DataLoader` over one, an iterable of ready batches, or a function that returns a
new iterator of batches each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Set, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from egeria_lab.config import derive_seed
from egeria_lab.data.private_generator import private_generator
from egeria_lab.data.worker_start import interrupts_blocked
from egeria_lab.errors import DataError


def is_stream(data: Any) -> bool:
    """True for data that are read in order, without a sample that can be asked for by its number.

    Example:
        >>> is_stream(range(3)), is_stream(lambda: iter([])), is_stream({1, 2}), is_stream(iter([1]))
        (False, True, False, True)
    """
    if isinstance(data, DataLoader):
        return isinstance(data.dataset, IterableDataset)
    if isinstance(data, IterableDataset):
        return True
    if isinstance(data, (str, bytes, Set, Mapping, type, nn.Module, Tensor)) or hasattr(data, "__getitem__"):
        return False
    return hasattr(data, "__iter__") or callable(data)


def check_begins_anew(data: Any, what: str) -> None:
    """Raise for a stream that can be read only once, as a generator can.

    Args:
        data: the stream.
        what: what it is to the user, for the message.

    Raises:
        DataError: with what to give instead.

    Example:
        >>> check_begins_anew(iter([1]), "train")
        Traceback (most recent call last):
        egeria_lab.errors.DataError: train is an iterator (list_iterator), which can be read only once: give what makes
        it, a function or an object whose iter() begins anew.
    """
    if hasattr(data, "__next__"):
        raise DataError(
            f"{what} is an iterator ({type(data).__name__}), which can be read only once: give what makes it, a "
            "function or an object whose iter() begins anew."
        )


def length_of(data: Any) -> int | None:
    """Batches in one reading, where the data say so.

    Example:
        >>> length_of(DataLoader([1, 2, 3], batch_size=2)), length_of(lambda: iter([]))
        (2, None)
    """
    if not isinstance(data, Sized):
        return None
    try:
        return len(data)
    except TypeError:  # a loader over iterable data without a length
        return None


def rows_of(batch: Any, role: str) -> int:
    """Samples in a batch: the length of the first tensor in it.

    Args:
        batch: a tensor, or tuples, lists and dicts that hold some.
        role: whose batch it is, for the message.

    Raises:
        DataError: when no tensor is in it, or no sample.

    Example:
        >>> rows_of({"x": torch.zeros(3, 7), "y": torch.zeros(3)}, "training")
        3
    """
    first = next((leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)
    if first is None or not len(first):
        found = type(batch).__name__ if first is None else "one of 0 rows"
        raise DataError(
            f"the {role} stream must yield batches that hold a tensor whose rows are the samples, got {found}; give "
            "an IterableDataset of single samples, or a DataLoader over it."
        )
    return len(first)


def fingerprint(batch: Any) -> str:
    """A short text that tells two batches apart by their numbers and texts.

    Example:
        >>> fingerprint((torch.zeros(2), "a")) == fingerprint((torch.zeros(2), "b"))
        False
    """
    digest = hashlib.blake2b(digest_size=16)
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, (bool, int, float, str)):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


class StreamReader:
    """One reading of a stream from its start, with one batch looked ahead, so that the last one is known as such.

    What the data draw from the global generators is a function of seed, reading and position, and moves none of them.
    Each batch must have tensors of its own: one that is filled anew for the next batch would change under the step.

    Args:
        data: the stream; it is asked for a new iterator.
        seed: the session's seed.
        number: which reading this is, from 0; told to the data where they have a `set_epoch`.
        role: for messages.
        drop_single: leave out a batch of one sample that does not stand alone: batch norm cannot train on it.

    Attributes:
        taken: batches handed out.
        rows: samples in them.

    Example:
        >>> reader = StreamReader(lambda: (torch.full((2, 1), i) for i in range(2)), seed=0, number=0, role="training")
        >>> reader.take().tolist(), reader.more(), reader.take().tolist(), reader.more(), reader.rows
        ([[0], [0]], True, [[1], [1]], False, 4)
    """

    def __init__(self, data: Any, *, seed: int, number: int, role: str, drop_single: bool = False) -> None:
        self.number, self.role = number, role
        self.taken = self.rows = 0
        self._seed = seed
        self._drop_single = drop_single
        self._ahead: list[Any] = []
        self._ended = False
        self._error: Exception | None = None
        dataset = getattr(data, "dataset", data)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(number)
        with private_generator(derive_seed(seed, "stream", number)), interrupts_blocked():
            made = data if hasattr(data, "__iter__") else data()
            if not hasattr(made, "__iter__"):
                raise DataError(
                    f"the {role} data are a function that must return an iterator of batches, got {made!r}."
                )
            self._items: Iterator[Any] = iter(made)

    def more(self) -> bool:
        """True unless the batch handed out last was the last one; an error of the data is kept for `take`."""
        if self._ahead or self._error is not None:
            return True
        if self._ended:
            return False
        try:
            with private_generator(derive_seed(self._seed, "stream", self.number, self.taken)):
                item = next(self._items)
        except StopIteration:
            self._ended = True
            return False
        except Exception as error:  # the batch before it may still be trained on
            self._error = error
            return True
        if self._drop_single and self.taken and rows_of(item, self.role) == 1:
            self._ended = True
            return False
        self._ahead = [item]
        return True

    def look(self) -> Any:
        """The next batch, without taking it.

        Raises:
            Exception: what the data raised in its place.
        """
        assert self.more(), "nothing is left"
        if self._error is not None:
            raise self._error
        return self._ahead[0]

    def take(self) -> Any:
        """The next batch.

        Raises:
            Exception: what the data raised in its place.
        """
        item = self.look()
        rows = rows_of(item, self.role)
        self._ahead.clear()
        self.taken, self.rows = self.taken + 1, self.rows + rows
        return item


def _leaves(batch: Any) -> list[Any]:
    return tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
