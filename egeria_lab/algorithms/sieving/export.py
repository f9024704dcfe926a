"""Take the kept samples out of a run: a CSV file of their ids, and back."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import torch
from torch import Tensor

from egeria_lab.algorithms.sieving.sieve import Sieve
from egeria_lab.errors import DataError

_COLUMNS = ("id", "forgetting_events", "presentations", "never_correct")


def write_kept(sieve: Sieve, path: str | os.PathLike[str]) -> Path:
    """Write the kept samples as CSV: id, forgetting events and presentations since the start, never correct (0 or 1).

    Args:
        sieve: whose kept set.
        path: where to; a file that is there is replaced.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as place:
        ...     path = write_kept(Sieve(None, 3, batch_size=1, seed=0), f"{place}/kept.csv")
        ...     read_ids(path)
        tensor([0, 1, 2])
    """
    ids = sieve.kept_ids()
    counts = sieve.counts(ids)
    columns = (ids, counts.events_total, counts.presentations_total, counts.never_correct.int())
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        writer.writerows(zip(*(column.tolist() for column in columns), strict=True))
    return Path(path)


def read_ids(path: str | os.PathLike[str]) -> Tensor:
    """The column ``id`` of a CSV file, int64, in the order of the file.

    Raises:
        DataError: when there is no such column, or something else than whole numbers in it.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if "id" not in (rows.fieldnames or ()):
            raise DataError(f"{path} has no column named id; write it with write_kept(sieve, path).")
        try:
            return torch.tensor([int(row["id"]) for row in rows], dtype=torch.int64)
        except (TypeError, ValueError) as error:
            raise DataError(f"{path} has something else than whole numbers in its column id: {error}.") from error
