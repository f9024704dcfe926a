"""Put the parts of a session together that need several others: cache, schedule, steering, sparse training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from egeria_lab import commands as c
from egeria_lab.algorithms.freezing import Freezer
from egeria_lab.algorithms.sparse.settings import SparsitySettings
from egeria_lab.data.activation_cache import ActivationCache
from egeria_lab.distributed.group import Group, wanted
from egeria_lab.engine.front_cache import FrontCache
from egeria_lab.engine.ranks import Ranks
from egeria_lab.engine.rules import ScheduleRule
from egeria_lab.engine.schedules import Schedule, split_by_layer
from egeria_lab.engine.settler import Settler
from egeria_lab.engine.sparsifying import Sparsifier
from egeria_lab.engine.steering import Steering
from egeria_lab.events import Event, Notice, SettingChanged


def make_cache(session: Any, settings: ActivationCache | None) -> FrontCache | None:
    """The cache of the frozen front, which then makes every forward pass of the training; None when there is none."""
    if settings is None:
        return None
    source = session._train_source
    views = source.augment.views if source.augment is not None else 1
    cache = FrontCache(
        settings, session.trainer, session.layer_modules, session.layers, source, views, session.events,
        lambda: session.steps_done,
    )  # fmt: skip
    session.trainer.forward_pass = cache.run
    session._passes.on_begin = cache.announce
    return cache


def make_ranks(session: Any, distributed: bool | str) -> Ranks | None:
    """The ties to the other ranks, when this process is one of several that train the model; else None."""
    return Ranks(session, Group(session.device.type)) if wanted(distributed) else None


def make_schedule(session: Any, scheduler: Any, every: str) -> Schedule:
    """The learning-rate schedule; under a freezing schedule with own rates each layer gets one of its own."""
    rule = session.rule
    if isinstance(rule, ScheduleRule) and rule.own_rates:
        split_by_layer(session.optimizer, session.layer_modules)
        return Schedule(scheduler, session.optimizer, session.budget, every, rule.policy.rate_factor)
    return Schedule(scheduler, session.optimizer, session.budget, every)


def make_sparse(session: Any, settings: SparsitySettings | None) -> Sparsifier | None:
    """Sparse training, with its first masks made; None for dense training."""
    if settings is None:
        return None
    sparse = Sparsifier(settings, session.trainer, session.layer_modules, session.budget, session.seed)
    sparse.record(0, session.history)
    return sparse


def make_steering(session: Any, park_state: str) -> Steering:
    """Who lands commands and decisions, with everybody told who has to know."""
    parts = {layer.name: (layer.modules, layer.parameters) for layer in session.layer_modules}
    freezer = Freezer(session.model, parts, session.optimizer, park_state=park_state)
    steering = Steering(
        session.layers, freezer, session.policy, session.settings_book, session.schedule, session.events, session.rule
    )
    if session.policy is not None and session.policy.settings.settle_epochs:
        settler = Settler(session.layer_modules, lambda: float(session.epoch))
        session.trainer.settler = steering.settler = settler
        session.recorder.rate_factor = settler.factor
        if session.cache is not None:
            session.cache.moves_soon = lambda: settler.is_busy
        _tell_if_too_long(session, session.policy.settings.settle_epochs)
    if session.policy is not None:
        _tell_if_the_rate_stays(session, session.policy.settings.bootstrap_rate)
    session.sieve.plan_with(session.budget, session._passes, lambda: int(session.steps_done))
    steering.handle(c.Extend, _extending(session))
    steering.owners["sieve"] = session.sieve.change
    steering.handle(c.Discard, _on_samples(session, session.sieve.discard))
    steering.handle(c.Restore, _on_samples(session, session.sieve.restore))
    if session.sparse is not None:
        sparse, history, events = session.sparse, session.history, session.events
        steering.on_freezing.append(lambda layer, step: sparse.freezing(layer, step, history, events))
        steering.on_thawed.append(sparse.thawed)
    if session.cache is not None:
        cache = session.cache
        steering.on_thawed.append(lambda layer: cache.invalidate(f"{layer} was thawed"))
    return steering


def _tell_if_too_long(session: Any, settle_epochs: float) -> None:
    planned = session.budget.total_steps / session.budget.steps_per_epoch
    if settle_epochs >= planned:
        message = (
            f"Plasticity(settle_epochs={settle_epochs:g}) is as long as the whole plan of {planned:g} epochs: layers "
            "would be trained less and less and none would freeze. A tenth of the plan is a good length."
        )
        session.events.append(Notice(step=0, message=message))


def _tell_if_the_rate_stays(session: Any, bootstrap_rate: float | None) -> None:
    if bootstrap_rate is not None and bootstrap_rate < 1 and session._arguments.get("scheduler") == "constant":
        message = (
            f"Plasticity(bootstrap_rate={bootstrap_rate:g}) waits for the learning rate to fall, and "
            "scheduler='constant' never lets it: nothing will be frozen by the rule. Give another scheduler, or "
            "bootstrap_rate=None."
        )
        session.events.append(Notice(step=0, message=message))


def _on_samples(session: Any, change: Callable[..., Event]) -> Callable[[Any, int], Event]:
    """Land a change of the samples by hand; when nothing of the pass is left, the pass is over."""
    passes = session._passes

    def land(command: Any, step: int) -> Event:
        event = change(command, step, passes.number, passes.position)
        session.budget.steps_per_epoch = session.steps_per_epoch
        passes.read_again()
        if passes.skip_rest():
            session.finish_pass()
        return event

    return land


def _extending(session: Any) -> Callable[[Any, int], Event]:
    def land(command: c.Extend, step: int) -> Event:
        old = session.budget.total_steps
        session.budget.extend(command.epochs)
        new = session.budget.total_steps
        return SettingChanged(step=step, by=command.by, name="planned_steps", old=old, new=new)

    return land
