"""Where training stands in its passes over the data; the only one who asks the source for batches.

Passes may differ in length: a sieve changes what is kept, and samples can be discarded by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from egeria_lab.data.loaders import Batch, BatchSource


class Passes:
    """Hands out batches and counts them.

    Args:
        source: the training data.

    Attributes:
        number: the pass under way, from 0.
        position: batches of it that were trained on.
        on_begin: called with number and position whenever reading begins there.

    Example:
        >>> import torch
        >>> from egeria_lab.data.datasets import ArrayDataset
        >>> source = BatchSource(ArrayDataset(torch.zeros(4, 1), torch.zeros(4).long()), 2, seed=0)
        >>> passes = Passes(source)
        >>> [(len(passes.next_batch()), passes.step_made(), passes.done) for _ in range(3)]
        [(2, False, 0.5), (2, True, 1.0), (2, False, 1.5)]
    """

    def __init__(self, source: BatchSource) -> None:
        self.source = source
        self.number = 0
        self.position = 0
        self.on_begin: Callable[[int, int], None] | None = None
        self._batches: Iterator[Batch] | None = None

    @property
    def length(self) -> int:
        """Batches in the pass under way."""
        return self.source.steps_in(self.number)

    @property
    def done(self) -> float:
        """Passes made, fractional."""
        return self.number + self.position / self.length

    def next_batch(self) -> Batch:
        """The next batch to train on."""
        if self._batches is None:
            self._batches = self.source.epoch(self.number, self.position)
            if self.on_begin is not None:
                self.on_begin(self.number, self.position)
        return next(self._batches)

    def step_made(self) -> bool:
        """Count the newest batch as trained on; True when it was the last one of its pass."""
        self.position += 1
        return self.skip_rest()

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, as plain values."""
        return {"number": self.number, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that place."""
        self.number, self.position, self._batches = state["number"], state["position"], None

    def skip_rest(self) -> bool:
        """True, and the pass is over, when nothing is left of it: all was trained on, or the rest was taken away."""
        if not self.position or self.position < self.length:
            return False
        self.number, self.position, self._batches = self.number + 1, 0, None
        return True

    def read_again(self) -> None:
        """Forget what was read ahead: the step was not made, or what is left of the pass was planned anew."""
        self._batches = None
