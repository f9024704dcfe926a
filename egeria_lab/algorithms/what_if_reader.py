"""Stand in for the reader of a real run: hand out readings from the record, and notice when they are others."""

from __future__ import annotations

from bisect import bisect_right

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.algorithms.what_if_record import RecordedRun


class RecordedReader:
    """Takes snapshots and readings when a real run would, and finds them on record.

    As soon as a real run would compare with another snapshot, or read where nothing is on record, what is on
    record is only an estimate: from then on it is used as it is, with a new series at each recorded snapshot.

    Args:
        run: the recorded run.
        changed: fields of `Plasticity` that were changed.

    Attributes:
        off: why the readings from here on are no longer those of a real run, in one sentence; empty before.
        wants_snapshot: a snapshot is due before the next reading.
        is_pending: a reading is under way.
    """

    def __init__(self, run: RecordedRun, changed: frozenset[str]) -> None:
        self.off = ""
        self.wants_snapshot = True
        self._run = run
        self._changed = changed
        self._position_of = {step: position for position, step in enumerate(run.reading_steps)}
        self._pending: int | None = None
        self._used: int | None = None
        self._snapshot: int | None = None
        self._readings_since_snapshot = 0
        self._new_series = False

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def ask(self, step: int, settings: Plasticity) -> None:
        """A snapshot if one is due, then the next reading, where the machine was not too busy for it."""
        if not self.off:
            if self.wants_snapshot or self._readings_since_snapshot >= settings.readings_per_snapshot:
                self._snapshot, self._readings_since_snapshot = step, 0
                self._new_series, self.wants_snapshot = True, False
            position = self._position_of.get(step)
            if position is None and step in self._run.skipped:
                return
            self._readings_since_snapshot += 1
            if position is not None and self._run.snapshot_steps[position] == self._snapshot:
                self._pending = self._used = position
                return
            self.off = self._difference(step, position, settings)
        self._ask_for_newest(step)

    def collect(self) -> tuple[int, bool] | None:
        """The reading that was asked for: its position on record, and whether a new series begins with it."""
        if self._pending is None:
            return None
        answer = self._pending, self._new_series
        self._pending, self._new_series = None, False
        return answer

    def _ask_for_newest(self, step: int) -> None:
        snapshots, used = self._run.snapshot_steps, self._used
        position = bisect_right(self._run.reading_steps, step) - 1
        if position < 0 or position == used:
            return
        if self.wants_snapshot or used is None or snapshots[position] != snapshots[used]:
            self._new_series, self.wants_snapshot = True, False
        self._pending = self._used = position

    def _difference(self, step: int, position: int | None, settings: Plasticity) -> str:
        """In words, how the readings of a real run would differ from those on record from here on."""
        if position is None:
            return f"a real run would read at step {step:,}, and no reading of that step is on record."
        found, recorded = self._run.snapshot_steps[position], self._run.settings
        words = (
            f"from step {step:,} on a real run would compare with a snapshot of step {self._snapshot:,}, and the "
            f"readings on record compare with one of step {found:,}"
        )
        kept = recorded.readings_per_snapshot
        if "interval_steps" in self._changed or kept == settings.readings_per_snapshot:
            return f"{words}."
        if kept < settings.window + settings.patience:
            return f"{words}, each used for {kept} readings: too few for window + patience."
        return f"{words}; refresh_evals={kept} keeps the recorded snapshots."
