"""What the dashboard itself costs, so that the page can say so."""

from __future__ import annotations

import time


class CostMeter:
    """The publisher's processor time as a share of the time that training runs.

    Attributes:
        fraction: the share so far, >= 0, or None before training has run beside the publisher.
    """

    def __init__(self) -> None:
        self.fraction: float | None = None
        self._cpu_seconds = self._wall_seconds = 0.0
        self._last: tuple[float, float] | None = None

    def note(self, running: bool) -> None:
        """Count the time since the last call if training ran meanwhile; on the publisher's thread."""
        now = (time.thread_time(), time.monotonic())
        if running and self._last is not None:
            self._cpu_seconds += now[0] - self._last[0]
            self._wall_seconds += now[1] - self._last[1]
            self.fraction = self._cpu_seconds / self._wall_seconds if self._wall_seconds > 0 else None
        self._last = now if running else None
