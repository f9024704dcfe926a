"""k steps, capture, m more, restore, m again: the same to the bit, whatever was frozen, set or under way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

import egeria_lab as lab
from egeria_lab.engine.session_state import SessionState, capture, restore
from egeria_lab.errors import CheckpointError
from egeria_lab.events import CacheBuilt, CacheNotice, LayerFrozen, LayerThawed

Make = Callable[..., lab.Session]
EAGER: dict[str, Any] = {
    "interval_steps": 2, "window": 3, "patience": 2, "tolerance": 1.2, "bootstrap_change": 5.0, "refresh_evals": 7,
}  # fmt: skip
LAYERS = ["layers.0", "layers.1", "layers.2", "head"]


@pytest.fixture
def digits() -> Iterator[Make]:
    """An mlp on digits (4 layer modules) with a rule that freezes within a few steps and thaws when the rate drops."""
    made: list[lab.Session] = []

    def make(**options: Any) -> lab.Session:
        rule = options.pop("rule", {})
        settings: dict[str, Any] = {
            "batch_size": 64, "epochs": 6, "lr": 0.05, "scheduler": "step", "seed": 1,
            "freeze": lab.Plasticity(**{**EAGER, "reference": "fp32", **rule}),
        }  # fmt: skip
        session = lab.Session("mlp", "digits", **{**settings, **options})
        made.append(session)
        return session

    yield make
    for session in made:
        session.close()


def trace(session: lab.Session) -> dict[str, Any]:
    """Everything that training has led to, exactly; only clocks are left out."""
    clocks = {"step_seconds", "monitor_seconds", "elapsed_seconds", "seconds"}
    clocks |= {"time_saved_fraction", "monitor_fraction"}
    flops = {"train_flops", "flops_saved_fraction"} if session.cache is not None else set()
    tables = {
        name: {column: session.history[name][column].tolist() for column in session.history[name].columns}
        for name in session.history
    }
    shown = {
        name: {k: repr(v) for k, v in columns.items() if k not in clocks | flops} for name, columns in tables.items()
    }
    events = [e.to_dict() for e in session.events if not isinstance(e, (CacheBuilt, CacheNotice))]
    return {
        "tables": shown,
        "events": events,
        "state": exact(capture(session).tree, skip={"history", "events", "recorder", "cache"}),
        "rows": [repr(row) for row in session.layers],
    }


def exact(tree: Any, skip: set[str] = frozenset(), path: str = "") -> dict[str, Any]:  # type: ignore[assignment]
    """A tree as one flat dictionary of comparable values."""
    if isinstance(tree, dict):
        items: list[tuple[Any, Any]] = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    else:
        key = path.rsplit("/", 1)[-1]
        if key in ("seconds", "waited_seconds", "worker_seconds"):
            return {}
        return {path: f"{tree.dtype} {tree.tolist()!r}" if isinstance(tree, Tensor) else repr(tree)}
    found: dict[str, Any] = {path: type(tree).__name__}
    for key, value in items:
        if key not in skip:
            found.update(exact(value, skip, f"{path}/{key}"))
    return found


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    for part in a:
        if isinstance(a[part], dict):
            different = [k for k in a[part].keys() | b[part].keys() if a[part].get(k) != b[part].get(k)]
            assert not different, f"{part}: {sorted(different)[:5]}"
        assert a[part] == b[part], part


Script = dict[int, list[Callable[[lab.Session], Any]]]


def random_script(seed: int, steps: int) -> Script:
    """Calls of all kinds at random steps."""
    draw = random.Random(seed)
    script: Script = {}
    for _ in range(steps // 3):
        layer = draw.choice(LAYERS[:-1])
        value = draw.choice([0.1, 0.5, 1.5, 3.0])
        call: Callable[[lab.Session], Any] = draw.choice(
            [
                lambda s, n=layer: s.freeze(n),
                lambda s, n=layer: s.thaw(n),
                lambda s, n=layer: s.pin(n),
                lambda s, n=layer: s.unpin(n),
                lambda s, n=layer, v=value: s.override("freeze.tolerance", v, layer=n),
                lambda s, v=value: s.override("freeze.tolerance", v),
                lambda s, v=value: s.override("freeze.window", 2 + int(v)),
                lambda s, v=value: s.override("optimizer.lr", 0.02 * v),
                lambda s: s.reset("freeze.tolerance"),
                lambda s: s.extend(1),
                lambda s: s.pause(),
                lambda s: s.evaluate(),
            ]
        )
        script.setdefault(draw.randrange(steps), []).append(call)
    return script


def play(session: lab.Session, script: Script, until: int) -> None:
    while session.steps_done < until:
        for call in script.get(session.steps_done, ()):
            call(session)
        session.step()


def check(session: lab.Session, k: int, m: int, script: Script | None = None) -> dict[str, Any]:
    script = script or {}
    play(session, script, k)
    state = capture(session)
    before = trace(session)
    play(session, script, k + m)
    first = trace(session)
    assert first["tables"] != before["tables"]
    for _ in range(2):  # a state can be put back again and again
        assert [note for note in restore(session, state) if "activation cache" not in note] == []
        assert_same(before, trace(session))
        play(session, script, k + m)
        assert_same(first, trace(session))
    return first


@pytest.mark.parametrize("seed", range(26))
def test_random_scripts_repeat_to_the_bit(digits: Make, seed: int) -> None:
    optimizers: list[Any] = [
        "sgd",
        "adam",
        "adamw",
        lambda p: torch.optim.SGD(p, lr=0.05),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    ]
    options: dict[str, Any] = {
        "park_state": ("keep", "cpu", "drop")[seed % 3],
        "optimizer": optimizers[seed % 5],
        "lr": None if seed % 5 in (1, 2) else 0.05,
        "rule": {"reference": ("fp32", "int8", "bf16")[seed % 4 % 3], "guard": 0.01 if seed % 2 else None},
        "scheduler": ("step", "cosine", "linear")[seed % 7 % 3],
        "seed": seed,
    }
    k, m = random.Random(seed).randrange(3, 70), 40
    session = digits(epochs=4, **options)
    check(session, k, m, random_script(seed, k + m))


def test_the_rule_freezes_and_thaws_on_both_sides(digits: Make) -> None:
    """The script tests would prove little if the rule did nothing."""
    session = digits(epochs=10)
    check(session, 110, 60)
    kinds = [type(e) for e in session.events if e.by == "rule"]
    assert LayerFrozen in kinds
    assert LayerThawed in kinds


def test_at_every_step_around_a_freeze_and_a_thaw_by_the_rule(digits: Make) -> None:
    session = digits()
    session.step(session.planned_steps)
    at = {e.step for e in session.events if isinstance(e, (LayerFrozen, LayerThawed))}
    whole = trace(session)
    near = sorted({s + d for s in at for d in (-1, 0, 1) if 0 < s + d < session.planned_steps})
    states: dict[int, SessionState] = {}
    again = digits()
    while again.steps_done < again.planned_steps:
        again.step()
        if again.steps_done in near:
            states[again.steps_done] = capture(again)
    assert_same(whole, trace(again))  # capturing changes nothing
    assert len(states) == len(near) > 5
    for state in states.values():
        restore(again, state)
        again.step(again.planned_steps - again.steps_done)
        assert_same(whole, trace(again))


@pytest.mark.parametrize("reference", ["int8", "bf16", "fp32"])
def test_a_convolutional_model_with_its_reference(reference: str) -> None:
    rule = lab.Plasticity(**{**EAGER, "reference": reference, "probe_rows": 8})
    data = lab.data.load("synthetic", num_samples=48, num_valid=16, shape=(1, 12, 12), num_classes=3)
    session = lab.Session("resnet8", data, batch_size=16, epochs=12, lr=0.02, freeze=rule, scheduler="step")
    first = check(session, 11, 12)
    assert len(session.history.plasticity) > 5
    assert first["events"]
    session.close()


@pytest.mark.parametrize("k", [7, 20, 33])
def test_with_the_cache_and_augmentation(digits: Make, k: int) -> None:
    augment = lab.Augment(noise=0.2, views=2, seed=3)
    session = digits(
        cache=lab.ActivationCache(self_profiling=False), augment=augment, scheduler="constant", freeze=None
    )
    script: Script = {5: [lambda s: s.freeze("layers.0")], 25: [lambda s: s.freeze("layers.1")]}
    check(session, k, 40, script)
    assert session.cache is not None
    assert session.cache.statistics.hits > 0


@pytest.mark.parametrize(
    "freeze",
    [
        lab.GradientNorm(interval_steps=4),
        lab.Schedule(variant="linear", start=0.1),
        lab.Schedule(saving=0.2, block_lr="cosine"),
        lab.Schedule(variant="freezeout", start=0.3),
        None,
    ],
    ids=["gradient norm", "linear", "single shot", "freezeout", "by hand"],
)
def test_every_rule(digits: Make, freeze: Any) -> None:
    script: Script = {4: [lambda s: s.freeze("layers.1")], 30: [lambda s: s.thaw("layers.1")]}
    check(digits(freeze=freeze, scheduler="cosine"), 41, 60, script)
    check(digits(freeze=freeze, scheduler="cosine"), 10, 40, script)


@pytest.mark.parametrize(
    "options",
    [
        {"sieve": lab.CirculantSieve(fraction=0.2, interval_epochs=1)},
        {"sieve": lab.RandomSieve(fraction=0.3, interval_epochs=1)},
        {"sieve": lab.LossSieve()},
        {"sparsity": lab.MEST(sparsity=0.8, interval_steps=5)},
        {"sparsity": lab.SET(sparsity=0.8, interval_steps=4), "optimizer": "adamw", "lr": None},
        {"sparsity": lab.RigL(sparsity=0.8, interval_steps=4)},
        {
            "sparsity": lab.MEST(sparsity=0.8, interval_steps=5), "sieve": lab.CirculantSieve(interval_epochs=1),
            "freeze": lab.Schedule(saving=0.2), "cache": lab.ActivationCache(self_profiling=False),
            "augment": lab.Augment(noise=0.1, views=2), "scheduler": "cosine",
        },
    ],
    ids=["circulant", "random", "loss", "mest", "set", "rigl", "everything"],
)  # fmt: skip
def test_sieves_and_masks(digits: Make, options: dict[str, Any]) -> None:
    script: Script = {
        6: [lambda s: s.freeze("layers.0"), lambda s: s.discard([3, 5, 900])],
        21: [lambda s: s.discard([8])],
        33: [lambda s: s.thaw("layers.0"), lambda s: s.restore([5])],
    }
    if "sieve" in options and not isinstance(options["sieve"], lab.LossSieve):
        script[22] = [lambda s: s.override("sieve.fraction", 0.35)]
        script[40] = [lambda s: s.override("sieve.fraction", 0.1)]
    for k in (6, 24, 33):
        check(digits(**{"scheduler": "step", **options}), k, 30, script)


class Noisy(TensorDataset):
    """Draws from the global generator for each sample, as random augmentations do."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(x.shape), y


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_ones_own(make_session: Make, tiny_data: lab.Data, workers: int) -> None:
    x = torch.stack([tiny_data.train[i][0] for i in range(64)])
    y = torch.tensor([int(tiny_data.train[i][1]) for i in range(64)])
    loader = DataLoader(Noisy(x, y), batch_size=8, shuffle=True, num_workers=workers)
    valid = DataLoader(TensorDataset(x[:16], y[:16]), batch_size=8)
    check(make_session(data=(loader, valid), dropout=0.3), 5, 14)


