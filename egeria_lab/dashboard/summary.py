"""What a session amounts to, in words and in rows of a table: shared by the report and the static view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from egeria_lab.dashboard.saving_rows import SavingRow, number, quantity, saving_rows
from egeria_lab.dashboard.series import HANDS, LayerRow
from egeria_lab.dashboard.sieve_sheet import SieveSource
from egeria_lab.events import EventLog
from egeria_lab.history import History
from egeria_lab.tables import percent


class SettingRow(Protocol):
    """One row of `session.settings()`."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> object: ...
    @property
    def default(self) -> object: ...
    @property
    def unit(self) -> str: ...
    @property
    def per_layer(self) -> bool: ...
    @property
    def help(self) -> str: ...


class LedgerView(Protocol):
    """What a picture needs of `session.savings()`."""

    def to_dict(self) -> dict[str, object]: ...


class SessionView(Protocol):
    """The part of a session that a picture of it reads; it changes nothing there."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def error(self) -> BaseException | None: ...
    @property
    def events(self) -> EventLog: ...
    @property
    def history(self) -> History: ...
    @property
    def steps_done(self) -> int: ...
    @property
    def planned_steps(self) -> int: ...
    @property
    def epoch(self) -> float: ...
    @property
    def device(self) -> object: ...
    @property
    def layers(self) -> Iterable[LayerRow]: ...
    @property
    def sieve(self) -> SieveSource | None: ...
    def settings(self) -> Iterable[SettingRow]: ...
    def setting(self, name: str, layer: str | None = None) -> object: ...
    def savings(self) -> LedgerView: ...


@dataclass(frozen=True, slots=True)
class Headline:
    """One number that matters, with its name and one clause of context."""

    label: str
    value: str
    note: str


def headlines(session: SessionView, ledger: Mapping[str, object]) -> list[Headline]:
    """The numbers at the top: progress, accuracy, frozen layers, savings, the cost of monitoring.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits")
        >>> [card.value for card in headlines(session, session.savings().to_dict())][:3]
        ['0', '–', '0 of 4']
    """
    layers = list(session.layers)
    flops, time, memory, *others, monitoring = saving_rows(ledger)
    whole = next((row for row in others if "all together" in row.quantity), flops)
    return [
        Headline(
            "Steps trained", f"{session.steps_done:,}",
            f"of {session.planned_steps:,} planned, {session.epoch:.1f} epochs, {session.state}",
        ),
        _accuracy(session.history),
        _frozen(layers),
        Headline("Computation saved", percent(whole.theoretical), "theoretical, counted in FLOPs"),
        Headline("Time saved", percent(time.measured), _beside(time)),
        Headline("Memory saved", percent(memory.measured), _beside(memory)),
        Headline("Monitoring", percent(monitoring.measured), "of all time spent: the price of watching"),
    ]  # fmt: skip


def _beside(row: SavingRow) -> str:
    if row.measured is None and row.theoretical is None:
        return row.why or "nothing measured yet"
    return f"measured; in theory {percent(row.theoretical)}"


def _accuracy(history: History) -> Headline:
    last = history.epochs.last()
    if (valid := number(last.get("valid_accuracy"))) is not None:
        return Headline("Validation accuracy", f"{valid:.1%}", f"after epoch {last['epoch']:.0f}")
    train = number(history.steps.last().get("accuracy"))
    if train is not None:
        return Headline("Training accuracy", f"{train:.1%}", "last batch; no epoch has been validated yet")
    return Headline("Accuracy", "–", "no step yet")


def _frozen(layers: list[LayerRow]) -> Headline:
    frozen = [row for row in layers if row.state == "frozen"]
    by_hand = sum(row.by in HANDS for row in frozen)
    pinned = sum(row.state == "pinned" for row in layers)
    note = f"{len(frozen) - by_hand} by the rule, {by_hand} by hand" + (f"; {pinned} pinned" if pinned else "")
    return Headline("Frozen layers", f"{len(frozen)} of {len(layers)}", note)


TableCells = tuple[list[str], list[list[str]]]
"""Head and body of a table, ready for `egeria_lab.tables`."""


def layer_rows(layers: Iterable[LayerRow], ledger: Mapping[str, object]) -> TableCells:
    """The layer modules front to back: state, why, since when, by whom, parameters, FLOPs a sample.

    Example:
        >>> head, body = layer_rows([], {})
        >>> head[:3], body
        (['layer', 'what', 'state'], [])
    """
    listed = ledger.get("layers")
    costs = {row["name"]: row for row in listed} if isinstance(listed, list) else {}
    head = [
        "layer",
        "what",
        "state",
        "since step",
        "by",
        "why",
        "parameters",
        "forward per sample",
        "backward per sample",
        "steps frozen",
    ]
    body = []
    for row in layers:
        cost = costs.get(row.name, {})
        frozen_steps = number(cost.get("frozen_steps"))
        body.append([
            row.name, row.title, row.state, "" if row.since_step is None else f"{row.since_step:,}",
            row.by or "", row.reason or "", f"{row.num_parameters:,}",
            quantity(cost.get("forward_flops"), "FLOPs"), quantity(cost.get("backward_flops"), "FLOPs"),
            "–" if frozen_steps is None else f"{frozen_steps:,.0f}",
        ])  # fmt: skip
    return head, body


def setting_rows(session: SessionView, layers: Iterable[LayerRow]) -> TableCells:
    """All settings with their value, their default, and the layers for which they differ.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits")
        >>> _, body = setting_rows(session, session.layers)
        >>> [row[1] for row in body if row[0] == "freeze.patience"]
        ['10']
    """
    names = [row.name for row in layers]
    body = []
    for row in session.settings():
        own = {name: session.setting(row.name, name) for name in names} if row.per_layer else {}
        differing = [f"{name}: {_plain(value)}" for name, value in own.items() if value != row.value]
        body.append([
            row.name, _plain(row.value), _plain(row.default), row.unit, "; ".join(differing), row.help,
        ])  # fmt: skip
    return ["setting", "value", "default", "unit", "differs for", "what it does"], body


def _plain(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
