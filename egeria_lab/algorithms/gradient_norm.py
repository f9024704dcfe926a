"""Freeze by the change of gradient norms: the rule of AutoFreeze, as a baseline beside plasticity.

Source: Liu et al., "AutoFreeze: Automatically Freezing Model Blocks to Accelerate Fine-tuning", 2021,
section 4: gradients are summed over an interval; a layer may freeze when the relative change of that sum's
norm is below a percentile of all active layers and everything before it is frozen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from egeria_lab.algorithms.decision import Decision
from egeria_lab.errors import is_number, is_whole, require
from egeria_lab.tables import ShownAsTable


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorm(ShownAsTable):
    """Freeze front layers whose gradient norm changes least.

    Attributes:
        interval_steps: steps over which gradients are summed, >= 1.
        percentile: a layer may freeze when its change lies below this percentile of the active layers'
            changes, in (0, 100].
        warm_up: intervals before the first freeze, >= 2.
        max_frozen: at most this share of the layers freezes, in (0, 1], or None.

    Raises:
        InvalidSettingError: when made with a value outside these ranges.

    Example:
        >>> GradientNorm(percentile=30).interval_steps
        50
    """

    interval_steps: int = 50
    percentile: float = 50.0
    warm_up: int = 2
    max_frozen: float | None = None

    prefix: ClassVar[str] = "freeze"

    def __post_init__(self) -> None:
        for name, low in (("interval_steps", 1), ("warm_up", 2)):
            value = getattr(self, name)
            require(is_whole(value) and value >= low, "GradientNorm", name, value, f"a whole number >= {low}")
        percent = is_number(self.percentile) and 0 < self.percentile <= 100
        require(percent, "GradientNorm", "percentile", self.percentile, "in (0, 100]")
        allowed = self.max_frozen is None or (is_number(self.max_frozen) and 0 < self.max_frozen <= 1)
        require(allowed, "GradientNorm", "max_frozen", self.max_frozen, "in (0, 1] or None")


def relative_change(before: float, after: float) -> float:
    """``|before − after| / before``, and 0 when both are 0.

    Example:
        >>> relative_change(4.0, 3.0)
        0.25
    """
    if before == 0:
        return 0.0 if after == 0 else float("inf")
    return abs(before - after) / before


def percentile_of(values: Sequence[float], percentile: float) -> float:
    """Linear-interpolated percentile of some values.

    Example:
        >>> percentile_of([1.0, 2.0, 3.0, 4.0], 50)
        2.5
    """
    ordered = sorted(values)
    position = (len(ordered) - 1) * percentile / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class GradientNormPolicy:
    """AutoFreeze's rule over the ordered layers of one model.

    Args:
        layers: layer name → its parameters, front to back; the last one (the head) never freezes.
        settings: the rule's settings.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> policy = GradientNormPolicy({"a": list(layer.parameters()), "head": []}, GradientNorm())
        >>> policy.evaluate(frozen=(), pinned=())
        []
    """

    def __init__(self, layers: Mapping[str, Sequence[nn.Parameter]], settings: GradientNorm) -> None:
        self.layers = dict(layers)
        self.settings = settings
        self.changes: dict[str, float] = {}
        self._sums: dict[str, list[Tensor]] = {}
        self._norms: dict[str, float] = {}
        self._intervals = 0

    def observe(self, frozen: Sequence[str]) -> None:
        """Add the gradients that lie in the parameters after a step."""
        for name, parameters in self.layers.items():
            if name in frozen:
                self._sums.pop(name, None)
                continue
            grads = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
            sums = self._sums.get(name)
            if sums is None or len(sums) != len(grads):
                self._sums[name] = [grad.clone() for grad in grads]
            else:
                for total, grad in zip(sums, grads, strict=True):
                    total.add_(grad)

    def evaluate(self, *, frozen: Sequence[str], pinned: Sequence[str]) -> list[Decision]:
        """At the end of an interval: which front layers freeze."""
        norms = {
            name: float(sum(float(total.square().sum()) for total in sums)) ** 0.5
            for name, sums in self._sums.items()
            if sums
        }
        self.changes = {
            name: relative_change(self._norms[name], norm) for name, norm in norms.items() if name in self._norms
        }
        self._norms, self._sums = norms, {}
        self._intervals += 1
        if self._intervals <= self.settings.warm_up or not self.changes:
            return []
        limit = percentile_of(list(self.changes.values()), self.settings.percentile)
        return self._front_below(limit, frozen, pinned)

    def state_dict(self) -> dict[str, Any]:
        """Sums and norms so far: plain values and tensors."""
        return {
            "changes": dict(self.changes),
            "norms": dict(self._norms),
            "sums": {name: list(sums) for name, sums in self._sums.items()},
            "intervals": self._intervals,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, on the device of the parameters; the tensors are taken over."""
        self.changes, self._norms = dict(state["changes"]), dict(state["norms"])
        self._sums = {
            name: [total.to(self.layers[name][0].device) for total in sums] for name, sums in state["sums"].items()
        }
        self._intervals = state["intervals"]

    def _front_below(self, limit: float, frozen: Sequence[str], pinned: Sequence[str]) -> list[Decision]:
        names = list(self.layers)
        cap = len(names) - 1
        if self.settings.max_frozen is not None:
            cap = min(cap, int(self.settings.max_frozen * len(names)))
        decisions: list[Decision] = []
        for name in names[:-1]:
            if name in frozen:
                continue
            change = self.changes.get(name)
            if change is None or change >= limit or name in pinned or len(frozen) + len(decisions) >= cap:
                break
            reason = (
                f"gradient norm changed by {change:.1%}, below {limit:.1%} "
                f"(percentile {self.settings.percentile:g} of the active layers)"
            )
            decisions.append(Decision(action="freeze", layer=name, reason=reason, slope=change, tolerance=limit))
        return decisions
