"""Training memory the way the sparse-training papers count it.

Weights × density + outputs of the products + weight gradients + activation gradients, fp32, for one batch;
no indices of sparse weights, no optimizer state, no workspace. *Theoretical*: masked dense kernels keep all
of it, and what autograd and the allocator really hold is measured elsewhere (`measure_saved_tensors`).

Two readings of what a frozen layer spares, always shown together: only its *gradients*, as the papers
count; or its outputs *too*, which is what happens, because nothing in a frozen front is kept for backward.

For the ResNet-32 of the papers at 90 % sparsity this gives 309.6 MiB, 42.7 % less (85.3 % in the second
reading) once the stem and 10 blocks are frozen, and 20.2 % and 25.0 % less on average over 160 epochs when
freezing begins at epoch 67 or 49 (20 % and 25 % of the FLOPs). Averages of 20.5 % and 24.7 % are quoted for
these; they would belong to starts at epochs 65.7 and 50, and no reading of the schedule gives both.

Source: SpFDE (NeurIPS 2022), section 4; MEST (NeurIPS 2021), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from egeria_lab.algorithms.costs import StepFlops
from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.algorithms.run_costs import Interval
from egeria_lab.errors import InvalidSettingError, is_whole, require, unknown_name

BATCH_SIZE = 64
"""The papers' batch."""

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What one layer module holds.

    Attributes:
        name: its name.
        weights: elements of each of its parameters, by parameter name.
        outputs: elements of the outputs of its products (convolutions, linear maps, attention) per sample.
        trained: names of those parameters that train while the layer is active.
    """

    name: str
    weights: Mapping[str, int]
    outputs: float
    trained: frozenset[str]


@dataclass(frozen=True, slots=True)
class PaperMemory:
    """Bytes of one training step, part by part."""

    weights: float
    outputs: float
    weight_gradients: float
    activation_gradients: float

    @property
    def total(self) -> float:
        """All four."""
        return self.weights + self.outputs + self.weight_gradients + self.activation_gradients


def layer_sizes(model: nn.Module, layers: LayerModules, step: StepFlops) -> tuple[LayerSizes, ...]:
    """The sizes that the model below needs, for any model.

    Args:
        model: the model.
        layers: its layer modules.
        step: from `count_flops` with them.

    Raises:
        InvalidSettingError: when `step` is not a counted one of these layers.

    Example:
        >>> import torch
        >>> from egeria_lab.algorithms.costs import count_flops
        >>> from egeria_lab.algorithms.layers import layers
        >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(2, 4)
        >>> found = layers(model, x)
        >>> sizes = layer_sizes(model, found, count_flops(model, found, lambda: model(x).sum(), 2))
        >>> [(size.name, sum(size.weights.values()), size.outputs) for size in sizes]
        [('0', 40, 8.0), ('2', 18, 2.0)]
    """
    if tuple(layers.names) != step.names:
        raise InvalidSettingError(
            f"step has the layers {', '.join(step.names) or 'none'} and the model {', '.join(layers.names)}; "
            "count it with count_flops(model, layers, …)."
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    outputs = [0.0] * len(layers)
    for product in step.products:
        outputs[product.layer] += product.outputs
    sizes = []
    for layer, elements in zip(layers, outputs, strict=True):
        untrained = {id(parameter) for parameter in layer.untrained}
        weights = {names[id(parameter)]: parameter.numel() for parameter in layer.parameters}
        trained = frozenset(names[id(p)] for p in layer.parameters if id(p) not in untrained)
        sizes.append(LayerSizes(layer.name, weights, elements, trained))
    return tuple(sizes)


def paper_memory(
    sizes: Sequence[LayerSizes],
    *,
    frozen: Sequence[str] = (),
    densities: Mapping[str, float] | None = None,
    batch_size: int = BATCH_SIZE,
    keep_frozen_outputs: bool = True,
) -> PaperMemory:
    """Bytes that one training step takes.

    A frozen layer has no weight gradients; in the frozen front it has no activation gradients either. A
    frozen hole lets gradients through, so its activation gradients and outputs stay.

    Args:
        sizes: from `layer_sizes`.
        frozen: names of the frozen layers.
        densities: share of live weights by parameter name or by layer name; weights and their gradients are
            counted at it.
        batch_size: samples in a batch.
        keep_frozen_outputs: False: the outputs of the frozen front are not counted either. The one tensor
            that crosses into the first trained layer is no product of it and is left out in both readings.

    Raises:
        UnknownNameError: for a layer that does not exist.

    Example:
        >>> sizes = [LayerSizes("a", {"a.w": 10}, 5.0, frozenset({"a.w"})), LayerSizes("b", {}, 1.0, frozenset())]
        >>> paper_memory(sizes, batch_size=2).total    # 4 bytes × (10 + 2 × 6) twice
        176.0
        >>> paper_memory(sizes, batch_size=2, frozen=["a"]).total
        96.0
        >>> paper_memory(sizes, batch_size=2, frozen=["a"], keep_frozen_outputs=False).total
        56.0
    """
    require(is_whole(batch_size) and batch_size >= 1, "paper_memory", "batch_size", batch_size, "a whole number >= 1")
    names = [size.name for size in sizes]
    for name in frozen:
        if name not in names:
            raise unknown_name("layer", name, names)
    densities = densities or {}
    front = next((index for index, name in enumerate(names) if name not in frozen), len(names))
    weights = outputs = weight_gradients = activation_gradients = 0.0
    for index, size in enumerate(sizes):
        whole = densities.get(size.name, 1.0)
        live = {name: count * densities.get(name, whole) for name, count in size.weights.items()}
        weights += sum(live.values())
        if size.name not in frozen:
            weight_gradients += sum(count for name, count in live.items() if name in size.trained)
        elements = size.outputs * batch_size
        outputs += elements if index >= front or keep_frozen_outputs else 0.0
        activation_gradients += elements if index >= front else 0.0
    return PaperMemory(*(FLOAT_BYTES * part for part in (weights, outputs, weight_gradients, activation_gradients)))


@dataclass(slots=True)
class MemoryReading:
    """One reading of a training's memory, against the same training without freezing.

    Attributes:
        bytes_times_samples: sum over the intervals.
        minimum: least bytes of any interval, None before one was added.
        most_saved: largest share saved in any interval, in [0, 1].
        mean_saved: share of the mean that is saved, in [0, 1].
    """

    bytes_times_samples: float = 0.0
    minimum: float | None = None
    most_saved: float = 0.0
    mean_saved: float = 0.0


@dataclass(slots=True)
class MemoryRun:
    """Mean and minimum of `paper_memory` over a training, in both readings.

    Attributes:
        batch_size: samples in a batch.
        samples: what the mean is taken over.
        full: sum of the bytes with nothing frozen, each times its samples.
        full_bytes: bytes with nothing frozen, newest.
        gradients: frozen layers spare their gradients only, as the papers count.
        outputs: the frozen front spares its outputs too, which is what happens.

    Example:
        >>> sizes = [LayerSizes("a", {}, 9.0, frozenset()), LayerSizes("b", {}, 1.0, frozenset())]
        >>> run = memory_over_run(sizes, [Interval(samples=1), Interval(samples=1, frozen=("a",))])
        >>> round(run.gradients.mean_saved, 3), round(run.gradients.most_saved, 3)
        (0.225, 0.45)
        >>> round(run.outputs.mean_saved, 3), round(run.outputs.most_saved, 3)
        (0.45, 0.9)
    """

    batch_size: int = BATCH_SIZE
    samples: float = 0.0
    full: float = 0.0
    full_bytes: float = 0.0
    gradients: MemoryReading = field(default_factory=MemoryReading)
    outputs: MemoryReading = field(default_factory=MemoryReading)

    @property
    def mean_bytes(self) -> float:
        """Bytes with nothing frozen, averaged over the samples."""
        return self.full / self.samples if self.samples else 0.0

    def add(self, sizes: Sequence[LayerSizes], interval: Interval) -> None:
        """Count one more interval, weighted by its samples."""

        def bytes_with(frozen: Sequence[str], keep_frozen_outputs: bool = True) -> float:
            return paper_memory(
                sizes, frozen=frozen, densities=interval.densities, batch_size=self.batch_size,
                keep_frozen_outputs=keep_frozen_outputs,
            ).total  # fmt: skip

        self.full_bytes = bytes_with(())
        self.samples += interval.samples
        self.full += interval.samples * self.full_bytes
        for reading, keep in ((self.gradients, True), (self.outputs, False)):
            now = bytes_with(interval.frozen, keep)
            reading.bytes_times_samples += interval.samples * now
            reading.minimum = now if reading.minimum is None else min(reading.minimum, now)
            reading.most_saved = max(reading.most_saved, 1 - now / self.full_bytes)
            reading.mean_saved = 1 - reading.bytes_times_samples / self.full if self.full else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able plain data."""
        return asdict(self)

    state_dict = to_dict

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        for name in ("batch_size", "samples", "full", "full_bytes"):
            setattr(self, name, state[name])
        self.gradients, self.outputs = MemoryReading(**state["gradients"]), MemoryReading(**state["outputs"])


def memory_over_run(
    sizes: Sequence[LayerSizes], intervals: Sequence[Interval], *, batch_size: int = BATCH_SIZE
) -> MemoryRun:
    """Mean and minimum over a whole training.

    Args:
        sizes: from `layer_sizes`.
        intervals: what held when, as for `run_flops`; a cache and a sieve change nothing here.
        batch_size: samples in a batch.

    Example:
        >>> sizes = [LayerSizes("a", {"w": 2}, 1.0, frozenset({"w"}))]
        >>> run = memory_over_run(sizes, [Interval(samples=1)], batch_size=1)
        >>> run.mean_bytes, run.gradients.mean_saved
        (24.0, 0.0)
    """
    run = MemoryRun(batch_size=batch_size)
    for interval in intervals:
        run.add(sizes, interval)
    return run
