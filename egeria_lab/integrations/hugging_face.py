"""Layer freezing in a Hugging Face `Trainer`: one callback.

Example:
    >>> from egeria_lab.algorithms.freeze_policy import Plasticity
    >>> callback = FreezeCallback(freeze=Plasticity(interval_steps=20))              # doctest: +SKIP
    >>> transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()  # doctest: +SKIP
    >>> callback.freezer.savings()                                                   # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from egeria_lab.algorithms.freeze_policy import Plasticity
from egeria_lab.engine.rules import FreezeSettings
from egeria_lab.engine.trainer import Forward
from egeria_lab.errors import MissingPackageError
from egeria_lab.integrations.loop import LoopFreezer
from egeria_lab.integrations.loop_checks import check_single_process

try:
    from transformers import TrainerCallback as _Found
except ImportError:
    _Found = None
_Callback: Any = _Found

STATE_FILE = "egeria_lab.pt"
"""In each checkpoint folder, beside the `Trainer`'s own files."""


class FreezeCallback(_Callback if _Callback is not None else object):  # type: ignore[misc]
    """Freezes and thaws layers of the model that a Hugging Face `Trainer` trains.

    Readings, rules, events and the ledger are those of `LoopFreezer`, which `freezer` is once training has begun. A
    `Trainer` tells its callbacks neither batch nor loss, so a hook on the model notes both while it trains; it is gone
    when training ends. Checkpoints hold the whole optimizer, as if nothing were frozen, so that they load with and
    without this callback; with it, resuming goes on frozen as it was.

    Args:
        freeze: `Plasticity`, `Schedule` (with ``block_lr="global"``), `GradientNorm` or None.
        forward: ``forward(model, batch) -> (outputs, targets)``; default: ``model(**batch)`` gives the outputs.
        layers: names of the modules at whose outputs to cut.
        seed: of draws in readings.

    Attributes:
        freezer: the `LoopFreezer`, from the first batch on; its tables can be read afterwards too.

    Raises:
        MissingPackageError: when transformers is not installed.
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
            raise MissingPackageError('FreezeCallback needs transformers: pip install "egeria-lab[integrations]".')
        super().__init__()
        self.options: dict[str, Any] = {
            "freeze": freeze, "forward": forward if forward is not None else called_with_names, "layers": layers,
            "seed": seed,
        }  # fmt: skip
        self.freezer: LoopFreezer | None = None
        self._batch: dict[str, Any] | None = None
        self._loss: Tensor | None = None
        self._hooks: list[RemovableHandle] = []
        self._beginning = False

    # --- what the Trainer calls ------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        """Wait for the first batch, which the layers are found with; go on from a checkpoint where there is one."""
        check_single_process(args.world_size)
        model, optimizer = things["model"], inner_optimizer(things["optimizer"])
        self._let_go()
        self.freezer = None
        per_epoch = max(1, round(state.max_steps / args.num_train_epochs)) if args.num_train_epochs > 0 else 1
        folder = _resumed_from(args, state)

        def begin(example: dict[str, Any]) -> None:
            """With the first batch, so that no loader is read twice."""
            self.freezer = LoopFreezer(
                model,
                optimizer,
                example=example,
                total_steps=state.max_steps,
                steps_per_epoch=per_epoch,
                **self.options,
            )
            if folder is not None and (folder / STATE_FILE).is_file():
                self.freezer.load_state_dict(torch.load(folder / STATE_FILE, weights_only=True))

        def first(_model: nn.Module, _inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self.freezer is None and not self._beginning and model.training and torch.is_grad_enabled():
                self._beginning = True  # the layers are found by calling the model
                try:
                    begin(_tensors(named))
                finally:
                    self._beginning = False

        self._hooks = [
            model.register_forward_pre_hook(first, with_kwargs=True),
            model.register_forward_hook(self._note, with_kwargs=True),
        ]

    def on_step_end(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        """After each update: read, decide, count."""
        if self.freezer is None or self._batch is None:
            return
        loss, batch = self._loss, self._batch
        self._loss = self._batch = None
        self.freezer.after_step(batch, loss)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **things: Any) -> None:
        """A guard looks at ``eval_accuracy`` where it is computed."""
        if self.freezer is not None and not self.freezer.closed and metrics:
            self.freezer.after_epoch(float(metrics.get("eval_loss", float("nan"))), metrics.get("eval_accuracy"))

    def on_save(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        """Write what is frozen beside the checkpoint, and its optimizer whole."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.freezer is None or not folder.is_dir():
            return
        torch.save(self.freezer.state_dict(), folder / STATE_FILE)
        if (folder / "optimizer.pt").is_file():
            torch.save(self.freezer.whole_optimizer_state(), folder / "optimizer.pt")

    def on_train_end(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        """Thaw everything: the model is left as it was."""
        self._let_go()

    # --- inside ----------------------------------------------------------------------------------------

    def _note(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if self._beginning or not model.training or not torch.is_grad_enabled():
            return
        self._batch = _tensors(named)
        loss = output.get("loss") if isinstance(output, Mapping) else None
        self._loss = loss.detach() if isinstance(loss, Tensor) else None

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._batch = self._loss = None
        if self.freezer is not None:
            self.freezer.close()


def called_with_names(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """How a Hugging Face model is called: ``model(**batch)``.

    Example:
        >>> called_with_names(lambda x: x + 1, {"x": 1})
        (2, None)
    """
    return model(**batch), None


def _tensors(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def inner_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer inside what accelerate has wrapped around it.

    Example:
        >>> one = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        >>> inner_optimizer(one) is one
        True
    """
    while not type(optimizer).__module__.startswith("torch.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    made: Optimizer = optimizer
    return made


def _resumed_from(args: Any, state: Any) -> Path | None:
    """The checkpoint that the `Trainer` has just gone on from: that of the step at which it stands."""
    named = args.resume_from_checkpoint
    folder = Path(named if isinstance(named, str) else f"{args.output_dir}/checkpoint-{state.global_step}")
    return folder if state.global_step and folder.is_dir() else None
