"""The live dashboard: one widget that owns all panels, put together here, attached to a session and closed.

Its page (``static/``) draws; its feed reads the session; its publisher talks to the page from one thread; its
controls put commands. It holds no copy of the run: any number of views, opened at any time, show the same.
"""

from __future__ import annotations

import uuid
import weakref
from functools import cache
from importlib.resources import files
from typing import Any

import anywidget
import traitlets
from IPython.display import publish_display_data

from egeria_lab.dashboard.controls import Controls, LiveSession
from egeria_lab.dashboard.feed import Feed
from egeria_lab.dashboard.panels import describe
from egeria_lab.dashboard.publisher import Publisher
from egeria_lab.dashboard.static_view import static_html

SCRIPTS = (
    "data.js", "link.js", "theme.js", "plot.js", "plasticity.js", "loss.js", "timeline.js",
    "savings.js", "sieve.js", "sparsity.js", "race.js", "whatif.js", "attribution.js",
    "controls.js", "dashboard.js",
)  # fmt: skip
"""The page's parts, in the order in which they are joined into one module."""

MOST_SNAPSHOT_CHARACTERS = 150_000
MOST_SHOWN = 8
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


@cache
def _static(*names: str) -> str:
    """The files one after the other, without indentation and comment lines: every saved notebook holds them."""
    folder = files("egeria_lab.dashboard").joinpath("static")
    lines = (line.strip() for name in names for line in folder.joinpath(name).read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


class Dashboard(anywidget.AnyWidget):
    """Watch a session and steer it, live, from a notebook.

    Show it as the last line of a cell or with `show`, as often as wanted. `close` ends its thread; the
    session goes on without it.

    Args:
        session: what is watched.
        rate_hz: most updates a second, ``0 < rate_hz <= 4``; a slow browser gets fewer.

    Example:
        >>> from egeria_lab.session import Session
        >>> dashboard = Dashboard(Session("mlp", "digits", epochs=1))
        >>> dashboard.status["text"]
        'step 0 of 12, epoch 0.0, 0 of 4 layers frozen'
        >>> dashboard.close()
    """

    status = traitlets.Dict().tag(sync=True)
    layers: Any = traitlets.List().tag(sync=True)
    settings: Any = traitlets.List().tag(sync=True)
    words: Any = traitlets.List().tag(sync=True)
    commands = traitlets.Dict().tag(sync=True)
    ledger = traitlets.Dict().tag(sync=True)
    sieve = traitlets.Dict().tag(sync=True)
    pictures = traitlets.Dict().tag(sync=True)
    race = traitlets.Dict().tag(sync=True)
    panels: Any = traitlets.List().tag(sync=True)
    notice = traitlets.Unicode().tag(sync=True)
    snapshot = traitlets.Unicode().tag(sync=True)

    def __init__(self, session: LiveSession, *, rate_hz: float = 2.0) -> None:
        self._esm, self._css = _static(*SCRIPTS), _static("dashboard.css")
        self._session = session
        self._shown: dict[str, int] = {}  # display -> steps done when its still picture was made
        feed, controls = Feed(session), Controls(session)
        state = {**feed.state(), **feed.sieve()}
        super().__init__(panels=describe(), **state, ledger=feed.ledger(None), commands=controls.report())
        self._publisher = Publisher(feed, controls, _Outlet(self), rate_hz=rate_hz)
        receive = self._publisher.receive
        self.on_msg(lambda widget, content, buffers: receive(content))
        self._publisher.start()

    def show(self) -> None:
        """Show the dashboard here, live; the saved notebook keeps a static picture of the run beside it."""
        self._publish(uuid.uuid4().hex, update=False)

    def _ipython_display_(self) -> None:
        self.show()

    def close(self) -> None:
        """Take the dashboard out of all pages and end its thread; the session is untouched."""
        publisher: Publisher | None = getattr(self, "_publisher", None)
        if publisher is not None:
            publisher.close()
        layout = None if self.comm is None else self.layout
        super().close()
        if layout is not None:
            layout.close()  # a widget of its own, which would stay registered

    def rest(self, state: str) -> None:
        """Keep a picture of the run that needs neither kernel nor plotly.js: the run has come to rest."""
        picture = static_html(self._session)
        if len(picture) <= MOST_SNAPSHOT_CHARACTERS:
            self.snapshot = picture
        if state != "paused":  # not while somebody is about to go on: a new output is drawn anew
            for name, steps in list(self._shown.items()):
                if steps != self._session.steps_done:
                    self._publish(name, update=True)

    def _publish(self, name: str, *, update: bool) -> None:
        self._shown[name] = self._session.steps_done
        self._shown = dict(list(self._shown.items())[-MOST_SHOWN:])
        data, metadata = self._repr_mimebundle_()
        publish_display_data(  # type: ignore[no-untyped-call]
            data, metadata, transient={"display_id": name}, update=update
        )
        if not update:
            self._publisher.shown()

    def _repr_mimebundle_(self, **_: object) -> tuple[dict[str, Any], dict[str, Any]]:
        picture = static_html(self._session)
        data: dict[str, Any] = {"text/plain": repr(self), "text/html": picture}
        if self.comm is not None:
            data[WIDGET_VIEW] = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return data, {}

    def __repr__(self) -> str:
        return f"Dashboard of {self._session.name}, {self._session.state} at step {self._session.steps_done:,}"


class _Outlet:
    """The way from the publisher's thread to the widget; it does not keep the widget alive."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = weakref.ref(dashboard)

    def send(self, content: dict[str, object], buffers: list[bytes]) -> None:
        dashboard = self._dashboard()
        if dashboard is not None and dashboard.comm is not None:
            dashboard.send(content, buffers)

    def update(self, **traits: object) -> None:
        dashboard = self._dashboard()
        if dashboard is not None and dashboard.comm is not None:
            with dashboard.hold_sync():
                for name, value in traits.items():
                    setattr(dashboard, name, value)

    def rest(self, state: str) -> None:
        dashboard = self._dashboard()
        if dashboard is not None and dashboard.comm is not None:
            dashboard.rest(state)
