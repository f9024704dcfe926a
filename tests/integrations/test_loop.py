"""A training loop of one's own, with and without the three lines that bring freezing to it."""

from __future__ import annotations

import ast
import inspect
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import egeria_lab as lab
from egeria_lab.events import EpochFinished, LayerFrozen, LayerThawed, Notice, SamplesSieved
from egeria_lab.integrations.kept import put_back
from egeria_lab.integrations.loop import LoopFreezer, batch_rows

RULE = lab.Plasticity(interval_steps=4, window=3, patience=2, tolerance=1.2, bootstrap_change=5.0, refresh_evals=30)
MARGIN = 0.03
"""Accuracy that the frozen loop may lie below the plain one; the validation set has 360 samples."""


def build() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    data = lab.data.load("digits")
    model = lab.models.build("mlp", input_shape=(1, 8, 8), num_classes=10, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    generator = torch.Generator().manual_seed(0)
    return model, optimizer, DataLoader(data.train, batch_size=32, shuffle=True, generator=generator), data.valid


def plain_loop(epochs: int = 8) -> tuple[nn.Module, float, None]:
    model, optimizer, loader, valid = build()
    for _ in range(epochs):
        model.train()
        for batch in loader:
            inputs, targets = batch
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model, accuracy(model, valid), None


def freezing_loop(epochs: int = 8) -> tuple[nn.Module, float, LoopFreezer]:
    model, optimizer, loader, valid = build()
    freezer = LoopFreezer(model, optimizer, example=loader, freeze=RULE)
    for _ in range(epochs):
        model.train()
        for batch in loader:
            inputs, targets = batch
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            freezer.after_step(batch, loss)
    return model, accuracy(model, valid), freezer


def accuracy(model: nn.Module, valid: Any) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(valid.inputs).argmax(1) == valid.targets).float().mean())


def statements(function: Any) -> list[str]:
    tree = ast.parse(inspect.getsource(function))
    tree.body[0].name, tree.body[0].returns = "loop", None  # type: ignore[attr-defined]
    return ast.unparse(tree).splitlines()


def test_the_same_loop_with_two_lines_in_it_freezes_saves_and_is_as_good() -> None:
    added = [line for line in statements(freezing_loop) if line not in statements(plain_loop)]
    assert len(added) == 3  # the third is the return that hands the freezer out, to look at it
    _, expected, _ = plain_loop()
    model, reached, freezer = freezing_loop()
    assert reached >= expected - MARGIN
    frozen = freezer.events.of(LayerFrozen)
    assert frozen, "nothing froze"
    assert freezer.recorder.book.flops_saved_fraction > 0.05
    assert freezer.savings().to_dict()["steps"] == 8 * 45
    assert len(freezer.history.plasticity) > 20
    freezer.close()
    assert all(p.requires_grad for p in model.parameters())
    assert not model._forward_pre_hooks


def test_frozen_weights_stay_as_they_are_to_the_bit_and_come_back_on_thaw() -> None:
    model, optimizer, loader, _ = build()
    batch = next(iter(loader))
    freezer = LoopFreezer(model, optimizer, example=batch, freeze=None)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            freezer.after_step(batch, loss)

    train(3)
    front = model.get_submodule("layers.0")
    assert freezer.freeze("layers.0").state == "done"
    assert freezer.freeze("layers.0").state == "rejected"
    before = [p.detach().clone() for p in front.parameters()]
    train(5)
    assert all(torch.equal(a, b) for a, b in zip(before, front.parameters(), strict=True))
    assert freezer.frozen == ("layers.0",)
    freezer.thaw("layers.0")
    train(1)
    assert not torch.equal(before[0], next(front.parameters()))
    assert [type(e) for e in freezer.events.of(LayerFrozen, LayerThawed)] == [LayerFrozen, LayerThawed]
    freezer.pin("layers.1")
    assert freezer.layers["layers.1"].state == "pinned"
    freezer.unpin("layers.1")


