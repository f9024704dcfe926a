"""Freezing, thawing, sieving, events and the ledger for a training loop that somebody has written themselves.

The parts are those of a `Session`: the same rules, monitor, freezer and recorder. Only the forward pass, the backward
pass and the update stay in the loop; the learning rate is its own affair too. The file is one piece because it is a
public face: most of it is signatures and what they promise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from egeria_lab import commands as c
from egeria_lab.algorithms.freeze_policy import Plasticity, PlasticityPolicy
from egeria_lab.algorithms.freezing import Freezer
from egeria_lab.algorithms.ledger import Ledger
from egeria_lab.algorithms.sieving.settings import SieveSettings
from egeria_lab.config import Settings
from egeria_lab.data.loaders import Batch, BatchSource
from egeria_lab.data.sieved import KeptSampler
from egeria_lab.engine.budget import Budget
from egeria_lab.engine.layer_board import LayerBoard
from egeria_lab.engine.monitor import PlasticityMonitor
from egeria_lab.engine.optimizer_set import parts_of
from egeria_lab.engine.recorder import Recorder, StepRecord
from egeria_lab.engine.rules import FreezeSettings, make_rule
from egeria_lab.engine.schedules import Schedule as RateSchedule
from egeria_lab.engine.sieving import SessionSieve
from egeria_lab.engine.signals import sample_signals
from egeria_lab.engine.steering import Steering
from egeria_lab.engine.trainer import Forward, StepResult, Trainer
from egeria_lab.errors import CheckpointError, InvalidSettingError
from egeria_lab.events import Event, EventLog, Notice
from egeria_lab.history import History
from egeria_lab.integrations.kept import kept, put_back
from egeria_lab.integrations.loop_checks import (
    as_number,
    bad_loss_notice,
    batch_rows,
    check_model,
    check_no_sieve_arguments,
    check_plan,
    claim,
    loader_length,
    one_optimizer,
    release,
    two_samples,
)

__all__ = ["DEFAULT_STEPS", "LoopFreezer", "batch_rows"]

DEFAULT_STEPS = 10**9
"""Length of a loop that does not say; only schedules and shares of a plan look at it."""


class LoopFreezer:
    """Brings layer freezing to a training loop of your own; call `after_step` once an update.

    Three lines more than the loop had::

        freezer = LoopFreezer(model, optimizer, example=loader)         # 1: before the loop
        for batch in loader:
            ...                                                         #    forward, backward, optimizer.step()
            freezer.after_step(batch, loss)                             # 2: before the next zero_grad()
        freezer.savings(); freezer.close()                              # 3: look, and leave the model as it was

    Args:
        model: the model; layer modules are found by running `example` through it.
        optimizer: the optimizer, a list of several, or None when frozen parameters need only be cut from autograd.
        example: the `DataLoader`, of which two samples are looked at without drawing from its sampler; or one batch as
            it comes in the loop. Nothing about the model changes.
        freeze: `Plasticity`, `Schedule` (with ``block_lr="global"``), `GradientNorm`, or None to freeze by hand.
        forward: ``forward(model, batch) -> (outputs, targets)`` for batches that are no pair ``(inputs, targets)``.
        layers: names of the modules at whose outputs to cut; default: found by tracing.
        steps_per_epoch: updates in a pass; default: the length of the loader. `Plasticity` begins after the first one.
        total_steps: planned updates; a `Schedule` and a sieve need it.
        sieve: which samples to leave out; the loader then draws by `sampler`, and `after_step` is told the ids.
        dataset: the training set, for a sieve.
        batch_size: samples an update, for a sieve.
        park_state: as in `Freezer`.
        seed: of draws in readings, masks and the sieve.

    Attributes:
        layers: the table of layer modules and their states.
        events: what happened.
        history: the tables of numbers.
        sieve: which samples are kept.
        steps_done: updates so far.
        closed: True after `close`: nothing can be changed any more, everything can still be read.

    Raises:
        InvalidSettingError, LayerError, DataError: when model, optimizer, example and settings do not go together, and
            when another `LoopFreezer` of this model is open.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batch = torch.randn(8, 4), torch.randint(0, 2, (8,))
        >>> freezer = LoopFreezer(model, optimizer, example=batch, steps_per_epoch=3)
        >>> for _ in range(3):
        ...     loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        ...     optimizer.zero_grad(), loss.backward(), optimizer.step() and None
        ...     record = freezer.after_step(batch, loss)
        (None, None, None)
        (None, None, None)
        (None, None, None)
        >>> freezer.freeze("0").state, freezer.frozen, record.step
        ('done', ('0',), 3)
        >>> freezer.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        *,
        example: Any,
        freeze: FreezeSettings | None = Plasticity(),  # noqa: B008 - frozen, so sharing it is safe
        forward: Forward | None = None,
        layers: list[str] | None = None,
        steps_per_epoch: int | None = None,
        total_steps: int | None = None,
        sieve: SieveSettings | None = None,
        dataset: Any = None,
        batch_size: int | None = None,
        park_state: str = "keep",
        seed: int = 0,
    ) -> None:
        check_model(model)
        if isinstance(example, DataLoader):
            steps_per_epoch = loader_length(example) if steps_per_epoch is None else steps_per_epoch
            example = two_samples(example, seed)
        check_plan(freeze, sieve, steps_per_epoch, total_steps, dataset, batch_size)
        self.optimizer = one_optimizer(optimizer, model)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.trainer = Trainer(model, self.optimizer, loss=None, forward=forward, device=device, seed=seed)
        first = Batch(torch.arange(batch_rows(example)), example)
        self.layer_modules = self.trainer.find_layers(first, layers)
        self.events, self.layers = EventLog(), LayerBoard(self.layer_modules)
        self.history = History(self.layers.names)
        self.recorder = Recorder(self.trainer, self.layer_modules, self.layers, self.history, first, len(first))
        self.budget = Budget(steps_per_epoch or 1, total_steps or DEFAULT_STEPS)
        self._steps_per_epoch = steps_per_epoch
        self.sieve = SessionSieve(sieve, _source(dataset, batch_size, seed), seed)
        self.sieve.attach(self.history, self.events)
        self.recorder.sieve = self.sieve
        policy = PlasticityPolicy(self.layers.names, freeze) if isinstance(freeze, Plasticity) else None
        self.rule = make_rule(
            freeze, policy=policy, layers=self.layer_modules, recorder=self.recorder, events=self.events,
            budget=self.budget,
        )  # fmt: skip
        rates = RateSchedule(None, self.optimizer, self.budget)
        self.settings_book = Settings(freeze, rates.peak_rate, sieve)
        parts = {layer.name: (layer.modules, layer.parameters) for layer in self.layer_modules}
        self.freezer = Freezer(self.trainer.model, parts, self.optimizer, park_state=park_state)
        self._steering = Steering(self.layers, self.freezer, policy, self.settings_book, rates, self.events, self.rule)
        self._steering.owners["sieve"] = self.sieve.change
        self.steps_done = 0
        self._epochs_done = 0
        self._loss_was_bad = False
        self._last_state: dict[str, Any] | str | None = None
        self.closed = False
        claim(model, self)
        self._clock = time.perf_counter()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.layers.frozen)} of {len(self.layers)} layers frozen"
        return f"LoopFreezer({type(self.trainer.model).__name__}, {self.steps_done:,} updates, {state})"

    # --- in the loop -----------------------------------------------------------------------------------

    def after_step(
        self,
        batch: Any,
        loss: Tensor | float | None,
        *,
        accuracy: float | None = None,
        ids: Tensor | None = None,
        outputs: Any = None,
        targets: Any = None,
        losses: Tensor | None = None,
    ) -> StepRecord:
        """Look at one finished update: read plasticity when it is due, freeze and thaw, count what was saved.

        Call it after ``optimizer.step()`` and before the next ``zero_grad()``. The time of a step is that since the
        last call, loading included.

        Args:
            batch: what was trained on; of an accumulated update, any part of it.
            loss: its mean loss; None where it is not known. A loss that is not finite leaves a `Notice` event, one for
                a row of them: the update has been made by then.
            accuracy: share of right predictions, for the tables only.
            ids: with a sieve: sample ids of the batch, int64.
            outputs, targets: with a sieve that counts what is forgotten: class scores and labels of the batch.
            losses: with a `LossSieve`: the loss of each sample.

        Raises:
            TrainingError: when activations are not finite.
            DataError: for a batch without a sample.
            InvalidSettingError: when a sieve lacks what it needs, for what only a sieve takes where there is none, for
                a loss that is no number, and after `close`.
        """
        self._check_open("after_step")
        seconds = time.perf_counter() - self._clock
        value = float("nan") if loss is None else as_number("after_step(…): loss", loss)
        accuracy = None if accuracy is None else as_number("after_step(…): accuracy", accuracy)
        content = Batch(torch.arange(batch_rows(batch)), batch)
        self._tell_sieve(ids, outputs, targets, losses)
        self.steps_done += 1
        self._note_bad_loss(None if loss is None else value)
        rate, started = self._learning_rate, time.perf_counter()
        decisions = [] if self.rule is None else self.rule.after_step(
            content, step=self.steps_done, passes=self.epoch, loss=value, learning_rate=rate,
            board=self.layers, flops=self.recorder.flops(self.layers.frozen),
        )  # fmt: skip
        record = self.recorder.count_step(
            StepResult(value, accuracy, seconds, None), content, step=self.steps_done, epoch=self.epoch,
            learning_rate=rate, monitor_seconds=time.perf_counter() - started,
        )  # fmt: skip
        self._steering.carry_out(decisions, self.steps_done)
        self._clock = time.perf_counter()
        return record

    def after_epoch(self, valid_loss: float = float("nan"), valid_accuracy: float | None = None) -> None:
        """Count one pass; a guard looks at the accuracy, and a sieve exchanges samples when it is time.

        Raises:
            InvalidSettingError: for what is no number, and after `close`.
        """
        self._check_open("after_epoch")
        valid_loss = as_number("after_epoch(…): valid_loss", valid_loss)
        if valid_accuracy is not None:
            valid_accuracy = as_number("after_epoch(…): valid_accuracy", valid_accuracy)
        finished, self._epochs_done = self._epochs_done, self._epochs_done + 1
        self.sieve.finish_pass(finished, self.steps_done, self.budget.total_steps)
        event = self.recorder.finish_epoch(self._epochs_done, self.steps_done, valid_loss, valid_accuracy)
        self.events.append(event)
        if self.rule is not None:
            self._steering.carry_out(self.rule.after_evaluation(valid_accuracy, self.layers), self.steps_done)
        self._clock = time.perf_counter()

    @property
    def sampler(self) -> KeptSampler:
        """For ``DataLoader(dataset, sampler=freezer.sampler)``: draws what the sieve keeps."""
        return KeptSampler(self.sieve._sieve, self.trainer.seed)

    @property
    def epoch(self) -> float:
        """Passes so far."""
        by_steps = self.steps_done / self._steps_per_epoch if self._steps_per_epoch else 0.0
        return by_steps or float(self._epochs_done)

    # --- steering and looking --------------------------------------------------------------------------

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of frozen layers, front to back."""
        return self.layers.frozen

    def freeze(self, layer: str) -> c.Receipt:
        """Stop training a layer module, completely, from the next update on."""
        return self._land(c.FreezeLayer(layer=self.layers[layer].name))

    def thaw(self, layer: str) -> c.Receipt:
        """Train a frozen layer module again, exactly where it had been left."""
        return self._land(c.ThawLayer(layer=self.layers[layer].name))

    def pin(self, layer: str) -> c.Receipt:
        """Forbid the rule to freeze a layer module."""
        return self._land(c.PinLayer(layer=self.layers[layer].name))

    def unpin(self, layer: str) -> c.Receipt:
        """Allow the rule to freeze a layer module again."""
        return self._land(c.UnpinLayer(layer=self.layers[layer].name))

    def override(self, name: str, value: Any, layer: str | None = None) -> c.Receipt:
        """Give a setting of the rule or the sieve a new value, for all layers or for one."""
        self._check_open("override")
        self.settings_book.check(name, value, layer)
        return self._land(c.Override(name=name, value=value, layer=layer))

    def savings(self) -> Ledger:
        """The ledger: FLOPs and time, theoretical and measured. Memory is not measured in a loop of your own."""
        ledger = self.recorder.ledger()
        if isinstance(self.rule, PlasticityMonitor):
            worker, waited = self.rule.worker_seconds, self.rule.waited_seconds
            ledger = replace(ledger, worker_seconds=worker, waited_seconds=waited)
        return ledger

    def subscribe(self, callback: Callable[[Event], None], event: type[Event] | None = None) -> Callable[[], None]:
        """Call `callback` with each new event (of one kind); returns a function that ends it."""
        return self.events.subscribe(callback, event)

    # --- keeping ---------------------------------------------------------------------------------------

    def whole_optimizer_state(self) -> dict[str, Any]:
        """``optimizer.state_dict()`` as it would be with nothing frozen, so that any loop can load it.

        Save it in place of the optimizer's own, beside `state_dict`; to go on, load it into a fresh optimizer first.
        """
        return self.freezer.whole_optimizer_state()

    def whole_optimizer_states(self) -> list[dict[str, Any]]:
        """As `whole_optimizer_state`, one for each of several optimizers."""
        return self.freezer.whole_optimizer_states(parts_of(self.optimizer))

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next, as text and tensors: `torch.load` needs no pickle for it.

        Optimizer state of frozen layers lies in `whole_optimizer_state`. After `close` it is the state
        from right before it, with what was frozen then.

        Raises:
            CheckpointError: after `close`, when the state could not be read then.
        """
        if isinstance(self._last_state, str):
            raise CheckpointError(
                f"the state could not be read when this LoopFreezer was closed: {self._last_state} Save it before "
                "close()."
            )
        if self._last_state is not None:
            return dict(self._last_state)
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        parts["freezer"] = self.freezer.state_dict(optimizer_state=False)
        return kept({"steps": self.steps_done, "epochs": self._epochs_done, "parts": parts})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`: what was frozen is frozen again, with the state that the optimizer holds for it.

        Raises:
            CheckpointError, LayerError: when the state is none of ours, or that of another model.
            InvalidSettingError: after `close`.
        """
        self._check_open("load_state_dict")
        tree = put_back(state)
        self.freezer.load_state_dict(tree["parts"]["freezer"])
        for name, part in self._parts().items():
            if name in tree["parts"]:
                part.load_state_dict(tree["parts"][name])
        self.steps_done, self._epochs_done = tree["steps"], tree["epochs"]
        self._clock = time.perf_counter()

    def close(self) -> None:
        """Thaw everything and leave nothing of ours in the model; what was recorded stays readable. Twice is once."""
        if self.closed:
            return
        try:  # a checkpoint may be written after training has ended, when the rule's worker is gone
            self._last_state = self.state_dict()
        except Exception as error:  # closing may not depend on it
            self._last_state = f"{error}"
        self.closed = True
        release(self.trainer.model, self)
        self._steering.close(self.steps_done)
        if self.rule is not None:
            self.rule.close()

    # --- inside ----------------------------------------------------------------------------------------

    @property
    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _check_open(self, call: str) -> None:
        if self.closed:
            raise InvalidSettingError(
                f"{call}(): this LoopFreezer is closed, and its layers train again; build a new one to go on."
            )

    def _note_bad_loss(self, loss: float | None) -> None:
        message = None if loss is None else bad_loss_notice(loss, self.steps_done)
        if message is not None and not self._loss_was_bad:
            self.events.append(Notice(step=self.steps_done, message=message))
        self._loss_was_bad = message is not None

    def _land(self, command: c.Command) -> c.Receipt:
        names = {c.FreezeLayer: "freeze", c.ThawLayer: "thaw", c.PinLayer: "pin", c.UnpinLayer: "unpin"}
        self._check_open(names.get(type(command), "override"))
        receipt = c.Receipt(command)
        self._steering.land(receipt, self.steps_done)
        return receipt

    def _parts(self) -> dict[str, Any]:
        known = {
            "settings": self.settings_book, "sieve": self.sieve, "board": self.layers, "recorder": self.recorder,
            "history": self.history, "events": self.events, "rule": self.rule,
        }  # fmt: skip
        return {name: part for name, part in known.items() if part is not None}

    def _tell_sieve(self, ids: Tensor | None, outputs: Any, targets: Any, losses: Tensor | None) -> None:
        if self.sieve.settings is None:
            check_no_sieve_arguments(ids=ids, outputs=outputs, targets=targets, losses=losses)
        if not self.sieve.needs:
            return
        if ids is None:
            raise InvalidSettingError(
                "the sieve must know which samples were trained on: give after_step(…, ids=…), for example from a data "
                "set that gives the index of each sample beside it."
            )
        rows = torch.empty(0) if losses is None else losses
        signals = sample_signals(outputs, targets, rows, len(ids))
        self.sieve.check(signals)
        self.sieve.observe(Batch(torch.as_tensor(ids).cpu(), None), signals)


def _source(dataset: Any, batch_size: int | None, seed: int) -> BatchSource:
    data = dataset if dataset is not None else [0]  # without a sieve nobody asks for a sample
    return BatchSource(data, batch_size or 1, seed=seed)
