"""Commands in a few plain words, and what undo and redo would do now: for the two buttons and their tooltips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Protocol

from egeria_lab.commands import Command, Extend, Override, Reset

NOTHING_TO_REDO = "no command was undone, or another one came since"


class Ring(Protocol):
    """What the buttons read of `session.undo_ring`."""

    def commands(self) -> Sequence[Command]: ...
    def undone(self) -> Sequence[Command]: ...
    def why_nothing(self) -> str: ...


def command_words(command: Command) -> str:
    """A command in a few words.

    Example:
        >>> from egeria_lab.commands import Discard, FreezeLayer
        >>> command_words(FreezeLayer(layer="layers.0")), command_words(Discard(ids=(1, 2, 3)))
        ('freeze layers.0', 'discard 3 samples')
        >>> command_words(Override(name="freeze.tolerance", value=0.35, layer="layers.1"))
        'set freeze.tolerance to 0.35 for layers.1'
    """
    if isinstance(command, Extend):
        return f"lengthen the plan by {command.epochs:g} epoch{'' if command.epochs == 1 else 's'}"
    if isinstance(command, (Override, Reset)):
        to = (
            f"set {command.name} to {_short(command.value)}"
            if isinstance(command, Override)
            else f"reset {command.name}"
        )
        return to + ("" if command.layer is None else f" for {command.layer}")
    values = {field.name: getattr(command, field.name) for field in fields(command)}
    verb = type(command).__name__.removesuffix("Layer").lower()
    if "ids" in values:
        number = len(values["ids"])
        return f"{verb} {number:,} samples" if number != 1 else f"{verb} sample {values['ids'][0]}"
    return f"{verb} {values.get('layer', '')}".strip()


def undo_state(ring: Ring) -> dict[str, str]:
    """What the next undo and redo would take back, or why there is nothing; four short texts, JSON-able.

    Args:
        ring: the session's memory of states.

    Returns:
        ``"undo"`` and ``"redo"``: the command in words, or empty; ``"why_no_undo"`` and ``"why_no_redo"``: the
        reason where it is empty.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", epochs=1)
        >>> _ = session.freeze("layers.0")
        >>> state = undo_state(session.undo_ring)
        >>> state["undo"], state["redo"], state["why_no_redo"]
        ('freeze layers.0', '', 'no command was undone, or another one came since')
    """
    done, undone = ring.commands(), ring.undone()
    return {
        "undo": command_words(done[-1]) if done else "",
        "redo": command_words(undone[-1]) if undone else "",
        "why_no_undo": "" if done else ring.why_nothing(),
        "why_no_redo": "" if undone else NOTHING_TO_REDO,
    }


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
