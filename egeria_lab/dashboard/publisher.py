"""The one thread that talks to the pages: it listens, decides whether and how fast to send, and sends.

It is silent when nobody looks, never has more than one unanswered frame under way, and slows down with the
slowest of: the asked rate, what pages need to draw and rest, and a page that has stopped answering. What somebody
did, and what froze or thawed, is told sooner.
Training never waits for it: an event only wakes it, a request only lands in its mailbox.
"""

from __future__ import annotations

import base64
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from egeria_lab.dashboard.controls import Controls
from egeria_lab.dashboard.feed import Feed
from egeria_lab.dashboard.frames import pack
from egeria_lab.dashboard.outlet import Outlet
from egeria_lab.dashboard.plotly_bundle import packed_plotly
from egeria_lab.dashboard.series import HANDS
from egeria_lab.dashboard.slow_state import SlowState
from egeria_lab.dashboard.view import MOST_HZ, View
from egeria_lab.events import Event, LayerFrozen, LayerThawed, RunFailed, RunPaused, RunStopped

ANSWERS_HZ = 2.0
QUIET_SECONDS = 2.0  # an unanswered frame this old: slow down to one a second
GONE_SECONDS = 120.0  # no answer for this long (a cell may be keeping the kernel): say nothing until the page speaks
HELLO_SECONDS = 1.5  # a page that was told to show a view says hello by then, if the kernel can hear it
PLOTLY_AT = (0.0, 3.0, 9.0)  # after that, plotly.js is sent unasked: a slow page may not be there yet
RACE_SECONDS = 2.0
SETTLE_SECONDS = 2.0  # after a run event the state may follow a moment later: look again until then
RESTING = ("idle", "paused", "stopped", "finished", "failed")

Message = Mapping[str, object]


