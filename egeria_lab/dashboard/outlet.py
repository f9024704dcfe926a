"""The way from the publisher's thread to the pages."""

from __future__ import annotations

from typing import Protocol


class Outlet(Protocol):
    """Where the publisher's words go: the widget, or a list in a test."""

    def send(self, content: dict[str, object], buffers: list[bytes]) -> None: ...
    def update(self, **traits: object) -> None: ...
    def rest(self, state: str) -> None: ...
