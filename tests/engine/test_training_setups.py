"""Whatever training setup a user brings: accumulation, averages, several optimizers, careless ones, eval islands."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

import egeria_lab as lab
from egeria_lab.data.datasets import ArrayDataset
from egeria_lab.engine.averaging import WeightAverage
from egeria_lab.engine.optimizer_set import OptimizerSet
from egeria_lab.events import Notice

Make = Callable[[Any], Any]


def mlp() -> nn.Module:
    return lab.models.build("mlp", input_shape=(1, 8, 8), num_classes=10, seed=1)


def session(model: Any = None, data: Any = "digits", **options: Any) -> lab.Session:
    options = {"batch_size": 16, "epochs": 4, "freeze": None, **options}
    return lab.Session(mlp() if model is None else model, data, **options)


def losses(of: lab.Session) -> list[float]:
    return [float(x) for x in of.history.steps["loss"]]


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# --- the matrix: train, save, load, train on, bit-equal to training without a stop -------------------------


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.05)


def front_and_head(make: Make) -> Make:
    def two(parameters: Any) -> list[torch.optim.Optimizer]:
        every = list(parameters)
        return [make(every[:2]), make(every[2:])]

    return two


SETUPS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate": 4},
    "bf16": {"precision": "bf16"},
    "average": {"ema": 0.9},
    "two optimizers": {"two": True},
    "all": {"accumulate": 4, "precision": "bf16", "ema": 0.9, "two": True},
}


@pytest.mark.parametrize(
    ("setup", "make"), list(product(SETUPS, [sgd, adamw])), ids=lambda x: getattr(x, "__name__", x)
)
def test_every_setup_resumes_to_the_bit(tmp_path: Path, setup: str, make: Make) -> None:
    options = dict(SETUPS[setup])
    optimizer = front_and_head(make) if options.pop("two", False) else make

    def begun(steps: int) -> lab.Session:
        made = lab.Session("mlp", "digits", batch_size=16, epochs=4, freeze=None, optimizer=optimizer, **options)
        made.step(4)
        made.freeze("layers.0")  # all that the first of two optimizers holds
        made.step(steps - 4)
        return made

    whole, half = begun(20), begun(10)
    half.save(tmp_path / "run.ckpt")
    second = lab.Session.load(tmp_path / "run.ckpt", optimizer=optimizer)
    second.step(10)
    assert losses(second) == losses(whole)
    assert same(second.model, whole.model)
    if options.get("ema"):
        assert second.evaluate(ema=True) == whole.evaluate(ema=True) != whole.evaluate()
    for one in (whole, second):  # and the thawed layer comes back with its moments
        one.thaw("layers.0")
        one.step(2)
    assert same(second.model, whole.model)


# --- accumulation ------------------------------------------------------------------------------------------


def test_four_small_batches_make_the_step_of_one_large_batch() -> None:
    small, large = session(accumulate=4), session(batch_size=64)
    assert small.step().loss == pytest.approx(large.step().loss, rel=1e-6)
    small.step(3), large.step(3)
    for a, b in zip(weights(small.model), weights(large.model), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    assert small.planned_steps == large.planned_steps


def test_a_step_runs_the_model_once_a_part_and_the_optimizer_once() -> None:
    sizes: list[int] = []

    def forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        if model.training:
            sizes.append(len(batch[1]))
        return model(batch[0]), batch[1]

    one = session(accumulate=3, forward=forward, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
    sizes.clear()
    one.step(2)
    assert sizes == [16] * 6
    assert {float(state["step"]) for state in one.optimizer.state.values()} == {2.0}


def test_the_last_window_of_a_pass_has_what_is_left() -> None:
    data = ArrayDataset(torch.randn(50, 4), torch.randint(0, 2, (50,)))
    one = session(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), (data, data), batch_size=8, accumulate=3)
    assert one.steps_per_epoch == 3
    one.step(3)
    assert [int(n) for n in one.history.steps["samples"]] == [24, 48, 50]
    assert one.epoch == 1.0


def test_loaders_accumulate_and_those_with_a_batch_sampler_of_their_own_are_refused() -> None:
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    valid = DataLoader(data, batch_size=8)
    one = session(nn.Linear(4, 2), (DataLoader(data, batch_size=8, shuffle=True), valid), accumulate=4, seed=3)
    seen = one._passes.next_batch()
    assert [len(part) for part in seen.split()] == [8] * 4
    assert torch.equal(torch.cat([part.ids for part in seen.split()]), seen.ids)

    class Own(BatchSampler):
        pass

    bucketed = DataLoader(data, batch_sampler=Own(RandomSampler(data), 8, False))
    with pytest.raises(lab.DataError, match=r"accumulate=4 cannot be used with this loader: its Own composes"):
        session(nn.Linear(4, 2), (bucketed, valid), accumulate=4)


def test_accumulation_with_sieve_cache_masks_and_plasticity() -> None:
    rule = lab.Plasticity(interval_steps=2, window=3, patience=2, tolerance=1.2, bootstrap_change=5.0)
    one = session(
        accumulate=2, freeze=rule, sieve=lab.CirculantSieve(fraction=0.25, interval_epochs=1),
        sparsity=lab.MEST(sparsity=0.8, interval_steps=7), cache=lab.ActivationCache(self_profiling=False),
    )  # fmt: skip
    one.step(4)
    one.freeze("layers.0")
    one.run(steps=90, progress=False)
    assert one.recorder.book.flops_saved_fraction > 0
    assert one.sieve.updates >= 1
    assert one.cache is not None
    assert sum(one.recorder.cached_steps.values()) > 0
    one.close()


@pytest.mark.parametrize("value", [0, 1.5, True, "4"])
def test_accumulate_is_a_whole_number(value: Any) -> None:
    with pytest.raises(lab.InvalidSettingError, match=r"Session.accumulate must be a whole number >= 1"):
        session(accumulate=value)


def test_a_window_larger_than_the_data_is_refused() -> None:
    with pytest.raises(lab.DataError, match=r"batch_size=16 × accumulate=200 is larger than the training set"):
        session(accumulate=200)


# --- averages ----------------------------------------------------------------------------------------------


def test_the_average_is_what_the_formula_says_and_training_does_not_notice() -> None:
    one, plain = session(ema=0.8), session()
    expected: list[Tensor] | None = None
    for _ in range(6):
        one.step()
        now = weights(one.model)
        expected = now if expected is None else [e.lerp(n, 1 - 0.8) for e, n in zip(expected, now, strict=True)]
    plain.step(6)
    assert losses(one) == losses(plain)
    exported = one.export(ema=True)
    for got, want in zip(exported.model.parameters(), expected or [], strict=True):
        assert torch.allclose(got, want, atol=1e-7)
    assert same(one.export().model, one.model)
    before = weights(one.model)
    one.evaluate(ema=True)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(one.model), strict=True))
    assert one.evaluate() == plain.evaluate()


def test_batch_norm_statistics_are_the_models_unless_asked_otherwise() -> None:
    def trained(buffers: str) -> tuple[lab.Session, Tensor, Tensor]:
        made = lab.Session("resnet8", lab.data.load("synthetic", num_samples=64, num_valid=16, shape=(1, 8, 8)),
                           batch_size=16, epochs=2, freeze=None, ema=0.9, ema_buffers=buffers)  # fmt: skip
        made.step(4)
        name = next(n for n in made.model.state_dict() if n.endswith("running_mean"))
        return made, made.model.state_dict()[name], made.export(ema=True).state_dict[name]

    _, own, exported = trained("copy")
    assert torch.equal(own, exported)
    _, own, exported = trained("average")
    assert not torch.equal(own, exported)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ema": 1.0}, "a number in \\(0, 1\\)"),
        ({"ema": 0.9, "ema_buffers": "live"}, "one of copy, average"),
        ({"ema_buffers": "live"}, "one of copy, average"),
    ],
)
def test_averages_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(lab.InvalidSettingError, match=words):
        session(**options)


def test_an_average_that_is_not_there_is_said() -> None:
    with pytest.raises(lab.InvalidSettingError, match="make the session with ema"):
        session().evaluate(ema=True)
    with pytest.raises(lab.InvalidSettingError, match="before the first step"):
        session(ema=0.9).export(ema=True)


def test_an_average_that_begins_after_a_load_begins_with_the_loaded_weights(tmp_path: Path) -> None:
    one = session(model="mlp")
    one.step(5)
    one.save(tmp_path / "a.ckpt")
    second = lab.Session.load(tmp_path / "a.ckpt", ema=0.9)
    second.step()
    assert same(second.export(ema=True).model, second.model)


def test_the_average_is_undone_with_its_step() -> None:
    one = session(ema=0.9)
    one.step(3)
    one.freeze("layers.0")
    before = one.export(ema=True).state_dict
    one.step(3)
    one.undo()
    after = one.export(ema=True).state_dict
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_average_lends_and_takes_back_also_on_error() -> None:
    model = nn.Linear(2, 2)
    average = WeightAverage(model, 0.5)
    average.update()
    own = model.weight.data.clone()
    nn.init.zeros_(model.weight)
    seen: list[Tensor] = []

    def failing() -> None:
        with average.lent():
            seen.append(model.weight.detach().clone())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        failing()
    assert torch.equal(seen[0], own)
    assert not model.weight.any()


# --- several optimizers and groups -------------------------------------------------------------------------


def two_ready_made(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [
        torch.optim.SGD(parameters[:2], lr=0.05, momentum=0.9),
        torch.optim.AdamW(parameters[2:], lr=1e-3),
    ]


def test_two_optimizers_step_as_they_would_by_hand() -> None:
    model, twin = mlp(), mlp()
    one = session(model, optimizer=two_ready_made(model), scheduler=None)
    assert isinstance(one.optimizer, OptimizerSet)
    theirs = two_ready_made(twin)
    twin.train()
    for _ in range(3):
        inputs, targets = one._passes.next_batch().content
        one._passes.read_again()
        for optimizer in theirs:
            optimizer.zero_grad()
        F.cross_entropy(twin(inputs), targets, reduction="none").mean().backward()
        for optimizer in theirs:
            optimizer.step()
        one.step()
    assert same(model, twin)


def test_each_optimizer_has_a_scheduler_of_its_own() -> None:
    model = mlp()
    first, second = two_ready_made(model)
    own = [lambda o: OneCycleLR(o, max_lr=0.1, total_steps=400), "linear"]
    one = session(model, optimizer=[first, second], scheduler=own)
    start = [first.param_groups[0]["lr"], second.param_groups[0]["lr"]]
    one.step(10)
    assert first.param_groups[0]["lr"] > start[0]
    assert second.param_groups[0]["lr"] < start[1]
    same_kind = session(model2 := mlp(), optimizer=two_ready_made(model2), scheduler=lambda o: StepLR(o, 1, 0.5))
    same_kind.step(same_kind.steps_per_epoch)
    assert [group["lr"] for group in same_kind.optimizer.param_groups] == [0.025, 0.0005]


def test_settings_reach_both_and_the_whole_setup_can_be_forked() -> None:
    model = mlp()
    one = session(model, optimizer=two_ready_made(model))
    one.step(2)
    one.freeze("layers.0")
    second = one.fork()
    rates = [group["lr"] for group in one.optimizer.param_groups]
    one.override("optimizer.lr", one.setting("optimizer.lr") * 2)
    one.step(3), second.step(3)
    assert losses(one) != losses(second)
    assert [g["lr"] for g in one.optimizer.param_groups] > rates[:0]
    third = second.fork()
    second.step(2), third.step(2)
    assert losses(second) == losses(third)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_an_optimizer_whose_parameters_are_all_frozen_is_left_out(precision: str) -> None:
    """Trap 51: under loss scaling an optimizer without a gradient has no inf check, and torch asserts one."""
    model = mlp()
    first, second = two_ready_made(model)
    one = session(model, optimizer=[first, second], precision=precision, max_grad_norm=1.0)
    one.step(2)
    one.freeze("layers.0")
    before = weights(model.get_submodule("layers.0"))
    one.step(3)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model.get_submodule("layers.0")), strict=True))
    one.thaw("layers.0")
    one.step(2)
    assert not torch.equal(before[0], weights(model.get_submodule("layers.0"))[0])


def test_an_optimizer_that_holds_the_head_only_may_have_it_frozen_under_loss_scaling() -> None:
    model = mlp()
    head = model.get_submodule("layers.2") if "layers.2" in dict(model.named_modules()) else None
    assert head is not None
    one = session(model, optimizer=lambda _: torch.optim.SGD(head.parameters(), lr=0.1), precision="fp16")
    one.step()
    one.freeze("layers.2")
    before = weights(model)
    one.step(2)  # nothing is trained: the backbone is in no optimizer
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_several_parameter_groups_keep_their_options_through_freeze_and_thaw() -> None:
    model = mlp()
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[::2], "lr": 0.05, "weight_decay": 0.1},
        {"params": parameters[1::2], "lr": 0.01, "weight_decay": 0.0},
    ]
    one = session(model, optimizer=lambda _: torch.optim.SGD(groups, momentum=0.9), scheduler=None)
    held = [[id(p) for p in group["params"]] for group in one.optimizer.param_groups]
    for _ in range(3):
        one.freeze("layers.1"), one.step(2), one.thaw("layers.1"), one.step(2)
    assert [[id(p) for p in group["params"]] for group in one.optimizer.param_groups] == held
    assert [(g["lr"], g["weight_decay"]) for g in one.optimizer.param_groups] == [(0.05, 0.1), (0.01, 0.0)]


def test_a_saved_state_of_other_optimizers_is_not_mistaken_for_one_of_these(tmp_path: Path) -> None:
    one = lab.Session("mlp", "digits", epochs=2, freeze=None, optimizer=front_and_head(sgd))
    one.step(3)
    one.save(tmp_path / "a.ckpt")
    second = lab.Session.load(tmp_path / "a.ckpt", optimizer=front_and_head(adamw))
    notes = " ".join(
        note for event in second.events if type(event).__name__ == "CheckpointLoaded" for note in event.notes
    )
    assert "was SGD + SGD and is AdamW + AdamW" in notes
    second.step(2)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda p: [], "must be a name"),
        (lambda p: [torch.optim.SGD(p, lr=0.1), 3], "must be a name"),
        (lambda p: torch.optim.LBFGS(list(p)), "needs no closure"),
        (lambda p: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), "holds no parameter of the model"),
    ],
)
def test_optimizers_that_cannot_be_used(optimizer: Make, words: str) -> None:
    with pytest.raises(lab.InvalidSettingError, match=words):
        session(optimizer=optimizer)


def test_one_parameter_in_two_optimizers_and_one_scheduler_too_few() -> None:
    model = mlp()
    with pytest.raises(lab.InvalidSettingError, match="moved twice a step"):
        session(model, optimizer=[torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())])
    with pytest.raises(lab.InvalidSettingError, match="2 optimizers need as many schedulers, and 1 were given"):
        session(model, optimizer=two_ready_made(model), scheduler=["cosine"])


# --- optimizers that do not go by their groups -------------------------------------------------------------


class Shrinking(torch.optim.SGD):
    """Decays a list of parameters of its own, gradient or not."""

    def __init__(self, parameters: Any) -> None:
        self.everything = list(parameters)
        super().__init__(self.everything, lr=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.everything:
            parameter.mul_(0.99)
        return super().step(closure)


class Demanding(Shrinking):
    """Wants a gradient of each parameter in its own list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.everything:
            parameter.add_(parameter.grad, alpha=-0.05)  # type: ignore[arg-type]


