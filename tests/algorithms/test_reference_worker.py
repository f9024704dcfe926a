"""Readings off the training thread: the same numbers however slow the worker is, and training unmoved."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from egeria_lab import models
from egeria_lab.algorithms.background import Workbench
from egeria_lab.algorithms.distances import distance, sp_distance
from egeria_lab.algorithms.layers import layers
from egeria_lab.algorithms.reference import Reference
from egeria_lab.algorithms.reference_worker import ReferenceWorker
from egeria_lab.errors import InvalidSettingError, LayerError, UnknownNameError


def call(model: nn.Module, content: Any) -> object:
    return model(content)


def rows(count: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(count, 1, 12, 12, generator=torch.Generator().manual_seed(seed))


def network() -> nn.Module:
    return models.build("resnet8", input_shape=(1, 12, 12), num_classes=4)


def worker_of(model: nn.Module, forward: Callable[[nn.Module, Any], object] = call, **options: Any) -> ReferenceWorker:
    return ReferenceWorker(model, layers(model, rows(2)), forward, **options)


def trained(model: nn.Module, watch: Callable[[int], None] = lambda step: None) -> list[float]:
    """Eight steps with dropout drawn from the global generator; returns the losses."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    targets = torch.arange(16) % 4
    losses = []
    for step in range(8):
        watch(step)
        loss = cross_entropy(nn.functional.dropout(model(rows(seed=step)), 0.1), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def watched(engine: str = "int8", **options: Any) -> tuple[list[float], list[tuple[dict[str, float], int]]]:
    """Train with readings that are collected one evaluation later, and a refresh half-way."""
    model = network()
    worker = worker_of(model, engine=engine, **options)
    names = [row[0] for row in worker.describe()]
    readings: list[tuple[dict[str, float], int]] = []

    def watch(step: int) -> None:
        found = worker.collect(timeout=60)
        if found is not None:
            readings.append(found[:2])
        if step in (0, 4):
            worker.snapshot(rows())
        assert worker.submit(rows(), names[: 1 + step % len(names)])

    losses = trained(model, watch)
    found = worker.collect(timeout=60)
    assert found is not None
    assert worker.collect() is None
    worker.close()
    return losses, [*readings, found[:2]]


def test_a_slow_worker_changes_no_number_and_training_notices_neither() -> None:
    plain = trained(network())
    losses, readings = watched()
    slow_losses, slow_readings = watched(delay_seconds=0.05)
    assert readings == slow_readings  # bit for bit
    assert losses == slow_losses == plain
    assert [generation for _, generation in readings] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert [len(values) for values, _ in readings] == [1, 2, 3, 4, 5, 1, 2, 3]
    assert all(value > 0 for values, _ in readings for value in values.values())


def test_the_callers_side_gives_the_same_distances() -> None:
    """What a GPU does; on the CPU only the number of threads may tell them apart."""
    _, readings = watched()
    losses, by_caller = watched(current_on="caller")
    assert losses == trained(network())
    for (values, generation), (others, other) in zip(readings, by_caller, strict=True):
        assert generation == other
        assert others == pytest.approx(values, rel=1e-3)


@pytest.mark.parametrize("name", ["sp", "cka", "cosine", "relative_l2"])
def test_in_float32_it_reads_what_the_synchronous_reference_reads(name: str) -> None:
    model = network()
    worker = worker_of(model, engine="fp32", distance=name)
    outputs = {layer.name: layer.output for layer in layers(model, rows(2))}
    plain = Reference(model, outputs, call)
    worker.snapshot(rows())
    plain.refresh()
    trained(model)
    worker.submit(rows(), list(outputs))
    found = worker.collect(timeout=60)
    worker.close()
    before, now = plain.activations(rows()), plain.current(rows())
    expected = {layer: float(distance(name)(now[layer], before[layer])) for layer in outputs}
    assert found is not None
    assert found[0] == pytest.approx(expected, rel=1e-3)


def test_right_after_a_snapshot_only_rounding_to_int8_is_left() -> None:
    model = network()
    trained(model)
    worker = worker_of(model, engine="int8")
    worker.snapshot(rows())
    names = [row[0] for row in worker.describe()]
    worker.submit(rows(), names)
    fresh = worker.collect(timeout=60)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    worker.submit(rows(), names)
    moved = worker.collect(timeout=60)
    worker.close()
    assert fresh is not None
    assert moved is not None
    assert all(0 < fresh[0][name] < moved[0][name] / 5 for name in names)


def test_what_was_submitted_is_a_copy() -> None:
    model, content = network(), rows()
    worker = worker_of(model, engine="fp32", delay_seconds=0.05)
    names = [row[0] for row in worker.describe()]
    worker.snapshot(content)
    worker.submit({"x": content}["x"], names)
    content.fill_(9.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.0)
    found = worker.collect(timeout=60)
    worker.close()
    assert found is not None
    assert set(found[0].values()) == {0.0}


def test_nested_batches_go_through_forward() -> None:
    model = network()
    worker = worker_of(model, lambda m, batch: m(batch["inputs"][0]), engine="fp32")
    batch = {"inputs": (rows(), "kept as it is"), "labels": torch.zeros(16)}
    worker.snapshot(batch)
    worker.submit(batch, ["layers.0"])
    found = worker.collect(timeout=60)
    worker.close()
    assert found is not None
    assert found[0] == {"layers.0": 0.0}


def test_the_load_gate_skips_at_submission() -> None:
    busy = True
    model = network()
    worker = worker_of(model, engine="fp32", load_gate=lambda: busy)
    worker.snapshot(rows())
    assert worker.submit(rows(), ["layers.0"]) is False
    assert worker.collect() is None
    busy = False
    assert worker.submit(rows(), ["layers.0"]) is True
    assert worker.collect(timeout=60) is not None
    worker.close()


def test_waiting_is_counted_and_a_timeout_keeps_the_reading() -> None:
    model = network()
    worker = worker_of(model, engine="fp32", delay_seconds=0.15)
    worker.snapshot(rows())
    worker.submit(rows(), ["layers.0"])
    with pytest.raises(TimeoutError, match=r"not there within 0\.01 s"):
        worker.collect(timeout=0.01)
    found = worker.collect(timeout=60)
    assert found is not None
    assert found[2] > 0.1
    worker.submit(rows(), ["layers.0"])
    assert worker._outstanding[0][0].done.wait(60)
    found = worker.collect(timeout=60)
    assert found is not None
    assert found[2] < 0.1
    assert worker.seconds > 0
    worker.close()


def test_readings_come_back_in_order_and_the_queue_is_bounded() -> None:
    model = network()
    worker = worker_of(model, engine="fp32", delay_seconds=0.05)
    names = [row[0] for row in worker.describe()]
    worker.snapshot(rows())
    start = time.perf_counter()
    for name in names:
        worker.submit(rows(), [name])
    assert time.perf_counter() - start > 0.1  # five readings, of which two may wait
    found = [worker.collect(timeout=60) for _ in names]
    assert [list(reading[0]) for reading in found if reading is not None] == [[name] for name in names]
    assert found[0] is not None
    assert found[0][2] > 0.1
    worker.close()


def test_an_error_on_the_worker_is_raised_once_and_as_it_was() -> None:
    broken = False

    def forward(model: nn.Module, content: Any) -> object:
        if broken:
            raise KeyError("gone")
        return model(content)

    model = network()
    worker = worker_of(model, forward, engine="fp32")
    worker.snapshot(rows())
    worker.submit(rows(), ["layers.0"])
    assert worker.collect(timeout=60) is not None
    broken = True
    worker.submit(rows(), ["layers.0"])
    with pytest.raises(KeyError, match="gone"):
        worker.collect(timeout=60)
    assert worker.collect() is None
    broken = False
    worker.submit(rows(), ["layers.0"])
    assert worker.collect(timeout=60) is not None
    broken = True
    worker.snapshot(rows())
    for error in (KeyError, LayerError):  # the snapshot's own, then: there is none to compare with
        worker.submit(rows(), ["layers.0"])
        with pytest.raises(error, match=r"gone|take a new one"):
            worker.collect(timeout=60)
    broken = False
    worker.snapshot(rows())
    worker.submit(rows(), ["layers.0"])
    found = worker.collect(timeout=60)
    assert found is not None
    assert found[1] == 3
    worker.close()


def test_wrong_use_is_one_sentence() -> None:
    model = network()
    worker = worker_of(model, engine="fp32")
    with pytest.raises(LayerError, match="call snapshot"):
        worker.submit(rows(), ["layers.0"])
    worker.snapshot(rows())
    with pytest.raises(UnknownNameError, match=r"Did you mean 'layers\.0'"):
        worker.submit(rows(), ["layer.0"])
    worker.close()
    worker.close()
    with pytest.raises(LayerError, match="is closed"):
        worker.submit(rows(), ["layers.0"])
    with pytest.raises(UnknownNameError):
        worker_of(model, distance="manhattan")
    with pytest.raises(InvalidSettingError, match="delay_seconds"):
        worker_of(model, delay_seconds=-1)


def test_a_dropped_worker_takes_its_thread_along() -> None:
    names = {thread.ident for thread in threading.enumerate()}
    worker = worker_of(network(), engine="fp32")
    worker.snapshot(rows())
    worker.submit(rows(), ["layers.0"])
    started = [thread for thread in threading.enumerate() if thread.ident not in names]
    assert len(started) == 1
    gone = weakref.ref(worker)
    del worker
    gc.collect()
    assert gone() is None
    started[0].join(timeout=10)
    assert not started[0].is_alive()


def test_the_worker_keeps_to_one_core_and_leaves_other_threads_theirs() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        bench = Workbench()
        inside = bench.give(torch.get_num_threads)
        assert inside.done.wait(10)
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        bench.close()
        assert (inside.result, torch.get_num_threads(), later) == (1, 2, [2])
    finally:
        torch.set_num_threads(before)


class Noisy(nn.Module):
    """Draws in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.randn(x.shape)


@pytest.mark.parametrize("place", ["worker", "caller"])
def test_draws_in_eval_mode_leave_the_training_run_alone(place: str) -> None:
    model, content = nn.Sequential(Noisy(), nn.Linear(4, 2)), torch.ones(6, 4)
    worker = ReferenceWorker(model, layers(model, content), call, engine="fp32", current_on=place)
    before = torch.get_rng_state()
    worker.snapshot(content)
    worker.submit(content, ["0", "1"])
    found = worker.collect(timeout=60)
    worker.close()
    assert torch.equal(before, torch.get_rng_state())
    assert found is not None
    assert found[0] == {"0": 0.0, "1": 0.0}  # both sides drew the same


def test_compiled_calls_do_not_hide_the_activations() -> None:
    """Hooks are not called inside a compiled module, so the reading runs it uncompiled."""
    model, content = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(6, 4)
    found = layers(model, content)

    def compiled_call(*_args: object) -> Tensor:
        pytest.fail("the compiled call was used")

    model._compiled_call_impl = compiled_call  # type: ignore[assignment]
    worker = ReferenceWorker(model, found, call, engine="fp32", current_on="caller")
    worker.snapshot(content)
    worker.submit(content, ["0", "2"])
    reading = worker.collect(timeout=60)
    worker.close()
    assert reading is not None
    assert list(reading[0]) == ["0", "2"]
    assert model._compiled_call_impl is compiled_call


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_on_the_gpu_is_compared_with_a_reference_on_the_cpu() -> None:
    model, content = network().cuda(), rows().cuda()
    worker = worker_of_gpu(model, content)
    worker.snapshot(content)
    names = [row[0] for row in worker.describe()]
    worker.submit(content, names)
    found = worker.collect(timeout=60)
    worker.close()
    assert found is not None
    assert all(0 <= value < 1e-3 for value in found[0].values())


def worker_of_gpu(model: nn.Module, content: Tensor) -> ReferenceWorker:
    return ReferenceWorker(model, layers(model, content[:2]), call, engine="int8")


def test_sp_from_reduced_outputs_is_the_sp_distance() -> None:
    model = network()
    worker = worker_of(model, engine="fp32")
    worker.snapshot(rows())
    before = model.layers[0].eval()(rows()).detach()  # type: ignore[index, operator, union-attr]
    with torch.no_grad():
        model.layers[0].conv.weight.add_(0.1)  # type: ignore[index, operator, union-attr]
    after = model.layers[0](rows()).detach()  # type: ignore[index, operator, union-attr]
    worker.submit(rows(), ["layers.0"])
    found = worker.collect(timeout=60)
    worker.close()
    assert found is not None
    assert found[0]["layers.0"] == pytest.approx(float(sp_distance(after, before)), rel=1e-4)
