"""Write down what each step did and keep the running totals that the savings ledger shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from egeria_lab.algorithms.activations import first_tensor
from egeria_lab.algorithms.costs import CostBook, StepFlops, count_flops, measure_saved_tensors
from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.algorithms.ledger import Ledger, LedgerLayer
from egeria_lab.data.loaders import Batch
from egeria_lab.engine.layer_board import LayerBoard
from egeria_lab.engine.trainer import StepResult, Trainer
from egeria_lab.events import EpochFinished
from egeria_lab.history import History


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step did.

    Attributes:
        step: number of finished steps, this one included.
        epoch: passes over the training data, fractional.
        loss: mean loss of the batch.
        accuracy: share of right predictions in the batch, in [0, 1], or None.
        learning_rate: rate the step was made with.
        frozen: names of the layers that were frozen during the step.
        seconds: measured time of the step, without monitoring.
    """

    step: int
    epoch: float
    loss: float
    accuracy: float | None
    learning_rate: float
    frozen: tuple[str, ...]
    seconds: float


class Recorder:
    """Counts, measures and writes down.

    Args:
        trainer: runs the model.
        layers: the layer modules.
        board: their states.
        history: where rows go.
        example: a small batch for counting FLOPs.
    """

    def __init__(
        self, trainer: Trainer, layers: LayerModules, board: LayerBoard, history: History, example: Batch
    ) -> None:
        self.trainer = trainer
        self.layers = layers
        self.board = board
        self.history = history
        self.example = example
        self.book = CostBook()
        self.frozen_steps = dict.fromkeys(board.names, 0)
        self.counting_seconds = 0.0
        self._flops: dict[tuple[str, ...], StepFlops] = {}
        self._measured: dict[tuple[str, ...], int] = {}
        self._full_saved_by_layer: list[int] = []
        self._boundary_bytes: list[int] = []
        self._newest_set: tuple[str, ...] | None = None
        self._epoch = EpochTotals()
        self._samples = 0
        self._elapsed = 0.0
        self.flops(())

    def flops(self, frozen: Sequence[str]) -> StepFlops:
        """FLOPs per sample under a frozen set, counted once for each set that occurs.

        A set that has not occurred is counted by running the model: only the training thread may ask for one.
        """
        key = tuple(frozen)
        if key not in self._flops:
            start = time.perf_counter()
            content = self.trainer.to_device(self.example.content)

            def loss() -> Tensor:
                # Any scalar of the outputs costs the model the same; the user's own loss may not be ready yet.
                outputs, _ = self.trainer.run_model(self.trainer.model, content)
                found = [x for x in tree_flatten(outputs)[0] if isinstance(x, Tensor) and x.is_floating_point()]
                return next((x for x in found if x.requires_grad), found[0]).float().sum()

            with self.trainer.private_draws("count", 0):
                self._flops[key] = count_flops(self.trainer.model, self.layers, loss, len(self.example), key)
            self.counting_seconds += time.perf_counter() - start
        return self._flops[key]

    @contextmanager
    def around_forward(self, batch: Batch) -> Iterator[None]:
        """Measure what autograd keeps, on the first step of each frozen set."""
        frozen = self.board.frozen
        if frozen in self._measured or self.trainer.compiled is not None:  # hooks would break compiled graphs
            yield
            return
        exclude = [*self.trainer.model.parameters(), *self.trainer.model.buffers()]
        exclude += [leaf for leaf in tree_flatten(batch.content)[0] if isinstance(leaf, Tensor)]
        by_layer: list[int] = []
        boundaries: list[int] = []
        with measure_saved_tensors(exclude) as sizes:
            handles = [
                layer.output.register_forward_hook(_noting(by_layer, boundaries, sizes)) for layer in self.layers[:-1]
            ]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()
        self._measured[frozen] = sum(sizes)
        if not frozen and len(by_layer) == len(self.layers) - 1:
            edges = [0, *by_layer, sum(sizes)]
            self._full_saved_by_layer = [b - a for a, b in pairwise(edges)]
            self._boundary_bytes = boundaries

    def count_step(
        self,
        result: StepResult,
        batch: Batch,
        *,
        step: int,
        epoch: float,
        learning_rate: float,
        monitor_seconds: float,
        forward_shares: Sequence[float] | None = None,
    ) -> StepRecord:
        """Write down one finished step; `forward_shares` tells how much of each layer's forward pass ran."""
        frozen = self.board.frozen
        now = self.flops(frozen)
        shares = forward_shares if forward_shares is not None else [1.0] * len(self.layers)
        forward = sum(share * flops for share, flops in zip(shares, now.forward, strict=True))
        flops, full = (forward + sum(now.backward)) * len(batch), self.flops(()).total * len(batch)
        book = self.book
        first_of_set, self._newest_set = frozen != self._newest_set, frozen
        book.steps += 1
        book.executed_flops += flops
        book.full_flops += full
        book.train_seconds += result.seconds
        book.monitor_seconds += monitor_seconds
        (book.frozen_step_seconds if frozen else book.full_step_seconds).append(result.seconds)
        book.saved_bytes = self._measured.get(frozen)
        book.full_saved_bytes = self._measured.get(())
        for name in frozen:
            self.frozen_steps[name] += 1
        self._samples += len(batch)
        self._elapsed += result.seconds + monitor_seconds
        self.history.steps.append(
            step=step, epoch=epoch, loss=result.loss, accuracy=result.accuracy, learning_rate=learning_rate,
            samples=self._samples, num_frozen=len(frozen), step_seconds=result.seconds,
            monitor_seconds=monitor_seconds, train_flops=flops, full_flops=full,
            elapsed_seconds=self._elapsed,
        )  # fmt: skip
        if first_of_set or step % SAVINGS_EVERY_STEPS == 0:
            self._append_savings(step)
            self._append_rates(step)
        record = StepRecord(
            step=step, epoch=epoch, loss=result.loss, accuracy=result.accuracy,
            learning_rate=learning_rate, frozen=frozen, seconds=result.seconds,
        )  # fmt: skip
        self._epoch.add(record, len(batch))
        return record

    def finish_epoch(self, number: int, step: int, valid_loss: float, valid_accuracy: float | None) -> EpochFinished:
        """Write down one finished epoch and answer with its event."""
        totals, self._epoch = self._epoch, EpochTotals()
        event = EpochFinished(
            step=step, epoch=number, train_loss=totals.loss / totals.samples,
            train_accuracy=totals.accuracy / totals.samples, valid_loss=valid_loss,
            valid_accuracy=valid_accuracy if valid_accuracy is not None else float("nan"),
        )  # fmt: skip
        self.history.epochs.append(
            epoch=number, step=step, train_loss=event.train_loss, train_accuracy=event.train_accuracy,
            valid_loss=valid_loss, valid_accuracy=valid_accuracy, seconds=totals.seconds,
        )  # fmt: skip
        return event

    def ledger(self) -> Ledger:
        """The savings ledger as of now."""
        flops = self._flops[()]  # counted when this was built: a view's thread may not run the model
        rows = tuple(
            LedgerLayer(
                name=row.name, parameters=row.num_parameters, forward_flops=forward, backward_flops=backward,
                state=row.state, frozen_steps=self.frozen_steps[row.name],
            )
            for row, forward, backward in zip(self.board, flops.forward, flops.backward, strict=True)
        )  # fmt: skip
        predicted = None
        prefix = self.board.prefix_length
        if self._full_saved_by_layer:
            # The first trained layer still needs its input, the output of the frozen front.
            boundary = self._boundary_bytes[prefix - 1] if prefix else 0
            predicted = float(sum(self._full_saved_by_layer[prefix:]) + boundary)
        return Ledger(book=self.book, layers=rows, predicted_saved_bytes=predicted)

    def _append_rates(self, step: int) -> None:
        """The learning rate of each trained layer; a frozen one has none. Events tell the reason of each jump."""
        rates = {id(p): float(group["lr"]) for group in self.trainer.optimizer.param_groups for p in group["params"]}
        for index, layer in enumerate(self.layers):
            rate = next((rates[id(p)] for p in layer.parameters if id(p) in rates), None)
            self.history.rates.append(step=step, layer=index, learning_rate=rate)

    def _append_savings(self, step: int) -> None:
        book = self.book
        self.history.savings.append(
            step=step, flops_saved_fraction=book.flops_saved_fraction,
            time_saved_fraction=book.time_saved_fraction, saved_tensor_bytes=book.saved_bytes,
            full_saved_tensor_bytes=book.full_saved_bytes, monitor_fraction=book.monitor_fraction,
        )  # fmt: skip


SAVINGS_EVERY_STEPS = 10
"""How often a row goes into the table of savings; the totals behind it are kept at every step."""


@dataclass(slots=True)
class EpochTotals:
    """Sums over the steps of the epoch under way, weighted by samples."""

    loss: float = 0.0
    accuracy: float = 0.0
    samples: int = 0
    seconds: float = 0.0

    def add(self, record: StepRecord, samples: int) -> None:
        """Count one step."""
        self.loss += record.loss * samples
        self.accuracy += (record.accuracy if record.accuracy is not None else float("nan")) * samples
        self.samples += samples
        self.seconds += record.seconds


def _noting(
    by_layer: list[int], boundaries: list[int], sizes: list[int]
) -> Callable[[torch.nn.Module, Any, Any], None]:
    def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        tensor = first_tensor(output)
        by_layer.append(sum(sizes))
        boundaries.append(tensor.numel() * tensor.element_size() if tensor is not None else 0)

    return hook
