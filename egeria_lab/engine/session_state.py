"""Everything of a session that decides its future, taken at a step boundary and put back there, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from egeria_lab.checkpoint.tree import Tree, copied, num_bytes, storages
from egeria_lab.engine.adopting import Adoption
from egeria_lab.engine.model_state import lay_out, load_model, model_state
from egeria_lab.engine.optimizer_set import kind_of
from egeria_lab.engine.optimizer_state import load_optimizer_state, optimizer_state
from egeria_lab.errors import CheckpointError, EgeriaLabError, InvalidSettingError


class Stateful(Protocol):
    """Whoever has something that a checkpoint must hold."""

    def state_dict(self) -> Mapping[str, Any]:
        """All of it: plain values and tensors."""

    def load_state_dict(self, state: Any) -> Any:
        """Go on from there. The tensors are its own from now on."""


@dataclass(frozen=True, slots=True, eq=False)
class SessionState:
    """A session at one step boundary.

    Attributes:
        step: finished steps.
        tree: everything, see `egeria_lab.checkpoint.tree`; nobody else holds its tensors.
        num_bytes: memory that it takes for itself.
        tables: what the rows of the history lie in, see `egeria_lab.checkpoint.tree.storages`. They are never written
            to again, and so they are shared: with the session as long as it goes on from here, with other states.
    """

    step: int
    tree: Tree
    num_bytes: int = field(init=False, default=0)
    tables: Mapping[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        tables = storages(self.tree["parts"].get("history"))
        object.__setattr__(self, "tables", tables)
        object.__setattr__(self, "num_bytes", num_bytes(self.tree) - sum(tables.values()))


def capture(session: Any) -> SessionState:
    """The state of a session as it stands; a plasticity reading that is under way is waited for.
    It waits for the step under way; from inside a step it may not be called, see `check_between_steps`.
    """
    with session._lock:
        tree = {
            "step": session.steps_done,
            "graphs": session._graphs,
            "pass_owed": session._pass_owed,
            "layers": session.layers.names,
            "data": _facts(session),
            "model": model_state(session.model),
            "optimizer": optimizer_state(session.model, session.optimizer),
            "rule": None if session.rule is None else type(session.rule).__name__,
            "parts": {name: part.state_dict() for name, part in parts_of(session).items()},
        }
        return SessionState(session.steps_done, copied(tree))


def restore(
    session: Any, state: SessionState, *, keep_events: bool = False, asked: Mapping[str, Any] | None = None
) -> list[str]:
    """Put a session, this one or another of the same making, where it was.

    Args:
        session: the session; no step may be under way.
        state: from `capture`; it is left as it is and can be put back again.
        keep_events: leave the log of events alone.
        asked: arguments that the session was made with and that hold instead of what the state has, by name.

    Returns:
        What is not as it was, in sentences.

    Raises:
        CheckpointError: when the state is that of another model or other data.
    """
    with session._lock:
        try:
            return _restore(session, copied(state.tree), keep_events, asked or {})
        except EgeriaLabError as error:
            raise error if isinstance(error, CheckpointError) else CheckpointError(str(error)) from error
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"the state does not fit this session ({type(error).__name__}: {error}).") from error


def check_between_steps(session: Any, what: str) -> None:
    """Raise when a step is under way on this thread: a subscriber may not save half a step.

    Raises:
        InvalidSettingError: when it is.
    """
    with session._lock:
        if session._busy:
            raise InvalidSettingError(
                f"{what} works between two steps, not from inside one (from a subscriber, say): call it from outside, "
                "from any thread; run_dir= saves by itself."
            )


def parts_of(session: Any) -> dict[str, Stateful]:
    """Everybody in a session who has state, by name, in the order in which it is put back.

    What is frozen comes first, then weights and optimizer (see `_restore`), settings, masks, what is kept of the
    data, then the place in it. A session may have more than those here: ``session.parts`` (name → part).
    """
    known: dict[str, Stateful | None] = {
        "freezer": session._steering.freezer,
        "settings": session.settings_book,
        **getattr(session, "parts", {}),
        "masks": session.sparse,
        "settler": session._steering.settler,
        "sieve": session.sieve,
        "budget": session.budget,
        "source": session._train_source,
        "passes": session._passes,
        "trainer": session.trainer,
        "schedule": session.schedule,
        "board": session.layers,
        "recorder": session.recorder,
        "cache": session.cache,
        "history": session.history,
        "events": session.events,
        "rule": session.rule,
        "commands": session.command_log,
        "bad_loss": session.bad_loss if session.bad_loss.policy == "roll_back" else None,
    }
    return {name: part for name, part in known.items() if part is not None}


def check_fits(session: Any, tree: Mapping[str, Any]) -> None:
    """Raise unless a state is one of this session's model and data.

    Raises:
        CheckpointError: with the first thing that differs.
    """
    now = {name: tuple(tensor.shape) for name, tensor in session.model.named_parameters()}
    then = {name: tuple(tensor.shape) for name, tensor in tree["model"]["parameters"].items()}
    for name in [*then, *now]:
        if now.get(name) != then.get(name):
            raise CheckpointError(
                f"the checkpoint is of another model: {name} is {_shape(then.get(name))} there and "
                f"{_shape(now.get(name))} here. Give a model built as it was."
            )
    if list(tree["layers"]) != session.layers.names:
        raise CheckpointError(
            f"the checkpoint was cut into the layers {', '.join(tree['layers'])}, and this model is cut into "
            f"{', '.join(session.layers.names)}; give layers=[…] as they were."
        )
    for name, value in _facts(session).items():
        if tree["data"][name] != value:
            words = name.replace("_", " ")
            raise CheckpointError(
                f"the checkpoint was trained on data with {tree['data'][name]} {words}, and this has {value}: the "
                "place in the data would mean nothing. Give the same data and batch_size."
            )


def _restore(session: Any, tree: dict[str, Any], keep_events: bool, asked: Mapping[str, Any]) -> list[str]:
    check_fits(session, tree)
    adoption = Adoption(session, tree, asked)
    notes, states = adoption.notes, tree["parts"]
    parts = parts_of(session)
    for name in ("events",) if keep_events else ():
        parts.pop(name)
        states.pop(name, None)
    if tree["rule"] != (None if session.rule is None else type(session.rule).__name__):
        notes.append("The freezing rule is another one than before: it begins anew.")
        parts.pop("rule", None)
        states.pop("rule", None)
    adoption.prepare()
    lay_out(session.model, tree["model"])  # optimizer state, also of what is frozen, lies in memory as its weights do
    if tree["optimizer"]["kind"] != kind_of(session.optimizer):
        for parked in states["freezer"]["parked"]:
            parked["state"] = {}
    for name, part in parts.items():
        if adoption.skips(name):
            continue
        if name == "masks":
            adoption.take_masks(states.get(name))
        elif name == "schedule":
            adoption.take_schedule(states[name])
        elif name not in states:
            notes.append(f"The checkpoint holds nothing of {name}: it begins anew.")
        elif part.load_state_dict(states[name]) is False:
            notes.append(f"The {name} is of another kind than before: it begins anew.")
        elif name == "passes":
            notes += session._train_source.place_notes(session._passes.number, session._passes.position)
        elif name == "cache" and states[name].get("rows"):
            notes.append(
                f"The activation cache's {states[name]['rows']:,} rows are in no checkpoint: they are computed again."
            )
        if name == "freezer":  # what is frozen decides who is in the optimizer
            load_model(session.model, tree["model"])
            notes += load_optimizer_state(
                session.model, session.optimizer, tree["optimizer"], own_options=adoption.keeps_options
            )
        elif name == "settings":
            _hand_out_settings(session)
    for name in [name for name in states if name not in parts]:
        what = "There are no masks here: every weight trains from now on." if name == "masks" else None
        notes.append(what or f"There is no {name} here: what it had saved is left out.")
    session._steps_done, session._graphs = tree["step"], tree["graphs"]
    session._pass_owed = bool(tree.get("pass_owed", False))
    adoption.finish()
    return notes


def _hand_out_settings(session: Any) -> None:
    """Rule and sieve go by the settings in the book."""
    sieve = session.settings_book.sieve
    if sieve is not None and sieve != session.sieve.settings:
        session.sieve.change(sieve)
    if session.policy is not None and session.settings_book.freeze is not None:
        session.policy.settings = session.settings_book.freeze


def _facts(session: Any) -> dict[str, Any]:
    facts: dict[str, Any] = session._train_source.facts()
    return facts


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else f"of shape {shape}"
