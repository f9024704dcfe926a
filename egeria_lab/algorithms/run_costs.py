"""What a whole training costs, interval by interval, and which technique saves how much of it.

All figures are *theoretical*. The techniques are counted one after the other, so that what they leave multiplies:
sieving leaves samples out, sparsity thins the rest, freezing spares backward and a cache forward passes of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from egeria_lab.algorithms.cost_model import Shares, dense_weight_gradients, layer_names, training_flops
from egeria_lab.algorithms.costs import StepFlops
from egeria_lab.algorithms.planned_costs import TargetsOfFrozen
from egeria_lab.errors import InvalidSettingError, is_number, is_whole, require, unknown_name

Phases = Sequence[tuple[float, Mapping[str, float]]]
"""Densities of a run: up to which fraction of training they hold, and the densities by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A stretch of training in which nothing changes.

    Attributes:
        samples: sample presentations that it would have without a sieve: data set size × epochs, >= 0.
        frozen: names of the frozen layers.
        cached: frozen layers whose forward pass is served, or the share of each.
        densities: share of live weights by parameter (or layer) name.
        targets: the densities that were asked for, where training is allowed above them for a while (MEST's
            soft memory bound); None where there is no such allowance.
        unfrozen: densities that the same run would have now if nothing were frozen, where they are others
            (MEST prunes a layer to its target when it freezes); None for `densities`.
        dense_gradient_steps: steps between two updates that need dense weight gradients (RigL), or None; planned.
        dense_gradient_samples: samples trained on with dense weight gradients, where they were counted; goes first.
        sieved: share of the data set that is left out, in [0, 1).

    Raises:
        InvalidSettingError: when made with a value out of range.

    Example:
        >>> Interval(samples=60_000 * 5, sieved=0.2).trained
        240000.0
    """

    samples: float
    frozen: tuple[str, ...] = ()
    cached: Shares = ()
    densities: Mapping[str, float] = field(default_factory=dict)
    targets: Mapping[str, float] | None = None
    unfrozen: Mapping[str, float] | None = None
    dense_gradient_steps: int | None = None
    dense_gradient_samples: float | None = None
    sieved: float = 0.0

    def __post_init__(self) -> None:
        require(is_number(self.samples) and self.samples >= 0, "Interval", "samples", self.samples, "a number >= 0")
        steps = self.dense_gradient_steps
        inside = steps is None or (is_whole(steps) and steps >= 1)
        require(inside, "Interval", "dense_gradient_steps", steps, "a whole number >= 1 or None")
        dense = self.dense_gradient_samples
        inside = dense is None or (is_number(dense) and dense >= 0)
        require(inside, "Interval", "dense_gradient_samples", dense, "a number >= 0 or None")
        inside = is_number(self.sieved) and 0 <= self.sieved < 1
        require(inside, "Interval", "sieved", self.sieved, "the share of samples left out, in [0, 1)")

    @property
    def trained(self) -> float:
        """Sample presentations that are trained on."""
        return self.samples * (1 - self.sieved)

    @property
    def with_dense_gradients(self) -> float:
        """Those of them with dense weight gradients; an update step comes on top of the steps between two updates."""
        if self.dense_gradient_samples is not None:
            return self.dense_gradient_samples
        return self.trained / (self.dense_gradient_steps + 1) if self.dense_gradient_steps is not None else 0.0


@dataclass(slots=True)
class RunFlops:
    """Running totals of FLOPs, from dense training on all samples down to what is left of it.

    Attributes:
        samples: sample presentations without a sieve.
        trained_samples: those that were trained on.
        dense: FLOPs of dense training on all of them, with nothing frozen.
        after_sieving: the same on the samples that were trained on.
        after_sparsity: these times the densities of the weights, with the overheads below.
        after_freezing: these without what frozen layers spare.
        executed: these without the forward passes that a cache served: what the run costs on paper.
        soft_bound: share of `executed` that is owed to training above the target density (MEST), in FLOPs.
        dense_gradients: share of `executed` that is owed to dense weight gradients (RigL), in FLOPs.

    Example:
        >>> step = StepFlops(forward=(60.0, 40.0), backward=(120.0, 80.0), names=("body", "head"))
        >>> run = RunFlops()
        >>> run.add(step, Interval(samples=50, sieved=0.2))
        >>> run.add(step, Interval(samples=50, frozen=("body",), sieved=0.2))
        >>> round(run.saved_by_sieving, 3), round(run.saved_by_freezing, 3), round(run.saved, 3)
        (0.2, 0.2, 0.36)
    """

    samples: float = 0.0
    trained_samples: float = 0.0
    dense: float = 0.0
    after_sieving: float = 0.0
    after_sparsity: float = 0.0
    after_freezing: float = 0.0
    executed: float = 0.0
    soft_bound: float = 0.0
    dense_gradients: float = 0.0

    def add(self, step: StepFlops, interval: Interval) -> None:
        """Count one more interval, or one step (`samples` is then its batch size / (1 − `sieved`))."""
        trained, densities, frozen = interval.trained, interval.densities, interval.frozen
        full = training_flops(step)
        unfrozen = interval.unfrozen if interval.unfrozen is not None else densities
        sparse = training_flops(step, densities=unfrozen) if unfrozen else full
        same = interval.unfrozen is None and not frozen
        spared = sparse if same else training_flops(step, densities=densities, frozen=frozen)
        served = spared
        if interval.cached:
            served = training_flops(step, densities=densities, frozen=frozen, cached=interval.cached)
        grown = interval.with_dense_gradients
        gradients_all = grown * dense_weight_gradients(step, densities) if grown else 0.0
        gradients = grown * dense_weight_gradients(step, densities, frozen) if grown else 0.0
        self.samples += interval.samples
        self.trained_samples += trained
        self.dense += interval.samples * full
        self.after_sieving += trained * full
        self.after_sparsity += trained * sparse + gradients_all
        self.after_freezing += trained * spared + gradients
        self.executed += trained * served + gradients
        self.dense_gradients += gradients
        if interval.targets is not None:
            asked = training_flops(step, densities=interval.targets, frozen=frozen, cached=interval.cached)
            self.soft_bound += trained * (served - asked)

    @property
    def saved_by_sieving(self) -> float:
        """Share of dense training on all samples that leaving samples out saves, in [0, 1]."""
        return _saved(self.after_sieving, self.dense)

    @property
    def saved_by_sparsity(self) -> float:
        """Share of the dense training that sparsity saves; theoretical only, dense kernels save nothing."""
        return _saved(self.after_sparsity, self.after_sieving)

    @property
    def saved_by_freezing(self) -> float:
        """Share of the same run without freezing that frozen layers save: the papers' x."""
        return _saved(self.after_freezing, self.after_sparsity)

    @property
    def saved_by_caching(self) -> float:
        """Share of the frozen run that served forward passes save."""
        return _saved(self.executed, self.after_freezing)

    @property
    def saved(self) -> float:
        """Share of dense training on all samples that all of it together saves."""
        return _saved(self.executed, self.dense)

    def to_dict(self) -> dict[str, float]:
        """Totals and shares as JSON-able plain data."""
        shares = ("saved_by_sieving", "saved_by_sparsity", "saved_by_freezing", "saved_by_caching", "saved")
        return {**asdict(self), **{name: float(getattr(self, name)) for name in shares}}

    def state_dict(self) -> dict[str, float]:
        """The totals, to continue from a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Put back what `state_dict` gave."""
        for name in asdict(self):
            setattr(self, name, state[name])


