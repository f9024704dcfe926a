"""Who makes a plasticity reading: a worker thread with a low-precision reference, or the calling thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from egeria_lab.algorithms.distances import distance
from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.algorithms.reference import Reference
from egeria_lab.algorithms.reference_worker import ReferenceWorker
from egeria_lab.engine.threads import available_cores
from egeria_lab.errors import LayerError

Forward = Callable[[nn.Module, object], object]


class Reader(Protocol):
    """Takes snapshots and compares the training model with them; a reading is asked for and collected later."""

    @property
    def engine(self) -> str:
        """Numeric format of the reference."""

    @property
    def generation(self) -> int:
        """Number of the latest snapshot, from 1; 0 before the first."""

    @property
    def seconds(self) -> float:
        """Processor time spent beside the training thread."""

    def snapshot(self, content: object) -> int:
        """Make the model of this moment the reference; answers with its generation."""

    def submit(self, content: object, wanted: Sequence[str]) -> bool:
        """Ask for one reading; False when it is skipped because the machine is busy."""

    def collect(self, timeout: float | None = None) -> tuple[dict[str, float], int, float] | None:
        """The oldest reading asked for: distances, generation, seconds waited; None when there is none."""

    def describe(self) -> list[tuple[str, str, str]]:
        """Each layer's name, numeric format and note."""

    def state_dict(self) -> dict[str, Any]:
        """The snapshot and the readings that are under way; waits for them."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on against the very snapshot of `state_dict`."""

    def close(self) -> None:
        """End threads."""


class SynchronousReader:
    """Makes each reading at once, in float32, in the calling thread: the fallback that always works.

    Args:
        model: the training model.
        layers: its layer modules.
        forward: ``forward(model, content)`` runs the model.
        distance_name: which distance.
        why: why readings are not made by a worker.
        seed: of draws that the model makes in eval mode, the same for both sides of a reading.
    """

    def __init__(
        self, model: nn.Module, layers: LayerModules, forward: Forward, distance_name: str, why: str, seed: int = 0
    ) -> None:
        self._layers = layers
        self._seed = seed
        self._gpus = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
        self._reference = Reference(model, {layer.name: layer.output for layer in layers}, forward)
        self._distance = distance(distance_name)
        self._done: list[tuple[dict[str, float], int, float]] = []
        self._why = why

    @property
    def engine(self) -> str:
        """Float32, the format of the model itself."""
        return "fp32"

    @property
    def generation(self) -> int:
        """Number of the latest snapshot, from 1."""
        return self._reference.generation

    @property
    def seconds(self) -> float:
        """Nothing is spent beside the training thread."""
        return 0.0

    def snapshot(self, content: object) -> int:
        """Copy the tensors of the training model."""
        self._reference.refresh()
        return self._reference.generation

    def submit(self, content: object, wanted: Sequence[str]) -> bool:
        """Make the reading now and keep it until it is collected."""
        last = self._layers.find(wanted[-1]).output
        with self._own_draws():
            before = self._reference.activations(content, stop_after=last)
        with self._own_draws():
            now = self._reference.current(content, stop_after=last)
        values = {name: float(self._distance(now[name], before[name])) for name in wanted if name in now}
        self._done.append((values, self._reference.generation, 0.0))
        return True

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=self._gpus):
            torch.default_generator.manual_seed(self._seed)
            for gpu in self._gpus:
                with torch.cuda.device(gpu):
                    torch.cuda.manual_seed(self._seed)
            yield

    def collect(self, timeout: float | None = None) -> tuple[dict[str, float], int, float] | None:
        """The oldest reading, without waiting."""
        return self._done.pop(0) if self._done else None

    def state_dict(self) -> dict[str, Any]:
        """The snapshot and the reading that was made."""
        readings = [{"values": values, "generation": generation} for values, generation, _ in self._done]
        return {"readings": readings, "reference": self._reference.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on against the very snapshot of `state_dict`."""
        self._done = [(reading["values"], reading["generation"], 0.0) for reading in state["readings"]]
        self._reference.load_state_dict(state["reference"])

    def describe(self) -> list[tuple[str, str, str]]:
        """Every layer is compared in float32."""
        return [(layer.name, "fp32", self._why) for layer in self._layers]

    def close(self) -> None:
        """Nothing to end."""


def busy_above(load_per_core: float) -> Callable[[], bool]:
    """A gate that says the machine is busy when its load average per core lies above a limit.

    Example:
        >>> busy_above(1e9)()
        False
    """
    average: Any = getattr(os, "getloadavg", None)  # not on Windows: there the gate never closes
    return lambda: average is not None and average()[0] / available_cores() > load_per_core


def make_reader(
    model: nn.Module,
    layers: LayerModules,
    forward: Forward,
    *,
    engine: str,
    distance_name: str,
    seed: int,
    load_gate: float | None,
    delay_seconds: float = 0.0,
) -> Reader:
    """A worker with a low-precision reference where the model can be copied, else the calling thread.

    Args:
        model: the training model.
        layers: its layer modules.
        forward: ``forward(model, content)`` runs a model.
        engine: ``"auto"``, ``"int8"``, ``"bf16"`` or ``"fp32"``.
        distance_name: which distance.
        seed: of draws that a model makes in eval mode.
        load_gate: skip readings while the load average per core lies above this, or None.
        delay_seconds: sleep before each piece of the worker's work, to try a slow one.
    """
    try:
        return ReferenceWorker(
            model,
            layers,
            forward,
            engine=engine,
            distance=distance_name,
            seed=seed,
            load_gate=None if load_gate is None else busy_above(load_gate),
            delay_seconds=delay_seconds,
        )
    except LayerError as error:
        return SynchronousReader(model, layers, forward, distance_name, str(error), seed)
