"""How a sparsity is shared out among the layers, and how many weights that is in each, exactly.

*Uniform* gives each layer the same density. *ERK* (Erdős–Rényi–Kernel) gives a layer the density
``ε · (sum of its dimensions) / (product of its dimensions)``: small layers stay denser. Both speak of the
masked layers alone; layers that stay dense are no part of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from egeria_lab.errors import InvalidSettingError

Shapes = Mapping[str, Sequence[int]]


def uniform_densities(
    shapes: Shapes, density: float, caps: Mapping[str, float] | None = None, *, clip: bool = False
) -> dict[str, float]:
    """The same density for each layer.

    Args:
        shapes: name → shape of each masked weight.
        density: share of the weights that is live, in [0, 1].
        caps: name → highest density that the layer's scheme allows, 1 where a name is missing.
        clip: stop at the caps instead of raising.

    Raises:
        InvalidSettingError: when a layer's scheme does not allow that density.

    Example:
        >>> uniform_densities({"a": (4, 4), "b": (8, 8)}, 0.25)
        {'a': 0.25, 'b': 0.25}
    """
    limits = {name: (caps or {}).get(name, 1.0) for name in shapes}
    for name, limit in limits.items():
        if density > limit + 1e-9 and not clip:
            raise _over_cap(name, density, limit)
    return {name: min(density, limit) for name, limit in limits.items()}


def erk_densities(
    shapes: Shapes, density: float, caps: Mapping[str, float] | None = None, *, clip: bool = False
) -> dict[str, float]:
    """Densities in proportion to ``sum(shape) / prod(shape)``, none above its cap, with the asked total.

    A layer that would exceed its cap is set to it, and ε is solved again for the others, until none does.

    Args:
        shapes: name → shape of each masked weight.
        density: share of all these weights that is live, in [0, 1].
        caps: name → highest density that the layer's scheme allows, 1 where a name is missing.
        clip: stop at the caps instead of raising.

    Raises:
        InvalidSettingError: when even all layers at their caps hold fewer live weights.

    Source: Evci et al., "Rigging the Lottery" (RigL, 2020), section 3; Mocanu et al., 2018.

    Example:
        >>> shapes = {"small": (4, 4), "large": (40, 40)}
        >>> {name: round(d, 4) for name, d in erk_densities(shapes, 0.1).items()}    # 10 : 1, as 8/16 : 80/1600
        {'small': 0.9182, 'large': 0.0918}
        >>> {name: round(d, 4) for name, d in erk_densities(shapes, 0.2).items()}    # small is clipped
        {'small': 1.0, 'large': 0.192}
    """
    limits = {name: (caps or {}).get(name, 1.0) for name in shapes}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    budget = density * sum(sizes.values())
    most = sum(limits[name] * size for name, size in sizes.items())
    if budget > most * (1 + 1e-9) and not clip:
        raise InvalidSettingError(
            f"a density of {density:.4g} is more than the scheme allows over these layers "
            f"({most / sum(sizes.values()):.4g}); raise the sparsity, or choose another scheme."
        )
    free = set(shapes)
    result = dict(limits)
    while free:
        epsilon = budget / sum(sum(shapes[name]) for name in free)
        over = {name for name in free if epsilon * sum(shapes[name]) / sizes[name] > limits[name]}
        if not over:
            result |= {name: epsilon * sum(shapes[name]) / sizes[name] for name in free}
            break
        budget -= sum(limits[name] * sizes[name] for name in over)
        free -= over
    return {name: result[name] for name in shapes}


DENSITIES: dict[str, Callable[..., dict[str, float]]] = {
    "uniform": uniform_densities,
    "erk": erk_densities,
}


def live_units(
    sizes: Mapping[str, int], unit_size: Mapping[str, int], densities: Mapping[str, float]
) -> dict[str, int]:
    """How many units (single weights, blocks, kernels) of each layer are live.

    Each layer gets its share rounded down or up, so that the total is as near to the asked one as whole
    units allow (largest remainder first). No layer falls to zero: a layer without a live weight would cut
    the network in two and could never be judged again, so one unit stays even where the share is less.

    Args:
        sizes: name → weights in the layer.
        unit_size: name → live weights in one live unit.
        densities: name → wanted share of live weights, in [0, 1].

    Example:
        >>> sizes, ones = {"a": 5, "b": 5, "c": 5}, {"a": 1, "b": 1, "c": 1}
        >>> live_units(sizes, ones, {"a": 0.5, "b": 0.5, "c": 0.1})    # shares of 2.5, 2.5 and 0.5
        {'a': 3, 'b': 2, 'c': 1}
    """
    # Rounded at the ninth place first: 0.29 · 100 is 28.999… in binary and means 29.
    ideal = {name: round(densities[name] * size / unit_size[name], 9) for name, size in sizes.items()}
    result = {name: max(1, math.floor(value)) for name, value in ideal.items()}
    missing = sum((ideal[name] - result[name]) * unit_size[name] for name in sizes)
    # Those of equal remainder in the order of the model: which of two layers gets the odd weight is no matter.
    for name in sorted(sizes, key=lambda name: result[name] - ideal[name]):
        if ideal[name] > result[name] and missing >= unit_size[name] / 2:
            result[name] += 1
            missing -= unit_size[name]
    return result


def _over_cap(name: str, density: float, cap: float) -> InvalidSettingError:
    return InvalidSettingError(
        f"{name} would have a density of {density:.4g} and its scheme allows at most {cap:.4g}; give a sparsity of at "
        f"least {1 - cap:.4g}, choose another scheme, or keep the layer dense (dense=({name!r},))."
    )