def _saved(after: float, before: float) -> float:
    return 1 - after / before if before else 0.0


def run_flops(step: StepFlops, intervals: Sequence[Interval]) -> RunFlops:
    """Add up a whole training.

    Args:
        step: from `count_flops`.
        intervals: what held when; `plan_intervals` makes them from a schedule.

    Example:
        >>> step = StepFlops(forward=(100.0,), backward=(200.0,))
        >>> run_flops(step, [Interval(samples=10, sieved=0.5)]).executed
        1500.0
    """
    total = RunFlops()
    for interval in intervals:
        total.add(step, interval)
    return total


def plan_intervals(
    step: StepFlops,
    samples: float,
    *,
    freeze_times: Mapping[str, float] | None = None,
    phases: Phases = (),
    targets: Mapping[str, float] | None = None,
    dense_gradient_steps: int | None = None,
    sieved: float = 0.0,
) -> list[Interval]:
    """The intervals of a training whose schedule is known.

    Args:
        step: from `count_flops`.
        samples: sample presentations without a sieve: data set size × epochs.
        freeze_times: layer → fraction of training at which it freezes for good; 1 or more for never.
        phases: densities by time, ``[(0.5, {…}), (1.0, {…})]``; the last one holds to the end.
        targets: as in `Interval`; weights of a frozen layer are then at their target from its freeze on.
        dense_gradient_steps: as in `Interval`.
        sieved: as in `Interval`.

    Raises:
        UnknownNameError: for a layer that does not exist.
        InvalidSettingError: when the phases are not in order of time.

    Example:
        >>> step = StepFlops(forward=(1.0, 1.0), backward=(2.0, 2.0), names=("body", "head"))
        >>> [(i.samples, i.frozen) for i in plan_intervals(step, 100, freeze_times={"body": 0.25})]
        [(25.0, ()), (75.0, ('body',))]
    """
    times, names = freeze_times or {}, layer_names(step)
    targets_of_frozen = TargetsOfFrozen(step, targets)
    unknown = [name for name in times if name not in names]
    if unknown:
        raise unknown_name("layer", unknown[0], names)
    ends = [end for end, _ in phases]
    if ends != sorted(set(ends)):
        raise InvalidSettingError(f"phases must end one after the other, in order of time; got the ends {ends}.")
    edges = sorted({0.0, 1.0, *(time for time in [*times.values(), *ends] if 0 < time < 1)})
    intervals = []
    for start, end in pairwise(edges):
        frozen = tuple(name for name in names if times.get(name, 1.0) <= start)
        phase = next((densities for until, densities in phases if start < until), phases[-1][1] if phases else {})
        intervals.append(
            Interval(
                samples=samples * (end - start), frozen=frozen, densities={**phase, **targets_of_frozen(frozen)},
                targets=targets, dense_gradient_steps=dense_gradient_steps, sieved=sieved,
            )
        )  # fmt: skip
    return intervals


