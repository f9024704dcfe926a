"""Run a model on the side, in the modes of now, and give buffers and generators back as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def seed_generators(seed: int) -> None:
    """Seed torch's global generators, those of accelerators only where they are in use already.

    Not `torch.manual_seed`: it takes a lock that a process which reads data, forked at that moment from another
    thread, would wait for without end.

    Example:
        >>> with torch.random.fork_rng():
        ...     seed_generators(1)
        ...     torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(1)))
        True
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def seeded(run: Callable[[], Any]) -> Any:
    """Run with the global generators at one fixed state; for use inside `given_back`.

    Example:
        >>> with given_back(nn.Linear(1, 1)):
        ...     torch.equal(seeded(lambda: torch.rand(2)), seeded(lambda: torch.rand(2)))
        True
    """
    seed_generators(0)
    return run()


def generator_states() -> list[Tensor]:
    """The states of the global generators, of the CPU first.

    Example:
        >>> before = generator_states()
        >>> _ = torch.rand(1)
        >>> torch.equal(before[0], generator_states()[0])
        False
        >>> set_generator_states(before)
    """
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return states


def set_generator_states(states: list[Tensor]) -> None:
    """Put states from `generator_states` back."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


@contextmanager
def given_back(model: nn.Module) -> Iterator[None]:
    """Run the block in the modes of now and give buffers and generators back.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with given_back(norm):
        ...     _ = norm(torch.randn(4, 2))
        >>> int(norm.num_batches_tracked)
        0
    """
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    # Not when it is the same: whoever watches tensors for changes shall see none.
                    if name in buffers and not torch.equal(buffer, buffers[name]):
                        buffer.copy_(buffers[name])
