"""The line between a notebook and the engines of its cluster: calls, commands on their way, engines that are gone."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from egeria_lab import commands as c
from egeria_lab import errors
from egeria_lab.errors import EgeriaLabError, InvalidSettingError, MissingPackageError, TrainingError
from egeria_lab.events import CommandRejected, Event
from egeria_lab.integrations import cluster_engine as engine

START_SECONDS = 300.0
"""So long the engines may take to meet and to make their sessions."""
ANSWER_SECONDS = 120.0
"""So long one of them may take to answer; a step that is under way holds an answer up."""


class Link:
    """Calls functions on engines, one caller at a time.

    Args:
        cluster: an `ipyparallel.Cluster` or `Client`.

    Attributes:
        size: number of engines, each of which is a rank.

    Raises:
        MissingPackageError: when ipyparallel is not installed.
        InvalidSettingError: when the cluster has no engine, or is none.
    """

    def __init__(self, cluster: Any) -> None:
        self._client = _client(cluster)
        self._ids = list(self._client.ids)
        if not self._ids:
            raise InvalidSettingError("the cluster has no engine: start it with n >= 1 and wait until they are there.")
        self._ranks = [self._client[i] for i in self._ids]
        self._lock = threading.Lock()
        self.size = len(self._ids)

    def build(self, how: str, arguments: dict[str, Any]) -> None:
        """Make the session on every engine; see `egeria_lab.integrations.cluster_engine.build`."""
        places = self.everywhere(engine.place)
        hosts = [host for host, _, _ in places]
        address = "127.0.0.1" if len(set(hosts)) == 1 else places[0][1]
        with self._lock, _in_one_sentence():
            parts = [
                rank.apply_async(
                    engine.build, how, i, self.size, address, places[0][2], hosts.count(hosts[i]), arguments
                )
                for i, rank in enumerate(self._ranks)
            ]
            for part in parts:
                part.get(START_SECONDS)

    def first(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What rank 0 answers."""
        with self._lock, _in_one_sentence():
            return self._ranks[0].apply_async(function, *arguments, **options).get(ANSWER_SECONDS)

    def everywhere(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """What each rank answers, called at the same time: inside the function they may meet."""
        with self._lock, _in_one_sentence():
            parts = [rank.apply_async(function, *arguments, **options) for rank in self._ranks]
        with _in_one_sentence():  # however long they train
            return [part.get() for part in parts]

    def check_alive(self, step: int) -> None:
        """Raise when an engine has died.

        Raises:
            TrainingError: naming its rank.
        """
        alive = set(self._client.ids)
        for rank, number in enumerate(self._ids):
            if number not in alive:
                raise TrainingError(
                    f"the engine of rank {rank} died at about step {step}; the other ranks end by themselves. Go on "
                    "with the engines that are left: lab.Session.load(run_dir, cluster=rc)."
                )


class ForwardingQueue(c.CommandQueue):
    """Commands on their way to rank 0: each has its receipt here until its event has come back."""

    def __init__(self) -> None:
        super().__init__()
        self._under_way: dict[int, c.Receipt] = {}
        self._number = 0

    def take(self) -> list[tuple[int, c.Command]]:
        """What was put since the last time, numbered."""
        taken = []
        for receipt in self.drain():
            self._number += 1
            self._under_way[self._number] = receipt
            taken.append((self._number, receipt.command))
        return taken

    def land(self, landed: Mapping[int, Event]) -> None:
        """Hand events to the receipts that wait for them."""
        for number, event in landed.items():
            receipt = self._under_way.pop(number, None)
            if receipt is not None:
                receipt.land(event)

    def reject_all(self, reason: str, step: int) -> None:
        """Nothing will come back any more."""
        for _ in self.take():
            pass
        for receipt in self._under_way.values():
            command = receipt.command
            receipt.land(CommandRejected(step=step, by=command.by, command=str(command), reason=reason))
        self._under_way.clear()

    def pending(self) -> list[c.Command]:
        """What has not landed, in order."""
        return [*(receipt.command for receipt in list(self._under_way.values())), *super().pending()]


def _client(cluster: Any) -> Any:
    try:
        package = importlib.import_module("ipyparallel")
    except ImportError as error:
        raise MissingPackageError("cluster= needs ipyparallel: pip install 'egeria-lab[distributed]'.") from error
    if isinstance(cluster, package.Client):
        return cluster
    if isinstance(cluster, package.Cluster):
        return cluster.connect_client_sync()
    raise InvalidSettingError(
        f"cluster must be an ipyparallel.Cluster or Client, got {type(cluster).__name__}: "
        "rc = ipyparallel.Cluster(n=2).start_and_connect_sync()."
    )


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    """Errors of an engine come as themselves where they are ours, without the engine's traceback."""
    try:
        yield
    except EgeriaLabError:
        raise
    except Exception as error:
        kind, words = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
        ours = getattr(errors, str(kind), None)
        if isinstance(ours, type) and issubclass(ours, EgeriaLabError):
            raise TrainingError(str(words)) if ours is EgeriaLabError else _made(ours, str(words)) from error
        if kind in ("TimeoutError", "EngineError"):
            raise TrainingError(
                f"an engine does not answer ({words or kind}); see its output, or start it anew."
            ) from error
        raise


def _made(kind: type[EgeriaLabError], words: str) -> EgeriaLabError:
    try:
        return kind(words)
    except TypeError:  # it wants more than words
        return TrainingError(words)