class Stubborn:
    """A sampler with a state of its own: every pass starts where the last one ended."""

    def __init__(self, count: int) -> None:
        self.count, self.start = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        first, self.start = self.start, (self.start + 5) % self.count
        return iter([(first + i) % self.count for i in range(self.count)])


def test_the_pass_under_way_of_a_stateful_sampler_is_kept(make_session: Make, tiny_data: lab.Data) -> None:
    loader = DataLoader(tiny_data.train, batch_size=8, sampler=Stubborn(64))  # type: ignore[arg-type]
    session = make_session(data=(loader, tiny_data.valid))
    session.step(11)
    state = capture(session)
    first = [session.step().loss for _ in range(5)]
    session.step(10)
    restore(session, state)
    assert [session.step().loss for _ in range(5)] == first


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=60),
    "cyclic": lambda o: CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=7, mode="exp_range", gamma=0.99),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5),
    "milestones": lambda o: MultiStepLR(o, [2, 2, 4]),
    "steps": lambda o: StepLR(o, 2, 0.5),
    "warm restarts": lambda o: CosineAnnealingWarmRestarts(o, 3),
    "cosine": lambda o: CosineAnnealingLR(o, 9),
    "sequence": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), MultiStepLR(o, [3])], [2]),
    "chain": lambda o: ChainedScheduler([ExponentialLR(o, 0.9), LinearLR(o, 0.5, total_iters=3)], o),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler(make_session: Make, name: str) -> None:
    session = make_session(scheduler=SCHEDULERS[name], epochs=8, dropout=0.2)
    check(session, 13, 30, {10: [lambda s: s.override("optimizer.lr", 0.02)], 20: [lambda s: s.freeze("first")]})


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
        lambda p: torch.optim.ASGD(p, lr=0.01),
        lambda p: torch.optim.Rprop(p, lr=0.01),
        lambda p: torch.optim.Adafactor(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=torch.tensor(0.01)),
    ],
    ids=["rmsprop", "adagrad", "amsgrad", "asgd", "rprop", "adafactor", "a rate that is a tensor"],
)
def test_every_optimizer(make_session: Make, make: Any) -> None:
    script: Script = {3: [lambda s: s.freeze("first")], 12: [lambda s: s.thaw("first")]}
    for k in (0, 8, 14):
        check(make_session(optimizer=make, dropout=0.2, scheduler=None), k, 12, script)


