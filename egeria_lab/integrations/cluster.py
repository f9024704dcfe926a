"""A session whose ranks are the engines of an ipyparallel cluster, driven from a notebook.

``lab.Session(..., cluster=rc)`` makes one: the same calls, the same dashboard. The training runs in the engines; this
object holds a copy of the run's record, kept up by one thread that asks rank 0 a few times a second. Commands go to
rank 0, which lands them on all ranks at the same step. When this kernel dies, the engines go on.

The file is one piece because it is the face of `Session` once more, call by call.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from egeria_lab import commands as c
from egeria_lab.algorithms.ledger import Ledger
from egeria_lab.config import Setting
from egeria_lab.engine.layer_board import LayerRows
from egeria_lab.engine.steering_calls import SteeringCalls
from egeria_lab.errors import InvalidSettingError, TrainingError, unknown_name
from egeria_lab.events import Event, EventLog, Scalar
from egeria_lab.history import History
from egeria_lab.integrations import cluster_engine as engine
from egeria_lab.integrations.cluster_copy import RunCopy, UndoWords
from egeria_lab.integrations.cluster_link import ForwardingQueue, Link

POLL_SECONDS = 0.25


class ClusterSession(SteeringCalls):
    """Drives a session on several engines; made by ``lab.Session(..., cluster=rc)``.

    Args:
        cluster: an `ipyparallel.Cluster` or `Client`; every engine becomes a rank.
        how: ``"make"`` or ``"load"``.
        arguments: of `Session` or `Session.load`. Objects travel by pickle: names, library modules and data sets do,
            a class defined in a cell needs ``rc[:].use_cloudpickle()``.

    Raises:
        MissingPackageError: when ipyparallel is not installed.
        InvalidSettingError: when the cluster has no engine, or a bad argument was given.
    """

    def __init__(self, cluster: Any, how: str, arguments: Mapping[str, Any]) -> None:
        self._link = Link(cluster)
        self._link.build(how, dict(arguments))
        self._copy = RunCopy(self._link.first(engine.facts))
        self.commands = ForwardingQueue()
        self.sieve = None  # pictures of samples stay where the data are
        self.error: BaseException | None = None
        self._view: Any = None
        self._closed = False
        self._news = threading.Condition()
        self._awake = threading.Event()
        self._refresh()
        self.commands.on_put(self._awake.set)
        self._thread = threading.Thread(target=self._follow, name="egeria-lab-cluster", daemon=True)
        self._thread.start()

    lacks: ClassVar[tuple[str, ...]] = ("attribution", "fork")
    """What a dashboard does not offer: the model is elsewhere."""

    # --- driving ---------------------------------------------------------------------------------------

    def step(self, n: int = 1) -> Any:
        """Train `n` steps on all ranks and return the record of the last one."""
        return self._everywhere("step", n)

    def run(self, steps: int | None = None, *, epochs: float | None = None) -> Any:
        """Train on all ranks and wait, to the plan's end or for so many steps or epochs."""
        return self._everywhere("run", steps, epochs=epochs, progress=False)

    def start(self, epochs: float | None = None, *, steps: int | None = None) -> None:
        """Train in the background of every engine and return at once."""
        self._everywhere("start", epochs, steps=steps)

    def pause(self) -> None:
        """Stand still at the next step boundary; rank 0 does, and the others wait for it."""
        self._first("pause")

    def resume(self) -> None:
        """Go on after `pause`."""
        self._first("resume")

    def stop(self) -> None:
        """End cleanly at the next step boundary, on all ranks."""
        self._first("stop")

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the background run has ended; False when `timeout` seconds passed first.

        Raises:
            TrainingError: when the run failed, or an engine died.
        """
        end = float("inf") if timeout is None else time.monotonic() + timeout
        with self._news:
            while self.state in ("running", "paused"):
                if time.monotonic() >= end:
                    return False
                self._news.wait(min(POLL_SECONDS, end - time.monotonic()))
        if self.error is not None:
            raise self.error
        return True

    def evaluate(self) -> Any:
        """Loss and accuracy on the validation set, computed on rank 0."""
        return self._first("evaluate")

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint, on the machine of rank 0."""
        return Path(self._first("save", str(path)))

    def fork(self, **_changes: Any) -> Any:
        """Not on a cluster.

        Raises:
            InvalidSettingError: always, with the way round.
        """
        raise InvalidSettingError(
            "fork() works in a single process, not on a cluster: save(path), and load the file in a session of its own."
        )

    def report(self, path: str | Path = "report.html") -> Path:
        """Write one self-contained offline page, on this machine, with what has arrived here."""
        written: Path = importlib.import_module("egeria_lab.dashboard.report").write_report(self, path)
        return written

    def export(self) -> Any:
        """The plain model and its `state_dict`, fetched from rank 0."""
        return self._first("export")

    # --- looking ---------------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """The tables of rank 0, as they were a moment ago."""
        return self._copy.history

    @property
    def events(self) -> EventLog:
        """The events of rank 0."""
        return self._copy.events

    @property
    def layers(self) -> LayerRows:  # type: ignore[override]
        """The states of the layer modules, as rank 0 told them last."""
        return self._copy.layers

    @property
    def undo_ring(self) -> UndoWords:
        """What could be undone and redone."""
        return UndoWords(*self._copy.facts["undo"])

    @property
    def name(self) -> str:
        """What is trained."""
        return f"{self._copy.facts['name']}, {self._link.size} ranks"

    @property
    def state(self) -> str:
        """As `Session.state`; ``"failed"`` when an engine died."""
        return "failed" if self.error is not None else str(self._copy.facts["state"])

    @property
    def steps_done(self) -> int:
        """Finished steps."""
        return int(self._copy.facts["steps_done"])

    @property
    def planned_steps(self) -> int:
        """Step at which the plan ends."""
        return int(self._copy.facts["planned_steps"])

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the training data."""
        return int(self._copy.facts["steps_per_epoch"])

    @property
    def epoch(self) -> float:
        """Passes over the training data so far."""
        return float(self._copy.facts["epoch"])

    @property
    def device(self) -> str:
        """Where rank 0 trains."""
        return str(self._copy.facts["device"])

    def settings(self) -> list[Setting]:
        """Every setting that may change mid-run."""
        found: list[Setting] = self._copy.facts["settings"]
        return found

    def setting(self, name: str, layer: str | None = None) -> Any:
        """What a setting is now, for all layers or for one.

        Raises:
            UnknownNameError: for an unknown one.
        """
        own = self._copy.facts["per_layer"].get((name, layer))
        values = {setting.name: setting.value for setting in self.settings()}
        if name not in values:
            raise unknown_name("setting", name, values)
        return values[name] if own is None else own

    def savings(self) -> Ledger:
        """The ledger of rank 0, bytes between ranks included."""
        ledger: Ledger = self._copy.facts["savings"]
        return ledger

    def explain(self, layer: str) -> str:
        """Why the layer is frozen, or what it still lacks."""
        return str(self._first("explain", layer))

    def what_if(self, settings: Any = None, **changes: Any) -> Any:
        """What other settings would have frozen: rank 0 replays its readings."""
        return self._first("what_if", settings, **changes)

    def subscribe(self, callback: Callable[[Event], None], event: type[Event] | None = None) -> Callable[[], None]:
        """Call `callback` with each new event as it arrives here."""
        return self.events.subscribe(callback, event)

    def dashboard(self) -> Any:
        """The live dashboard of the run."""
        if self._view is None or self._view.comm is None:
            self._view = importlib.import_module("egeria_lab.dashboard.app").Dashboard(self)
        return self._view

    def close(self) -> None:
        """Close the session on every engine; the cluster stays, and the record can still be read."""
        if self._closed:
            return
        self._closed = True
        self._awake.set()
        self._thread.join()
        if self.error is None:
            self._link.everywhere(engine.close)

    def __repr__(self) -> str:
        return f"ClusterSession({self.name}, {self.state}, step {self.steps_done:,} of {self.planned_steps:,})"

    # --- inside ----------------------------------------------------------------------------------------

    def _check_override(self, name: str, value: Scalar, layer: str | None) -> None:
        self._link.first(engine.check, name, value, layer)

    def _check_reset(self, name: str, layer: str | None) -> None:
        self.setting(name, layer)

    def _put(self, command: c.Command) -> c.Receipt:
        if self.error is not None:
            raise self.error
        if self._closed:
            raise InvalidSettingError("this session is closed; build a new one to train on.")
        receipt = self.commands.put(command)
        if self.state not in ("running", "paused"):  # nobody steps: all ranks land it now
            self._refresh()
            self._link.everywhere(engine.land)
            self._refresh()
        return receipt

    def _everywhere(self, name: str, *arguments: Any, **options: Any) -> Any:
        self._refresh()  # what was put before this call lands before its first step
        results = self._link.everywhere(engine.call, name, *arguments, **options)
        self._refresh()
        return results[0]

    def _first(self, name: str, *arguments: Any, **options: Any) -> Any:
        self._refresh()
        result = self._link.first(engine.call, name, *arguments, **options)
        self._refresh()
        return result

    def _follow(self) -> None:
        """Keep the copy up to date until the session is closed or an engine is gone."""
        while not self._closed and self.error is None:
            self._awake.wait(POLL_SECONDS)
            self._awake.clear()
            try:
                self._refresh()
            except TrainingError as error:
                self.error = error
        self.commands.reject_all("the session is closed" if self.error is None else str(self.error), self.steps_done)
        with self._news:
            self._news.notify_all()

    def _refresh(self) -> None:
        with self._news:
            self._link.check_alive(self.steps_done)
            news = self._link.first(engine.exchange, self.commands.take(), self._copy.seen)
            self._copy.take(news)
            self.commands.land(news.landed)
            failure = news.facts["error"]
            if failure is not None and news.facts["state"] == "failed":
                self.error = TrainingError(f"rank 0 failed: {failure}")
            self._news.notify_all()
