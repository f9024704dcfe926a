"""How a part of the training set is left out: SpFDE's circulant sieve and the controls it is compared with.

Each object only says what is wanted; `egeria_lab.algorithms.sieving.sieve.Sieve` carries it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from egeria_lab.errors import InvalidSettingError, is_number, is_whole, require, unknown_name
from egeria_lab.tables import ShownAsTable

DEFAULT_INTERVAL = (5, 160)
"""Without an interval of its own a sieve swaps every 5/160 of training, SpFDE's share, and at least a pass apart."""
TIES = ("margin", "random")
NEVER_CORRECT = ("ever", "interval", "ignored")


@dataclass(frozen=True, slots=True, kw_only=True)
class CirculantSieve(ShownAsTable):
    """Train on a part of the data, and exchange its easiest samples for the ones that wait longest.

    Attributes:
        fraction: share p of the training set that is left out, in (0, 1); each swap moves p of the kept part.
        interval_epochs: passes over the kept samples between two swaps, > 0; a swap lands at the first end of a
            pass at or after it.
        interval_steps: the same in training steps, >= 1; give one of the two, or neither for 5/160 of training
            and at least one pass.
        stop_fraction: no more swaps from this share of training on, in (0, 1].
        class_shares: keep the share of each class in the kept part; needs labels.
        ties: samples with as many forgetting events are ordered by the mean ``"margin"`` of the interval, or at
            ``"random"``.
        never_correct: which samples count as hardest: those not classified rightly ``"ever"`` so far, or in the
            last ``"interval"``; ``"ignored"`` ranks them by their events alone.
        across_borders: a fall from right to wrong between the last presentation of one interval and the first
            of the next counts, for the later one.

    Raises:
        InvalidSettingError, UnknownNameError: when made with a value outside these ranges.

    Source: SpFDE (NeurIPS 2022), section 3.3; forgetting events: Toneva et al., ICLR 2019.

    Example:
        >>> CirculantSieve(fraction=0.25, interval_epochs=5).needs
        ('correct', 'margin')
        >>> CirculantSieve(fraction=1.0)
        Traceback (most recent call last):
        egeria_lab.errors.InvalidSettingError: CirculantSieve.fraction must be in (0, 1), got 1.0.
    """

    fraction: float = 0.2
    interval_epochs: float | None = None
    interval_steps: int | None = None
    stop_fraction: float = 1.0
    class_shares: bool = False
    ties: str = "margin"
    never_correct: str = "ever"
    across_borders: bool = True

    prefix: ClassVar[str] = "sieve"

    def __post_init__(self) -> None:
        _check_fraction(self, self.fraction)
        _check_interval(self, self.interval_epochs, self.interval_steps)
        _check_share(self, "stop_fraction", self.stop_fraction)
        for name in ("class_shares", "across_borders"):
            _check_flag(self, name, getattr(self, name))
        if self.ties not in TIES:
            raise unknown_name("order of ties", self.ties, TIES)
        if self.never_correct not in NEVER_CORRECT:
            raise unknown_name("never_correct", self.never_correct, NEVER_CORRECT)

    @property
    def needs(self) -> tuple[str, ...]:
        """What has to be observed of each presented sample: ``"correct"``, ``"margin"``, ``"loss"`` or nothing."""
        return ("correct", "margin") if self.ties == "margin" else ("correct",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSieve(ShownAsTable):
    """The circulant sieve with samples taken out at random: the control that a ranking has to beat.

    Attributes:
        fraction: as in `CirculantSieve`.
        interval_epochs: as in `CirculantSieve`.
        interval_steps: as in `CirculantSieve`.
        stop_fraction: as in `CirculantSieve`.
        class_shares: as in `CirculantSieve`.

    Raises:
        InvalidSettingError: when made with a value outside its range.

    Example:
        >>> RandomSieve(fraction=0.25, interval_steps=100).needs
        ()
    """

    fraction: float = 0.2
    interval_epochs: float | None = None
    interval_steps: int | None = None
    stop_fraction: float = 1.0
    class_shares: bool = False

    prefix: ClassVar[str] = "sieve"

    def __post_init__(self) -> None:
        _check_fraction(self, self.fraction)
        _check_interval(self, self.interval_epochs, self.interval_steps)
        _check_share(self, "stop_fraction", self.stop_fraction)
        _check_flag(self, "class_shares", self.class_shares)

    @property
    def needs(self) -> tuple[str, ...]:
        """Nothing has to be observed."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OneShotSieve(ShownAsTable):
    """Train on everything first, then leave the least forgotten samples out once and for good.

    Attributes:
        fraction: share of the training set that is left out, in (0, 1).
        at: share of training after which, at the next end of a pass, it happens, in (0, 1). Our choice.
        class_shares: leave out the same share of each class; needs labels.

    Raises:
        InvalidSettingError: when made with a value outside its range.

    Source: the data-efficient training of MEST (NeurIPS 2021), with counts since the start.

    Example:
        >>> OneShotSieve(fraction=0.25, at=0.5).needs
        ('correct', 'margin')
    """

    fraction: float = 0.2
    at: float = 0.4
    class_shares: bool = False

    prefix: ClassVar[str] = "sieve"

    def __post_init__(self) -> None:
        _check_fraction(self, self.fraction)
        require(is_number(self.at) and 0 < self.at < 1, "OneShotSieve", "at", self.at, "in (0, 1)")
        _check_flag(self, "class_shares", self.class_shares)

    @property
    def needs(self) -> tuple[str, ...]:
        """What has to be observed of each presented sample."""
        return ("correct", "margin")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSieve(ShownAsTable):
    """Leave out, anew for each pass, random samples whose loss is below the mean; the others of them weigh more.

    The first pass is over all samples, because no loss is known yet.

    Attributes:
        fraction: share of the training set that is left out, in (0, 1): the exact count, whatever the losses are.
        full_after: from this share of training on everything is trained on without weights, in (0, 1]; 1.0 never
            does so. The default is InfoBatch's.

    Raises:
        InvalidSettingError: when made with a value outside its range.

    Source: the idea of InfoBatch (Qin et al., ICLR 2024): unbiased pruning by re-weighting. There a share of the
    samples below the mean is left out; here the number is fixed, so that epochs are equally long.

    Example:
        >>> LossSieve(fraction=0.3).needs
        ('loss',)
    """

    fraction: float = 0.2
    full_after: float = 0.875

    prefix: ClassVar[str] = "sieve"

    def __post_init__(self) -> None:
        _check_fraction(self, self.fraction)
        _check_share(self, "full_after", self.full_after)

    @property
    def needs(self) -> tuple[str, ...]:
        """What has to be observed of each presented sample."""
        return ("loss",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualSieve:
    """Nothing is left out but what is discarded by hand.

    Example:
        >>> ManualSieve().needs
        ()
    """

    prefix: ClassVar[str] = "sieve"

    @property
    def needs(self) -> tuple[str, ...]:
        """Nothing has to be observed."""
        return ()


SieveSettings = CirculantSieve | RandomSieve | OneShotSieve | LossSieve | ManualSieve


def is_due(settings: CirculantSieve | RandomSieve, *, passes: int, steps: int, planned_steps: int) -> bool:
    """Whether a swap is due at the end of a pass.

    Args:
        settings: whose interval.
        passes: passes over the kept samples since the last swap.
        steps: training steps since the last swap.
        planned_steps: steps of the whole training.

    Example:
        >>> is_due(RandomSieve(interval_epochs=2), passes=1, steps=50, planned_steps=1000)
        False
        >>> is_due(RandomSieve(), passes=1, steps=50, planned_steps=1600)
        True
    """
    if settings.interval_epochs is not None:
        return passes >= settings.interval_epochs
    if settings.interval_steps is not None:
        return steps >= settings.interval_steps
    part, whole = DEFAULT_INTERVAL
    return steps * whole >= part * planned_steps


def check_batches(settings: SieveSettings, num_samples: int, batch_size: int) -> int:
    """How many samples a sieve leaves out of so many.

    Raises:
        InvalidSettingError: when fewer than one batch would be kept, or nothing would be left out.

    Example:
        >>> check_batches(CirculantSieve(fraction=0.2), 50_000, 128)
        10000
        >>> check_batches(CirculantSieve(fraction=0.999), 60_000, 128)
        Traceback (most recent call last):
        egeria_lab.errors.InvalidSettingError: CirculantSieve.fraction=0.999 keeps 60 of 60000 samples, fewer than
        one batch of 128; fraction can be at most 0.9978 here, or lower the batch size.
    """
    if isinstance(settings, ManualSieve):
        return 0
    name = type(settings).__name__
    removed = round(settings.fraction * num_samples)
    if num_samples - removed < batch_size:
        most = math.floor((num_samples - batch_size) / num_samples * 10_000) / 10_000
        allowed = f"fraction can be at most {most:g} here, or lower the batch size" if most > 0 else (
            "one batch is all the data, so lower the batch size before leaving samples out"
        )  # fmt: skip
        raise InvalidSettingError(
            f"{name}.fraction={settings.fraction:g} keeps {num_samples - removed} of {num_samples} samples, fewer "
            f"than one batch of {batch_size}; {allowed}."
        )
    if removed == 0:
        raise InvalidSettingError(
            f"{name}.fraction={settings.fraction:g} leaves out none of {num_samples} samples; give at least "
            f"{1 / num_samples:.2g}, or no sieve."
        )
    return removed


def _check_fraction(settings: object, value: object) -> None:
    require(is_number(value) and 0 < value < 1, type(settings).__name__, "fraction", value, "in (0, 1)")  # type: ignore[operator]


def _check_share(settings: object, name: str, value: object) -> None:
    require(is_number(value) and 0 < value <= 1, type(settings).__name__, name, value, "in (0, 1]")  # type: ignore[operator]


def _check_flag(settings: object, name: str, value: object) -> None:
    require(isinstance(value, bool), type(settings).__name__, name, value, "True or False")


def _check_interval(settings: object, epochs: object, steps: object) -> None:
    owner = type(settings).__name__
    good = epochs is None or (is_number(epochs) and epochs > 0)  # type: ignore[operator]
    require(good, owner, "interval_epochs", epochs, "a number > 0 or None")
    good = steps is None or (is_whole(steps) and steps >= 1)  # type: ignore[operator]
    require(good, owner, "interval_steps", steps, "a whole number >= 1 or None")
    if epochs is not None and steps is not None:
        raise InvalidSettingError(
            f"{owner}: give interval_epochs or interval_steps, not both; got {epochs} and {steps}."
        )
