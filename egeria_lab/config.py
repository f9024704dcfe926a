"""The settings that may change mid-run, by dotted name, with what a slider needs to know about each.

Every setting lives with its owner (``freeze.*`` in `algorithms.freeze_policy.Plasticity`); here they are
gathered under the names that `Session.override` takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.errors import InvalidSettingError, unknown_name
from egeria_lab.events import Scalar
from egeria_lab.tables import html_table, text_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting that may change mid-run.

    Attributes:
        name: dotted name, for example ``"freeze.tolerance"``.
        value: what holds now for all layers.
        default: what the session started with.
        low: smallest useful value, the left end of a slider.
        high: largest useful value, the right end of a slider; code may go beyond where that is valid.
        unit: unit of the value, or empty.
        log_scale: a slider should be logarithmic.
        integer: only whole numbers are allowed.
        per_layer: may have another value for one layer.
        applies: when a change takes effect.
        help: one sentence on what it does.
    """

    name: str
    value: Scalar
    default: Scalar
    low: float
    high: float
    unit: str = ""
    log_scale: bool = False
    integer: bool = False
    per_layer: bool = False
    applies: str = "next plasticity reading"
    help: str = ""


class SettingList(list[Setting]):
    """Settings that print as a table."""

    def __repr__(self) -> str:
        return text_table(*self._shown())

    def _repr_html_(self) -> str:
        return html_table(*self._shown())

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [s.name, str(s.value), str(s.default), f"{s.low:g} to {s.high:g} {s.unit}".strip(), s.applies, s.help]
            for s in self
        ]
        return ["setting", "value", "at the start", "useful range", "a change applies", "what it does"], rows


_FREEZE: dict[str, dict[str, Any]] = {
    "tolerance": {
        "low": 0.01, "high": 2.0, "log_scale": True, "per_layer": True, "unit": "× first slopes",
        "help": "A layer is stable when its slope falls below this share of its own first slopes.",
    },
    "window": {
        "low": 2, "high": 40, "integer": True, "unit": "readings",
        "help": "Readings in the moving average and in the line fit.",
    },
    "patience": {
        "low": 1, "high": 40, "integer": True, "unit": "readings",
        "help": "Stable readings in a row that a freeze needs.",
    },
    "interval_steps": {
        "low": 1, "high": 100, "integer": True, "unit": "steps", "applies": "next step",
        "help": "Training steps between two plasticity readings.",
    },
    "bootstrap_change": {
        "low": 0.01, "high": 1.0, "log_scale": True, "unit": "share",
        "help": "Nothing freezes until the loss changes by less than this share between two windows.",
    },
    "max_frozen": {
        "low": 0.05, "high": 1.0, "unit": "share of layers",
        "help": "At most this share of the layers may be frozen by the rule.",
    },
    "monitor_budget": {
        "low": 0.005, "high": 0.5, "log_scale": True, "unit": "share of time",
        "help": "Share of the training time that plasticity readings may take.",
    },
}  # fmt: skip
_SIEVE: dict[str, dict[str, Any]] = {
    "fraction": {
        "low": 0.01, "high": 0.9, "unit": "share of samples", "applies": "next exchange of the sieve",
        "help": "Share of the training set that is set aside.",
    },
    "stop_fraction": {
        "low": 0.0, "high": 1.0, "unit": "share of training", "applies": "next exchange of the sieve",
        "help": "After this share of training nothing is exchanged any more.",
    },
    "full_after": {
        "low": 0.0, "high": 1.0, "unit": "share of training", "applies": "next pass over the data",
        "help": "After this share of training every sample is trained on.",
    },
}  # fmt: skip
_SPECS = {"freeze": _FREEZE, "sieve": _SIEVE}
_LEARNING_RATE: dict[str, Any] = {
    "low": 1e-5, "high": 1.0, "log_scale": True, "applies": "next step",
    "help": "Peak learning rate; the schedule keeps its shape.",
}  # fmt: skip
LEARNING_RATE = "optimizer.lr"


