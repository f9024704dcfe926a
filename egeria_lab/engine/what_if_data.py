"""Gather from a session's history and events what a what-if replay needs; only reads, from any thread."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from egeria_lab.algorithms.cost_model import layer_flops
from egeria_lab.algorithms.costs import StepFlops
from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.algorithms.what_if_record import Act, RecordedRun
from egeria_lab.config import Settings
from egeria_lab.errors import InvalidSettingError
from egeria_lab.events import (
    Event,
    EventLog,
    LayerFrozen,
    LayerPinned,
    LayerSettling,
    LayerThawed,
    LayerUnpinned,
    ReadingSkipped,
    ReferenceRefreshed,
    SettingChanged,
    SettlingEnded,
)
from egeria_lab.history import Array, History

_ACTIONS: dict[type[Event], str] = {
    LayerFrozen: "freeze",
    LayerThawed: "thaw",
    LayerPinned: "pin",
    LayerUnpinned: "unpin",
    SettingChanged: "set",
    LayerSettling: "settle",
    SettlingEnded: "unsettle",
}


class RunSource:
    """Hands out the recorded run of a session, gathered again only when something was added to it.

    Args:
        history: its tables.
        events: what happened.
        settings: its settings.
        flops: FLOPs of a training step per sample with nothing frozen; other sets are derived from them.
        together: layers may freeze together whatever the settings say (a compiled model).

    Example:
        >>> from egeria_lab.algorithms.what_if import what_if
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", freeze=Plasticity(interval_steps=1, reference="fp32"))
        >>> source = RunSource(session.history, session.events, session.settings_book, session.recorder.flops(()))
        >>> _ = session.step(5)
        >>> what_if(source.latest(), tolerance=0.4).last_step, source.latest() is source.latest()
        (5, True)
    """

    def __init__(
        self, history: History, events: EventLog, settings: Settings, flops: StepFlops, *, together: bool = False
    ) -> None:
        self._parts = history, events, settings
        self._together = together
        self._flops = cache(lambda frozen: layer_flops(flops, frozen=frozen))
        self._newest: tuple[tuple[int, ...], RecordedRun] | None = None

    def latest(self) -> RecordedRun:
        """The run so far.

        Raises:
            InvalidSettingError: when the session's freezing rule reads no plasticity.
        """
        history, events, settings = self._parts
        size = len(history.steps), len(history.plasticity), len(history.epochs), len(events)
        if self._newest is None or self._newest[0] != size:
            self._newest = size, recorded_run(history, events, settings, self._flops, together=self._together)
        return self._newest[1]


def recorded_run(
    history: History,
    events: EventLog,
    settings: Settings,
    flops: Callable[[tuple[str, ...]], StepFlops],
    *,
    together: bool = False,
) -> RecordedRun:
    """What a what-if replay needs to know of a run so far, also while it goes on.

    Args:
        history: its tables.
        events: what happened.
        settings: its settings, from which those of the start are told.
        flops: FLOPs of a training step per sample under any frozen set; called in the calling thread.
        together: layers may freeze together whatever the settings say (a compiled model).

    Raises:
        InvalidSettingError: when the session's freezing rule reads no plasticity.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", freeze=Plasticity(interval_steps=1, reference="fp32"))
        >>> _ = session.step(5)
        >>> run = recorded_run(session.history, session.events, session.settings_book, session.recorder.flops)
        >>> run.last_step, list(run.reading_steps)    # the reading of step 5 lands at the next evaluation
        (5, [1, 2, 3, 4])
    """
    if settings.freeze is None:
        raise InvalidSettingError(
            "what_if replays plasticity, and this session records none; build it with freeze=lab.Plasticity(…), "
            "with tolerance=0 to record without freezing."
        )
    # In this order: of what goes with a row that was taken first, nothing is missing in what is taken later.
    steps, readings, epochs = history.steps.rows(), history.plasticity.rows(), history.epochs.rows()
    happened = list(events)
    reading_steps, snapshot_steps, values = _readings(readings, len(history.layer_names), happened)
    return RecordedRun(
        layers=history.layer_names,
        settings=_at_the_start(settings, settings.freeze),
        losses=_series(steps["loss"]),
        learning_rates=_series(steps["learning_rate"]),
        passes=_series(steps["epoch"]),
        samples=_series(steps["samples"]),
        reading_steps=reading_steps,
        snapshot_steps=snapshot_steps,
        values=values,
        flops=flops,
        skipped=frozenset(event.step for event in happened if isinstance(event, ReadingSkipped)),
        acts=_acts(happened),
        accuracies=_accuracies(epochs),
        together=together,
    )


def _readings(
    rows: Mapping[str, Array], num_layers: int, happened: Sequence[Event]
) -> tuple[list[int], list[int], list[array[float]]]:
    """Rows of one reading stand together; spread them out to one column a layer."""
    steps, generations = rows["step"], rows["generation"]
    is_first = np.concatenate([[True], steps[1:] != steps[:-1]]) if len(steps) else np.zeros(0, bool)
    matrix = np.full((num_layers, int(is_first.sum())), np.nan)
    matrix[rows["layer"].astype(np.int32), np.cumsum(is_first, dtype=np.int32) - 1] = rows["value"]
    taken = {event.generation: event.step for event in happened if isinstance(event, ReferenceRefreshed)}
    reading_steps = [int(step) for step in steps[is_first]]
    snapshots = [taken[int(generation)] for generation in generations[is_first]]
    return reading_steps, snapshots, [_series(values) for values in matrix]


def _series(values: Array) -> array[float]:
    return array("d", np.ascontiguousarray(values, dtype=np.float64).tobytes())


def _accuracies(epochs: Mapping[str, Array]) -> dict[int, float]:
    pairs = zip(epochs["step"].tolist(), epochs["valid_accuracy"].tolist(), strict=True)
    return {int(step): accuracy for step, accuracy in pairs if accuracy == accuracy}


def _at_the_start(settings: Settings, now: Plasticity) -> Plasticity:
    """The rule's settings that the session was built with."""
    names = [name for name in settings.names() if name.startswith(f"{Plasticity.prefix}.")]
    return replace(now, **{name.partition(".")[2]: settings.default(name) for name in names})  # type: ignore[arg-type]


def _acts(happened: Sequence[Event]) -> tuple[Act, ...]:
    acts = []
    for event in happened:
        action = _ACTIONS.get(type(event))
        if action is None:
            continue
        fields: dict[str, Any] = {"step": event.step, "action": action, "by": event.by}
        fields |= {"layer": getattr(event, "layer", None), "reason": getattr(event, "reason", "")}
        if isinstance(event, LayerSettling):
            fields["value"] = event.epochs
        if isinstance(event, SettingChanged):
            prefix, _, name = event.name.partition(".")
            if prefix != Plasticity.prefix:
                continue
            fields |= {"name": name, "value": event.new}
        acts.append(Act(**fields))
    return tuple(acts)
