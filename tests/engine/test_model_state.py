"""A model whose channels lie innermost goes on to the bit: loaded, forked, undone, with layers frozen and thawed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import egeria_lab as lab
from egeria_lab.engine.model_state import lay_out, model_state
from egeria_lab.errors import InvalidSettingError


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 12, 1), nn.ReLU())
        self.head = nn.Linear(12, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.middle(self.front(images)).mean((2, 3)))
        return out


def session(path: Path | None = None) -> lab.Session:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    keywords = {"epochs": 6, "seed": 0, "freeze": None, "layers": ["front", "middle", "head"]}
    if path is not None:
        return lab.Session.load(path, model=Convolutions(), data="digits")
    model = Convolutions().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return lab.Session(model, "digits", **keywords)


def strides(one: lab.Session) -> list[tuple[int, ...]]:
    return [parameter.stride() for parameter in one.model.parameters()]


def same(one: lab.Session, other: lab.Session) -> bool:
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    momenta = [[one_state["momentum_buffer"] for one_state in each.optimizer.state.values()] for each in (one, other)]
    return (
        all(torch.equal(mine[name], theirs[name]) for name in mine)
        and all(torch.equal(a, b) for a, b in zip(*momenta, strict=True))
        and strides(one) == strides(other)
    )


def test_loaded_and_forked_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    first = session()
    first.step(5)
    first.freeze("front")  # its momentum is parked
    first.step(5)
    first.save(tmp_path / "a.ckpt")
    second, third = session(tmp_path / "a.ckpt"), first.fork()
    assert strides(second) == strides(first) != [p.stride() for p in Convolutions().parameters()]
    for one in (first, second, third):
        one.step(3)
        one.thaw("front")
        one.step(5)
    assert same(first, second)
    assert same(first, third)
    for one in (first, second, third):
        one.close()


def test_undo_leaves_the_layout_alone() -> None:
    first = session()
    first.step(4)
    expected = first.fork()
    expected.step(3)
    first.freeze("front")
    first.step(2)
    first.undo()
    first.step(expected.steps_done - first.steps_done)
    assert same(first, expected)
    first.close()
    expected.close()


def test_only_what_lies_otherwise_is_noted_and_a_state_without_notes_changes_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Linear(3, 3))
    assert model_state(model)["strides"] == {}
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = model[0].weight.stride()
    lay_out(model, {})
    assert model[0].weight.stride() == before
    assert model_state(model)["strides"] == {"0.weight": list(before)}  # also where a kernel is 1x1
    volume = nn.Conv3d(2, 3, 3).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    assert list(model_state(volume)["strides"]) == ["weight"]


@pytest.mark.parametrize("wrong", [[10**9, 1, 6, 2], [18, 1, 6], [0, 0, 0, 0]])
def test_strides_that_cannot_be_are_refused(wrong: list[int]) -> None:
    model = nn.Conv2d(2, 3, 3)
    with pytest.raises(ValueError, match=r"strides|argument"):
        lay_out(model, {"strides": {"weight": wrong}})


ASKED: dict[str, Any] = {
    "model": "resnet8", "data": "digits", "epochs": 8, "seed": 0, "batch_size": 256, "channels_last": True,
    "freeze": lab.Plasticity(interval_steps=2, window=3, patience=2, tolerance=2.0, bootstrap_epochs=0),
}  # fmt: skip


def test_asked_for_by_keyword_a_run_repeats_from_its_record(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    usual = lab.Session(**{**ASKED, "channels_last": False})
    first = lab.Session(**ASKED)
    assert strides(first) != strides(usual)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), usual.model.parameters(), strict=True))
    first.step(8)
    first.save(tmp_path / "a.ckpt")
    assert lab.replay(tmp_path / "a.ckpt").exact
    again = lab.Session.from_config(first.config.write(tmp_path / "run.toml"))
    again.step(8)
    assert same(first, again)
    for one in (usual, first, again):
        one.close()


def test_a_cached_front_is_equal_to_the_bit_in_this_layout_too() -> None:
    torch.set_num_threads(1)
    plain, cached = lab.Session(**ASKED), lab.Session(**ASKED, cache=lab.ActivationCache(self_profiling=False))
    for one in (plain, cached):
        one.step(3)
        one.freeze("layers.0")
        one.freeze("layers.1")
        one.run(progress=False)
    assert cached.cache is not None
    assert cached.cache.statistics.hits > 0
    assert plain.history["steps"]["loss"].tolist() == cached.history["steps"]["loss"].tolist()
    assert same(plain, cached)
    plain.close()
    cached.close()


def test_a_layout_that_is_no_switch_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="channels_last must be True or False, got 'yes'"):
        lab.Session("resnet8", "digits", channels_last="yes")  # type: ignore[arg-type]
