"""How many steps so many passes take under a sieve, found by going through the passes with the rule's own conditions.

A sieve acts at the end of a pass only, and looks at the share of training that is over: so the length of the plan
decides when passes get shorter, and that decides how many of them the plan holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from egeria_lab.algorithms.sieving.settings import LossSieve, ManualSieve, OneShotSieve, SieveSettings, is_due


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where training stands in its passes.

    Attributes:
        full: steps of a pass over all samples.
        short: steps of a pass over what the sieve keeps.
        length: steps of the pass under way.
        position: steps of it that were made.
        passes: finished passes.
        step: finished steps.
        fired: the one shot is over.
        passes_since, steps_since: since the last exchange of a circulating sieve.
    """

    full: int
    short: int
    length: int
    position: int = 0
    passes: int = 0
    step: int = 0
    fired: bool = False
    passes_since: int = 0
    steps_since: int = 0

    @property
    def next_end(self) -> int:
        """The step at which the pass under way ends."""
        return self.step + self.length - self.position


class _Pass(NamedTuple):
    number: int
    end: int
    length: int
    exchanged: bool  # right before it


def passes_made(settings: SieveSettings, standing: Standing, planned: int) -> float:
    """Passes that are made when a plan of so many steps ends.

    Example:
        >>> one_shot, start = OneShotSieve(at=0.1), Standing(full=12, short=3, length=12)
        >>> passes_made(one_shot, start, 15)
        2.0
    """
    last = list(_passes(settings, standing, planned))[-1]
    return last.number + 1 - (last.end - planned) / last.length


def first_exchange(settings: SieveSettings, standing: Standing, planned: int) -> int | None:
    """The step at which a plan of so many steps sees its next exchange, or None when it sees none.

    Example:
        >>> first_exchange(OneShotSieve(at=0.9), Standing(full=12, short=3, length=12), 24) is None
        True
    """
    before = standing.next_end
    for one in _passes(settings, standing, planned):
        if one.exchanged:
            return before
        before = one.end
    return None


def step_after(settings: SieveSettings, standing: Standing, planned: int, passes: float) -> int:
    """The step of a plan at which so many passes, counted from the start, are made; its end when it has fewer."""
    for one in _passes(settings, standing, planned):
        if passes <= one.number + 1:
            into = round((passes - one.number) * one.length)
            return min(planned, one.end - one.length + into)
    return planned


def steps_for(settings: SieveSettings, standing: Standing, passes: float) -> int:
    """The plan that makes so many passes, counted from the start; of the last one its share, in whole steps.

    With `LossSieve` there can be no such plan, as a later end makes the passes before it shorter: then the one that
    comes nearest, at most half of what it leaves out of a pass away.

    Example:
        >>> steps_for(OneShotSieve(at=0.1), Standing(full=12, short=3, length=12), 2)
        15
        >>> steps_for(OneShotSieve(at=0.9), Standing(full=12, short=3, length=12), 2)
        24
    """
    done, end = standing.passes + 1, standing.next_end
    if passes <= done:
        return standing.step + _steps_into(standing, passes)
    if isinstance(settings, LossSieve):
        return _nearest(settings, standing, passes, end + math.ceil((passes - done) * standing.full))
    if not isinstance(settings, OneShotSieve) or standing.fired:
        return end + round((passes - done) * standing.short)
    for number in range(done, math.ceil(passes)):
        planned = end + round((passes - number) * standing.short)
        if end < planned and end / planned >= settings.at:
            return planned
        end += standing.full
    return standing.next_end + round((passes - done) * standing.full)  # too late for the sieve


def why_idle(settings: SieveSettings, standing: Standing, planned: int) -> str | None:
    """One sentence when a plan of so many steps sees no exchange, otherwise None.

    Example:
        >>> why = why_idle(OneShotSieve(at=0.9), Standing(full=12, short=3, length=12), 24)
        >>> why.split("; ")[-1]
        'plan more epochs, or lower at.'
    """
    if isinstance(settings, ManualSieve) or first_exchange(settings, standing, planned) is not None:
        return None
    passes = f"{passes_made(settings, standing, planned):.4g}"
    rule, advice = _rule_in_words(settings)
    return (
        f"{type(settings).__name__} will exchange no sample in this plan: an exchange comes at the end of a pass that "
        f"is not the last, {rule}, and the plan has {planned:,} step{'s' * (planned != 1)} in {passes} "
        f"pass{'es' * (passes != '1')}; plan more epochs{advice}."
    )


def _rule_in_words(settings: SieveSettings) -> tuple[str, str]:
    assert not isinstance(settings, ManualSieve)
    if isinstance(settings, OneShotSieve):
        return f"at or after {settings.at:.1%} of training (at={settings.at:g})", ", or lower at"
    if isinstance(settings, LossSieve):
        rule = f"before {settings.full_after:.1%} of training (full_after={settings.full_after:g})"
        return rule, ""
    if settings.interval_epochs is not None:
        rule, advice = f"after interval_epochs={settings.interval_epochs:g} passes", ", or lower interval_epochs"
    elif settings.interval_steps is not None:
        rule, advice = f"after interval_steps={settings.interval_steps:,} steps", ", or lower interval_steps"
    else:
        rule, advice = "after 5/160 of training", ""
    if settings.stop_fraction < 1:
        rule += f" and before {settings.stop_fraction:.1%} of training (stop_fraction={settings.stop_fraction:g})"
    return rule, advice


def _steps_into(standing: Standing, passes: float) -> int:
    return round((passes - standing.passes) * standing.length - standing.position)


def _nearest(settings: LossSieve, standing: Standing, passes: float, high: int) -> int:
    low = standing.step
    while high - low > 1:  # a longer plan makes more passes
        middle = (low + high) // 2
        if passes_made(settings, standing, middle) >= passes - 1e-9:
            high = middle
        else:
            low = middle
    if low == standing.step:
        return high
    over, under = (abs(passes_made(settings, standing, planned) - passes) for planned in (high, low))
    return high if over <= under else low


def _passes(settings: SieveSettings, standing: Standing, planned: int) -> Iterator[_Pass]:
    """The pass under way, and each further one that begins before the plan ends."""
    number, end, length = standing.passes, standing.next_end, standing.length
    fired, since = standing.fired, standing.passes_since
    yield _Pass(number, end, length, False)
    while end < planned:
        progress, number, since, acts = end / planned, number + 1, since + 1, False
        if isinstance(settings, OneShotSieve):
            acts = not fired and progress >= settings.at
            fired = fired or acts
            length = standing.short if fired else standing.full
        elif isinstance(settings, LossSieve):
            acts = progress < settings.full_after
            length = standing.short if acts else standing.full
        else:
            length = standing.short
            if not isinstance(settings, ManualSieve) and progress < settings.stop_fraction:
                steps = standing.steps_since + end - standing.step
                acts = is_due(settings, passes=since, steps=steps, planned_steps=planned)
        end += length
        yield _Pass(number, end, length, acts)
