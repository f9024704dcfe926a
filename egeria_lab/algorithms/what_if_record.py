"""What a what-if replay reads and what it answers with: plain records, nothing computed but sums.

A *recorded run* is what a training wrote down that the freezing rule depends on. Series have one entry for
each step, from step 1, or one for each reading; they may be lists, tuples or arrays of the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from egeria_lab.algorithms.costs import StepFlops
from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.errors import require
from egeria_lab.tables import amount, html_table, percent, text_table

ACTIONS = ("freeze", "thaw", "settle", "unsettle", "pin", "unpin", "set")


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Something that was done in the recorded run after a step.

    Attributes:
        step: finished steps when it was done; it holds from the step after.
        action: ``"freeze"``, ``"thaw"``, ``"settle"``, ``"unsettle"``, ``"pin"``, ``"unpin"`` or ``"set"``.
        layer: the layer; for ``"set"`` the one whose own tolerance it is, or None for all.
        by: ``"rule"`` (replaced by what the replay decides), or somebody else, whose acts are repeated.
        name: for ``"set"``, the field of `Plasticity`.
        value: for ``"set"``, its new value; for ``"settle"``, over how many passes.
        reason: why, in one clause.
    """

    step: int
    action: str
    layer: str | None = None
    by: str = "rule"
    name: str = ""
    value: Any = None
    reason: str = ""

    def __post_init__(self) -> None:
        require(self.action in ACTIONS, "Act", "action", self.action, "one of " + ", ".join(ACTIONS))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What a training wrote down that the freezing rule depends on.

    Attributes:
        layers: names of the layer modules, front to back.
        settings: the rule's settings at the start.
        losses: training loss of each step.
        learning_rates: rate that each step was made with.
        passes: passes over the data after each step.
        samples: samples trained on up to each step, that step included.
        reading_steps: the step after which each reading was made, ascending.
        snapshot_steps: for each reading, the step after which its reference had been taken.
        values: for each layer its value in each reading, NaN where it was not read.
        skipped: steps whose reading was left out because the machine was busy.
        acts: freezes, thaws, pins and settings, by whomever, in order.
        accuracies: validation accuracy after the steps that ended a pass; what a guard looks at.
        flops: FLOPs of a training step per sample, for any frozen set; asked for each one that occurs.
        together: layers could freeze together whatever the settings say (a compiled model).

    Raises:
        InvalidSettingError: when series that belong together differ in length.
    """

    layers: tuple[str, ...]
    settings: Plasticity
    losses: Sequence[float]
    learning_rates: Sequence[float]
    passes: Sequence[float]
    samples: Sequence[float]
    reading_steps: Sequence[int]
    snapshot_steps: Sequence[int]
    values: Sequence[Sequence[float]]
    flops: Callable[[tuple[str, ...]], StepFlops]
    skipped: frozenset[int] = frozenset()
    acts: tuple[Act, ...] = ()
    accuracies: Mapping[int, float] = field(default_factory=dict)
    together: bool = False

    def __post_init__(self) -> None:
        for name in ("learning_rates", "passes", "samples"):
            series = getattr(self, name)
            require(len(series) == self.last_step, "RecordedRun", name, len(series), f"{self.last_step} values long")
        count = len(self.reading_steps)
        for name, length in (("snapshot_steps", len(self.snapshot_steps)), *(("values", len(v)) for v in self.values)):
            require(length == count, "RecordedRun", name, length, f"one for each of {count} readings")
        require(len(self.values) == len(self.layers), "RecordedRun", "values", len(self.values), "one series a layer")

    @property
    def last_step(self) -> int:
        """Number of recorded steps."""
        return len(self.losses)

    def executed_flops(self, changes: Sequence[tuple[int, tuple[str, ...]]]) -> float:
        """FLOPs of all recorded steps under a timeline of frozen sets.

        Args:
            changes: ``(step, frozen)``, ascending: from the step after on, these layers are frozen.
        """
        total = 0.0
        nothing: tuple[str, ...] = ()
        edges = [(0, nothing), *changes, (self.last_step, nothing)]
        for (start, frozen), (end, _) in pairwise(edges):
            total += self.flops(frozen).total * (self._samples_up_to(end) - self._samples_up_to(start))
        return total

    def _samples_up_to(self, step: int) -> float:
        return self.samples[min(step, self.last_step) - 1] if step > 0 and self.last_step else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One thing that would have happened.

    Attributes:
        step: finished steps when it would have happened.
        action: ``"freeze"``, ``"thaw"``, ``"settle"`` (is on its way to being frozen), ``"unsettle"`` or ``"blocked"``
            (would freeze, but may not).
        layer: the layer.
        reason: one clause with the numbers.
        by: ``"rule"``, or who did it in the recorded run.
        exact: a real run with these settings would have done the same at this step.
    """

    step: int
    action: str
    layer: str
    reason: str
    by: str
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What a recorded run would have frozen under other settings, without training again.

    Attributes:
        layers: names of the layer modules, front to back.
        changes: the settings that were changed, by field of `Plasticity`.
        tolerances: own tolerances of layers that were asked for, or None for those of the recorded run.
        happenings: what would have begun to settle, been frozen, thawed or blocked, in order.
        exact_until: the last step up to which, itself included, a real run with these settings would have done
            the same; None when that holds to the end of the record.
        why_inexact: why not beyond it, in one sentence; empty when exact to the end.
        last_step: recorded steps.
        executed_flops: FLOPs that these steps would have cost.
        recorded_flops: FLOPs that they cost in the recorded run, counted in the same way.
        full_flops: FLOPs with nothing frozen.
    """

    layers: tuple[str, ...]
    changes: Mapping[str, Any]
    tolerances: Mapping[str, float] | None
    happenings: tuple[Happening, ...]
    exact_until: int | None
    why_inexact: str
    last_step: int
    executed_flops: float
    recorded_flops: float
    full_flops: float

    @property
    def saved_fraction(self) -> float:
        """Share of the FLOPs that would not have been executed, in [0, 1]; readings and caches not counted."""
        return 1 - self.executed_flops / self.full_flops if self.full_flops else 0.0

    @property
    def recorded_saved_fraction(self) -> float:
        """The same for what the recorded run really froze."""
        return 1 - self.recorded_flops / self.full_flops if self.full_flops else 0.0

    @property
    def spans(self) -> dict[str, list[tuple[int, int | None]]]:
        """For each layer the stretches in which it would be frozen: after this step, up to that one or the end."""
        spans: dict[str, list[tuple[int, int | None]]] = {name: [] for name in self.layers}
        for happening in self.happenings:
            stretches = spans[happening.layer]
            if happening.action == "freeze":
                stretches.append((happening.step, None))
            elif happening.action == "thaw":
                stretches[-1] = (stretches[-1][0], happening.step)
        return spans

    @property
    def frozen(self) -> tuple[str, ...]:
        """Layers that would be frozen at the end of the record, front to back."""
        return tuple(name for name, stretches in self.spans.items() if stretches and stretches[-1][1] is None)

    def to_dict(self) -> dict[str, Any]:
        """The answer as JSON-able plain data."""
        plain = {name: value if not callable(value) else value.__name__ for name, value in self.changes.items()}
        return {
            "changes": plain,
            "tolerances": None if self.tolerances is None else dict(self.tolerances),
            "happenings": [asdict(happening) for happening in self.happenings],
            "frozen": list(self.frozen),
            "spans": {name: [list(stretch) for stretch in stretches] for name, stretches in self.spans.items()},
            "exact_until": self.exact_until,
            "why_inexact": self.why_inexact,
            "last_step": self.last_step,
            "executed_flops": self.executed_flops,
            "recorded_flops": self.recorded_flops,
            "full_flops": self.full_flops,
            "saved_fraction": self.saved_fraction,
            "recorded_saved_fraction": self.recorded_saved_fraction,
        }

    def _rows(self) -> list[list[str]]:
        return [
            [f"{h.step:,}", h.layer, _WORDS[h.action], h.by, "exact" if h.exact else "estimate", h.reason]
            for h in self.happenings
        ] or [["–", "–", "nothing would freeze", "–", "exact" if self.exact_until is None else "estimate", "–"]]

    def _summary(self) -> str:
        until = "to the end of the record" if self.exact_until is None else f"up to step {self.exact_until:,}"
        why = f": {self.why_inexact}" if self.why_inexact else "."
        return (
            f"{amount(self.executed_flops, 'FLOPs')} of {amount(self.full_flops, 'FLOPs')}, "
            f"{percent(self.saved_fraction)} saved (recorded run: {percent(self.recorded_saved_fraction)}), in "
            f"{self.last_step:,} steps. Exact {until}{why}"
        )

    def __repr__(self) -> str:
        return f"{text_table(_HEAD, self._rows())}\n{self._summary()}"

    def _repr_html_(self) -> str:
        rows = html_table(_HEAD, self._rows())
        return rows + html_table(["saved", "in all"], [[percent(self.saved_fraction), self._summary()]])


_HEAD = ["step", "layer", "what", "by", "certainty", "why"]
_WORDS = {
    "freeze": "freezes", "thaw": "thaws", "settle": "begins to settle", "unsettle": "settles no longer",
    "blocked": "would freeze, but may not",
}  # fmt: skip
