"""When to freeze so that a share of the FLOPs is saved, solved from the counted cost of a model's steps.

Pure functions. *Step costs* are all that is asked of a model: entry ``k`` is what one step costs, forward
and backward, while the first `k` blocks are frozen. Times may be in any unit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from egeria_lab.algorithms.freeze_plans import Stints, frozen_fronts, single_shot
from egeria_lab.errors import InvalidSettingError, is_number

DENSITY_CELLS = 4096
"""A density that varies is read at no more than this many times of a training."""

CostAt = Callable[[float], float]
StepCosts = Sequence[float] | Sequence[Sequence[float]] | Sequence[CostAt]
Density = Callable[[float], float | Sequence[float]]


def three_unit_costs(forward: Sequence[float], most_frozen: int) -> list[list[float]]:
    """The step costs of the papers: forward, input gradient and weight gradient cost one unit each.

    Frozen blocks keep the forward unit. Counted costs are better wherever a model can be run: its first
    trained block needs no input gradient, for example.

    Args:
        forward: forward cost of each block (the head included), front to back, in any unit.
        most_frozen: how many blocks may be frozen.

    Returns:
        Row ``k`` holds the cost of each block while the first `k` are frozen, for ``k = 0 … most_frozen``.

    Source: SpFDE (NeurIPS 2022), section 3.2.

    Example:
        >>> three_unit_costs([1.0, 2.0], most_frozen=1)
        [[3.0, 6.0], [1.0, 6.0]]
    """
    return [
        [cost if index < frozen else 3 * cost for index, cost in enumerate(forward)]
        for frozen in range(most_frozen + 1)
    ]


def layer_densities(sparse_shares: Sequence[float], density_at: Callable[[float], float]) -> Density:
    """Densities of layers that are masked only in part, for the `density_at` of the functions below.

    Args:
        sparse_shares: share of each layer's FLOPs that lies under a mask, in [0, 1]; 0 for a dense layer.
        density_at: density of the masked weights at a progress in [0, 1].

    Example:
        >>> layer_densities([0.0, 0.5], lambda progress: 0.5)(0.3)
        [1.0, 0.75]
    """

    def densities(progress: float) -> list[float]:
        density = density_at(progress)
        return [1 - share * (1 - density) for share in sparse_shares]

    return densities


class SavingMeter:
    """Tells which share of a training's FLOPs a freezing plan saves.

    Args:
        step_costs: entry ``k`` is the cost of one step with the first `k` blocks frozen, as one number, as one
            number a layer where their densities differ, or as a function of progress in [0, 1] that knows all
            about densities by itself (`planned_costs.PlannedCost`).
        total: length of the training, > 0, in the unit of the stints (steps or epochs).
        density_at: ``density_at(progress)``, what the costs are multiplied with at a progress in [0, 1]: one
            number, or one a layer; None for a constant one. Read in the middle of each unit of a whole
            `total`, of at most `DENSITY_CELLS` parts.
        work_at: samples processed by a time, growing with it; None where each unit of time has equally many.

    Raises:
        InvalidSettingError: for costs that are no numbers >= 0, or a training that costs nothing.

    Example:
        >>> meter = SavingMeter([3.0, 1.0], total=100)
        >>> round(meter.saving([((40.0, 90.0),)]), 4)    # 2 of 3 units in 50 of 100 epochs
        0.3333
    """

    def __init__(
        self,
        step_costs: StepCosts,
        total: float,
        *,
        density_at: Density | None = None,
        work_at: Callable[[float], float] | None = None,
    ) -> None:
        self.total = total
        self._work_at = work_at if work_at is not None else float
        rows = [row if callable(row) else [row] if isinstance(row, (int, float)) else list(row) for row in step_costs]
        given = [cost for row in rows if not callable(row) for cost in row]
        if not rows or not all(is_number(cost) and cost >= 0 for cost in given):
            raise InvalidSettingError(f"step costs must be finite numbers >= 0, at least one, got {step_costs!r}.")
        cells = 1
        if density_at is not None or any(callable(row) for row in rows):
            cells = int(total) if float(total).is_integer() and total <= DENSITY_CELLS else DENSITY_CELLS
        self._edges = [total * index / cells for index in range(cells + 1)]
        self._work = [self._work_at(edge) for edge in self._edges]
        self._rates = [_rates(row, density_at, cells) for row in rows]
        self._sums = [_running_sums(rates, self._work) for rates in self._rates]
        if self.spent(0, total) <= 0:
            raise InvalidSettingError(
                f"a training of length {total:g} with step costs {step_costs[0]!r} costs nothing."
            )

    def spent(self, frozen: int, time: float) -> float:
        """What the training costs up to a time when the first `frozen` blocks are frozen throughout."""
        cell = min(bisect_right(self._edges, time), len(self._edges) - 1) - 1
        within = self._work_at(time) - self._work[cell]
        return self._sums[frozen][cell] + self._rates[frozen][cell] * within

    def saving(self, plan: Sequence[Stints]) -> float:
        """Share of the FLOPs that is saved, in [0, 1].

        Args:
            plan: the stints of each block, front to back; only blocks that are frozen without a gap from the
                front count. No more blocks than there are step costs for.
        """
        if len(plan) >= len(self._sums):
            raise InvalidSettingError(
                f"{len(plan)} blocks that freeze need {len(plan) + 1} step costs, the one without freezing included; "
                f"got {len(self._sums)}."
            )
        saved = 0.0
        for start, end, frozen in frozen_fronts(plan, self.total):
            if frozen:
                saved += self.spent(0, end) - self.spent(0, start)
                saved -= self.spent(frozen, end) - self.spent(frozen, start)
        return saved / self.spent(0, self.total)


def _rates(row: Sequence[float] | CostAt, density_at: Density | None, cells: int) -> list[float]:
    if callable(row):
        return [row((cell + 0.5) / cells) for cell in range(cells)]
    if density_at is None:
        return [sum(row)] * cells
    rates = []
    for cell in range(cells):
        density = density_at((cell + 0.5) / cells)
        if isinstance(density, (int, float)):
            rates.append(sum(row) * density)
        elif len(density) == len(row):
            rates.append(sum(cost * own for cost, own in zip(row, density, strict=True)))
        else:
            raise InvalidSettingError(
                f"density_at gives {len(density)} densities for costs of {len(row)} layers; give one each, or a number."
            )
    return rates


def _running_sums(rates: Sequence[float], work: Sequence[float]) -> list[float]:
    sums = [0.0]
    for rate, (before, after) in zip(rates, pairwise(work), strict=True):
        sums.append(sums[-1] + rate * (after - before))
    return sums


def epoch_clocks(steps_per_epoch: int) -> list[Callable[[float], float]]:
    """Samples by step (in batches), if the last batch of each epoch were empty, and if it were twice as large.

    A saving is monotonic in the size of that batch: what both clocks tell holds for every size between.

    Example:
        >>> [[clock(step) for step in (2, 3, 5)] for clock in epoch_clocks(3)]
        [[2.0, 2.0, 4.0], [2.0, 4.0, 6.0]]
    """
    if steps_per_epoch == 1:
        return [float]
    before = steps_per_epoch - 1

    def clock(last: float) -> Callable[[float], float]:
        def samples(step: float) -> float:
            epochs, position = divmod(step, steps_per_epoch)
            return epochs * (before + last) + min(position, before) + last * max(0.0, position - before)

        return samples

    return [clock(0.0), clock(2.0)]


def latest(candidates: Sequence[float], saving_of: Callable[[float], float], target: float) -> float | None:
    """The largest of ascending candidates whose saving meets a target, or None; savings fall along them.

    Example:
        >>> latest([0, 10, 20, 30], lambda start: 1 - start / 40, target=0.5)
        20
    """
    if not candidates or saving_of(candidates[0]) < target:
        return None
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if saving_of(candidates[middle]) >= target:
            low = middle
        else:
            high = middle - 1
    return candidates[low]


def solve_start(
    step_costs: StepCosts,
    saving: float,
    interval: float,
    total: float,
    *,
    until: float | None = None,
    density_at: Density | None = None,
) -> int:
    """T_frz: the latest whole time at which a single-shot schedule may begin and still meet a saving target.

    Args:
        step_costs: as in `SavingMeter`; there are ``len(step_costs) - 1`` blocks that freeze.
        saving: wanted share of the training FLOPs, in (0, 1).
        interval: time between two freezes.
        total: length of the training.
        until: when everything is thawed; None for never.
        density_at: as in `SavingMeter`.

    Raises:
        InvalidSettingError: when even freezing from the start saves less; the message gives the ceiling.

    Source: SpFDE (NeurIPS 2022), section 3.2.

    Example:
        >>> solve_start([6.0, 4.0], saving=0.1667, interval=10, total=100)
        49
    """
    meter = SavingMeter(step_costs, total, density_at=density_at)
    count, end = len(step_costs) - 1, total if until is None else until

    def saving_of(start: float) -> float:
        return meter.saving(single_shot(count, start, interval, end))

    start = latest(range(math.ceil(end)), saving_of, saving)
    if start is None:
        most = f"{count} blocks frozen one every {interval:g} of {total:g}"
        raise beyond_the_ceiling(saving, saving_of(0), most)
    return int(start)


def beyond_the_ceiling(saving: float, ceiling: float, most: str) -> InvalidSettingError:
    """The error for a saving that cannot be met; it names the ceiling, rounded down so that it can be used.

    Example:
        >>> print(beyond_the_ceiling(0.5, 0.44876, "10 of 15 blocks frozen"))
        saving=0.5 is more than this schedule can save: the ceiling is 0.4487, with 10 of 15 blocks frozen. Ask
        for less, shorten the interval, raise max_frozen, or train longer.
    """
    return InvalidSettingError(
        f"saving={saving:.4g} is more than this schedule can save: the ceiling is "
        f"{math.floor(ceiling * 1e4) / 1e4:g}, with {most}. Ask for less, shorten the interval, raise max_frozen, "
        "or train longer."
    )
