"""Saved masks go on under the scheme that they were made of, and under no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from egeria_lab.algorithms.sparse.masked_training import SparseTraining
from egeria_lab.algorithms.sparse.methods import MEST, StaticSparsity
from egeria_lab.errors import InvalidSettingError


@pytest.mark.parametrize("knows_settings", [True, False])
@pytest.mark.parametrize("scheme", ["block", "2:4", "pattern"])
def test_masks_of_another_scheme_are_refused(scheme: str, knows_settings: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    state = SparseTraining(model, StaticSparsity(sparsity=0.5)).state_dict()
    if not knows_settings:  # as written by an earlier version
        del state["settings"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = StaticSparsity(sparsity=0.6 if scheme == "pattern" else 0.5, scheme=scheme)
    with pytest.raises(InvalidSettingError, match=f"cannot go on under scheme='{scheme}'"):
        SparseTraining(model, other, state=state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("knows_settings", [True, False])
@pytest.mark.parametrize("settings", [
    MEST(sparsity=0.5), MEST(sparsity=0.5, scheme="block"), MEST(sparsity=0.5, scheme="2:4"),
    StaticSparsity(sparsity=0.5, scheme="2:4"), MEST(sparsity=0.7, scheme="pattern"),
])  # fmt: skip
def test_masks_of_the_same_scheme_go_on(settings: MEST, knows_settings: bool) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 1), nn.Linear(8, 8))
    sparse = SparseTraining(model, settings)
    state = sparse.state_dict()
    if not knows_settings:
        del state["settings"]
    again = SparseTraining(model, settings, state=state)
    assert all(torch.equal(mask, again.masks[name]) for name, mask in sparse.masks.items())
