"""One step and one evaluation, alone: losses, accuracy, modes, precision, draws."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egeria_lab.data.datasets import ArrayDataset
from egeria_lab.data.loaders import Batch, BatchSource
from egeria_lab.engine.devices import choose_device
from egeria_lab.engine.losses import accuracy_of, check_labels, cross_entropy
from egeria_lab.engine.trainer import Trainer
from egeria_lab.errors import DataError, InvalidSettingError, TrainingError

CPU = torch.device("cpu")


def batch(rows: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 6, generator=generator)
    return Batch(torch.arange(100, 100 + rows), (inputs, torch.randint(0, 3, (rows,), generator=generator)))


def trainer(model: nn.Module, **options: Any) -> Trainer:
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Trainer(model, optimizer, **{"loss": None, "forward": None, "device": CPU, **options})


def test_a_step_by_hand(tiny_model: Callable[..., nn.Module]) -> None:
    model, twin = tiny_model(), tiny_model()
    result = trainer(model).step(batch(), 1, nullcontext())
    inputs, targets = batch().content
    loss = F.cross_entropy(twin(inputs), targets, reduction="none").mean()
    loss.backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=-0.1)
    assert result.loss == loss.item()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert result.seconds > 0


def test_dropout_is_decided_by_seed_and_step_alone(tiny_model: Callable[..., nn.Module]) -> None:
    def loss(seed: int, number: int) -> float:
        torch.randn(int(torch.randint(1, 9, ())))
        return trainer(tiny_model(0.5), seed=seed).step(batch(), number, nullcontext()).loss

    assert loss(0, 1) == loss(0, 1)
    assert loss(0, 1) != loss(0, 2)
    assert loss(0, 1) != loss(1, 1)


def test_evaluation_is_weighted_by_samples_and_leaves_no_trace(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model(0.5)
    model.second[3].eval()  # type: ignore[index]
    modes = [m.training for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    data = ArrayDataset(torch.randn(10, 6, generator=generator), torch.randint(0, 3, (10,), generator=generator))
    source = BatchSource(data, 4, seed=0, shuffle=False, role="validation")
    loss, accuracy = trainer(model).evaluate(source)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    model.eval()
    with torch.no_grad():
        outputs = model(data.inputs)
    assert loss == pytest.approx(float(F.cross_entropy(outputs, data.targets)), rel=1e-6)
    assert accuracy == pytest.approx(float((outputs.argmax(1) == data.targets).float().mean()))
    assert torch.is_grad_enabled()


def test_a_loss_that_is_not_finite_is_not_applied(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    made = trainer(model, loss=lambda o, t: F.cross_entropy(o, t) * float("nan"))
    with pytest.raises(
        TrainingError, match=r"the loss is nan at step 7 \(learning rate 0.1\). The step was not applied."
    ):
        made.step(batch(), 7, nullcontext())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert made.optimizer.state == {}


def test_inputs_that_are_not_finite_do_not_reach_the_running_statistics(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model()
    bad = batch()
    bad.content[0][3] = float("inf")
    with pytest.raises(TrainingError):
        trainer(model).step(bad, 1, nullcontext())
    assert all(bool(buffer.isfinite().all()) for buffer in model.buffers())
    assert int(model.first[1].num_batches_tracked) == 0  # type: ignore[index,union-attr,arg-type]


def test_bf16_autocast_trains_float32_weights(tiny_model: Callable[..., nn.Module]) -> None:
    model, plain = tiny_model(), tiny_model()
    result = trainer(model, precision="bf16").step(batch(), 1, nullcontext())
    expected = trainer(plain).step(batch(), 1, nullcontext())
    assert result.loss == pytest.approx(expected.loss, rel=0.05)
    assert result.loss != expected.loss
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_accuracy_by_hand() -> None:
    scores = torch.tensor([[3.0, 1.0], [0.0, 2.0], [5.0, 4.0]])
    assert accuracy_of(scores, torch.tensor([0, 1, 1])) == pytest.approx(2 / 3)
    assert accuracy_of(scores, torch.tensor([0, -100, 1])) == pytest.approx(1 / 2)
    assert accuracy_of(scores, torch.rand(3, 2)) is None
    assert accuracy_of({"a": scores}, torch.tensor([0])) is None
    tokens = torch.zeros(2, 3, 4)
    tokens[..., 1] = 1  # (samples, positions, classes): class 1 everywhere
    assert accuracy_of(tokens, torch.tensor([[1, 1, 0], [1, 0, 1]])) == pytest.approx(4 / 6)
    assert accuracy_of(tokens.transpose(1, 2), torch.tensor([[1, 1, 0], [1, 0, 1]])) == pytest.approx(4 / 6)


def test_cross_entropy_by_hand() -> None:
    scores = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    losses = cross_entropy(scores, torch.tensor([1, 0]))
    assert losses.tolist() == pytest.approx([0.6931472, 0.1269280], rel=1e-6)
    tokens = torch.zeros(2, 5, 4)
    assert cross_entropy(tokens, torch.zeros(2, 5, dtype=torch.int64)).tolist() == pytest.approx([1.3862944] * 2)


def test_labels_are_checked_before_they_reach_the_kernel() -> None:
    scores = torch.zeros(3, 4)
    ids = Batch(torch.tensor([7, 8, 9]), None)
    check_labels(scores, torch.tensor([0, 3, -100]), ids)
    with pytest.raises(DataError, match=r"sample 8 has label 4, but the model has 4 outputs \(labels 0 … 3\)"):
        check_labels(scores, torch.tensor([0, 4, 1]), ids)
    with pytest.raises(DataError, match=r"sample 9 has label -1"):
        check_labels(scores, torch.tensor([0, 3, -1]), ids)
    with pytest.raises(DataError, match=r"sample 8 has label 6"):
        check_labels(torch.zeros(3, 5, 4), torch.tensor([[0] * 5, [0, 0, 6, 0, 0], [0] * 5]), ids)
    check_labels(scores, torch.rand(3, 4), ids)  # class probabilities


def test_devices() -> None:
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type in ("cpu", "cuda")
    assert choose_device(CPU) == CPU
    for bad in ("gpu", "cpu:x", 3.5):
        with pytest.raises(InvalidSettingError, match=r"device must be 'auto', 'cpu'"):
            choose_device(bad)  # type: ignore[arg-type]


def test_private_draws_give_the_generators_back_after_an_error(tiny_model: Callable[..., nn.Module]) -> None:
    made, state = trainer(tiny_model()), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), made.private_draws("test", 1):  # noqa: PT012
        a: Tensor = torch.rand(3)
        _ = 1 / 0
    assert torch.equal(torch.get_rng_state(), state)
    with made.private_draws("test", 1):
        assert torch.equal(torch.rand(3), a)
    with made.private_draws("test", 2):
        assert not torch.equal(torch.rand(3), a)
