"""`Session`: one model, its data and its freezing rule, trained step by step and steered while it trains.

The order of things inside a step is `Session.advance`; everything it calls lives in a file of its own.
The file is one piece because it is the public face: most of it is signatures and what they promise.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria_lab import commands as c
from egeria_lab.algorithms.costs import StepFlops
from egeria_lab.algorithms.decision import Decision
from egeria_lab.algorithms.freeze_policy import Plasticity, PlasticityPolicy
from egeria_lab.algorithms.freeze_schedule import Schedule as FreezeSchedule
from egeria_lab.algorithms.ledger import Ledger
from egeria_lab.algorithms.sieving.settings import SieveSettings
from egeria_lab.algorithms.sparse.settings import SparsitySettings
from egeria_lab.algorithms.what_if import what_if
from egeria_lab.algorithms.what_if_record import WhatIf
from egeria_lab.config import Setting, Settings
from egeria_lab.data.activation_cache import ActivationCache
from egeria_lab.data.loaders import Batch, Views
from egeria_lab.data.stream_source import source_for
from egeria_lab.engine import assembly, forking, replaying, saving, streaming
from egeria_lab.engine.bad_loss import BadLossGuard
from egeria_lab.engine.budget import Budget
from egeria_lab.engine.building import build_model, check_arguments, checked_sample_ids, load_data
from egeria_lab.engine.command_log import CommandLog
from egeria_lab.engine.devices import choose_device
from egeria_lab.engine.fair_lock import FairLock
from egeria_lab.engine.interrupts import interrupts_held, interrupts_let_through
from egeria_lab.engine.layer_board import LayerBoard
from egeria_lab.engine.memory_guard import MemoryGuard
from egeria_lab.engine.model_state import placed
from egeria_lab.engine.monitor import PlasticityMonitor
from egeria_lab.engine.passes import Passes
from egeria_lab.engine.progress import ProgressBar
from egeria_lab.engine.ranks import BEAT_SECONDS
from egeria_lab.engine.recorder import Recorder, StepRecord
from egeria_lab.engine.rules import FreezeSettings, make_rule
from egeria_lab.engine.run_config import RunConfig, arguments_from, config_of
from egeria_lab.engine.run_file import read_config
from egeria_lab.engine.runner import Runner
from egeria_lab.engine.saving import KEEP_CHECKPOINTS, SAVE_EVERY_MINUTES, Autosave
from egeria_lab.engine.schedules import make_optimizer
from egeria_lab.engine.sieving import SessionSieve
from egeria_lab.engine.steering_calls import SteeringCalls
from egeria_lab.engine.trainer import Forward, Loss, StepResult, Trainer
from egeria_lab.engine.undo import UNDO_BYTES, UndoRing
from egeria_lab.engine.what_if_data import RunSource
from egeria_lab.errors import InvalidSettingError, require, unknown_name
from egeria_lab.events import Event, EventLog, Notice, Recompiled, Scalar
from egeria_lab.history import History
from egeria_lab.presets import PRESETS

DEFAULT_EPOCHS = 20
EXAMPLE_ROWS = 2
INNER_NAMES = {
    "advance", "bad_loss", "beat", "budget", "come_to_rest", "command_log", "commands", "describe_run", "finish_pass",
    "land_commands", "land_if_alone", "policy", "ranks", "recorder", "rule", "run_ended", "schedule", "settings_book",
    "trainer",
}  # fmt: skip
"""What other modules use of a session, and nobody should meet in a notebook's list of completions."""
MOST_ROUNDS = 100
"""Of landing commands at rest: a subscriber that answers every event with a command must not go on for ever."""


