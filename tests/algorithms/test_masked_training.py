"""Masks hold through every step of every optimizer, updates are exact, and the model stays a plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import egeria_lab as lab
from egeria_lab.algorithms.freezing import freeze_layers
from egeria_lab.algorithms.sparse.masked_training import SparseTraining
from egeria_lab.algorithms.sparse.masked_weight import MaskUpdate
from egeria_lab.algorithms.sparse.methods import MEST, SET, RigL, StaticSparsity
from egeria_lab.algorithms.sparse.patterns import PATTERNS
from egeria_lab.algorithms.sparse.settings import SparsitySettings
from egeria_lab.errors import InvalidSettingError, TrainingError, UnknownNameError

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "sgd nesterov decay": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "sgd dampened": partial(SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "adam": partial(Adam, lr=0.05, weight_decay=0.1),
    "adam amsgrad": partial(Adam, lr=0.05, amsgrad=True),
    "adamw": partial(AdamW, lr=0.05, weight_decay=0.1),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.9, centered=True),
}
METHODS: dict[str, Callable[..., SparsitySettings]] = {
    "em": partial(MEST, soft_bound=False),
    "em&s": MEST,
    "set": SET,
    "rigl": RigL,
    "static": StaticSparsity,
}
SCHEMES = ("unstructured", "block", "pattern", "2:4")


class Net(nn.Module):
    """Convolutions, a transposed one among them, and linear layers; 3 x 6 x 6 images, 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv = nn.Conv2d(8, 12, 3, padding=1)
        self.back = nn.ConvTranspose2d(12, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8, 20)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.norm(self.back(self.conv(self.stem(x).tanh()).tanh())).tanh().mean((2, 3))
        out: Tensor = self.head(self.hidden(features).tanh())  # no ReLU: its dead units would hide what is masked
        return out


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 3, 6, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def backward(model: nn.Module, number: int) -> None:
    x, y = batch(number)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()


def sparsity_for(scheme: str) -> float:
    return {"2:4": 0.5, "pattern": 0.7}.get(scheme, 0.8)


def make(method: str, scheme: str = "unstructured", **options: Any) -> SparsitySettings:
    return METHODS[method](**{"sparsity": sparsity_for(scheme), "scheme": scheme, **options})


def under_masks(sparse: SparseTraining, optimizer: Optimizer | None) -> int:
    """Entries that are not zero under a mask: of weights, and of optimizer state of the weights' shape."""
    parameters = dict(sparse.model.named_parameters())
    count = 0
    for name, mask in sparse.masks.items():
        own = [parameters[name].detach()]
        if optimizer is not None and parameters[name] in optimizer.state:
            own += [
                v for v in optimizer.state[parameters[name]].values() if isinstance(v, Tensor) and v.shape == mask.shape
            ]
        count += sum(int(tensor[~mask].count_nonzero()) for tensor in own)
    return count


def step(sparse: SparseTraining, optimizer: Optimizer, number: int, due: bool = False) -> None:
    backward(sparse.model, number)
    sparse.after_backward(update_due=due)
    nn.utils.clip_grad_norm_(sparse.model.parameters(), 1.0)
    optimizer.step()
    sparse.after_step()


def train(sparse: SparseTraining, optimizer: Optimizer, first: int, last: int, total: int) -> list[MaskUpdate]:
    updates = []
    for number in range(first, last + 1):
        due = sparse.due(number, total, 10)
        step(sparse, optimizer, number, due)
        if due:
            updates.append(sparse.update(number / total))
    return updates


# ---- every step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_under_a_mask_is_ever_non_zero(method: str, optimizer_name: str) -> None:
    """Weights and optimizer state, at every step and after every update; momentum does not carry a weight on."""
    model = net()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    options = {} if method == "static" else {"interval_steps": 3}
    sparse = SparseTraining(model, make(method, dense=("unused",), **options), optimizer=optimizer)
    assert under_masks(sparse, optimizer) == 0
    for number in range(1, 26):
        due = sparse.due(number, 40, 10)
        step(sparse, optimizer, number, due)
        assert under_masks(sparse, optimizer) == 0
        if due:
            sparse.update(number / 40)
            assert under_masks(sparse, optimizer) == 0
    for name, mask in sparse.masks.items():  # and what is live does train
        parameter = dict(model.named_parameters())[name]
        assert parameter.grad is not None
        assert bool(parameter[mask & (parameter.grad != 0)].ne(0).all())
        assert int((mask & (parameter.grad != 0)).sum()) > 0.5 * int(mask.sum())