def test_watching_changes_nothing_before_something_freezes() -> None:
    losses = []
    for watched in (False, True):
        model, optimizer, loader, _ = build()
        watch = LoopFreezer(model, optimizer, example=loader,
                            freeze=lab.Plasticity(interval_steps=2, tolerance=1e-9)) if watched else None  # fmt: skip
        trace = []
        for batch in loader:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss.item())
            if watch is not None:
                watch.after_step(batch, loss)
        losses.append(trace)
    assert losses[0] == losses[1]


def test_saved_and_taken_up_in_a_fresh_loop_to_the_bit() -> None:
    def begin() -> tuple[nn.Module, torch.optim.Optimizer, LoopFreezer]:
        model, optimizer, loader, _ = build()
        return (
            model,
            optimizer,
            LoopFreezer(model, optimizer, example=loader, freeze=RULE),
        )

    batches = list(build()[2])

    def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, freezer: LoopFreezer, steps: range) -> list[float]:
        trace = []
        for number in steps:
            batch = batches[number % len(batches)]
            loss = F.cross_entropy(model(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            freezer.after_step(batch, loss)
            trace.append(loss.item())
        return trace

    model, optimizer, freezer = begin()
    go_on(model, optimizer, freezer, range(10))
    freezer.freeze("layers.0")
    go_on(model, optimizer, freezer, range(10, 60))

    file = io.BytesIO()
    saved = {"model": model.state_dict(), "optimizer": freezer.whole_optimizer_state(), "freezer": freezer.state_dict()}
    assert [len(g["params"]) for g in saved["optimizer"]["param_groups"]] == [len(list(model.parameters()))]
    torch.save(saved, file)
    expected = go_on(model, optimizer, freezer, range(60, 120))

    file.seek(0)
    read = torch.load(file, weights_only=True)
    model2, optimizer2, freezer2 = begin()
    model2.load_state_dict(read["model"])
    optimizer2.load_state_dict(read["optimizer"])
    freezer2.load_state_dict(read["freezer"])
    assert "layers.0" in freezer2.frozen
    assert go_on(model2, optimizer2, freezer2, range(60, 120)) == expected
    assert [e.to_dict() for e in freezer.events] == [e.to_dict() for e in freezer2.events]
    freezer.thaw("layers.0"), freezer2.thaw("layers.0")  # with its momentum
    assert go_on(model, optimizer, freezer, range(5)) == go_on(model2, optimizer2, freezer2, range(5))


class Numbered(Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return (*self.data[index], index)


def test_a_sieve_in_a_loop_of_ones_own() -> None:
    model, optimizer, loader, _ = build()
    numbered = Numbered(loader.dataset)
    freezer = LoopFreezer(
        model, optimizer, example=loader, freeze=None, total_steps=200, batch_size=32,
        sieve=lab.CirculantSieve(fraction=0.25, interval_epochs=1), dataset=loader.dataset,
    )  # fmt: skip
    sampler = freezer.sampler
    sieved = DataLoader(numbered, batch_size=32, sampler=sampler)
    seen: list[set[int]] = []
    for _ in range(3):
        seen.append(set())
        for inputs, targets, ids in sieved:
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            freezer.after_step((inputs, targets), loss, ids=ids, outputs=outputs, targets=targets)
            seen[-1] |= set(ids.tolist())
        freezer.after_epoch()
    assert len(seen[0]) == len(seen[1]) == round(0.75 * len(numbered))
    assert seen[0] != seen[1]
    assert len(freezer.events.of(SamplesSieved)) >= 3
    assert len(freezer.events.of(EpochFinished)) == 3
    with pytest.raises(lab.InvalidSettingError, match=r"give after_step\(…, ids=…\)"):
        freezer.after_step((inputs, targets), loss)


@pytest.mark.parametrize(
    "freeze", [lab.GradientNorm(interval_steps=5, percentile=90.0), lab.Schedule(saving=0.2, block_lr="global")]
)
def test_the_other_rules_work_too(freeze: Any) -> None:
    model, optimizer, loader, _ = build()
    freezer = LoopFreezer(model, optimizer, example=loader, freeze=freeze, total_steps=90, steps_per_epoch=45)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            freezer.after_step(batch, loss)
    assert freezer.events.of(LayerFrozen)
    assert freezer.epoch == 2.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"freeze": lab.Schedule(saving=0.2, block_lr="global")}, "give total_steps="),
        ({"freeze": lab.Schedule(saving=0.2), "total_steps": 10}, "choose Schedule\\(…, block_lr='global'\\)"),
        ({"sieve": lab.RandomSieve(fraction=0.2, interval_epochs=1)}, "a sieve needs dataset="),
        ({"total_steps": 0}, "LoopFreezer.total_steps must be a whole number >= 1"),
        ({"steps_per_epoch": 1.5}, "LoopFreezer.steps_per_epoch must be a whole number >= 1"),
        ({"example": (torch.zeros(2, 1, 8, 8), torch.zeros(2))}, "Plasticity begins after the first pass"),
        ({"optimizer": 3}, "must be a torch Optimizer or a list of them"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(options: dict[str, Any], words: str) -> None:
    model, optimizer, loader, _ = build()
    optimizer = options.pop("optimizer", optimizer)
    with pytest.raises(lab.InvalidSettingError, match=words):
        LoopFreezer(model, optimizer, **{"example": loader, **options})


def test_iterable_data_and_dict_batches_are_fine() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2].parameters())]

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("it may not be read")

    with pytest.raises(lab.DataError, match="an iterable data set has no first samples"):
        LoopFreezer(model, None, example=DataLoader(Stream()), freeze=None)
    stream = ({"x": torch.randn(8, 4), "y": torch.randint(0, 2, (8,))} for _ in range(20))
    freezer = LoopFreezer(
        model, optimizers, example=next(stream), freeze=None, forward=lambda m, b: (m(b["x"]), b["y"])
    )  # fmt: skip
    for number, batch in enumerate(stream):
        if number == 5:
            freezer.freeze("0")
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        freezer.after_step(batch, loss)
    assert freezer.recorder.book.flops_saved_fraction > 0
    states = freezer.whole_optimizer_states()
    assert [len(state["param_groups"][0]["params"]) for state in states] == [2, 2]
    with pytest.raises(lab.DataError, match="a batch must hold a tensor"):
        batch_rows(["text"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def test_after_close_everything_can_be_read_and_nothing_changed() -> None:
    model, optimizer, loader, _ = build()
    freezer = LoopFreezer(model, optimizer, example=loader)  # the default rule, whose readings a worker makes
    batch = next(iter(loader))
    freezer.after_step(batch, step(model, optimizer, batch))
    freezer.freeze("layers.0")
    before = freezer.state_dict()
    freezer.close()
    freezer.close()
    assert freezer.closed
    told = [put_back(state)["parts"] for state in (freezer.state_dict(), before)]
    assert told[0]["freezer"] == told[1]["freezer"]
    assert told[0]["board"] == told[1]["board"]
    count = len(freezer.events)
    changes: list[tuple[str, tuple[Any, ...]]] = [
        ("freeze", ("layers.0",)), ("thaw", ("layers.0",)), ("pin", ("layers.0",)), ("unpin", ("layers.0",)),
        ("override", ("freeze.tolerance", 0.3)), ("after_step", (batch, 0.5)), ("after_epoch", ()),
        ("load_state_dict", (before,)),
    ]  # fmt: skip
    for name, given in changes:
        with pytest.raises(lab.InvalidSettingError, match=rf"^{name}\(\): this LoopFreezer is closed"):
            getattr(freezer, name)(*given)
    assert all(p.requires_grad for p in model.parameters())
    assert (len(freezer.events), freezer.steps_done, freezer.frozen) == (count, 1, ())
    with LoopAgain(model, optimizer, loader) as again:
        again.load_state_dict(freezer.state_dict())
        assert again.frozen == ("layers.0",)


class LoopAgain(LoopFreezer):
    """One that is closed at the end of a block, so that a failing test leaves no worker."""

    def __init__(self, model: nn.Module, optimizer: Any, loader: Any) -> None:
        super().__init__(model, optimizer, example=loader)

    def __enter__(self) -> LoopAgain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_a_state_that_could_not_be_read_at_close_says_so_and_closing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, loader, _ = build()
    freezer = LoopFreezer(model, optimizer, example=loader, freeze=None)
    freezer.freeze("layers.0")

    def fails() -> None:
        raise RuntimeError("the disk is gone.")

    monkeypatch.setattr(freezer.history, "state_dict", fails)
    freezer.close()
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(
        lab.CheckpointError, match=r"when this LoopFreezer was closed: the disk is gone\. Save it before"
    ):
        freezer.state_dict()


def test_two_on_one_model_are_refused_while_the_first_is_open() -> None:
    model, optimizer, loader, _ = build()
    first = LoopFreezer(model, optimizer, example=loader, freeze=None)
    with pytest.raises(lab.InvalidSettingError, match=r"another LoopFreezer freezes layers of this \w+: close\(\)"):
        LoopFreezer(model, optimizer, example=loader, freeze=None)
    first.close()
    second = LoopFreezer(model, optimizer, example=loader, freeze=None)
    first.close()  # does not let go of what the second holds
    with pytest.raises(lab.InvalidSettingError, match="another LoopFreezer"):
        LoopFreezer(model, optimizer, example=loader, freeze=None)
    del second  # dropped without close
    LoopFreezer(model, optimizer, example=loader, freeze=None).close()


def test_what_is_no_model_no_optimizer_of_it_and_no_data_is_refused() -> None:
    model, optimizer, loader, _ = build()
    _, others, _, _ = build()
    with pytest.raises(lab.InvalidSettingError, match=r"LoopFreezer\.model must be a torch Module, got 'mlp'"):
        LoopFreezer("mlp", None, example=loader)  # type: ignore[arg-type]
    with pytest.raises(lab.InvalidSettingError, match="holds no parameter of the model"):
        LoopFreezer(model, others, example=loader)
    empty = torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long)
    with pytest.raises(lab.DataError, match="a batch must hold at least one sample, got one of 0 rows"):
        LoopFreezer(model, optimizer, example=empty, steps_per_epoch=3)
    nothing = DataLoader(torch.utils.data.TensorDataset(*empty), batch_size=4)
    with pytest.raises(lab.DataError, match="the data set of example=loader is empty"):
        LoopFreezer(model, optimizer, example=nothing, steps_per_epoch=3)
    assert not model._forward_pre_hooks


def test_a_step_that_cannot_be_counted_is_refused_and_changes_nothing() -> None:
    model, optimizer, loader, _ = build()
    freezer = LoopFreezer(model, optimizer, example=loader, freeze=None)
    batch = next(iter(loader))
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((batch, "x"), {}, r"loss must be one number, or a tensor with one; got 'x'"),
        ((batch, torch.zeros(3)), {}, r"loss must be one number.* got a tensor of shape \(3,\)"),
        ((batch, 0.5), {"accuracy": "x"}, "accuracy must be one number"),
        ((batch, 0.5), {"ids": torch.arange(32)}, "ids= is looked at by a sieve only"),
        (((batch[0][:0], batch[1][:0]), 0.5), {}, "got one of 0 rows"),
    ]
    for given, named, words in wrong:
        with pytest.raises((lab.InvalidSettingError, lab.DataError), match=words):
            freezer.after_step(*given, **named)
    for given in (("x",), (0.5, "x")):
        with pytest.raises(lab.InvalidSettingError, match=r"after_epoch\(…\): valid_\w+ must be one number"):
            freezer.after_epoch(*given)
    assert (freezer.steps_done, len(freezer.history.steps), len(freezer.events)) == (0, 0, 0)
    freezer.close()


def test_a_loss_that_is_no_number_is_told_once_in_a_row() -> None:
    model, optimizer, loader, _ = build()
    freezer = LoopFreezer(model, optimizer, example=loader, freeze=None)
    batch = next(iter(loader))
    for loss in (0.5, float("nan"), torch.tensor(float("inf")), 0.5, None, float("nan")):
        freezer.after_step(batch, loss)
    told = freezer.events.of(Notice)
    assert [event.step for event in told] == [2, 6]
    assert told[0].sentence().startswith("The loss of step 2 is nan.")
    freezer.close()
