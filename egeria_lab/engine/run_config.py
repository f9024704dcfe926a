"""How a session is asked for, as values that a TOML file can hold; `egeria_lab.engine.run_file` reads them again."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from egeria_lab.engine.arguments import SETTINGS, check_path
from egeria_lab.errors import InvalidSettingError, unknown_name

NONE = "none"
"""TOML has no null: this text stands for None where None is not what is meant anyway."""
NOT_IN_FILES = ("cluster",)
"""Arguments that are live connections: nothing a file could say."""
PATHS = ("run_dir", "cache.directory")


@dataclass(frozen=True, slots=True)
class Own:
    """An object of the user's own (a module, a function, a loader), of which a file can hold the name only.

    Example:
        >>> Own("MyNet").name
        'MyNet'
    """

    name: str


class RunConfig(Mapping[str, Any]):
    """The arguments of one session, as they can be written to a TOML file and read from it again.

    A mapping from the name of an argument to its value: plain values, settings objects, absolute paths, and `Own`
    for objects that no file can hold. Two are equal when all their values are.

    Args:
        values: argument → value.
        defaults: argument → what holds when a file does not name it.

    Example:
        >>> from egeria_lab.session import Session
        >>> config = Session("mlp", "digits", epochs=2, sieve=None).config
        >>> config["epochs"], type(config["freeze"]).__name__
        (2, 'Plasticity')
        >>> print(config.to_toml().splitlines()[1])
        model = "mlp"
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = {name: _kept(name, value) for name, value in values.items() if name not in NOT_IN_FILES}
        self._defaults = dict(defaults)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise KeyError(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return self.to_toml()

    @property
    def own(self) -> tuple[str, ...]:
        """Arguments that have to be given again, because they are objects of the user's own."""
        return tuple(name for name, value in self._values.items() if isinstance(value, Own))

    def to_toml(self, folder: str | os.PathLike[str] = ".") -> str:
        """The text of a file; every value stands in it, defaults too, so that a later version trains the same.

        Args:
            folder: where the file will lie. A path inside it is written relative to it; one outside becomes a
                comment, since a file may not say where else to write.

        Objects of the user's own are listed under ``[own]``; whoever reads the file has to give them again.
        """
        place = Path(folder).resolve()
        lines, tables = ["# egeria-lab train THIS_FILE"], []
        for name, value in self._values.items():
            if is_dataclass(value) and not isinstance(value, (type, Own)):
                plain = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
                tables += ["", f"[{name}]", _line("kind", type(value).__name__)]
                for key, item in plain.items():
                    default = next(field.default for field in fields(value) if field.name == key)
                    tables += _entry(f"{name}.{key}", key, item, default, place)
            elif not isinstance(value, Own):
                lines += _entry(name, name, value, self._defaults.get(name), place)
        if self.own:
            tables += ["", "[own] # objects of one's own: give them again, Session.from_config(…, NAME=…)"]
            tables += [_line(name, self._values[name].name) for name in self.own]
        return "\n".join([*lines, *tables]) + "\n"

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the file, whole or not at all, and return its path; a link stays one, and what it leads to is written.

        Raises:
            InvalidSettingError: when it cannot be written.
        """
        target = check_path("config.write: path", path)
        try:
            real = target.resolve()
        except (OSError, RuntimeError) as error:  # links in a circle
            raise InvalidSettingError(f"cannot write {target}: its links lead nowhere; give another path.") from error
        part = real.with_name(f".egeria-lab-{os.getpid()}-{threading.get_ident()}.part")
        try:
            part.write_text(self.to_toml(real.parent), encoding="utf-8")
            part.replace(real)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise InvalidSettingError(f"cannot write {target}: {error.strerror}; give another path.") from error
        return target


def config_of(make: Callable[..., Any], arguments: Mapping[str, Any]) -> RunConfig:
    """The configuration of a session that was made with these arguments.

    Example:
        >>> config_of(lambda model="mlp", loss=None: None, {"model": "mlp", "loss": print})["loss"]
        Own(name='print')
    """
    return RunConfig(arguments, defaults_of(make))


def arguments_from(make: Callable[..., Any], config: RunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `make`: what was given, and the rest from the configuration.

    Raises:
        InvalidSettingError: when an object of the user's own is not given.
        UnknownNameError: for a given argument that `make` has not.
    """
    known = defaults_of(make)
    for name in given:
        if name not in known:
            raise unknown_name("argument of from_config()", name, known)
    missing = [name for name in config.own if name not in given]
    if missing:
        named = ", ".join(f"{name}= ({config[name].name})" for name in missing)
        again = ", ".join(f"{name}=…" for name in missing)
        raise InvalidSettingError(
            f"the configuration was made with objects of your own that no file can hold: {named}; give them again, "
            f"Session.from_config(…, {again})."
        )
    return {**{name: config[name] for name in config if name not in given}, **given}


def defaults_of(make: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a callable and what holds when they are not given.

    Example:
        >>> defaults_of(lambda model="mlp", lr=None: None)
        {'model': 'mlp', 'lr': None}
    """
    return {name: entry.default for name, entry in inspect.signature(make).parameters.items()}


def _kept(name: str, value: Any) -> Any:
    """A value as a configuration holds it."""
    if isinstance(value, Own) or value is None:
        return value
    if name in PATHS and isinstance(value, (str, os.PathLike)):
        return check_path(name, value).resolve()
    if isinstance(value, torch.device):
        return str(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return list(value)
    if SETTINGS.get(type(value).__name__) is type(value):
        return _kept_settings(name, value)
    return Own(getattr(value, "__qualname__", type(value).__qualname__))


def _kept_settings(name: str, settings: Any) -> Any:
    own = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        if f"{name}.{field.name}" in PATHS and value is not None:
            settings = replace(settings, **{field.name: check_path(f"{name}.{field.name}", value).resolve()})
        elif not _is_plain(value):
            own.append(f"{field.name}={getattr(value, '__qualname__', type(value).__qualname__)}")
    return Own(f"{type(settings).__name__}({', '.join(own)})") if own else settings


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _entry(full_name: str, name: str, value: Any, default: Any, folder: Path) -> list[str]:
    if value is None:
        return [] if default is None else [_line(name, NONE)]
    if isinstance(value, Path):
        if not value.is_relative_to(folder):
            return [
                f"# {_line(name, str(value))} leads out of this folder: give {full_name} again, --set {full_name}=…"
            ]
        value = value.relative_to(folder).as_posix()
    return [_line(name, value)]


def _line(name: str, value: Any) -> str:
    return f"{name} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's escapes are JSON's
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