class Publisher:
    """Decides what to send and when; `run` is the body of its thread, `tick` one look at the world.

    Args:
        feed: reads the session.
        controls: says what is pending.
        outlet: takes the messages.
        rate_hz: most updates a second, ``0 < rate_hz <= 4``.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        feed: Feed,
        controls: Controls,
        outlet: Outlet,
        *,
        rate_hz: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._feed, self._controls, self._outlet = feed, controls, outlet
        self._clock = clock
        self._rate_hz = min(max(rate_hz, 0.1), MOST_HZ)
        self._mail: deque[Message] = deque(maxlen=1000)
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._views: dict[str, View] = {}
        self._full_due = self._plotly_due = self._as_text = self._has_news = False
        self._seq = self._answered = 0
        self._sent_at = self._unanswered_since = -1e9
        self._settle_until = clock() + SETTLE_SECONDS
        self._rested_as: str | None = None
        self._shown_at: float | None = None
        self._plotly_at: list[float] = []
        self._questions: dict[str, Message] = {}  # of each view the newest: the others nobody waits for
        self._answers: deque[dict[str, object]] = deque(maxlen=100)  # found by another thread, sent by this one
        self._race_told, self._race_at = 0, -1e9
        self._slow = SlowState(feed, controls, outlet, clock)
        self._unsubscribe = feed.session.events.subscribe(self._on_event)

    # -- from any thread ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, in a copy of the calling cell's context: what it sends belongs to that cell."""
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self.run,), name="egeria-lab-dashboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, the subscription and a fork that trains; calling it twice is harmless."""
        self._closed = True
        self._feed.race.stop()
        self._unsubscribe()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def receive(self, message: Message) -> None:
        """Take a page's message; a request becomes a command at once, the rest waits for the thread."""
        if message.get("kind") == "do":
            self._controls.handle(message)
        elif message.get("kind") == "race":
            self._feed.race.start(message) if message.get("steps") else self._feed.race.stop()
        self._mail.append(message)
        self._wake.set()

    def shown(self) -> None:
        """Note that a view was put on a page, which will say hello."""
        self._plotly_at, self._shown_at = list(PLOTLY_AT), self._clock()
        self._wake.set()

    def _on_event(self, event: Event) -> None:
        comes_to_rest = isinstance(event, (RunPaused, RunStopped, RunFailed))
        if comes_to_rest:
            self._settle_until = self._clock() + SETTLE_SECONDS
        if comes_to_rest or event.by in HANDS or isinstance(event, (LayerFrozen, LayerThawed)):
            self._has_news = True
        if comes_to_rest or self._views:
            self._wake.set()

    # -- on the publisher's thread -----------------------------------------------------------------------

    def run(self) -> None:
        """Look, wait, look again, until closed."""
        while not self._closed:
            notice = ""
            try:
                delay = self.tick()
            except Exception as error:  # a fault in watching is shown, and never reaches training
                notice, delay = f"Dashboard: {type(error).__name__}: {error}", 1.0
            self._outlet.update(notice=notice)
            self._slow.cost.note(self._feed.session.state == "running")
            self._wake.wait(delay)
            self._wake.clear()

    def tick(self) -> float | None:
        """Do what is due now.

        Returns:
            Seconds until the next look, or None to sleep until woken.
        """
        now = self._clock()
        while self._mail:
            self._read(self._mail.popleft(), now)
        self._assume_view(now)
        if self._plotly_due:
            self._send_plotly()
        self._answer()
        self._show_race(now)
        resting = self._come_to_rest(now)
        if not self._looked_at(now):
            if self._full_due:
                self._send_frame(now)  # a hidden page asked, or one that is not heard: answer once
            return None if resting and self._shown_at is None and not self._race_goes_on() else 0.25
        due = self._sent_at + self._interval(now)
        if self._full_due or (now >= due and self._may_send(now)):
            self._send_frame(now)
            due = self._sent_at + self._interval(now)
        return max(0.05, due - now)

    def _assume_view(self, now: float) -> None:
        """Talk to a page that was shown a view and is not heard: cells run one after the other keep the kernel."""
        waited = -1.0 if self._shown_at is None else now - self._shown_at - HELLO_SECONDS
        if waited < 0:
            return
        if waited > GONE_SECONDS:
            self._shown_at = None
            return
        self._unanswered_since = now
        self._full_due = self._full_due or now >= self._sent_at + 1  # nobody knows which one it got
        if self._plotly_at and waited >= self._plotly_at[0]:
            del self._plotly_at[0]
            self._plotly_due = True

    def _read(self, message: Message, now: float) -> None:
        self._shown_at = None  # the kernel hears
        kind, name = message.get("kind"), str(message.get("view", ""))
        if kind == "bye":
            self._views.pop(name, None)
            return
        view = self._views.setdefault(name, View())
        view.visible = bool(message.get("visible", view.visible))
        view.hz = _positive(message.get("hz"), view.hz)
        view.draw_seconds = _positive(message.get("draw_ms"), 1e3 * view.draw_seconds) / 1e3
        if kind == "hello":
            self._full_due = True
            self._plotly_due = self._plotly_due or bool(message.get("plotly"))
            self._as_text = self._as_text or bool(message.get("as_text"))
        elif kind == "plotly":
            self._plotly_due = True
            self._as_text = self._as_text or bool(message.get("as_text"))
        elif kind == "whatif":
            self._questions[name] = message
        elif kind == "attribute":
            self._explain(name, message)
        if kind in ("hello", "view"):
            self._answered = self._seq  # what was under way no longer counts: a page asks for what it lacks
        self._answered = max(self._answered, int(_positive(message.get("seq"), 0)))
        self._unanswered_since = now

    def _looked_at(self, now: float) -> bool:
        if self._seq != self._answered and now - self._unanswered_since > GONE_SECONDS:
            self._views.clear()
        return any(view.visible for view in self._views.values())

    def _quiet(self, now: float) -> bool:
        return self._seq != self._answered and now - self._unanswered_since > QUIET_SECONDS

    def _may_send(self, now: float) -> bool:
        window = 1 if self._rate_hz <= ANSWERS_HZ else 2  # pages answer at most twice a second
        return self._seq - self._answered < window or self._quiet(now)

    def _interval(self, now: float) -> float:
        asked = 1 / min(MOST_HZ, 2 * self._rate_hz) if self._has_news else 1 / self._rate_hz
        seen = [view for view in self._views.values() if view.visible]
        wished = [asked, *(view.least_frame_seconds if self._has_news else view.frame_seconds for view in seen)]
        return max([*wished, 1.0] if self._quiet(now) else wished)

    def _send_frame(self, now: float) -> None:
        self._has_news = False  # before reading: what happens from here on is news for the next
        parts = self._feed.full() if self._full_due else self._feed.delta()
        self._slow.tell(now)
        if parts or self._full_due:
            if self._seq == self._answered:
                self._unanswered_since = now
            self._seq += 1
            header, buffers = pack(parts, self._seq, full=self._full_due, as_text=self._as_text)
            self._outlet.send(header, buffers)
        self._full_due = False
        self._sent_at = now

    def _come_to_rest(self, now: float) -> bool:
        """When a run pauses or ends, leave a picture that needs no kernel; True when nothing is to follow."""
        state = self._feed.session.state
        if state in RESTING and state != self._rested_as and self._feed.session.steps_done:
            self._slow.tell(now, whole=True)
            self._outlet.rest(state)
        self._rested_as = state if state in RESTING else None
        return now >= self._settle_until

    def _answer(self) -> None:
        """Answer each view's newest what-if question."""
        while self._questions:
            view, question = self._questions.popitem()
            answer = self._feed.tuner.answer(question)
            self._outlet.send({"kind": "answer", "view": view, "number": question.get("number"), "answer": answer}, [])

        while self._answers:
            self._outlet.send(self._answers.popleft(), [])

    def _explain(self, view: str, message: Message) -> None:
        """Have some samples explained elsewhere; the answer comes back through this thread."""

        def tell(answer: dict[str, object]) -> None:
            number = message.get("number")
            self._answers.append({"kind": "explained", "view": view, "number": number, "answer": answer})
            self._wake.set()

        self._feed.explainer.ask(message, tell)

    def _race_goes_on(self) -> bool:
        return self._feed.race.trains or self._feed.race.version != self._race_told

    def _show_race(self, now: float) -> None:
        """Where a fork that trains beside the run stands, every two seconds and when it ends."""
        race = self._feed.race
        is_due = now >= self._race_at + RACE_SECONDS if race.trains else race.version != self._race_told
        if is_due:
            self._race_told, self._race_at = race.version, now
            self._outlet.update(race=race.state())

    def _send_plotly(self) -> None:
        self._plotly_due = False
        if self._as_text:
            text = base64.b64encode(packed_plotly()).decode("ascii")
            self._outlet.send({"kind": "plotly", "text": [text]}, [])
        else:
            self._outlet.send({"kind": "plotly"}, [packed_plotly()])


def _positive(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) and value > 0 else otherwise