def test_an_optimizer_that_moves_weights_without_a_gradient_is_made_safe_and_said(tmp_path: Path) -> None:
    one = lab.Session("mlp", "digits", epochs=2, freeze=None, optimizer=Shrinking)
    one.step(2)
    one.freeze("layers.0")
    frozen, active = one.model.get_submodule("layers.0"), one.model.get_submodule("layers.1")
    before, moving = weights(frozen), weights(active)
    one.step(4)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(frozen), strict=True))
    assert not torch.equal(moving[0], weights(active)[0])
    said = [event.message for event in one.events.of(Notice) if isinstance(event, Notice)]
    assert len([m for m in said if m.startswith("Shrinking moves weights that are frozen")]) == 1
    one.save(tmp_path / "a.ckpt")
    second = lab.Session.load(tmp_path / "a.ckpt", optimizer=Shrinking)
    second.step(3)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(second.model.get_submodule("layers.0")), strict=True))


def test_an_optimizer_that_fails_without_a_gradient_is_refused_and_no_weight_moved() -> None:
    one = session(optimizer=Demanding)
    one.step(2)
    one.freeze("layers.1")
    before = copy.deepcopy(one.model.state_dict())
    with pytest.raises(lab.TrainingError, match=r"Demanding cannot train with frozen layers: it failed .*thaw what"):
        one.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in one.model.state_dict().items())
    one.thaw("layers.1")
    assert one.step().step == 3


