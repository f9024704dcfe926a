"""What a step is planned to cost before it is made: what a freezing schedule is solved with when weights are sparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from egeria_lab.algorithms.cost_model import dense_weight_gradients, effective_densities, layer_names, training_flops
from egeria_lab.algorithms.costs import StepFlops


class PlannedCost:
    """What one step of a sparse training is planned to cost at a progress, counted as `run_costs.RunFlops` counts it.

    Called with a progress alone it answers with the density of each layer, weighted by FLOPs.

    Args:
        step: from `count_flops`, with nothing frozen.
        densities_at: densities by parameter or layer name at a progress in [0, 1], with nothing frozen.
        targets: what the weights of a layer are pruned to when it freezes (MEST's soft memory bound), or None.
        dense_gradients_at: share of the steps at a progress whose weight gradients are dense (RigL), or None.

    Example:
        >>> step = StepFlops((8.0, 2.0), (8.0, 4.0), ("a", "b"))
        >>> planned = PlannedCost(step, lambda progress: {"a": 0.5}, targets={"a": 0.25})
        >>> planned.of_step((), 0.3), planned.of_step(("a",), 0.3), planned(0.3)
        (14.0, 8.0, [0.5, 1.0])
    """

    def __init__(
        self,
        step: StepFlops,
        densities_at: Callable[[float], Mapping[str, float]],
        *,
        targets: Mapping[str, float] | None = None,
        dense_gradients_at: Callable[[float], float] | None = None,
    ) -> None:
        self._step = step
        self._densities_at = densities_at
        self._targets_of_frozen = TargetsOfFrozen(step, targets)
        self._dense_gradients_at = dense_gradients_at
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}

    def of_step(self, frozen: Sequence[str], progress: float) -> float:
        """FLOPs of a step per sample at a progress, while some layers are frozen."""
        planned = self._densities_at(progress)
        key = (*frozen, None, *planned.items())
        if key not in self._known:  # densities stay the same over long stretches
            densities = {**planned, **self._targets_of_frozen(frozen)}
            gradients = dense_weight_gradients(self._step, densities, frozen) if self._dense_gradients_at else 0.0
            self._known[key] = (training_flops(self._step, densities=densities, frozen=frozen), gradients)
        cost, gradients = self._known[key]
        return cost + gradients * (self._dense_gradients_at(progress) if self._dense_gradients_at else 0.0)

    def __call__(self, progress: float) -> list[float]:
        return list(effective_densities(self._step, self._densities_at(progress)).values())


class TargetsOfFrozen:
    """The target densities of the weights of frozen layers: they are pruned to it when they freeze.

    Args:
        step: tells which layer a weight belongs to.
        targets: densities by parameter or layer name, or None.

    Example:
        >>> TargetsOfFrozen(StepFlops((8.0, 2.0), (8.0, 4.0), ("a", "b")), {"a": 0.25, "b": 0.5})(["a"])
        {'a': 0.25}
    """

    def __init__(self, step: StepFlops, targets: Mapping[str, float] | None) -> None:
        names = layer_names(step)
        self._owners = {p.weight: names[p.layer] for p in step.products if p.weight is not None}
        self._targets = targets or {}

    def __call__(self, frozen: Sequence[str]) -> dict[str, float]:
        return {name: share for name, share in self._targets.items() if self._owners.get(name, name) in frozen}