def test_fp16_with_loss_scaling(make_session: Make) -> None:
    check(make_session(precision="fp16", max_grad_norm=0.5), 6, 12, {4: [lambda s: s.freeze("first")]})


class Weighted(nn.Module):
    """A loss with a weight of its own that is trained too."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs * self.temperature, targets)


def test_parameters_that_are_not_the_models(make_session: Make, tiny_model: Callable[..., nn.Module]) -> None:
    model, loss = tiny_model(), Weighted()
    optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=0.01)
    session = make_session(model=model, loss=loss, optimizer=optimizer)
    check(session, 5, 10)
    assert float(loss.temperature.detach()) != 1.5


class Odd(nn.Module):
    """Buffers that are not saved by torch, one that grows, tied weights, and state of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.register_buffer("seen", torch.zeros(0))
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.number += 1
            self.seen = torch.cat([self.seen, x.detach().mean()[None]])[-50:]
        x = self.first(x).relu() + 0.01 * self.calls + 0.01 * self.seen.sum()
        out: Tensor = self.head(self.second(x))
        return out

    def get_extra_state(self) -> int:
        return self.number

    def set_extra_state(self, state: int) -> None:
        self.number = state


def test_odd_models(make_session: Make) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Odd()
    session = make_session(model=model, optimizer="adam", lr=None)
    name = session.layers.names[0]
    check(session, 6, 12, {3: [lambda s: s.freeze(name)], 10: [lambda s: s.thaw(name)]})


