"""Drop and grow: exact by rank, ties without favour, only live weights judged, nothing twice."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from egeria_lab.algorithms.sparse.masks import scheme_for
from egeria_lab.algorithms.sparse.mutation import exchange, first_mask, pick, ranking

NAN = float("nan")


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def row(*values: float) -> Tensor:
    return torch.tensor([values])


def test_ranks_are_unique_and_in_order() -> None:
    scores = torch.tensor([0.3, 0.1, 0.2, 0.1])
    ranks = ranking(scores, seeded())
    assert sorted(ranks.tolist()) == [0, 1, 2, 3]
    assert int(ranks[0]) == 3
    assert {int(ranks[1]), int(ranks[3])} == {0, 1}


def test_ties_are_broken_by_the_generator_not_by_index() -> None:
    equal = torch.zeros(10)
    chosen = [int(ranking(equal, seeded(s)).argmin()) for s in range(200)]
    assert len(set(chosen)) == 10
    assert torch.equal(ranking(equal, seeded(7)), ranking(equal, seeded(7)))


@pytest.mark.parametrize("scores", [None, torch.ones(7), torch.tensor([1.0, 0, 1, 0, 0, 1, 0])])
@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_pick_meets_the_count_exactly_also_among_equals(count: int, scores: Tensor | None) -> None:
    candidates = torch.tensor([True, False, True, True, False, True, True])
    for highest in (True, False):
        chosen = pick(scores, candidates, count, seeded(), highest=highest)
        assert int(chosen.sum()) == count
        assert not bool((chosen & ~candidates).any())
        if scores is not None:
            taken, left = scores[chosen], scores[candidates & ~chosen]
            sign = 1 if highest else -1
            assert min((sign * taken).tolist(), default=9) >= max((sign * left).tolist(), default=-9)
    assert int(pick(torch.arange(7), candidates, 99, seeded(), highest=True).sum()) == 5


def test_equal_candidates_are_taken_in_no_order() -> None:
    candidates = torch.ones(10, dtype=torch.bool)
    for scores in (None, torch.zeros(10)):
        for highest in (True, False):
            first = [int(pick(scores, candidates, 1, seeded(s), highest=highest).int().argmax()) for s in range(200)]
            assert len(set(first)) == 10


def test_the_least_important_live_weight_goes() -> None:
    scheme = scheme_for("unstructured", "layer", (1, 6))
    mask = row(1, 1, 1, 0, 0, 0) != 0
    done = exchange(scheme, mask, row(0.5, 0.1, 0.9, 0, 0, 0), drop=1, live_after=3, generator=seeded())
    assert done.dropped.tolist() == [[False, True, False, False, False, False]]
    assert int(done.grown.sum()) == 1
    assert not bool((done.grown & mask).any())
    assert int(done.mask.sum()) == 3


def test_thresholds_are_not_taken_over_masked_weights() -> None:
    """The zeros under the mask are no candidates: over all six, the lowest third would drop nothing live."""
    scheme = scheme_for("unstructured", "layer", (1, 6))
    mask = row(1, 1, 1, 0, 0, 0) != 0
    importance = row(0.5, 0.1, 0.9, 0.0, 0.05, 0.0)
    done = exchange(scheme, mask, importance, drop=2, live_after=1, generator=seeded())
    assert done.mask.tolist() == [[False, False, True, False, False, False]]


def test_growth_follows_the_gradient_where_there_is_one() -> None:
    scheme = scheme_for("unstructured", "layer", (1, 6))
    mask = row(1, 1, 0, 0, 0, 0) != 0
    done = exchange(
        scheme, mask, row(0.5, 0.1, 0, 0, 0, 0), drop=1, live_after=2, growth=row(9, 9, 1, 3, 2, 0), generator=seeded()
    )
    assert done.mask.tolist() == [[True, False, False, True, False, False]]


def test_a_just_dropped_weight_grows_again_only_when_allowed() -> None:
    scheme = scheme_for("unstructured", "layer", (1, 4))
    mask = row(1, 1, 0, 0) != 0
    options = {"drop": 1, "live_after": 2, "growth": row(0, 9, 1, 2)}
    forbidden = exchange(scheme, mask, row(0.5, 0.1, 0, 0), generator=seeded(), **options)  # type: ignore[arg-type]
    assert forbidden.mask.tolist() == [[True, False, False, True]]
    allowed = exchange(scheme, mask, row(0.5, 0.1, 0, 0), generator=seeded(), allow_regrow=True, **options)  # type: ignore[arg-type]
    assert torch.equal(allowed.mask, mask)
    assert allowed.dropped.tolist() == allowed.grown.tolist() == [[False, True, False, False]]


def test_weights_that_are_not_a_number_are_no_reason_to_lose_count() -> None:
    scheme = scheme_for("unstructured", "layer", (1, 6))
    mask = row(1, 1, 1, 1, 0, 0) != 0
    done = exchange(scheme, mask, row(NAN, 0.1, NAN, 0.2, 0, 0), drop=2, live_after=4, generator=seeded())
    assert int(done.mask.sum()) == 4
    assert done.dropped.tolist() == [[False, True, False, True, False, False]]


def test_n_of_m_loses_no_more_than_its_groups_can_grow_back() -> None:
    scheme = scheme_for("3:4", "layer", (2, 8))
    mask = first_mask(scheme, 12, seeded())
    done = exchange(scheme, mask, mask.float(), drop=12, live_after=12, generator=seeded())
    assert int(done.dropped.sum()) == 4  # one free place in each of the four groups
    assert done.mask.reshape(-1, 4).sum(1).tolist() == [3, 3, 3, 3]
    assert not bool((done.dropped & done.grown).any())


def test_n_of_m_goes_over_budget_and_comes_back_by_importance() -> None:
    scheme = scheme_for("2:4", "layer", (1, 8))
    mask = row(1, 1, 0, 0, 1, 1, 0, 0) != 0
    over = exchange(scheme, mask, mask.float(), drop=0, live_after=6, generator=seeded())
    assert int(over.mask.sum()) == 6
    assert int(over.dropped.sum()) == 0
    importance = torch.arange(1.0, 9.0)[None]
    back = exchange(scheme, over.mask, importance, drop=2, live_after=4, generator=seeded())
    assert back.mask.reshape(2, 4).sum(1).tolist() == [2, 2]
    for group in range(2):
        part = slice(4 * group, 4 * group + 4)
        kept = importance[0, part][back.mask[0, part]]
        gone = importance[0, part][over.mask[0, part] & ~back.mask[0, part]]
        assert gone.numel() == 0 or float(kept.min()) > float(gone.max())
