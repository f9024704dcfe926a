"""What a training step costs, counted on the real model, and the ledger of what freezing saved.

FLOPs are counted by `torch.utils.flop_counter` while the model runs forward and backward under a given
frozen set: nothing is assumed about its layers. Counting works on the autograd graph of detached results
and leaves gradients, buffers, modes and generators as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from egeria_lab.algorithms.activations import first_tensor
from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.algorithms.products import Product, ProductTracer, countable_kernels, flop_counter, weights_of
from egeria_lab.algorithms.tracing import undisturbed


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of one training step per sample, one entry per layer module, front to back.

    Attributes:
        forward: FLOPs of the forward pass.
        backward: FLOPs of the backward pass (input and weight gradients).
        names: names of the layer modules; empty when the figures were made by hand.
        products: the matrix products and convolutions behind the figures, from which `cost_model` derives
            the cost under any densities and any other frozen set; empty when made by hand.
        frozen: names of the layers that were frozen when this was counted.
        parameters: names of all parameters of the model, those without a product too.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    names: tuple[str, ...] = ()
    products: tuple[Product, ...] = field(default=(), repr=False)
    frozen: tuple[str, ...] = ()
    parameters: tuple[str, ...] = field(default=(), repr=False)

    @property
    def total(self) -> float:
        """FLOPs of the whole step per sample."""
        return sum(self.forward) + sum(self.backward)


def count_flops(
    model: nn.Module,
    layers: LayerModules,
    loss: Callable[[], Tensor],
    num_samples: int,
    frozen: Sequence[str] = (),
) -> StepFlops:
    """Count the FLOPs of one training step per sample, with the given layers frozen.

    Args:
        model: the model; left as it was.
        layers: its layer modules.
        loss: runs the model on `num_samples` samples and returns a scalar loss.
        num_samples: samples in that batch.
        frozen: names of the layers that are taken as frozen, whatever their state now.

    Example:
        >>> from egeria_lab.algorithms.layers import layers
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x = torch.zeros(2, 4)
        >>> flops = count_flops(model, layers(model, x), lambda: model(x).sum(), 2)
        >>> flops.forward, flops.backward    # 2 × 4 × 8 and 2 × 8 × 2; the first layer has no input gradient
        ((64.0, 32.0), (64.0, 64.0))
    """
    owners: dict[int, int | None] = {id(p): i for i, layer in enumerate(layers) for p in layer.parameters}
    for layer in layers:
        owners.update((id(parameter), None) for parameter in layer.untrained)
    with undisturbed(model), countable_kernels(model), _frozen_flags(layers, frozen) as active:
        counter = flop_counter()
        forward: list[float] = []
        backward = [0.0] * len(layers)
        marks: list[tuple[int, float]] = []
        tracer = ProductTracer(
            weights_of(model, owners),
            list(model.buffers()),
            counter.flop_registry,
            lambda: min(len(forward), len(layers) - 1),
        )
        with tracer, counter, _marking(layers, counter, forward, marks):
            value = loss()
            tracer.is_on = False
            at_loss = float(counter.get_total_flops())
            if active and value.requires_grad:
                torch.autograd.grad(value, active, allow_unused=True)
            end = float(counter.get_total_flops())
    forward_total = _differences([0.0, *forward[: len(layers) - 1]], at_loss, len(layers))
    later = at_loss
    for index, total in sorted(marks, reverse=True):
        backward[index + 1] += total - later
        later = total
    frontmost = min((index for index, _ in marks), default=len(layers) - 1)
    backward[frontmost] += end - later
    return StepFlops(
        tuple(flops / num_samples for flops in forward_total),
        tuple(flops / num_samples for flops in backward),
        tuple(layers.names),
        tracer.products(num_samples),
        tuple(name for name in layers.names if name in frozen),
        tuple(name for name, _ in model.named_parameters()),
    )


def _differences(marks: list[float], end: float, count: int) -> list[float]:
    edges = [*marks[:count], *([end] * (count + 1 - len(marks)))]
    return [after - before for before, after in pairwise(edges)]


@contextmanager
def _frozen_flags(layers: LayerModules, frozen: Sequence[str]) -> Iterator[list[nn.Parameter]]:
    """Set `requires_grad` as if exactly the given layers were frozen; put the flags back afterwards.

    What its owner had excluded from training before the model was cut stays excluded.
    """
    before = [(parameter, parameter.requires_grad) for layer in layers for parameter in layer.parameters]
    try:
        for layer in layers:
            untrained = {id(parameter) for parameter in layer.untrained}
            for parameter in layer.parameters:
                parameter.requires_grad_(layer.name not in frozen and id(parameter) not in untrained)
        yield [parameter for parameter, _ in before if parameter.requires_grad]
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


@contextmanager
def _marking(
    layers: LayerModules, counter: FlopCounterMode, forward: list[float], marks: list[tuple[int, float]]
) -> Iterator[None]:
    """Note the counter at each cut: on the way forward, and when the gradient of the cut is complete."""

    def hook_for(index: int) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if len(forward) != index:
                return
            forward.append(float(counter.get_total_flops()))
            tensor = first_tensor(output)
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    lambda _grad: marks.append((index, float(counter.get_total_flops())))
                )

        return hook

    handles = [layer.output.register_forward_hook(hook_for(i)) for i, layer in enumerate(layers[:-1])]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def measure_saved_tensors(exclude: Sequence[Tensor] = ()) -> Iterator[list[int]]:
    """Measure the bytes that autograd keeps for the backward pass of what runs in the block.

    Storages are counted once; those of `exclude` (parameters, the input batch) are not counted. The
    tensors themselves pass through unchanged, so the step is bit-equal with or without.

    Yields:
        A list that holds the bytes of each saved storage when the block has ended; sum it.

    Example:
        >>> x = torch.zeros(10, 10, requires_grad=True)
        >>> with measure_saved_tensors([x]) as sizes:
        ...     y = x.exp()
        >>> sum(sizes)
        400
    """
    seen = {tensor.untyped_storage().data_ptr() for tensor in exclude}
    sizes: list[int] = []
    kept: list[Tensor] = []  # alive until the end, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes.append(storage.nbytes())
            kept.append(tensor.detach())
        # Not `tensor` itself: a saved output would hold its own graph, and never go if no backward comes.
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
    kept.clear()


@dataclass(slots=True)
class CostBook:
    """Running totals of what was executed and what it would have been without freezing.

    Attributes:
        steps: finished steps.
        executed_flops: FLOPs counted for the steps as they ran.
        full_flops: FLOPs of the same steps with nothing frozen.
        train_seconds: measured time of the steps, without monitoring.
        monitor_seconds: measured time of plasticity readings, snapshots and counting.
        full_steps: steps in which nothing was frozen.
        full_step_seconds: measured times of the newest of them, at most `MOST_TIMES`; without warm-up.
        frozen_seconds: measured time of all steps in which something was frozen.
        baseline_seconds: measured time of the same run without freezing, where one was made beside it.
        saved_bytes: measured bytes kept for backward, newest step that was measured.
        full_saved_bytes: the same with nothing frozen.
    """

    steps: int = 0
    executed_flops: float = 0.0
    full_flops: float = 0.0
    train_seconds: float = 0.0
    monitor_seconds: float = 0.0
    full_steps: int = 0
    full_step_seconds: list[float] = field(default_factory=list, repr=False)
    frozen_seconds: float = 0.0
    baseline_seconds: float | None = None
    saved_bytes: int | None = None
    full_saved_bytes: int | None = None

    def note_time(self, seconds: float, *, frozen: bool) -> None:
        """Count the measured time of one step in which something was frozen, or nothing."""
        self.train_seconds += seconds
        if frozen:
            self.frozen_seconds += seconds
            return
        self.full_steps += 1
        if self.full_steps > WARM_UP_STEPS:
            self.full_step_seconds.append(seconds)
            del self.full_step_seconds[:-MOST_TIMES]

    @property
    def flops_saved_fraction(self) -> float:
        """Share of the FLOPs that was not executed, in [0, 1]."""
        return 1 - self.executed_flops / self.full_flops if self.full_flops else 0.0

    @property
    def time_saved_fraction(self) -> float | None:
        """Measured: total step time against as many median steps with nothing frozen; None if unknown.

        The first steps (warm-up) and all but the newest `MOST_TIMES` are left out of the median. Negative when
        freezing cost time. With a baseline run beside it, its time is what is compared with, and watching counts.
        """
        if self.baseline_seconds is not None:
            return 1 - (self.train_seconds + self.monitor_seconds) / self.baseline_seconds
        if len(self.full_step_seconds) < LEAST_TIMES:
            return None
        full = median(self.full_step_seconds)
        measured = self.full_steps * full + self.frozen_seconds
        return 1 - measured / (self.steps * full) if self.steps else None

    @property
    def monitor_fraction(self) -> float:
        """Share of the whole time that watching took, in [0, 1]."""
        total = self.train_seconds + self.monitor_seconds
        return self.monitor_seconds / total if total else 0.0


WARM_UP_STEPS = 5
"""Steps at the start of a run whose times are not compared: allocators and kernels warm up."""

LEAST_TIMES, MOST_TIMES = 20, 1000
"""Measured steps that a median is taken of. Five told of savings that were none when a machine was busy; a run of a
million steps need not keep, sort and save a million times."""
