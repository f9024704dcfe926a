"""Blocks and the shapes of freezing plans, by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import egeria_lab as lab
from egeria_lab.algorithms.costs import count_flops
from egeria_lab.algorithms.freeze_plans import (
    NEVER,
    cycles,
    freezeout_times,
    frozen_fronts,
    group_blocks,
    linear_times,
    single_shot,
    whole_steps,
)


@pytest.mark.parametrize(
    ("name", "shape", "options", "joins"),
    [
        ("resnet8", (3, 16, 16), {}, True),
        ("resnet32", (3, 16, 16), {"width": 2}, True),
        ("transformer", (3, 16, 16), {}, True),
        ("transformer", (12,), {"vocabulary": 30, "head": "tokens"}, True),  # an embedding multiplies nothing
        ("mlp", (1, 8, 8), {}, False),
        ("mlp", (3, 32, 32), {}, False),
    ],
)
def test_the_stem_of_every_model_by_name(
    name: str, shape: tuple[int, ...], options: dict[str, object], joins: bool
) -> None:
    model = lab.models.build(name, input_shape=shape, num_classes=10, **options)
    x = torch.zeros(2, *shape, dtype=torch.int64 if len(shape) == 1 else torch.float32)
    found = lab.layers(model, x)
    flops = count_flops(model, found, lambda: model(x).sum(), 2)
    blocks = group_blocks(found.names, flops.forward)
    assert (len(blocks[0]) == 2) is joins
    assert [layer for block in blocks for layer in block] == found.names
    assert blocks[-1] == (found.names[-1],)


def test_the_stem_can_be_decided_by_hand() -> None:
    names = ["a", "b", "c", "head"]
    assert group_blocks(names, [1, 100, 100, 1], "own")[0] == ("a",)
    assert group_blocks(names, [100, 1, 1, 1], "first")[0] == ("a", "b")
    assert group_blocks(names, [25, 100, 100, 1])[0] == ("a",)
    assert group_blocks(names, [24.9, 100, 100, 1])[0] == ("a", "b")


@pytest.mark.parametrize("stem", ["auto", "first"])
def test_the_head_is_never_part_of_the_first_block(stem: str) -> None:
    assert group_blocks(["a", "head"], [1, 100], stem) == (("a",), ("head",))
    assert group_blocks(["head"], [1], stem) == (("head",),)


def test_single_shot_one_by_one_until_the_end() -> None:
    assert single_shot(3, 10, 2.5, 14) == [((10, 14),), ((12.5, 14),), ()]


def test_cycles_train_first_and_the_last_may_be_cut_short() -> None:
    assert cycles(2, 0, 10, 6, 28) == [((6, 10), (16, 20), (26, 28))] * 2
    assert cycles(1, 5, 10, 6, 28) == [((11, 15), (21, 25))]
    assert cycles(1, 28, 10, 6, 28) == [()]


def test_cycles_train_a_fractional_mean_in_whole_steps() -> None:
    plan = cycles(1, 0, 10, 6.25, 80)[0]
    trained = [begin - 10 * index for index, (begin, _) in enumerate(plan)]
    assert sum(trained) == 50
    assert set(trained) == {6, 7}


def test_fronts_follow_every_stint() -> None:
    plan = [((2, 6), (8, 10)), ((3, 5), (7, 10)), ((3, 10),)]
    assert [(start, number) for start, _, number in frozen_fronts(plan, 10)] == [
        (0, 0), (2, 1), (3, 3), (5, 1), (6, 0), (7, 0), (8, 3),
    ]  # fmt: skip
    assert list(frozen_fronts([], 10)) == [(0, 10, 0)]


def test_times_take_effect_at_the_next_whole_step() -> None:
    assert whole_steps([((1.0, 2.0),), ((1.01, 1.99),), ((2.1, 2.9),)], 10) == [((1, 2),), (), ()]
    assert whole_steps([((9.5, 99.0), (9.9, 99.0))], 10) == [()]


def test_linear_and_cubic_times() -> None:
    assert linear_times(2, start=0.0, level=0.5) == [1.0, NEVER]
    times = freezeout_times(5, start=0.5)
    assert times[0] == pytest.approx(0.5)
    assert times[-1] == pytest.approx(1.0)
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == sorted(gaps)
    assert freezeout_times(1, 0.3) == [1.0]
