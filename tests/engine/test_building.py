"""What a session is built from, and the bar of a blocking run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import egeria_lab as lab
from egeria_lab.engine.building import build_model, load_data
from egeria_lab.engine.progress import ProgressBar
from egeria_lab.engine.recorder import StepRecord


def rows() -> TensorDataset:
    return TensorDataset(torch.zeros(9, 4), torch.zeros(9).long())


def test_data_by_name_as_data_and_as_pairs() -> None:
    data, train, valid = load_data("digits")
    assert data.name == "digits"
    assert (train, valid) == (data.train, data.valid)
    assert load_data(data)[0] is data
    a, b = rows(), rows()
    described, train, valid = load_data([a, b])
    assert (described.name, train, valid) == ("own data", a, b)
    loader = DataLoader(a, batch_size=3)
    described, train, valid = load_data((loader, b))
    assert described.train is a
    assert (train, valid) == (loader, b)


def test_a_model_by_name_fits_the_data_and_follows_the_seed() -> None:
    data = load_data("digits")[0]
    one, same, other = (build_model("mlp", data, seed) for seed in (0, 0, 1))
    weights = [next(model.parameters()) for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert one(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    own = nn.Linear(4, 2)
    assert build_model(own, data, 0) is own


@pytest.mark.parametrize("seed", [0, 2**40, -5])
def test_any_whole_seed_works(seed: int) -> None:
    session = lab.Session("mlp", "digits", epochs=1, seed=seed, freeze=None)
    assert session.step().step == 1


class Bar:
    """Takes the place of tqdm."""

    def __init__(self, **options: Any) -> None:
        self.options, self.shown, self.closed = options, 0, False

    def set_postfix(self, **values: Any) -> None:
        self.values = values

    def update(self) -> None:
        self.shown += 1

    def close(self) -> None:
        self.closed = True


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, epoch=0.0, loss=1.23456, accuracy=None, learning_rate=0.1, frozen=("a", "b"), seconds=0.1
    )


def test_the_bar_shows_loss_and_frozen_layers_and_closes_also_after_an_error() -> None:
    bar = ProgressBar(5, False, "title")
    made = Bar()
    bar._bar = made
    with pytest.raises(ZeroDivisionError), bar as show:  # noqa: PT012
        show(record(1))
        show(record(2))
        _ = 1 / 0
    assert made.shown == 2
    assert made.closed
    assert made.values == {"loss": "1.235", "frozen": 2, "refresh": False}


def test_no_bar_is_made_when_none_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(5, False, "title") as show:
        show(record(1))
    assert capsys.readouterr() == ("", "")
