"""The slow state of a session on its way to the page: one message, and no more of them than somebody can read."""

from __future__ import annotations

from collections.abc import Callable

from egeria_lab.dashboard.controls import Controls
from egeria_lab.dashboard.cost_meter import CostMeter
from egeria_lab.dashboard.feed import Feed
from egeria_lab.dashboard.outlet import Outlet

LEDGER_SECONDS = 2.0
STATUS_SECONDS = 0.9
COUNTERS = ("step", "text")
"""Of the status: they move with every step, and alone are no reason to send it at once."""


class SlowState:
    """Tells status, layers, settings, events, savings and samples; used by the publisher's thread.

    Args:
        feed: reads the session.
        controls: says what is pending.
        outlet: takes the message.
        clock: seconds.

    Attributes:
        cost: what the dashboard costs, told with the savings.
    """

    def __init__(self, feed: Feed, controls: Controls, outlet: Outlet, clock: Callable[[], float]) -> None:
        self._feed, self._controls, self._outlet, self._clock = feed, controls, outlet, clock
        self.cost = CostMeter()
        self._told: dict[str, object] = {}
        self._next_status = self._next_ledger = self._next_sheet = -1e9

    def tell(self, now: float, *, whole: bool = False) -> None:
        """Send what changed: at once when something happened, else the counters once a second.

        Args:
            now: by the clock.
            whole: savings and samples too, whenever they were sent last.
        """
        rest: dict[str, object] = {**self._feed.state(), "commands": self._controls.report()}
        status = self._feed.status()
        rest["status"] = {name: value for name, value in status.items() if name not in COUNTERS}
        news = rest != self._told or now >= self._next_status
        slow = self._savings(now, whole)
        if news or slow:
            self._told, self._next_status = rest, now + STATUS_SECONDS
            self._outlet.update(**{**rest, **slow, "status": status})

    def _savings(self, now: float, whole: bool) -> dict[str, object]:
        """Ledger and samples when they are due; a large ledger is read less often."""
        due = whole or now >= self._next_ledger or (now >= self._next_sheet and self._feed.sieve_moved)
        if not due:
            return {}
        before = self._clock()
        found = {"ledger": self._feed.ledger(self.cost.fraction), **self._feed.sieve()}
        spent = self._clock() - before
        self._next_ledger, self._next_sheet = now + max(LEDGER_SECONDS, 100 * spent), now + 20 * spent
        return found
