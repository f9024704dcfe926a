"""What the kernel knows of a page that shows the dashboard, and how often it wants to be told."""

from __future__ import annotations

from dataclasses import dataclass

MOST_HZ = 4.0
REST = 16
"""A page rests so many times as long as it draws: on two cores, training has what drawing leaves ..."""
LONGEST_REST_SECONDS = 1.0
"""... but so that somebody who watches sees the run move."""
SHORTEST_REST = 4
"""However slow a page is, it rests so many times as long as it draws."""


@dataclass
class View:
    """A page that shows the dashboard, as far as it has told us.

    Attributes:
        visible: whether somebody can see it.
        draw_seconds: main-thread time of its last redraw.
        hz: the most updates a second that it wants.
    """

    visible: bool = True
    draw_seconds: float = 0.0
    hz: float = MOST_HZ

    @property
    def frame_seconds(self) -> float:
        """From one frame to the next, > 0.

        Example:
            >>> [View(draw_seconds=draw).frame_seconds for draw in (0.01, 0.05, 0.1, 0.5)]
            [0.25, 0.8, 1.0, 2.0]
        """
        rest = min(REST * self.draw_seconds, LONGEST_REST_SECONDS)
        return max(rest, self.least_frame_seconds)

    @property
    def least_frame_seconds(self) -> float:
        """The same where something has happened, > 0."""
        return max(1 / self.hz, SHORTEST_REST * self.draw_seconds)
