"""Answers the what-if tuner of a page: replays the recorded plasticity under other settings, in the view's thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from egeria_lab.algorithms.what_if import what_if
from egeria_lab.algorithms.what_if_record import RecordedRun, WhatIf
from egeria_lab.dashboard.saving_rows import number
from egeria_lab.engine.what_if_data import RunSource
from egeria_lab.errors import EgeriaLabError

TUNED = ("tolerance", "window", "patience", "interval_steps")
"""The settings of `Plasticity` that the tuner has a slider for."""

MOST_SPANS = 1000
"""Stretches in one answer; of more than these the last are sent."""

NOT_RECORDED = "This run records no plasticity to replay; build the session with freeze=lab.Plasticity(…)."

ELSEWHERE = "The readings of this run are kept by rank 0: ask it with session.what_if(tolerance=…)."


class Tuner:
    """Replays one session's record; used by one thread, and only reads.

    Args:
        session: whose record.

    Example:
        >>> from egeria_lab.algorithms.freeze_policy import Plasticity
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", freeze=Plasticity(interval_steps=1, reference="fp32"))
        >>> _ = session.step(5)
        >>> answer = Tuner(session).answer({"tolerance": 0.4})
        >>> answer["last_step"], answer["spans"], answer["exact_until"], answer["why"]
        (5, [], None, '')
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._source: RunSource | None = None

    def answer(self, wish: Mapping[str, object]) -> dict[str, Any]:
        """What would have been frozen when, JSON-able and bounded.

        Args:
            wish: values of `TUNED`; those that are missing stay as recorded.

        Returns:
            ``spans``: ``[layer position, from step, to step or None, reason]``, ``saved`` and ``recorded``
            shares of the FLOPs, ``exact_until`` and ``why``, ``last_step``, ``blocked`` in words, ``took_ms``;
            or ``problem`` in one sentence.
        """
        start = time.perf_counter()
        try:
            run = self._run()
            if run is None:
                asks_rank_0 = hasattr(self._session, "what_if") and not hasattr(self._session, "recorder")
                return {"problem": ELSEWHERE if asks_rank_0 else NOT_RECORDED}
            asked = _asked(run, wish)
            found = what_if(run, None, tolerances=None, **asked)
        except (EgeriaLabError, TypeError, ValueError) as error:
            return {"problem": str(error).strip().splitlines()[0]}
        return {**_plain(run, found, asked), "took_ms": round(1e3 * (time.perf_counter() - start), 1)}

    def _run(self) -> RecordedRun | None:
        session = self._session
        if getattr(session, "policy", None) is None or getattr(session, "recorder", None) is None:
            return None
        if self._source is None:
            self._source = RunSource(
                session.history, session.events, session.settings_book, session.recorder.flops(()),
                together=session.policy.together,
            )  # fmt: skip
        return self._source.latest()


def _asked(run: RecordedRun, wish: Mapping[str, object]) -> dict[str, Any]:
    """The settings that the page gave; the recorded snapshots are kept, so that the answer is exact for longer."""
    asked: dict[str, Any] = {}
    for name in TUNED:
        value = number(wish.get(name))
        if value is not None:
            asked[name] = value if name == "tolerance" else round(value)
    if "window" in asked or "patience" in asked:
        asked["refresh_evals"] = run.settings.readings_per_snapshot
    return asked


def _plain(run: RecordedRun, found: WhatIf, asked: Mapping[str, Any]) -> dict[str, Any]:
    place = {name: position for position, name in enumerate(found.layers)}
    reasons = {(h.layer, h.step): h.reason for h in found.happenings if h.action == "freeze"}
    spans: list[list[Any]] = [
        [place[name], start, end, reasons.get((name, start), "")]
        for name, stretches in found.spans.items()
        for start, end in stretches
    ]
    blocked = [h for h in found.happenings if h.action == "blocked"]
    said = f"step {blocked[-1].step:,}: {blocked[-1].layer} would freeze, but {blocked[-1].reason}" if blocked else ""
    return {
        "spans": sorted(spans, key=lambda span: span[1])[-MOST_SPANS:],
        "saved": found.saved_fraction,
        "recorded": found.recorded_saved_fraction,
        "exact_until": found.exact_until,
        "why": found.why_inexact,
        "last_step": found.last_step,
        "num_frozen": len(found.frozen),
        "blocked": said,
        "kept_snapshots": asked.get("refresh_evals"),
        "readings": len(run.reading_steps),
    }
