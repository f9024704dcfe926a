"""Undo and redo of commands: a ring of exact states in memory, of so many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from egeria_lab import commands as c
from egeria_lab.checkpoint.tree import storages
from egeria_lab.engine.session_state import SessionState, capture, restore
from egeria_lab.errors import InvalidSettingError, is_whole, require
from egeria_lab.events import CommandRedone, CommandUndone, Event
from egeria_lab.tables import amount

UNDO_BYTES = 1 << 28


class _Done(NamedTuple):
    """A command that landed, and the state right before it."""

    command: c.Command
    before: SessionState


class _Undone(NamedTuple):
    """A command that was undone, with the states right before it landed and right before it was undone."""

    command: c.Command
    before: SessionState
    after: SessionState


MOST_APART = 16
"""More commands than this at one step boundary are remembered, and undone, together with the last of them: a state for
each of hundreds would take longer than the next hundreds take to arrive."""


class UndoRing:
    """Remembers the state before each command that did something.

    An undo goes back to the step at which the command landed: steps made since are made again. Events and
    tables go back as well, and one event says so.

    Args:
        session: the session; its queue lands commands through `land`.
        max_bytes: most memory for states, >= 0; 0 keeps none.

    Raises:
        InvalidSettingError: for a negative size.

    Attributes:
        max_bytes: most memory for states.
    """

    def __init__(self, session: Any, max_bytes: int = UNDO_BYTES) -> None:
        valid = is_whole(max_bytes) and max_bytes >= 0
        require(valid, "Session", "undo_bytes", max_bytes, "a whole number of bytes >= 0")
        self._session = session
        self.max_bytes = max_bytes
        self._too_big = 0
        self._at_this_boundary = (-1, 0)
        self._done: list[_Done] = []
        self._undone: list[_Undone] = []
        session._steering.handle(c.Undo, self._undo)
        session._steering.handle(c.Redo, self._redo)

    def __repr__(self) -> str:
        what = [f"can undo {done.command}" for done in self._done[-1:]] or [f"nothing to undo: {self.why_nothing()}"]
        more = [f"{len(self._done) - 1} before it"] * (len(self._done) > 1)
        again = [f"can redo {undone.command}" for undone in self._undone[-1:]]
        memory = f"{amount(self.num_bytes, 'B')} of {amount(self.max_bytes, 'B')}"
        return f"UndoRing({'; '.join(what + more + again)}; {memory})"

    @property
    def num_bytes(self) -> int:
        """Memory of the states that are kept. Rows of history that the session still holds are not counted: they cost
        nothing, and a long run's would fill any ring."""
        states = [done.before for done in self._done] + [s for u in self._undone for s in (u.before, u.after)]
        left: dict[int, int] = {}
        for state in states:
            left.update(state.tables)
        for held in storages(self._session.history.state_dict()):
            left.pop(held, None)
        return sum(state.num_bytes for state in states) + sum(left.values())

    def commands(self) -> list[c.Command]:
        """What can be undone, oldest first."""
        return [done.command for done in list(self._done)]

    def undone(self) -> list[c.Command]:
        """What can be redone, the next one last."""
        return [undone.command for undone in list(self._undone)]

    def why_nothing(self) -> str:
        """Why no command can be undone, in one clause; empty when one can."""
        if self._done:
            return ""
        if self._too_big:
            return f"one state takes {self._too_big:,} bytes and undo_bytes={self.max_bytes:,} is all there is"
        if not self.max_bytes:
            return "undo_bytes=0 keeps no states"
        return "no command that did something is remembered"

    def forget_after(self, step: int) -> None:
        """Training was taken back to a step: states of later ones, and what was undone, are of a course left."""
        self._done = [done for done in self._done if done.before.step <= step]
        self._undone.clear()

    def land_all(self, receipts: Sequence[c.Receipt]) -> None:
        """Carry out what waited for a step boundary, in order, remembering the state before each."""
        for receipt in receipts:
            if isinstance(receipt.command, (c.Undo, c.Redo)):
                self._session._steering.land(receipt, self._session.steps_done)
                self._at_this_boundary = (-1, 0)
                continue
            before = self._state_before()
            if self._land(receipt) and before is not None:
                self._keep(_Done(receipt.command, before))

    def _state_before(self) -> SessionState | None:
        """The state now; None when it need not be remembered, or when the last one has to do for this command too."""
        step, count = self._at_this_boundary
        step, count = self._session.steps_done, count + 1 if step == self._session.steps_done else 1
        self._at_this_boundary = (step, count)
        enough = count > MOST_APART and bool(self._done)
        return capture(self._session) if self.max_bytes and not self._too_big and not enough else None

    def _land(self, receipt: c.Receipt) -> bool:
        session, command, step = self._session, receipt.command, self._session.steps_done
        session._steering.land(receipt, step)
        session.command_log.landed(command, step)
        if receipt.state == "done":
            self._undone.clear()
        return receipt.state == "done"

    def _keep(self, done: _Done) -> None:
        size = done.before.num_bytes
        if size > self.max_bytes:
            self._too_big = size  # no use in copying it again and again
            self._done.clear()
            return
        self._done.append(done)
        while self.num_bytes > self.max_bytes:
            del self._done[0]

    def _undo(self, command: c.Command, step: int) -> Event:
        if not self._done:
            raise InvalidSettingError(f"there is nothing to undo: {self.why_nothing()}.")
        after = capture(self._session)
        done = self._done.pop()
        self._put_back(done.before)
        self._undone.append(_Undone(done.command, done.before, after))
        return CommandUndone(step=done.before.step, by=command.by, command=str(done.command), undone_from=step)

    def _redo(self, command: c.Command, step: int) -> Event:
        if not self._undone:
            raise InvalidSettingError("there is nothing to redo: no command was undone, or another one came since.")
        undone = self._undone.pop()
        self._put_back(undone.after)
        self._done.append(_Done(undone.command, undone.before))
        return CommandRedone(step=undone.after.step, by=command.by, command=str(undone.command), redone_from=step)

    def _put_back(self, state: SessionState) -> None:
        restore(self._session, state)
        if self._session._autosave is not None:  # the newest checkpoint is of a course that is left
            self._session._autosave.save()
