"""What the sieve panel shows besides its curves: where the samples are, how hard they are, some of them as pictures.

Only reads, from the thread of a view. Pictures are taken of data that lie in memory, where looking at a sample can
change nothing; of other data the sheet is a table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from egeria_lab.algorithms.sieving.membership import DISCARDED_KEPT, KEPT
from egeria_lab.dashboard.thumbnails import image_of, thumbnail
from egeria_lab.data.datasets import ArrayDataset
from egeria_lab.data.labels import labels_of
from egeria_lab.engine.sieve_look import SieveLook
from egeria_lab.events import EventLog, SamplesSieved
from egeria_lab.history import History

MOST_IN_A_GROUP = 8
"""Samples in each row of the contact sheet."""

MOST_BARS = 10
"""Bars of the histogram; the last one stands for all samples with as many forgetting events or more."""

MOST_CLASSES = 20
SHEET_SECONDS = 8.0
"""While training runs, the sheet is made anew at most this often, and at every exchange."""

NUM_FOR_RANGE = 128
"""So many samples, spread over the data, say what is black and what is white."""


class SieveSource(Protocol):
    """What the sheet reads of `session.sieve`."""

    @property
    def settings(self) -> object: ...
    @property
    def dataset(self) -> Any: ...
    def look(self) -> SieveLook | None: ...


class SievedSession(Protocol):
    """What the sheet reads of a session."""

    @property
    def events(self) -> EventLog: ...
    @property
    def history(self) -> History: ...
    @property
    def state(self) -> str: ...
    @property
    def sieve(self) -> SieveSource | None: ...


class SieveSheet:
    """Looks at a session's sieve for all its views; used by one thread.

    Args:
        session: whose sieve; it may have none.
        clock: seconds, for tests.

    Example:
        >>> from egeria_lab.algorithms.sieving.settings import CirculantSieve
        >>> from egeria_lab.session import Session
        >>> sheet = SieveSheet(Session("mlp", "digits", sieve=CirculantSieve(fraction=0.25)))
        >>> state = sheet.state()
        >>> state["kept"], state["waiting"], [group["key"] for group in state["groups"]]
        (1078, 359, ['waiting'])
        >>> SieveSheet(Session("mlp", "digits")).state()
        {}
    """

    def __init__(self, session: SievedSession, clock: Callable[[], float] = time.monotonic) -> None:
        self._session, self._clock = session, clock
        self._groups: list[dict[str, Any]] = []
        self._pictures: dict[str, str] = {}
        self._made_at = -1e9
        self._made_of: tuple[int, ...] = ()
        self._labels: NDArray[np.int64] | None = None
        self._range: tuple[float, float] | None = None
        self._known = False

    @property
    def moved(self) -> bool:
        """Samples were exchanged, discarded or restored since the sheet was made."""
        return self._version() != self._made_of and len(self._session.history.sieve) > 0

    def state(self) -> dict[str, Any]:
        """Numbers, histogram, classes and the sheet's rows; empty where there is no sieve."""
        source = self._session.sieve
        look = None if source is None else source.look()
        if source is None or look is None:
            return {}
        self._know(source.dataset)
        now = self._clock()
        rests = self._session.state != "running"
        if self.moved or rests or now - self._made_at >= SHEET_SECONDS:
            self._made_at, self._made_of = now, self._version()
            self._groups = self._sheet(look)
            self._pictures = self._draw(source.dataset)
        kept, discarded = look.status == KEPT, look.status >= DISCARDED_KEPT
        return {
            "method": look.method if source.settings is not None else "discarding by hand",
            "total": len(look.status),
            "kept": int(kept.sum()),
            "waiting": int((~kept & ~discarded).sum()),
            "discarded": int(discarded.sum()),
            "histogram": histogram(look),
            "why_no_histogram": _why_no_histogram(look),
            "classes": self._classes(look),
            "groups": self._groups,
        }

    def pictures(self) -> dict[str, str]:
        """Sample id → picture, of the samples on the sheet as `state` made it last."""
        return self._pictures

    def _version(self) -> tuple[int, ...]:
        return len(self._session.history.sieve), self._session.history.rewinds

    def _know(self, dataset: Any) -> None:
        if self._known:
            return
        self._known = True
        labels = labels_of(dataset)
        self._labels = None if labels is None else labels.numpy()
        if isinstance(dataset, (ArrayDataset, TensorDataset)):
            ids = np.unique(np.linspace(0, len(dataset) - 1, NUM_FOR_RANGE).astype(int))
            images = [image for image in (image_of(dataset[int(i)]) for i in ids) if image is not None]
            if len(images) == len(ids):
                self._range = float(min(i.min() for i in images)), float(max(i.max() for i in images))

    def _draw(self, dataset: Any) -> dict[str, str]:
        """Pictures of what is on the sheet; those that were there before are kept."""
        if self._range is None:
            return {}
        ids = [item["id"] for group in self._groups for item in group["items"]]
        drawn = {}
        for i in ids:
            image = None if str(i) in self._pictures else image_of(dataset[i])
            drawn[str(i)] = self._pictures[str(i)] if image is None else thumbnail(image, *self._range)
        return drawn

    def _sheet(self, look: SieveLook) -> list[dict[str, Any]]:
        back, why = self._just_returned()
        queue = np.flatnonzero((look.status != KEPT) & (look.status < DISCARDED_KEPT))
        hardest, easiest = extremes(look)
        groups = (
            ("hardest", "hardest of those trained on", hardest),
            ("easiest", "easiest of those trained on", easiest),
            ("returned", f"just returned{why}", back[look.status[back] == KEPT]),
            ("waiting", "some that are set aside", queue if not len(hardest) else queue[:0]),
            ("discarded", "discarded by hand", np.flatnonzero(look.status >= DISCARDED_KEPT)[::-1]),
        )
        return [
            {"key": key, "title": title, "items": [self._item(look, int(i)) for i in ids[:MOST_IN_A_GROUP]]}
            for key, title, ids in groups
            if len(ids)
        ]

    def _just_returned(self) -> tuple[NDArray[np.int64], str]:
        for event in reversed(list(self._session.events)):
            if isinstance(event, SamplesSieved) and event.returned_ids:
                return np.array(event.returned_ids[:200], dtype=np.int64), f" (step {event.step:,})"
        return np.zeros(0, dtype=np.int64), ""

    def _item(self, look: SieveLook, i: int) -> dict[str, Any]:
        status = int(look.status[i])
        margin = float(look.margin[i])
        item: dict[str, Any] = {
            "id": i,
            "label": "" if self._labels is None else self._name(int(self._labels[i])),
            "where": "kept" if status == KEPT else "discarded" if status >= DISCARDED_KEPT else "set aside",
            "seen": int(look.presented[i]),
        }
        if look.judges:
            item |= {"events": int(look.events[i]), "never": bool(look.never_correct[i])}
            item |= {"margin": round(margin, 2)} if np.isfinite(margin) else {}
        if look.losses is not None and np.isfinite(look.losses[i]):
            item["loss"] = round(float(look.losses[i]), 4)
        return item

    def _name(self, label: int) -> str:
        names: Sequence[str] = getattr(getattr(self._session, "data", None), "classes", ())
        return names[label] if 0 <= label < len(names) else str(label)

    def _classes(self, look: SieveLook) -> list[dict[str, Any]]:
        """What is kept, set aside and discarded of each of the largest classes."""
        if self._labels is None or self._labels.min() < 0:
            return []
        sizes = np.bincount(self._labels)
        kept = np.bincount(self._labels[look.status == KEPT], minlength=len(sizes))
        discarded = np.bincount(self._labels[look.status >= DISCARDED_KEPT], minlength=len(sizes))
        largest = np.sort(np.argsort(-sizes, kind="stable")[:MOST_CLASSES])
        return [
            {"name": self._name(int(c)), "total": int(sizes[c]), "kept": int(kept[c]), "discarded": int(discarded[c])}
            for c in largest
            if sizes[c]
        ]


