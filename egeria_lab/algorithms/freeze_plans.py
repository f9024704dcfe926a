"""Who freezes when: blocks of layers, and the shapes that a freezing plan can have.

Pure functions. A *block* is what freezes at once. When a block is frozen is told by its *stints*, pairs
``(from, until)``; a plan is a list of them, one entry a block, front to back. Times may be in any unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

NEVER = math.inf
STEM_SHARE = 0.25
"""A first layer with less than this share of the next one's forward FLOPs counts as a stem."""

STEMS = ("auto", "first", "own")

Stints = tuple[tuple[float, float], ...]


def group_blocks(
    names: Sequence[str], forward_costs: Sequence[float], stem: str = "auto"
) -> tuple[tuple[str, ...], ...]:
    """The blocks that freeze at once: each layer module is one, and a stem goes with the first.

    Layer modules are never cut inside a residual block or an encoder layer, so each such block is one. The
    first layer is a *stem* when its forward pass costs less than `STEM_SHARE` of the next layer's: a first
    convolution before residual blocks, patches or an embedding before encoder layers, but not the first
    layer of a perceptron. The head is always a block of its own.

    Args:
        names: layer names, front to back.
        forward_costs: forward FLOPs of each.
        stem: ``"auto"``, ``"first"`` (the first layer always goes with the second) or ``"own"`` (never).

    Example:
        >>> group_blocks(["stem", "a", "b", "head"], [1, 20, 20, 1])
        (('stem', 'a'), ('b',), ('head',))
        >>> group_blocks(["a", "b", "head"], [16, 32, 1])
        (('a',), ('b',), ('head',))
    """
    joins = len(names) > 2 and (
        stem == "first" or (stem == "auto" and forward_costs[0] < STEM_SHARE * forward_costs[1])
    )
    if joins:
        return ((names[0], names[1]), *((name,) for name in names[2:]))
    return tuple((name,) for name in names)


def frozen_fronts(plan: Sequence[Stints], total: float) -> Iterator[tuple[float, float, int]]:
    """How many blocks are frozen from the front without a gap, as ``(from, until, number)``, ascending.

    Args:
        plan: the stints of each block, front to back, each block's in ascending order.
        total: length of the training.

    Example:
        >>> list(frozen_fronts([((1, 9),), ((2, 3), (5, 9))], total=9))
        [(0, 1, 0), (1, 2, 1), (2, 3, 2), (3, 5, 1), (5, 9, 2)]
    """
    times = {min(max(time, 0), total) for block in plan for stint in block for time in stint}
    positions = [0] * len(plan)
    for start, end in pairwise(sorted({0, total, *times})):
        number = 0
        for index, block in enumerate(plan):
            while positions[index] < len(block) and block[positions[index]][1] <= start:
                positions[index] += 1
            if positions[index] == len(block) or block[positions[index]][0] > start:
                break
            number += 1
        yield start, end, number


def single_shot(count: int, start: float, interval: float, end: float) -> list[Stints]:
    """Stints of `count` blocks: the first freezes at `start`, one more every `interval`, all until `end`.

    Example:
        >>> single_shot(3, start=10, interval=5, end=18)
        [((10, 18),), ((15, 18),), ()]
    """
    starts = [start + index * interval for index in range(count)]
    return [((begin, end),) if begin < end else () for begin in starts]


def cycles(count: int, delay: float, length: float, trained: float, total: float) -> list[Stints]:
    """Stints of `count` blocks that freeze together in each cycle, after training for its first part.

    Args:
        count: number of blocks.
        delay: step after which the first cycle begins.
        length: steps of a cycle.
        trained: mean number of steps, < `length`, that the blocks train in a cycle; each trains a whole number.
        total: steps of the training; the last cycle may be cut short.

    Example:
        >>> cycles(1, delay=10, length=20, trained=15.5, total=60)
        [((25, 30), (46, 50))]
    """
    stints = []
    for index in range(math.ceil(max(0.0, total - delay) / length)):
        own = math.floor((index + 1) * trained + 1e-9) - math.floor(index * trained + 1e-9)
        begin, end = delay + index * length + own, delay + (index + 1) * length
        if begin < min(end, total):
            stints.append((begin, min(end, total)))
    return [tuple(stints)] * count


def whole_steps(plan: Sequence[Stints], total: int) -> list[Stints]:
    """The same plan with each time moved to the next whole step, where it takes effect; what is empty is left out.

    Example:
        >>> whole_steps([((1.2, 3.0), (3.5, 9.0))], total=8)
        [((2, 3), (4, 8))]
    """

    def moved(time: float) -> int:
        return min(total, math.ceil(time - 1e-9))

    return [tuple((moved(a), moved(b)) for a, b in block if moved(a) < moved(b)) for block in plan]


def linear_times(count: int, start: float, level: float) -> list[float]:
    """When each of `count` blocks freezes, as a fraction of training, under a linear schedule.

    From `start` on the frozen share of the blocks grows linearly and would reach `level` at the end.

    Source: the schedule of MosaicML Composer's layer freezing.

    Example:
        >>> linear_times(4, start=0.5, level=1.0)
        [0.625, 0.75, 0.875, 1.0]
    """
    return [
        start + (1 - start) * (index + 1) / (count * level) if index + 1 <= count * level else NEVER
        for index in range(count)
    ]


def freezeout_times(count: int, start: float) -> list[float]:
    """When each of `count` blocks freezes under FreezeOut's cubic schedule, as a fraction of training.

    The i-th time is ``(start^(1/3) + i/(count−1) · (1 − start^(1/3)))³``: front blocks freeze in quick
    succession, later ones last longer; the last one trains to the end.

    Source: Brock et al., "FreezeOut", 2017, section 3 (cubic scheduling).

    Example:
        >>> [round(t, 3) for t in freezeout_times(3, start=0.5)]
        [0.5, 0.721, 1.0]
    """
    if count == 1:
        return [1.0]
    root = start ** (1 / 3)
    return [(root + index / (count - 1) * (1 - root)) ** 3 for index in range(count)]