def test_the_owners_eval_modes_and_flags_stay(make_session: Make, tiny_model: Callable[..., nn.Module]) -> None:
    model: Any = tiny_model(dropout=0.3)
    model.first[1].eval()
    model.first[0].bias.requires_grad_(False)
    session = make_session(model=model)
    check(session, 5, 10, {2: [lambda s: s.freeze("first")], 8: [lambda s: s.thaw("first")]})
    assert not model.first[1].training
    assert not model.first[0].bias.requires_grad


def test_flags_and_modes_that_were_switched_since_come_back(make_session: Make) -> None:
    session = make_session()
    session.step(2)
    state = capture(session)
    model: Any = session.model
    model.first[0].bias.requires_grad_(False)
    model.second[1].eval()
    restore(session, state)
    assert model.first[0].bias.requires_grad
    assert model.second[1].training


def test_what_its_owner_keeps_in_eval_mode_is_known_to_a_fresh_session(
    make_session: Make, tiny_model: Callable[..., nn.Module]
) -> None:
    model: Any = tiny_model()
    model.first[1].eval()
    first, second = make_session(model=model), make_session()
    restore(second, capture(first))
    other: Any = second.model.eval()  # somebody evaluated in between
    second.step()
    assert other.second[1].training
    assert not other.first[1].training


