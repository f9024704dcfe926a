"""What can happen: frozen, past-tense records that go to JSON, and the bus that hands them out.

An event holds plain data only (no tensor, no module, no session), so that it can cross threads, be
written to disk and be drawn. Every event knows the `step` after which it holds (the number of finished
steps) and `by` whom it was caused: ``"rule"``, ``"user"``, ``"dashboard"`` or ``"session"``.
The file is one piece because it is a list: to know what can happen, read it from top to bottom.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from typing import Any

from egeria_lab.errors import InvalidSettingError, require
from egeria_lab.tables import html_table

Scalar = str | int | float | bool | None

MOST_ROWS_SHOWN = 50
"""Of a log in a notebook: the newest, as a run of hours has thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        step: number of finished training steps when it happened, >= 0.
        by: who caused it: ``"rule"``, ``"user"``, ``"dashboard"`` or ``"session"``.
    """

    step: int
    by: str = "session"

    def to_dict(self) -> dict[str, object]:
        """The event as JSON-able plain data, its name under ``"event"``."""
        return {"event": type(self).__name__, **{field.name: getattr(self, field.name) for field in fields(self)}}

    def sentence(self) -> str:
        """The event in words, for logs and the dashboard."""
        fields = ", ".join(f"{k}={v}" for k, v in asdict(self).items() if k not in ("step", "by"))
        return f"{type(self).__name__}({fields})"

    def __str__(self) -> str:
        return f"step {self.step}: {self.sentence()}"

    def _repr_html_(self) -> str:  # `repr` itself has every field: replays compare by it
        return f"<p>{escape(str(self))} <small>({type(self).__name__}, by {escape(self.by)})</small></p>"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """Training began or went on, `planned_steps` being the step at which the budget ends."""

    planned_steps: int
    device: str
    threads: int

    def sentence(self) -> str:
        threads = f"{self.threads} thread" if self.threads == 1 else f"{self.threads} threads"
        return f"Training on {self.device} with {threads}, up to step {self.planned_steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaused(Event):
    """Training stands still at a step boundary; everything is kept."""

    def sentence(self) -> str:
        return "Paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed(Event):
    """Training goes on after a pause."""

    def sentence(self) -> str:
        return "Resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped(Event):
    """Training ended on request or because its budget was used up; the model is usable."""

    reason: str

    def sentence(self) -> str:
        return f"Stopped: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailed(Event):
    """A step raised an error; training stopped in a consistent state and history is kept."""

    error: str

    def sentence(self) -> str:
        return f"Failed: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFinished(Event):
    """One pass over the training samples is complete."""

    epoch: int
    train_loss: float
    train_accuracy: float
    valid_loss: float
    valid_accuracy: float

    def sentence(self) -> str:
        return f"Epoch {self.epoch}: loss {self.train_loss:.3f}, validation accuracy {self.valid_accuracy:.1%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapFinished(Event):
    """The critical period is over: from now on layers may freeze."""

    loss_change: float

    def sentence(self) -> str:
        return f"Bootstrapping over (loss now changes by {self.loss_change:.1%}): layers may freeze"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFrozen(Event):
    """A layer module is trained no longer.

    Attributes:
        layer: name of the layer module.
        slope: |trend| of its smoothed plasticity per reading, or None when frozen by hand.
        tolerance: what the slope was compared with, or None.
        reason: one clause saying why.
    """

    layer: str
    slope: float | None = None
    tolerance: float | None = None
    reason: str = ""

    def sentence(self) -> str:
        return f"{self.layer} frozen by {self.by}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettling(Event):
    """A layer module is on its way to being frozen: from now on it is trained less and less.

    Attributes:
        layer: name of the layer module.
        epochs: passes over the data until it is frozen.
        slope, tolerance: as for `LayerFrozen`.
        reason: one clause saying why.
    """

    layer: str
    epochs: float
    slope: float | None = None
    tolerance: float | None = None
    reason: str = ""

    def sentence(self) -> str:
        return f"{self.layer} settles over {self.epochs:g} epochs, then it freezes: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettlingEnded(Event):
    """A layer module that settled is trained like all others again, and will not be frozen for now."""

    layer: str
    reason: str = ""

    def sentence(self) -> str:
        return f"{self.layer} settles no longer: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerThawed(Event):
    """A frozen layer module is trained again, exactly where it had been left."""

    layer: str
    reason: str = ""

    def sentence(self) -> str:
        return f"{self.layer} thawed by {self.by}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPinned(Event):
    """A rule may not freeze this layer module any more."""

    layer: str

    def sentence(self) -> str:
        return f"{self.layer} pinned by {self.by}: no rule may freeze it"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUnpinned(Event):
    """A rule may freeze this layer module again."""

    layer: str

    def sentence(self) -> str:
        return f"{self.layer} unpinned by {self.by}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeBlocked(Event):
    """The rule would freeze a layer, but a cap or a pin forbids it."""

    layer: str
    reason: str

    def sentence(self) -> str:
        return f"{self.layer} would freeze, but {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChanged(Event):
    """A setting has a new value from this step on; `layer` is None when it holds for all layers."""

    name: str
    old: Scalar
    new: Scalar
    layer: str | None = None

    def sentence(self) -> str:
        where = f" for {self.layer}" if self.layer else ""
        return f"{self.name}{where}: {self.old} → {self.new} (by {self.by})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRefreshed(Event):
    """The reference model was replaced by a snapshot of the training model."""

    generation: int
    engine: str
    reason: str

    def sentence(self) -> str:
        return f"Reference {self.generation} taken ({self.engine}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceFallback(Event):
    """A layer, or a part of it, is compared in float32 though a smaller format was asked for."""

    layer: str
    engine: str
    reason: str

    def sentence(self) -> str:
        return f"Reference of {self.layer} in {self.engine}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBuilt(Event):
    """The activation cache began to keep what crosses the cut behind a layer."""

    message: str

    def sentence(self) -> str:
        return f"Cache built: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNotice(Event):
    """Something a user should know about the activation cache: refused, off, full, lost or emptied."""

    kind: str
    message: str

    def sentence(self) -> str:
        return f"Cache {self.kind}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingSkipped(Event):
    """A plasticity reading was left out."""

    reason: str

    def sentence(self) -> str:
        return f"Plasticity reading skipped: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompiled(Event):
    """`torch.compile` built new graphs, usually because the frozen set changed; `total` counts the run."""

    graphs: int
    total: int

    def sentence(self) -> str:
        return f"torch.compile built {self.graphs} new graph(s), {self.total} in this run"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesSieved(Event):
    """A sieve moved samples out of the training set and others back in; ids stay those of the data set.

    Attributes:
        removed: how many samples were taken out.
        returned: how many came back.
        kept: samples trained on from now on.
        waiting: samples set aside from now on.
        removed_ids: ids of the samples taken out.
        returned_ids: ids of the samples that came back.
        reason: why these.
    """

    removed: int
    returned: int
    kept: int
    waiting: int
    removed_ids: tuple[int, ...]
    returned_ids: tuple[int, ...]
    reason: str

    def sentence(self) -> str:
        return (
            f"Sieve: {self.removed:,} samples out, {self.returned:,} back in; {self.kept:,} kept, "
            f"{self.waiting:,} set aside ({self.reason})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesDiscarded(Event):
    """Samples were taken out of training by hand, until they are restored."""

    ids: tuple[int, ...]
    kept: int

    def sentence(self) -> str:
        return f"{len(self.ids):,} sample(s) discarded by {self.by}: {_some(self.ids)}; {self.kept:,} kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesRestored(Event):
    """Discarded samples were given back to training by hand."""

    ids: tuple[int, ...]
    kept: int

    def sentence(self) -> str:
        return f"{len(self.ids):,} sample(s) restored by {self.by}: {_some(self.ids)}; {self.kept:,} kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """Something that a user should know before training goes on, such as a rule that will never act."""

    message: str

    def sentence(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSkipped(Event):
    """A batch whose loss is not finite was passed over: no step was made with it, and it does not come again.

    Attributes:
        loss: ``"nan"``, ``"inf"`` or ``"-inf"``; JSON has no such numbers.
        learning_rate: the rate it would have been made with.
        in_pass: the pass over the data, from 0.
        position: place of the batch in the pass, from 0.
        sample_ids: ids of its first samples.
        samples: how many samples it has.
    """

    loss: str
    learning_rate: float
    in_pass: int
    position: int
    sample_ids: tuple[int, ...]
    samples: int

    def sentence(self) -> str:
        more = ", …" if self.samples > len(self.sample_ids) else ""
        return (
            f"Batch {self.position + 1} of pass {self.in_pass + 1} passed over: its loss is {self.loss} (learning rate "
            f"{self.learning_rate:.3g}, {self.samples:,} samples: {', '.join(map(str, self.sample_ids))}{more})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack(Event):
    """The loss was not finite: training is again at an earlier step, and goes on with half the learning rate.

    Attributes:
        loss: ``"nan"``, ``"inf"`` or ``"-inf"``.
        from_step: the step that training had come to.
        old_learning_rate: peak learning rate before.
        learning_rate: peak learning rate from now on.
        count: how often the run has gone back.
        commands_lost: commands after that step, which were taken back with it.
    """

    loss: str
    from_step: int
    old_learning_rate: float
    learning_rate: float
    count: int
    commands_lost: int = 0

    def sentence(self) -> str:
        lost = f"; {self.commands_lost} command(s) since were taken back" if self.commands_lost else ""
        return (
            f"Rolled back from step {self.from_step} to {self.step}, time {self.count}: the loss was {self.loss}; "
            f"learning rate {self.old_learning_rate:.3g} → {self.learning_rate:.3g}{lost}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskUpdated(Event):
    """Dynamic sparse training dropped weights and grew others.

    Attributes:
        dropped: weights taken out, over all layers.
        grown: weights put in.
        live: weights that are trained from now on.
        total: weights that masks can reach.
        churn: share of the live positions that were exchanged, in [0, 1].
        warning: what is suspicious about it, or empty.
    """

    dropped: int
    grown: int
    live: int
    total: int
    churn: float
    warning: str = ""

    def sentence(self) -> str:
        text = (
            f"Masks: {self.dropped:,} weights dropped, {self.grown:,} grown ({self.churn:.1%} exchanged); "
            f"{self.live / max(1, self.total):.1%} of {self.total:,} live"
        )
        return f"{text}. {self.warning}" if self.warning else text


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRejected(Event):
    """A command that could have no effect, with the reason."""

    command: str
    reason: str

    def sentence(self) -> str:
        return f"Rejected {self.command}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    """Everything that decides the future was written to disk."""

    path: str
    num_bytes: int
    seconds: float

    def sentence(self) -> str:
        return f"Saved to {self.path} ({self.num_bytes:,} bytes, {self.seconds:.2f} s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """A checkpoint or the journal could not be written; training goes on, the last checkpoint is untouched."""

    reason: str

    def sentence(self) -> str:
        return f"Not saved: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoaded(Event):
    """Training goes on from a checkpoint; `notes` tell what is not as it was."""

    path: str
    notes: tuple[str, ...] = ()

    def sentence(self) -> str:
        return " ".join([f"Loaded from {self.path}.", *self.notes])


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandUndone(Event):
    """Training is again where it was right before a command landed; `undone_from` is the step it had come to."""

    command: str
    undone_from: int

    def sentence(self) -> str:
        return f"Undone: {self.command} (back from step {self.undone_from} to {self.step})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRedone(Event):
    """An undo was taken back: training is where it was before it; `redone_from` is the step it had come to."""

    command: str
    redone_from: int

    def sentence(self) -> str:
        return f"Redone: {self.command} (from step {self.redone_from} to {self.step})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberFailed(Event):
    """A callback raised an error and was detached; training went on."""

    subscriber: str
    error: str

    def sentence(self) -> str:
        return f"Subscriber {self.subscriber} failed and was detached: {self.error}"


def event_from_dict(record: Mapping[str, Any]) -> Event:
    """The event that `Event.to_dict` wrote, also when it has been through JSON.

    Raises:
        InvalidSettingError: when the record is none of an event that this version knows.

    Example:
        >>> event = LayerThawed(step=3, by="user", layer="layers.0")
        >>> event_from_dict(event.to_dict()) == event
        True
    """
    kinds = {kind.__name__: kind for kind in Event.__subclasses__()}
    kind = kinds.get(str(record.get("event")))
    if kind is None:
        raise InvalidSettingError(f"there is no event {record.get('event')!r} in this version of egeria_lab.")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items() if k != "event"}
    if not set(values) <= {field.name for field in fields(kind)} or not {"step"} <= set(values):
        raise InvalidSettingError(f"{kind.__name__} has other fields in this version of egeria_lab: {sorted(values)}.")
    return kind(**values)  # type: ignore[arg-type]  # the fields of each kind are its own


def _some(ids: tuple[int, ...]) -> str:
    shown = ", ".join(str(number) for number in ids[:5])
    return shown if len(ids) <= 5 else f"{shown}, …"


Callback = Callable[[Event], None]


class EventLog:
    """An append-only list of events that also hands each new one to its subscribers.

    Appending is done by one thread at a time; reading is safe from any. A subscriber that raises is
    detached and reported as `SubscriberFailed`: whoever watches may not stop what it watches.

    Example:
        >>> log = EventLog()
        >>> unsubscribe = log.subscribe(lambda event: print(event.sentence()), LayerThawed)
        >>> log.append(LayerThawed(step=3, by="user", layer="layers.0", reason="asked for"))
        layers.0 thawed by user: asked for
        >>> unsubscribe()
        >>> len(log), log[0].step
        (1, 3)
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.rewinds = 0
        self._subscribers: list[tuple[Callback, type[Event]]] = []
        self._lock = threading.RLock()

    def append(self, event: Event) -> None:
        """Store `event`, then call every subscriber that asked for its kind."""
        with self._lock:
            self._events.append(event)
            subscribers = list(self._subscribers)
        failed = []
        for entry in subscribers:
            callback, kind = entry
            if not isinstance(event, kind):
                continue
            try:
                callback(event)
            except Exception as error:  # a watcher's fault must not reach the training thread
                self._remove(entry)
                failed.append((entry, error))
        for entry, problem in failed:  # only now, so that everybody sees the two events in order
            self._report(entry, event.step, problem)

    def subscribe(self, callback: Callback, event: type[Event] | None = None) -> Callable[[], None]:
        """Call `callback` with each new event of the given kind (all kinds by default).

        Returns:
            A function that ends the subscription; calling it twice is harmless.

        Raises:
            InvalidSettingError: when `callback` cannot be called, or `event` is no event class.
        """
        require(callable(callback), "subscribe", "callback", callback, "a function of one event")
        known = event is None or (isinstance(event, type) and issubclass(event, Event))
        require(known, "subscribe", "event", event, "an event class such as egeria_lab.events.LayerFrozen, or None")
        entry = (callback, event or Event)
        with self._lock:
            self._subscribers.append(entry)

        def unsubscribe() -> None:
            self._remove(entry)

        return unsubscribe

    def _remove(self, entry: tuple[Callback, type[Event]]) -> None:
        with self._lock:  # by identity: the same callback may be subscribed twice
            self._subscribers = [other for other in self._subscribers if other is not entry]

    def _report(self, entry: tuple[Callback, type[Event]], step: int, error: Exception) -> None:
        name = getattr(entry[0], "__qualname__", repr(entry[0]))
        self.append(SubscriberFailed(step=step, subscriber=name, error=f"{type(error).__name__}: {error}"))

    def state_dict(self) -> dict[str, tuple[Event, ...]]:
        """All events so far. They are records that go to JSON: see `Event.to_dict` and `event_from_dict`."""
        return {"events": tuple(self._events)}

    def load_state_dict(self, state: Mapping[str, Sequence[Event]]) -> None:
        """Hold exactly those events; no subscriber is called, `rewinds` tells those who follow to begin anew."""
        with self._lock:
            self._events = list(state["events"])
            self.rewinds += 1

    def of(self, *kinds: type[Event]) -> list[Event]:
        """All events so far of the given kinds, in order."""
        return [event for event in list(self._events) if isinstance(event, kinds)]

    def since(self, index: int) -> list[Event]:
        """All events from position `index` on, in order."""
        return self._events[index:]

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(list(self._events))

    def __getitem__(self, index: int) -> Event:
        return self._events[index]

    def __repr__(self) -> str:
        lines = [f"step {event.step:>6}  {event.sentence()}" for event in list(self._events)]
        return "\n".join(lines) or "no events yet"

    def _repr_html_(self) -> str:
        events = list(self._events)
        if not events:
            return "<p>no events yet</p>"
        earlier = len(events) - MOST_ROWS_SHOWN
        above = f"<p>{earlier:,} earlier ones; <code>print</code> shows all</p>" if earlier > 0 else ""
        shown = [[f"{event.step:,}", event.by, event.sentence()] for event in events[-MOST_ROWS_SHOWN:]]
        return above + html_table(["step", "by", "what happened"], shown)