def test_masking_gradients_alone_would_not_do() -> None:
    """The fault that is guarded against is real: dropped weights come back through momentum."""
    model = net()
    optimizer = OPTIMIZERS["sgd nesterov decay"](model.parameters())
    for number in range(5):
        backward(model, number)
        optimizer.step()
    mask = torch.rand(model.conv.weight.shape) < 0.5
    with torch.no_grad():
        model.conv.weight.mul_(mask)
    backward(model, 6)
    assert model.conv.weight.grad is not None
    model.conv.weight.grad.mul_(mask)
    optimizer.step()
    assert int(model.conv.weight[~mask].count_nonzero()) > 0


def test_masks_made_late_clear_the_state_that_is_there() -> None:
    model = net()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for number in range(3):
        backward(model, number)
        optimizer.step()
    assert under_masks(SparseTraining(model, make("static"), optimizer=optimizer), optimizer) == 0


def test_gradients_under_masks_are_zero_before_clipping() -> None:
    model = net()
    sparse = SparseTraining(model, make("static"))
    backward(model, 0)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    sparse.after_backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert name.startswith("unused")
        elif name in sparse.masks:
            assert torch.equal(parameter.grad, before[name] * sparse.masks[name])
        else:
            assert torch.equal(parameter.grad, before[name])


def test_state_that_an_optimizer_invents_is_masked_too() -> None:
    class Noisy(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["own"] = torch.ones_like(p)
                    self.state[p]["count"] = torch.tensor(7.0)
                    p.data.add_(0.01)

    model = net()
    optimizer = Noisy(model.parameters(), lr=0.1)
    sparse = SparseTraining(model, make("static"), optimizer=optimizer)
    step(sparse, optimizer, 0)
    assert under_masks(sparse, optimizer) == 0
    assert float(optimizer.state[model.conv.weight]["count"]) == 7.0
    assert float(optimizer.state[model.stem.weight]["own"].mean()) == 1.0


# ---- updates -------------------------------------------------------------------------------------------


def has_structure(scheme: str, mask: Tensor, over_budget: bool) -> bool:
    if scheme == "block":
        rows = mask.reshape(mask.shape[0] // 4, 4, -1)
        return bool((rows == rows[:, :1]).all())
    if scheme == "pattern" and mask.shape[2:] == (3, 3):
        known = {tuple(p.tolist()) for p in PATTERNS} | {(False,) * 9}
        return all(tuple(kernel.tolist()) in known for kernel in mask.reshape(-1, 9))
    if scheme == "2:4":
        groups = torch.stack([mask[:, i : i + 4].sum(1) for i in range(0, mask.shape[1], 4)])
        return bool((groups >= 2).all() if over_budget else (groups == 2).all())
    return True


# N:M has one density in every layer
@pytest.mark.parametrize(
    ("scheme", "density"), [(s, d) for s in SCHEMES for d in ("uniform", "erk") if (s, d) != ("2:4", "erk")]
)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "static"])
def test_two_hundred_updates_are_exact(method: str, scheme: str, density: str) -> None:
    """Counts to one unit, structure, no live weight regrown, new ones from zero, also at the last pruning."""
    settings = make(method, scheme, interval_steps=1, density=density)
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparse = SparseTraining(model, settings, optimizer=optimizer, seed=1)
    parameters = {name: dict(model.named_parameters())[name] for name in sparse.masks}
    unit = {
        name: 4 if scheme == "block" or (scheme == "pattern" and p.dim() == 4) else 1 for name, p in parameters.items()
    }
    goal = {name: int(count) for name, count in sparse.live_counts().items()}
    total, updates, moved = 266, 0, 0
    generator = torch.Generator().manual_seed(5)
    for number in range(1, total + 1):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        due = sparse.due(number, total, total)
        sparse.after_backward(update_due=due)
        optimizer.step()
        sparse.after_step()
        if not due:
            continue
        before = sparse.masks
        record = sparse.update(number / total)
        updates += 1
        moved += record.dropped
        expected = 1 - settings.sparsity_at(number / total)
        cells = sum(p.numel() for p in parameters.values())
        live = sum(sparse.live_counts().values())
        assert abs(live - expected * cells) <= 2 * max(unit.values())
        for change in record.layers:
            name = change.name
            mask, shape = sparse.masks[name], parameters[name].shape
            grown = mask & ~before[name]
            assert change.live == int(mask.sum()) == sparse.live_counts()[name]
            assert change.grown == int(grown.sum())  # a live weight is never grown again
            assert change.dropped == int((before[name] & ~mask).sum())
            assert int(parameters[name][grown].count_nonzero()) == 0
            assert int(optimizer.state[parameters[name]]["momentum_buffer"][grown].count_nonzero()) == 0
            if density == "uniform":
                assert abs(change.live - expected * mask.numel()) < unit[name]
            turned = mask.transpose(0, 1) if name.startswith("back") else mask
            assert has_structure(scheme, turned, over_budget=expected > 1 - settings.sparsity + 1e-9)
            assert change.churn == pytest.approx(
                1 - int((mask & before[name]).sum()) / max(int(before[name].sum()), change.live)
            )
            assert mask.shape == shape
            if method != "em&s":
                assert change.dropped == change.grown
                assert change.live == goal[name]
        assert under_masks(sparse, optimizer) == 0
    assert updates >= 199
    assert moved > 1000
    assert sparse.live == pytest.approx((1 - settings.sparsity) * sum(p.numel() for p in parameters.values()), abs=8)