class Settings:
    """What the settings of one session are now and were at its start.

    Args:
        freeze: the freezing rule's settings; only those of `Plasticity` may change mid-run.
        learning_rate: peak learning rate.
        sieve: the sieve's settings, or None.

    Example:
        >>> settings = Settings(Plasticity(), learning_rate=0.1)
        >>> settings.value("freeze.patience")
        10
        >>> settings.change("freeze.patience", 5)
        >>> settings.value("freeze.patience"), settings.default("freeze.patience")
        (5, 10)
    """

    def __init__(self, freeze: object, learning_rate: float, sieve: object = None) -> None:
        self.freeze = freeze if isinstance(freeze, Plasticity) else None
        self.sieve = sieve
        self.learning_rate = learning_rate
        self.per_layer: dict[tuple[str, str], float] = {}
        self._start = (self.freeze, learning_rate)
        self._sieve_at_start = sieve

    def names(self) -> list[str]:
        """Names of all settings that may change mid-run."""
        owned = ((prefix, name) for prefix, spec in _SPECS.items() for name in spec)
        return [*(f"{prefix}.{name}" for prefix, name in owned if hasattr(self.owner(prefix), name)), LEARNING_RATE]

    def owner(self, prefix: str) -> object:
        """The settings object behind a prefix, as it is now."""
        return {"freeze": self.freeze, "sieve": self.sieve}.get(prefix)

    def value(self, name: str, layer: str | None = None) -> Scalar:
        """What holds now, for one layer or for all.

        Raises:
            UnknownNameError: when there is no such setting.
        """
        self._check_name(name)
        if layer is not None and (name, layer) in self.per_layer:
            return self.per_layer[name, layer]
        return self._read(name, self.learning_rate, self.owner)

    def default(self, name: str) -> Scalar:
        """What the session started with."""
        self._check_name(name)
        owners = {"freeze": self._start[0], "sieve": self._sieve_at_start}
        return self._read(name, self._start[1], owners.get)

    def check(self, name: str, value: object, layer: str | None = None) -> None:
        """Raise the error that `change` would raise, and change nothing.

        Raises:
            UnknownNameError: when there is no such setting.
            InvalidSettingError: when the value is out of range, or the setting is not one a layer can have.
        """
        self.check_scope(name, layer)
        if name == LEARNING_RATE:
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise InvalidSettingError(f"{name} must be a number > 0, got {value!r}.")
        else:
            self.replaced(name, value)

    def check_scope(self, name: str, layer: str | None) -> None:
        """Raise unless there is such a setting, and one layer can have its own value of it if one is named.

        Raises:
            UnknownNameError: when there is no such setting.
            InvalidSettingError: when the setting is not one a layer can have.
        """
        self._check_name(name)
        if layer is not None and not _spec(name).get("per_layer", False):
            per_layer = ", ".join(f"freeze.{key}" for key, spec in _FREEZE.items() if spec.get("per_layer"))
            raise InvalidSettingError(
                f"{name} holds for all layers and cannot be set for {layer}; one layer can have {per_layer}."
            )

    def change(self, name: str, value: Any, layer: str | None = None) -> None:
        """Give a setting a new value. Errors as `check`; on an error nothing changes."""
        self.check(name, value, layer)
        if layer is not None:
            self.per_layer[name, layer] = float(value)
        elif name == LEARNING_RATE:
            self.learning_rate = float(value)
        elif name.startswith("sieve."):
            self.sieve = self.replaced(name, value)
        else:
            self.freeze = self.replaced(name, value)

    def forget(self, name: str, layer: str) -> None:
        """Let a layer follow the value for all layers again."""
        self.per_layer.pop((name, layer), None)

    def state_dict(self) -> dict[str, Any]:
        """What holds now and what held at the start, as plain values; functions of the user stay out."""
        return {
            "freeze": _plain_fields(self.freeze),
            "sieve": [_plain_fields(self.sieve), _plain_fields(self._sieve_at_start)],
            "learning_rate": self.learning_rate,
            "per_layer": [[name, layer, value] for (name, layer), value in self.per_layer.items()],
            "start": [_plain_fields(self._start[0]), self._start[1]],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over values and defaults; settings of another rule are left alone."""
        if self.freeze is not None and state["freeze"] is not None and self._start[0] is not None:
            self.freeze = replace(self.freeze, **state["freeze"])
            self._start = (replace(self._start[0], **state["start"][0]), state["start"][1])
        now, start = state.get("sieve", (None, None))
        if self.sieve is not None and now is not None:
            sieve, at_start = self.sieve, self._sieve_at_start
            self.sieve, self._sieve_at_start = replace(sieve, **now), replace(at_start, **start)  # type: ignore[type-var]
        self._start = (self._start[0], state["start"][1])
        self.learning_rate = state["learning_rate"]
        self.per_layer = {(name, layer): value for name, layer, value in state["per_layer"]}

    def list(self) -> SettingList:
        """Every setting with its present value and range."""
        return SettingList(
            Setting(name=name, value=self.value(name), default=self.default(name), **_spec(name))
            for name in self.names()
        )

    def _check_name(self, name: str) -> None:
        if name not in self.names():
            if name.startswith("sieve.") and self.sieve is None:
                raise InvalidSettingError(
                    f"{name} belongs to a sieve, and this session has none; build it with sieve=lab.CirculantSieve()."
                )
            if name.startswith("freeze.") and self.freeze is None:
                raise InvalidSettingError(
                    f"{name} belongs to the plasticity rule, and this session has another one or none; "
                    "build it with freeze=lab.Plasticity()."
                )
            raise unknown_name("setting", name, self.names())

    def _read(self, name: str, learning_rate: float, owner: Callable[[str], object]) -> Scalar:
        prefix, field = name.split(".", 1)
        value: Scalar = learning_rate if name == LEARNING_RATE else getattr(owner(prefix), field)
        return value

    def replaced(self, name: str, value: Any) -> Any:
        """The settings object that owns `name`, with another value; what is set now stays as it is.

        Raises:
            InvalidSettingError: when the value is out of range.
        """
        prefix, field = name.split(".", 1)
        owner: Any = self.owner(prefix)
        kinds = {f.name: f.type for f in fields(owner)}
        if kinds[field] == "int" and isinstance(value, float) and value.is_integer():
            value = int(value)  # a slider sends 10.0 for 10
        return replace(owner, **{field: value})


def _spec(name: str) -> dict[str, Any]:
    prefix, field = name.split(".", 1)
    return _LEARNING_RATE if name == LEARNING_RATE else _SPECS[prefix][field]


def _plain_fields(settings: Any) -> dict[str, Scalar] | None:
    if settings is None:
        return None
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {name: value for name, value in values.items() if value is None or isinstance(value, (str, int, float))}


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A seed for one purpose, the same on every machine and independent of any generator's state.

    Example:
        >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 1) != derive_seed(0, "order", 2)
        True
    """
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
