"""Runs that can be compared: sessions in any state, and what was saved of one, all read the same way."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from egeria_lab.checkpoint.file import read
from egeria_lab.checkpoint.folder import latest
from egeria_lab.checkpoint.journal import NAME, recover
from egeria_lab.checkpoint.tree import Tree
from egeria_lab.engine.arguments import SETTINGS, check_path, described
from egeria_lab.errors import CheckpointError, InvalidSettingError
from egeria_lab.events import Event
from egeria_lab.history import History

MOST_RUNS = 12
"""So many lines can still be told apart by colour, dash and shape."""

LEFT_OUT = ("lr", "layers", "device")
"""Arguments that say nothing of their own: the peak rate stands under ``optimizer.lr``."""


@dataclass(frozen=True)
class Run:
    """One run under the name that it has in the comparison.

    Attributes:
        name: what it is called.
        source: the session, or None for what was read from a file.
        saved: what was read from a file, or None.
    """

    name: str
    source: Any = None
    saved: SavedRun | None = None

    @property
    def history(self) -> History:
        """The tables of numbers."""
        return self.source.history if self.saved is None else self.saved.history

    @property
    def events(self) -> list[Event]:
        """What happened so far."""
        return list(self.source.events if self.saved is None else self.saved.events)

    @property
    def state(self) -> str:
        """The session's state, or ``"saved"``."""
        return str(self.source.state) if self.saved is None else "saved"

    @property
    def size(self) -> tuple[int, int, int]:
        """Changes whenever there is something new to see."""
        history = self.history
        return len(history.steps) + len(history.epochs), history.rewinds, len(self.events)

    def settings(self) -> dict[str, str]:
        """Every argument and setting as it is now: dotted name → value in words."""
        if self.saved is not None:
            return self.saved.settings
        values = _arguments(described(self.source._arguments))
        return values | {row.name: _words(row.value) for row in self.source.settings()}


@dataclass(frozen=True)
class SavedRun:
    """A run as a checkpoint or the journal of a run directory tells it; no model is built."""

    history: History
    events: Sequence[Event]
    settings: dict[str, str]


def gather(runs: Sequence[Any], named: Mapping[str, Any]) -> list[Run]:
    """Sessions and paths as runs with distinct names.

    Args:
        runs: sessions, checkpoints or run directories; a session is called as its model and data are, a
            file by its name.
        named: the same by the name that it shall have; numbers tell equal names apart.

    Raises:
        InvalidSettingError: when nothing was given, too much, or something else than a session or a path.
        CheckpointError: when a file cannot be read.

    Example:
        >>> from egeria_lab.session import Session
        >>> pair = [Session("mlp", "digits", epochs=1, seed=seed) for seed in (0, 1)]
        >>> [run.name for run in gather(pair, {})]
        ['mlp on digits (1)', 'mlp on digits (2)']
    """
    if not 1 <= len(runs) + len(named) <= MOST_RUNS:
        raise InvalidSettingError(
            f"lab.compare takes 1 to {MOST_RUNS} runs, got {len(runs) + len(named)}: "
            "lab.compare(a, b) or lab.compare(plain=a, rule=b)."
        )
    found = [_run(one) for one in (*runs, *named.values())]
    names = distinct([*(run.name for run in found[: len(runs)]), *named])
    return [Run(name, run.source, run.saved) for name, run in zip(names, found, strict=True)]


def distinct(names: Sequence[str]) -> list[str]:
    """The same names in order, with numbers where one stands more than once.

    Example:
        >>> distinct(["a", "b", "a", "a (1)"])
        ['a (2)', 'b', 'a (3)', 'a (1)']
    """
    count = Counter(names)
    taken = {name for name in names if count[name] == 1}
    result = []
    for name in names:
        if count[name] > 1:
            name = next(n for n in (f"{name} ({i})" for i in itertools.count(1)) if n not in taken)
            taken.add(name)
        result.append(name)
    return result


def read_run(path: str | os.PathLike[str]) -> SavedRun:
    """What a checkpoint or a run directory tells of its run; nothing is written there, nothing is built.

    Raises:
        CheckpointError: when it cannot be read or holds no run.
    """
    place = Path(path)
    tree = latest(place)[1] if place.is_dir() else read(place)
    try:
        parts = tree["state"]["parts"]
        history = History([str(name) for name in _names(tree)])
        history.load_state_dict(parts["history"])
        events: list[Event] = list(parts["events"]["events"])
        settings = _arguments(tree["arguments"]) | _settings(parts["settings"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{place} holds no run that can be compared (it lacks {error}).") from error
    if place.is_dir() and (place / NAME).is_file():
        newer, happened = recover(place / NAME)
        if len(newer.steps) >= len(history.steps):
            history, events = newer, happened
    return SavedRun(history, events, settings)


def _names(tree: Tree) -> Sequence[str]:
    layers: Sequence[str] = tree["state"]["layers"]
    return layers


def _run(one: Any) -> Run:
    if isinstance(one, (str, os.PathLike)):
        place = check_path("lab.compare: path", one)
        return Run(place.name, saved=read_run(place))
    if all(hasattr(one, name) for name in ("history", "events", "settings", "state", "name")):
        return Run(str(one.name), one)
    raise InvalidSettingError(
        f"lab.compare takes sessions, checkpoints and run directories, got {type(one).__name__}: "
        "lab.compare(session, 'runs/earlier')."
    )


def _arguments(description: Mapping[str, Any]) -> dict[str, str]:
    """Arguments as `described` writes them, settings objects spread out under dotted names."""
    values: dict[str, str] = {}
    for name, what in description.items():
        if name in LEFT_OUT:
            continue
        if "settings" in what:
            values[name] = str(what["settings"])
            values |= {f"{name}.{key}": _words(value) for key, value in what["fields"].items()}
        else:
            values[name] = _words(what["value"]) if "value" in what else str(what.get("own"))
    return values


def with_kinds(settings: Mapping[str, str]) -> dict[str, str]:
    """For each settings object (``"freeze"``) its class and those of its values that are not the class's own.

    Example:
        >>> with_kinds({"freeze": "Plasticity", "freeze.window": "10", "freeze.patience": "3", "seed": "0"})
        {'freeze': 'Plasticity(patience=3)'}
    """
    spelled = {}
    for name, kind in settings.items():
        if kind not in SETTINGS or not any(key.startswith(f"{name}.") for key in settings):
            continue
        usual = {field.name: _words(field.default) for field in fields(SETTINGS[kind])}
        own = {key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")}
        changed = ", ".join(f"{key}={value}" for key, value in own.items() if value != usual.get(key))
        spelled[name] = f"{kind}({changed})"
    return spelled


def _settings(state: Mapping[str, Any]) -> dict[str, str]:
    """The settings that held when the checkpoint was written."""
    values = {"optimizer.lr": _words(state["learning_rate"])}
    values |= {f"freeze.{name}": _words(value) for name, value in (state["freeze"] or {}).items()}
    return values | {
        f"sieve.{name}": _words(value) for name, value in ((state.get("sieve") or [None])[0] or {}).items()
    }


def _words(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