def extremes(look: SieveLook) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The hardest and the easiest kept samples that were presented, each from its extreme inwards.

    By forgetting events, those never classified rightly first; among equals the smaller margin is harder. Where
    the sieve looks at losses, by loss; where it looks at nothing there are none.

    Example:
        >>> look = SieveLook(
        ...     method="CirculantSieve", status=np.zeros(3, np.int8), presented=np.ones(3, np.int32),
        ...     events=np.array([0, 2, 1], np.int32), never_correct=np.zeros(3, bool),
        ...     margin=np.zeros(3, np.float32), losses=None, judges=True)
        >>> [ids.tolist() for ids in extremes(look)]
        [[1, 2, 0], [0, 2, 1]]
    """
    ids = np.flatnonzero((look.status == KEPT) & (look.presented > 0))
    if look.losses is not None:
        ids = ids[np.isfinite(look.losses[ids])]
        score = look.losses[ids].astype(np.float64)
    elif look.judges:
        margin = np.nan_to_num(look.margin[ids].astype(np.float64)).clip(-1e3, 1e3)
        score = 1e4 * (look.events[ids] + 1e6 * look.never_correct[ids]) - margin
    else:
        return ids[:0], ids[:0]
    most = min(MOST_IN_A_GROUP, len(ids))
    if most == 0:
        return ids, ids
    hard = np.argpartition(-score, most - 1)[:most]
    easy = np.argpartition(score, most - 1)[:most]
    return ids[hard[np.argsort(-score[hard], kind="stable")]], ids[easy[np.argsort(score[easy], kind="stable")]]


def histogram(look: SieveLook) -> list[tuple[str, int]]:
    """Kept samples by forgetting events in the present interval; bars from easy to hard.

    Example:
        >>> look = SieveLook(
        ...     method="CirculantSieve", status=np.zeros(4, np.int8), presented=np.array([1, 1, 1, 0], np.int32),
        ...     events=np.array([0, 0, 1, 0], np.int32), never_correct=np.zeros(4, bool),
        ...     margin=np.zeros(4, np.float32), losses=None, judges=True)
        >>> histogram(look)
        [('0', 2), ('1', 1), ('never right', 0), ('not seen yet', 1)]
    """
    if not look.judges:
        return []
    kept = look.status == KEPT
    seen = kept & (look.presented > 0)
    judged = seen & ~look.never_correct
    counts = np.bincount(np.minimum(look.events[judged], MOST_BARS - 1), minlength=1)
    bars = [(f"{i}+" if i == MOST_BARS - 1 else str(i), int(n)) for i, n in enumerate(counts)]
    never = int((seen & look.never_correct).sum())
    return [*bars, ("never right", never), ("not seen yet", int((kept & ~seen).sum()))]


def _why_no_histogram(look: SieveLook) -> str:
    if look.judges:
        return ""
    if look.losses is not None:
        return f"{look.method} goes by the loss of each sample and counts no forgetting."
    return f"{look.method} looks at no sample: it counts no forgetting, so none is the hardest."


def sheet_table(groups: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The sheet as a table, for reports and for data without pictures: head and body.

    Example:
        >>> sheet_table([{"title": "hardest", "items": [{"id": 3, "label": "7", "where": "kept", "seen": 2}]}])[1]
        [['hardest', '3', '7', 'kept', '2', '–', '–']]
    """
    head = ["", "id", "label", "where", "presented", "forgotten", "margin or loss"]
    body = []
    for group in groups:
        for item in group["items"]:
            measure = item.get("loss", item.get("margin"))
            forgotten = "never right" if item.get("never") else str(item.get("events", "–"))
            body.append([
                str(group["title"]), str(item["id"]), str(item["label"]), str(item["where"]), str(item["seen"]),
                forgotten, "–" if measure is None else f"{measure:g}",
            ])  # fmt: skip
    return head, body