# --- eval islands ------------------------------------------------------------------------------------------


class Island(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.front(x.flatten(1)))
        return out


def test_the_users_own_eval_island_is_kept_through_epochs_freeze_thaw_and_load(tmp_path: Path) -> None:
    """Trap 23."""
    model = Island()
    model.train()
    model.front[1].eval()
    one = session(model, batch_size=128)
    one.step(one.steps_per_epoch + 1)  # an evaluation lies between
    one.freeze("front"), one.step(2), one.thaw("front"), one.step(2)
    assert not model.front[1].training
    assert model.front[0].training
    assert int(model.front[1].num_batches_tracked) == 0
    one.save(tmp_path / "a.ckpt")
    second = lab.Session.load(tmp_path / "a.ckpt", model=Island(), data="digits")
    second.step(2)
    assert int(second.model.front[1].num_batches_tracked) == 0  # type: ignore[union-attr,index,arg-type]


# --- refused at construction, in one sentence --------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("it may not be read")


class Shaky:
    """A data set whose transform draws new numbers at every call."""

    def __init__(self) -> None:
        self.transform = RandomNudge()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(torch.ones(4) * index), index % 2


class RandomNudge:
    def __call__(self, x: Tensor) -> Tensor:
        return x + torch.rand(4)


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def own_batches() -> DataLoader[Any]:
    class Own(BatchSampler):
        pass

    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    return DataLoader(data, batch_sampler=Own(RandomSampler(data), 8, False))


