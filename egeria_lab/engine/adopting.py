"""What was asked for anew when a session takes over a saved state: it holds, and what cannot go on is said.

A fork or a load may be made with other arguments than the state comes from. Where the state would put the old value
back, what was asked for wins; where the two do not fit, the part begins anew at the place where training stands.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from egeria_lab.algorithms.sieving.membership import DISCARDED_KEPT
from egeria_lab.algorithms.sieving.settings import ManualSieve
from egeria_lab.algorithms.sparse.mask_set import mask_settings
from egeria_lab.algorithms.sparse.masked_training import SparseTraining
from egeria_lab.config import derive_seed
from egeria_lab.engine.arguments import NOT_KEPT
from egeria_lab.engine.budget import STEP_LIMIT
from egeria_lab.engine.optimizer_set import kind_of
from egeria_lab.engine.optimizer_state import RATES, same_groups
from egeria_lab.engine.rules import ScheduleRule
from egeria_lab.errors import InvalidSettingError


class Adoption:
    """One taking over of a state by a session that was made with the arguments asked for.

    Args:
        session: the session, freshly made, or the one that the state comes from.
        tree: the state; its parts are changed to what holds here.
        asked: arguments that were asked for anew, by name.

    Attributes:
        notes: what is not as it was, in sentences.
        peak: the peak learning rate that holds, or None for that of the state.
    """

    def __init__(self, session: Any, tree: dict[str, Any], asked: Mapping[str, Any]) -> None:
        self.session = session
        self.asked = asked
        self.notes: list[str] = []
        self._states: dict[str, Any] = tree["parts"]
        self._groups = tree["optimizer"]["groups"]
        self._step = int(tree["step"])
        self._other_optimizer = tree["optimizer"]["kind"] != kind_of(session.optimizer)
        self._fresh_rates = [{k: g[k] for k in RATES if k in g} for g in session.optimizer.param_groups]
        self.peak = self._wanted_peak()
        self._sieve_then = _kind_of_sieve(self._states)
        self._sieve_now = None if session.sieve.settings is None else type(session.sieve.settings).__name__
        self._wanted_sieve = session.sieve.settings
        self._old_sieve = self._states.get("sieve")
        self._new_masks = False
        self._turned = False

    @property
    def other_sieve(self) -> bool:
        """True when the sieve is of another kind than that of the state."""
        return self._sieve_then != self._sieve_now

    @property
    def keeps_options(self) -> bool:
        """True when the optimizer's own options hold, not those of the state."""
        return "optimizer" in self.asked

    def prepare(self) -> None:
        """Take out of the state what was asked for otherwise, before anything is taken over."""
        settings = dict(self._states["settings"])
        if "freeze" in self.asked:
            settings["freeze"] = None
            self._forget_layers_own(settings)
        if "sieve" in self.asked or self.other_sieve:
            settings["sieve"] = [None, None]
        if self.peak is not None and "lr" in self.asked:
            settings["start"] = [settings["start"][0], self.peak]
        self._states["settings"] = settings
        if self.other_sieve:
            self._states.pop("sieve", None)
        if "epochs" in self.asked:
            self._plan()
        rule = self.session.rule
        if "freeze" in self.asked and isinstance(rule, ScheduleRule) and "rule" in self._states:
            del self._states["rule"]
            self.notes.append("The freezing schedule is the one asked for: it begins anew, and what is frozen stays.")

    def skips(self, name: str) -> bool:
        """True for a part that is seen to here instead of going on from the state."""
        if name == "sieve":
            return self.other_sieve
        if name == "rule":
            return name not in self._states and isinstance(self.session.rule, ScheduleRule)
        return False

    # --- rates -------------------------------------------------------------------------------------------

    def take_schedule(self, state: Mapping[str, Any]) -> None:
        """Go on with the learning-rate schedule, also where its parameter groups are others now."""
        session, schedule = self.session, self.session.schedule
        kind = None if schedule.scheduler is None else type(schedule.scheduler).__name__
        groups = session.optimizer.param_groups
        if state["kind"] != kind:
            for group, rates in zip(groups, self._fresh_rates, strict=True):
                for key in RATES:
                    group.pop(key, None)
                group.update(rates)
            self.peak = self.peak if self.peak is not None else schedule.peak_rate
            self.notes.append("The schedule is of another kind than before: it begins anew.")
            return
        same = same_groups(self._groups, groups)
        own_rates = self.keeps_options and isinstance(schedule.scheduler, LambdaLR)
        if same and not own_rates:
            schedule.load_state_dict(state)
            return
        if not isinstance(schedule.scheduler, LambdaLR):
            if schedule.scheduler is not None:
                self.notes.append("The schedule had other parameter groups before: it begins anew.")
            return
        if own_rates:
            for group, rates in zip(groups, self._fresh_rates, strict=True):
                group.update(rates)
        schedule.scheduler.last_epoch = int(state["scheduler"]["last_epoch"])
        schedule.scheduler._step_count = int(state["scheduler"]["_step_count"])
        schedule.scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]
        self._turned = True
        if same:
            return
        done = f"from {schedule.scheduler.last_epoch:,} {schedule.every}s on"
        if any("layer" in group for group in groups):
            self.notes.append(f"Each layer has a learning-rate schedule of its own now, which is followed {done}.")
        elif any("layer" in group["options"] for group in self._groups):
            self.notes.append(f"All layers follow one learning-rate schedule now, {done}.")

    def _follow(self) -> None:
        """Rates as the schedule has them at this place: under a new one the next step is made with its rate."""
        scheduler, rule = self.session.schedule.scheduler, self.session.rule
        own = "freeze" in self.asked and isinstance(rule, ScheduleRule) and rule.own_rates
        turned = self._turned or own or not self.asked.keys().isdisjoint(("scheduler", "epochs"))
        if not turned or not isinstance(scheduler, LambdaLR):
            return
        groups = self.session.optimizer.param_groups
        for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * factor(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in groups]

    def _wanted_peak(self) -> float | None:
        if self.asked.get("lr") is not None:
            return float(self.asked["lr"])
        by_name = isinstance(self.session._arguments.get("optimizer"), str)
        own_rate = self._other_optimizer or "optimizer" in self.asked or ("lr" in self.asked and by_name)
        return float(self.session.schedule.peak_rate) if own_rate else None

    def _keep_peak(self) -> None:
        """Where the schedule stands is taken over, and its height is that which was asked for."""
        session, peak = self.session, self.peak
        if peak is None:
            return
        saved = session.schedule.peak_rate
        if saved > 0 and peak != saved:
            session.schedule.scale(peak / saved)
        session.settings_book.learning_rate = peak

    # --- plan and settings -------------------------------------------------------------------------------

    def _plan(self) -> None:
        budget = self.session.budget
        if budget.total_steps < self._step and not os.environ.get(STEP_LIMIT):
            raise InvalidSettingError(
                f"epochs={self.asked['epochs']!r} plans {budget.total_steps:,} steps, and {self._step:,} are made "
                "already; give at least as many epochs as are made, or leave epochs= out."
            )
        self._states["budget"] = {
            **self._states["budget"], "total_steps": budget.total_steps, "decided": budget.decided,
        }  # fmt: skip

    def _forget_layers_own(self, settings: dict[str, Any]) -> None:
        """Settings that were given for single layers end with the rule's settings that they were exceptions of."""
        if not settings["per_layer"]:
            return
        names = ", ".join(f"{name} of {layer}" for name, layer, _ in settings["per_layer"])
        self.notes.append(f"freeze= was given anew, so settings of single layers no longer hold: {names}.")
        settings["per_layer"] = []
        policy = self._states.get("rule", {}).get("policy") if isinstance(self._states.get("rule"), dict) else None
        if policy is not None:
            policy["tolerances"] = {}

    # --- masks -------------------------------------------------------------------------------------------

    def take_masks(self, state: Mapping[str, Any] | None) -> None:
        """Go on with the saved masks where they are those of the settings here, or make masks anew."""
        sparse = self.session.sparse
        then = None if state is None else state["masks"].get("settings")
        known = then == mask_settings(sparse.settings) if then is not None else "sparsity" not in self.asked
        if state is not None and known:
            sparse.load_state_dict(state)
            self._bring_to_target()
            return
        frozen = self.session._steering.freezer.frozen
        if frozen:
            raise InvalidSettingError(
                f"sparsity= asks for other masks than there were, and they cannot be made while layers are frozen "
                f"({', '.join(frozen)}): thaw them first, or leave sparsity= as it was."
            )
        trainer, settings = self.session.trainer, sparse.settings
        seed = derive_seed(self.session.seed, "masks") % 2**63
        sparse.masks = SparseTraining(trainer.model, settings, optimizer=trainer.optimizer, seed=seed)
        sparse.version += 1
        self._new_masks = True
        if state is not None:
            sparse.seconds, sparse.updates = float(state["seconds"]), int(state["updates"])
            sparse._density_steps, sparse._steps = float(state["_density_steps"]), int(state["_steps"])
        why = "There were no masks" if state is None else "The masks were made by other settings"
        self.notes.append(
            f"{why}: they are made anew by those of {type(settings).__name__} (init={settings.init!r}), and what lies "
            "under them is zero now."
        )

    def _bring_to_target(self) -> None:
        """A method without a soft memory bound does not train over its budget."""
        sparse = self.session.sparse
        if "sparsity" not in self.asked or getattr(sparse.settings, "soft_bound", False):
            return
        names = [name for name in sparse.masks.masks if name not in sparse.masks.locked]
        update = sparse.masks.prune_to_target(names)
        if update.dropped:
            self._new_masks = True
            sparse.version += 1
            self.notes.append(f"{update.dropped:,} weights beyond the target of the masks were dropped.")

    # --- samples -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """See to what needs everything else to be in its place."""
        session = self.session
        if self.other_sieve:
            self._begin_sieve()
        elif "sieve" in self.asked and self._wanted_sieve is not None:
            session.sieve.change(self._wanted_sieve)
        if self._new_masks:
            session.sparse.record(session.steps_done, session.history)
        self._keep_peak()
        self._follow()

    def _begin_sieve(self) -> None:
        """The new sieve holds from the next pass on; the pass under way is finished as it was planned."""
        session, sieve, passes = self.session, self.session.sieve, self.session._passes
        step, epoch = session.steps_done, float(passes.number)
        if sieve._made is not None and sieve._made.first_update is not None:
            sieve._write(sieve._made.first_update, step, epoch, "session")
        old = None if self._old_sieve is None else self._old_sieve["sieve"]
        by_hand = [] if old is None else (old["members"]["status"] >= DISCARDED_KEPT).nonzero().flatten().tolist()
        if by_hand:
            sieve._write(sieve._sieve.discard(by_hand), step, epoch, "session")
        kept = None if sieve._made is None else sieve.kept_ids()
        session._train_source.keep(kept, after=passes.number if passes.position else passes.number - 1)
        session.budget.steps_per_epoch = session.steps_per_epoch
        passes.read_again()
        self.notes.append(
            f"The sieve was {self._sieve_then or 'none'} and is {self._sieve_now or 'none'}: it begins anew with the "
            f"next pass over the data{', and what was discarded by hand stays discarded' if by_hand else ''}"
            f"; the plan is {session.budget.total_steps:,} steps."
        )


def note_changes(session: Any, names: Iterable[str]) -> None:
    """Write down that a run went on with other arguments, so that it cannot be done again from its record."""
    for name in names:
        if name not in (*NOT_KEPT, "device"):
            session.command_log.note_change(name, session.steps_done)


def _kind_of_sieve(states: Mapping[str, Any]) -> str | None:
    state = states.get("sieve")
    kind = None if state is None or state["sieve"] is None else str(state["sieve"]["kind"])
    return None if kind == ManualSieve.__name__ else kind
