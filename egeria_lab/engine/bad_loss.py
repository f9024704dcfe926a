"""What becomes of a step whose loss is NaN or infinite: stop, pass the batch over, or go back with half the rate.

Whatever is chosen, the step itself is not applied (`Trainer.step` sees to that). Here it is decided what comes next,
so that a run that is resumed or replayed decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from egeria_lab import commands as c
from egeria_lab.config import LEARNING_RATE
from egeria_lab.engine.session_state import SessionState, capture, restore
from egeria_lab.errors import BadLossError, unknown_name
from egeria_lab.events import BatchSkipped, RolledBack

Made = TypeVar("Made")

POLICIES = ("stop", "skip", "roll_back")
MOST_SKIPPED = 10
"""Batches in a row that are passed over before training stops."""
MOST_ROLL_BACKS = 5
"""Times that one run goes back; the learning rate is then a 32nd of what it was."""
MOST_IDS_SHOWN = 5


class BadLossGuard:
    """Makes the steps of a session, whatever their loss.

    Except under ``"stop"``, which costs nothing, gradients are looked at too: a finite loss may have others.

    - ``"stop"``: the error is raised; the batch comes again.
    - ``"skip"``: the batch is passed over and the next one is trained on under the same step number: rule, schedule
      and tables see made steps only, so that the plan has as many of them as before. When `MOST_SKIPPED` in a row
      are bad the session is put back to where it was before the first of them, and the error is raised.
    - ``"roll_back"``: the session goes back to the newest state that it keeps, and on with half the learning rate, as
      if the user had set it there. Kept is the state before the first step, after commands, and at each checkpoint
      of the run directory, or without one after each pass; only with finite weights. After `MOST_ROLL_BACKS` times
      the error is raised. A run that is resumed from a checkpoint keeps that one first.

    Args:
        session: the session.
        policy: one of `POLICIES`.

    Raises:
        UnknownNameError: for another policy.

    Attributes:
        roll_backs: times that this run went back.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", on_bad_loss="skip", loss=lambda scores, _: scores.sum() / 0)
        >>> session.step()
        Traceback (most recent call last):
        egeria_lab.errors.BadLossError: the loss is nan at step 1 …
    """

    def __init__(self, session: Any, policy: str) -> None:
        if policy not in POLICIES:
            raise unknown_name("on_bad_loss", policy, POLICIES)
        self.policy = policy
        session.trainer.guards_gradients = policy != "stop"
        self.roll_backs = 0
        self._session = session
        self._kept: SessionState | None = None
        self._outdated = False

    def step(self, make: Callable[[], Made]) -> Made:
        """Let one step be made; when it cannot be, nothing is changed and its batch comes again.

        Args:
            make: tries the next batch, raises `BadLossError` when its loss is not finite, and changes nothing then.
        """
        if self.policy == "roll_back" and (self._kept is None or self._outdated):
            self.keep()
        before: SessionState | None = None
        skipped = 0
        try:
            while True:
                try:
                    return make()
                except BadLossError as error:
                    if self.policy == "stop":
                        raise
                    if self.policy == "roll_back":
                        self._roll_back(error)
                        continue
                    before = capture(self._session) if before is None else before
                    skipped += 1
                    if skipped == MOST_SKIPPED:
                        many = f"{MOST_SKIPPED} batches in a row had such a loss, where on_bad_loss='skip' stops."
                        raise _again(error, many) from error
                    self._skip(error)
        except BaseException:
            if before is not None:
                restore(self._session, before)
            self._session._passes.read_again()
            raise

    def after_step(self, pass_is_over: bool) -> None:
        """Keep the state of a pass's end where no run directory keeps any."""
        if self.policy == "roll_back" and pass_is_over and self._session._autosave is None:
            self.keep()

    def landed(self) -> None:
        """Commands have landed: going back may not lose them."""
        self._outdated = True

    def keep(self, state: SessionState | None = None) -> None:
        """Keep a state to go back to, of this step boundary; not one whose weights are no numbers any more."""
        if self.policy != "roll_back":
            return
        self._outdated = False
        parameters = list(self._session.model.parameters())
        if all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
            self._kept = capture(self._session) if state is None else state

    def state_dict(self) -> dict[str, Any]:
        """How often this run went back."""
        return {"roll_backs": self.roll_backs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; what was kept before is of another course."""
        self.roll_backs = int(state["roll_backs"])
        self._kept = None

    def _skip(self, error: BadLossError) -> None:
        session = self._session
        passes = session._passes
        session.events.append(
            BatchSkipped(
                step=session.steps_done, loss=str(error.value), learning_rate=session.schedule.learning_rate,
                in_pass=passes.number, position=passes.position, sample_ids=error.sample_ids[:MOST_IDS_SHOWN],
                samples=len(error.sample_ids),
            )
        )  # fmt: skip
        if passes.step_made():
            session.finish_pass()

    def _roll_back(self, error: BadLossError) -> None:
        session, kept = self._session, self._kept
        if kept is None:
            raise _again(
                error, "There is no state with finite weights that on_bad_loss='roll_back' could go back to."
            ) from error
        if self.roll_backs >= MOST_ROLL_BACKS:
            raise _again(error, f"The run went back {self.roll_backs} times already, which is the most.") from error
        count, step, commands = self.roll_backs + 1, session.steps_done, len(session.command_log)
        restore(session, kept)
        self.roll_backs = count
        session.undo_ring.forget_after(kept.step)
        old, lost = session.settings_book.learning_rate, commands - len(session.command_log)
        halved = c.Override(name=LEARNING_RATE, value=old / 2, by="session")
        session.undo_ring.land_all([c.Receipt(halved)])
        session.events.append(
            RolledBack(
                step=kept.step, loss=str(error.value), from_step=step, old_learning_rate=old,
                learning_rate=session.settings_book.learning_rate, count=count, commands_lost=lost,
            )
        )  # fmt: skip
        if session._autosave is not None:  # the newest checkpoint is of the course that was left
            session._autosave.save()
        self.keep()


def _again(error: BadLossError, more: str) -> BadLossError:
    """The same error with one more sentence."""
    return BadLossError(f"{error} {more}", error.value, error.sample_ids)
