"""Frozen is a complete word, and thawed its exact inverse: bit for bit, under every common optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from egeria_lab.algorithms.freezing import Freezer, freeze_layers
from egeria_lab.errors import InvalidSettingError, LayerError

Layers = dict[str, tuple[list[nn.Module], list[nn.Parameter]]]
Make = Callable[[Sequence[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd momentum": partial(SGD, lr=0.05, momentum=0.9),
    "sgd momentum decay": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": partial(Adam, lr=0.01, weight_decay=0.1),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.9, weight_decay=0.1),
}


def net(dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(dropout)),
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(6, 2),
    )


def parts(model: nn.Module) -> Layers:
    return {name: (list(m.modules()), list(m.parameters())) for name, m in model.named_children()}


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    # shifted more with each batch: batch statistics keep moving
    x = torch.randn(8, 4, generator=generator) + 0.1 * number
    return x, torch.randint(0, 2, (8,), generator=generator)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    numbers: Sequence[int],
    *,
    set_to_none: bool = True,
    call_train: bool = False,
) -> list[float]:
    losses = []
    for number in numbers:
        if call_train:
            model.train()
        torch.manual_seed(number)  # dropout
        x, y = batch(number)
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def moved(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(a[name], b[name]) for name in a)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_frozen_tensors_are_bit_identical_over_20_more_steps(kind: str, set_to_none: bool) -> None:
    """traps rows 1, 2, 6, 146: no step, decay, momentum or zeroed gradient reaches a frozen tensor or buffer."""
    model = net(dropout=0.2)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    train(model, optimizer, range(5), set_to_none=set_to_none)
    freezer = Freezer(model, parts(model), optimizer)
    assert freezer.freeze("0")
    before, rest = snapshot(model[0]), snapshot(model[1])
    train(model, optimizer, range(5, 25), set_to_none=set_to_none, call_train=True)
    assert same(before, snapshot(model[0]))  # weights, and running statistics, and the batch counter
    assert moved(rest, snapshot(model[1]))
    assert all(p.grad is None for p in model[0].parameters())
    assert all(p.grad is not None for p in model[1].parameters())


def test_without_freezing_the_same_loop_does_move_the_layer() -> None:
    """The control of the test above: requires_grad=False alone drifts with set_to_none=False."""
    model = net()
    optimizer = OPTIMIZERS["sgd momentum decay"](list(model.parameters()))
    train(model, optimizer, range(5), set_to_none=False)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    before = snapshot(model[0])
    train(model, optimizer, range(5, 25), set_to_none=False)
    assert moved(before, snapshot(model[0]))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("park_state", ["keep", "cpu"])
def test_thaw_is_the_exact_inverse_of_freeze(kind: str, park_state: str) -> None:
    """Train 5, freeze and thaw at once, in another order too, train 5 more = train 10, bit for bit."""
    straight, detour = net(dropout=0.3), net(dropout=0.3)
    expected = train(straight, OPTIMIZERS[kind](list(straight.parameters())), range(10))
    optimizer = OPTIMIZERS[kind](list(detour.parameters()))
    losses = train(detour, optimizer, range(5))
    freezer = Freezer(detour, parts(detour), optimizer, park_state=park_state)
    for order in (("0", "1"), ("1", "0")):
        for name in order:
            freezer.freeze(name)
        for name in ("0", "1"):
            freezer.thaw(name)
    losses += train(detour, optimizer, range(5, 10))
    assert losses == expected
    assert same(snapshot(straight), snapshot(detour))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_thawed_layer_goes_on_as_if_it_had_been_paused(kind: str) -> None:
    """Its momentum, moments and step count are those of the moment of freezing, and act at the next step."""
    model = net()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    train(model, optimizer, range(5))
    freezer = Freezer(model, parts(model), optimizer)
    weight = model[0][0].weight
    state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[weight].items()}
    freezer.freeze("0")
    assert weight not in optimizer.state
    train(model, optimizer, range(5, 15))
    freezer.thaw("0")
    restored = optimizer.state[weight]
    assert restored.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(restored[key], value) if isinstance(value, torch.Tensor) else restored[key] == value
    # one more step by hand on a twin with the same weights and the same parked state
    twin = net()
    twin.load_state_dict(model.state_dict())
    own = OPTIMIZERS[kind](list(twin.parameters()))
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        own.state[mine] = {
            k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[theirs].items()
        }
    train(model, optimizer, [20])
    train(twin, own, [20])
    assert same(snapshot(model), snapshot(twin))


def test_order_and_number_of_groups_survive_three_cycles() -> None:
    """traps rows 13, 30, 33: no group is added, no parameter comes twice, state_dict works at every moment."""
    model = net()
    optimizer = SGD(
        [
            {"params": list(model[0].parameters()), "lr": 0.01},
            {"params": [*model[2].parameters(), *model[1].parameters()], "lr": 0.1},
        ],
        momentum=0.9,
    )
    train(model, optimizer, range(2))
    before = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    freezer = Freezer(model, parts(model), optimizer)
    for order in (("0", "1"), ("1", "0"), ("2", "1")):
        for name in order:
            freezer.freeze(name)
            state = optimizer.state_dict()
            assert len(state["param_groups"]) == 2
        train(model, optimizer, [3])
        for name in order:
            freezer.thaw(name)
            optimizer.state_dict()
        now = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        assert now == before
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.1]


def test_freezing_twice_is_once_and_thawing_twice_is_once() -> None:
    """traps rows 13, 146: an idempotent set, not a toggle."""
    model = net()
    optimizer = Adam(model.parameters())
    train(model, optimizer, range(2))
    freezer = Freezer(model, parts(model), optimizer)
    assert (freezer.freeze("0"), freezer.freeze("0")) == (True, False)
    assert freezer.frozen == ("0",)
    assert (freezer.thaw("0"), freezer.thaw("0")) == (True, False)
    assert freezer.frozen == ()
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def test_four_views_agree() -> None:
    """traps row 8: the freezer, requires_grad, the parameter groups and the mode say the same."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    freezer = Freezer(model, parts(model), optimizer)
    freezer.freeze("1")
    inside = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, (modules, parameters) in parts(model).items():
        frozen = name in freezer.frozen
        assert frozen == (name == "1")
        assert all(p.requires_grad != frozen and (id(p) in inside) != frozen for p in parameters)
        assert all(module.training != frozen for module in modules)


