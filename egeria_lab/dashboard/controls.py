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
    Discard,
    Extend,
    FreezeLayer,
    Override,
    PinLayer,
    Receipt,
    Redo,
    Reset,
    Restore,
    ThawLayer,
    Undo,
    UnpinLayer,
)
from egeria_lab.config import LEARNING_RATE
from egeria_lab.dashboard.setting_sliders import SettingControl
from egeria_lab.dashboard.summary import SessionView
from egeria_lab.dashboard.undo_words import Ring
from egeria_lab.errors import EgeriaLabError, InvalidSettingError
from egeria_lab.events import Event, RunFailed, RunPaused, RunResumed, RunStarted, RunStopped

LAYER_COMMANDS: dict[str, Callable[..., Command]] = {
    "freeze": FreezeLayer,
    "thaw": ThawLayer,
    "pin": PinLayer,
    "unpin": UnpinLayer,
}
"""What the buttons of a layer put."""

SAMPLE_COMMANDS: dict[str, Callable[..., Command]] = {"discard": Discard, "restore": Restore}
"""What the buttons of a sample put."""

MEMORY_COMMANDS: dict[str, Callable[..., Command]] = {"undo": Undo, "redo": Redo}

RUN_WISHES = ("play", "pause", "stop", "step")
MOST_IDS = 10_000
"""A page may ask for so many samples at once."""

NUM_REMEMBERED = 64
"""How many landed commands are reported to the page; a page asks for its own by number."""


class LiveSession(SessionView, Protocol):
    """What the dashboard needs of a session: to read it, to put commands, to start and stop it."""

    @property
    def commands(self) -> CommandQueue: ...
    @property
    def undo_ring(self) -> Ring: ...
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
        self._longer = False  # the plan was lengthened while the run stood still

    def handle(self, request: Mapping[str, object]) -> None:
        """Do what the page asks; a request that cannot be done is reported as rejected, with the reason.

        Args:
            request: ``{"do": "freeze" | "thaw" | "pin" | "unpin", "layer"}``,
                ``{"do": "set", "name", "value", "layer"}``, ``{"do": "reset", "name", "layer"}``,
                ``{"do": "extend", "epochs"}``, ``{"do": "halve_rate"}``, ``{"do": "discard" | "restore", "ids"}``,
                ``{"do": "undo" | "redo"}`` or ``{"do": "play" | "pause" | "stop" | "step"}``, each with the page's own
                ``"number"``.
        """
        number = str(request.get("number", ""))
        try:
            if request.get("do") in RUN_WISHES:
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
        longer, waiting = "", []
        with self._lock:
            for sent in self._sent:
                event = sent.receipt.event  # read once: it may land meanwhile
                if event is None:
                    waiting.append(sent)
                    continue
                rejected = sent.receipt.state == "rejected"
                reason = event.sentence() if rejected else ""
                self._landed.append({"number": sent.number, "as": sent.receipt.state, "why": reason})
                if isinstance(sent.receipt.command, Extend) and not rejected:
                    longer = sent.number
            self._sent = deque(waiting, maxlen=self._sent.maxlen)
        if longer:
            self._follow_the_plan(longer)
        return {"pending": [sent.key for sent in waiting], "landed": list(self._landed)}

    def _run(self, wish: str) -> None:
        session = self._session
        if wish == "pause":
            session.pause()
        elif wish == "stop":
            session.stop()
        elif wish == "step":
            step_once(session)
        elif session.state == "paused" and not self._longer:
            session.resume()
        else:
            self._longer = False
            session.start()  # to the end of the plan as it is now

    def _follow_the_plan(self, number: str) -> None:
        """A run under way, or just finished, goes on to the end of a plan that was lengthened."""
        if self._session.state in ("running", "finished"):
            try:
                self._session.start()
            except EgeriaLabError as error:
                self._note(number, "rejected", _one_sentence(error))
        else:
            self._longer = True

    def _command(self, request: Mapping[str, object]) -> tuple[str, Command]:
        wish = str(request.get("do"))
        layer = None if request.get("layer") is None else str(request["layer"])
        if wish in LAYER_COMMANDS:
            return f"layer:{layer}", LAYER_COMMANDS[wish](layer=str(request["layer"]), by="dashboard")
        if wish in SAMPLE_COMMANDS:
            ids = _sample_ids(request["ids"])
            return f"samples:{ids[0]}", SAMPLE_COMMANDS[wish](ids=ids, by="dashboard")
        if wish in MEMORY_COMMANDS:
            return wish, MEMORY_COMMANDS[wish](by="dashboard")
        if wish == "extend":
            return "extend", Extend(epochs=self._number("epochs", request["epochs"]), by="dashboard")
        if wish == "halve_rate":
            rate = self._newest_rate() / 2
            return f"set:{LEARNING_RATE}:", Override(name=LEARNING_RATE, value=rate, by="dashboard")
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

    def _newest_rate(self) -> float:
        """The peak learning rate as it will be once everything that waits has landed."""
        with self._lock:
            waiting = [sent.receipt.command for sent in self._sent if sent.receipt.event is None]
        asked = [c.value for c in waiting if isinstance(c, Override) and c.name == LEARNING_RATE]
        newest = asked[-1] if asked else self._session.setting(LEARNING_RATE)
        if not isinstance(newest, (int, float)):
            raise InvalidSettingError(f"{LEARNING_RATE} must be a number to be halved, got {newest!r}.")
        return float(newest)

    def _note(self, number: str, outcome: str, why: str) -> None:
        with self._lock:
            self._landed.append({"number": number, "as": outcome, "why": why})


def step_once(session: LiveSession) -> None:
    """Let a paused run make one step and stand still again.

    Nothing is trained here: the run is resumed, and asked to pause by its own word that it goes on.

    Raises:
        InvalidSettingError: when the run is not paused.
    """
    if session.state != "paused":
        raise InvalidSettingError(f"one step at a time works while a run is paused, and it is {session.state}.")

    def on_event(event: Event) -> None:
        if isinstance(event, RunPaused):
            session.resume()  # a run begun anew after an interrupt stood still before its first step
        elif isinstance(event, (RunStarted, RunResumed)):
            session.pause()
        if isinstance(event, (RunResumed, RunStopped, RunFailed)):
            end()

    end = session.events.subscribe(on_event)
    session.resume()


def _sample_ids(given: object) -> tuple[int, ...]:
    whole = isinstance(given, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in given)
    if not whole or not isinstance(given, (list, tuple)) or not 1 <= len(given) <= MOST_IDS:
        raise ValueError(f"ids must be 1 to {MOST_IDS:,} whole numbers, got {given!r}.")
    return tuple(int(i) for i in given)


def _one_sentence(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
