"""The numbers by which runs are compared, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from egeria_lab.dashboard.compare_runs import Run, with_kinds
from egeria_lab.dashboard.saving_rows import number
from egeria_lab.dashboard.series import spans, trailing_mean, x_of_steps
from egeria_lab.history import Array
from egeria_lab.tables import amount, percent

MEAN_STEPS = 20
MOST_WORDS = 120

HEAD = (
    "run", "state", "steps", "final accuracy", "best accuracy", "FLOPs", "saved by freezing", "seconds",
    "frozen layers",
)  # fmt: skip
"""Columns of the table in words; settings that differ follow."""


@dataclass(frozen=True, slots=True)
class Measures:
    """What a run came to, so far.

    Attributes:
        steps: finished steps.
        final_accuracy, best_accuracy: on the validation data after a pass, in [0, 1]; None before the first.
        flops: FLOPs of all steps that ran.
        flops_saved: share of what the same steps would have taken with nothing frozen, or None.
        seconds: time from the first step to the last, pauses left out.
        frozen, layers: layers that are frozen now, and all.
    """

    steps: int
    final_accuracy: float | None
    best_accuracy: float | None
    flops: float
    flops_saved: float | None
    seconds: float
    frozen: int
    layers: int


def measures(run: Run) -> Measures:
    """The numbers of one run.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", epochs=1)
        >>> _ = session.step(3)
        >>> found = measures(Run("plain", session))
        >>> found.steps, found.final_accuracy, found.flops_saved, found.frozen, found.layers
        (3, None, 0.0, 0, 4)
    """
    history = run.history
    steps, valid = history.steps.rows(), history.epochs["valid_accuracy"]
    valid = valid[np.isfinite(valid)]
    flops, full = float(np.nansum(steps["train_flops"])), float(np.nansum(steps["full_flops"]))
    last = int(steps["step"][-1]) if len(steps["step"]) else 0
    frozen = {span.layer for span in spans(run.events, last + 1) if span.is_frozen and span.end == last + 1}
    return Measures(
        steps=last,
        final_accuracy=float(valid[-1]) if len(valid) else None,
        best_accuracy=float(valid.max()) if len(valid) else None,
        flops=flops,
        flops_saved=1 - flops / full if full else None,
        seconds=number(history.steps.last().get("elapsed_seconds")) or 0.0,
        frozen=len(frozen),
        layers=len(history.layer_names),
    )


def accuracy_points(run: Run, axis: str) -> tuple[Array, Array, bool]:
    """Accuracy over training: after each pass on the validation data, or of the batches before there is any.

    Args:
        run: the run.
        axis: a key of `egeria_lab.dashboard.series.X_AXES`.

    Returns:
        x and accuracy, both of shape ``(n,)``, and whether it is of validation data.
    """
    history = run.history
    epochs = history.epochs.rows()
    known = np.isfinite(epochs["valid_accuracy"])
    if known.any():
        return x_of_steps(history, epochs["step"][known], axis), epochs["valid_accuracy"][known], True
    steps = history.steps.rows()
    finite = np.isfinite(steps["accuracy"])
    mean = trailing_mean(steps["accuracy"][finite], MEAN_STEPS)
    return x_of_steps(history, steps["step"][finite], axis), mean, False


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Settings that are not the same in all runs: name → a value for each run, a dash where it has none.

    Example:
        >>> from egeria_lab.session import Session
        >>> pair = [Run(str(seed), Session("mlp", "digits", epochs=1, seed=seed)) for seed in (0, 1)]
        >>> differing(pair)
        {'seed': ['0', '1']}
    """
    settings = [run.settings() for run in runs]
    for name in dict.fromkeys(name for one in settings for name in with_kinds(one)):
        if len({one.get(name) for one in settings}) > 1:  # another kind of rule: one value each says it best
            settings = [_one_value(one, name) for one in settings]
    names = dict.fromkeys(name for one in settings for name in one)
    rows = {name: [_cut(one.get(name, "–")) for one in settings] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def data_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """One row a run, indexed by its name: plain numbers, then the settings that differ."""
    found = [measures(run) for run in runs]
    columns = {
        "state": [run.state for run in runs],
        "steps": [one.steps for one in found],
        "final_accuracy": [one.final_accuracy for one in found],
        "best_accuracy": [one.best_accuracy for one in found],
        "flops": [one.flops for one in found],
        "flops_saved": [one.flops_saved for one in found],
        "seconds": [one.seconds for one in found],
        "frozen_layers": [one.frozen for one in found],
        "layers": [one.layers for one in found],
        **differing(runs),
    }
    return pd.DataFrame(columns, index=pd.Index([run.name for run in runs], name="run")).astype(
        dict.fromkeys(("final_accuracy", "best_accuracy", "flops_saved"), "float64")
    )


def cells(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The same in words: head and rows, ready for `egeria_lab.tables`."""
    rows = []
    for run, one in zip(runs, map(measures, runs), strict=True):
        rows.append([
            run.name, run.state, f"{one.steps:,}", _accuracy(one.final_accuracy), _accuracy(one.best_accuracy),
            amount(one.flops, "FLOPs"), percent(one.flops_saved), f"{one.seconds:,.1f} s",
            f"{one.frozen} of {one.layers}",
        ])  # fmt: skip
    return list(HEAD), rows


def differing_cells(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The settings that differ as a table, a column a run."""
    return ["setting", *(run.name for run in runs)], [[name, *values] for name, values in differing(runs).items()]


def _one_value(settings: dict[str, str], name: str) -> dict[str, str]:
    spelled = with_kinds(settings).get(name, settings.get(name, "–"))
    return {name: spelled} | {key: v for key, v in settings.items() if key != name and not key.startswith(f"{name}.")}


def _accuracy(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _cut(words: str) -> str:
    return words if len(words) <= MOST_WORDS else f"{words[: MOST_WORDS - 1]}…"
