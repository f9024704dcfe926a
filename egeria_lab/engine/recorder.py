"""Write down what each step did and keep the running totals that the savings ledger shows.

The file is one piece because every total is counted, shown and saved from the same fields.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from egeria_lab.algorithms.activations import first_tensor
from egeria_lab.algorithms.costs import CostBook, StepFlops, count_flops, measure_saved_tensors
from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.algorithms.ledger import Ledger, LedgerLayer
from egeria_lab.data.loaders import Batch
from egeria_lab.engine.layer_board import LayerBoard
from egeria_lab.engine.sieving import SessionSieve
from egeria_lab.engine.sparsifying import Sparsifier
from egeria_lab.engine.technique_costs import TechniqueCosts
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

    Example:
        >>> from egeria_lab.session import Session
        >>> record = Session("mlp", "digits", epochs=1).step(2)
        >>> record.step, record.frozen
        (2, ())
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
        batch_size: samples a step.

    Attributes:
        sieve, sparse: what else saves work, set when it is there.
        counts_as_papers: the ledger also shows memory as the papers count it.
    """

    def __init__(
        self,
        trainer: Trainer,
        layers: LayerModules,
        board: LayerBoard,
        history: History,
        example: Batch,
        batch_size: int = 64,
    ) -> None:
        self.trainer = trainer
        self.layers = layers
        self.board = board
        self.history = history
        self.example = example
        self.book = CostBook()
        self.frozen_steps = dict.fromkeys(board.names, 0)
        self.cached_steps = dict.fromkeys(board.names, 0.0)
        self.counting_seconds = 0.0
        self._flops: dict[tuple[str, ...], StepFlops] = {}
        self._measured: dict[tuple[str, ...], int] = {}
        self._full_saved_by_layer: list[int] = []
        self._boundary_bytes: list[int] = []
        self._newest_set: tuple[str, ...] | None = None
        self.rate_factor: Callable[[str], float] = lambda layer: 1.0  # less where a layer settles
        self._epoch = EpochTotals()
        self._samples = 0
        self._elapsed = 0.0
        self.sieve: SessionSieve | None = None
        self.sparse: Sparsifier | None = None
        self.counts_as_papers = False
        self.techniques = TechniqueCosts(self.flops(()), trainer.model, layers, batch_size)

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
        book.note_time(result.seconds, frozen=bool(frozen))
        book.monitor_seconds += monitor_seconds
        book.saved_bytes = self._measured.get(frozen)
        book.full_saved_bytes = self._measured.get(())
        self._count_techniques(len(batch), frozen, shares)
        for name, share in zip(self.board.names, shares, strict=True):
            self.frozen_steps[name] += name in frozen
            self.cached_steps[name] += max(0.0, 1 - share) if name in frozen else 0.0
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

    def _count_techniques(self, samples: int, frozen: Sequence[str], shares: Sequence[float]) -> None:
        sparse = self.sparse
        self.techniques.count(
            samples, frozen=frozen, shares=shares, sieved=self.sieve.sieved_share if self.sieve is not None else 0.0,
            version=sparse.version if sparse is not None else 0, sparse=None if sparse is None else sparse.costs,
        )  # fmt: skip

    def finish_epoch(self, number: int, step: int, valid_loss: float, valid_accuracy: float | None) -> EpochFinished:
        """Write down one finished epoch and answer with its event."""
        totals, self._epoch = self._epoch, EpochTotals()
        samples = totals.samples or float("nan")  # every batch of the pass may have been passed over
        event = EpochFinished(
            step=step, epoch=number, train_loss=totals.loss / samples,
            train_accuracy=totals.accuracy / samples, valid_loss=valid_loss,
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
        densities = {} if self.sparse is None else self.sparse.layer_densities(flops)
        rows = tuple(
            LedgerLayer(
                name=row.name, parameters=row.num_parameters, forward_flops=forward, backward_flops=backward,
                state=row.state, frozen_steps=self.frozen_steps[row.name], cached_steps=self.cached_steps[row.name],
                density=densities.get(row.name),
            )
            for row, forward, backward in zip(self.board, flops.forward, flops.backward, strict=True)
        )  # fmt: skip
        predicted = None
        prefix = self.board.prefix_length
        if self._full_saved_by_layer:
            # The first trained layer still needs its input, the output of the frozen front.
            boundary = self._boundary_bytes[prefix - 1] if prefix else 0
            predicted = float(sum(self._full_saved_by_layer[prefix:]) + boundary)
        run, memory = self.techniques.totals()
        sieve = None if self.sieve is None else self.sieve.figures()
        return Ledger(
            book=self.book, layers=rows, predicted_saved_bytes=predicted, floor=self.techniques.floor, sieve=sieve,
            run=run if sieve is not None or self.sparse is not None else None,
            sparsity=None if self.sparse is None else self.sparse.figures(flops),
            paper_memory=memory if self.counts_as_papers else None,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The running totals: plain values and arrays. FLOPs are counted again where they are asked for."""
        book = {field.name: getattr(self.book, field.name) for field in fields(self.book)}
        return {
            "book": {k: np.array(v, dtype=np.float64) if isinstance(v, list) else v for k, v in book.items()},
            "frozen_steps": dict(self.frozen_steps),
            "cached_steps": dict(self.cached_steps),
            "techniques": self.techniques.state_dict(),
            "counting_seconds": self.counting_seconds,
            "measured": [[list(frozen), size] for frozen, size in self._measured.items()],
            "full_saved_by_layer": list(self._full_saved_by_layer),
            "boundary_bytes": list(self._boundary_bytes),
            "newest_set": None if self._newest_set is None else list(self._newest_set),
            "epoch": asdict(self._epoch),
            "samples": self._samples,
            "elapsed": self._elapsed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from `state_dict`."""
        for name, value in state["book"].items():
            if hasattr(self.book, name):
                setattr(self.book, name, value.tolist() if isinstance(value, np.ndarray) else value)
        self.frozen_steps = {name: state["frozen_steps"][name] for name in self.board.names}
        self.cached_steps = {name: state["cached_steps"][name] for name in self.board.names}
        self.techniques.load_state_dict(state["techniques"])
        self.counting_seconds = state["counting_seconds"]
        self._measured = {tuple(frozen): size for frozen, size in state["measured"]}
        self._full_saved_by_layer = list(state["full_saved_by_layer"])
        self._boundary_bytes = list(state["boundary_bytes"])
        self._newest_set = None if state["newest_set"] is None else tuple(state["newest_set"])
        self._epoch = EpochTotals(**state["epoch"])
        self._samples, self._elapsed = state["samples"], state["elapsed"]

    def _append_rates(self, step: int) -> None:
        """The learning rate of each trained layer; a frozen one has none. Events tell the reason of each jump."""
        rates = {id(p): float(group["lr"]) for group in self.trainer.optimizer.param_groups for p in group["params"]}
        for index, layer in enumerate(self.layers):
            rate = next((rates[id(p)] for p in layer.parameters if id(p) in rates), None)
            factor = self.rate_factor(layer.name)
            self.history.rates.append(step=step, layer=index, learning_rate=None if rate is None else factor * rate)

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
