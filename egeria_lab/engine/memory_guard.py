"""A step for which memory is too small changes nothing, and its error says what to lower, with numbers."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.errors import OutOfMemoryError

_CPU_WORDS = ("can't allocate memory", "not enough memory")
_BYTES_A_NUMBER = {"int8": 1, "bf16": 2}


def is_out_of_memory(error: BaseException) -> bool:
    """True for what a GPU, the CPU allocator of torch, and Python itself raise when memory is too small.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes do not match"))
        (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_WORDS)


class MemoryGuard:
    """Around each step: when memory is too small, puts everything back and says what can be lowered.

    Forward and backward pass change nothing that lasts. The optimizer may run out of memory when it makes its state,
    which it does in the first step of each parameter: weights and state are copied before such a step, and put back.
    In any other step a half-made update can be seen but not undone, and the error says so.

    Args:
        session: the session.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._stay_stateless: frozenset[int] = frozenset()

    @contextmanager
    def __call__(self, number: int) -> Iterator[None]:
        """The block of one step.

        Args:
            number: number of the step.

        Raises:
            OutOfMemoryError: instead of the error that tells of too little memory.
        """
        optimizer, trainer = self._session.optimizer, self._session.trainer
        checked = trainer._checked
        before = _Before(optimizer, copy=not _stateless(optimizer) <= self._stay_stateless)
        try:
            yield
        except Exception as error:
            whole = before.put_back()
            trainer._checked = checked
            if not is_out_of_memory(error):
                raise
            optimizer.zero_grad(set_to_none=True)
            traceback.clear_frames(error.__traceback__)  # they hold the activations
            raise OutOfMemoryError(_sentence(self._session, number, error, whole)) from error
        self._stay_stateless = _stateless(optimizer)


def _stateless(optimizer: Optimizer) -> frozenset[int]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return frozenset(id(p) for p in parameters if p not in optimizer.state)


class _Before:
    """What an optimizer may change, as it was: a copy where its state is not made yet, else counts of writes."""

    def __init__(self, optimizer: Optimizer, *, copy: bool) -> None:
        self._optimizer = optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._copies: list[tuple[Tensor, Tensor, dict[str, Any]]] | None = None
        if copy:
            self._copies = [(p, _copy(p), _copied(optimizer.state.get(p, {}))) for p in parameters]
        self._parameters = parameters
        self._known = {p for p in parameters if p in optimizer.state}
        self._writes = self._count()

    def put_back(self) -> bool:
        """Undo what a failed step did; False when it could not be."""
        state = self._optimizer.state
        if self._copies is None:
            return self._count() == self._writes
        with torch.no_grad():
            for parameter, old, values in self._copies:
                parameter.copy_(old)
                if parameter not in self._known:
                    state.pop(parameter, None)
                    continue
                for key, value in values.items():
                    if isinstance(value, Tensor):
                        state[parameter][key].copy_(value)
                    else:
                        state[parameter][key] = value
        return True

    def _count(self) -> list[Any]:
        """How often each tensor was written to; plain values as they are."""
        state = self._optimizer.state
        counts: list[Any] = []
        for parameter in self._parameters:
            counts.append(parameter._version)
            if parameter in state:
                values = state[parameter].values()
                counts += [value._version if isinstance(value, Tensor) else value for value in values]
        return counts


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Tensor) else value for key, value in values.items()}


def _sentence(session: Any, number: int, error: BaseException, whole: bool) -> str:
    asked = re.search(r"tried to allocate ([\d.]+ ?\w+)", str(error), re.IGNORECASE)
    what = f"{asked.group(1)} more were asked for" if asked else type(error).__name__
    fate = (
        "The step was undone: weights, optimizer and generators are as before, and its batch comes again."
        if whole
        else "The optimizer was in the middle of its update, which cannot be undone: go back with undo() or load the "
        "newest checkpoint."
    )
    return f"memory is too small for step {number} ({what}). {fate} Lower {'; '.join(_what_to_lower(session))}."


def _what_to_lower(session: Any) -> list[str]:
    saved = session.recorder.book.saved_bytes
    kept = f", whose activations take {saved:,} bytes" if saved is not None else ""
    found = [f"batch_size (now {session._train_source.batch_size:,}{kept})"]
    ring = session.undo_ring
    if ring.max_bytes:
        found.append(f"undo_bytes (now {ring.max_bytes:,}, of which {ring.num_bytes:,} are in use)")
    if session.cache is not None:
        limit = session._arguments["cache"].max_bytes
        shown, used = "half of what was free" if limit is None else f"{limit:,}", session.cache.statistics.num_bytes
        found.append(f"max_bytes of the activation cache (now {shown}, of which {used:,} are in use)")
    if isinstance(session.settings_book.freeze, Plasticity):
        kind = session.settings_book.freeze.reference
        size = sum(p.numel() for p in session.model.parameters()) * _BYTES_A_NUMBER.get(kind, 4)
        found.append(f"the reference model (Plasticity(reference={kind!r}), about {size:,} bytes; 'int8' is smallest)")
    return found
