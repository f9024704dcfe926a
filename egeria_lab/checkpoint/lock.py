"""One session at a time in a run directory, on every system: a lock that ends with the process, however it ends."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from egeria_lab.errors import CheckpointError

fcntl: Any
msvcrt: Any
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None
try:
    import msvcrt
except ImportError:  # only on Windows
    msvcrt = None

NAME = "lock"
_A_MOMENT = 0.2
_FAR = 1 << 30
"""Where Windows locks one byte: it may not be read by others, and what lies before it may."""


class RunLock:
    """Holds a directory for this process until it is closed.

    The file says who holds it. Where the system locks files (`fcntl`, or `msvcrt` on Windows) it gives the lock back
    when a process dies. Where it does not, the file itself is the lock: it is made by one process only, and taken
    over when the process that it names is gone.

    Args:
        folder: the directory.

    Raises:
        CheckpointError: when another session holds it, in this process or in another one.
        OSError: when the directory cannot be written to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     lock = RunLock(Path(place))
        ...     lock.close()
        ...     RunLock(Path(place)).close()
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._is_the_lock = fcntl is None and msvcrt is None
        self._file: IO[str] | None = self._made() if self._is_the_lock else self._locked(fcntl or msvcrt)
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"process {os.getpid()}")
        self._file.flush()

    def close(self) -> None:
        """Give the directory back. Twice is once."""
        if self._file is None:
            return
        if self._is_the_lock:
            with contextlib.suppress(OSError):
                self.path.unlink()
        elif fcntl is None:
            with contextlib.suppress(OSError):
                self._file.seek(_FAR)
                msvcrt.locking(self._file.fileno(), msvcrt.LK_UNLCK, 1)
        self._file.close()
        self._file = None

    def _locked(self, system: ModuleType) -> IO[str]:
        file = self.path.open("a+", encoding="utf-8")
        try:
            if system is fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                file.seek(_FAR)
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError as error:
            file.close()
            raise self._in_use(_holder(self.path)) from error
        return file

    def _made(self) -> IO[str]:
        for _ in range(3):
            try:
                return self.path.open("x+", encoding="utf-8")
            except FileExistsError as error:
                holder = _holder(self.path)
                if not holder:  # made this moment, or its maker died in it
                    time.sleep(_A_MOMENT)
                    holder = _holder(self.path)
                if _lives(holder):
                    raise self._in_use(holder) from error
                with contextlib.suppress(OSError):
                    self.path.unlink()
        raise self._in_use(_holder(self.path))

    def _in_use(self, holder: str) -> CheckpointError:
        return CheckpointError(
            f"the run directory {str(self.path.parent)!r} is in use by {holder or 'another process'}: close that "
            "session, or give this one a directory of its own."
        )


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:100].strip()
    except OSError:
        return ""


def _lives(holder: str) -> bool:
    """True unless the process is known to be gone; nobody stands behind an empty text."""
    number = holder.removeprefix("process ")
    if not (number.isascii() and number.isdigit()):
        return bool(holder)
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # somebody else's
    return True
