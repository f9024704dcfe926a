"""How a session was asked for, as plain values: names and settings by value, own objects by their type only."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from egeria_lab.algorithms import freeze_policy, freeze_schedule, gradient_norm
from egeria_lab.algorithms.sieving import settings as sieve_settings
from egeria_lab.algorithms.sparse import methods as sparsity
from egeria_lab.data import augment, cache_settings
from egeria_lab.errors import CheckpointError, EgeriaLabError, InvalidSettingError, unknown_name

NOT_KEPT = (
    "self",
    "paused",
    "distributed",
    "run_dir",
    "save_every_steps",
    "save_every_minutes",
    "keep_checkpoints",
    "undo_bytes",
)
"""Where a session is saved, and whether it waits to begin, is decided when it is made or loaded, and by nothing that
is read from a checkpoint."""


MOST_NAME_BYTES = 255
MOST_PATH_BYTES = 4095
"""What file systems take; some take less, and say so themselves."""


def _settings_in(*modules: ModuleType) -> dict[str, type[Any]]:
    return {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__ and name[0] != "_"
    }


SETTINGS = _settings_in(
    freeze_policy, freeze_schedule, gradient_norm, sieve_settings, sparsity, cache_settings, augment
)
"""The only classes that are ever made from what a checkpoint says: dataclasses that check themselves."""


def described(arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments of `Session` as plain data.

    Example:
        >>> described({"model": "mlp", "lr": 0.1, "loss": print})
        {'model': {'value': 'mlp'}, 'lr': {'value': 0.1}, 'loss': {'own': 'print'}}
    """
    return {name: _described(value) for name, value in arguments.items() if name not in NOT_KEPT}


def rebuilt(description: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Arguments for `Session` from a description, and notes on what could not be taken over.

    Args:
        description: from `described`.
        given: arguments that take the place of those that are described.

    Raises:
        CheckpointError: when an object of the user's own is missing, or a setting is none that can be.
    """
    arguments, notes = dict(given), []
    for name, what in description.items():
        if name in given:
            continue
        if name in NOT_KEPT:
            raise CheckpointError(f"the checkpoint says {name}=, which no checkpoint may decide; take one of ours.")
        if "own" in what:
            raise CheckpointError(
                f"the checkpoint was made with {name}= of your own ({what['own']}), which is not saved: give it "
                f"again, load(…, {name}=…)."
            )
        if "value" in what:
            arguments[name] = what["value"]
            continue
        arguments[name], note = _made(name, what)
        notes += note
    return arguments, notes


def check_names(call: str, make: Callable[..., Any], changes: Mapping[str, Any]) -> None:
    """Raise for a change that is no argument of `make`.

    Raises:
        UnknownNameError: with the nearest one.

    Example:
        >>> check_names("fork()", lambda epochs=1: None, {"epoch": 2})
        Traceback (most recent call last):
        egeria_lab.errors.UnknownNameError: Unknown argument of fork() 'epoch'. Did you mean 'epochs'? Known: epochs.
    """
    known = list(inspect.signature(make).parameters)
    for name in changes:
        if name not in known:
            raise unknown_name(f"argument of {call}", name, known)


def check_path(call: str, path: Any) -> Path:
    """A path from whatever was given for one; a leading ``~`` is the home directory.

    Args:
        call: what the path was given to, for the sentence.
        path: what was given.

    Raises:
        InvalidSettingError: when it is none, or one that no file can have.

    Example:
        >>> check_path("Session.save: path", "runs/first.ckpt").name
        'first.ckpt'
        >>> check_path("Session.save: path", "")
        Traceback (most recent call last):
        egeria_lab.errors.InvalidSettingError: Session.save: path must be a path, got an empty text: give a name.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise InvalidSettingError(f"{call} must be a path (a text or a pathlib.Path), got {path!r}.")
    if not text:
        raise InvalidSettingError(f"{call} must be a path, got an empty text: give a name.")
    if "\0" in text:
        raise InvalidSettingError(f"{call} must be a path, got {_shortened(text)} with a null character: leave it out.")
    try:
        place = Path(text).expanduser()
        longest = max(len(os.fsencode(part)) for part in (place.anchor, *place.parts))
    except RuntimeError as error:  # ~somebody
        raise InvalidSettingError(f"{call} = {_shortened(text)}: there is no such home directory.") from error
    except UnicodeEncodeError as error:
        raise InvalidSettingError(f"{call} = {_shortened(text)} has a character that no file name can hold.") from error
    if longest > MOST_NAME_BYTES or len(os.fsencode(os.path.abspath(place))) > MOST_PATH_BYTES:
        raise InvalidSettingError(
            f"{call} = {_shortened(text)} is too long: a name may have {MOST_NAME_BYTES} bytes and a whole path "
            f"{MOST_PATH_BYTES:,}; give a shorter one."
        )
    return place


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:24]}…{text[-15:]}")


def _described(value: Any) -> dict[str, Any]:
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if isinstance(value, torch.device):
        return {"value": str(value)}
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return {"value": list(value)}
    if type(value).__name__ in SETTINGS and type(value) is SETTINGS[type(value).__name__]:
        plain = {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.init}
        if all(_is_plain(item) for item in plain.values()):
            return {"settings": type(value).__name__, "fields": plain}
    return {"own": getattr(value, "__qualname__", type(value).__qualname__)}


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _made(name: str, what: Mapping[str, Any]) -> tuple[Any, list[str]]:
    named, fields_of_it = what.get("settings"), what.get("fields", {})
    kind = SETTINGS.get(named) if isinstance(named, str) else None
    if kind is None or not isinstance(fields_of_it, Mapping):
        raise CheckpointError(
            f"the checkpoint has settings {what.get('settings')!r} for {name}= that are none of ours."
        )
    values, notes = dict(fields_of_it), []
    if values.get("directory") is not None:
        values["directory"] = None  # a path in a file may not decide where files are written
        notes.append(f"Files of {name}= go to the place for temporary files; give {name}= again for another.")
    try:
        return kind(**values), notes
    except (TypeError, EgeriaLabError) as error:
        raise CheckpointError(f"the checkpoint's settings for {name}= cannot be used: {error}") from error
