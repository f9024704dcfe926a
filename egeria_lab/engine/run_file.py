"""Read a run file: a TOML file that says how a session is asked for; names and places are checked here.

Nothing in it is executed, no class is made but the settings in `KINDS`, and no path leads out of the file's folder.
Values are checked by the settings themselves and by `Session`.
"""

from __future__ import annotations

import inspect
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from egeria_lab.engine.arguments import SETTINGS, check_path
from egeria_lab.engine.run_config import NONE, NOT_IN_FILES, PATHS, Own, RunConfig, defaults_of
from egeria_lab.errors import EgeriaLabError, InvalidSettingError, unknown_name

KINDS = {
    "freeze": ("Plasticity", "Schedule", "GradientNorm"),
    "sieve": ("CirculantSieve", "RandomSieve", "OneShotSieve", "LossSieve"),
    "sparsity": ("MEST", "SET", "RigL", "StaticSparsity"),
    "cache": ("ActivationCache",),
    "augment": ("Augment",),
}
"""Argument of `Session` → the classes of settings that it takes."""

Presets = Mapping[str, Callable[..., Mapping[str, Any]]]


def read_config(
    make: Callable[..., Any],
    path: str | os.PathLike[str],
    presets: Presets,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Read a file and check its names; values are checked by the settings themselves and by `make`.

    Args:
        make: whose arguments they are: `Session`.
        path: the file.
        presets: name → function that returns keywords of `make`.
        overrides: ``"key=value"`` texts that take the place of what the file says, such as
            ``"freeze.tolerance=0.3"``. A path given here is the user's own word and may lead anywhere.

    Raises:
        InvalidSettingError: when it cannot be read or is no TOML, for a value that cannot be, and for a path that
            leads out of the folder of the file.
        UnknownNameError: for an unknown key, class, preset or setting, with the nearest one.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "run.toml")
        ...     _ = path.write_text("epochs = 2")
        ...     read_config(lambda epochs=20, seed=0: None, path, {}, ["seed=3"])
        # egeria-lab train THIS_FILE
        epochs = 2
        seed = 3
    """
    place = check_path("Session.from_config: path", path)
    try:
        raw = tomllib.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidSettingError(f"there is no file {place}; write one with session.config.write(path).") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise InvalidSettingError(f"{place} cannot be read: {reason}.") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidSettingError(f"{place} is no TOML file: {error}.") from error
    for text in overrides:
        _override(raw, text)
    try:
        return _from_raw(make, raw, presets, place.resolve().parent)
    except EgeriaLabError as error:
        raise type(error)(f"{place.name}: {error}") from error


def _from_raw(make: Callable[..., Any], raw: dict[str, Any], presets: Presets, folder: Path) -> RunConfig:
    defaults = {name: value for name, value in defaults_of(make).items() if name not in NOT_IN_FILES}
    for name in raw:
        if name not in defaults and name not in ("preset", "own"):
            raise unknown_name("key", name, [*defaults, "preset"])
    values = {**defaults, **_preset(raw.get("preset"), presets)}
    for name, value in raw.items():
        if name in KINDS:
            values[name] = _settings(name, value, values[name], folder)
        elif name == "own":
            values.update(_own(value, defaults))
        elif name != "preset":
            values[name] = _plain_value(name, value, folder)
    return RunConfig(values, defaults)


def _preset(asked: Any, presets: Presets) -> Mapping[str, Any]:
    if asked is None or asked == NONE:
        return {}
    options = {"name": asked} if isinstance(asked, str) else asked
    if not isinstance(options, dict) or not isinstance(options.get("name"), str):
        raise InvalidSettingError(f"preset must be a name ({', '.join(presets)}) or a table with one, got {asked!r}.")
    options = dict(options)
    name = options.pop("name")
    if name not in presets:
        raise unknown_name("preset", name, presets)
    known = list(inspect.signature(presets[name]).parameters)
    for key, value in options.items():
        if key not in known:
            raise unknown_name(f"option of the preset {name}", key, known)
        if not isinstance(value, (bool, int, float)):
            raise InvalidSettingError(f"preset.{key} must be a number or a truth value, got {value!r}.")
    return presets[name](**options)


def _settings(name: str, value: Any, base: Any, folder: Path) -> Any:
    """A settings object from a table; without ``kind`` the preset's or the default one, with some fields changed."""
    kinds = KINDS[name]
    if value == NONE:
        return None
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, dict):
        raise InvalidSettingError(
            f'{name} must be a table with kind = one of {", ".join(kinds)}, or "none"; got {value!r}.'
        )
    entries = dict(value)
    kind = entries.pop("kind", None)
    if kind is not None and kind not in kinds:
        raise unknown_name(f"kind of {name}", kind, kinds)
    if kind is None and base is None:
        if len(kinds) > 1:
            raise InvalidSettingError(f"[{name}] needs kind = one of {', '.join(kinds)}.")
        kind = kinds[0]
    owner = type(base) if kind is None else SETTINGS[kind]
    known = [field.name for field in fields(owner) if field.init]
    for key in entries:
        if key not in known:
            raise unknown_name(f"setting of {owner.__name__}", key, ["kind", *known])
    made = {key: _frozen(_plain_value(f"{name}.{key}", item, folder)) for key, item in entries.items()}
    try:
        return replace(base, **made) if kind is None else owner(**made)
    except TypeError as error:  # a value of a kind that the settings cannot even compare
        raise InvalidSettingError(f"[{name}] holds a value that {owner.__name__} cannot take: {error}.") from error


