"""The ranks that train together, and the few small things they tell each other beside gradients.

Everything goes through one gloo group on the CPU, apart from the group that gradients travel in: no control message
waits for a GPU. Ranks of one job trust each other: objects between them are pickled, as torch's own launcher does it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from egeria_lab.errors import EgeriaLabError, InvalidSettingError, TrainingError

TIMEOUT_SECONDS = 600.0
"""So long a rank waits for another one that is alive but silent; one that has died is noticed at once."""

INLINE_BYTES = 248
"""What is no longer than this travels in one message of 256 bytes, its length in front."""

T = TypeVar("T")


class FollowingEndedError(EgeriaLabError):
    """Rank 0 ended its run before the planned end, so this rank does too."""


def wanted(asked: bool | str) -> bool:
    """Whether a session is to be one of several ranks.

    Args:
        asked: True, False, or ``"auto"``: as soon as the process was started as one of several by ``torchrun``, or a
            process group of several has been made.

    Raises:
        InvalidSettingError: for anything else, and for True where there is neither.

    Example:
        >>> wanted(False), wanted("auto")
        (False, False)
    """
    if asked is False:
        return False
    if asked is not True and asked != "auto":
        raise InvalidSettingError(f'distributed must be True, False or "auto", got {asked!r}.')
    if not dist.is_available():
        if asked is True:
            raise InvalidSettingError("distributed=True, but this build of torch has no torch.distributed.")
        return False
    ready = dist.is_initialized() and dist.get_world_size() > 1
    launched = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if asked is True and not (ready or launched or dist.is_initialized()):
        raise InvalidSettingError(
            "distributed=True, but this process was not started as one of several: run the script by "
            "`torchrun --nproc-per-node=2 script.py`, or call torch.distributed.init_process_group first."
        )
    return asked is True or ready or (launched and int(os.environ["WORLD_SIZE"]) > 1)


class Group:
    """This process among all that train one model.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``; decides the back end for gradients where no group has been made yet.
        timeout_seconds: longest wait for a silent rank.

    Attributes:
        rank: number of this process, from 0.
        size: number of all.

    Raises:
        TrainingError: when the others cannot be reached.
    """

    def __init__(self, device_type: str = "cpu", timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        self.timeout_seconds = timeout_seconds
        self.rank, self.size = 0, 1
        if not dist.is_initialized():
            backend = "nccl" if device_type == "cuda" and dist.is_nccl_available() else "gloo"
            self._call(lambda: dist.init_process_group(backend, timeout=timeout), "joining the others")
            atexit.register(_leave)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._control = self._call(lambda: dist.new_group(backend="gloo", timeout=timeout), "joining the others")

    @property
    def is_first(self) -> bool:
        """True on rank 0, which decides, saves and shows."""
        return self.rank == 0

    def from_first(self, value: T | None = None, what: str = "a decision of rank 0") -> T:
        """What rank 0 says; the others give nothing. One message for what is short, two for what is long.

        Args:
            value: any object that can be pickled, on rank 0.
            what: for the message when a rank is gone.
        """
        payload = pickle.dumps(value) if self.is_first else b""
        start = len(payload).to_bytes(8, "little") + payload[:INLINE_BYTES]
        head = torch.frombuffer(bytearray(start.ljust(8 + INLINE_BYTES, b"\0")), dtype=torch.uint8)
        self._call(lambda: dist.broadcast(head, src=0, group=self._control), what)
        told = head.numpy().tobytes()
        length = int.from_bytes(told[:8], "little")
        if length > INLINE_BYTES:
            rest = bytearray(payload[INLINE_BYTES:] or bytes(length - INLINE_BYTES))
            buffer = torch.frombuffer(rest, dtype=torch.uint8)
            self._call(lambda: dist.broadcast(buffer, src=0, group=self._control), what)
            told += buffer.numpy().tobytes()
        if self.is_first:
            return value  # type: ignore[return-value]
        said: T = pickle.loads(told[8 : 8 + length])
        return said

    def sum(self, values: Sequence[float], what: str = "sums of a step") -> list[float]:
        """Sums over all ranks, in double precision, the same to the bit on each."""
        total = torch.tensor(list(values), dtype=torch.float64)
        self._call(lambda: dist.all_reduce(total, group=self._control), what)
        return [float(x) for x in total]

    def add(self, tensor: Tensor, what: str = "a table of a step") -> Tensor:
        """The sum of a CPU tensor over all ranks, in place."""
        self._call(lambda: dist.all_reduce(tensor, group=self._control), what)
        return tensor

    def everybodys(self, value: T, what: str = "what each rank has") -> list[T]:
        """One object of each rank, in their order, on every rank."""
        found: list[Any] = [None] * self.size
        self._call(lambda: dist.all_gather_object(found, value, group=self._control), what)
        return found

    def _call(self, collective: Callable[[], T], what: str) -> T:
        """Run a collective; a rank that is gone becomes one sentence."""
        try:
            return collective()
        except (RuntimeError, ValueError) as error:
            raise lost(self.rank, self.size, what, error) from error


def lost(rank: int, size: int, what: str, error: BaseException) -> TrainingError:
    """The error for a rank that no longer answers."""
    words = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).partition("\n")[0][:160]
    return TrainingError(
        f"rank {rank} of {size} ended: another rank died or was silent too long, while waiting for {what} ({words}). "
        "Start again from the last checkpoint, with as many ranks as there are: "
        "torchrun --nproc-per-node=N -m egeria_lab resume DIR."
    )


def is_lost_rank(error: BaseException) -> bool:
    """True for what torch raises when a collective breaks off."""
    names = {kind.__name__ for kind in type(error).__mro__}
    words = str(error)
    return bool(names & {"DistBackendError", "DistNetworkError", "DistStoreError"}) or any(
        part in words for part in ("Connection closed by peer", "Connection reset by peer", "Gloo", "gloo", "NCCL")
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