SIEVE, CACHE = lab.RandomSieve(fraction=0.25, interval_epochs=1), lab.ActivationCache()
REFUSALS: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (
        lambda: DataLoader(Stream()),
        {"sieve": SIEVE},
        "sieve= leaves samples out by their ids, and the training data are a stream",
    ),
    (lambda: Stream(), {"cache": CACHE}, "cache= finds the outputs of a sample by its id, and the training data"),
    (own_batches, {"sieve": SIEVE}, "composes batches by a rule of its own"),
    (Shaky, {"cache": CACHE}, "RandomNudge draws new numbers at every call"),
    (lambda: DataLoader(Shaky(), batch_size=None), {}, "hands out ready-made batches, whose samples have no ids"),
    (Shaky, {"augment": RandomNudge()}, "augment must be lab.Augment"),
    (Shaky, {"precision": "fp8"}, "Unknown precision 'fp8'"),
    (Shaky, {"max_grad_norm": 0}, "max_grad_norm must be > 0 or None"),
    (Shaky, {"forward": 3}, "forward must be a function or None"),
]


@pytest.mark.parametrize(("data", "options", "words"), REFUSALS, ids=[words[:40] for *_, words in REFUSALS])
def test_what_cannot_work_is_refused_before_anything_is_trained(
    data: Callable[[], Any], options: dict[str, Any], words: str
) -> None:
    model, train = flat(), data()
    before = weights(model)
    with pytest.raises(lab.EgeriaLabError, match=re.escape(words)) as caught:
        lab.Session(model, (train, [(torch.ones(4), 0)] * 8), batch_size=8, epochs=1, freeze=None, **options)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
