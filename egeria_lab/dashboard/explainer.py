"""Answers the attribution panel: which parts of some samples, and which layers, make the model say what it says.

Works on a thread of its own, one question at a time and only when asked: while the run stands still, for it looks
at the model of this very step. It says how far that moved since a layer froze last; where none froze, since
the same samples were looked at first.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from egeria_lab.dashboard.freeze_copies import FreezeCopies
from egeria_lab.dashboard.heat import bars, heat_over
from egeria_lab.dashboard.thumbnails import image_of
from egeria_lab.errors import EgeriaLabError
from egeria_lab.events import CommandRedone, CommandUndone

METHODS = (
    "integrated_gradients", "saliency", "input_x_gradient", "gradient_shap", "occlusion",
    "layer_conductance", "layer_activation", "layer_gradcam",
)  # fmt: skip
"""As `egeria_lab.interpret.METHODS`, which would load Captum (seconds) before anybody asks for it."""

MOST_SAMPLES = 8
MOST_RECORDS = 8
RUNNING = "Attribution looks at the model while it stands still: pause the run first."
NOT_THIS_SESSION = "This session cannot be asked for attributions."


@dataclass(frozen=True)
class Record:
    """What was found at a step."""

    step: int
    found: Any


class Explainer:
    """Explains samples of one session for its views.

    Args:
        session: whose model is looked at; attributing leaves no trace in it.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", epochs=1)
        >>> _ = session.step(3), session.freeze("layers.0")
        >>> answer = Explainer(session).answer({"ids": [4], "method": "saliency"})
        >>> answer["step"], [row["state"] for row in answer["layers"]]
        (3, ['frozen', 'active', 'active', 'active'])
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._records: dict[tuple[Any, ...], Record] = {}
        self._copies = FreezeCopies(session)
        self._rewinds = getattr(getattr(session, "history", None), "rewinds", 0)
        self._next: tuple[Mapping[str, object], Callable[[dict[str, Any]], None]] | None = None
        self._works = False
        self._lock = threading.Lock()

    def ask(self, wish: Mapping[str, object], tell: Callable[[dict[str, Any]], None]) -> None:
        """Find the answer in the background and `tell` it; of several questions that wait, the newest counts."""
        with self._lock:
            self._next = (wish, tell)
            if self._works:
                return
            self._works = True
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._work,), name="egeria-lab-explainer", daemon=True).start()

    def answer(self, wish: Mapping[str, object]) -> dict[str, Any]:
        """Explain some samples now, JSON-able and bounded.

        Args:
            wish: ``{"ids": [4, 7], "method": a name in METHODS, "layer": a layer's name or None}``.

        Returns:
            ``step``, ``items`` (a picture with the attributions over it, or bars, for each sample), ``layers``
            (conductance and state of each), ``drift`` since the last freeze or the first look, ``score_change``,
            ``took_ms``; or ``problem`` in one sentence.
        """
        start = time.perf_counter()
        if getattr(self._session, "attribute", None) is None:
            return {"problem": NOT_THIS_SESSION}
        if self._session.state == "running":
            return {"problem": RUNNING}
        try:
            found, answer = self._explain(wish)
            drifted = self._drift(wish, found, answer["step"])
        except EgeriaLabError as error:
            return {"problem": _first_line(error)}
        except Exception as error:  # whatever a model of the user's own raises is told to who asked
            return {"problem": f"The model could not be explained: {type(error).__name__}: {_first_line(error)}"}
        return {**answer, "drift": drifted, "took_ms": round(1e3 * (time.perf_counter() - start), 1)}

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._next is None:
                    self._works = False
                    return
                (wish, tell), self._next = self._next, None
            tell(self.answer(wish))

    def _explain(self, wish: Mapping[str, object]) -> tuple[Any, dict[str, Any]]:
        session, ids, method, layer = self._session, _ids(wish.get("ids")), str(wish.get("method")), _layer(wish)
        step, found = session.steps_done, self._look(wish)
        since = {row.name: row.since_step for row in session.layers}
        return found, {
            "step": step,
            "method": method,
            "layer": layer,
            "where": f"what {layer} puts out" if layer else "the inputs",
            "signed": bool((found.maps < 0).any()),
            "score_change": _number(found.score_change),
            "delta": None if found.delta is None else _number(float(found.delta.abs().max())),
            "items": [self._item(i, row, found) for row, i in enumerate(ids)],
            "layers": [
                {"name": row.name, "state": row.state, "mean_abs": _number(row.mean_abs),
                 "total": _number(row.total), "since": since.get(row.name) if row.state == "frozen" else None}
                for row in found.layers
            ],
        }  # fmt: skip

    def _item(self, i: int, row: int, found: Any) -> dict[str, Any]:
        sample, values = found.inputs[row].numpy(), found.maps[row].numpy()
        item: dict[str, Any] = {"id": i, "class": self._class(found.targets[row])}
        image = image_of(sample)
        plane = values.sum(axis=0) if values.ndim == 3 else values if values.ndim == 2 else None
        if image is not None and plane is not None and found.inputs.is_floating_point():
            return {**item, "picture": heat_over(image, np.zeros_like(plane)), "heat": heat_over(image, plane)}
        if not found.inputs.is_floating_point() and values.ndim == 2 and len(values) == len(sample.reshape(-1)):
            return {**item, "bars": bars(values.sum(axis=1), self._tokens(sample.reshape(-1)))}
        flat = values.reshape(-1)
        kind = "unit" if found.layer else "feature"
        return {**item, "bars": bars(flat, [f"{kind} {k}" for k in range(len(flat))])}

    def _class(self, target: Any) -> str:
        if target.dim():
            return ""
        names = getattr(getattr(self._session, "data", None), "classes", ())
        return str(names[int(target)]) if 0 <= int(target) < len(names) else str(int(target))

    def _tokens(self, ids: Any) -> list[str]:
        words = getattr(getattr(self._session, "data", None), "tokens", ())
        known = [words[int(i)] if int(i) < len(words) else f"id {int(i)}" for i in ids]
        return [f"{place}: {word!r}" for place, word in enumerate(known)]

    def _look(self, wish: Mapping[str, object], **more: Any) -> Any:
        layer = _layer(wish)
        options = more if layer is None else {"layer": layer, **more}
        return self._session.attribute(list(_ids(wish.get("ids"))), method=str(wish.get("method")), **options)

    def _drift(self, wish: Mapping[str, object], found: Any, step: int) -> dict[str, Any] | None:
        """How far this moved since the last freeze, or else since the oldest record of the same samples, or None."""
        key = (_ids(wish.get("ids")), str(wish.get("method")), _layer(wish), tuple(found.targets.reshape(-1).tolist()))
        self._forget_what_was_undone()
        record = self._records.pop(key, None)
        self._records[key] = record or Record(step, found)  # the newest key last
        self._records = dict(list(self._records.items())[-MOST_RECORDS:])
        copy = self._copies.before(step)
        if copy is not None:
            record = Record(copy.step, self._look(wish, state=copy.state))
        if record is None or record.step == step:
            return None
        rows = found.drift_since(record.found).rows
        moved = {row.name: {"cosine": _number(row.cosine), "relative_l2": _number(row.relative_l2)} for row in rows}
        why = "" if copy is None else f"{copy.layer} froze"
        return {"since": record.step, "why": why, "maps": moved.pop("maps"), "layers": moved}

    def _forget_what_was_undone(self) -> None:
        """After an undo only what was found before it is of this course of the run."""
        rewinds = self._session.history.rewinds
        if rewinds == self._rewinds:
            return
        undone = self._session.events.of(CommandUndone, CommandRedone)[-1:]
        once = rewinds == self._rewinds + 1 and bool(undone) and isinstance(undone[0], CommandUndone)
        last = undone[0].step if once else -1
        self._records = {key: record for key, record in self._records.items() if record.step <= last}
        self._copies.forget_behind(last - 1)  # what froze at that very step was taken back too
        self._rewinds = rewinds


def _ids(given: object) -> tuple[int, ...]:
    whole = isinstance(given, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in given)
    if not whole or not isinstance(given, (list, tuple)) or not 1 <= len(given) <= MOST_SAMPLES:
        raise EgeriaLabError(f"Give 1 to {MOST_SAMPLES} sample ids, whole numbers such as 3, 17; got {given!r}.")
    return tuple(int(i) for i in given)


def _layer(wish: Mapping[str, object]) -> str | None:
    return str(wish["layer"]) if wish.get("layer") else None


def _number(value: float | None) -> float | None:
    return None if value is None or value != value else float(f"{value:.4g}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
