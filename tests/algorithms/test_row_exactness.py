"""`egeria_lab.algorithms.row_exactness`: sizes are proven, once, and only proven ones are used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from egeria_lab.algorithms.row_exactness import Compute, RowExactness

X = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))


def plain(index: Tensor) -> list[Tensor]:
    return [X[index] * 3, index % 7]


def small_differ(index: Tensor) -> list[Tensor]:
    """As matrix products do: fewer than 20 rows take another kernel."""
    return [X[index] * (3 if len(index) >= 20 else 3 + 1e-6)]


def by_place(index: Tensor) -> list[Tensor]:
    """As vector units do: the last element goes another way."""
    rows = X[index].clone()
    rows[-1] *= 1 + 1e-6
    return [rows]


def by_neighbours(index: Tensor) -> list[Tensor]:
    return [X[index] - X[index].mean(0)]


def test_independent_rows_hold_at_every_size() -> None:
    rows = RowExactness(64)
    assert all(rows.holds(size, plain, 64) for size in (64, 33, 7, 1, 80))


@pytest.mark.parametrize("compute", [by_place, by_neighbours])
def test_rows_that_depend_on_the_batch_do_not_hold(compute: Compute) -> None:
    assert not RowExactness(64).holds(64, compute, 64)


def test_about_equal_is_enough_for_lossy_storage_but_neighbours_are_not() -> None:
    assert RowExactness(64, exact=False).holds(64, by_place, 64)
    assert not RowExactness(64, exact=False).holds(64, by_neighbours, 64)


def test_missing_rows_are_filled_up_to_a_proven_size() -> None:
    rows = RowExactness(64)
    assert rows.size_for(3, plain, 64) == 8
    assert rows.size_for(9, plain, 64) == 16
    assert rows.size_for(60, plain, 64) == 64
    strict = RowExactness(64)
    assert strict.size_for(3, small_differ, 64) == 24
    assert not strict.holds(16, small_differ, 64)
    assert strict.size_for(50, small_differ, 64) == 56
    assert strict.size_for(3, small_differ, 21) == 21  # the batch as it is; whether that holds is asked before


def test_a_proof_is_made_once() -> None:
    calls: list[int] = []

    def counted(index: Tensor) -> list[Tensor]:
        calls.append(len(index))
        return plain(index)

    rows = RowExactness(64)
    rows.holds(16, counted, 64)
    made = len(calls)
    assert rows.holds(16, counted, 64)
    assert len(calls) == made


def test_a_short_batch_is_repeated_to_the_usual_size() -> None:
    sizes: list[int] = []

    def counted(index: Tensor) -> list[Tensor]:
        assert int(index.max()) < 10
        sizes.append(len(index))
        return small_differ(index)

    assert not RowExactness(64).holds(10, counted, 10)
    assert 64 in sizes


def test_real_kernels_are_told_apart_from_each_other_rightly() -> None:
    """Whatever this machine's kernels do: a size that is said to hold does hold on other rows."""
    layer = nn.Linear(300, 40).requires_grad_(False)
    data, other = torch.randn(64, 300), torch.randn(64, 300)
    rows = RowExactness(64)
    for size in (64, 32, 24, 8, 2, 1):
        if rows.holds(size, lambda index: [layer(data[index])], 64):
            assert torch.equal(layer(other[:size]), layer(other)[:size])