def _own(value: Any, defaults: Mapping[str, Any]) -> dict[str, Own]:
    if not isinstance(value, dict):
        raise InvalidSettingError(f"own must be a table of arguments and what they were, got {value!r}.")
    for name in value:
        if name not in defaults:
            raise unknown_name("argument in [own]", name, defaults)
    return {name: Own(str(what)) for name, what in value.items()}


def _plain_value(name: str, value: Any, folder: Path) -> Any:
    if name in PATHS and value != NONE:
        return _inside(name, value, folder)
    good = isinstance(value, (bool, int, float, str, Path)) or (
        isinstance(value, list) and all(isinstance(item, (bool, int, float, str)) for item in value)
    )
    if not good:
        raise InvalidSettingError(f"{name} must be a text, a number, a truth value or a list of them, got {value!r}.")
    return None if value == NONE else value


def _inside(name: str, value: Any, folder: Path) -> Path:
    """A path of a file, which stays in the file's folder; a `Path` was given by the user and may lead anywhere."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str):
        raise InvalidSettingError(f"{name} must be a path, got {value!r}.")
    given = check_path(name, value)
    place = (folder / given).resolve()
    if given.is_absolute() or not place.is_relative_to(folder):
        argument = name.partition(".")[0]
        raise InvalidSettingError(
            f"{name} = {value!r} leads out of {folder}, where the file lies: a file may not say where else to write. "
            f"Give it yourself: --set {name}={value}, or {argument}= in Session.from_config."
        )
    return place


def _override(raw: dict[str, Any], text: str) -> None:
    """Put ``key=value`` into what was read; the value is TOML, or else a text without quotes."""
    name, equals, given = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts) or len(parts) > 2:
        raise InvalidSettingError(f"--set takes key=value, such as freeze.tolerance=0.3; got {text!r}.")
    try:
        value = tomllib.loads(f"value = {given}")["value"]
    except tomllib.TOMLDecodeError:
        value = given.strip()
    if name.strip() in PATHS and isinstance(value, str) and value != NONE:
        value = check_path(f"--set {name.strip()}", value).resolve()
    table = raw
    if len(parts) == 2:
        table = raw.setdefault(parts[0], {})
        if isinstance(table, str):
            table = raw[parts[0]] = {"name" if parts[0] == "preset" else "kind": table}
        if not isinstance(table, dict):
            raise InvalidSettingError(f"--set {text}: {parts[0]} is no table of settings.")
    table[parts[-1]] = value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
