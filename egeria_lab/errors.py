"""The errors worth catching by name, and the two sentences that most of them share.

Every message says what was given, what is allowed, and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches


class EgeriaLabError(Exception):
    """Base of every error that egeria_lab raises on purpose.

    Example:
        >>> issubclass(InvalidSettingError, EgeriaLabError)
        True
    """


class UnknownNameError(EgeriaLabError, ValueError):
    """A model, data set, layer, setting or distance that does not exist under the given name.

    Example:
        >>> raise unknown_name("model", "resnet9", ["mlp", "resnet8"])
        Traceback (most recent call last):
        egeria_lab.errors.UnknownNameError: Unknown model 'resnet9'. Did you mean 'resnet8'? Known: mlp, resnet8.
    """


class InvalidSettingError(EgeriaLabError, ValueError):
    """A setting whose value is outside what is allowed, or settings that contradict each other.

    Example:
        >>> from egeria_lab.algorithms.freeze_policy import Plasticity
        >>> Plasticity(window=1)
        Traceback (most recent call last):
        egeria_lab.errors.InvalidSettingError: Plasticity.window must be a whole number >= 2, got 1.
    """


class DataError(EgeriaLabError, ValueError):
    """Data that cannot be trained on: empty, mis-shaped, or with labels out of range.

    Example:
        >>> from egeria_lab.session import Session
        >>> Session("mlp", 5)
        Traceback (most recent call last):
        egeria_lab.errors.DataError: data must be a name, a lab.Data, or a pair (train, valid) of data sets or of
        DataLoaders; got int.
    """


class LayerError(EgeriaLabError, ValueError):
    """A model that cannot be cut into layer modules as asked.

    Example:
        >>> import torch
        >>> from egeria_lab.session import Session
        >>> Session(torch.nn.Flatten(), "digits")
        Traceback (most recent call last):
        egeria_lab.errors.LayerError: the model has no weights that require a gradient: there is nothing to train.
    """


class TrainingError(EgeriaLabError, RuntimeError):
    """A step that could not be finished, for example because the loss is not a number.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", epochs=1)
        >>> _ = session.step(session.planned_steps)
        >>> session.step()
        Traceback (most recent call last):
        egeria_lab.errors.TrainingError: the budget of 12 steps is used up; ...
    """


class BadLossError(TrainingError):
    """A loss that is NaN or infinite; the step was not applied.

    Attributes:
        value: the loss.
        sample_ids: ids of the samples in the batch.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", loss=lambda outputs, targets: outputs.sum() * float("nan"))
        >>> try:
        ...     session.step()
        ... except BadLossError as error:
        ...     error.value, len(error.sample_ids), session.steps_done
        (nan, 128, 0)
    """

    def __init__(self, message: str, value: float, sample_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.value = value
        self.sample_ids = sample_ids


class OutOfMemoryError(TrainingError):
    """A step that did not fit into memory; what was undone, and what can be lowered, stands in the message.

    Example:
        >>> issubclass(OutOfMemoryError, TrainingError)
        True
    """


class CheckpointError(EgeriaLabError, RuntimeError):
    """A checkpoint, journal or run directory that cannot be written, read, or continued from.

    Example:
        >>> from egeria_lab.session import Session
        >>> Session.load("nothing.ckpt")
        Traceback (most recent call last):
        egeria_lab.errors.CheckpointError: there is no checkpoint nothing.ckpt.
    """


class MissingPackageError(EgeriaLabError, ImportError):
    """An optional package that is needed now and is not installed.

    Example:
        >>> issubclass(MissingPackageError, ImportError)
        True
    """


def unknown_name(kind: str, given: object, known: Iterable[str]) -> UnknownNameError:
    """Build the error for a name that does not exist, with the nearest one and all known ones.

    Args:
        kind: what the name should have named, for example ``"model"``.
        given: what the user wrote.
        known: every name that would have worked.

    Example:
        >>> print(unknown_name("model", "resnet9", ["mlp", "resnet8"]))
        Unknown model 'resnet9'. Did you mean 'resnet8'? Known: mlp, resnet8.
    """
    names = list(known)
    near = get_close_matches(str(given), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UnknownNameError(f"Unknown {kind} {given!r}.{hint} Known: {', '.join(names) or 'none'}.")


def require(condition: bool, owner: str, field: str, given: object, allowed: str) -> None:
    """Raise `InvalidSettingError` unless `condition` holds.

    Example:
        >>> require(False, "Plasticity", "patience", 0, "a whole number >= 1")
        Traceback (most recent call last):
        egeria_lab.errors.InvalidSettingError: Plasticity.patience must be a whole number >= 1, got 0.
    """
    if not condition:
        raise InvalidSettingError(f"{owner}.{field} must be {allowed}, got {given!r}.")


def is_whole(value: object) -> bool:
    """True for a whole number that is no truth value.

    Example:
        >>> is_whole(3), is_whole(3.0), is_whole(True)
        (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """True for a finite number that is no truth value.

    Example:
        >>> is_number(0.5), is_number(float("nan")), is_number("0.5")
        (True, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
