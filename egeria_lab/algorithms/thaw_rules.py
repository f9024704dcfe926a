"""When to thaw everything: rules that look at the learning rate only, and can be a user's own function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRates:
    """What a thaw rule may look at.

    Attributes:
        now: learning rate of this step.
        before: learning rate of the step before.
        at_last_freeze: learning rate when a layer was last frozen, or None.
        stood_still: the rate had not changed for a whole evaluation interval before this step.
        smooth: since it last rose, the rate has at least once fallen by less than a fifth: a smooth decay,
            also when it moves only once an epoch.
    """

    now: float
    before: float
    at_last_freeze: float | None
    stood_still: bool
    smooth: bool = False


SMOOTH_RATIO = 0.8
"""A rate that falls to more than this share of itself is decaying smoothly, not in steps."""


ThawRule = Callable[[LearningRates], str | None]
"""Answers with the reason to thaw all frozen layers, or None."""


def thaw_on_lr_drop(rates: LearningRates) -> str | None:
    """Thaw when the rate has fallen in steps to a tenth since the last freeze, or jumped up tenfold.

    A smooth decay (cosine, by step or by epoch) without restart does not thaw: only a drop from a rate that
    had stood still counts. Source: Egeria (EuroSys 2023), section 4.2.

    Example:
        >>> thaw_on_lr_drop(LearningRates(now=0.01, before=0.1, at_last_freeze=0.1, stood_still=True))
        'the learning rate fell from 0.1 to 0.01'
        >>> thaw_on_lr_drop(LearningRates(now=0.01, before=0.011, at_last_freeze=0.1, stood_still=False))
    """
    if rates.at_last_freeze is None:
        return None
    if rates.before > 0 and rates.now >= 10 * rates.before:
        return f"the learning rate restarted from {rates.before:.3g} to {rates.now:.3g}"
    tenth = rates.now <= 0.1 * rates.at_last_freeze * (1 + 1e-9)
    if tenth and rates.now < rates.before and rates.stood_still and not rates.smooth:
        return f"the learning rate fell from {rates.at_last_freeze:.3g} to {rates.now:.3g}"
    return None


def never_thaw(_rates: LearningRates) -> str | None:
    """Keep frozen layers frozen, whatever the learning rate does.

    Example:
        >>> never_thaw(LearningRates(now=0.001, before=0.1, at_last_freeze=0.1, stood_still=True))
    """
    return None


THAW_RULES: dict[str, ThawRule] = {"lr_drop": thaw_on_lr_drop, "never": never_thaw}
