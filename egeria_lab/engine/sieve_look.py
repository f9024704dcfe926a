"""Copies of what a sieve knows, for a view in another thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from egeria_lab.algorithms.sieving.settings import OneShotSieve
from egeria_lab.algorithms.sieving.sieve import Sieve


@dataclass(frozen=True, slots=True, kw_only=True)
class SieveLook:
    """Where every sample of a training set is, and what is known of it: copies, one value a sample.

    Attributes:
        method: name of the sieve's settings.
        status: a constant of `egeria_lab.algorithms.sieving.membership`, int8.
        presented: presentations in the present interval, int32.
        events: forgetting events in it, int32; of a one-shot sieve both since the start.
        never_correct: presented and wrong each time so far, bool.
        margin: mean margin of the present interval, float32, NaN where unknown.
        losses: newest loss, float32, NaN where unknown; None where the sieve looks at no loss.
        judges: the sieve counts forgetting, so that `events` says something.
    """

    method: str
    status: NDArray[np.int8]
    presented: NDArray[np.int32]
    events: NDArray[np.int32]
    never_correct: NDArray[np.bool_]
    margin: NDArray[np.float32]
    losses: NDArray[np.float32] | None
    judges: bool


def look_at(made: Sieve) -> SieveLook:
    """Copy what holds now; only reads, and asks the sieve for nothing that it would keep.

    Example:
        >>> from egeria_lab.algorithms.sieving.settings import CirculantSieve
        >>> look = look_at(Sieve(CirculantSieve(fraction=0.5), 8, batch_size=2, seed=0))
        >>> look.method, int((look.status == 0).sum()), look.judges
        ('CirculantSieve', 4, True)
    """
    log, whole = made.log, isinstance(made.settings, OneShotSieve)
    events, presented = (log.events_total, log.presented_total) if whole else (log.events, log.presented)
    with np.errstate(divide="ignore", invalid="ignore"):
        margin = log.margin_sum.numpy() / log.presented.numpy().astype(np.float32)
    return SieveLook(
        method=type(made.settings).__name__,
        status=made.members.status.numpy().copy(),
        presented=presented.numpy().copy(),
        events=events.numpy().copy(),
        never_correct=log.ever.numpy() == 0,
        margin=margin.astype(np.float32),
        losses=None if made.losses is None else made.losses.losses.numpy().copy(),
        judges="correct" in made.needs,
    )
