"""Arrays that take seconds to build from other files, kept in a folder of the user and checked at each load."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CACHE_FOLDER = "EGERIA_LAB_CACHE"
"""Environment variable that names the folder; without it, it is the platform's own for a user's caches."""

Arrays = dict[str, NDArray[Any]]
_CHECK = "sha256"


def cache_folder() -> Path:
    """Where built arrays are kept: ``$EGERIA_LAB_CACHE``, or ``egeria_lab`` in the user's cache folder."""
    own = os.environ.get(CACHE_FOLDER)
    if own:
        return Path(own).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "egeria_lab"


def built_once(name: str, recipe: str, sources: Sequence[Path], build: Callable[[], Arrays]) -> Arrays:
    """The arrays that `build` makes, from the cache when they were built from the same files before.

    The file appears whole or not at all, and holds a checksum: what is damaged is built again. Where the folder
    cannot be written, arrays are built each time.

    Args:
        name: begins the name of the file.
        recipe: changes whenever `build` would give other arrays for the same files.
        sources: the files that `build` reads; other content is another cache.
        build: makes the arrays.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from unittest.mock import patch
        >>> with TemporaryDirectory() as folder, patch.dict(os.environ, {CACHE_FOLDER: folder}):
        ...     built_once("ones", "1", [], lambda: {"a": np.ones(2)})["a"]
        array([1., 1.])
    """
    key = hashlib.sha256(recipe.encode())
    for source in sources:
        key.update(hashlib.sha256(source.read_bytes()).digest())
    try:
        path = cache_folder() / f"{name}-{key.hexdigest()[:16]}.npz"
    except RuntimeError:  # a user without a home folder
        return build()
    kept = _load(path)
    if kept is not None:
        return kept
    arrays = build()
    with contextlib.suppress(OSError):
        _save(path, arrays)
    return arrays


def _load(path: Path) -> Arrays | None:
    """The arrays of a file, or None when there is none or it is not what was written."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        check = arrays.pop(_CHECK)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return arrays if check.tobytes() == _checksum(arrays) else None


def _save(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, hidden = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays, **{_CHECK: np.frombuffer(_checksum(arrays), np.uint8)})  # type: ignore[arg-type]
        os.replace(hidden, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(hidden)
        raise


def _checksum(arrays: Arrays) -> bytes:
    check = hashlib.sha256()
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        check.update(f"{key} {array.dtype.str} {array.shape} ".encode())
        check.update(array.data)
    return check.digest()
