"""Drop live units and grow others: exact counts, ties by a seeded generator, pure functions of one layer.

Candidates are put in a random order first; among equals, those that come first are taken. So a count is always
met exactly, and no position is favoured for its index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from egeria_lab.algorithms.sparse.schemes import Scheme


def pick(scores: Tensor | None, candidates: Tensor, count: int, generator: Generator, *, highest: bool) -> Tensor:
    """The `count` candidates of lowest or highest score; all of them when there are fewer.

    Args:
        scores: shape ``(n,)``; None for a random choice. Not-a-number counts as the highest.
        candidates: bool, shape ``(n,)``.
        count: how many.
        generator: a generator of the CPU, so that every device draws the same.
        highest: take the highest instead of the lowest.

    Returns:
        bool, shape ``(n,)``.

    Example:
        >>> scores, candidates = torch.tensor([0.3, 0.1, 0.2]), torch.tensor([True, True, False])
        >>> pick(scores, candidates, 1, torch.Generator().manual_seed(0), highest=True).tolist()
        [True, False, False]
    """
    chosen = torch.zeros_like(candidates)
    places = candidates.nonzero()[:, 0]
    count = min(count, places.numel())
    if count <= 0:
        return chosen
    places = places[torch.randperm(places.numel(), generator=generator).to(places.device)]
    if scores is not None:
        values = torch.nan_to_num(scores[places], nan=float("inf")) * (1 if highest else -1)
        limit = torch.topk(values, count).values[-1]
        places = torch.cat([places[values > limit], places[values == limit]])  # as many equal ones as are missing
    chosen[places[:count]] = True
    return chosen


def ranking(scores: Tensor, generator: Generator) -> Tensor:
    """Unique ranks from 0 (lowest score), equal scores in random order; not-a-number ranks highest.

    Example:
        >>> ranking(torch.tensor([0.5, 0.1, 0.9]), torch.Generator().manual_seed(0)).tolist()
        [1, 0, 2]
    """
    shuffled = torch.randperm(scores.numel(), generator=generator).to(scores.device)
    ascending = shuffled[torch.argsort(scores[shuffled], stable=True)]
    ranks = torch.empty_like(ascending)
    ranks[ascending] = torch.arange(scores.numel(), device=scores.device)
    return ranks


def pick_dropped(
    scheme: Scheme, scores: Tensor, live: Tensor, count: int, generator: Generator, *, allow_regrow: bool
) -> Tensor:
    """The `count` live units of lowest score; where units share a quota, so that each group can meet it again.

    Args:
        scheme: the scheme.
        scores: the units' importance.
        live: live units, bool.
        count: how many to drop.
        generator: decides ties.
        allow_regrow: a unit dropped now may be grown in the same update.
    """
    if scheme.group is None:
        return pick(scores, live, count, generator, highest=False)
    ranks = ranking(scores, generator)
    groups = live.reshape(-1, scheme.group)
    place = _places(torch.where(live, ranks, ranks.numel()).reshape(-1, scheme.group))  # 0 = least important live one
    number = groups.sum(1, keepdim=True)
    excess = (number - scheme.quota).clamp(min=0)
    refillable = torch.full_like(number, scheme.quota) if allow_regrow else scheme.group - number
    must = (groups & (place < excess)).reshape(-1)
    may = (groups & (place < excess + refillable)).reshape(-1) & ~must
    first = pick(ranks, must, count, generator, highest=False)
    return first | pick(ranks, may, count - int(first.sum()), generator, highest=False)


def pick_grown(
    scheme: Scheme, scores: Tensor | None, candidates: Tensor, live: Tensor, count: int, generator: Generator
) -> Tensor:
    """The `count` candidates of highest score, or random ones; groups below their quota first.

    Args:
        scheme: the scheme.
        scores: what decides growth (the gradient's magnitude), or None for at random.
        candidates: units that may be grown, bool; none of them live.
        live: units that are live now, bool.
        count: how many to grow.
        generator: decides random growth and ties.
    """
    if scheme.group is None:
        return pick(scores, candidates, count, generator, highest=True)
    ranks = ranking(scores if scores is not None else torch.zeros(live.shape, device=live.device), generator)
    need = (scheme.quota - live.reshape(-1, scheme.group).sum(1, keepdim=True)).clamp(min=0)
    place = _places(torch.where(candidates, -ranks, ranks.numel()).reshape(-1, scheme.group))
    must = (candidates.reshape(-1, scheme.group) & (place < need)).reshape(-1)
    first = pick(ranks, must, count, generator, highest=True)
    return first | pick(ranks, candidates & ~must, count - int(first.sum()), generator, highest=True)


def _places(keys: Tensor) -> Tensor:
    """Place of each entry in its row, 0 for the smallest key."""
    return torch.argsort(torch.argsort(keys, dim=1, stable=True), dim=1)


def first_mask(scheme: Scheme, count: int, generator: Generator, values: Tensor | None = None) -> Tensor:
    """A mask of exactly `count` live units.

    Args:
        scheme: the scheme.
        count: live units.
        generator: decides random masks, random patterns and ties.
        values: magnitudes (weight shape) of which the largest stay; None for a random mask.

    Returns:
        bool, weight shape, output dimension first.

    Example:
        >>> from egeria_lab.algorithms.sparse.schemes import Unstructured
        >>> mask = first_mask(Unstructured((2, 2)), 1, torch.Generator(), torch.tensor([[0.1, 0.9], [0.2, 0.3]]))
        >>> mask.tolist()
        [[False, True], [False, False]]
    """
    device = values.device if values is not None else torch.device("cpu")
    none = torch.zeros(scheme.num_units, dtype=torch.bool, device=device)
    scores = scheme.scores(values) if values is not None else None
    chosen = pick_grown(scheme, scores, ~none, none, count, generator)
    return scheme.new(chosen, values, generator)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one update does to one layer's mask.

    Attributes:
        mask: the new mask, bool, weight shape.
        dropped: weights taken out, bool; with `allow_regrow` some may be in `mask` again.
        grown: weights put in, bool.
    """

    mask: Tensor
    dropped: Tensor
    grown: Tensor


def exchange(
    scheme: Scheme,
    mask: Tensor,
    importance: Tensor,
    *,
    drop: int,
    live_after: int,
    generator: Generator,
    growth: Tensor | None = None,
    allow_regrow: bool = False,
) -> Exchange:
    """Drop the least important live units of a layer, then grow others in their place.

    Args:
        scheme: the layer's scheme.
        mask: the present mask, bool, weight shape (output dimension first).
        importance: importance of each weight, >= 0; entries that are not live are not looked at.
        drop: units to drop; fewer are dropped where an N:M group could not be filled again.
        live_after: units that are live in the end.
        generator: decides random growth, random patterns and ties.
        growth: values that decide growth (the gradient's magnitude), weight shape; None for at random.
        allow_regrow: a unit dropped now may be grown again, from zero.

    Example:
        >>> from egeria_lab.algorithms.sparse.schemes import Unstructured
        >>> before = torch.tensor([[True, True, False, False]])
        >>> w = torch.tensor([[0.5, 0.1, 0.0, 0.0]])
        >>> g = torch.tensor([[9.0, 9.0, 0.1, 0.2]])
        >>> seeded = torch.Generator().manual_seed(0)
        >>> done = exchange(Unstructured((1, 4)), before, w, drop=1, live_after=2, growth=g, generator=seeded)
        >>> done.mask.tolist()
        [[True, False, False, True]]
    """
    live = scheme.units(mask)
    # Values of positions that are not live must not count: a threshold over them would be far too low.
    scores = scheme.scores(torch.where(mask, importance, 0))
    gone = pick_dropped(scheme, scores, live, drop, generator, allow_regrow=allow_regrow)
    left = live & ~gone
    candidates = ~left if allow_regrow else ~live
    wanted = scheme.scores(growth) if growth is not None else None
    born = pick_grown(scheme, wanted, candidates, left, live_after - int(left.sum()), generator)
    dropped = mask & scheme.weights(gone)
    grown = scheme.new(born, growth, generator)
    return Exchange((mask & ~dropped) | grown, dropped, grown)