def test_frozen_batch_norm_is_the_same_in_train_and_eval_mode() -> None:
    """traps rows 21, 24, 25, 26, 29: stored statistics both ways, whatever anyone calls."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, optimizer, range(5))
    freezer = Freezer(model, parts(model), optimizer)
    freezer.freeze("0")
    x, _ = batch(40)
    model.eval()
    evaluated = model[0](x).detach()
    buffers = {name: b.clone() for name, b in model[0].named_buffers()}
    model.train()
    model(x)
    assert not model[0].training
    assert model.training
    assert torch.equal(model[0](x).detach(), evaluated)
    assert all(torch.equal(b, buffers[name]) for name, b in model[0].named_buffers())
    for _ in range(10):
        model.train()
        model(x + 5)
    assert all(torch.equal(b, buffers[name]) for name, b in model[0].named_buffers())


def test_frozen_dropout_is_off() -> None:
    """traps row 28: the same input twice gives the same output."""
    model = net(dropout=0.5)
    freezer = Freezer(model, parts(model))
    freezer.freeze("0")
    model.train()
    x, _ = batch(0)
    model(x)
    assert torch.equal(model[0](x), model[0](x))


def test_the_users_own_eval_is_kept() -> None:
    """traps row 23: a part that was in eval mode before is in eval mode after, the rest in train mode."""
    model = net()
    model[0][1].eval()
    freezer = Freezer(model, parts(model))
    freezer.freeze("0")
    freezer.freeze("1")
    freezer.thaw("1")
    freezer.thaw("0")
    assert [m.training for m in model[0]] == [True, False, True, True]
    assert model[0].training
    assert all(m.training for m in model[1].modules())


def test_parameters_that_the_user_had_frozen_stay_so() -> None:
    """traps row 34."""
    model = net()
    model[0][0].bias.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    freezer = Freezer(model, parts(model), optimizer)
    freezer.freeze("0")
    freezer.thaw("0")
    assert not model[0][0].bias.requires_grad
    assert model[0][0].weight.requires_grad


def test_freezing_the_last_trainable_layer_is_refused() -> None:
    """traps row 17: a sentence instead of a crash in backward; nothing is changed by the refusal."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    freezer = Freezer(model, parts(model), optimizer)
    freezer.freeze("0")
    freezer.freeze("2")
    with pytest.raises(LayerError, match=r"1 holds the last trainable parameters.*Thaw another layer first"):
        freezer.freeze("1")
    assert freezer.frozen == ("0", "2")
    assert all(p.requires_grad for p in model[1].parameters())
    train(model, optimizer, [0])


