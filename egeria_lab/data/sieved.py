"""A sampler that follows a sieve, for somebody's own `DataLoader` and training loop."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from egeria_lab.algorithms.sieving.sieve import Sieve
from egeria_lab.config import derive_seed
from egeria_lab.errors import require


class KeptSampler(Sampler[int]):
    """Draws each kept sample once a pass, in an order that is a function of seed and pass.

    It lives in the main process, so that workers, persistent ones too, follow each change of the kept set from the next
    pass on. To tell the sieve what was observed, let the data set give the index of each sample beside it.

    Args:
        sieve: whose kept set.
        seed: decides the order.

    Raises:
        InvalidSettingError: for something else than a `Sieve`.

    Example:
        >>> sieve = Sieve(None, 6, batch_size=2, seed=0)
        >>> loader = torch.utils.data.DataLoader(range(6), batch_size=2, sampler=KeptSampler(sieve))
        >>> update = sieve.discard([1, 4])
        >>> sorted(int(i) for batch in loader for i in batch)
        [0, 2, 3, 5]
    """

    def __init__(self, sieve: Sieve, seed: int = 0) -> None:
        require(isinstance(sieve, Sieve), "KeptSampler", "sieve", sieve, "a Sieve over the data set, not its settings")
        self.sieve = sieve
        self.seed = seed
        self.number = 0

    def set_epoch(self, number: int) -> None:
        """Say which pass comes next; otherwise passes are counted."""
        self.number = number

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "kept", self.number))
        self.number += 1
        ids = self.sieve.kept_ids()
        yield from ids[torch.randperm(len(ids), generator=generator)].tolist()

    def __repr__(self) -> str:
        return f"KeptSampler({self.sieve!r}; seed {self.seed}, next pass {self.number})"

    def __len__(self) -> int:
        return self.sieve.members.num_kept