@pytest.mark.parametrize("method", ["set", "rigl", "em"])
def test_as_many_grow_as_are_dropped(method: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05)
    sparse = SparseTraining(model, make(method, interval_steps=2, dense=("unused",)), optimizer=optimizer)
    before = sparse.live_counts()
    share = {"set": 0.3, "rigl": 0.15 * (1 + float(torch.cos(torch.tensor(torch.pi * 0.1 / 0.75)))), "em": 0.2}[method]
    record = train(sparse, optimizer, 1, 2, 20)[0]
    for change in record.layers:
        assert change.dropped == change.grown == round(share * before[change.name])
    assert record.churn == pytest.approx(record.dropped / record.live)


def test_elastic_mutation_never_exceeds_its_budget_and_prunes_to_the_lower_bound() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05)
    sparse = SparseTraining(model, MEST(sparsity=0.9, soft_bound=False, interval_steps=5), optimizer=optimizer)
    budget = sparse.live_counts()
    for number in range(1, 161):
        due = sparse.due(number, 160, 1)
        step(sparse, optimizer, number, due)
        if due:
            record = sparse.update(number / 160)
            share = 0.2 if number < 90 else 0.1
            assert all(change.dropped == round(share * budget[change.name]) for change in record.layers)
        assert sparse.live_counts() == budget


def test_soft_bound_trains_over_budget_and_ends_on_it() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05)
    sparse = SparseTraining(model, MEST(sparsity=0.9, interval_steps=5), optimizer=optimizer)
    densities = []
    for number in range(1, 161):
        densities.append(sparse.live / sparse.total)
        due = sparse.due(number, 160, 1)
        step(sparse, optimizer, number, due)
        if due:
            sparse.update(number / 160)
    assert [densities[i] for i in (0, 89, 90, 119, 120, 159)] == pytest.approx(
        [0.15, 0.15, 0.125, 0.125, 0.1, 0.1], abs=5e-4
    )
    assert sum(densities) / 160 == pytest.approx(0.133, abs=5e-4)


def test_updates_come_when_the_settings_say() -> None:
    for settings in (MEST(interval_steps=7), MEST(soft_bound=False), SET(interval_epochs=0.5), RigL(interval_steps=6)):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.05)
        sparse = SparseTraining(model, settings, optimizer=optimizer)
        found = []
        for number in range(1, 81):
            due = sparse.due(number, 80, 10)
            step(sparse, optimizer, number, due)
            if due:
                found.append(number)
                sparse.update(number / 80)
        assert tuple(found) == settings.update_steps(80, 10)
        assert len(found) >= 5
    assert not any(SparseTraining(net(), StaticSparsity()).due(n, 80, 10) for n in range(1, 81))


def test_the_importance_is_weight_plus_gradient_by_hand() -> None:
    """|w| + λ |mean gradient|: with λ = 0 the small weight goes, with a large λ the one without a gradient."""
    for weight, survivor in ((0.0, 0), (1.0, 1)):
        model = nn.Sequential(nn.Linear(8, 1, bias=False), nn.Linear(1, 1))
        settings = MEST(sparsity=0.75, soft_bound=False, importance_weight=weight, phases=(1.0,), elastic=(0.124,))
        sparse = SparseTraining(model, settings)
        live = sparse.masks["0.weight"][0].nonzero()[:, 0].tolist()
        assert len(live) == 2
        with torch.no_grad():
            model[0].weight[0, live[0]], model[0].weight[0, live[1]] = 0.5, 0.4
        for sign in (1.0, 2.0, 3.0):
            model[0].weight.grad = torch.zeros(1, 8)
            model[0].weight.grad[0, live[1]] = sign
            sparse.after_backward()
        sparse.update(0.1)
        assert bool(sparse.masks["0.weight"][0, live[survivor]])
        assert not bool(sparse.masks["0.weight"][0, live[1 - survivor]])


