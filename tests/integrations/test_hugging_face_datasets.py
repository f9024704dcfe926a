"""Data sets of Hugging Face's own package, by id and as streams: trained, frozen, sieved, or refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import egeria_lab as lab

datasets = pytest.importorskip("datasets")

ROWS = 96


@pytest.fixture
def table() -> Any:
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, 6, generator=draws)
    return datasets.Dataset.from_dict({"x": inputs.tolist(), "label": [row % 3 for row in range(ROWS)]})


def forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch["x"]), batch["label"]


def train(train_data: Any, valid_data: Any, **options: Any) -> lab.Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 3))
    session = lab.Session(model, (train_data, valid_data), batch_size=16, forward=forward, freeze=None, **options)
    session.run(6, progress=False)
    session.freeze("0")
    session.run(progress=False)
    assert session.layers["0"].frozen
    assert session.evaluate()["accuracy"] is not None
    return session


def test_rows_by_id_train_freeze_and_are_sieved(table: Any) -> None:
    rows = table.with_format("torch")
    session = train(rows, rows, epochs=3, sieve=lab.CirculantSieve(fraction=0.25, interval_epochs=1))
    assert 0 < len(session.sieve.removed_ids()) < ROWS
    session.close()


def test_a_stream_is_the_rows_in_their_order(table: Any) -> None:
    rows = table.with_format("torch")
    session = train(table.to_iterable_dataset().with_format("torch"), rows, steps=12)
    losses = session.history["steps"]["loss"].tolist()
    session.close()
    by_id = train(torch.utils.data.DataLoader(rows, batch_size=16), rows, epochs=2)
    assert losses == by_id.history["steps"]["loss"].tolist()
    by_id.close()


def test_a_stream_cannot_be_sieved(table: Any) -> None:
    stream = table.to_iterable_dataset().with_format("torch")
    with pytest.raises(lab.InvalidSettingError, match="the training data are a stream"):
        train(stream, table.with_format("torch"), steps=12, sieve=lab.CirculantSieve(fraction=0.25))


def test_columns_of_lists_are_said_to_need_a_format(table: Any) -> None:
    with pytest.raises(lab.DataError, match=r'x came as lists: .* after \.with_format\("torch"\)\.'):
        train(table, table, epochs=1)