def test_a_fresh_session_goes_on_to_the_bit(digits: Make) -> None:
    """As a new process would: nothing of the first session is there."""
    for k in (9, 52, 101):
        first = digits(optimizer="adamw", lr=None, epochs=8, rule={"reference": "int8"})
        first.step(k)
        state = capture(first)
        first.step(40)
        second = digits(optimizer="adamw", lr=None, epochs=8, rule={"reference": "int8"})
        second.freeze("layers.2")
        second.step(3)
        assert restore(second, state) == []
        second.step(40)
        assert_same(trace(first), trace(second))


def test_restoring_does_not_touch_the_state(digits: Make) -> None:
    session = digits(optimizer="adam", lr=None)
    session.step(30)
    state = capture(session)
    before = exact(state.tree)
    restore(session, state)
    session.step(20)
    assert exact(state.tree) == before
    assert state.num_bytes > 1000


def test_another_optimizer_takes_over_rates_and_lists_what_is_lost(make_session: Make) -> None:
    first = make_session(optimizer="sgd", scheduler="cosine", epochs=4)
    first.step(8)
    first.freeze("first")
    first.step(8)
    second = make_session(optimizer="adam", lr=0.01, scheduler="cosine", epochs=4)
    notes = restore(second, capture(first))
    assert len(notes) == 1
    assert notes[0].startswith("The optimizer was SGD and is Adam: momentum_buffer of ")
    assert second.schedule.learning_rate == pytest.approx(0.01 * 0.5)  # half way down the cosine, from its own peak
    assert second.layers["first"].frozen
    assert second.step().learning_rate == pytest.approx(0.005)
    second.thaw("first")
    second.step(5)


def test_another_rule_begins_anew_and_says_so(digits: Make) -> None:
    first = digits()
    first.step(20)
    second = digits(freeze=lab.GradientNorm(interval_steps=3))
    assert restore(second, capture(first)) == ["The freezing rule is another one than before: it begins anew."]
    second.step(10)


def test_other_models_and_data_are_refused(make_session: Make, digits: Make) -> None:
    state = capture(make_session())
    with pytest.raises(CheckpointError, match=r"of another model: first\.0\.weight is of shape"):
        restore(digits(), state)
    with pytest.raises(CheckpointError, match=r"64 samples, and this has 32"):
        restore(make_session(data=lab.data.load("synthetic", num_samples=32, shape=(6,), num_classes=3)), state)
    with pytest.raises(CheckpointError, match="8 samples a batch, and this has 16"):
        restore(make_session(batch_size=16), state)


def test_extra_parts_travel_along(make_session: Make) -> None:
    class Counter:
        def __init__(self) -> None:
            self.n = torch.zeros(1)

        def state_dict(self) -> dict[str, Any]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.n = state["n"]

    first, second = make_session(), make_session()
    part: Any = Counter()
    first.parts = {"counter": part}  # type: ignore[attr-defined]
    part.n += 3
    state = capture(first)
    part.n += 1
    assert restore(first, state) == []
    assert float(part.n) == 3
    assert restore(second, state) == ["There is no counter here: what it had saved is left out."]
