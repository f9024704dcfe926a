"""The sieve of one session: told about every step, followed by the sampler, written down in history and events.

A session without a sieve has one too as soon as somebody discards a sample by hand. The file is one piece because
it is the public face of sieving: most of it is signatures and what they promise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from egeria_lab import commands as c
from egeria_lab.algorithms.ledger import SieveFigures
from egeria_lab.algorithms.sieving import planning
from egeria_lab.algorithms.sieving.export import write_kept
from egeria_lab.algorithms.sieving.forgetting import Counts
from egeria_lab.algorithms.sieving.ids import checked_ids
from egeria_lab.algorithms.sieving.settings import LossSieve, ManualSieve, OneShotSieve, SieveSettings
from egeria_lab.algorithms.sieving.sieve import Sieve
from egeria_lab.algorithms.sieving.update import SieveUpdate
from egeria_lab.config import derive_seed
from egeria_lab.data.labels import labels_of
from egeria_lab.data.loaders import Batch, BatchSource
from egeria_lab.engine.budget import Budget
from egeria_lab.engine.passes import Passes
from egeria_lab.engine.sieve_look import SieveLook, look_at
from egeria_lab.engine.signals import SampleSignals
from egeria_lab.errors import DataError, InvalidSettingError
from egeria_lab.events import Event, EventLog, Notice, SamplesDiscarded, SamplesRestored, SamplesSieved
from egeria_lab.history import History

MOST_IDS_IN_AN_EVENT = 100_000
"""An event names the samples that moved, up to so many; beyond, `session.sieve` still knows where each one is."""

INNER_NAMES = {
    "attach", "change", "check", "discard", "figures", "finish_pass", "load_state_dict", "look", "needs", "observe",
    "plan_with", "planned_steps", "restore", "reweights", "state_dict", "steps_for", "stop_after", "weights",
}  # fmt: skip
"""What a session uses of its sieve; `Session.discard` and `Session.restore` are the ways in for a person."""


class SessionSieve:
    """Which samples a session trains on; `session.sieve`.

    Args:
        settings: the sieve's settings, or None for a session without one.
        source: the training batches; it follows what is kept.
        seed: the session's seed.

    Example:
        >>> import torch
        >>> from egeria_lab.data.datasets import ArrayDataset
        >>> source = BatchSource(ArrayDataset(torch.zeros(8, 1), torch.zeros(8).long()), 2, seed=0)
        >>> sieve = SessionSieve(None, source, 0)
        >>> sieve.kept_ids().tolist(), sieve.removed_ids().tolist()
        ([0, 1, 2, 3, 4, 5, 6, 7], [])
    """

    def __init__(self, settings: SieveSettings | None, source: BatchSource, seed: int) -> None:
        self.settings = settings
        self.seconds = 0.0
        self.updates = 0
        self._numbers: dict[int, int] = {}
        self._source = source
        self._seed = seed
        self._made: Sieve | None = None
        self._events: EventLog | None = None
        self._history: History | None = None
        self._passes: Passes | None = None
        self._notices: list[str] = []
        self._may_be_idle = settings is not None  # nothing was said of it yet
        self._steps_done: Callable[[], int] = lambda: 0
        if settings is not None:
            source.check_can_be_sieved()
            self._follow(after=-1)

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - INNER_NAMES)

    def __repr__(self) -> str:
        if self._made is None:
            counted = f"all {self.num_kept:,}" if self._source.has_ids else "all"
            return f"no sieve: {counted} samples are trained on"
        times = "once" if self.updates == 1 else f"{self.updates} times"
        return f"{self._made!r}, exchanged {times}" if self.updates else f"{self._made!r}"

    # --- looking ---------------------------------------------------------------------------------------

    def kept_ids(self) -> Tensor:
        """Ids of the samples that are trained on, int64, ascending."""
        return torch.arange(self._source.num_samples) if self._made is None else self._made.kept_ids()

    def removed_ids(self) -> Tensor:
        """Ids that the sieve has set aside, int64, in the order in which they come back."""
        return self._sieve.removed_ids()

    def discarded_ids(self) -> Tensor:
        """Ids discarded by hand, int64, ascending."""
        return self._sieve.discarded_ids()

    def counts(self, ids: Any = None) -> Counts:
        """Forgetting events, presentations and margins of some samples, or of all.

        Raises:
            DataError: for ids that do not exist.
        """
        return self._sieve.counts(ids)

    def histogram(self) -> dict[str, int]:
        """Number of kept samples by forgetting events in the present interval."""
        return self._sieve.histogram()

    def look(self) -> SieveLook | None:
        """Copies for a view; None without a sieve and before anything was discarded.

        Safe from any thread while training goes on: it only reads. A copy made in the middle of an exchange may
        hold one half of it; the next one holds all.
        """
        return None if self._made is None else look_at(self._made)

    @property
    def dataset(self) -> Any:
        """The training set; sample ids are positions in it."""
        return self._source.dataset

    def samples(self, ids: Sequence[int] | Tensor) -> list[Any]:
        """What the training set holds under these ids, as it hands it out.

        Raises:
            DataError: for ids that do not exist.
        """
        dataset = self._source.dataset
        return [dataset[int(i)] for i in checked_ids(ids, self._source.num_samples)]

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Any]:
        """Inputs and labels of some samples, as tensors with the samples in dimension 0.

        Raises:
            DataError: for ids that do not exist, or samples that are no pair ``(inputs, label)``.
        """
        known = checked_ids(list(ids), self._source.num_samples)
        content = self._source.fetch(known).content
        if not isinstance(content, (tuple, list)) or len(content) != 2 or not isinstance(content[0], Tensor):
            raise DataError("samples of this data set are no pair (inputs, label); give inputs instead of ids.")
        return content[0], content[1]

    def subset(self) -> Subset[Any]:
        """The kept samples as a data set of their own."""
        return Subset(self._source.dataset, self.kept_ids().tolist())

    def export_csv(self, path: str | Path) -> Path:
        """Write the kept samples as CSV, ids and counts; `egeria_lab.algorithms.sieving.export.read_ids` reads it."""
        return write_kept(self._sieve, path)

    @property
    def num_kept(self) -> int:
        """Samples that are trained on."""
        return self._source.num_samples if self._made is None else self._made.members.num_kept

    @property
    def sieved_share(self) -> float:
        """Share of the training set that is left out now, in [0, 1)."""
        return 0.0 if self._made is None else 1 - self.num_kept / self._source.num_samples

    @property
    def needs(self) -> tuple[str, ...]:
        """What must be observed of each sample."""
        return () if self.settings is None else self._sieve.needs

    @property
    def reweights(self) -> bool:
        """True when losses are weighted, so that survivors stand for those left out."""
        return isinstance(self.settings, LossSieve)

    def figures(self) -> SieveFigures | None:
        """For the ledger; None while nothing can have been left out."""
        if self._made is None:
            return None
        name = "discarding by hand" if isinstance(self._made.settings, ManualSieve) else type(self.settings).__name__
        return SieveFigures(
            method=name, kept=self.num_kept, total=self._source.num_samples, updates=self.updates, seconds=self.seconds
        )

    # --- training --------------------------------------------------------------------------------------

    def attach(self, history: History, events: EventLog) -> None:
        """Say where changes are written down; what was left out at the start comes first."""
        self._history, self._events = history, events
        if self._made is not None and self._made.first_update is not None:
            self._write(self._made.first_update, 0, 0.0, "session")
        for message in self._notices:
            events.append(Notice(step=0, message=message))

    def plan_with(self, budget: Budget, passes: Passes, steps_done: Callable[[], int]) -> None:
        """Count the plan in passes as long as they will be; say so when nothing will be exchanged in it.

        Args:
            budget: the plan.
            passes: where training stands in its passes.
            steps_done: tells the finished steps.
        """
        if self.settings is None:
            return
        if budget.decided:
            self._say_if_idle(budget.total_steps)
        self._passes, self._steps_done = passes, steps_done
        budget.planner = self

    def weights(self, ids: Tensor) -> Tensor | None:
        """Loss weights of a batch, or None when all are 1."""
        return None if self._made is None else self._made.weights(ids)

    def observe(self, batch: Batch, signals: SampleSignals | None) -> None:
        """Take in what a step showed."""
        if signals is None:
            return
        start = time.perf_counter()
        self._sieve.observe(batch.ids, **{name: getattr(signals, name) for name in self.needs})
        self.seconds += time.perf_counter() - start

    def check(self, signals: SampleSignals) -> None:
        """Raise when a step does not tell what the sieve needs.

        Raises:
            InvalidSettingError: when the model's outputs or the loss do not give it.
        """
        missing = [name for name in self.needs if getattr(signals, name) is None]
        if missing:
            raise InvalidSettingError(_what_is_missing(type(self.settings).__name__, missing, signals.loss_shape))

    def finish_pass(self, finished: int, step: int, planned_steps: int) -> None:
        """Let the sieve exchange samples at the end of a pass, when it is time.

        Args:
            finished: number of the pass that ended, from 0.
            step: finished steps.
            planned_steps: steps of the whole plan.
        """
        if self._made is None:
            return
        if finished == 0:
            self._say_if_idle(planned_steps)
        start = time.perf_counter()
        update = self._made.after_pass(steps_done=step, planned_steps=planned_steps)
        if update is not None:
            self._follow(after=finished)
            self._write(update, step, float(finished + 1), "rule")
        self.seconds += time.perf_counter() - start

    def planned_steps(self, epochs: float, full_steps: int) -> int:
        """Steps of so many passes, of which a sieve may make some shorter than others.

        Args:
            epochs: passes over what is kept.
            full_steps: steps of a pass over all samples.
        """
        if not isinstance(self.settings, (OneShotSieve, LossSieve)):
            return max(1, round(epochs * self._source.steps_per_epoch))
        return max(1, planning.steps_for(self.settings, self._standing(0, full_steps), epochs))

    def stop_after(self, epochs: float, total_steps: int) -> int | None:
        """The step at which so many passes from here are made under a plan, or None when it holds fewer."""
        settings, standing, wanted = self._from_here(epochs)
        if total_steps <= standing.step or planning.passes_made(settings, standing, total_steps) < wanted - 1e-9:
            return None
        return planning.step_after(settings, standing, total_steps, wanted)

    def steps_for(self, epochs: float, total_steps: int | None = None) -> int:
        """The plan that makes so many passes from here, or more than a plan of `total_steps` makes."""
        settings, standing, wanted = self._from_here(epochs)
        if total_steps is not None and total_steps > standing.step:
            wanted = epochs + planning.passes_made(settings, standing, total_steps)
        steps = planning.steps_for(settings, standing, wanted)
        if total_steps is None:
            self._say_if_idle(steps)
        return steps

    def _from_here(self, epochs: float) -> tuple[SieveSettings, planning.Standing, float]:
        assert self.settings is not None
        passes = self._passes
        assert passes is not None
        standing = self._standing(self._steps_done(), passes.length, passes.position, passes.number)
        return self.settings, standing, epochs + passes.done

    def _standing(self, step: int, length: int, position: int = 0, number: int = 0) -> planning.Standing:
        known = self._sieve.standing(steps_done=step)
        full, short = (self._source.expected_steps(known.pop(name)) for name in ("full", "short"))
        return planning.Standing(
            full=full, short=short, length=length, position=position, passes=number, step=step, **known
        )  # fmt: skip

    def _say_if_idle(self, planned_steps: int) -> None:
        """Once, before the second pass: that nothing will be exchanged."""
        if not self._may_be_idle or self._events is None or self.settings is None:
            return
        self._may_be_idle = False
        why = planning.why_idle(self.settings, self._standing(0, self._source.steps_in(0)), planned_steps)
        if why is not None:
            self._events.append(Notice(step=self._steps_done(), message=why))

    def change(self, settings: Any) -> None:
        """Go on with other settings of the same kind, from the next exchange on.

        Raises:
            InvalidSettingError: when they do not fit the data.
        """
        self._sieve.change(settings)
        self.settings = settings

    # --- by hand ---------------------------------------------------------------------------------------

    def discard(self, command: c.Discard, step: int, number: int, position: int) -> Event:
        """Land a discard in the middle of a pass, or between two."""
        update = self._sieve.discard(list(command.ids))
        try:
            self._change(update, number, position)
        except DataError:  # the loader draws too few of what would be left: nothing is changed
            self._sieve.restore(update.by_hand)
            raise
        self._write(update, step, float(number), command.by)
        return SamplesDiscarded(step=step, by=command.by, ids=tuple(update.by_hand.tolist()), kept=update.num_kept)

    def restore(self, command: c.Restore, step: int, number: int, position: int) -> Event:
        """Land a restore in the middle of a pass, or between two."""
        update = self._sieve.restore(list(command.ids))
        self._change(update, number, position)
        self._write(update, step, float(number), command.by)
        return SamplesRestored(step=step, by=command.by, ids=tuple(update.by_hand.tolist()), kept=update.num_kept)

    # --- state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where every sample is and what is known of it."""
        made = None if self._made is None else self._made.state_dict()
        return {"sieve": made, "seconds": self.seconds, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly from a saved state; the plans of the source are restored by themselves."""
        self.seconds, self.updates = float(state["seconds"]), int(state["updates"])
        if state["sieve"] is None:
            self._made = None if self.settings is None else self._made
        else:
            self._sieve.load_state_dict(state["sieve"])

    # --- inside ----------------------------------------------------------------------------------------

    @property
    def _sieve(self) -> Sieve:
        if self._made is None:
            self._made = Sieve(
                self.settings, self._source.num_samples, batch_size=self._source.batch_size,
                seed=derive_seed(self._seed, "sieve") % 2**63, labels=self._labels(),
            )  # fmt: skip
        return self._made

    def _labels(self) -> Tensor | None:
        dataset = self._source.dataset
        labels = labels_of(dataset)
        if labels is None and getattr(self.settings, "class_shares", False):
            labels = labels_of(dataset, read=True)
            if labels is not None:
                self._notices.append(
                    f"class_shares=True needs the class of every sample: all {len(labels):,} were read once for it; an "
                    "attribute .targets of the data set would save that."
                )
        return labels

    def _follow(self, after: int) -> None:
        self._source.keep(self._sieve.kept_ids(), after=after)

    def _change(self, update: SieveUpdate, number: int, position: int) -> None:
        self._follow(after=number if position else number - 1)
        if position:
            self._source.amend(number, position, without=update.removed, adding=update.returned)

    def _write(self, update: SieveUpdate, step: int, epoch: float, by: str) -> None:
        assert self._history is not None
        assert self._events is not None
        events = sum(int(k) * v for k, v in update.forgetting.items() if k.isdigit())
        self._history.sieve.append(
            step=step, epoch=epoch, kept=update.num_kept, waiting=update.num_removed, discarded=update.num_discarded,
            removed=len(update.removed), returned=len(update.returned), forgetting_events=events,
        )  # fmt: skip
        if update.kind in ("discard", "restore"):
            return  # the command's own event says it
        self.updates += update.kind != "start"
        named = len(update.removed) + len(update.returned) <= MOST_IDS_IN_AN_EVENT
        self._events.append(
            SamplesSieved(
                step=step, by=by, removed=len(update.removed), returned=len(update.returned), kept=update.num_kept,
                waiting=update.num_removed, removed_ids=self._shared(update.removed) if named else (),
                returned_ids=self._shared(update.returned) if named else (), reason=update.reason,
            )
        )  # fmt: skip

    def _shared(self, ids: Any) -> tuple[int, ...]:
        """Ids as numbers that all events share: a very long run names the same samples again and again."""
        return tuple(self._numbers.setdefault(i, i) for i in ids.tolist())


def _what_is_missing(sieve: str, missing: list[str], shape: tuple[int, ...]) -> str:
    if "loss" in missing:
        given = f"a tensor of shape {shape}, whose rows are not the samples" if shape else "one number a batch"
        return (
            f"{sieve} needs the loss of each sample, and the loss gives {given}; return it unreduced, with the samples "
            "in dimension 0 (reduction='none'), or choose RandomSieve."
        )
    return (
        f"{sieve} counts right and wrong predictions, and the model gives no class scores of shape (samples, classes) "
        "with one label a sample; choose RandomSieve or LossSieve for this task."
    )
