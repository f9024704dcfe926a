"""A run directory: numbered checkpoints of which the last few are kept, the journal, and a lock."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from egeria_lab.checkpoint.file import read, write
from egeria_lab.checkpoint.lock import RunLock
from egeria_lab.checkpoint.tree import Tree
from egeria_lab.errors import CheckpointError, require

SUFFIX = ".ckpt"
LEFT = "left-"


class RunFolder:
    """Keeps the newest checkpoints of one run in one directory, which it locks against others.

    Args:
        path: the directory; made when it is not there.
        keep: how many checkpoints stay, >= 1.

    Raises:
        CheckpointError: when it cannot be made or written to, or another session holds it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     folder = RunFolder(place, keep=2)
        ...     for step in (1, 2, 3):
        ...         _ = folder.save(step, {"step": step})
        ...     print([path.name for path in checkpoints(place)], latest(place)[1])
        ...     folder.close()
        ['step-000000002.ckpt', 'step-000000003.ckpt'] {'step': 3}
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 3) -> None:
        whole = isinstance(keep, int) and not isinstance(keep, bool) and keep >= 1
        require(whole, "Session", "keep_checkpoints", keep, "a whole number >= 1")
        self.path = Path(path)
        self.keep = keep
        self._lock: RunLock | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self.path)
            for half in self.path.glob(f".*{SUFFIX}.*.tmp"):  # of a process that was killed while it wrote
                half.unlink()
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"run_dir={str(path)!r} cannot be used ({error.strerror or error}); give a directory that can be "
                "written to."
            ) from error

    def save(self, step: int, tree: Tree) -> tuple[Path, int]:
        """Write the checkpoint of a step and remove the oldest beyond `keep`; answers with its path and size.

        Checkpoints of later steps, which training was taken back from, are renamed to ``left-…``.

        Raises:
            CheckpointError: when it could not be written; those that are there stay.
        """
        path = self.path / f"step-{step:09d}{SUFFIX}"
        with contextlib.suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        size = write(path, tree)
        there = checkpoints(self.path)
        for later in [p for p in there if _step_of(p) > step]:  # training was taken back behind them
            with contextlib.suppress(OSError):
                later.replace(later.with_name(f"{LEFT}{later.name}"))
        ours = [p for p in there if _step_of(p) <= step]
        for old in [*ours[: -self.keep], *sorted(self.path.glob(f"{LEFT}step-*{SUFFIX}"))[: -self.keep]]:
            with contextlib.suppress(OSError):
                old.unlink()
        return path, size

    def close(self) -> None:
        """Give the lock back. Twice is once."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def checkpoints(path: str | os.PathLike[str]) -> list[Path]:
    """The checkpoint files of a run directory, oldest step first."""
    found = [p for p in Path(path).glob(f"step-*{SUFFIX}") if _step_of(p) >= 0 and p.is_file()]
    return sorted(found, key=_step_of)


def latest(path: str | os.PathLike[str]) -> tuple[Path, Tree, list[str]]:
    """The newest checkpoint of a run directory that can be read: its path, its tree, and what was passed over.

    Raises:
        CheckpointError: when there is none.
    """
    notes: list[str] = []
    for newest in reversed(checkpoints(path)):
        try:
            return newest, read(newest), notes
        except CheckpointError as error:
            notes.append(f"Passed over: {error}")
    if not Path(path).is_dir():
        raise CheckpointError(f"there is no run directory {str(path)!r}.")
    raise CheckpointError(" ".join([f"{str(path)!r} holds no checkpoint that can be continued.", *notes]))


def _step_of(path: Path) -> int:
    digits = path.name.removeprefix("step-").removesuffix(SUFFIX)
    return int(digits) if digits.isascii() and digits.isdigit() else -1
