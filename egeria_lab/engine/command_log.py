"""Which commands landed at which step: with seed and arguments, all that it takes to do a run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from egeria_lab import commands as c
from egeria_lab.engine.budget import Budget
from egeria_lab.errors import CheckpointError


class CommandLog:
    """What was asked of a session so far, on the way to where it stands: what was undone is not there.

    Example:
        >>> log = CommandLog()
        >>> log.landed(c.FreezeLayer(layer="a"), step=3)
        >>> log.at(3)
        [FreezeLayer(by='user', layer='a')]
    """

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._plan: tuple[int, bool] | None = None

    def landed(self, command: c.Command, step: int) -> None:
        """Note a command that landed behind so many finished steps."""
        self._entries.append({"step": step, "command": type(command).__name__, "fields": asdict(command)})

    def note_plan(self, budget: Budget, step: int) -> None:
        """Note the length of the plan when it is another one than before: run() and start() can change it."""
        plan = (budget.total_steps, budget.decided)
        if plan != self._plan:
            self._plan = plan
            self._entries.append({"step": step, "plan": list(plan)})

    def note_change(self, what: str, step: int) -> None:
        """Note that training went on from a checkpoint with other arguments: such a run cannot be done again."""
        self._entries.append({"step": step, "changed": what})

    @property
    def changed(self) -> str | None:
        """What was changed by loading, or None."""
        return next((str(entry["changed"]) for entry in self._entries if "changed" in entry), None)

    def at(self, step: int) -> list[c.Command | Budget]:
        """What landed behind so many finished steps, in order: commands, and plans."""
        found: list[c.Command | Budget] = []
        for entry in self._entries:
            if entry["step"] != step or "changed" in entry:
                continue
            if "plan" in entry:
                total, decided = entry["plan"]
                found.append(Budget(1, total, decided))
            else:
                found.append(_command(entry))
        return found

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {"entries": list(self._entries), "plan": None if self._plan is None else list(self._plan)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._entries = list(state["entries"])
        self._plan = None if state["plan"] is None else (state["plan"][0], state["plan"][1])

    def __len__(self) -> int:
        return len(self._entries)


def _command(entry: Mapping[str, Any]) -> c.Command:
    kinds = {kind.__name__: kind for kind in c.Command.__subclasses__()}
    if entry["command"] not in kinds:
        raise CheckpointError(f"there is no command {entry['command']!r} in this version of egeria_lab.")
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in entry["fields"].items()}
    return kinds[entry["command"]](**fields)  # type: ignore[arg-type]  # the fields of each kind are its own