def test_parked_state_bytes_and_parking() -> None:
    """traps row 11: Adam keeps two moments of 4 bytes a weight and a float32 step count for each tensor."""
    for park_state, kept in (("keep", True), ("cpu", True), ("drop", False)):
        model = net()
        optimizer = Adam(model.parameters())
        train(model, optimizer, range(2))
        freezer = Freezer(model, parts(model), optimizer, park_state=park_state)
        assert freezer.parked_state_bytes() == 0
        freezer.freeze("0")
        num_weights, num_tensors = 4 * 6 + 6 + 6 + 6, 4
        assert freezer.parked_state_bytes() == (8 * num_weights + 4 * num_tensors if kept else 0)
        assert all(p not in optimizer.state for p in model[0].parameters())
        train(model, optimizer, [2])
        freezer.thaw("0")
        assert all((p in optimizer.state) == kept for p in model[0].parameters())
        train(model, optimizer, [3])
    with pytest.raises(InvalidSettingError, match=r"Freezer.park_state must be one of keep, cpu, drop, got 'disk'"):
        Freezer(net(), {}, park_state="disk")


def test_gradients_left_over_do_not_count_in_the_norm() -> None:
    """traps row 6: `.grad` is None from the moment of freezing, so clipping and norms leave it out."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    for parameter in model[0].parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(1e6)
    Freezer(model, parts(model), optimizer).freeze("0")
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) < 1e3


def test_close_leaves_nothing_of_ours() -> None:
    model = net()
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    keys, optimizer = list(model.state_dict()), SGD(model.parameters(), lr=0.1)
    freezer = Freezer(model, parts(model), optimizer)
    assert hooks(model) == 0
    freezer.freeze("0")
    freezer.freeze("1")
    assert hooks(model) == 1
    assert list(model.state_dict()) == keys  # plain names while frozen
    freezer.close()
    freezer.close()
    assert hooks(model) == 0
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert all(p.requires_grad for p in model.parameters())
    assert all(m.training for m in model.modules())


def test_optimizer_over_a_part_of_the_model() -> None:
    """A layer that the optimizer does not hold freezes and thaws too."""
    model = net()
    optimizer = SGD(model[1].parameters(), lr=0.1)
    freezer = Freezer(model, parts(model), optimizer)
    freezer.freeze("0")
    freezer.thaw("0")
    assert len(optimizer.param_groups[0]["params"]) == 4
    assert len(optimizer.param_groups) == 1


def test_a_scheduler_keeps_its_grip_on_the_groups() -> None:
    """traps row 42: the rate of a group moves on while all of it is frozen, and no group is made anew."""
    model = net()
    optimizer = SGD([{"params": list(m.parameters()), "lr": 0.1} for m in model], momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    groups = [id(group) for group in optimizer.param_groups]
    freezer = Freezer(model, parts(model), optimizer)
    freezer.freeze("0")
    train(model, optimizer, [0])
    scheduler.step()
    freezer.thaw("0")
    train(model, optimizer, [1])
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025] * 3
    assert [id(group) for group in optimizer.param_groups] == groups


def test_weight_norm_freezes_the_true_leaf() -> None:
    """traps row 7: the optimizer holds the parametrised originals, not the derived weight."""
    model = net()
    nn.utils.parametrizations.weight_norm(model[0][0])
    optimizer = OPTIMIZERS["sgd momentum decay"](list(model.parameters()))
    train(model, optimizer, range(3), set_to_none=False)
    freezer = Freezer(model, parts(model), optimizer)
    freezer.freeze("0")
    before, weight = snapshot(model[0]), model[0][0].weight.detach().clone()
    train(model, optimizer, range(3, 10), set_to_none=False)
    assert same(before, snapshot(model[0]))
    assert torch.equal(weight, model[0][0].weight)
    freezer.thaw("0")
    train(model, optimizer, range(10, 12))
    assert not torch.equal(weight, model[0][0].weight)


def test_unknown_names() -> None:
    model = net()
    with pytest.raises(LayerError, match=r"no layer '7'; layers: 0, 1, 2"):
        Freezer(model, parts(model)).freeze("7")
    with pytest.raises(LayerError, match=r"no submodule is called 'encoder'; submodules: 0, 0.0"):
        freeze_layers(model, ["0", "encoder"])
    assert hooks(model) == 0
    assert all(p.requires_grad for p in model.parameters())


def test_freeze_layers_in_somebodys_own_loop() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    train(model, optimizer, range(3))
    freezer = freeze_layers(model, ["0", "1.0"], optimizer)
    before, norm = snapshot(model[0]), snapshot(model[1][1])
    linear = snapshot(model[1][0])
    train(model, optimizer, range(3, 10), call_train=True, set_to_none=False)
    assert same(before, snapshot(model[0]))
    assert same(linear, snapshot(model[1][0]))
    assert moved(norm, snapshot(model[1][1]))
    freezer.close()
    train(model, optimizer, [10])
    assert moved(before, snapshot(model[0]))


def test_freeze_layers_undoes_everything_when_it_would_leave_nothing_to_train() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(LayerError, match=r"last trainable"):
        freeze_layers(model, ["0", "1", "2"], optimizer)
    assert hooks(model) == 0
    assert all(p.requires_grad for p in model.parameters())
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("frozen_order", [("0", "0.1"), ("0.1", "0")])
@pytest.mark.parametrize("thawed_order", [("0", "0.1"), ("0.1", "0")])
def test_a_part_inside_a_frozen_part_stays_frozen_until_both_are_thawed(
    frozen_order: tuple[str, str], thawed_order: tuple[str, str]
) -> None:
    straight, model = net(), net()
    expected = train(straight, OPTIMIZERS["adamw"](list(straight.parameters())), range(6))
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    losses = train(model, optimizer, range(3))
    freezer = freeze_layers(model, frozen_order, optimizer)
    freezer.thaw(thawed_order[0])
    assert not model[0][1].weight.requires_grad
    assert not model[0][1].training
    assert model[0][0].weight.requires_grad == (thawed_order[0] == "0")
    assert model[0][2].training == (thawed_order[0] == "0")
    freezer.thaw(thawed_order[1])
    assert all(m.training for m in model.modules())
    assert losses + train(model, optimizer, range(3, 6)) == expected
    assert same(snapshot(straight), snapshot(model))


def test_a_tied_weight_stays_frozen_while_one_of_its_users_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(2))
    order = [id(p) for p in optimizer.param_groups[0]["params"]]
    freezer = freeze_layers(model, ["0", "1"], optimizer)
    freezer.thaw("0")
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad
    freezer.thaw("1")
    assert model[0].weight.requires_grad
    assert model[0].weight in optimizer.state
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == order


def test_the_mode_of_a_model_that_is_evaluated_meanwhile() -> None:
    """Thawing inside model.eval() must not leave one layer in train mode in an evaluated model."""
    model = net()
    freezer = Freezer(model, parts(model))
    freezer.freeze("0")
    model.eval()
    freezer.thaw("0")
    assert not any(m.training for m in model.modules())
    model.train()
    assert all(m.training for m in model.modules())


def test_a_layer_in_train_mode_inside_an_evaluated_model_comes_back_so() -> None:
    model = net().eval()
    model[0].train()
    freezer = Freezer(model, parts(model))
    freezer.freeze("0")
    assert not model[0].training
    freezer.thaw("0")
    assert model[0].training
    assert not model[1].training


def test_thaw_gives_parameters_back_that_moved_to_another_group_order(tmp_path: Any) -> None:
    """The state dict saved after a thaw loads into a fresh optimizer (traps row 31)."""
    model = net()
    optimizer = Adam(model.parameters())
    train(model, optimizer, range(3))
    freezer = Freezer(model, parts(model), optimizer)
    freezer.freeze("1")
    train(model, optimizer, range(3, 6))
    freezer.thaw("1")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    twin = net()
    twin.load_state_dict(model.state_dict())
    fresh = Adam(twin.parameters())
    fresh.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    assert train(model, optimizer, range(6, 9)) == train(twin, fresh, range(6, 9))


def test_a_state_goes_into_another_freezer_of_the_same_model_and_back() -> None:
    """Freezing resumes in anybody's loop: names, not positions."""
    for park in ("keep", "cpu", "drop"):
        runs = []
        for resumed in (False, True):
            model = net(dropout=0.2, seed=1)
            optimizer = Adam(model.parameters(), lr=0.01)
            freezer = Freezer(model, parts(model), optimizer, park_state=park)
            for number in range(12):
                if number == 3:
                    freezer.freeze("0")
                if number == 6 and resumed:
                    state = freezer.state_dict()
                    saved = {
                        name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state
                    }
                    freezer.close()
                    freezer = Freezer(model, parts(model), optimizer, park_state=park)
                    freezer.freeze("1")  # frozen elsewhere: the state wins
                    freezer.load_state_dict(state)
                    assert freezer.frozen == ("0",)
                    for name, parameter in model.named_parameters():
                        optimizer.state.pop(parameter, None)
                        if name in saved:
                            optimizer.state[parameter] = saved[name]
                if number == 9:
                    freezer.thaw("0")
                torch.manual_seed(number)
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
            runs.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_a_state_of_another_model_is_refused() -> None:
    model = net()
    freezer = Freezer(model, parts(model))
    freezer.freeze("0")
    state = freezer.state_dict()
    for change in ({"layer": "nothing"}, {"trainable": ["9.weight"]}, {"training": {"9": True}}):
        with pytest.raises(LayerError):
            freezer.load_state_dict({"parked": [{**state["parked"][0], **change}]})
        assert freezer.frozen == ()
