"""Land commands and decisions: check, do, note the state, and leave exactly one event for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from egeria_lab import commands as c
from egeria_lab.algorithms.decision import Decision
from egeria_lab.algorithms.freeze_policy import PlasticityPolicy
from egeria_lab.algorithms.freezing import Freezer
from egeria_lab.config import LEARNING_RATE, Settings
from egeria_lab.engine.layer_board import LayerBoard
from egeria_lab.engine.rules import Rule
from egeria_lab.engine.schedules import Schedule
from egeria_lab.engine.settler import Settler
from egeria_lab.errors import EgeriaLabError, InvalidSettingError, unknown_name
from egeria_lab.events import (
    CommandRejected,
    Event,
    EventLog,
    FreezeBlocked,
    LayerFrozen,
    LayerPinned,
    LayerSettling,
    LayerThawed,
    LayerUnpinned,
    SettingChanged,
    SettlingEnded,
)


class Steering:
    """The only one who changes what is frozen, pinned or set.

    Args:
        board: the table of layer states.
        freezer: freezes and thaws.
        policy: the plasticity rule, whose settings may change, or None.
        settings: the settings that may change mid-run.
        schedule: the learning-rate schedule.
        events: where events go.
        rule: told about every change of the frozen set.

    Attributes:
        owners: prefix → who takes other settings, where it is not the freezing rule; may refuse them.
        settler: trains layers less and less, for a rule that wants it.
        on_freezing: told layer and step right before a layer freezes.
        on_thawed: told the layer right after it was thawed.
    """

    def __init__(
        self,
        board: LayerBoard,
        freezer: Freezer,
        policy: PlasticityPolicy | None,
        settings: Settings,
        schedule: Schedule,
        events: EventLog,
        rule: Rule | None,
    ) -> None:
        self.board = board
        self.freezer = freezer
        self.policy = policy
        self.settings = settings
        self.schedule = schedule
        self.events = events
        self.rule = rule
        self.owners: dict[str, Callable[[Any], None]] = {}
        self.settler: Settler | None = None
        self.on_freezing: list[Callable[[str, int], None]] = []
        self.on_thawed: list[Callable[[str], None]] = []
        self._handlers: dict[type[c.Command], Callable[[Any, int], Event]] = {
            c.FreezeLayer: self._freeze,
            c.ThawLayer: self._thaw,
            c.PinLayer: self._pin,
            c.UnpinLayer: self._unpin,
            c.Override: self._override,
            c.Reset: self._reset,
        }

    def handle(self, kind: type[c.Command], handler: Callable[[Any, int], Event]) -> None:
        """Add a kind of command that somebody else carries out."""
        self._handlers[kind] = handler

    def land(self, receipt: c.Receipt, step: int) -> None:
        """Carry out one command at a step boundary; what cannot be done is rejected with the reason."""
        command = receipt.command
        try:
            if type(command) not in self._handlers:
                raise unknown_name("command", type(command).__name__, [kind.__name__ for kind in self._handlers])
            event = self._handlers[type(command)](command, step)
        except Exception as error:  # whatever is wrong with one command may not stop training or lose the next
            reason = str(error) if isinstance(error, EgeriaLabError) else f"{type(error).__name__}: {error}"
            self.refuse(receipt, step, reason)
        else:
            self._answer(receipt, event)

    def refuse(self, receipt: c.Receipt, step: int, reason: str) -> None:
        """Reject a command, so that nobody waits for it for ever."""
        command = receipt.command
        self._answer(receipt, CommandRejected(step=step, by=command.by, command=str(command), reason=reason))

    def _answer(self, receipt: c.Receipt, event: Event) -> None:
        self.events.append(event)
        receipt.land(event)

    def carry_out(self, decisions: list[Decision], step: int) -> None:
        """Carry out what the rule decided."""
        for decision in decisions:
            if decision.action == "blocked":
                self.events.append(FreezeBlocked(step=step, by="rule", layer=decision.layer, reason=decision.reason))
            elif decision.action == "freeze":
                self._do_freeze(decision.layer, step, "rule", decision.reason)
                self.events.append(
                    LayerFrozen(
                        step=step, by="rule", layer=decision.layer, reason=decision.reason,
                        slope=decision.slope, tolerance=decision.tolerance,
                    )
                )  # fmt: skip
            elif decision.action in ("settle", "unsettle"):
                self._settle(decision, step)
            elif decision.action == "set":
                command = c.Override(name=decision.layer, value=decision.value, by="rule")
                self.events.append(self._override(command, step))
            else:
                self._do_thaw(decision.layer, step, "rule", decision.reason)
                self.events.append(LayerThawed(step=step, by="rule", layer=decision.layer, reason=decision.reason))
            if self.rule is not None:
                self.rule.carried_out(decision)

    def _settle(self, decision: Decision, step: int) -> None:
        if self.settler is None:  # whoever has none has refused a rule that settles
            raise InvalidSettingError("nothing here trains layers less and less: give Plasticity(settle_epochs=0).")
        if decision.action == "unsettle":
            self.settler.end(decision.layer)
            self.events.append(SettlingEnded(step=step, by="rule", layer=decision.layer, reason=decision.reason))
            return
        self.settler.begin(decision.layer, decision.value or 0.0)
        self.events.append(
            LayerSettling(
                step=step, by="rule", layer=decision.layer, epochs=decision.value or 0.0, reason=decision.reason,
                slope=decision.slope, tolerance=decision.tolerance,
            )
        )  # fmt: skip

    def close(self, step: int) -> None:
        """Thaw everything for good."""
        for layer in self.board.frozen:
            reason = "the session was closed"
            self._do_thaw(layer, step, "session", reason)
            self.events.append(LayerThawed(step=step, layer=layer, reason=reason))
        self.freezer.close()

    def _do_freeze(self, layer: str, step: int, by: str, reason: str) -> None:
        self.freezer.check(layer)
        for tell in self.on_freezing:
            tell(layer, step)
        self.freezer.freeze(layer)
        if self.settler is not None and self.policy is not None:  # by hand, it may still be on its way
            self.settler.end(layer)
            self.policy.settling.begun.pop(layer, None)
        row = self.board[layer]
        row.frozen = True
        row.set(step, reason, by)
        self._tell_rule(f"{layer} was frozen", thawed=False)

    def _do_thaw(self, layer: str, step: int, by: str, reason: str) -> None:
        self.freezer.thaw(layer)
        row = self.board[layer]
        row.frozen = False
        row.set(step, reason, by)
        self._tell_rule(f"{layer} was thawed", thawed=True)
        for tell in self.on_thawed:
            tell(layer)

    def _tell_rule(self, reason: str, *, thawed: bool) -> None:
        if self.rule is not None:
            self.rule.frozen_set_changed(reason, thawed=thawed)

    def _freeze(self, command: c.FreezeLayer, step: int) -> Event:
        row = self.board[command.layer]
        if row.frozen:
            return _nothing(command, step, f"{row.name} is frozen already, since step {row.since_step}")
        hole = self.board[self.board.prefix_length].name != row.name
        reason = "asked for"
        if hole:
            reason += "; trainable layers lie before it, so only weight gradients are saved"
        self._do_freeze(row.name, step, command.by, reason)
        return LayerFrozen(step=step, by=command.by, layer=row.name, reason=reason)

    def _thaw(self, command: c.ThawLayer, step: int) -> Event:
        row = self.board[command.layer]
        if not row.frozen:
            return _nothing(command, step, f"{row.name} is not frozen")
        self._do_thaw(row.name, step, command.by, "asked for")
        return LayerThawed(step=step, by=command.by, layer=row.name, reason="asked for")

    def _pin(self, command: c.PinLayer, step: int) -> Event:
        row = self.board[command.layer]
        if row.pinned:
            return _nothing(command, step, f"{row.name} is pinned already")
        row.pinned = True
        if not row.frozen:
            row.set(step, "pinned: no rule may freeze it", command.by)
        return LayerPinned(step=step, by=command.by, layer=row.name)

    def _unpin(self, command: c.UnpinLayer, step: int) -> Event:
        row = self.board[command.layer]
        if not row.pinned:
            return _nothing(command, step, f"{row.name} is not pinned")
        row.pinned = False
        if not row.frozen:
            row.set(step, "unpinned", command.by)
        return LayerUnpinned(step=step, by=command.by, layer=row.name)

    def _override(self, command: c.Override, step: int) -> Event:
        if command.layer is not None:
            _ = self.board[command.layer]
        old = self.settings.value(command.name, command.layer)
        has_own = command.layer is None or (command.name, command.layer) in self.settings.per_layer
        if has_own and old == command.value:
            where = f" for {command.layer}" if command.layer is not None else ""
            return _nothing(command, step, f"{command.name}{where} is {old} already")
        self._change(command.name, command.value, command.layer, old)
        new = self.settings.value(command.name, command.layer)
        return SettingChanged(step=step, by=command.by, name=command.name, old=old, new=new, layer=command.layer)

    def _reset(self, command: c.Reset, step: int) -> Event:
        old = self.settings.value(command.name, command.layer)
        if command.layer is not None:
            self.settings.check_scope(command.name, self.board[command.layer].name)
            if (command.name, command.layer) not in self.settings.per_layer:
                return _nothing(command, step, f"{command.name} for {command.layer} is the one for all layers already")
            self.settings.forget(command.name, command.layer)
            if self.policy is not None:
                self.policy.tolerances.pop(command.layer, None)
        else:
            if old == self.settings.default(command.name):
                return _nothing(command, step, f"{command.name} is {old} already, as at the start")
            self._change(command.name, self.settings.default(command.name), None, old)
        new = self.settings.value(command.name, command.layer)
        return SettingChanged(step=step, by=command.by, name=command.name, old=old, new=new, layer=command.layer)

    def _change(self, name: str, value: Any, layer: str | None, old: Any) -> None:
        owner = name.split(".", 1)[0]
        if owner in self.owners:  # may refuse, and then nothing is changed
            self.owners[owner](self.settings.replaced(name, value))
        self.settings.change(name, value, layer)
        self._apply_settings(name, layer, old)

    def _apply_settings(self, name: str, layer: str | None, old: Any) -> None:
        if name == LEARNING_RATE:
            self.schedule.scale(self.settings.learning_rate / float(old))
        elif name.startswith("freeze.") and self.policy is not None and layer is not None:
            self.policy.set_tolerance(layer, self.settings.per_layer[name, layer])
        elif name.startswith("freeze.") and self.policy is not None and self.settings.freeze is not None:
            self.policy.settings = self.settings.freeze


def _nothing(command: c.Command, step: int, why: str) -> CommandRejected:
    return CommandRejected(step=step, by=command.by, command=str(command), reason=f"{why}: nothing to do")
