"""`egeria_lab.data.augment` and `egeria_lab.data.replay_check`: pure functions of seed, id and view."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from egeria_lab.data.augment import Augment, Replayable
from egeria_lab.data.datasets import ArrayDataset
from egeria_lab.data.replay_check import dataset_is_replayable, is_replayable
from egeria_lab.errors import DataError, InvalidSettingError

EVERYTHING = Augment(crop_padding=3, flip=True, cutout=4, noise=0.2, views=5, seed=3)
IMAGES = torch.randn(40, 2, 9, 7, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(100, 140)


def zeros(ids: Tensor) -> Tensor:
    return torch.zeros_like(ids)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sample_comes_out_the_same_in_any_batch(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        views = EVERYTHING.view_of(2, IDS)
        whole = EVERYTHING(IMAGES, IDS, views)
        for rows in (torch.tensor([7]), torch.randperm(40)[:13], torch.arange(39, -1, -1), torch.tensor([5, 5])):
            assert torch.equal(EVERYTHING(IMAGES[rows], IDS[rows], views[rows]), whole[rows])
    finally:
        torch.set_num_threads(before)


def test_it_neither_reads_nor_moves_the_global_generator() -> None:
    torch.manual_seed(1)
    first = EVERYTHING(IMAGES, IDS, EVERYTHING.view_of(0, IDS))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = EVERYTHING(IMAGES, IDS, EVERYTHING.view_of(0, IDS))
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_inputs_are_left_alone() -> None:
    kept = IMAGES.clone()
    EVERYTHING(IMAGES, IDS, zeros(IDS))
    assert torch.equal(IMAGES, kept)
    assert Augment()(IMAGES, IDS, zeros(IDS)) is IMAGES


def test_views_are_finite_and_different() -> None:
    results = [EVERYTHING(IMAGES[:1], IDS[:1], torch.tensor([view])) for view in range(5)]
    assert all(not torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])
    drawn = torch.stack([EVERYTHING.view_of(epoch, torch.arange(4000)) for epoch in range(4)])
    assert set(drawn.flatten().tolist()) == set(range(5))
    shares = torch.bincount(drawn.flatten()).double() / drawn.numel()
    assert shares.sub(0.2).abs().max() < 0.02
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[2][10:20], EVERYTHING.view_of(2, torch.arange(10, 20)))


@pytest.mark.parametrize("other", [Augment(crop_padding=2), Augment(crop_padding=1, seed=1), Augment(views=7)])
def test_the_key_tells_transforms_apart(other: Augment) -> None:
    assert other.key != Augment(crop_padding=1).key
    assert Augment(crop_padding=1).key == Augment(crop_padding=1).key


def test_crop_is_a_window_of_the_padded_image() -> None:
    augment = Augment(crop_padding=2)
    out = augment(IMAGES, IDS, zeros(IDS))
    padded = F.pad(IMAGES, (2, 2, 2, 2))
    places = set()
    for image, result in zip(padded, out, strict=True):
        found = [(y, x) for y in range(5) for x in range(5) if torch.equal(image[:, y : y + 9, x : x + 7], result)]
        assert len(found) == 1
        places.add(found[0])
    assert len(places) > 10
    assert {y for y, _ in places} == {x for _, x in places} == set(range(5))


def test_flip_mirrors_about_half_of_the_samples() -> None:
    ids = torch.arange(400)
    images = torch.randn(400, 1, 3, 4)
    out = Augment(flip=True)(images, ids, zeros(ids))
    mirrored = torch.tensor([torch.equal(a.flip(-1), b) for a, b in zip(images, out, strict=True)])
    same = torch.tensor([torch.equal(a, b) for a, b in zip(images, out, strict=True)])
    assert bool((mirrored ^ same).all())
    assert 150 < int(mirrored.sum()) < 250


def test_cutout_clears_a_square() -> None:
    images = torch.ones(2000, 1, 12, 12)
    ids = torch.arange(2000)
    out = Augment(cutout=4)(images, ids, zeros(ids))
    cleared = (out == 0).flatten(1).sum(1)
    assert int(cleared.max()) == 16
    assert int(cleared.min()) == 4  # a corner: half of the square hangs over on both sides
    for hole in (out[:, 0] == 0)[:20]:
        rows, columns = hole.any(1).nonzero().flatten(), hole.any(0).nonzero().flatten()
        assert bool(hole[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all())


def test_noise_is_normal_and_independent() -> None:
    ids = torch.arange(500)
    out = Augment(noise=0.5)(torch.zeros(500, 203), ids, zeros(ids))
    assert abs(float(out.mean())) < 0.01
    assert float(out.std()) == pytest.approx(0.5, rel=0.01)
    assert float((out / 0.5).pow(4).mean()) == pytest.approx(3, rel=0.05)
    assert float(torch.corrcoef(out[:, :30].T).fill_diagonal_(0).abs().max()) < 0.25
    half = Augment(noise=0.5)(torch.zeros(3, 5, dtype=torch.float16), ids[:3], zeros(ids[:3]))
    assert half.dtype == torch.float16


def test_crop_and_flip_keep_integers() -> None:
    images = (IMAGES * 50).to(torch.uint8)
    assert Augment(crop_padding=1, flip=True)(images, IDS, zeros(IDS)).dtype == torch.uint8
    with pytest.raises(DataError, match="floating point"):
        Augment(noise=0.1)(images, IDS, zeros(IDS))


def test_wrong_inputs_say_so() -> None:
    with pytest.raises(DataError, match=r"\(40, 3\).*noise alone"):
        Augment(flip=True)(torch.zeros(40, 3), IDS, zeros(IDS))
    with pytest.raises(DataError, match="one each"):
        Augment(flip=True)(IMAGES, IDS[:3], zeros(IDS))


@pytest.mark.parametrize(
    "wrong", [{"crop_padding": -1}, {"flip": 1}, {"cutout": 1.5}, {"noise": -0.1}, {"views": 0}, {"seed": True}]
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError, match=next(iter(wrong))):
        Augment(**wrong)


def test_your_own_function() -> None:
    calls = []

    def rotate(inputs: Tensor, ids: Tensor, views: Tensor) -> Tensor:
        calls.append((ids.tolist(), views.tolist()))
        return inputs

    transform = Replayable(rotate, views=4)
    views = transform.view_of(1, IDS)
    transform(IMAGES, IDS, views)
    assert calls == [(IDS.tolist(), views.tolist())]
    assert set(views.tolist()) == {0, 1, 2, 3}
    assert "rotate" in transform.key
    with pytest.raises(InvalidSettingError):
        Replayable(rotate, views=0)


class RandomCrop:
    """Stands for a transform of torchvision, known by its name."""


class ColorJitter:
    pass


class Normalise:
    def __call__(self, x: Any) -> Any:
        return x


class Compose:
    def __init__(self, *members: Any) -> None:
        self.transforms = list(members)


def marked() -> Normalise:
    transform = Normalise()
    transform.replayable = True  # type: ignore[attr-defined]
    return transform


@pytest.mark.parametrize(
    "transform",
    [None, Augment(flip=True), Replayable(lambda x, i, v: x), marked(), Compose(marked(), None), [marked()]],
)
def test_replayable_transforms_are_recognised(transform: Any) -> None:
    assert is_replayable(transform) == (True, "")


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (RandomCrop(), "RandomCrop"),
        (ColorJitter(), "ColorJitter"),
        (Compose(marked(), RandomCrop()), "RandomCrop"),
        (nn.Sequential(nn.Identity()), "Identity"),
        (Normalise(), "Normalise"),
        (lambda x: x, "lambda"),
    ],
)
def test_others_are_refused_by_name_and_with_the_fix(transform: Any, name: str) -> None:
    allowed, reason = is_replayable(transform)
    if name == "Identity":  # torch's own, which draws nothing
        assert allowed
        return
    assert not allowed
    assert name in reason
    assert "Augment(crop_padding=" in reason
    assert "Replayable(function, views=8)" in reason


class Drawing(Dataset[Any]):
    """Draws in __getitem__, with no transform to see."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return np.full(3, index) + self.draw(), 0


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(3).numpy()])
def test_a_dataset_that_draws_is_found_out(draw: Any) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr,index]
    allowed, reason = dataset_is_replayable(Drawing(draw))
    assert not allowed
    assert "Drawing" in reason
    assert "__getitem__" in reason
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[union-attr,index]


def test_datasets_that_repeat_themselves() -> None:
    plain = ArrayDataset(torch.zeros(3, 2), torch.zeros(3))
    for dataset in (plain, TensorDataset(torch.zeros(2)), Subset(plain, [1]), Drawing(lambda: 0)):
        assert dataset_is_replayable(dataset) == (True, "")
    with_transform = Drawing(lambda: 0)
    with_transform.transform = Compose(RandomCrop())  # type: ignore[attr-defined]
    allowed, reason = dataset_is_replayable(Subset(with_transform, [0]))
    assert not allowed
    assert "RandomCrop" in reason
