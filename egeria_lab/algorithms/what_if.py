"""What a recorded training would have frozen under other settings of the plasticity rule: no training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.algorithms.what_if_record import RecordedRun, WhatIf
from egeria_lab.algorithms.what_if_replay import Replay
from egeria_lab.errors import InvalidSettingError, is_number, unknown_name

UNCHANGEABLE = ("distance", "reference", "probe_rows", "load_gate")
"""Settings that decide what a reading measures: with others, other values would have been read."""


def what_if(
    run: RecordedRun,
    settings: Plasticity | None = None,
    *,
    tolerances: Mapping[str, float] | None = None,
    **changes: Any,
) -> WhatIf:
    """Replay the recorded readings of a training through the same rule under other settings.

    What is not changed stays as it was recorded, changes mid-run included; what is changed holds from the
    first step to the last. What was done by hand (freezes, thaws, pins) is repeated.

    The answer is exact, step for step, as long as a real run with these settings from the same seed would have
    been the same training and would have read the same: up to and including the first freeze or thaw that
    the recorded run did not make, or made when the replay does not. It ends earlier where other snapshots would
    have been taken: `window` and `patience` decide how long one is used, unless `refresh_evals` is given, and
    `interval_steps` decides when the first is taken. Beyond, the recorded readings are used as they are, as an
    estimate.

    Args:
        run: the recorded run.
        settings: all settings at once; those that equal the recorded run's count as unchanged.
        tolerances: layer → own tolerance, for the whole run; None for those of the recorded run.
        **changes: single settings, by field of `Plasticity`.

    Returns:
        What would have been frozen and thawed when and why, what it would have saved, and how far it is exact.

    Raises:
        UnknownNameError: for a setting or layer that there is not.
        InvalidSettingError: for a value out of range, or a setting that decides what a reading measures.

    Example:
        >>> from egeria_lab.algorithms.costs import StepFlops
        >>> flops = lambda frozen: StepFlops((1.0, 1.0), (0.0 if "body" in frozen else 1.0, 2.0))
        >>> distances = [float(min(step, 8)) for step in range(30)]    # rises, then stands still
        >>> run = RecordedRun(
        ...     layers=("body", "head"), settings=Plasticity(interval_steps=1, window=2, patience=2, tolerance=0),
        ...     losses=[1.0] * 30, learning_rates=[0.1] * 30, passes=[1.0] * 30, samples=range(4, 124, 4),
        ...     reading_steps=range(1, 31), snapshot_steps=[1] * 30, values=[distances, distances], flops=flops,
        ... )
        >>> answer = what_if(run, tolerance=0.5, refresh_evals=99)
        >>> [(one.step, one.action, one.layer) for one in answer.happenings], answer.exact_until
        ([(13, 'freeze', 'body')], 13)
    """
    asked = {**_differences(run.settings, settings), **changes}
    known = [field.name for field in fields(Plasticity)]
    for name, value in asked.items():
        if name not in known:
            raise unknown_name("setting", name, [name for name in known if name not in UNCHANGEABLE])
        if name in UNCHANGEABLE and value != getattr(run.settings, name):
            raise InvalidSettingError(
                f"what_if cannot change {name}: it decides what a reading measures, and only readings with "
                f"{getattr(run.settings, name)!r} were recorded. Train a run with {name}={value!r} instead."
            )
    start = replace(run.settings, **asked)
    _check_tolerances(run, tolerances)
    replay = Replay(run, start, tolerances, frozenset(asked))
    replay.play()
    return WhatIf(
        layers=run.layers,
        changes=asked,
        tolerances=tolerances,
        happenings=replay.happenings(),
        exact_until=replay.exact_until,
        why_inexact=replay.why_inexact,
        last_step=run.last_step,
        executed_flops=run.executed_flops(replay.frozen_sets),
        recorded_flops=run.executed_flops(replay.recorded_sets),
        full_flops=run.executed_flops(()),
    )


def _differences(recorded: Plasticity, settings: Plasticity | None) -> dict[str, Any]:
    if settings is None:
        return {}
    if not isinstance(settings, Plasticity):
        raise InvalidSettingError(f"what_if replays the plasticity rule: give lab.Plasticity(…), got {settings!r}.")
    names = [field.name for field in fields(Plasticity)]
    return {name: getattr(settings, name) for name in names if getattr(settings, name) != getattr(recorded, name)}


def _check_tolerances(run: RecordedRun, tolerances: Mapping[str, float] | None) -> None:
    for layer, tolerance in (tolerances or {}).items():
        if layer not in run.layers:
            raise unknown_name("layer", layer, run.layers)
        if not is_number(tolerance) or tolerance < 0:
            raise InvalidSettingError(f"the tolerance of {layer} must be a number >= 0, got {tolerance!r}.")