class Session(SteeringCalls):
    """Trains a model step by step while its layers freeze by measured plasticity.

    Args:
        model: a module, or a name in `egeria_lab.models.names()`.
        data: `Data`, a name in `egeria_lab.data.names()`, or a pair ``(train, valid)`` of map-style data sets, of
            `DataLoader`s, or of streams (`egeria_lab.data.streams`): an `IterableDataset`, an iterable of batches, or
            a function that returns an iterator of batches. With a stream, what goes by sample ids is refused.
        loss: ``loss(outputs, targets)`` → scalar or one value per sample; default: cross-entropy.
        forward: ``forward(model, batch) -> (outputs, targets)`` for batches that are no pair.
        optimizer: ``"sgd"``, ``"adam"``, ``"adamw"``, an `Optimizer` or a function of the parameters that makes one;
            or a list of several, which step together.
        scheduler: ``"cosine"``, ``"step"``, ``"linear"``, ``"constant"``, a function of the optimizer, None; several
            optimizers may have a list of as many.
        lr: peak learning rate; None for 0.1 with SGD, 1e-3 with Adam and AdamW.
        batch_size: samples a step; loaders bring their own.
        accumulate: batches a step, >= 1: their gradients are added up for one update. A step is the whole window, so
            pausing, saving and commands fall between windows; a pass ends with the batches that are left.
        epochs: planned passes over the training data, > 0; None for 20.
        steps: the plan in steps, >= 1, in place of `epochs`; a stream that does not tell its length needs it.
        steps_per_epoch: steps after which a pass over a stream is over although it goes on; None: when it ends.
        seed: decides initial weights (of models by name), order and draws inside the model.
        freeze: `Plasticity`, `Schedule` or `GradientNorm`; None to freeze by hand only.
        sieve: `CirculantSieve`, `RandomSieve`, `OneShotSieve` or `LossSieve`; None trains on every sample.
        sparsity: `MEST`, `SET`, `RigL` or `StaticSparsity`; None trains every weight.
        layers: names of the modules at whose outputs to cut, front to back; default: found by tracing.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:N"``.
        precision: ``"auto"`` and ``"fp32"`` train in float32, ``"bf16"`` and ``"fp16"`` under autocast.
        channels_last: keep the weights of 2-d convolutions with their channels innermost, which they are often faster
            with: × 1.4 to × 1.6 for a step of ResNet-8 on one thread of a CPU with AVX2. Rounds otherwise.
        max_grad_norm: clip the gradient norm of active parameters, or None.
        ema: decay of a running average of the weights, in (0, 1), or None for none; see
            `egeria_lab.engine.averaging.WeightAverage`, also for `ema_buffers` (``"copy"`` or ``"average"``).
        park_state: optimizer state of frozen layers: ``"keep"``, ``"cpu"`` or ``"drop"``.
        scheduler_every: ``"auto"``, ``"step"`` or ``"epoch"``; see `egeria_lab.engine.schedules.Schedule`.
        cache: keep the outputs of the frozen front, so that its forward pass is skipped too, or None.
        augment: `Augment` or `Replayable`: augmentations that can be replayed, for training batches.
        deterministic: deterministic algorithms on a GPU, and no load gate for readings.
        distributed: train as one of several ranks (`torchrun`); ``"auto"``: when the process was started as one.
            `batch_size` is that of the global batch.
        paused: begin paused: `start` waits for `resume`, so that a dashboard can be set up first.
        run_dir: directory to save into while training: checkpoints, and a journal of everything between them.
        save_every_steps, save_every_minutes: how often, or None; the end of the plan and `close` are saved as well.
        keep_checkpoints: how many stay.
        undo_bytes: memory for `undo`, 0 for none.
        cluster: an `ipyparallel.Cluster` or `Client`: train on its engines, each of them one rank.
        on_bad_loss: ``"stop"``, ``"skip"`` or ``"roll_back"`` when a loss is NaN or infinite; see
            `egeria_lab.engine.bad_loss.BadLossGuard`.

    Raises:
        UnknownNameError, InvalidSettingError, DataError, LayerError: before anything is trained.

    Example:
        >>> session = Session("mlp", "digits", epochs=1)
        >>> session.step(2).step, session.freeze("layers.0").state, session.step().frozen
        (2, 'done', ('layers.0',))
    """

    layers: LayerBoard

    def __new__(cls, *arguments: Any, cluster: Any = None, **options: Any) -> Any:
        """With ``cluster=`` the session runs on the engines of an ipyparallel cluster, and this is its face here."""
        if cluster is None:
            return super().__new__(cls)
        given = dict(zip(("model", "data"), arguments, strict=False)) | options
        return _on_cluster(cluster, "make", given)

    def __init__(
        self,
        model: nn.Module | str = "resnet8",
        data: Any = "fashion-mini",
        *,
        loss: Loss | None = None,
        forward: Forward | None = None,
        optimizer: str | Optimizer | Sequence[Optimizer] | Callable[..., Any] = "sgd",
        scheduler: Any = "cosine",
        lr: float | None = None,
        batch_size: int = 128,
        accumulate: int = 1,
        epochs: float | None = None,
        steps: int | None = None,
        steps_per_epoch: int | None = None,
        seed: int = 0,
        freeze: FreezeSettings | None = Plasticity(),  # noqa: B008 - frozen, so sharing it is safe
        sieve: SieveSettings | None = None,
        sparsity: SparsitySettings | None = None,
        layers: list[str] | None = None,
        device: str | torch.device = "auto",
        precision: str = "auto",
        channels_last: bool = False,
        max_grad_norm: float | None = None,
        ema: float | None = None,
        ema_buffers: str = "copy",
        park_state: str = "keep",
        scheduler_every: str = "auto",
        cache: ActivationCache | None = None,
        augment: Views | None = None,
        deterministic: bool = False,
        distributed: bool | str = "auto",
        paused: bool = False,
        run_dir: str | Path | None = None,
        save_every_steps: int | None = None,
        save_every_minutes: float | None = SAVE_EVERY_MINUTES,
        keep_checkpoints: int = KEEP_CHECKPOINTS,
        undo_bytes: int = UNDO_BYTES,
        cluster: Any = None,
        on_bad_loss: str = "stop",
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "cluster")}
        check_arguments(
            batch_size, epochs, seed, freeze, cache, augment, layers, sieve, sparsity, accumulate,
            deterministic=deterministic, paused=paused, channels_last=channels_last,
        )  # fmt: skip
        self.device = choose_device(device)
        self.data, train, valid = load_data(data)
        self.seed = seed
        self._train_source, self._valid_source = streaming.make_sources(train, valid, **self._arguments)
        self.model = placed(build_model(model, self.data, seed), self.device, channels_last=channels_last)
        self.name = f"{model if isinstance(model, str) else type(model).__name__} on {self.data.name}"
        self.optimizer = make_optimizer(optimizer, self.model, lr)
        full_steps = self._train_source.steps_per_epoch
        self.sieve = SessionSieve(sieve, self._train_source, seed)
        self._passes = Passes(self._train_source)
        total_steps = steps or self.sieve.planned_steps(epochs or DEFAULT_EPOCHS, full_steps)
        self.budget = Budget(self._train_source.steps_per_epoch, total_steps, decided=bool(epochs or steps))
        self.trainer = Trainer(
            self.model, self.optimizer, loss=loss, forward=forward, device=self.device,
            precision=precision, max_grad_norm=max_grad_norm, seed=seed, augment=augment,
            deterministic=deterministic,
        )  # fmt: skip
        self.model = self.trainer.model
        self.trainer.keep_average(ema, ema_buffers)
        self.layer_modules = self.trainer.find_layers(self._train_source.example(EXAMPLE_ROWS), layers)
        self.events = EventLog()
        self.trainer.watch.tell = lambda message: self.events.append(Notice(step=self._steps_done + 1, message=message))
        self.commands = c.CommandQueue()
        self.history = History(self.layer_modules.names)
        self.layers = LayerBoard(self.layer_modules)
        self.recorder = Recorder(
            self.trainer,
            self.layer_modules,
            self.layers,
            self.history,
            self._train_source.example(EXAMPLE_ROWS),
            self._train_source.batch_size,
        )
        self.policy = PlasticityPolicy(self.layers.names, freeze) if isinstance(freeze, Plasticity) else None
        self.sieve.attach(self.history, self.events)
        self.trainer.check_signals = self.sieve.check if self.sieve.needs else None
        self.trainer.sample_weights = self.sieve.weights if self.sieve.reweights else None
        self.sparse = assembly.make_sparse(self, sparsity)
        self.recorder.sieve, self.recorder.sparse = self.sieve, self.sparse
        self.recorder.counts_as_papers = any((sieve, sparsity, isinstance(freeze, FreezeSchedule)))
        if self.policy is not None:
            self.policy.together = self.trainer.compiled is not None
        self.rule = make_rule(
            freeze, policy=self.policy, layers=self.layer_modules, recorder=self.recorder,
            events=self.events, budget=self.budget, deterministic=deterministic,
            density_at=None if self.sparse is None else self.sparse.density_at(self.recorder.flops(())),
        )  # fmt: skip
        self.cache = assembly.make_cache(self, cache)
        self.schedule = assembly.make_schedule(self, scheduler, scheduler_every)
        self.settings_book = Settings(freeze, self.schedule.peak_rate, sieve)
        self._steering = assembly.make_steering(self, park_state)
        self._record = RunSource(
            self.history, self.events, self.settings_book, self.recorder.flops(()),
            together=self.trainer.compiled is not None,
        )  # fmt: skip
        self._runner = Runner(self, paused=paused)
        self._lock = FairLock(self.come_to_rest)  # a command may have come while, say, `save` had the lock
        self._closed = False
        self._steps_done = 0
        self._view: Any = None
        self._busy = False
        self._pass_owed = False
        self._graphs = 0
        self.command_log = CommandLog()
        self._undo_ring = UndoRing(self, undo_bytes)
        self.bad_loss = BadLossGuard(self, on_bad_loss)
        self._memory_guard = MemoryGuard(self)
        streaming.follow(self._train_source, self.budget, self.events, freeze, lambda: self._steps_done)
        self.ranks = assembly.make_ranks(self, distributed)
        self._autosave = None if run_dir is None or not self.is_first_rank else Autosave(
            self, run_dir, every_steps=save_every_steps, every_minutes=save_every_minutes, keep=keep_checkpoints
        )  # fmt: skip
        self.commands.on_put(self._on_command)

    # --- driving -------------------------------------------------------------------------------------

    def step(self, n: int = 1) -> StepRecord:
        """Train `n` steps in this thread and return the record of the last one.

        Raises:
            TrainingError: when the budget is used up, or the loss is not finite (the step is not applied).
        """
        require(isinstance(n, int) and n >= 1, "Session.step", "n", n, "a whole number >= 1")
        self._check_open()
        for _ in range(n):
            self._runner.check_free()
            record = self.advance()
        return record

    def advance(self) -> StepRecord:
        """One step: the only place where training state changes. Called by `step` and by the runner."""
        with interrupts_held(), self._lock, self._uninterrupted():
            if self._pass_owed:  # the last step was made, and what follows the end of a pass failed
                self.finish_pass()
            self.land_commands("step")
            batch, result, rate = self.bad_loss.step(self._try_batch)
            if self.ranks is not None:
                self.ranks.torn = True  # until the step is written down: half of one may not be saved
            self._steps_done = number = self._steps_done + 1
            self._pass_owed = pass_is_over = self._passes.step_made()
            self.schedule.after_step()
            self._announce_graphs(result.new_graphs)
            shares = self.cache.computed_shares() if self.cache is not None else None
            if self.ranks is not None:
                batch, result, shares = self.ranks.whole(batch, result, shares)
            self.sieve.observe(batch, result.signals)
            if self.sparse is not None:
                self.sparse.finish_step(number, self.history, self.events)
            watched = time.perf_counter()
            flops = self.recorder.flops(self.layers.frozen)
            try:
                decisions = self._consult_rule(batch, result.loss, rate, flops)
            finally:  # also when the rule fails: the step was made
                record = self.recorder.count_step(
                    result, batch, step=number, epoch=self.epoch, learning_rate=rate,
                    monitor_seconds=time.perf_counter() - watched, forward_shares=shares,
                )  # fmt: skip
            self._steering.carry_out(decisions, number)
            if pass_is_over:
                self.finish_pass()
            self.bad_loss.after_step(pass_is_over)
            if self.ranks is not None:
                self.ranks.torn = False
            if self._autosave is not None:
                self._autosave.after_step()
            return record

    def run(
        self,
        steps: int | None = None,
        *,
        epochs: float | None = None,
        until: Callable[[StepRecord], bool] | None = None,
        progress: bool = True,
    ) -> StepRecord | None:
        """Train in this thread with a progress bar, up to the plan's end or for so many steps or epochs.

        While it runs, a notebook kernel is busy: controls answer when it returns (use `start` for live
        controls). Ctrl-C, or the kernel's stop button, pauses cleanly; `run` or `resume` goes on.

        Raises:
            Exception: whatever a failing step raised; history is kept.
        """
        self._check_open()
        target = self.budget.target(self._steps_done, steps, epochs)
        last: list[StepRecord] = []
        with ProgressBar(target - self._steps_done, progress, self.name) as show:

            def on_step(record: StepRecord) -> None:
                last[:] = [record]
                show(record)

            self._runner.run_here(target, until, on_step)
        return last[0] if last else None

    def start(self, epochs: float | None = None, *, steps: int | None = None) -> None:
        """Train in the background and return at once; `dashboard` is live meanwhile.

        Args:
            epochs: so many passes from here; default: to the end of the plan. A longer budget than planned
                lengthens the plan. The first call decides the plan when the session was made without one.
            steps: the same in steps.
        """
        self._check_open()
        self._runner.start(self.budget.target(self._steps_done, steps, epochs))

    def pause(self) -> None:
        """Stand still at the next step boundary and keep everything; `resume` goes on."""
        self._runner.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._runner.resume()

    def stop(self) -> None:
        """End cleanly at the next step boundary; the model is usable and `start` would go on."""
        self._runner.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the background run has ended; False when `timeout` seconds passed first.

        Raises:
            Exception: whatever the failed run raised.
        """
        return self._runner.wait(timeout)

    async def run_async(self, epochs: float | None = None, *, steps: int | None = None) -> bool:
        """Train in the background and wait without blocking the kernel: ``await session.run_async()``."""
        self.start(epochs, steps=steps)
        return await self._runner.wait_async()

    def evaluate(self, data: Any = None, *, ema: bool = False) -> dict[str, float | None]:
        """Loss and accuracy in eval mode; nothing about training changes.

        Args:
            data: a map-style data set, a loader or a stream that ends; default: the validation set.
            ema: evaluate the running average of the weights; the table of epochs always has the weights themselves.
        """
        source = self._valid_source if data is None else source_for(data, 256, seed=self.seed)
        with self._lock, source.unshared():  # asked for on this rank alone
            loss, accuracy = self.trainer.evaluate(source, average=ema, alone=True)
        return {"loss": loss, "accuracy": accuracy}

    @property
    def state(self) -> str:
        """``"idle"``, ``"running"``, ``"paused"``, ``"stopped"``, ``"finished"`` or ``"failed"``."""
        stepped_to_the_end = self._runner.state == "idle" and self._steps_done >= self.planned_steps
        return "finished" if stepped_to_the_end else self._runner.state

    @property
    def error(self) -> BaseException | None:
        """What the last background or blocking run raised, or None."""
        return self._runner.error

    @property
    def is_first_rank(self) -> bool:
        """True on the rank that decides, saves and shows; always in a single process."""
        return self.ranks is None or self.ranks.group.is_first

    @property
    def steps_done(self) -> int:
        """Finished steps."""
        return self._steps_done

    @property
    def planned_steps(self) -> int:
        """Step at which the plan ends."""
        return self.budget.total_steps

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the training data."""
        return self._train_source.steps_per_epoch

    @property
    def epoch(self) -> float:
        """Passes over the training data so far."""
        return self._passes.done

    @property
    def undo_ring(self) -> UndoRing:
        """What `undo` and `redo` would take back; read it, and change it by these two only."""
        return self._undo_ring

    # --- keeping ---------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write everything that decides the future to one file, whole or not at all; `load` goes on from it.

        Raises:
            CheckpointError: when it cannot be written; what was there before is untouched.
        """
        return saving.save(self, path)

    @classmethod
    def load(cls, path: str | Path, *, model: nn.Module | None = None, data: Any = None, **changes: Any) -> Session:
        """Go on from a checkpoint, or from the newest whole one of a run directory, bit for bit as if never stopped.

        Args:
            path: the file or the directory.
            model: your model, built as it was, when the checkpoint's was no model by name.
            data: your data, when the checkpoint's were no data by name.
            changes: arguments that take the place of those that the session was made with: ``device=``, objects of
                your own (``loss=``, ``forward=``), ``run_dir=`` …; the state that does not fit is named in
                a `CheckpointLoaded` event.

        Raises:
            CheckpointError: when it cannot be read or does not fit, or something must be given again.
        """
        if changes.get("cluster") is not None:
            given = {"path": str(path), "model": model, "data": data, **changes}
            remote: Session = _on_cluster(given.pop("cluster"), "load", given)
            return remote
        session: Session = saving.load(cls, path, model=model, data=data, **changes)
        return session

    @property
    def config(self) -> RunConfig:
        """The arguments this session was made with: a mapping that writes itself, ``session.config.write("run.toml")``.

        What was changed since is in `events` and `settings`; objects of your own are named, to be given again.
        """
        return config_of(type(self), self._arguments)

    @classmethod
    def from_config(cls, config: str | Path | RunConfig, **changes: Any) -> Session:
        """Build a session from a TOML file, or from another session's `config`.

        Args:
            config: path of the file. Keys are the arguments of `Session`; settings are tables with ``kind =`` a class
                name; ``preset = "spfde"`` (or a table with ``name =``) brings those of `egeria_lab.presets`. Relative
                paths start at the file's folder and may not leave it.
            changes: arguments that take the place of those in the file, objects of your own among them.

        Raises:
            UnknownNameError: for an unknown key, class or setting, with the nearest one.
            InvalidSettingError: for a file that cannot be read, a value out of range, an object of your own that is
                not given, or a path that leads out of the file's folder.

        Example:
            >>> session = Session("mlp", "digits", epochs=1, freeze=Plasticity(tolerance=0.3))
            >>> again = Session.from_config(session.config, seed=1)
            >>> again.config["freeze"].tolerance, again.seed
            (0.3, 1)
        """
        found = config if isinstance(config, RunConfig) else read_config(cls, config, PRESETS)
        return cls(**arguments_from(cls, found, changes))

    def fork(self, **changes: Any) -> Session:
        """An independent copy from this very step, with its own model, optimizer and rule; this one goes on untouched.

        Args:
            changes: arguments that are to be others in the copy.
        """
        second: Session = forking.fork(self, type(self), **changes)
        return second

    def export(self, *, ema: bool = False) -> forking.Exported:
        """The plain model and its `state_dict`, which loads into the bare architecture with ``strict=True``.

        Args:
            ema: the running average of the weights in place of the weights.
        """
        return forking.export(self, ema=ema)

    # --- looking ---------------------------------------------------------------------------------------

    def explain(self, layer: str) -> str:
        """One sentence with the numbers: why the layer is frozen, or what it still lacks."""
        row = self.layers[layer]
        if row.frozen:
            return f"{layer} is frozen since step {row.since_step} by {row.by}: {row.reason}."
        pinned = " It is pinned, so no rule may freeze it." if row.pinned else ""
        if self.rule is None:
            return f"{layer} is trained; this session has no freezing rule, only freeze() by hand.{pinned}"
        return f"{layer} is trained: {self.rule.explain(layer, self.layers)}.{pinned}"

    def what_if(
        self, settings: Plasticity | None = None, *, tolerances: Mapping[str, float] | None = None, **changes: Any
    ) -> WhatIf:
        """What other settings of the plasticity rule would have frozen, and when: recorded readings are replayed.

        Nothing is trained. The result says up to which step it is exact, and why no further.

        Args:
            settings: the settings to try; default: those that hold now.
            tolerances: layer → its own tolerance.
            changes: single settings in place of those in `settings`, such as ``tolerance=0.4``.

        Raises:
            InvalidSettingError: when this session has another rule or none, or a value is out of range.

        Example:
            >>> session = Session("mlp", "digits", epochs=2, freeze=Plasticity(interval_steps=2))
            >>> _ = session.step(20)
            >>> session.what_if(tolerance=0.5).changes
            {'tolerance': 0.5}
        """
        return what_if(self._record.latest(), settings, tolerances=tolerances, **changes)

    def attribute(
        self,
        samples: Any,
        targets: Any = None,
        *,
        method: str = "integrated_gradients",
        state: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> Any:
        """What the model looks at in some samples, by Captum, on the live model between two steps; leaves no trace.

        Args:
            samples: ids of training samples, or inputs of shape ``(b, …)``.
            targets: classes to explain, shape ``(b,)``; default: the labels of the ids, or the predicted classes.
            method: a name in `egeria_lab.interpret.attribution.METHODS`.
            state: an earlier `state_dict` of the model, to see what it looked at then.
            options: further arguments of `egeria_lab.interpret.attribution.attribute`, such as ``layer=``.

        Raises:
            UnknownNameError, InvalidSettingError, DataError: as `egeria_lab.interpret.attribution.attribute`.
        """
        find = importlib.import_module("egeria_lab.interpret.attribution").attribute
        weights_of = importlib.import_module("egeria_lab.interpret.earlier").weights_of
        known = [name for name in inspect.signature(find).parameters if name not in ("model", "inputs", "layers")]
        for name in options:
            if name not in known:
                raise unknown_name("option of attribute", name, known)
        if not isinstance(samples, Tensor) or samples.dim() == 1:
            samples, own = self.sieve.batch(checked_sample_ids("attribute", samples))
            targets = own if targets is None else targets
        with self._lock, weights_of(self.model, state):
            inputs = samples.to(self.device)
            return find(self.model, inputs, targets, method=method, layers=self.layer_modules, **options)

    def settings(self) -> list[Setting]:
        """Every setting that may change mid-run, with its value, range and when a change applies."""
        return self.settings_book.list()

    def setting(self, name: str, layer: str | None = None) -> Scalar:
        """What a setting is now, for all layers or for one."""
        return self.settings_book.value(name, layer)

    def savings(self) -> Ledger:
        """The ledger: FLOPs, time and memory, theoretical and measured, each with its reason."""
        ledger = self.recorder.ledger()
        if isinstance(self.rule, PlasticityMonitor):
            worker, waited = self.rule.worker_seconds, self.rule.waited_seconds
            ledger = replace(ledger, worker_seconds=worker, waited_seconds=waited)
        if self.ranks is not None:
            ledger = replace(ledger, exchange=self.ranks.figures())
        return ledger if self.cache is None else replace(ledger, cache=asdict(self.cache.statistics))

    def subscribe(self, callback: Callable[[Event], None], event: type[Event] | None = None) -> Callable[[], None]:
        """Call `callback` with each new event (of one kind); returns a function that ends it.

        A logger of `egeria_lab.integrations.loggers` writes the history too, from the first step on.
        """
        follow: Callable[..., Callable[[], None]] | None = getattr(callback, "follow", None)
        return follow(self, event) if follow is not None else self.events.subscribe(callback, event)

    def dashboard(self) -> Any:
        """The live dashboard, before, during and after training; show it as a cell's last line.

        One for each session: asked again, it is the same one until it is closed, with one more view.
        """
        if self._view is None or self._view.comm is None:
            self._view = importlib.import_module("egeria_lab.dashboard.app").Dashboard(self)
        return self._view

    def report(self, path: str | Path = "report.html") -> Path:
        """Write one self-contained offline page with the same pictures; returns its path."""
        written: Path = importlib.import_module("egeria_lab.dashboard.report").write_report(self, path)
        return written

    def close(self) -> None:
        """Stop, thaw everything and leave nothing of ours in the model; what was recorded can still be read."""
        self._runner.shut_down()
        with self._lock:
            self._closed = True
            if self._autosave is not None:
                self._autosave.close(save=self.ranks is None or not self.ranks.torn)
            self._passes.read_again()  # ends the processes that read ahead
            self._train_source.close()
            self._steering.close(self._steps_done)
            if self.ranks is not None:
                self.ranks.close()
            if self.rule is not None:
                self.rule.close()
            if self.cache is not None:
                self.cache.close()
            if self.sparse is not None:
                self.trainer.update_hooks = None
                self.sparse.close()

    def __repr__(self) -> str:
        frozen = len(self.layers.frozen)
        return (
            f"Session({self.name}, {self.state}, step {self._steps_done:,} of {self.planned_steps:,}, "
            f"{frozen} of {len(self.layers)} layers frozen)"
        )

    def __str__(self) -> str:
        return f"{self!r}\n{self.layers!r}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{self.layers._repr_html_()}"

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - INNER_NAMES)

    # --- inside ----------------------------------------------------------------------------------------

    def _try_batch(self) -> tuple[Batch, StepResult, float]:
        """Train on the next batch; where that raises, nothing has changed. Answers with the learning rate as well."""
        self.budget.check_left(self._steps_done)
        number, rate = self._steps_done + 1, self.schedule.learning_rate
        self._steering.freezer.hold()
        if self.sparse is not None:
            self.sparse.begin_step(number)
        together: AbstractContextManager[None] = nullcontext() if self.ranks is None else self.ranks.one_step()
        with together, self._memory_guard(number):
            with interrupts_let_through():
                batch = self._passes.next_batch()
            return batch, self.trainer.step(batch, number, self.recorder.around_forward(batch)), rate

    def land_commands(self, kind: str = "wait") -> None:
        """Carry out what waits in the queue, at a step boundary; `kind` tells other ranks what follows."""
        with interrupts_held(), self._lock, self._uninterrupted(nested=True):
            self.command_log.note_plan(self.budget, self._steps_done)
            for waiting in self._landings(kind):
                if self._closed:
                    for receipt in waiting:
                        self._steering.refuse(receipt, self._steps_done, "the session is closed")
                    continue
                self._undo_ring.land_all(waiting)
                if waiting:
                    self.bad_loss.landed()

    def land_if_alone(self) -> None:
        """Carry out what waits in the queue, unless other ranks would have to do so at the same moment."""
        if self.ranks is None:
            self.land_commands()

    def _landings(self, kind: str) -> Iterable[list[c.Receipt]]:
        if self.ranks is not None:
            return self.ranks.landings(self.commands, kind)
        return [self.commands.drain()]

    def come_to_rest(self) -> None:
        """Carry out what was put while the model was busy; while a run or a step is under way it will do so itself."""
        for _ in range(MOST_ROUNDS):
            if self.ranks is not None:  # all ranks land commands together, before the next step
                return
            if not len(self.commands) or self._runner.is_active or not self._lock.acquire(blocking=False):
                return
            try:
                if self._busy:  # put by a subscriber in the middle of a step
                    return
                self.land_commands()
            finally:
                self._lock.release(tell=False)  # the next round looks

    @contextmanager
    def _uninterrupted(self, nested: bool = False) -> Iterator[None]:
        """No command lands inside the block, and no other step begins there, also not from a subscriber."""
        if self._busy and not nested:
            raise InvalidSettingError(
                "a step was asked for from inside a step (by a subscriber or a function that training calls); "
                "call step(), run() or start() from outside, or put a command."
            )
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    @property
    def beat(self) -> float | None:
        """So often, in seconds, a paused run looks after its commands anyway, because other ranks wait; or None."""
        return None if self.ranks is None else BEAT_SECONDS

    def run_ended(self, outcome: str) -> None:
        """Told by the runner that its loop is over."""
        if self.ranks is not None:
            self.ranks.ended(outcome)
        self.come_to_rest()

    def describe_run(self) -> tuple[str, int]:
        """Device and number of threads, for the event that opens a run."""
        return str(self.device), torch.get_num_threads()

    def _check_override(self, name: str, value: Scalar, layer: str | None) -> None:
        self.settings_book.check(name, value, layer)

    def _check_reset(self, name: str, layer: str | None) -> None:
        self.settings_book.check_scope(name, layer)

    def _put(self, command: c.Command) -> c.Receipt:
        self._check_open()
        return self.commands.put(command)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidSettingError("this session is closed; build a new one around session.model to train on.")

    def _on_command(self) -> None:
        """While a run is under way its own thread lands commands; otherwise this is a step boundary."""
        if self._runner.is_active:
            self._runner.nudge()
        else:
            self.come_to_rest()

    def _consult_rule(self, batch: Batch, loss: float, rate: float, flops: StepFlops) -> list[Decision]:
        if self.rule is None:
            return []
        rule, seen = self.rule, batch if self.ranks is None else self.ranks.probed(batch)
        return self._agreed(
            lambda: rule.after_step(
                seen, step=self._steps_done, passes=self.epoch, loss=loss, learning_rate=rate,
                board=self.layers, flops=flops,
            )
        )  # fmt: skip

    def _agreed(self, decide: Callable[[], list[Decision]]) -> list[Decision]:
        return decide() if self.ranks is None else self.ranks.agreed(decide)

    def _announce_graphs(self, new: int) -> None:
        if new:
            self._graphs += new
            self.events.append(Recompiled(step=self._steps_done, graphs=new, total=self._graphs))

    def finish_pass(self) -> None:
        """Let everything that counts in passes look at the one that has just ended."""
        finished = self._passes.number - 1
        with interrupts_let_through():  # first: it may fail, and then nothing was done
            loss, accuracy = self.trainer.evaluate(self._valid_source)
        self._pass_owed = False
        self.sieve.finish_pass(finished, self._steps_done, self.planned_steps)
        self.budget.steps_per_epoch = self._train_source.steps_per_epoch
        self.schedule.after_epoch(loss)
        self.events.append(self.recorder.finish_epoch(self._passes.number, self._steps_done, loss, accuracy))
        if self.rule is not None:
            rule = self.rule
            decisions = self._agreed(lambda: rule.after_evaluation(accuracy, self.layers))
            self._steering.carry_out(decisions, self._steps_done)


def _on_cluster(cluster: Any, how: str, arguments: dict[str, Any]) -> Any:
    return importlib.import_module("egeria_lab.integrations.cluster").ClusterSession(cluster, how, arguments)


# `__new__` above takes anything; what a session takes is what `__init__` says.
_taken = inspect.signature(Session.__init__)
type.__setattr__(Session, "__signature__", _taken.replace(parameters=list(_taken.parameters.values())[1:]))


def replay(path: str | Path, *, model: nn.Module | None = None, data: Any = None, **changes: Any) -> replaying.Replay:
    """Do a recorded run again from seed, arguments and commands, and compare every loss and every event.

    Args:
        path: a run directory or a checkpoint.
        model: your model as it was before training, when it was no model by name.
        data: your data, when they were no data by name.
        changes: other objects of your own (``loss=``, ``forward=``).

    Raises:
        CheckpointError: when the record cannot be read, or the run went on with other arguments in between.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     session = Session("mlp", "digits", epochs=1, freeze=None)
        ...     _ = session.step(2), session.freeze("layers.0"), session.step(2)
        ...     _ = session.save(f"{folder}/run.ckpt")
        ...     replay(f"{folder}/run.ckpt").exact
        True
    """
    return replaying.replay(Session, path, model=model, data=data, **changes)


def compare(*runs: Any, **named: Any) -> Any:
    """Several runs in one picture: accuracy against time and work, freeze timelines, numbers, differing settings.

    Show it as a cell's last line: it is drawn anew while one of the runs trains. ``.table`` is a data frame,
    ``.figure()`` a Plotly figure, ``.to_html(path)`` a page that opens offline.

    Args:
        runs: sessions in any state, checkpoints or run directories, which are only read.
        named: the same by the name that they shall have: ``compare(plain=a, rule=b)``.

    Raises:
        InvalidSettingError: for nothing, too many, or something that is no run.
        CheckpointError: for a file that cannot be read.

    Example:
        >>> a, b = (Session("mlp", "digits", epochs=1, seed=seed) for seed in (0, 1))
        >>> _ = a.step(2), b.step(3)
        >>> compare(first=a, second=b).table["steps"].to_dict()
        {'first': 2, 'second': 3}
    """
    return importlib.import_module("egeria_lab.dashboard.compare").compare(*runs, **named)