@pytest.mark.parametrize(("average", "survivor"), [("signed", 0), ("magnitude", 1)])
def test_gradients_that_cancel_count_by_magnitude_only(average: str, survivor: int) -> None:
    model = nn.Sequential(nn.Linear(8, 1, bias=False), nn.Linear(1, 1))
    settings = MEST(
        sparsity=0.75,
        soft_bound=False,
        importance_weight=1.0,
        gradient_average=average,
        phases=(1.0,),
        elastic=(0.124,),
    )
    sparse = SparseTraining(model, settings)
    live = sparse.masks["0.weight"][0].nonzero()[:, 0].tolist()
    with torch.no_grad():
        model[0].weight[0, live[0]], model[0].weight[0, live[1]] = 0.5, 0.4
    for sign in (1.0, -1.0):
        model[0].weight.grad = torch.zeros(1, 8)
        model[0].weight.grad[0, live[1]] = sign
        sparse.after_backward()
    sparse.update(0.1)
    assert bool(sparse.masks["0.weight"][0, live[survivor]])
    assert not bool(sparse.masks["0.weight"][0, live[1 - survivor]])


def test_each_interval_averages_its_own_gradients() -> None:
    model = net()
    sparse = SparseTraining(model, make("em"))
    step(sparse, SGD(model.parameters(), lr=0.1), 0)
    assert sparse.state_dict()["gradient_steps"]["conv.weight"] == 1
    sparse.update(0.1)
    assert sparse.state_dict()["gradient_sums"] == {}


def test_rigl_grows_where_the_dense_gradient_is_largest() -> None:
    model = net()
    sparse = SparseTraining(model, make("rigl"))
    backward(model, 0)
    dense = model.conv.weight.grad
    assert dense is not None
    magnitude = dense.abs()
    before = sparse.masks["conv.weight"]
    sparse.after_backward(update_due=True)
    sparse.update(0.0)
    after = sparse.masks["conv.weight"]
    grown = after & ~before
    assert int(grown.sum()) == round(0.3 * int(before.sum()))
    assert float(magnitude[grown].min()) >= float(magnitude[~before & ~after].max())


def test_a_dense_gradient_is_kept_only_when_it_is_asked_for() -> None:
    model = net()
    sparse = SparseTraining(model, make("rigl"))
    backward(model, 0)
    sparse.after_backward()
    with pytest.raises(TrainingError, match=r"call after_backward\(update_due=True\) in the step that it follows"):
        sparse.update(0.1)
    backward(model, 1)
    sparse.after_backward(update_due=True)
    record = sparse.update(0.1)
    assert record.unchanged == ("unused.weight",)  # no gradient ever reaches it
    assert record.churn > 0.1
    with pytest.raises(TrainingError):
        sparse.update(0.2)  # that gradient was of another step


def test_dropped_weights_may_grow_again_only_when_allowed() -> None:
    """At 5 % sparsity there is little else to grow."""
    dropped = {}
    for allowed in (False, True):
        model = net()
        sparse = SparseTraining(model, SET(sparsity=0.05, allow_regrow=allowed))
        before = sparse.masks
        record = sparse.update(0.1)
        dropped[allowed] = record.dropped
        assert record.live == sparse.live == sum(int(mask.sum()) for mask in before.values())
        for change in record.layers:
            parameter = dict(model.named_parameters())[change.name]
            assert change.live - int(parameter.count_nonzero()) == change.grown  # all of them begin at zero
            if not allowed:
                assert change.grown <= int((~before[change.name]).sum())
    assert dropped[False] < 0.06 * sparse.total
    assert dropped[True] == pytest.approx(0.3 * 0.95 * sparse.total, rel=0.01)


