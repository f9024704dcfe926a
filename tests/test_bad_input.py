"""Bad input gives one clear sentence: what was given, what is allowed, what to do; the session stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import egeria_lab as lab
from egeria_lab.errors import (
    DataError,
    EgeriaLabError,
    InvalidSettingError,
    LayerError,
    UnknownNameError,
)

Make = Callable[..., lab.Session]


def pairs(rows: int = 40, features: int = 6, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(rows, features, generator=generator), torch.randint(0, classes, (rows,), generator=generator)
    )


def net(features: int = 6, classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, classes))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from pairs()


class NoLength(torch.utils.data.Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return pairs()[index]


class Empty:
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


BAD: dict[str, tuple[dict[str, Any], type[EgeriaLabError], str]] = {
    "model": ({"model": "resnet9"}, UnknownNameError, "Unknown model 'resnet9'. Did you mean 'resnet8'? Known: mlp,"),
    "model kind": ({"model": 5}, InvalidSettingError, "model must be a torch.nn.Module or a name (mlp, "),
    "model class": ({"model": nn.Linear}, InvalidSettingError, "model must be a torch.nn.Module or a name"),
    "frozen model": ({"model": net().requires_grad_(False)}, LayerError, "no weights that require a gradient"),
    "model without weights": ({"model": nn.Sequential(nn.ReLU())}, EgeriaLabError, "no weights"),
    "model by name, bare data": (
        {"model": "mlp", "data": (pairs(), pairs())},
        InvalidSettingError,
        "needs to know the shape and classes",
    ),
    "data": (
        {"data": "fashoin-mini"},
        UnknownNameError,
        "Unknown data set 'fashoin-mini'. Did you mean 'fashion-mini'?",
    ),
    "data kind": ({"data": 5}, DataError, "data must be a name, a lab.Data, or a pair (train, valid)"),
    "data triple": ({"data": (pairs(), pairs(), pairs())}, DataError, "data must be a name, a lab.Data, or a pair"),
    "data not a pair": ({"data": pairs()}, DataError, "data must be a name, a lab.Data, or a pair"),
    "empty": ({"data": (Empty(), pairs())}, DataError, "is empty; give at least one sample"),
    "empty validation": ({"data": (pairs(), Empty())}, DataError, "is empty; give at least one sample"),
    "empty loader": ({"data": (DataLoader(Empty(), 8), pairs())}, DataError, "is empty; give at least one sample"),  # type: ignore[arg-type]
    "stream": (
        {"data": (Stream(), pairs())},
        InvalidSettingError,
        "a stream that does not tell its length; give steps=",
    ),
    "stream loader": ({"data": (DataLoader(Stream(), 8), pairs())}, InvalidSettingError, "a stream that does not tell"),
    "iterator": ({"data": (iter(pairs()), pairs()), "epochs": None, "steps": 3}, DataError, "can be read only once"),
    "no length": ({"data": (NoLength(), pairs())}, DataError, "map-style (with __len__ and __getitem__)"),
    "ready batches": ({"data": (DataLoader(pairs(), batch_size=None), pairs())}, DataError, "batch_size=None"),
    "no full batch": (
        {"data": (DataLoader(pairs(5), batch_size=5, sampler=[], drop_last=True), pairs())},
        DataError,
        "yields no batch",
    ),
    "batch size": ({"batch_size": 41}, DataError, "batch_size=41 is larger than the training set (40 samples)"),
    "loader batch size": (
        {"data": (DataLoader(pairs(5), batch_size=8), pairs())},
        DataError,
        "batch_size=8 is larger than the training set (5",
    ),
    "batch size zero": (
        {"batch_size": 0},
        InvalidSettingError,
        "Session.batch_size must be a whole number >= 1, got 0",
    ),
    "batch size fraction": (
        {"batch_size": 2.5},
        InvalidSettingError,
        "batch_size must be a whole number >= 1, got 2.5",
    ),
    "epochs": ({"epochs": 0}, InvalidSettingError, "Session.epochs must be a number > 0 or None, got 0"),
    "epochs nan": (
        {"epochs": float("nan")},
        InvalidSettingError,
        "Session.epochs must be a number > 0 or None, got nan",
    ),
    "seed": ({"seed": 1.5}, InvalidSettingError, "Session.seed must be a whole number, got 1.5"),
    "rate": ({"lr": 0}, InvalidSettingError, "lr must be a finite number > 0 or None, got 0"),
    "rate text": ({"lr": "fast"}, InvalidSettingError, "lr must be a finite number > 0 or None, got 'fast'"),
    "optimizer": ({"optimizer": "adm"}, UnknownNameError, "Unknown optimizer 'adm'. Did you mean 'adam'? Known: sgd,"),
    "optimizer kind": ({"optimizer": 5}, InvalidSettingError, "optimizer must be a name (sgd, adam, adamw), a torch"),
    "optimizer result": ({"optimizer": lambda p: None}, InvalidSettingError, "optimizer must be a name"),
    "foreign optimizer": (
        {"optimizer": SGD(net().parameters(), lr=0.1)},
        InvalidSettingError,
        "holds no parameter of the model",
    ),
    "scheduler": ({"scheduler": "cosin"}, UnknownNameError, "Unknown scheduler 'cosin'. Did you mean 'cosine'?"),
    "scheduler kind": (
        {"scheduler": 5},
        InvalidSettingError,
        "scheduler must be a name (cosine, step, linear, constant)",
    ),
    "scheduler result": ({"scheduler": lambda o: None}, InvalidSettingError, "scheduler must be a name"),
    "scheduler every": ({"scheduler_every": "minute"}, UnknownNameError, "Unknown scheduler_every 'minute'"),
    "freeze": ({"freeze": "egeria"}, InvalidSettingError, "Session.freeze must be"),
    "freeze class": ({"freeze": lab.Plasticity}, InvalidSettingError, "Session.freeze must be"),
    "layer": ({"layers": ["zero"]}, UnknownNameError, "Unknown submodule 'zero'"),
    "layer order": ({"layers": ["2", "0"]}, LayerError, "front to back"),
    "device": ({"device": "gpu"}, InvalidSettingError, "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
    "precision": ({"precision": "fp8"}, UnknownNameError, "Unknown precision 'fp8'"),
    "clip": ({"max_grad_norm": -1}, InvalidSettingError, "max_grad_norm must be > 0 or None, got -1"),
    "clip text": ({"max_grad_norm": "1"}, InvalidSettingError, "max_grad_norm must be > 0 or None, got '1'"),
    "park": ({"park_state": "disk"}, InvalidSettingError, "park_state must be one of keep, cpu, drop, got 'disk'"),
    "loss": ({"loss": "mse"}, InvalidSettingError, "loss must be"),
    "forward": ({"forward": 5}, InvalidSettingError, "forward must be"),
    "features": ({"model": net(features=5)}, DataError, "the model cannot take the data"),
}


@pytest.mark.parametrize("case", BAD)
def test_one_sentence_before_anything_is_trained(case: str) -> None:
    options, kind, sentence = BAD[case]
    settings = {"model": net(), "data": (pairs(), pairs()), "batch_size": 8, **options}
    with pytest.raises(kind) as caught:
        lab.Session(settings.pop("model"), settings.pop("data"), **settings)
    message = str(caught.value)
    assert sentence in message, message
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(InvalidSettingError, match=r"torch finds no GPU; use 'auto' or 'cpu'"):
        lab.Session(net(), (pairs(), pairs()), batch_size=8, device="cuda")


def test_steps_are_checked(make_session: Make) -> None:
    session = make_session()
    for n in (0, -1, 1.5, "3", None):
        with pytest.raises(InvalidSettingError, match=r"Session.step.n must be a whole number >= 1"):
            session.step(n)  # type: ignore[arg-type]
    for epochs in (0, -1, float("inf"), float("nan"), "1"):
        with pytest.raises(InvalidSettingError, match=r"Session.extend.epochs must be a number > 0"):
            session.extend(epochs)  # type: ignore[arg-type]
    assert session.steps_done == 0
    assert len(session.events) == 0
    session.step()


def test_a_label_out_of_range_names_the_sample_and_the_session_goes_on(make_session: Make) -> None:
    data = pairs()
    data.tensors[1][17] = 3
    data.tensors[1][18] = -1
    session = make_session(model=net(), data=(data, pairs()))
    with pytest.raises(DataError) as caught:
        session.step(5)
    message = str(caught.value)
    assert message.startswith(("sample 17 has label 3, but the model has 3 outputs", "sample 18 has label -1"))
    assert "labels 0 … 2" in message
    done = session.steps_done
    assert len(session.history["steps"]) == done
    data.tensors[1][17:19] = 0  # the fix that the sentence asks for
    session.step(10)
    assert session.steps_done == done + 10


def test_a_label_out_of_range_in_the_validation_set(make_session: Make) -> None:
    data = pairs()
    data.tensors[1][4] = 9
    session = make_session(model=net(), data=(pairs(), data))
    with pytest.raises(DataError, match=r"sample 4 has label 9"):
        session.evaluate()
    session.step(2)


def test_a_label_out_of_range_in_named_data() -> None:
    rows = lab.ArrayDataset(torch.zeros(8, 6), torch.tensor([0, 1, 2, 3] * 2))
    with pytest.raises(DataError, match=r"label 3 of train sample 3 is out of range"):
        lab.Data(name="mine", train=rows, valid=rows, num_classes=3, input_shape=(6,))


def test_ignored_labels_are_allowed(make_session: Make) -> None:
    data = pairs()
    data.tensors[1][3] = -100
    session = make_session(model=net(), data=(data, pairs()))
    session.step(5)


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        (lambda x: x[:, 0], "class scores"),
        (lambda x: (x, x), "cross-entropy needs tensors of class scores and labels, got tuple and Tensor"),
        (lambda x: {"logits": x}, "cross-entropy needs tensors of class scores and labels, got dict and Tensor"),
        (lambda x: x[:-1], "outputs for 7 samples and labels for 8"),
    ],
)
def test_outputs_that_are_no_class_scores(make_session: Make, outputs: Callable[[Tensor], Any], sentence: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: Tensor) -> Any:
            return outputs(self.body(x))

    session = make_session(model=Odd(), data=(pairs(), pairs()))
    with pytest.raises(DataError) as caught:
        session.step()
    assert sentence in str(caught.value)
    assert session.steps_done == 0


def test_a_batch_that_is_no_pair(make_session: Make) -> None:
    triples = TensorDataset(torch.randn(40, 6), torch.zeros(40).long(), torch.zeros(40))
    with pytest.raises(DataError, match=r"a batch must be a pair \(inputs, targets\), got .* of 3.*give forward="):
        make_session(model=net(), data=(triples, triples))


def test_a_batch_of_another_shape_mid_run(make_session: Make) -> None:
    """One sample has another number of features; after the fix training goes on."""

    class Rows:
        fixed = False

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            x, y = pairs()[index]
            return (x if self.fixed or index < 20 else x[:5]), y

    rows = Rows()
    session = make_session(model=net(), data=(rows, pairs()))
    with pytest.raises((RuntimeError, DataError)):
        session.step(5)
    done = session.steps_done
    assert len(session.history["steps"]) == done
    rows.fixed = True
    session.step(5)
    assert session.steps_done == done + 5


def test_a_wrong_shape_given_to_evaluate_changes_nothing(make_session: Make) -> None:
    session, plain = make_session(), make_session()
    session.step(3)
    wrong = pairs(features=5)
    with pytest.raises((RuntimeError, DataError)):
        session.evaluate(wrong)
    for empty in (Empty(), iter(pairs()), 5):
        with pytest.raises(DataError):
            session.evaluate(empty)
    assert session.model.training
    session.step(3)
    plain.step(6)
    assert session.history["steps"]["loss"].tolist() == plain.history["steps"]["loss"].tolist()


def test_a_loss_that_returns_no_tensor(make_session: Make) -> None:
    session = make_session(loss=lambda o, t: 1.0)
    with pytest.raises(InvalidSettingError, match=r"loss must return a tensor, got float"):
        session.step()


def test_a_loss_without_a_gradient(make_session: Make) -> None:
    session = make_session(loss=lambda o, t: o.detach().mean())
    with pytest.raises((RuntimeError, EgeriaLabError)):
        session.step()
    assert session.steps_done == 0


def test_unknown_history_table(make_session: Make) -> None:
    session = make_session()
    with pytest.raises(UnknownNameError, match=r"Unknown history table 'step'. Did you mean 'steps'"):
        session.history.frame("step")


def test_unknown_distance() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown distance 'spp'. Did you mean 'sp'"):
        lab.Plasticity(distance="spp")


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_tiny_data_sets(make_session: Make, rows: int) -> None:
    """One sample a step is a batch; batch norm then says so itself."""
    session = make_session(
        model=net(), data=(pairs(rows), pairs(1)), batch_size=1, freeze=lab.Plasticity(interval_steps=1)
    )
    assert session.steps_per_epoch == rows
    session.step(2 * rows)
    assert session.evaluate()["loss"] is not None
