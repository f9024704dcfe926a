"""Masks beside freezing and checkpoints: locked means untouched, thawed means as before, resumed means exact."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from egeria_lab.algorithms.freezing import Freezer
from egeria_lab.algorithms.sparse.masked_training import SparseTraining
from egeria_lab.algorithms.sparse.methods import MEST, SET, RigL, StaticSparsity
from egeria_lab.algorithms.sparse.settings import SparsitySettings
from egeria_lab.errors import InvalidSettingError, TrainingError, UnknownNameError


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU()),
        nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.ReLU()),
        nn.Linear(20, 3),
    )


def freezer_for(model: nn.Module, optimizer: Optimizer, park: str = "keep") -> Freezer:
    layers = {name: (list(m.modules()), list(m.parameters())) for name, m in model.named_children()}
    return Freezer(model, layers, optimizer, park_state=park)


def train(sparse: SparseTraining, optimizer: Optimizer, first: int, last: int, total: int = 60) -> None:
    for number in range(first, last + 1):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(8, 10, generator=generator), torch.randint(0, 3, (8,), generator=generator)
        due = sparse.due(number, total, 10)
        optimizer.zero_grad()
        nn.functional.cross_entropy(sparse.model(x), y).backward()
        sparse.after_backward(update_due=due)
        optimizer.step()
        sparse.after_step()
        if due:
            sparse.update(number / total)


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    return {k: v for k, v in optimizer.state[parameter].items() if isinstance(v, Tensor) and v.shape == parameter.shape}


def weights_under_masks(sparse: SparseTraining, optimizer: Optimizer) -> int:
    count = 0
    for name, mask in sparse.masks.items():
        parameter = dict(sparse.model.named_parameters())[name]
        tensors = [parameter, *(state_of(optimizer, parameter).values() if parameter in optimizer.state else [])]
        count += sum(int(tensor[~mask].count_nonzero()) for tensor in tensors)
    return count


METHODS: list[SparsitySettings] = [
    MEST(sparsity=0.8, soft_bound=False, interval_steps=2),
    MEST(sparsity=0.8, interval_steps=2),
    SET(sparsity=0.8, interval_steps=2),
    RigL(sparsity=0.8, interval_steps=2),
]
IDS = ["em", "em&s", "set", "rigl"]


@pytest.mark.parametrize("park", ["keep", "cpu", "drop"])
@pytest.mark.parametrize("settings", METHODS, ids=IDS)
def test_a_frozen_layer_keeps_mask_and_values_and_gets_them_back(settings: SparsitySettings, park: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    sparse = SparseTraining(model, settings, optimizer=optimizer)
    freezer = freezer_for(model, optimizer, park)
    train(sparse, optimizer, 1, 7)
    layer = list(model[0].parameters())
    assert sparse.lock(layer) == ("0.0.weight",)
    freezer.freeze("0")
    values, mask, version = model[0][0].weight.clone(), sparse.masks["0.0.weight"], model[0][0].weight._version
    others = sparse.masks["1.0.weight"]
    train(sparse, optimizer, 8, 20)
    assert torch.equal(model[0][0].weight, values)
    assert torch.equal(sparse.masks["0.0.weight"], mask)
    assert model[0][0].weight._version == version  # not even written to
    assert not torch.equal(sparse.masks["1.0.weight"], others)
    freezer.thaw("0")
    assert sparse.unlock(layer) == ("0.0.weight",)
    assert torch.equal(model[0][0].weight, values)
    assert torch.equal(sparse.masks["0.0.weight"], mask)
    train(sparse, optimizer, 21, 30)
    assert not torch.equal(model[0][0].weight, values)
    assert not torch.equal(sparse.masks["0.0.weight"], mask)
    assert weights_under_masks(sparse, optimizer) == 0


def test_locking_takes_parameters_ids_or_names_and_is_idempotent() -> None:
    model = net()
    sparse = SparseTraining(model, SET(sparsity=0.8))
    assert sparse.lock([model[0][0].weight, model[0][0].bias]) == ("0.0.weight",)
    assert sparse.lock([id(model[0][0].weight)]) == ()
    assert sparse.lock(["1.0.weight", "2.weight"]) == ("1.0.weight",)
    assert sparse.locked == ("0.0.weight", "1.0.weight")
    assert sparse.update(0.1).layers == ()
    assert sparse.unlock(model[0][0].weight) == ("0.0.weight",)
    assert sparse.unlock([model[0][0].weight]) == ()
    assert [change.name for change in sparse.update(0.1).layers] == ["0.0.weight"]
    with pytest.raises(UnknownNameError, match=r"Unknown weight '1\.weigth'"):
        sparse.lock(["1.weigth"])


def test_under_the_soft_bound_a_layer_is_pruned_to_target_when_it_freezes() -> None:
    model = net()
    optimizer = Adam(model.parameters(), lr=0.01)
    sparse = SparseTraining(model, MEST(sparsity=0.9, interval_steps=10), optimizer=optimizer)
    freezer = freezer_for(model, optimizer)
    train(sparse, optimizer, 1, 5)
    over = sparse.masks["0.0.weight"]
    assert sparse.live_counts() == {"0.0.weight": 30, "1.0.weight": 60}
    weight = model[0][0].weight
    gradient = sparse.state_dict()["gradient_sums"]["0.0.weight"].abs() / 5
    importance = weight.detach().abs() + 0.01 * gradient
    record = sparse.prune_to_target(model[0].parameters())
    assert (record.dropped, record.grown, record.live, record.total) == (10, 0, 80, 600)
    kept = sparse.masks["0.0.weight"]
    assert not bool((kept & ~over).any())
    assert float(importance[kept].min()) >= float(importance[over & ~kept].max())
    assert sparse.live_counts() == {"0.0.weight": 20, "1.0.weight": 60}
    assert weights_under_masks(sparse, optimizer) == 0
    sparse.lock(model[0].parameters())
    freezer.freeze("0")
    assert sparse.prune_to_target(model[0].parameters()).layers == ()  # twice is once
    train(sparse, optimizer, 6, 46)
    assert sparse.live_counts() == {"0.0.weight": 20, "1.0.weight": 40}
    freezer.thaw("0")
    sparse.unlock(model[0].parameters())
    assert weights_under_masks(sparse, optimizer) == 0


def test_other_methods_have_nothing_to_prune() -> None:
    sparse = SparseTraining(net(), SET(sparsity=0.9))
    assert sparse.prune_to_target(["0.0.weight"]).layers == ()
    assert sparse.live_counts()["0.0.weight"] == 20


def test_a_locked_layer_over_budget_is_not_pruned_behind_its_back() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    sparse = SparseTraining(model, MEST(sparsity=0.9, interval_steps=10), optimizer=optimizer)
    sparse.lock(["0.0.weight"])
    with pytest.raises(TrainingError, match=r"0\.0\.weight is locked, so its mask is fixed; prune it before"):
        sparse.prune_to_target(["0.0.weight"])
    train(sparse, optimizer, 1, 50)
    assert sparse.live_counts() == {"0.0.weight": 30, "1.0.weight": 40}
    assert not sparse.due(51, 60, 10)
    sparse.unlock(["0.0.weight"])
    assert sparse.due(51, 60, 10)  # late, but it comes to its budget
    assert sparse.update(51 / 60).dropped == 10
    assert sparse.live_counts() == {"0.0.weight": 20, "1.0.weight": 40}
    assert not sparse.due(52, 60, 10)


@pytest.mark.parametrize("park", ["keep", "cpu"])
def test_state_that_was_parked_before_a_pruning_does_not_revive_weights(park: str) -> None:
    """The wrong order of calls, made harmless: the optimizer's state comes back with values under the mask."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparse = SparseTraining(model, MEST(sparsity=0.9, interval_steps=10), optimizer=optimizer)
    freezer = freezer_for(model, optimizer, park)
    train(sparse, optimizer, 1, 3)
    freezer.freeze("0")
    sparse.prune_to_target(["0.0.weight"])
    sparse.lock(["0.0.weight"])
    freezer.thaw("0")
    assert weights_under_masks(sparse, optimizer) > 0
    sparse.unlock(["0.0.weight"])
    assert weights_under_masks(sparse, optimizer) == 0