def test_a_mask_that_stands_still_is_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(40, 40), nn.Linear(2, 2))
    sparse = SparseTraining(model, SET(sparsity=0.95))
    assert sparse.live_counts() == {"0.weight": 1, "1.weight": 80}
    record = sparse.update(0.1)
    still, moving = record.layers
    assert (still.churn, still.due, still.dropped) == (0.0, True, 0)
    assert moving.churn == pytest.approx(24 / 80)
    assert record.unchanged == ("0.weight",)
    assert record.warning.startswith("No weight was exchanged in 0.weight though an update was due: too few")
    assert SparseTraining(net(), SET()).update(0.9).warning == ""  # nothing was due any more


def test_a_layer_never_loses_its_last_weight() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(40, 40), nn.Linear(2, 2))
    for method in ("em", "em&s", "set"):
        sparse = SparseTraining(model, make(method, sparsity=0.99))
        for number in range(1, 40):
            sparse.update(number / 40)
            assert sparse.live_counts()["0.weight"] >= 1


# ---- the model stays a plain one -----------------------------------------------------------------------


def test_names_leaves_and_optimizer_stay_those_of_the_plain_model() -> None:
    model, plain = net(), net()
    leaves = {name: id(parameter) for name, parameter in model.named_parameters()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparse = SparseTraining(model, make("em&s", interval_steps=2), optimizer=optimizer)
    train(sparse, optimizer, 1, 6, 20)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == leaves
    assert all(p.is_leaf and p.requires_grad for p in model.parameters())
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(leaves.values())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert all(not p._backward_hooks for p in model.parameters())
    plain.load_state_dict(model.state_dict(), strict=True)


def test_a_masked_model_can_be_copied_in_every_way() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    sparse = SparseTraining(model, make("static"), optimizer=optimizer)
    step(sparse, optimizer, 0)
    copied = copy.deepcopy(model)
    snapshot = net(seed=3)
    snapshot.load_state_dict(model.state_dict())
    x, _ = batch(1)
    for other in (copied.eval(), snapshot.eval()):
        assert torch.equal(other(x), model.eval()(x))
    assert int(copied.conv.weight.count_nonzero()) == sparse.live_counts()["conv.weight"]
    before = copied.conv.weight.clone()
    step(sparse, optimizer, 1)
    assert torch.equal(copied.conv.weight, before)


def test_close_leaves_the_weights_and_lets_go() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    sparse = SparseTraining(model, make("em"), optimizer=optimizer)
    count = int(model.conv.weight.count_nonzero())
    sparse.close()
    assert int(model.conv.weight.count_nonzero()) == count
    step(sparse, optimizer, 0)
    assert sparse.update(0.1).layers == ()
    assert int(model.conv.weight.count_nonzero()) > 2 * count
    assert (sparse.masks, sparse.live, sparse.optimizer) == ({}, 0, None)


def test_a_tied_weight_has_one_mask() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    model[2].weight = model[0].weight
    optimizer = Adam(model.parameters(), lr=0.1)
    sparse = SparseTraining(model, make("set", sparsity=0.75), optimizer=optimizer)
    assert list(sparse.masks) == ["0.weight"]
    assert sparse.density("0") == sparse.density("2.weight") == 0.25
    for number in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        sparse.after_backward()
        optimizer.step()
        sparse.after_step()
        sparse.update(number / 10)
        assert int(model[2].weight.count_nonzero()) <= 16
    assert under_masks(sparse, optimizer) == 0


def test_parameter_groups_and_gradients_that_are_none() -> None:
    model = net()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    optimizer = SGD(groups, lr=0.05, momentum=0.9)
    sparse = SparseTraining(model, make("em", interval_steps=2), optimizer=optimizer)
    train(sparse, optimizer, 1, 12, 20)
    assert under_masks(sparse, optimizer) == 0
    assert model.unused.weight.grad is None
    for parameter in model.parameters():
        parameter.grad = None
    sparse.after_backward()
    sparse.after_step()


def test_the_global_generators_are_left_alone_and_the_seed_decides() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = net()
    torch.set_rng_state(before)
    sparse = SparseTraining(model, make("set"), seed=7)
    sparse.update(0.1)
    assert torch.equal(torch.get_rng_state(), before)
    same, other = (SparseTraining(net(), make("set"), seed=seed) for seed in (7, 8))
    same.update(0.1)
    other.update(0.1)
    assert all(torch.equal(mask, same.masks[name]) for name, mask in sparse.masks.items())
    assert not torch.equal(sparse.masks["conv.weight"], other.masks["conv.weight"])


# ---- mixed precision and compiling ---------------------------------------------------------------------


def test_gradients_that_overflowed_are_no_part_of_the_importance() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparse = SparseTraining(model, make("em"), optimizer=optimizer)
    step(sparse, optimizer, 0)
    before = sparse.state_dict()
    backward(model, 1)
    assert model.conv.weight.grad is not None
    live, dead = (mask.nonzero()[0].tolist() for mask in (sparse.masks["conv.weight"], ~sparse.masks["conv.weight"]))
    model.conv.weight.grad[tuple(live)] = float("inf")
    model.conv.weight.grad[tuple(dead)] = float("nan")
    sparse.after_backward()
    after = sparse.state_dict()
    assert after["gradient_steps"] == before["gradient_steps"]
    assert all(torch.equal(after["gradient_sums"][n], total) for n, total in before["gradient_sums"].items())
    assert float(model.conv.weight.grad[tuple(dead)]) == 0.0
    assert float(model.conv.weight.grad[tuple(live)]) == float("inf")  # for the scaler to see


def test_an_overflow_under_the_mask_alone_costs_nothing() -> None:
    model = net()
    sparse = SparseTraining(model, make("em"))
    backward(model, 1)
    assert model.conv.weight.grad is not None
    model.conv.weight.grad[~sparse.masks["conv.weight"]] = float("inf")
    sparse.after_backward()
    assert sparse.state_dict()["gradient_steps"]["conv.weight"] == 1
    assert bool(model.conv.weight.grad.isfinite().all())


def test_rigl_waits_when_the_gradient_is_not_finite() -> None:
    model = net()
    sparse = SparseTraining(model, make("rigl"))
    before = sparse.masks
    backward(model, 1)
    assert model.conv.weight.grad is not None
    model.conv.weight.grad[0] = float("inf")
    sparse.after_backward(update_due=True)
    record = sparse.update(0.1)
    assert record.churn == 0.0
    assert "no finite gradient in this step" in record.warning
    assert all(torch.equal(mask, sparse.masks[name]) for name, mask in before.items())


def test_a_loss_scale_does_not_change_what_is_important() -> None:
    sums = {}
    for scale in (1.0, 1024.0):
        model = net()
        sparse = SparseTraining(model, make("em"), seed=2)
        x, y = batch(0)
        (scale * nn.functional.cross_entropy(model(x), y)).backward()
        sparse.after_backward(grad_scale=scale)
        sums[scale] = sparse.state_dict()["gradient_sums"]["conv.weight"]
    assert torch.allclose(sums[1.0], sums[1024.0], rtol=1e-4, atol=1e-8)
    assert float(sums[1.0].abs().max()) > 0


def test_with_a_grad_scaler_that_skips_a_step() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparse = SparseTraining(model, make("set", interval_steps=2), optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    skipped = 0
    for number in range(1, 9):
        x, y = batch(number)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if number == 4 else 1.0)).backward()
        scaler.unscale_(optimizer)
        sparse.after_backward()
        before = model.conv.weight.clone()
        scaler.step(optimizer)
        scaler.update()
        skipped += torch.equal(model.conv.weight, before)
        sparse.after_step()
        assert under_masks(sparse, optimizer) == 0
        assert bool(model.conv.weight.isfinite().all())
        if sparse.due(number, 12, 12):
            sparse.update(number / 12)
    assert skipped == 1


