"""What the kernel knows of a page that shows the dashboard."""

from __future__ import annotations

from dataclasses import dataclass

MOST_HZ = 4.0


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
