"""Ask for a plasticity reading at intervals, feed the rule with the one asked for before, and record it.

The file is one piece because when a reading is asked for and when its verdict lands is one timetable.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from egeria_lab.algorithms.costs import StepFlops
from egeria_lab.algorithms.decision import Decision
from egeria_lab.algorithms.freeze_policy import PlasticityPolicy
from egeria_lab.algorithms.guard import Guard
from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.algorithms.plasticity import Reading
from egeria_lab.config import derive_seed
from egeria_lab.data.loaders import Batch
from egeria_lab.engine.explain import explain_plasticity
from egeria_lab.engine.layer_board import LayerBoard
from egeria_lab.engine.readers import make_reader
from egeria_lab.engine.trainer import Trainer
from egeria_lab.errors import TrainingError
from egeria_lab.events import BootstrapFinished, EventLog, ReadingSkipped, ReferenceFallback, ReferenceRefreshed
from egeria_lab.history import VERDICTS, History


class PlasticityMonitor:
    """Feeds the freezing rule with plasticity readings.

    A reading runs the first `probe_rows` samples of the batch through the reference and through the
    training model of this moment, both in eval mode. Taking the activations of the training forward itself
    would save one pass, but in train mode batch statistics differ from the reference's stored ones: late
    in training of a ResNet-8 the noise around the local trend was 0.85 of the value in the first layer,
    against 0.30 in eval mode; and right after a snapshot the distance is then not zero.

    The verdict of a reading lands at the evaluation after it, never "when it happens to arrive": a worker
    makes it meanwhile, and if it is late the step waits and the ledger counts that. So a run is repeatable
    whether the worker is slow or not.

    The frontmost active layer is read every time. Others are read every n-th time, n being the smallest
    that keeps the counted FLOPs of readings within `monitor_budget`: a decision that depends on no clock. Once
    all but the head are frozen nothing is read any more, until a layer thaws: there is nothing left to decide.

    Args:
        trainer: runs the model.
        layers: the layer modules.
        policy: the rule to feed.
        history: where readings go.
        events: where refreshes go.
        load_gate: skip readings while the load average per core lies above this, or None.
        delay_seconds: sleep before each piece of the worker's work, to try a slow one.
    """

    def __init__(
        self,
        trainer: Trainer,
        layers: LayerModules,
        policy: PlasticityPolicy,
        history: History,
        events: EventLog,
        *,
        load_gate: float | None = None,
        delay_seconds: float = 0.0,
    ) -> None:
        self.trainer = trainer
        self.layers = layers
        self.policy = policy
        self.history = history
        self.events = events
        self.seconds = 0.0
        self.latest: dict[str, Reading] = {}
        self._guard = Guard()
        self._readings_since_refresh = 0
        self._readings = 0
        self._refresh_reason: str | None = "first snapshot, at the start"
        self._asked: deque[int] = deque()  # steps of the readings that are under way
        self.waited_seconds = 0.0
        self._told = False
        self._earlier_seconds = 0.0
        self.reader = make_reader(
            trainer.model,
            layers,
            trainer.run_model,
            engine=policy.settings.reference,
            distance_name=policy.settings.distance,
            seed=derive_seed(trainer.seed, "reference") % 2**31,
            load_gate=load_gate,
            delay_seconds=delay_seconds,
        )

    def after_step(
        self,
        batch: Batch,
        *,
        step: int,
        passes: float,
        loss: float,
        learning_rate: float,
        board: LayerBoard,
        flops: StepFlops,
    ) -> list[Decision]:
        """Let the rule look at a finished step, with a plasticity reading when one is due.

        Args:
            batch: the batch that was trained on.
            step: number of finished steps.
            passes: passes over the data so far.
            loss: its mean loss.
            learning_rate: rate it was made with.
            board: states of the layers.
            flops: FLOPs of a training step per sample, as things are frozen now.

        Raises:
            TrainingError: when an activation is not finite.
        """
        by_rule = [row.name for row in board if row.frozen and row.by == "rule"]
        decisions = self.policy.observe(loss, learning_rate, by_rule)
        if decisions or not self.is_due(step):
            return decisions
        settings = self.policy.settings
        rows = min(settings.probe_rows, len(batch))
        training = flops.total * len(batch) * settings.interval_steps
        cost_ratio = 2 * rows * sum(flops.forward) / training if training else 0.0
        return self.read(batch, step, passes, board.frozen, board.pinned, cost_ratio)

    def after_evaluation(self, accuracy: float | None, board: LayerBoard) -> list[Decision]:
        """With a guard: thaw what the rule froze and back off when accuracy fell too far."""
        allowed = self.policy.settings.guard
        if allowed is None or accuracy is None:
            return []
        reason = self._guard.check(accuracy, allowed)
        frozen = [row.name for row in board if row.frozen and row.by == "rule"]
        if reason is None or not (frozen or self.policy.settling.begun):
            return []
        halved = self.policy.settings.tolerance / 2
        return [
            *self.policy.thaws(frozen, reason),
            Decision(action="set", layer="freeze.tolerance", reason=reason, value=halved),
        ]

    def frozen_set_changed(self, reason: str, *, thawed: bool) -> None:
        """Take a new snapshot before the next reading, after a thaw always, after a freeze as the settings say."""
        if thawed or self.policy.settings.refresh_on_freeze:
            self._refresh_reason = reason

    def carried_out(self, decision: Decision) -> None:
        """Tell the rule at which learning rate a layer froze, or that criteria are relaxed from now on."""
        if decision.action in ("freeze", "settle"):
            self.policy.froze()
        elif decision.action == "thaw":
            self.policy.thawed()

    def explain(self, layer: str, board: LayerBoard) -> str:
        """What an active layer still lacks, in one clause with the numbers."""
        return explain_plasticity(layer, board, self.policy, self.latest)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next readings and freezes: plain values and tensors. Waits for the worker."""
        return {
            "policy": self.policy.state_dict(),
            "guard": self._guard.state_dict(),
            "latest": {name: asdict(reading) for name, reading in self.latest.items()},
            "readings_since_refresh": self._readings_since_refresh,
            "readings": self._readings,
            "refresh_reason": self._refresh_reason,
            "asked": list(self._asked),
            "told": self._told,
            "seconds": self.seconds,
            "waited_seconds": self.waited_seconds,
            "worker_seconds": self.worker_seconds,
            "format": self._format,
            "reader": self.reader.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; where readings are made in another format, a new snapshot comes first."""
        self.policy.load_state_dict(state["policy"])
        self._guard.load_state_dict(state["guard"])
        self.latest = {name: Reading(**reading) for name, reading in state["latest"].items()}
        self._readings_since_refresh, self._readings = state["readings_since_refresh"], state["readings"]
        self._refresh_reason, self._told = state["refresh_reason"], state["told"]
        self._asked = deque(state["asked"])
        self.seconds, self.waited_seconds = state["seconds"], state["waited_seconds"]
        self._earlier_seconds = state["worker_seconds"] - self.reader.seconds
        if list(state["format"]) == self._format:
            self.reader.load_state_dict(state["reader"])
            return
        self._asked.clear()
        self._refresh_reason = f"readings were made with {state['format'][1]} before, and are with {self._format[1]}"

    @property
    def worker_seconds(self) -> float:
        """Processor time spent beside the training thread, also before a checkpoint."""
        return self.reader.seconds + self._earlier_seconds

    @property
    def _format(self) -> list[str]:
        return [type(self.reader).__name__, self.reader.engine]

    def close(self) -> None:
        """End the worker; a reading that is under way is dropped."""
        self.reader.close()

    def is_due(self, step: int) -> bool:
        """True when a reading follows this step."""
        return step % self.policy.settings.interval_steps == 0

    def read(
        self,
        batch: Batch,
        step: int,
        passes: float,
        frozen: Sequence[str],
        pinned: Sequence[str],
        cost_ratio: float,
    ) -> list[Decision]:
        """Collect the reading asked for last time, let the rule decide, and ask for the next one.

        Args:
            batch: the batch that was just trained on.
            step: number of finished steps.
            passes: passes over the data so far.
            frozen: names of frozen layers.
            pinned: names of pinned layers.
            cost_ratio: FLOPs of a full reading divided by those of the training between two readings.

        Raises:
            TrainingError: when an activation is not finite.
        """
        start = time.perf_counter()
        decisions = self._evaluate(step, passes, frozen, pinned)
        if not any(decision.action in ("freeze", "thaw") for decision in decisions):
            # otherwise the frozen set is about to change, and with it the snapshot
            whole = len(batch.split()[0])
            rows = self.trainer.to_device(_first_rows(batch.content, self.policy.settings.probe_rows, whole))
            wanted = self._wanted(frozen, cost_ratio)
            if wanted:
                with self.trainer.autocast():
                    self._refresh_if_due(step, rows)
                    self._ask(step, rows, wanted)
        self.seconds += time.perf_counter() - start
        return decisions

    def _evaluate(self, step: int, passes: float, frozen: Sequence[str], pinned: Sequence[str]) -> list[Decision]:
        try:
            collected = self.reader.collect()
        except BaseException:  # the reading is lost; the next one is made against a snapshot that is whole
            if self._asked:
                self._asked.popleft()
            self._refresh_reason = "the last reading failed"
            raise
        values: dict[str, float] = {}
        generation = self.reader.generation
        asked = step
        if collected is not None:
            values, generation, waited = collected
            self.waited_seconds += waited
            asked = self._asked.popleft()
            self._tell_fallbacks(step)
            _check_finite(values)
        values = {name: value for name, value in values.items() if name not in frozen}
        was_bootstrapping = self.policy.bootstrapping
        readings, decisions = self.policy.evaluate(values, frozen=frozen, pinned=pinned, passes=passes)
        if was_bootstrapping and not self.policy.bootstrapping:
            change = self.policy.loss_change
            self.events.append(BootstrapFinished(step=step, by="rule", loss_change=change or 0.0))
        self.latest.update(readings)
        for layer, reading in readings.items():
            self._record(asked, layer, reading, generation)
        return decisions

    def _tell_fallbacks(self, step: int) -> None:
        """Once, after the first conversion: which layers could not be had in the format asked for, and why."""
        if self._told or self.policy.settings.reference == "fp32":
            return
        self._told = True
        for layer, engine, note in self.reader.describe():
            if engine == "fp32" or "float32:" in note:
                reason = note[note.find("float32:") :] if "float32:" in note else note
                self.events.append(ReferenceFallback(step=step, by="rule", layer=layer, engine=engine, reason=reason))

    def _refresh_if_due(self, step: int, rows: Any) -> None:
        reason = self._refresh_reason
        if reason is None and self._readings_since_refresh >= self.policy.settings.readings_per_snapshot:
            reason = f"{self._readings_since_refresh} readings were made against the last one"
        if reason is None:
            return
        generation = self.reader.snapshot(rows)
        self.policy.restart()
        self._readings_since_refresh = 0
        self._refresh_reason = None
        engine = self.reader.engine
        self.events.append(
            ReferenceRefreshed(step=step, by="rule", generation=generation, engine=engine, reason=reason)
        )

    def _wanted(self, frozen: Sequence[str], cost_ratio: float) -> list[str]:
        active = [layer.name for layer in self.layers if layer.name not in frozen]
        front = next((name for name in active if name not in self.policy.settling.begun), None)
        if front in (None, self.layers[-1].name):  # the head, which no rule freezes: a reading would decide nothing
            return []
        every = max(1, math.ceil(cost_ratio / self.policy.settings.monitor_budget))
        return active if self._readings % every == 0 or front is None else [front]

    def _ask(self, step: int, rows: Any, wanted: list[str]) -> None:
        if self.reader.submit(rows, wanted):
            self._asked.append(step)
            self._readings_since_refresh += 1
            self._readings += 1
        else:
            self.events.append(ReadingSkipped(step=step, by="rule", reason="the machine is busy"))

    def _record(self, step: int, layer: str, reading: Reading, generation: int) -> None:
        self.history.plasticity.append(
            step=step,
            layer=self.history.layer_names.index(layer),
            value=reading.value,
            smoothed=reading.smoothed,
            slope=reading.slope,
            tolerance=reading.tolerance,
            stable=reading.stable,
            verdict=VERDICTS.index(reading.verdict),
            generation=generation,
        )


def _check_finite(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise TrainingError(
                f"the activations of {name} are not finite, so its plasticity cannot be read; lower the "
                "learning rate or check the inputs."
            )


def _first_rows(content: Any, rows: int, batch_size: int) -> Any:
    """The first rows of every tensor in a batch whose first dimension counts its samples."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch_size:
            return leaf[:rows]
        return leaf

    with torch.no_grad():
        return tree_map(cut, content)