def test_a_compiled_model_is_masked_through_the_module_inside() -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparse = SparseTraining(compiled, make("set", interval_steps=2), optimizer=optimizer)
    assert sparse.model is model
    assert all(not name.startswith("_orig_mod") for name in sparse.masks)
    for number in range(1, 7):
        x, y = batch(number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(compiled(x), y).backward()
        sparse.after_backward()
        optimizer.step()
        sparse.after_step()
        if sparse.due(number, 10, 10):
            assert sparse.update(number / 10).churn > 0
        assert under_masks(sparse, optimizer) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparse = SparseTraining(model, make("em", interval_steps=1), optimizer=optimizer)
    for number in range(1, 5):
        model.zero_grad()
        x, y = batch(number)
        nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
        sparse.after_backward()
        optimizer.step()
        sparse.after_step()
        sparse.update(number / 10)
        assert under_masks(sparse, optimizer) == 0
    assert sparse.state_dict()["gradient_sums"] == {}


# ---- looking, errors, learning -------------------------------------------------------------------------


def test_densities_by_name() -> None:
    sparse = SparseTraining(net(), make("static", sparsity=0.75))
    assert sparse.densities()["hidden.weight"] == sparse.density("hidden") == sparse.density("hidden.weight") == 0.25
    assert sparse.density("stem") == sparse.density("hidden.bias") == sparse.density("norm") == 1.0
    assert sparse.dense == {
        "stem.weight": "the first convolution (dense_first)",
        "head.weight": "the last layer (dense_last)",
    }
    assert sparse.live == sum(sparse.live_counts().values()) == round(0.25 * sparse.total)
    with pytest.raises(UnknownNameError, match="Unknown weight 'hiden'"):
        sparse.density("hiden")


def test_what_does_not_fit_is_refused_and_leaves_the_model_as_it_was() -> None:
    model = net()
    before = model.conv.weight.clone()
    with pytest.raises(InvalidSettingError, match=r"hidden\.weight has 20 output channels.*block_size=8"):
        SparseTraining(model, make("set", "block", block_size=8, dense=("conv",)))
    with pytest.raises(InvalidSettingError, match=r"conv\.weight would have a density of 0\.9 .* at most 0\.4444"):
        SparseTraining(model, SET(sparsity=0.1, scheme="pattern"))
    with pytest.raises(InvalidSettingError, match=r"settings must be MEST\(\), SET\(\), RigL\(\)"):
        SparseTraining(model, 0.9)  # type: ignore[arg-type]
    assert torch.equal(model.conv.weight, before)


@pytest.mark.parametrize("sparsity", [0.6, 0.75, 0.9])
@pytest.mark.parametrize("density", ["uniform", "erk"])
def test_patterns_reach_the_asked_sparsity_by_dropping_kernels(sparsity: float, density: str) -> None:
    model = net()
    sparse = SparseTraining(model, StaticSparsity(sparsity=sparsity, scheme="pattern", density=density))
    assert sparse.live / sparse.total == pytest.approx(1 - sparsity, abs=0.003)
    kernels = sparse.masks["conv.weight"].reshape(-1, 9).sum(1)
    assert set(kernels.tolist()) == {0, 4}


@pytest.mark.parametrize("init", ["random", "magnitude"])
def test_first_masks(init: str) -> None:
    model, dense = net(), net()
    sparse = SparseTraining(model, make("static", init=init, sparsity=0.9))
    mask, values = sparse.masks["conv.weight"], dense.conv.weight.detach().abs()
    assert torch.equal(model.conv.weight, dense.conv.weight * mask)
    largest = float(values[mask].min()) >= float(values[~mask].max())
    assert largest == (init == "magnitude")


def test_zero_sparsity_changes_nothing() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    sparse = SparseTraining(model, MEST(sparsity=0.0))
    assert sparse.live == sparse.total
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(sparse.due(n, 80, 10) for n in range(1, 81))


@pytest.mark.parametrize("method", METHODS)
def test_a_sparse_network_learns(method: str) -> None:
    """At 80 % sparsity a small residual network still learns, and every method ends at its density."""
    model = lab.models.build("resnet8", input_shape=(1, 8, 8), num_classes=4, seed=0)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparse = SparseTraining(model, make(method), optimizer=optimizer)
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(4, 1, 8, 8, generator=generator)
    losses = []
    for number in range(1, 61):
        y = torch.randint(0, 4, (16,), generator=generator)
        x = means[y] + 0.5 * torch.randn(16, 1, 8, 8, generator=generator)
        due = sparse.due(number, 60, 10)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        sparse.after_backward(update_due=due)
        optimizer.step()
        sparse.after_step()
        if due:
            sparse.update(number / 60)
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.35 * sum(losses[:10])
    assert sparse.live / sparse.total == pytest.approx(0.2, abs=1e-4)


# --- frozen by others ------------------------------------------------------------------------------------


def freeze_with(kind: str, model: Net, optimizer: Optimizer) -> Callable[[], None]:
    """Freezes `conv` without a word to the masks; answers with the way back."""
    if kind == "freeze_layers":
        freezer = freeze_layers(model, ["conv"], optimizer)
        return freezer.close
    model.conv.weight.requires_grad_(False)
    model.conv.weight.grad = None

    def thaw() -> None:
        model.conv.weight.requires_grad_(True)

    return thaw


@pytest.mark.parametrize("kind", ["freeze_layers", "requires_grad"])
@pytest.mark.parametrize("method", ["em", "em&s", "set", "rigl"])
def test_a_layer_frozen_in_ones_own_loop_keeps_mask_and_values(method: str, kind: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    sparse = SparseTraining(model, make(method, interval_steps=2), optimizer=optimizer)
    train(sparse, optimizer, 1, 5, 60)
    thaw = freeze_with(kind, model, optimizer)
    values, mask, version = model.conv.weight.clone(), sparse.masks["conv.weight"], model.conv.weight._version
    updates = train(sparse, optimizer, 6, 21, 60)
    assert len(updates) == 8
    assert all("conv.weight" not in [change.name for change in update.layers] for update in updates)
    assert torch.equal(model.conv.weight, values)
    assert torch.equal(sparse.masks["conv.weight"], mask)
    assert model.conv.weight._version == version
    assert "conv.weight" not in sparse.state_dict()["gradient_sums"]
    thaw()
    updates = train(sparse, optimizer, 22, 31, 60)
    assert all("conv.weight" in [change.name for change in update.layers] for update in updates)
    assert not torch.equal(sparse.masks["conv.weight"], mask)
    assert not torch.equal(model.conv.weight, values)
    assert under_masks(sparse, optimizer) == 0


def test_the_last_pruning_waits_for_a_layer_that_is_frozen() -> None:
    model = net()
    sparse = SparseTraining(model, make("em&s", interval_steps=5))
    model.conv.weight.requires_grad_(False)
    live = sparse.live_counts()["conv.weight"]
    sparse.update(0.8)
    assert sparse.live_counts()["conv.weight"] == live
    assert not sparse.due(50, 60, 10)
    model.conv.weight.requires_grad_(True)
    assert sparse.due(51, 60, 10)
    sparse.update(0.85)
    assert sparse.live_counts()["conv.weight"] < live


def test_a_frozen_weight_that_is_named_gets_its_first_mask() -> None:
    model = net()
    model.conv.weight.requires_grad_(False)
    sparse = SparseTraining(model, make("set", sparse=("conv",)))
    assert int(model.conv.weight.count_nonzero()) == sparse.live_counts()["conv.weight"]


# --- bad input -------------------------------------------------------------------------------------------

STATE_SENTENCE = r"SparseTraining\.state must be what SparseTraining\.state_dict\(\) gave, got"


@pytest.mark.parametrize("progress", [float("nan"), 2, -1, "0.5", None, True])
def test_a_progress_out_of_range_is_one_sentence(progress: Any) -> None:
    sparse = SparseTraining(net(), make("set"))
    masks = sparse.masks
    with pytest.raises(InvalidSettingError, match=r"SparseTraining\.update\.progress must be .* in \[0, 1\], got"):
        sparse.update(progress)
    assert all(torch.equal(mask, masks[name]) for name, mask in sparse.masks.items())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((1, 0, 10), "total_steps"), ((1, 2.5, 10), "total_steps"), ((1, float("nan"), 10), "total_steps"),
        ((0, 10, 10), "step"), ((1.5, 10, 10), "step"), ((None, 10, 10), "step"),
        ((1, 10, 0), "steps_per_epoch"), ((1, 10, float("nan")), "steps_per_epoch"),
    ],
)  # fmt: skip
def test_impossible_steps_are_one_sentence(arguments: tuple[Any, Any, Any], field: str) -> None:
    sparse = SparseTraining(net(), make("set"))
    with pytest.raises(InvalidSettingError, match=rf"SparseTraining\.due\.{field} must be"):
        sparse.due(*arguments)


@pytest.mark.parametrize("state", [{}, {"masks": {}}, [], "state"])
def test_what_is_no_saved_state_is_one_sentence(state: Any) -> None:
    with pytest.raises(InvalidSettingError, match=STATE_SENTENCE):
        SparseTraining(net(), make("set"), state=state)


def test_what_is_no_model_or_not_its_optimizer_is_one_sentence() -> None:
    model = net()
    for wrong in ("mlp", None, 3):
        with pytest.raises(InvalidSettingError, match=r"SparseTraining\.model must be a torch\.nn\.Module"):
            SparseTraining(wrong, make("set"))  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match=r"SparseTraining\.optimizer must be a torch\.optim\.Optimizer or"):
        SparseTraining(model, make("set"), optimizer="sgd")  # type: ignore[arg-type]
    before = model.conv.weight.clone()
    with pytest.raises(InvalidSettingError, match="holds none of this model's parameters"):
        SparseTraining(model, make("set"), optimizer=SGD(net().parameters(), lr=0.1))
    assert torch.equal(model.conv.weight, before)
    SparseTraining(model, make("set"), optimizer=SGD(model.head.parameters(), lr=0.1))  # a part of them will do
