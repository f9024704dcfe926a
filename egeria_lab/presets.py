"""Ready sets of keywords for `Session`: the two published systems, all of both together, fine-tuning, and settling.

Example:
    >>> from egeria_lab.session import Session
    >>> session = Session("mlp", "digits", epochs=8, **spfde(saving=0.15, sieve=0.15))
    >>> session.sieve.num_kept, sorted(spfde())
    (1221, ['freeze', 'sieve', 'sparsity'])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.algorithms.freeze_schedule import Schedule
from egeria_lab.algorithms.sieving.settings import CirculantSieve
from egeria_lab.algorithms.sparse.methods import MEST
from egeria_lab.data.activation_cache import ActivationCache
from egeria_lab.errors import is_number, require

__all__ = ["egeria", "everything", "fine_tuning", "settled", "spfde"]

Keywords = dict[str, Any]


def __dir__() -> list[str]:
    return __all__


def egeria(*, tolerance: float = 0.2, cache: bool = True) -> Keywords:
    """Egeria: freeze by measured plasticity, and skip the frozen front with a cache of its outputs.

    Args:
        tolerance: share of a layer's own first slopes below which it is stable.
        cache: False computes the frozen front anew in each step.

    Raises:
        InvalidSettingError: for a value that cannot be.

    Source: Egeria (EuroSys 2023).

    Example:
        >>> sorted(egeria())
        ['cache', 'freeze']
    """
    return {"freeze": Plasticity(tolerance=tolerance), "cache": _cache("egeria", cache)}


def settled(
    *,
    epochs: float = 20.0,
    settle: float = 0.1,
    tolerance: float = 1.0,
    bootstrap_rate: float | None = 0.5,
    cache: bool = True,
) -> Keywords:
    """Freezing by measured plasticity that costs little accuracy: layers come to rest once the rate has fallen.

    For one training with a falling learning rate, from the beginning: nothing thaws. A layer begins to settle when it
    moves no faster any more than at first; readings compare 16 rows. Three seeds against plain training of the same
    seed, step schedule, each trained on its own (so that the speed, in processor time, is rough): ResNet-8, 12 passes
    over blue-marble, -0.3, 0.0 and -1.5 points at × 1.38; a small Transformer, 10 passes over pronounce, -0.5, -0.3 and
    -0.2 points at × 1.44. ``egeria-lab bench freezing`` trains it side by side with others.

    Args:
        epochs: planned passes over the data, > 0: give the session the same.
        settle: share of the plan over which a layer comes to rest before it freezes, in (0, 1).
        bootstrap_rate: share of its highest to which the learning rate has to fall before layers begin to settle, in
            (0, 1]. None begins as soon as the loss allows, and needs a longer `settle`, 1/4 or 1/3: faster, and costs
            accuracy wherever each pass still teaches the model something.
        tolerance: share of a layer's own first slopes below which it is stable, and begins to settle.
        cache: False computes the frozen front anew in each step.

    Raises:
        InvalidSettingError: for a value that cannot be.

    Example:
        >>> settled(epochs=20)["freeze"].settle_epochs
        2.0
    """
    require(is_number(epochs) and epochs > 0, "settled", "epochs", epochs, "a number > 0")
    require(is_number(settle) and 0 < settle < 1, "settled", "settle", settle, "a number in (0, 1)")
    rule = Plasticity(
        interval_steps=5, window=6, patience=3, tolerance=tolerance, refresh_on_freeze=False, freeze_together=True,
        probe_rows=16, bootstrap_rate=bootstrap_rate, thaw="never", settle_epochs=epochs * settle,
    )  # fmt: skip
    return {"freeze": rule, "cache": _cache("settled", cache)}


def spfde(*, saving: float = 0.25, sieve: float = 0.25, sparsity: float = 0.9) -> Keywords:
    """SpFDE: sparse training (MEST), layers frozen by a schedule solved for a target, and circulant data sieving.

    Args:
        saving: share of the training FLOPs that freezing shall save, in (0, 1); 0 for no freezing.
        sieve: share of the samples that is set aside, in (0, 1); 0 for no sieve.
        sparsity: share of the weights that is zero, in (0, 1); 0 for dense training.

    Source: SpFDE (NeurIPS 2022); its headline is ``spfde(saving=0.25, sieve=0.25, sparsity=0.9)``.

    Example:
        >>> spfde(sparsity=0)["sparsity"] is None
        True
    """
    return {
        "freeze": Schedule(saving=saving) if saving else None,
        "sieve": CirculantSieve(fraction=sieve) if sieve else None,
        "sparsity": MEST(sparsity=sparsity) if sparsity else None,
    }


def everything(
    *,
    tolerance: float | None = None,
    sieve: float = 0.2,
    sparsity: float = 0.9,
    epochs: float | None = None,
    settle: float | None = None,
) -> Keywords:
    """Both systems together: freezing by measured plasticity, cache, circulant sieve and sparse training.

    As the papers do it, layers freeze at once. With `epochs` and `settle` they come to rest first, from the start on
    (`settled` with ``bootstrap_rate=None``): measured beside plain training, three seeds, ``everything(epochs=12,
    settle=1/4, sieve=0.3, sparsity=0.5)`` trained ResNet-8 on blue-marble × 2.71 as fast (processor time) at 72.9 ± 0.7
    against 73.8 ± 1.3 %, and a small Transformer on pronounce (10 epochs) × 2.16 as fast at 81.2 ± 0.4 against
    85.4 ± 0.3 %.

    Args:
        tolerance: share of a layer's own first slopes below which it is stable; None for 0.2, with `settle` for 1.0.
        sieve: as in `spfde`.
        sparsity: as in `spfde`; half of the weights of a small model are few enough.
        epochs: planned passes over the data, > 0, for `settle`: give the session the same.
        settle: share of the plan over which a layer comes to rest before it freezes, in (0, 1), or None.

    Raises:
        InvalidSettingError: for a value that cannot be, and for one of `epochs` and `settle` without the other.

    Example:
        >>> sorted(everything()), everything()["freeze"].settle_epochs
        (['cache', 'freeze', 'sieve', 'sparsity'], 0.0)
        >>> everything(epochs=12, settle=1 / 4)["freeze"].settle_epochs
        3.0
    """
    both = (epochs is None) == (settle is None)
    require(both, "everything", "epochs and settle", (epochs, settle), "given both or neither")
    if epochs is None or settle is None:
        rule = egeria(tolerance=0.2 if tolerance is None else tolerance)
    else:
        moves = 1.0 if tolerance is None else tolerance
        rule = settled(epochs=epochs, settle=settle, tolerance=moves, bootstrap_rate=None)
    return {**spfde(sieve=sieve, sparsity=sparsity), **rule}


def fine_tuning(*, tolerance: float = 1.0, lr: float = 0.01, cache: bool = True) -> Keywords:
    """Fine-tuning of a pretrained model: a low learning rate, and layers may freeze from the first pass on.

    A pretrained front hardly moves from the start: there is no bootstrapping to wait for, and a layer's own first
    slopes are what "stable" means. The reference is plain fp32: a few hundred steps do not earn back conversions to
    int8, which cost a tenth of a whole fine-tuning of EfficientNet-Lite0. Layers stay frozen, as the rate only falls.

    Args:
        tolerance: share of a layer's own first slopes below which it is stable.
        lr: peak learning rate of SGD with momentum, > 0.
        cache: False computes the frozen front anew in each step.

    Raises:
        InvalidSettingError: for a value that cannot be.

    Example:
        >>> fine_tuning()["freeze"].bootstrap_epochs, fine_tuning(lr=0.003)["lr"]
        (0.0, 0.003)
    """
    require(is_number(lr) and lr > 0, "fine_tuning", "lr", lr, "a number > 0")
    rule = Plasticity(
        interval_steps=8, window=3, patience=2, tolerance=tolerance, bootstrap_change=2.0, bootstrap_epochs=0.0,
        refresh_on_freeze=False, freeze_together=True, probe_rows=8, monitor_budget=0.2, refresh_evals=60,
        thaw="never", reference="fp32",
    )  # fmt: skip
    return {"freeze": rule, "lr": lr, "cache": _cache("fine_tuning", cache)}


def _cache(preset: str, wanted: bool) -> ActivationCache | None:
    require(isinstance(wanted, bool), preset, "cache", wanted, "True or False")
    return ActivationCache() if wanted else None


PRESETS: dict[str, Callable[..., Keywords]] = {
    "egeria": egeria, "spfde": spfde, "everything": everything, "fine_tuning": fine_tuning, "settled": settled,
}  # fmt: skip
"""What ``preset = …`` in a run file can name."""
