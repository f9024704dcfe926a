"""Sparse training of one session: masks held through every update, changed when due, locked while a layer is frozen."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from egeria_lab.algorithms.cost_model import effective_densities, training_flops
from egeria_lab.algorithms.costs import StepFlops
from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.algorithms.ledger import SparsityFigures
from egeria_lab.algorithms.planned_costs import PlannedCost
from egeria_lab.algorithms.schedule_solver import DENSITY_CELLS
from egeria_lab.algorithms.sparse.masked_training import SparseTraining
from egeria_lab.algorithms.sparse.masked_weight import MaskUpdate
from egeria_lab.algorithms.sparse.methods import MEST
from egeria_lab.algorithms.sparse.settings import DynamicSparsity, SparsitySettings
from egeria_lab.config import derive_seed
from egeria_lab.engine.budget import Budget
from egeria_lab.engine.trainer import Trainer
from egeria_lab.events import EventLog, MaskUpdated, Notice
from egeria_lab.history import History


@dataclass(frozen=True, slots=True)
class _Figures:
    densities: dict[str, float]
    density: float
    target_density: float


class Sparsifier:
    """Binds masks to a session's training.

    Args:
        settings: the sparsity method.
        trainer: its model and optimizer; every update passes through here from now on.
        layers: the layer modules.
        budget: tells the progress.
        seed: the session's seed.

    Raises:
        InvalidSettingError, LayerError, UnknownNameError: when the settings do not fit the model.
    """

    def __init__(
        self, settings: SparsitySettings, trainer: Trainer, layers: LayerModules, budget: Budget, seed: int
    ) -> None:
        self.settings = settings
        self.layers = layers
        self.budget = budget
        self.masks = SparseTraining(
            trainer.model, settings, optimizer=trainer.optimizer, seed=derive_seed(seed, "masks") % 2**63
        )
        self._masked_names = _masked_names(layers, trainer.model, self.masks.densities())
        self.seconds = 0.0
        self.updates = 0
        self.version = 0
        self._due = False
        self._number = 1
        self._dense_gradients = False
        self._planned_for: tuple[int, float] | None = None
        self._updates_ahead: tuple[int, ...] = ()
        self._last: _Figures | None = None
        self._density_steps = 0.0
        self._steps = 0
        trainer.update_hooks = self

    def __repr__(self) -> str:
        now = self._now()
        return (
            f"{_spoken(self.settings)}: {now.density:.1%} of the maskable weights live "
            f"(aim {now.target_density:.1%}), masks updated {self.updates} times"
        )

    @property
    def densities(self) -> dict[str, float]:
        """Share of live weights by parameter name; dense parameters are left out. The last ones after `close`."""
        return self.masks.densities() if self._last is None else dict(self._last.densities)

    def costs(self) -> dict[str, Any]:
        """What the cost model must know: densities, those asked for where more is allowed, and dense gradients."""
        densities, locked = self.densities, self.masks.locked
        unfrozen = None
        if self._is_soft and locked:  # they were pruned when they froze; without that they would follow the phases
            planned = self.masks.densities_at(self._planned_sparsity(self._number))
            unfrozen = {**densities, **{name: max(densities[name], planned[name]) for name in locked}}
        return {
            "densities": densities,
            "unfrozen": unfrozen,
            "targets": self.masks.target_densities() if self._is_soft else None,
            "dense_gradients": self._dense_gradients,
        }

    def density_at(self, step: StepFlops) -> PlannedCost:
        """What a step will cost at a progress in [0, 1] as the method plans it: what the ledger will count."""
        known: dict[float, dict[str, float]] = {}
        total = self.budget.total_steps

        def number(progress: float) -> int:
            return max(1, math.ceil(progress * total - 1e-9))

        def densities(progress: float) -> dict[str, float]:
            sparsity = self._planned_sparsity(number(progress))
            if sparsity not in known:
                known[sparsity] = self.masks.densities_at(sparsity)
            return known[sparsity]

        updates = self._planned_updates()
        rare = set(updates) if total <= DENSITY_CELLS else None  # in a longer run not each step is looked at

        def dense_gradients(progress: float) -> float:
            if rare is not None:
                return float(number(progress) in rare)
            return len(updates) / updates[-1] if updates and number(progress) <= updates[-1] else 0.0

        return PlannedCost(
            step, densities, targets=self.masks.target_densities() if self._is_soft else None,
            dense_gradients_at=dense_gradients if self.settings.grows_by == "gradient" else None,
        )  # fmt: skip

    @property
    def _is_soft(self) -> bool:
        return isinstance(self.settings, MEST) and self.settings.soft_bound

    def _planned_updates(self) -> tuple[int, ...]:
        if not isinstance(self.settings, DynamicSparsity):
            return ()
        key = (self.budget.total_steps, self.budget.steps_per_epoch)
        if key != self._planned_for:
            self._planned_for, self._updates_ahead = key, self.settings.update_steps(*key)
        return self._updates_ahead

    def _planned_sparsity(self, number: int) -> float:
        """The sparsity that the updates up to a step leave, with nothing frozen."""
        updates = self._planned_updates()
        position = bisect_right(updates, number)
        return self.settings.sparsity_at(updates[position - 1] / self.budget.total_steps if position else 0.0)

    def begin_step(self, number: int) -> None:
        """Say which step comes: one after which masks are updated keeps what the update needs."""
        self._number = number
        self._due = self.masks.due(number, self.budget.total_steps, self.budget.steps_per_epoch)

    def after_backward(self) -> None:
        """Collect importance, then zero gradients under masks."""
        start = time.perf_counter()
        self.masks.after_backward(update_due=self._due)
        self.seconds += time.perf_counter() - start

    def after_step(self) -> None:
        """Zero weights and optimizer state under masks."""
        start = time.perf_counter()
        self.masks.after_step()
        self.seconds += time.perf_counter() - start

    def finish_step(self, step: int, history: History, events: EventLog) -> None:
        """Update masks when it is time, and write down what changed."""
        self._steps += 1
        self._density_steps += self.masks.live / self.masks.total
        self._dense_gradients = self._due and self.settings.grows_by == "gradient"
        if step == 1 and isinstance(self.settings, DynamicSparsity):
            still = self.settings.standstill(self.budget.total_steps, self.budget.steps_per_epoch)
            if still:
                events.append(Notice(step=step, message=still))
        if self._planned_sparsity(step) != self._planned_sparsity(step - 1):
            self.version += 1  # also where no layer is left that is pruned: those frozen would be
        if not self._due:
            return
        start = time.perf_counter()
        update = self.masks.update(step / self.budget.total_steps)
        self.seconds += time.perf_counter() - start
        self._due = False
        self._write(update, step, history, events)

    def freezing(self, layer: str, step: int, history: History, events: EventLog) -> None:
        """A layer is about to freeze: bring it down to its target, then fix its mask."""
        weights = self._parameters(layer)
        if self._is_soft:
            update = self.masks.prune_to_target(weights)
            if update.dropped:
                self._write(update, step, history, events)
        self.masks.lock(weights)

    def thawed(self, layer: str) -> None:
        """A layer trains again: its mask may change again, unless it is shared with one that stays frozen."""
        self.masks.unlock([p for p in self._parameters(layer) if p.requires_grad])

    def figures(self, step: StepFlops) -> SparsityFigures:
        """For the ledger."""
        now = self._now()
        whole, unmasked = training_flops(step), training_flops(step, densities=dict.fromkeys(now.densities, 0.0))
        return SparsityFigures(
            method=_spoken(self.settings), density=now.density, target_density=now.target_density,
            mean_density=self._density_steps / self._steps if self._steps else now.density,
            maskable_share=1 - unmasked / whole if whole else 0.0, updates=self.updates, seconds=self.seconds,
        )  # fmt: skip

    def layer_densities(self, step: StepFlops) -> dict[str, float]:
        """Density of each layer module, weighted by FLOPs."""
        return effective_densities(step, self._now().densities)

    def state_dict(self) -> dict[str, Any]:
        """Masks, importance so far, and the running figures."""
        own = ("seconds", "updates", "_density_steps", "_steps")
        return {"masks": self.masks.state_dict(), **{name: getattr(self, name) for name in own}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly from a saved state."""
        self.masks.load_state_dict(state["masks"])
        self.seconds, self.updates = float(state["seconds"]), int(state["updates"])
        self._density_steps, self._steps = float(state["_density_steps"]), int(state["_steps"])
        self.version += 1

    def close(self) -> None:
        """Leave the model as it is, with plain tensors; nothing is held any more, and figures stay readable."""
        self._last = self._now()
        self.masks.close()

    def _now(self) -> _Figures:
        """What the masks are, or were when this was closed."""
        if self._last is not None:
            return self._last
        live, densities = self.masks.live_counts(), self.densities
        sizes = {name: live[name] / density for name, density in densities.items()}
        wanted = sum(share * sizes[name] for name, share in self.masks.target_densities().items())
        total = self.masks.total
        return _Figures(densities, self.masks.live / total, wanted / total)

    def _parameters(self, layer: str) -> list[Any]:
        return next(module.parameters for module in self.layers if module.name == layer)

    def _write(self, update: MaskUpdate, step: int, history: History, events: EventLog) -> None:
        self.updates += 1
        self.version += 1
        events.append(
            MaskUpdated(
                step=step, by="rule", dropped=update.dropped, grown=update.grown, live=update.live,
                total=update.total, churn=update.churn, warning=update.warning,
            )
        )  # fmt: skip
        self.record(step, history, {change.name: change.churn for change in update.layers})

    def record(self, step: int, history: History, churn: Mapping[str, float] | None = None) -> None:
        """Write down the density of each layer module that has masked weights, and what was exchanged in it."""
        densities, live = self.densities, self.masks.live_counts()
        for index, names in self._masked_names.items():
            alive = sum(live[name] for name in names)
            total = sum(live[name] / densities[name] for name in names)
            exchanged = sum((churn or {}).get(name, 0.0) * live[name] for name in names)
            share = exchanged / alive if churn is not None else None
            history.sparsity.append(step=step, layer=index, density=alive / total, churn=share)


def _masked_names(layers: LayerModules, model: nn.Module, masked: Mapping[str, Any]) -> dict[int, list[str]]:
    """Position of each layer module → its masked weights; modules without any are left out."""
    names = {id(parameter): name for name, parameter in model.named_parameters() if name in masked}
    found = {i: [names[id(p)] for p in layer.parameters if id(p) in names] for i, layer in enumerate(layers)}
    return {index: mine for index, mine in found.items() if mine}


def _spoken(settings: SparsitySettings) -> str:
    if isinstance(settings, MEST):
        return "MEST, soft memory bound" if settings.soft_bound else "MEST"
    return {"StaticSparsity": "static masks"}.get(type(settings).__name__, type(settings).__name__)
