"""What a training step costs per sample when layers are frozen, cached or sparse and samples are left out.

Everything here is *theoretical*: counted once on the real model by `count_flops`, then derived. A layer
module costs three units per sample, forward, input gradient and weight gradient, each times the density of
its weights; a frozen front costs the forward unit (none when cached), a frozen hole forward and input
gradient. Dense kernels work on masked weights all the same: what sparsity saves here is saved on paper.

Sources: SpFDE (NeurIPS 2022), section 3; MEST (NeurIPS 2021), section 4; RigL (ICML 2020), appendix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from egeria_lab.algorithms.costs import StepFlops
from egeria_lab.algorithms.products import Product
from egeria_lab.errors import InvalidSettingError, is_number, require, unknown_name

Shares = Sequence[str] | Mapping[str, float]
"""Names of layers, or layer → share in [0, 1]."""

_DENSITIES = "a mapping of parameter or layer names to shares in [0, 1], or None"


def training_flops(
    step: StepFlops,
    *,
    frozen: Sequence[str] = (),
    cached: Shares = (),
    densities: Mapping[str, float] | None = None,
    sieved: float = 0.0,
) -> float:
    """FLOPs of training for one sample of the data set, forward and backward.

    Args:
        step: from `count_flops`, under any frozen set. Made by hand (without products) it is read as the
            papers do, in whole units; a counted one also knows that the first trained layer needs no input
            gradient.
        frozen: names of the frozen layers, whatever lies before them.
        cached: frozen layers whose forward pass is served from a cache, or the share of samples for each.
        densities: share of live weights in [0, 1], by parameter name (exact) or by layer name (scales all
            that the layer does); what is not named is dense.
        sieved: share of the data set that is not trained on, in [0, 1).

    Raises:
        UnknownNameError: for a name that is neither a layer nor a parameter.
        InvalidSettingError: for a share out of range, or a cached layer outside the frozen front.

    Example:
        >>> step = StepFlops(forward=(100.0, 100.0), backward=(200.0, 200.0), names=("body", "head"))
        >>> training_flops(step), training_flops(step, frozen=["body"]), training_flops(step, sieved=0.25)
        (600.0, 400.0, 450.0)
        >>> training_flops(step, densities={"body": 0.1}, frozen=["body"])
        310.0
    """
    inside = is_number(sieved) and 0 <= sieved < 1
    require(inside, "training_flops", "sieved", sieved, "the share of samples left out, in [0, 1)")
    return layer_flops(step, frozen=frozen, cached=cached, densities=densities).total * (1 - sieved)


def layer_flops(
    step: StepFlops,
    *,
    frozen: Sequence[str] = (),
    cached: Shares = (),
    densities: Mapping[str, float] | None = None,
) -> StepFlops:
    """The same for each layer module, forward and backward apart, per sample that is trained on.

    Args and errors as `training_flops`.

    Example:
        >>> step = StepFlops(forward=(10.0, 10.0, 10.0), backward=(10.0, 20.0, 20.0), names=("a", "b", "c"))
        >>> layer_flops(step, frozen=["b"]).backward    # a hole: its input gradient remains
        (10.0, 10.0, 20.0)
        >>> layer_flops(step, frozen=["a", "b"]).backward
        (0.0, 0.0, 20.0)
    """
    require(isinstance(step, StepFlops), "layer_flops", "step", step, "a StepFlops, from count_flops")
    names, densities = layer_names(step), {} if densities is None else densities
    _check(step, names, frozen, densities)
    served = _served(names, frozen, cached)
    scales = effective_densities(step, densities)
    forward = [
        flops * scales[name] * (1 - served.get(name, 0.0)) for name, flops in zip(names, step.forward, strict=True)
    ]
    if not step.products:
        backward = _backward_by_units(step, names, frozen)
        backward = [flops * scales[name] for name, flops in zip(names, backward, strict=True)]
        return StepFlops(tuple(forward), tuple(backward), names, (), tuple(frozen))
    # What was counted beyond the products, where gradient checkpointing repeats the forward pass for example.
    modelled = _backward(step, names, step.frozen, {})
    beyond = [counted - own for counted, own in zip(step.backward, modelled, strict=True)]
    now = _backward(step, names, frozen, densities)
    backward = [own + more * scales[n] if own else 0.0 for n, own, more in zip(names, now, beyond, strict=True)]
    return StepFlops(tuple(forward), tuple(backward), names, (), tuple(frozen))


def layer_names(step: StepFlops) -> tuple[str, ...]:
    """Names of the layer modules, front to back; "0", "1", … where a hand-made figure has none."""
    return step.names or tuple(str(index) for index in range(len(step.forward)))


def weight_flops(step: StepFlops) -> dict[str, float]:
    """Forward FLOPs per sample of each weight that is an operand of a product, by parameter name.

    The rest of a layer's FLOPs (attention scores, for example) is work without a weight and stays dense.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from egeria_lab.algorithms.costs import count_flops
        >>> from egeria_lab.algorithms.layers import layers
        >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(2, 4)
        >>> weight_flops(count_flops(model, layers(model, x), lambda: model(x).sum(), 2))
        {'0.weight': 64.0, '2.weight': 32.0}
    """
    found: dict[str, float] = {}
    for product in step.products:
        if product.weight is not None:
            found[product.weight] = found.get(product.weight, 0.0) + product.flops
    return found


def effective_densities(step: StepFlops, densities: Mapping[str, float]) -> dict[str, float]:
    """The density of each layer module: that of its weights, weighted by their FLOPs; 1.0 where all is dense.

    Args and errors as `training_flops`.

    Example:
        >>> effective_densities(StepFlops((8.0, 2.0), (8.0, 4.0), ("a", "b")), {"a": 0.5})
        {'a': 0.5, 'b': 1.0}
    """
    names = layer_names(step)
    _check(step, names, (), densities)
    if not step.products:
        return {name: float(densities.get(name, 1.0)) for name in names}
    full, live = [0.0] * len(names), [0.0] * len(names)
    for product in step.products:
        full[product.layer] += product.flops
        live[product.layer] += product.flops * _density(product, names, densities)
    whole = [float(densities.get(name, 1.0)) for name in names]
    return {n: part / all_ if all_ else own for n, part, all_, own in zip(names, live, full, whole, strict=True)}


def layer_roles(step: StepFlops, frozen: Sequence[str], cached: Shares = ()) -> dict[str, str]:
    """What each layer is to the cost: "active", "frozen" (forward only), "cached" (not even that) or "hole".

    A hole is frozen, but gradients pass through it: a trained layer lies before it, or a weight that is
    used in front belongs to a later layer (tied weights).

    Example:
        >>> layer_roles(StepFlops((1.0,) * 4, (2.0,) * 4, ("a", "b", "c", "d")), ["a", "c"])
        {'a': 'frozen', 'b': 'active', 'c': 'hole', 'd': 'active'}
    """
    now = layer_flops(step, frozen=frozen, cached=cached)
    served = _served(now.names, frozen, cached)
    roles = {}
    for name, backward in zip(now.names, now.backward, strict=True):
        idle = "cached" if served.get(name) else "frozen"
        roles[name] = "active" if name not in frozen else "hole" if backward else idle
    return roles


def floor_share(step: StepFlops, densities: Mapping[str, float] | None = None) -> float:
    """The always-active share: what remains of a step's FLOPs when all layers but the head are frozen.

    No schedule or rule gets below it; only a cache does, which spares forward passes.

    Example:
        >>> floor_share(StepFlops((8.0, 1.0), (16.0, 2.0)))    # 8 + 3 of 27
        0.4074074074074074
    """
    body = layer_names(step)[:-1]
    full = training_flops(step, densities=densities)
    return training_flops(step, frozen=body, densities=densities) / full if full else 0.0


def three_units(step: StepFlops, densities: Mapping[str, float] | None = None) -> StepFlops:
    """A step as the papers count it: twice the forward FLOPs for the backward pass, in every layer.

    The first layer then has an input gradient that nobody needs, and the first trained layer keeps its own:
    published savings and ceilings are in this reading.

    Example:
        >>> three_units(StepFlops((8.0, 2.0), (8.0, 4.0)))
        StepFlops(forward=(8.0, 2.0), backward=(16.0, 4.0), names=('0', '1'), frozen=())
    """
    names = layer_names(step)
    scales = effective_densities(step, densities or {})
    forward = tuple(flops * scales[name] for name, flops in zip(names, step.forward, strict=True))
    return StepFlops(forward, tuple(2 * flops for flops in forward), names)


def dense_weight_gradients(step: StepFlops, densities: Mapping[str, float], frozen: Sequence[str] = ()) -> float:
    """What the weight gradients of the sparse, trained weights cost more per sample when they are dense.

    Example:
        >>> dense_weight_gradients(StepFlops((8.0, 2.0), (8.0, 4.0), ("a", "b")), {"a": 0.25})
        6.0
    """
    names = layer_names(step)
    _check(step, names, frozen, densities)
    if not step.products:
        sparse = [(f, densities.get(n, 1.0)) for n, f in zip(names, step.forward, strict=True) if n not in frozen]
        return sum(forward * (1 - density) for forward, density in sparse)
    active = frozenset(index for index, name in enumerate(names) if name not in frozen)
    return sum(
        product.flops * (1 - _density(product, names, densities))
        for product in step.products
        if product.weight is not None and not active.isdisjoint(product.depends[-1])
    )


def _backward(
    step: StepFlops, names: Sequence[str], frozen: Sequence[str], densities: Mapping[str, float]
) -> list[float]:
    """A gradient is computed towards each operand that depends on a trained layer's parameters."""
    active = frozenset(index for index, name in enumerate(names) if name not in frozen)
    backward = [0.0] * len(names)
    for product in step.products:
        wanted = sum(not active.isdisjoint(layers) for layers in product.depends)
        backward[product.layer] += wanted * product.flops * _density(product, names, densities)
    return backward


