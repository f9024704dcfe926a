"""What a user can press or move, and the one thing each of these does: put a command, or ask to run or rest.

Nothing else here changes a session. A command lands at the start of the next step; until then its key is
pending, so that the page can say so.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from egeria_lab.commands import (
    Command,
    CommandQueue,
    FreezeLayer,
    Override,
    PinLayer,
    Receipt,
    Reset,
    ThawLayer,
    UnpinLayer,
)
from egeria_lab.dashboard.summary import SessionView, SettingRow
from egeria_lab.errors import EgeriaLabError

PRIMARY_SETTING = "freeze.tolerance"
"""The setting that stands in the open; the others are folded away under "more"."""

LAYER_COMMANDS: dict[str, Callable[..., Command]] = {
    "freeze": FreezeLayer,
    "thaw": ThawLayer,
    "pin": PinLayer,
    "unpin": UnpinLayer,
}
"""What the buttons of a layer put."""

NUM_REMEMBERED = 64
"""How many landed commands are reported to the page; a page asks for its own by number."""


class SettingControl(SettingRow, Protocol):
    """One row of `session.settings()`, with what a slider needs besides."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def log_scale(self) -> bool: ...
    @property
    def integer(self) -> bool: ...
    @property
    def applies(self) -> str: ...


class LiveSession(SessionView, Protocol):
    """What the dashboard needs of a session: to read it, to put commands, to start and stop it."""

    @property
    def commands(self) -> CommandQueue: ...
    @property
    def steps_per_epoch(self) -> int: ...
    def settings(self) -> Iterable[SettingControl]: ...
    def start(self) -> object: ...
    def pause(self) -> object: ...
    def resume(self) -> object: ...
    def stop(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Sent:
    """A command on its way: the page's number for it, what it concerns, and its receipt."""

    number: str
    key: str
    receipt: Receipt


class Controls:
    """Turns the page's requests into commands, and remembers which of them have landed.

    Args:
        session: whose queue the commands go into.

    Example:
        >>> from types import SimpleNamespace
        >>> session = SimpleNamespace(commands=CommandQueue())
        >>> controls = Controls(session)
        >>> controls.handle({"do": "freeze", "layer": "layers.0", "number": "1"})
        >>> session.commands.pending()
        [FreezeLayer(by='dashboard', layer='layers.0')]
        >>> controls.report()["pending"]
        ['layer:layers.0']
    """

    def __init__(self, session: LiveSession) -> None:
        self._session = session
        self._sent: deque[Sent] = deque(maxlen=4 * NUM_REMEMBERED)
        self._landed: deque[dict[str, str]] = deque(maxlen=NUM_REMEMBERED)
        self._lock = threading.Lock()

    def handle(self, request: Mapping[str, object]) -> None:
        """Do what the page asks; a request that cannot be done is reported as rejected, with the reason.

        Args:
            request: ``{"do": "freeze" | "thaw" | "pin" | "unpin", "layer"}``,
                ``{"do": "set", "name", "value", "layer"}``, ``{"do": "reset", "name", "layer"}`` or
                ``{"do": "play" | "pause" | "stop"}``, each with the page's own ``"number"``.
        """
        number = str(request.get("number", ""))
        try:
            if request.get("do") in ("play", "pause", "stop"):
                self._run(str(request["do"]))
                self._note(number, "done", "")
            else:
                key, command = self._command(request)
                sent = Sent(number, key, self._session.commands.put(command))
                with self._lock:
                    self._sent.append(sent)
        except (EgeriaLabError, KeyError, TypeError, ValueError) as error:
            self._note(number, "rejected", _one_sentence(error))

    def report(self) -> dict[str, list[object]]:
        """What is pending (keys) and what has landed (number, outcome, reason): small, JSON-able."""
        with self._lock:
            waiting = [sent for sent in self._sent if sent.receipt.event is None]
            for sent in self._sent:
                if sent.receipt.event is not None:
                    rejected = sent.receipt.state == "rejected"
                    reason = sent.receipt.event.sentence() if rejected else ""
                    self._landed.append({"number": sent.number, "as": sent.receipt.state, "why": reason})
            self._sent = deque(waiting, maxlen=self._sent.maxlen)
            return {"pending": [sent.key for sent in waiting], "landed": list(self._landed)}

    def _run(self, wish: str) -> None:
        session = self._session
        if wish == "pause":
            session.pause()
        elif wish == "stop":
            session.stop()
        elif session.state == "paused":
            session.resume()
        else:
            session.start()

    def _command(self, request: Mapping[str, object]) -> tuple[str, Command]:
        wish = str(request.get("do"))
        layer = None if request.get("layer") is None else str(request["layer"])
        if wish in LAYER_COMMANDS:
            return f"layer:{layer}", LAYER_COMMANDS[wish](layer=str(request["layer"]), by="dashboard")
        name = str(request["name"])
        key = f"set:{name}:{layer or ''}"
        if wish == "reset":
            return key, Reset(name=name, layer=layer, by="dashboard")
        if wish != "set":
            raise ValueError(f"Unknown request {wish!r}; known: set, reset, {', '.join(LAYER_COMMANDS)}.")
        value = self._number(name, request["value"])
        return key, Override(name=name, value=value, layer=layer, by="dashboard")

    def _number(self, name: str, given: object) -> float | int:
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given):
            raise ValueError(f"{name} must be a number, got {given!r}.")
        whole = any(row.name == name and row.integer for row in self._session.settings())
        return round(given) if whole else float(given)

    def _note(self, number: str, outcome: str, why: str) -> None:
        with self._lock:
            self._landed.append({"number": number, "as": outcome, "why": why})


def describe_settings(session: LiveSession) -> list[dict[str, object]]:
    """Every setting that may change mid-run, as the page needs it to draw a slider.

    Returns:
        For each: name, value, default, range, unit, scale, when it applies, one line of help, whether it is
        folded away, and under ``"layers"`` the layers' own values where they differ from the common one.
    """
    rows: list[dict[str, object]] = []
    for row in session.settings():
        if not isinstance(row.value, (int, float)) or isinstance(row.value, bool):
            continue
        rows.append(
            {
                "name": row.name, "value": row.value, "default": row.default, "low": row.low,
                "high": row.high, "unit": row.unit, "log": row.log_scale, "integer": row.integer,
                "per_layer": row.per_layer, "applies": row.applies, "help": row.help,
                "primary": row.name == PRIMARY_SETTING, "layers": _own_values(session, row),
            }
        )  # fmt: skip
    return rows


def _own_values(session: LiveSession, row: SettingControl) -> dict[str, object]:
    if not row.per_layer:
        return {}
    values = {layer.name: session.setting(row.name, layer=layer.name) for layer in session.layers}
    return {name: value for name, value in values.items() if value != row.value}


def _one_sentence(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