def checkpoint(sparse: SparseTraining, optimizer: Optimizer) -> bytes:
    buffer = io.BytesIO()
    whole = {"model": sparse.model.state_dict(), "optimizer": optimizer.state_dict(), "sparse": sparse.state_dict()}
    torch.save(whole, buffer)
    return buffer.getvalue()


def loaded(content: bytes) -> dict[str, Any]:
    whole: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return whole


@pytest.mark.parametrize("at", [7, 8])
@pytest.mark.parametrize("settings", METHODS, ids=IDS)
def test_a_resumed_run_is_bit_equal(settings: SparsitySettings, at: int) -> None:
    """Saved within an interval and right after an update, loaded into a fresh model in both ways."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparse = SparseTraining(model, settings, optimizer=optimizer, seed=4)
    train(sparse, optimizer, 1, at)
    content = checkpoint(sparse, optimizer)
    train(sparse, optimizer, at + 1, 50)
    for through_constructor in (True, False):
        saved = loaded(content)
        other = net(seed=9)
        again = SGD(other.parameters(), lr=0.1, momentum=0.9)
        if through_constructor:
            other.load_state_dict(saved["model"])
            again.load_state_dict(saved["optimizer"])
            resumed = SparseTraining(other, settings, optimizer=again, seed=5, state=saved["sparse"])
        else:
            resumed = SparseTraining(other, settings, optimizer=again, seed=5)
            other.load_state_dict(saved["model"])
            again.load_state_dict(saved["optimizer"])
            resumed.load_state_dict(saved["sparse"])
        assert all(torch.equal(v, saved["model"][k]) for k, v in other.state_dict().items())
        train(resumed, again, at + 1, 50)
        assert all(torch.equal(v, model.state_dict()[k]) for k, v in other.state_dict().items())
        assert all(torch.equal(mask, resumed.masks[name]) for name, mask in sparse.masks.items())


def test_locks_and_their_masks_are_saved() -> None:
    model = net()
    sparse = SparseTraining(model, SET(sparsity=0.8))
    sparse.lock(["1.0.weight"])
    state = sparse.state_dict()
    fresh = SparseTraining(net(), SET(sparsity=0.8), seed=3, state=state)
    assert fresh.locked == ("1.0.weight",)
    assert all(torch.equal(mask, fresh.masks[name]) for name, mask in sparse.masks.items())
    plain = {k: v for k, v in state.items() if k in ("locked", "gradient_steps")}
    assert json.loads(json.dumps(plain)) == plain
    sparse.update(0.1)
    assert torch.equal(fresh.masks["0.0.weight"], state["masks"]["0.0.weight"])  # a state is a copy


def test_a_state_may_be_loaded_twice() -> None:
    """Whoever takes it over works on copies: what-if runs start from one state."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    settings = MEST(sparsity=0.8, soft_bound=False, interval_steps=50)
    sparse = SparseTraining(model, settings, optimizer=optimizer)
    train(sparse, optimizer, 1, 2)
    state = sparse.state_dict()
    sums = {name: total.clone() for name, total in state["gradient_sums"].items()}
    other = net()
    other.load_state_dict(model.state_dict())
    again = SGD(other.parameters(), lr=0.1)
    train(SparseTraining(other, settings, optimizer=again, state=state), again, 3, 4)
    assert sums
    assert all(torch.equal(total, state["gradient_sums"][name]) for name, total in sums.items())


