"""Plasticity readings off the training thread: one daemon thread converts, calibrates and compares.

Repeatability: work is done in the order in which it was given, by one thread with one core, on copies that
were made when it was given. A slow worker gives the same numbers later. The file is one piece because both sides
of the two threads have to be read together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from egeria_lab.algorithms.activations import capture
from egeria_lab.algorithms.background import Job, Workbench
from egeria_lab.algorithms.distances import distance, normalised_gram, sp_from_grams
from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.algorithms.model_copy import TensorName, cloned_state, to_cpu, unwrapped
from egeria_lab.algorithms.model_twin import ModelTwin, Reduce, ending_after, running_here
from egeria_lab.algorithms.reference_model import ReferenceModel
from egeria_lab.errors import LayerError, require

PLACES = ("auto", "worker", "caller")


class ReferenceWorker:
    """Compares a training model with its low-precision snapshot on another thread.

    All methods are for one thread, the one that trains. Build it there, before training.

    Args:
        model: the training model, on the CPU or a GPU; it is read and never changed.
        layers: its layer modules, front to back.
        forward: ``forward(model, content)`` runs a model on a batch. It is called on the worker with a copy of
            the model and a batch that are on the CPU, and may not touch anything else that changes.
        engine: ``"auto"``, ``"int8"``, ``"bf16"`` or ``"fp32"``.
        distance: ``"sp"``, ``"cka"``, ``"cosine"`` or ``"relative_l2"``.
        seed: seed of draws that a model makes in eval mode.
        load_gate: answers True while the CPU is busy with other things: readings are then skipped.
        delay_seconds: sleep before each piece of work, to try a slow worker, >= 0.
        current_on: where the training model's own side of a reading is computed: by the ``"worker"`` from a
            copy of its state, or by the ``"caller"`` on the model's device; ``"auto"`` is the worker for
            a model on the CPU and the caller for one on a GPU.

    Attributes:
        generation: number of the latest snapshot, from 1; 0 before the first.
        engine: the engine in use.

    Raises:
        UnknownNameError: for an unknown engine or distance.
        LayerError: when the model cannot be copied.

    Source: Egeria (EuroSys 2023), section 4.1: an asynchronous reference on the CPU.

    Example:
        >>> from egeria_lab.algorithms.layers import layers
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> batch = torch.linspace(-1, 1, 8).reshape(2, 4)
        >>> worker = ReferenceWorker(model, layers(model, batch), lambda m, x: m(x), engine="fp32")
        >>> worker.snapshot(batch)
        1
        >>> worker.submit(batch, ["0"])
        True
        >>> values, generation, seconds_waited = worker.collect()
        >>> values, generation
        ({'0': 0.0}, 1)
        >>> worker.close()
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerModules,
        forward: Callable[[nn.Module, object], object],
        *,
        engine: str = "auto",
        distance: str = "sp",
        seed: int = 0,
        load_gate: Callable[[], bool] | None = None,
        delay_seconds: float = 0.0,
        current_on: str = "auto",
    ) -> None:
        require(current_on in PLACES, "ReferenceWorker", "current_on", current_on, f"one of {PLACES}")
        require(delay_seconds >= 0, "ReferenceWorker", "delay_seconds", delay_seconds, "a number >= 0")
        self._reduce, self._distance = _measure(distance)
        self._model = unwrapped(model)
        self._layers = layers
        self._forward = forward
        self._seed = seed
        self._load_gate = load_gate
        on_cpu = all(tensor.device.type == "cpu" for tensor in self._model.parameters())
        self._by_caller = current_on == "caller" or (current_on == "auto" and not on_cpu)
        self._reference = ReferenceModel(model, layers, forward, engine=engine, seed=seed)
        outputs = {layer.name: layer.output for layer in layers}
        self._current = None if self._by_caller else ModelTwin(model, outputs, forward, seed=seed)
        self.engine = self._reference.engine
        self.generation = 0
        self._outstanding: deque[tuple[Job, int]] = deque()
        self._stalled = 0.0
        self._snapshots = _Snapshots(self._reference)
        self._bench = Workbench(delay_seconds)

    @property
    def seconds(self) -> float:
        """CPU time that the worker's thread has spent."""
        return self._bench.seconds

    def snapshot(self, content: object) -> int:
        """Make the model of this moment the reference; answers with its generation, at once.

        The state is cloned here; loading, calibration and conversion are the worker's. A failure there is
        raised by the `collect` of the next reading.

        Args:
            content: calibration rows, a batch as `forward` takes it.
        """
        state = self._reference.state_of(self._model)
        rows = tree_map(_private, content)
        ready, snapshots = _Ready(), self._snapshots
        self._give(lambda: snapshots.take(ready, state, rows))
        self.generation += 1
        return self.generation

    def submit(self, content: object, wanted: Sequence[str]) -> bool:
        """Ask for one reading of the model of this moment; False when the load gate skipped it.

        Args:
            content: probe rows, a batch as `forward` takes it.
            wanted: names of the layers to compare.

        Raises:
            LayerError: before the first snapshot.
            UnknownNameError: for a layer that there is not.
        """
        if self.generation == 0:
            raise LayerError("there is no snapshot to compare with: call snapshot(content) first.")
        names = [layer.name for layer in map(self._layers.find, wanted)]
        if self._load_gate is not None and self._load_gate():
            return False
        job = self._give(self._reading(content, names))
        self._outstanding.append((job, self.generation))
        return True

    def collect(self, timeout: float | None = None) -> tuple[dict[str, float], int, float] | None:
        """The oldest reading that was submitted and not collected.

        Args:
            timeout: seconds to wait at most, or None for as long as it takes.

        Returns:
            Distance of each layer, the generation it was made against, and the seconds that the caller had to
            wait since the last `collect`; None when nothing is outstanding.

        Raises:
            TimeoutError: when it is not there in time; it stays outstanding.
            Exception: what went wrong on the worker, as it was, once; the worker goes on.
        """
        if not self._outstanding:
            return None
        job, generation = self._outstanding[0]
        start = time.perf_counter()
        finished = job.done.wait(timeout)
        self._stalled += time.perf_counter() - start
        if not finished:
            raise TimeoutError(f"the reading was not there within {timeout} s; collect it later.")
        self._outstanding.popleft()
        waited, self._stalled = self._stalled, 0.0
        if job.error is not None:
            raise job.error
        return job.result, generation, waited

    def describe(self) -> list[tuple[str, str, str]]:
        """Each layer's name, engine, and what is quantised how and why other parts are not.

        Complete once the first snapshot was converted; before, it is what was planned.
        """
        return self._reference.describe()

    def state_dict(self) -> dict[str, Any]:
        """The snapshot and the readings that are under way: plain values and tensors. Waits for the worker."""
        self._check_open()
        self._bench.give(lambda: None).done.wait()  # it works in order: behind this nothing is left to do
        readings = [
            {"values": job.result, "generation": generation, "error": None if job.error is None else str(job.error)}
            for job, generation in self._outstanding
        ]
        return {
            "generation": self.generation,
            "readings": readings,
            "fit": self._snapshots.fit,
            "reference": self._reference.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on against the very snapshot of `state_dict`, with its readings to be collected."""
        self._check_open()
        self._outstanding.clear()
        job = self._bench.give(lambda: self._snapshots.put_back(state["reference"], state["fit"]))
        job.done.wait()
        if job.error is not None:
            raise job.error
        self.generation = state["generation"]
        for reading in state["readings"]:
            error = None if reading["error"] is None else LayerError(reading["error"])
            done = Job(lambda: None, result=reading["values"], error=error)
            done.done.set()
            self._outstanding.append((done, reading["generation"]))

    def close(self) -> None:
        """End the thread behind its present piece of work; what is outstanding is dropped. Twice is once."""
        self._bench.close()
        self._outstanding.clear()

    def _check_open(self) -> None:
        if self._bench.closed:
            raise LayerError("the reference worker is closed; build a new one.")

    def _give(self, work: Callable[[], Any]) -> Job:
        self._check_open()
        start = time.perf_counter()
        job = self._bench.give(work)
        self._stalled += time.perf_counter() - start
        return job

    def _reading(self, content: object, names: list[str]) -> Callable[[], dict[str, float]]:
        """The work of one reading, with copies of all it needs; it may not hold `self`, see `Workbench`."""
        snapshots, reduce, between = self._snapshots, self._reduce, self._distance
        current = self._activations_here(content, names) if self._by_caller else self._activations_there(names)
        rows = tree_map(_private, content)
        ready = _Ready()

        def work() -> dict[str, float]:
            ready.wait()
            reference = snapshots.current()
            after, before = current(rows), reference.activations(rows, names, reduce)
            return {name: float(between(after[name], before[name])) for name in names if name in after}

        return work

    def _activations_there(self, names: list[str]) -> Callable[[object], dict[str, Tensor]]:
        twin, reduce = self._current, self._reduce
        assert twin is not None
        state = cloned_state(self._model, twin.names)

        def run(rows: object) -> dict[str, Tensor]:
            twin.load(state)
            return twin.run(rows, names, reduce)

        return run

    def _activations_here(self, content: object, names: list[str]) -> Callable[[object], dict[str, Tensor]]:
        outputs = {name: self._layers.find(name).output for name in names}
        last = next((layer.output for layer in reversed(self._layers) if layer.name in outputs), None)
        with running_here(self._model, self._seed), capture(outputs, self._reduce) as found, ending_after(last):
            self._forward(self._model, content)
        activations = {name: to_cpu(tensor) for name, tensor in found.items()}
        return lambda _rows: activations


class _Snapshots:
    """The reference and whether it is fit for use; only the worker's thread looks inside."""

    def __init__(self, reference: ReferenceModel) -> None:
        self._reference = reference
        self._failure: BaseException | None = None
        self._fit = False

    def take(self, ready: _Ready, state: dict[TensorName, Tensor], rows: object) -> None:
        self._failure, self._fit = None, False
        try:
            ready.wait()
            self._reference.refresh(state, rows)
            self._fit = True
        except BaseException as error:  # nobody collects a snapshot: the next reading brings it
            self._failure = error

    @property
    def fit(self) -> bool:
        """True when there is a snapshot to compare with."""
        return self._fit

    def put_back(self, state: Mapping[str, Any], fit: bool) -> None:
        self._failure, self._fit = None, False
        self._reference.load_state_dict(state)
        self._fit = fit

    def current(self) -> ReferenceModel:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if not self._fit:
            raise LayerError("the last snapshot failed, so there is nothing to compare with: take a new one.")
        return self._reference


class _Ready:
    """Copies from the GPU that are still on their way, and waiting for them on the other thread."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


def _private(leaf: Any) -> Any:
    return to_cpu(leaf) if isinstance(leaf, Tensor) else leaf


def _measure(name: str) -> tuple[Reduce | None, Callable[[Tensor, Tensor], Tensor]]:
    """How an output is reduced at once, and how two reduced outputs are compared."""
    compare = distance(name)
    return (normalised_gram, sp_from_grams) if name == "sp" else (None, compare)
