"""Ten million samples: what the sieve keeps of each, so that a hundred million can be sized on paper."""

from __future__ import annotations

import torch

from egeria_lab.algorithms.sieving.settings import CirculantSieve
from egeria_lab.algorithms.sieving.sieve import Sieve
from egeria_lab.checkpoint.tree import num_bytes

SAMPLES = 10_000_000
BYTES_A_SAMPLE = 27
"""10**8 samples: 2.7 GB of state. Counts, margins and places are kept for each, and nothing that grows with time."""


def test_the_state_of_ten_million_samples_is_27_bytes_each_and_does_not_grow() -> None:
    sieve = Sieve(CirculantSieve(fraction=0.2, interval_epochs=1), SAMPLES, batch_size=1000, seed=0)
    generator = torch.Generator().manual_seed(0)
    sizes = []
    for turn in range(2):
        ids = sieve.kept_ids()[turn * 1000 : turn * 1000 + 100_000]
        right = torch.rand(len(ids), generator=generator) > 0.3
        sieve.observe(ids, correct=right, margin=torch.randn(len(ids), generator=generator))
        update = sieve.after_pass(steps_done=8000 * (turn + 1), planned_steps=10**6)
        assert update is not None
        assert len(update.removed) == len(update.returned) == 1_600_000
        assert len(sieve.kept_ids()) == 8_000_000
        sizes.append(num_bytes(sieve.state_dict()) / SAMPLES)
    assert max(sizes) <= BYTES_A_SAMPLE
    assert torch.bincount(torch.cat([sieve.kept_ids(), sieve.removed_ids()])).max() == 1
