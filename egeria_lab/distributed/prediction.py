"""How a step takes with many ranks, computed from what was measured on a few: bytes, latency, compute, control.

The model is the textbook one: gradients travel in a ring, ``2 (N - 1)`` hops of ``bytes / N`` each; small control
messages in a tree, ``ceil(log2 N)`` hops; the forward and backward pass of a rank costs a fixed part and a part for
each of its rows. It counts no overlap of communication with the backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from egeria_lab.errors import require

CONTROL_MESSAGES = 4
"""Small collectives of a step: commands, the loss, what the step showed, the decisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """What a few processes tell about a machine and a model.

    Attributes:
        fixed_seconds: part of a step that does not hang on the number of rows.
        row_seconds: part of a step for each row of the batch.
        batch_rows: rows of the global batch.
        gradient_bytes: bytes of gradients with nothing frozen.
        hop_seconds: latency of one hop of a message.
        bytes_per_second: bandwidth of one hop.
        rewrap_seconds: time to wrap the model anew after a freeze or thaw.
        reading_seconds: time that rank 0 spends on plasticity readings, averaged over steps.
        joined_seconds: what a step takes more as one of several beside messages: wrapper, hooks, waiting.
    """

    fixed_seconds: float
    row_seconds: float
    batch_rows: int
    gradient_bytes: float
    hop_seconds: float
    bytes_per_second: float
    rewrap_seconds: float = 0.0
    reading_seconds: float = 0.0
    joined_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One predicted step.

    Attributes:
        ranks: how many processes.
        compute_seconds: forward, backward and update of one rank's rows, and readings on rank 0.
        exchange_seconds: gradients.
        control_seconds: everything else that the ranks tell each other.
        exchanged_bytes: bytes of gradients that each rank sends.
    """

    ranks: int
    compute_seconds: float
    exchange_seconds: float
    control_seconds: float
    exchanged_bytes: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute_seconds + self.exchange_seconds + self.control_seconds


def ring_seconds(num_bytes: float, ranks: int, hop_seconds: float, bytes_per_second: float) -> float:
    """Time of a ring all-reduce.

    Example:
        >>> ring_seconds(8e6, 1, 1e-4, 1e9), round(ring_seconds(8e6, 4, 1e-4, 1e9), 6)
        (0.0, 0.0126)
    """
    return 2 * (ranks - 1) * (hop_seconds + num_bytes / ranks / bytes_per_second)


def predict(
    costs: MeasuredCosts,
    ranks: int,
    *,
    frozen_bytes_share: float = 0.0,
    saved_compute: float = 0.0,
    ranks_a_core: float = 1.0,
) -> Prediction:
    """A step on so many ranks.

    Args:
        costs: from measurements.
        ranks: >= 1.
        frozen_bytes_share: share of the gradient bytes whose layers are frozen, in [0, 1].
        saved_compute: share of the compute that freezing saves, in [0, 1].
        ranks_a_core: how many ranks take turns on one processor, >= 1.

    Raises:
        InvalidSettingError: for values out of range.

    Example:
        >>> costs = MeasuredCosts(fixed_seconds=0.01, row_seconds=0.001, batch_rows=1024, gradient_bytes=4e7,
        ...                       hop_seconds=5e-5, bytes_per_second=1e9)
        >>> [round(predict(costs, n).seconds, 3) for n in (1, 8, 64, 1024)]
        [1.034, 0.21, 0.113, 0.197]
        >>> predict(costs, 8, frozen_bytes_share=0.5).exchanged_bytes / predict(costs, 8).exchanged_bytes
        0.5
    """
    require(isinstance(ranks, int) and ranks >= 1, "predict", "ranks", ranks, "a whole number >= 1")
    for name, value in (("frozen_bytes_share", frozen_bytes_share), ("saved_compute", saved_compute)):
        require(0 <= value <= 1, "predict", name, value, "in [0, 1]")
    require(ranks_a_core >= 1, "predict", "ranks_a_core", ranks_a_core, ">= 1")
    num_bytes = costs.gradient_bytes * (1 - frozen_bytes_share)
    rows = math.ceil(costs.batch_rows / ranks)
    own = (costs.fixed_seconds + costs.row_seconds * rows) * (1 - saved_compute) + costs.reading_seconds
    compute = (own + (costs.joined_seconds if ranks > 1 else 0.0)) * ranks_a_core
    hops = 2 * math.ceil(math.log2(ranks)) if ranks > 1 else 0
    return Prediction(
        ranks=ranks,
        compute_seconds=compute,
        exchange_seconds=ring_seconds(num_bytes, ranks, costs.hop_seconds, costs.bytes_per_second),
        control_seconds=CONTROL_MESSAGES * hops * costs.hop_seconds,
        exchanged_bytes=2 * (ranks - 1) / ranks * num_bytes,
    )