def _backward_by_units(step: StepFlops, names: Sequence[str], frozen: Sequence[str]) -> list[float]:
    front = next((index for index, name in enumerate(names) if name not in frozen), len(names))
    units = zip(names, step.forward, step.backward, strict=True)
    return [
        0.0 if index < front else max(0.0, backward - forward) if name in frozen else backward
        for index, (name, forward, backward) in enumerate(units)
    ]


def _density(product: Product, names: Sequence[str], densities: Mapping[str, float]) -> float:
    if product.weight is not None and product.weight in densities:
        return densities[product.weight]
    return densities.get(names[product.layer], 1.0)


def _check(step: StepFlops, names: Sequence[str], frozen: Sequence[str], densities: Mapping[str, float]) -> None:
    require(not isinstance(frozen, str), "training_flops", "frozen", frozen, "a list of layer names")
    require(isinstance(densities, Mapping), "training_flops", "densities", densities, _DENSITIES)
    for name in frozen:
        if name not in names:
            raise unknown_name("layer", name, names)
    known = {*names, *step.parameters} if densities else set()
    for name, density in densities.items():
        if name not in known:
            raise unknown_name("layer or parameter", name, [*names, *step.parameters])
        require(is_number(density) and 0 <= density <= 1, "densities", name, density, "a share in [0, 1]")


def _served(names: Sequence[str], frozen: Sequence[str], cached: Shares) -> dict[str, float]:
    require(not isinstance(cached, str), "training_flops", "cached", cached, "a list of layer names, or layer → share")
    shares = cached if isinstance(cached, Mapping) else dict.fromkeys(cached, 1.0)
    front = next((index for index, name in enumerate(names) if name not in frozen), len(names))
    for name, share in shares.items():
        if name not in names:
            raise unknown_name("layer", name, names)
        require(is_number(share) and 0 <= share <= 1, "cached", name, share, "a share in [0, 1]")
        if share and name not in names[:front]:
            raise InvalidSettingError(
                f"{name!r} cannot be cached: a cache serves frozen layers from the front only, here "
                f"{', '.join(names[:front]) or 'none'}; freeze it and every layer before it."
            )
    return dict(shares)