def test_saved_masks_decide_which_weights_are_masked() -> None:
    """A model that comes back with frozen layers still has their masks."""
    model = net()
    sparse = SparseTraining(model, SET(sparsity=0.8))
    frozen = net()
    frozen[0].requires_grad_(False)
    assert "0.0.weight" not in SparseTraining(net(), SET(sparsity=0.8, dense=("0",))).masks
    frozen.load_state_dict(model.state_dict())
    resumed = SparseTraining(frozen, SET(sparsity=0.8), state=sparse.state_dict())
    assert resumed.live_counts() == sparse.live_counts()


def test_other_settings_take_hold_at_the_next_update() -> None:
    state = SparseTraining(net(), SET(sparsity=0.8)).state_dict()
    resumed = SparseTraining(net(), SET(sparsity=0.9), state=state)
    assert resumed.live_counts() == {"0.0.weight": 40, "1.0.weight": 80}
    resumed.update(0.1)
    assert resumed.live_counts() == {"0.0.weight": 20, "1.0.weight": 40}
    back = SparseTraining(net(), SET(sparsity=0.8), state=resumed.state_dict())
    back.update(0.1)
    assert back.live_counts() == {"0.0.weight": 40, "1.0.weight": 80}


def test_a_state_of_another_model_is_refused() -> None:
    state = SparseTraining(net(), StaticSparsity(sparsity=0.8)).state_dict()
    sparse = SparseTraining(net(), StaticSparsity(sparsity=0.8))
    before = sparse.masks
    wrong = {**state, "masks": {**state["masks"], "0.0.weight": torch.ones(20, 11, dtype=torch.bool)}}
    with pytest.raises(InvalidSettingError, match=r"mask of 0\.0\.weight has shape \(20, 11\), .* has \(20, 10\)"):
        sparse.load_state_dict(wrong)
    with pytest.raises(UnknownNameError, match=r"'9\.weight'"):
        sparse.load_state_dict({**state, "masks": {"9.weight": torch.ones(2, 2, dtype=torch.bool)}})
    assert all(torch.equal(mask, sparse.masks[name]) for name, mask in before.items())
