"""Check what a session was asked for and build its data and model, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from egeria_lab import data as data_sets
from egeria_lab import models
from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.algorithms.freeze_schedule import Schedule
from egeria_lab.algorithms.gradient_norm import GradientNorm
from egeria_lab.algorithms.sieving.settings import CirculantSieve, LossSieve, OneShotSieve, RandomSieve
from egeria_lab.algorithms.sparse.methods import MEST, SET, RigL, StaticSparsity
from egeria_lab.algorithms.sparse.settings import SparsitySettings
from egeria_lab.config import derive_seed
from egeria_lab.data.activation_cache import ActivationCache
from egeria_lab.data.datasets import Data
from egeria_lab.data.replay_check import is_replayable
from egeria_lab.data.token_data import TokenData
from egeria_lab.errors import DataError, InvalidSettingError, LayerError, is_number, require, unknown_name

SPARSITIES = (MEST, SET, RigL, StaticSparsity)


def check_arguments(
    batch_size: int,
    epochs: float | None,
    seed: int,
    freeze: Any,
    cache: Any = None,
    augment: Any = None,
    layers: Any = None,
    sieve: Any = None,
    sparsity: Any = None,
    accumulate: Any = 1,
    **switches: Any,
) -> None:
    """Raise for arguments of `Session` that are out of range, before anything is built.

    Raises:
        InvalidSettingError: with what was given, what is allowed and what to do.
    """
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size >= 1
    require(whole, "Session", "batch_size", batch_size, "a whole number >= 1")
    whole = isinstance(accumulate, int) and not isinstance(accumulate, bool) and accumulate >= 1
    require(whole, "Session", "accumulate", accumulate, "a whole number >= 1")
    valid = epochs is None or (is_number(epochs) and epochs > 0)
    require(valid, "Session", "epochs", epochs, "a number > 0 or None")
    require(isinstance(seed, int) and not isinstance(seed, bool), "Session", "seed", seed, "a whole number")
    for name, value in switches.items():
        require(isinstance(value, bool), "Session", name, value, "True or False")
    known = freeze is None or isinstance(freeze, (Plasticity, Schedule, GradientNorm))
    require(known, "Session", "freeze", freeze, "lab.Plasticity(…), lab.Schedule(…), lab.GradientNorm(…) or None")
    is_list = layers is None or (isinstance(layers, (list, tuple)) and all(isinstance(name, str) for name in layers))
    require(is_list, "Session", "layers", layers, "a list of submodule names, front to back, or None")
    is_cache = cache is None or isinstance(cache, ActivationCache)
    require(is_cache, "Session", "cache", cache, "lab.ActivationCache(…) or None")
    is_sieve = sieve is None or isinstance(sieve, (CirculantSieve, RandomSieve, OneShotSieve, LossSieve))
    known_sieves = "lab.CirculantSieve(…), lab.RandomSieve(…), lab.OneShotSieve(…), lab.LossSieve(…) or None"
    require(is_sieve, "Session", "sieve", sieve, known_sieves)
    is_sparsity = sparsity is None or (isinstance(sparsity, SparsitySettings) and type(sparsity) in SPARSITIES)
    known_methods = "lab.MEST(…), lab.SET(…), lab.RigL(…), lab.StaticSparsity(…) or None"
    require(is_sparsity, "Session", "sparsity", sparsity, known_methods)
    if augment is not None and not hasattr(augment, "view_of"):
        _, reason = is_replayable(augment)
        raise InvalidSettingError(
            f"augment must be lab.Augment(…) or lab.Replayable(…), got {augment!r}. {reason}".strip()
        )


def checked_sample_ids(call: str, sample_ids: Any) -> tuple[int, ...]:
    """Sample ids as plain whole numbers; whether they exist is checked where they land.

    Raises:
        DataError: when they are no list of whole numbers.
    """
    given = sample_ids.tolist() if hasattr(sample_ids, "tolist") else sample_ids
    given = [given] if isinstance(given, int) and not isinstance(given, bool) else given
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise DataError(f"Session.{call} takes a list of sample ids (whole numbers), got {sample_ids!r}.")
    ids = list(given)
    wrong = next((i for i in ids if not isinstance(i, int) or isinstance(i, bool)), None)
    if wrong is not None or not ids:
        what = "none" if not ids else repr(wrong)
        raise DataError(f"Session.{call} takes a list of sample ids (whole numbers, at least one), got {what}.")
    return tuple(ids)


def load_data(data: Any) -> tuple[Data, Any, Any]:
    if isinstance(data, str):
        data = data_sets.load(data)
    if isinstance(data, Data):
        return data, data.train, data.valid
    if isinstance(data, (tuple, list)) and len(data) == 2:
        parts: list[Any] = [part.dataset if isinstance(part, DataLoader) else part for part in data]
        train, valid = parts
        described = Data(name="own data", train=train, valid=valid, num_classes=None, input_shape=())
        return described, data[0], data[1]
    raise DataError(
        "data must be a name, a lab.Data, or a pair (train, valid) of data sets or of DataLoaders; got "
        f"{type(data).__name__}."
    )


def build_model(model: nn.Module | str, data: Data, seed: int) -> nn.Module:
    if isinstance(model, nn.Module):
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise LayerError("the model has no weights that require a gradient: there is nothing to train.")
        return model
    if not isinstance(model, str):
        raise InvalidSettingError(
            f"model must be a torch.nn.Module or a name ({', '.join(models.names())}); got {type(model).__name__}."
        )
    if model not in models.names():
        raise unknown_name("model", model, models.names())
    input_shape, num_classes = data.input_shape, data.num_classes
    if not input_shape or num_classes is None:
        raise InvalidSettingError(
            f"a model by name ({model!r}) needs to know the shape and classes of the data; give lab.Data(…) "
            "with input_shape and num_classes, or build the model yourself with lab.models.build."
        )
    options = data.model_options(model) if isinstance(data, TokenData) else {}
    return models.build(
        model, input_shape=input_shape, num_classes=num_classes, seed=derive_seed(seed, "model") % 2**31, **options
    )
