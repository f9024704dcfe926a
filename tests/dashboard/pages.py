"""A front end without a browser: it speaks the page's side of the protocol and keeps what it was told."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
from fakes import FakeSession, told_session

CALLS = ("start", "pause", "resume", "stop")


def live(session: FakeSession) -> FakeSession:
    """The same session with calls that are only noted, in the attribute `called`."""
    session.called = []
    for name in CALLS:
        setattr(session, name, lambda name=name: session.called.append(name))
    return session


def told(num_layers: int = 5, **how: int) -> FakeSession:
    """A finished run that can be asked to run."""
    return live(told_session(num_layers, **how))


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Outlet:
    """Takes a publisher's messages as a widget would."""

    def __init__(self) -> None:
        self.frames: list[tuple[dict[str, Any], list[bytes]]] = []
        self.other: list[tuple[dict[str, Any], list[bytes]]] = []
        self.traits: dict[str, Any] = {}
        self.rested: list[str] = []

    def send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        (self.frames if content["kind"] == "frame" else self.other).append((content, buffers))

    def update(self, **traits: Any) -> None:
        self.traits.update(traits)

    def rest(self, state: str) -> None:
        self.rested.append(state)


class Page:
    """One page: holds the tables as it was told, and asks again when rows are missing."""

    def __init__(self, say: Callable[[dict[str, Any]], None], name: str = "page") -> None:
        self._say, self.name = say, name
        self.count: dict[str, int] = {}
        self.step: dict[str, np.ndarray] = {}
        self.columns: dict[str, dict[str, np.ndarray]] = {}

    def say(self, kind: str, **more: Any) -> None:
        self._say({"kind": kind, "view": self.name, **more})

    def take(self, header: dict[str, Any], buffers: list[bytes]) -> bool:
        """Take a frame; False (and a hello) when rows are missing in between."""
        raw = [base64.b64decode(text) for text in header["text"]] if "text" in header else buffers
        complete = True
        for i, part in enumerate(header["parts"]):
            table, rows = part["table"], part["rows"]
            step = np.frombuffer(raw[2 * i], "<f8")
            values = np.frombuffer(raw[2 * i + 1], "<f4").reshape(len(part["columns"]), rows)
            if part["start"] == 0:
                self.count[table], self.step[table], self.columns[table] = 0, step[:0], {}
            if part["start"] > self.count.get(table, 0):
                complete = False
                continue
            skip = self.count[table] - part["start"]
            self.step[table] = np.r_[self.step[table], step[skip:]]
            for name, column in zip(part["columns"], values, strict=True):
                old = self.columns[table].get(name, column[:0])
                self.columns[table][name] = np.r_[old, column[skip:]]
            self.count[table] = part["count"]
        if not complete:
            self.say("hello")
        return complete

    def acknowledge(self, seq: int, draw_ms: float = 5.0, *, visible: bool = True) -> None:
        self.say("ack", seq=seq, draw_ms=draw_ms, visible=visible)
