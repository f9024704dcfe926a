"""The settings that may change mid-run as rows for sliders: value, range, unit, when a change applies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from egeria_lab.dashboard.series import LayerRow
from egeria_lab.dashboard.summary import SettingRow

PRIMARY_SETTING = "freeze.tolerance"
"""The setting that stands in the open; the others are folded away under "more"."""


class SettingControl(SettingRow, Protocol):
    """One row of `session.settings()`, with what a slider needs besides."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def log_scale(self) -> bool: ...
    @property
    def integer(self) -> bool: ...
    @property
    def applies(self) -> str: ...


class WithSettings(Protocol):
    """What the rows are read from: a session."""

    @property
    def layers(self) -> Iterable[LayerRow]: ...
    def settings(self) -> Iterable[SettingControl]: ...
    def setting(self, name: str, layer: str | None = None) -> object: ...


def describe_settings(session: WithSettings) -> list[dict[str, object]]:
    """Every setting that may change mid-run, as the page needs it to draw a slider.

    Returns:
        For each: name, value, default, range, unit, scale, when it applies, one line of help, whether it is
        folded away, and under ``"layers"`` the layers' own values where they differ from the common one.
    """
    rows: list[dict[str, object]] = []
    for row in session.settings():
        if not isinstance(row.value, (int, float)) or isinstance(row.value, bool):
            continue
        rows.append(
            {
                "name": row.name, "value": row.value, "default": row.default, "low": row.low,
                "high": row.high, "unit": row.unit, "log": row.log_scale, "integer": row.integer,
                "per_layer": row.per_layer, "applies": row.applies, "help": row.help,
                "primary": row.name == PRIMARY_SETTING, "layers": _own_values(session, row),
            }
        )  # fmt: skip
    return rows


def _own_values(session: WithSettings, row: SettingControl) -> dict[str, object]:
    if not row.per_layer:
        return {}
    values = {layer.name: session.setting(row.name, layer=layer.name) for layer in session.layers}
    return {name: value for name, value in values.items() if value != row.value}
