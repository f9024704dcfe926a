"""Layer freezing in a Lightning `Trainer`: one callback.

Example:
    >>> from egeria_lab.algorithms.freeze_policy import Plasticity
    >>> callback = FreezeCallback(freeze=Plasticity(interval_steps=20))     # doctest: +SKIP
    >>> lightning.Trainer(max_epochs=5, callbacks=[callback]).fit(module)   # doctest: +SKIP
    >>> callback.freezer.savings()                                          # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.engine.rules import FreezeSettings
from egeria_lab.engine.trainer import Forward
from egeria_lab.errors import MissingPackageError
from egeria_lab.integrations.loop import LoopFreezer
from egeria_lab.integrations.loop_checks import check_single_process

try:
    from lightning.pytorch import Callback as _Found
except ImportError:
    try:
        from pytorch_lightning import Callback as _Found  # the older name of the same package
    except ImportError:
        _Found = None
_Callback: Any = _Found


class FreezeCallback(_Callback if _Callback is not None else object):  # type: ignore[misc]
    """Freezes and thaws layers of the module that a Lightning `Trainer` fits.

    Readings, rules, events and the ledger are those of `LoopFreezer`, which `freezer` is once fitting has begun. A step
    is one update, also under ``accumulate_grad_batches``. Checkpoints hold the whole optimizer, as if nothing were
    frozen, so that they load with and without this callback; with it, resuming goes on frozen as it was.

    Args:
        freeze: `Plasticity`, `Schedule` (with ``block_lr="global"``), `GradientNorm` or None.
        forward: ``forward(module, batch) -> (outputs, targets)``; default: batches are pairs, and
            ``module(batch[0])`` gives the outputs.
        layers: names of the modules at whose outputs to cut.
        seed: of draws in readings.

    Attributes:
        freezer: the `LoopFreezer`, from the first batch on; its tables can be read afterwards too.

    Raises:
        MissingPackageError: when Lightning is not installed.
    """

    def __init__(
        self,
        freeze: FreezeSettings | None = Plasticity(),  # noqa: B008 - frozen, so sharing it is safe
        *,
        forward: Forward | None = None,
        layers: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        if _Callback is None:
            raise MissingPackageError('FreezeCallback needs Lightning: pip install "egeria-lab[integrations]".')
        super().__init__()
        self.options: dict[str, Any] = {"freeze": freeze, "forward": forward, "layers": layers, "seed": seed}
        self.freezer: LoopFreezer | None = None
        self._saved: Mapping[str, Any] | None = None
        self._updates = 0

    # --- what Lightning calls --------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Refuse what cannot work."""
        check_single_process(trainer.world_size)
        if self.freezer is not None:  # of an earlier fit
            self.freezer.close()
            self.freezer = None

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int, *_more: Any) -> None:
        """Find the layers with the first batch, so that no loader is read twice; go on from a checkpoint if any."""
        if self.freezer is not None:
            return
        steps = trainer.estimated_stepping_batches
        total = int(steps) if 0 < steps < float("inf") else None
        epochs = trainer.max_epochs
        per_epoch = max(1, round(total / epochs)) if total and epochs and epochs > 0 else None
        self.freezer = LoopFreezer(
            pl_module, trainer.optimizers, example=batch, steps_per_epoch=per_epoch, total_steps=total, **self.options
        )
        if self._saved is not None:
            self.freezer.load_state_dict(self._saved)
            self._saved = None
        self._updates = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int, *_more: Any
    ) -> None:
        """After each update: read, decide, count."""
        if self.freezer is None or self.freezer.closed or trainer.global_step == self._updates:
            return  # the window of accumulated batches is not full
        self._updates = trainer.global_step
        self.freezer.after_step(batch, _loss_in(outputs))

    def on_validation_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """A guard looks at ``val_acc`` or ``val_accuracy`` where it is logged."""
        if self.freezer is None or self.freezer.closed or trainer.sanity_checking:
            return
        logged = trainer.callback_metrics
        accuracy = next((float(logged[name]) for name in ("val_acc", "val_accuracy") if name in logged), None)
        loss = float(logged["val_loss"]) if "val_loss" in logged else float("nan")
        self.freezer.after_epoch(loss, accuracy)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Thaw everything: the module is left as it was."""
        if self.freezer is not None:
            self.freezer.close()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Thaw everything also when fitting failed."""
        self.on_train_end(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Write the optimizer whole, as any Lightning `Trainer` expects it."""
        if self.freezer is None or "optimizer_states" not in checkpoint:
            return
        checkpoint["optimizer_states"] = self.freezer.whole_optimizer_states()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: what is frozen, the rule, the tables; after fitting, as they were at its end."""
        return {} if self.freezer is None else self.freezer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until training starts, when the optimizer is there."""
        self._saved = state_dict or None


def _loss_in(outputs: Any) -> Tensor | float | None:
    if isinstance(outputs, Mapping):
        outputs = outputs.get("loss")
    if isinstance(outputs, (Tensor, float)):
        return outputs
    return None  # manual optimisation may return nothing
