"""Finished parts of a suite that takes hours: after an interruption it goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any


class KeptParts:
    """Parts of one measurement, a small file each; what was measured otherwise, or elsewhere, is never taken.

    Args:
        folder: where the files are; None keeps nothing.
        of: all that the figures depend on: machine, versions, settings. Parts kept under another one are measured anew.

    Example:
        >>> from tempfile import mkdtemp
        >>> place = Path(mkdtemp()) / "parts"
        >>> KeptParts(place, {"threads": 1}).put("seed 0", [1.5])
        >>> KeptParts(place, {"threads": 1}).get("seed 0"), KeptParts(place, {"threads": 2}).get("seed 0")
        ([1.5], None)
    """

    def __init__(self, folder: Path | None, of: Mapping[str, Any]) -> None:
        self._folder = folder
        self._of = json.loads(json.dumps(of))

    def get(self, name: str) -> Any | None:
        """What was kept under a name; None when nothing was, or when it cannot be read."""
        if self._folder is None:
            return None
        try:
            found = json.loads((self._folder / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found["value"] if isinstance(found, dict) and found.get("of") == self._of else None

    def put(self, name: str, value: Any) -> None:
        """Keep a part: whole or not at all, whenever the process is stopped."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        hidden = self._folder / f".{name}.{os.getpid()}"
        hidden.write_text(json.dumps({"of": self._of, "value": value}), encoding="utf-8")
        os.replace(hidden, self._folder / f"{name}.json")

    def clear(self) -> None:
        """Forget all parts: the measurement is done."""
        if self._folder is not None:
            rmtree(self._folder, ignore_errors=True)