def mean_density(phases: Sequence[tuple[float, float]]) -> float:
    """Density averaged over a training, from pairs (how long, density).

    Under a soft memory bound it is above the target: EM&S at 90 % trains at 0.15, 0.125, 0.10, a third more work.

    Source: MEST (NeurIPS 2021), section 4; phases of ResNet-32 over 160 epochs.

    Example:
        >>> round(mean_density([(90, 0.15), (30, 0.125), (40, 0.10)]), 4)
        0.1328
    """
    length = sum(duration for duration, _ in phases)
    require(length > 0, "mean_density", "phases", list(phases), "pairs (how long > 0, density)")
    return sum(duration * density for duration, density in phases) / length


def rigl_flops(sparse: float, dense: float, interval: int) -> float:
    """RigL's FLOPs per sample, averaged over an update step and the steps between: (3 f_S ΔT + 2 f_S + f_D) / (ΔT + 1).

    Args:
        sparse: forward FLOPs of the sparse model, f_S.
        dense: forward FLOPs of the dense model, f_D; the weight gradients of an update step are dense.
        interval: steps between two updates, ΔT >= 1.

    Source: Evci et al., "Rigging the Lottery", ICML 2020, appendix on FLOPs.

    Example:
        >>> rigl_flops(sparse=10.0, dense=111.0, interval=100)
        31.0
    """
    require(is_whole(interval) and interval >= 1, "rigl_flops", "interval", interval, "a whole number >= 1")
    return (3 * sparse * interval + 2 * sparse + dense) / (interval + 1)


def combined_share(freezing: float, sieving: float) -> float:
    """What is left of the FLOPs when freezing saves a share x and sieving leaves out p: (1 − x)(1 − p).

    Source: SpFDE (NeurIPS 2022), section 4.

    Example:
        >>> [round(combined_share(share, share), 4) for share in (0.15, 0.20, 0.25)]
        [0.7225, 0.64, 0.5625]
    """
    for name, share in (("freezing", freezing), ("sieving", sieving)):
        require(is_number(share) and 0 <= share < 1, "combined_share", name, share, "a share in [0, 1)")
    return (1 - freezing) * (1 - sieving)
