"""Choose the number of threads by measuring, and say why."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

import torch


def available_cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has.

    Example:
        >>> available_cores() >= 1
        True
    """
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def choose_threads(work: Callable[[], object], rounds: int = 5) -> tuple[int, str]:
    """Time `work` with one thread and with all cores, interleaved, and keep the faster setting.

    Small models on few cores are often faster with one thread. The choice is left set in torch.

    Args:
        work: a piece of the real work, a few milliseconds or more.
        rounds: how often each setting is timed.

    Returns:
        The number of threads and the reason with the measured ratio.

    Example:
        >>> before = torch.get_num_threads()
        >>> threads, reason = choose_threads(lambda: torch.ones(8).sum(), rounds=1)
        >>> threads in (1, available_cores())
        True
        >>> torch.set_num_threads(before)
    """
    cores = available_cores()
    if cores == 1:
        torch.set_num_threads(1)
        return 1, "this process may use one core"
    seconds: dict[int, list[float]] = {1: [], cores: []}
    work()
    for _ in range(rounds):
        for threads, times in seconds.items():
            torch.set_num_threads(threads)
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    one, many = median(seconds[1]), median(seconds[cores])
    best = 1 if one <= many else cores
    torch.set_num_threads(best)
    return best, f"a step takes {one / many:.2f} times as long with 1 thread as with {cores}"
