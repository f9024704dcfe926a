"""One training step and one evaluation: forward, loss, backward, update. Nothing decides here.

The file is one piece because the order of these four, and what may fail in between, is its whole point.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from egeria_lab.algorithms.layers import LayerModules, layers
from egeria_lab.algorithms.reference import evaluating
from egeria_lab.algorithms.tracing import undisturbed
from egeria_lab.config import derive_seed
from egeria_lab.data.loaders import Batch, BatchSource, Views
from egeria_lab.engine.averaging import BUFFERS, WeightAverage
from egeria_lab.engine.frozen_watch import FrozenWatch
from egeria_lab.engine.interrupts import interrupts_let_through
from egeria_lab.engine.losses import accuracy_of, check_labels, cross_entropy, loss_of_each
from egeria_lab.engine.signals import SampleSignals, joined, sample_signals
from egeria_lab.errors import (
    BadLossError,
    DataError,
    EgeriaLabError,
    InvalidSettingError,
    TrainingError,
    require,
    unknown_name,
)

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
Loss = Callable[[Any, Any], Tensor]

PRECISIONS = ("auto", "fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step measured.

    Attributes:
        loss: mean loss of the batch.
        accuracy: share of right predictions in [0, 1], or None where the outputs are no class scores.
        seconds: time of the step.
        outputs: the model's outputs, detached.
        new_graphs: graphs that `torch.compile` built during the step; 0 for a model that is not compiled.
        signals: what each sample tells a sieve, where one asked for it.
    """

    loss: float
    accuracy: float | None
    seconds: float
    outputs: Any
    new_graphs: int = 0
    signals: SampleSignals | None = None


class UpdateHooks(Protocol):
    """Whoever has to look at every update from inside, as masks of sparse weights do."""

    def after_backward(self) -> None:
        """Gradients are complete and unscaled; clipping and the optimizer come next."""

    def after_step(self) -> None:
        """The optimizer has moved the weights."""


class OtherRanks(Protocol):
    """Whoever trains the same model on other rows of the same global batch."""

    def run(self, batch: Batch, content: Any) -> Any:
        """A forward pass whose backward pass averages gradients over all ranks."""

    def agree_on_loss(self, value: float, batch: Batch) -> float:
        """The mean loss of the global batch."""

    def weighted(self, loss: Tensor, batch: Batch) -> Tensor:
        """The loss with this rank's share of the global batch."""

    def backward(self, work: Callable[[], None]) -> None:
        """Run a backward pass."""

    def total(self, sums: Sequence[float]) -> list[float]:
        """Sums over all ranks."""

    @property
    def number(self) -> int:
        """Which rank this is, from 0."""


class Trainer:
    """Trains one model on one device.

    Args:
        model: the model, already on `device`.
        optimizer: its optimizer.
        loss: ``loss(outputs, targets)``, a scalar or one value per sample; None for cross-entropy.
        forward: ``forward(model, batch) -> (outputs, targets)``; None for batches ``(inputs, targets)``.
        device: where the model is.
        precision: ``"auto"`` or ``"fp32"`` for float32, ``"bf16"`` and ``"fp16"`` for autocast, the latter
            with loss scaling.
        max_grad_norm: clip the gradient norm of active parameters to this, or None.
        seed: decides dropout and other draws inside the model, together with the step.
        augment: applied to the inputs of training batches ``(inputs, targets)``, or None.
        deterministic: on a GPU, use deterministic algorithms only.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss: Loss | None,
        forward: Forward | None,
        device: torch.device,
        precision: str = "auto",
        max_grad_norm: float | None = None,
        seed: int = 0,
        augment: Views | None = None,
        deterministic: bool = False,
    ) -> None:
        if precision not in PRECISIONS:
            raise unknown_name("precision", precision, PRECISIONS)
        for name, function in (("loss", loss), ("forward", forward)):
            if function is not None and not callable(function):
                raise InvalidSettingError(f"{name} must be a function or None, got {function!r}.")
        if max_grad_norm is not None and not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
            raise InvalidSettingError(f"max_grad_norm must be > 0 or None, got {max_grad_norm!r}.")
        # A compiled model is trained through its compiled forward; everything that looks at modules (tracing,
        # evaluation, plasticity) runs the module itself, so that no hook is lost in a compiled graph.
        inner = getattr(model, "_orig_mod", None)
        self.compiled = model if isinstance(inner, nn.Module) else None
        self.model: nn.Module = inner if isinstance(inner, nn.Module) else model
        self.optimizer = optimizer
        self.loss: Loss = loss if loss is not None else cross_entropy
        self.checks_labels = loss is None
        self.forward = forward
        self.device = device
        self.precision = precision
        self.max_grad_norm = max_grad_norm
        self.seed = seed
        self.augment = augment
        self.deterministic = deterministic
        self.forward_pass: Callable[[Batch, Any], tuple[Any, Any]] | None = None
        self.update_hooks: UpdateHooks | None = None
        self.settler: UpdateHooks | None = None
        self.ranks: OtherRanks | None = None
        self.guards_gradients = False
        self.sample_weights: Callable[[Tensor], Tensor | None] | None = None
        self.check_signals: Callable[[SampleSignals], None] | None = None
        self.layers = LayerModules([])
        self._checked: tuple[str, ...] = ()
        self._buffer_owners: list[nn.Module] = []  # looked up once a pass: going through a model takes its time
        # Parts that their owner had put into eval mode stay so, also after a model.eval() in between.
        self._kept_in_eval = [m for m in self.model.modules() if not m.training] if self.model.training else []
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self.average: WeightAverage | None = None
        self.watch = FrozenWatch(optimizer, list(self.model.parameters()))

    def keep_average(self, decay: float | None, buffers: str = "copy") -> None:
        """Keep a running average of the weights from the next step on; None keeps none.

        Raises:
            InvalidSettingError: for a value out of range.
        """
        require(buffers in BUFFERS, "Session", "ema_buffers", buffers, "one of " + ", ".join(BUFFERS))
        self.average = None if decay is None else WeightAverage(self.model, decay, buffers)

    def state_dict(self) -> dict[str, Any]:
        """What the trainer remembers between steps, as plain values."""
        modules = {module: name for name, module in self.model.named_modules()}
        return {
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "checked": list(self._checked),
            "kept_in_eval": [modules[module] for module in self._kept_in_eval if module in modules],
            "watch": self.watch.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        modules = dict(self.model.named_modules())
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._checked = tuple(state["checked"])
        self._kept_in_eval = [modules[name] for name in state["kept_in_eval"]]
        self.watch.load_state_dict(state.get("watch", {"moves_frozen": False}))
        average = state.get("average")
        if self.average is not None:
            self.average.load_state_dict(average if average is not None else {"average": None})

    def to_device(self, content: Any) -> Any:
        """Every tensor of a (nested) batch on the training device."""
        if self.device.type == "cpu":
            return content
        return tree_map(lambda x: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x, content)

    def run_model(self, model: nn.Module, content: Any) -> tuple[Any, Any]:
        """The model's outputs and the targets for one batch on the device.

        Raises:
            DataError: when the batch is no ``(inputs, targets)`` pair and there is no `forward`.
        """
        if self.forward is not None:
            pair = self.forward(model, content)
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise DataError(
                    f"forward must return (outputs, targets), got {type(pair).__name__}; end it with "
                    "`return outputs, targets`."
                )
            return pair[0], pair[1]
        if not isinstance(content, (tuple, list)) or len(content) != 2:
            kind = f"{type(content).__name__} of {len(content)}" if hasattr(content, "__len__") else type(content)
            raise DataError(
                f"a batch must be a pair (inputs, targets), got {kind}; for other batches give "
                "forward=function(model, batch) -> (outputs, targets)."
            )
        return model(content[0]), content[1]

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast block of the chosen precision."""
        if self.precision in ("bf16", "fp16"):
            dtype = torch.bfloat16 if self.precision == "bf16" else torch.float16
            return torch.autocast(self.device.type, dtype=dtype)
        return nullcontext()

    def step(self, batch: Batch, number: int, around_forward: AbstractContextManager[Any]) -> StepResult:
        """Train on one batch: one optimizer step, however many parts the batch has.

        The gradient of a batch in parts is that of its mean loss, each part weighing as much as it has samples (also
        where a loss is reduced already). Batch norm sees one part at a time.

        Args:
            batch: the batch.
            number: number of the step, from 1; decides the draws inside the model.
            around_forward: entered for the forward pass alone (measuring; may not change values).

        Raises:
            TrainingError: when the loss is not finite; the weights are then those of before the step.
            DataError: when a label is no class of the model.
        """
        start = time.perf_counter()
        self._set_train_mode()
        graphs = self._graphs_so_far()
        parts = batch.split()
        shares = [len(part) / len(batch) for part in parts]
        with self._deterministic(), self.private_draws(*self._draws(number)), self._buffers_kept_on_error():
            self.optimizer.zero_grad(set_to_none=True)
            made = []
            for part, share in zip(parts, shares, strict=True):
                around = around_forward if part is parts[0] else nullcontext()
                with interrupts_let_through():  # nothing has changed yet; from the update on, a step is made whole
                    made.append(self._forward_and_backward(part, share, number, around))
            self._update(batch, number)
        seconds = time.perf_counter() - start
        value = sum(share * one.loss for share, one in zip(shares, made, strict=True))
        right = [one.accuracy for one in made if one.accuracy is not None]
        accuracy = sum(s * r for s, r in zip(shares, right, strict=True)) if len(right) == len(parts) else None
        signals = joined([one.signals for one in made])
        return StepResult(value, accuracy, seconds, made[-1].outputs, self._graphs_so_far() - graphs, signals)

    def _forward_and_backward(
        self, batch: Batch, share: float, number: int, around_forward: AbstractContextManager[Any]
    ) -> StepResult:
        """Add the gradients of one part of a step, which is `share` of its samples, to those that are there."""
        content = self._augmented(batch)
        with self.autocast(), around_forward:
            outputs, targets = self._forward(batch, content)
            losses = self.checked_loss(outputs, targets, batch)
        signals = self._signals(outputs, targets, losses, batch)
        loss = self._weighted(losses, batch).mean()
        value = losses.detach().mean().item()
        if self.ranks is not None:
            value, loss = self.ranks.agree_on_loss(value, batch), self.ranks.weighted(loss, batch)
        if value != value or abs(value) == float("inf"):
            raise BadLossError(self._not_finite(value, number), value, tuple(batch.ids.tolist()))
        self._backward(loss if share == 1 else loss * share)
        return StepResult(value, accuracy_of(outputs, targets), 0.0, outputs, signals=signals)

    def _signals(self, outputs: Any, targets: Any, losses: Tensor, batch: Batch) -> SampleSignals | None:
        if self.check_signals is None:
            return None
        signals = sample_signals(outputs, targets, losses, len(batch))
        self.check_signals(signals)  # before the update: a step that cannot be counted is not made
        return signals

    def _weighted(self, losses: Tensor, batch: Batch) -> Tensor:
        """Losses of samples that stand for others which a sieve left out count for those too."""
        weights = self.sample_weights(batch.ids) if self.sample_weights is not None else None
        if weights is None:
            return losses
        each = loss_of_each(losses, len(batch))
        if each is None:
            raise InvalidSettingError(
                f"re-weighting needs one loss for each of {len(batch)} samples, and the loss has shape "
                f"{tuple(losses.shape)}; return it unreduced (reduction='none'), or choose a sieve without weights."
            )
        return each * weights.to(each)

    @contextmanager
    def _buffers_kept_on_error(self) -> Iterator[None]:
        """Running statistics of a step that could not be made are put back: it was not applied."""
        if not self._buffer_owners:
            self._buffer_owners = [module for module in self.model.modules() if module._buffers]
        held = (buffer for module in self._buffer_owners for buffer in module._buffers.values())
        moving = [buffer for buffer in held if buffer is not None and buffer.numel()]
        before = [buffer.detach().clone() for buffer in moving]
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for buffer, old in zip(moving, before, strict=True):
                    buffer.copy_(old)
            raise

    def _graphs_so_far(self) -> int:
        """Graphs compiled in this process; dynamo is only loaded when something was compiled."""
        if self.compiled is None or "torch._dynamo.utils" not in sys.modules:
            return 0
        return int(sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"])

    def _draws(self, number: int) -> tuple[str | int, ...]:
        """What the draws inside the model hang on; rows on other ranks get others, as rows of one batch do."""
        other = self.ranks.number if self.ranks is not None else 0
        return ("step", number, "rank", other) if other else ("step", number)

    def _forward(self, batch: Batch, content: Any) -> tuple[Any, Any]:
        if self.ranks is not None:
            outputs, targets = self.ranks.run(batch, content)
            return outputs, targets
        return self.run_to_train(batch, content)

    def run_to_train(self, batch: Batch, content: Any) -> tuple[Any, Any]:
        """Outputs and targets of a training batch, by the cached front or the compiled model where there is one."""
        if self.forward_pass is not None:
            return self.forward_pass(batch, content)
        return self.run_model(self.model if self.compiled is None else self.compiled, content)

    def _augmented(self, batch: Batch) -> Any:
        content = self.to_device(batch.content)
        if self.augment is None or batch.views is None:
            return content
        if not isinstance(content, (tuple, list)) or len(content) != 2:
            raise DataError("augment= works on batches (inputs, targets); augment other batches inside forward=.")
        inputs = self.augment(content[0], batch.ids, batch.views)
        return [inputs, content[1]] if isinstance(content, list) else (inputs, content[1])

    @contextmanager
    def _deterministic(self) -> Iterator[None]:
        if not self.deterministic or self.device.type != "cuda":
            yield
            return
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

    def _backward(self, loss: Tensor) -> None:
        scaled = self.scaler.scale(loss) if self.scaler is not None else loss
        backward: Callable[[], None] = scaled.backward
        if self.ranks is not None:
            self.ranks.backward(backward)
        else:
            backward()

    def _update(self, batch: Batch, number: int) -> None:
        """Optimizer step with the gradients there are; loss scaling skips it when one of them overflowed."""
        self._check_gradients()
        scaler = self.scaler
        if scaler is not None and all(p.grad is None for p in _held(self.optimizer)):
            scaler = None
        if scaler is not None and (self.max_grad_norm is not None or self.update_hooks is not None):
            scaler.unscale_(self.optimizer)
        if self.update_hooks is not None:
            self.update_hooks.after_backward()
        if self.guards_gradients and scaler is None:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = float(nn.utils.get_total_norm(gradients))
            if not math.isfinite(norm):
                words = self._not_finite(norm, number).replace("the loss is", "the norm of the gradients is", 1)
                raise BadLossError(words, norm, tuple(batch.ids.tolist()))
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], self.max_grad_norm)
        if self.settler is not None:
            self.settler.after_backward()
        self.watch.step(self.optimizer.step if scaler is None else lambda: scaler.step(self.optimizer))
        if self.settler is not None:
            self.settler.after_step()  # before masks: what is under one stays zero
        if scaler is not None:
            scaler.update()
        if self.update_hooks is not None:
            self.update_hooks.after_step()
        if self.average is not None:
            self.average.update()

    def _check_gradients(self) -> None:
        """On the first step of each set of active layers: every one of them must have got a gradient."""
        active = tuple(layer.name for layer in self.layers if any(p.requires_grad for p in layer.parameters))
        if active == self._checked:
            return
        for layer in self.layers:
            if layer.name in active and all(p.grad is None for p in layer.parameters):
                self.optimizer.zero_grad(set_to_none=True)
                raise TrainingError(
                    f"{layer.name} is trained but got no gradient, so it would silently stand still. Gradient "
                    "checkpointing with use_reentrant=True does this when nothing in front of it is trained: use "
                    "use_reentrant=False. Otherwise the loss does not depend on this layer."
                )
        self._checked = active

    def evaluate(
        self, source: BatchSource, average: bool = False, *, alone: bool = False
    ) -> tuple[float, float | None]:
        """Mean loss and accuracy over a data set in eval mode; nothing about training changes.

        Args:
            source: the batches.
            average: evaluate the running average of the weights instead of the weights.
            alone: other ranks are not asked for their share of the data.

        Raises:
            InvalidSettingError: when no average is kept, or none is there yet.
        """
        losses, right, count = 0.0, 0.0, 0.0
        has_accuracy = True
        with evaluating(self.model), self.private_draws("evaluate", 0), self.lent_average(average):
            for batch in source.epoch(0):
                if not len(batch):
                    continue  # fewer rows than ranks
                with self.autocast():
                    outputs, targets = self.run_model(self.model, self.to_device(batch.content))
                    loss = self.checked_loss(outputs, targets, batch).mean()
                accuracy = accuracy_of(outputs, targets)
                has_accuracy = has_accuracy and accuracy is not None
                losses += float(loss) * len(batch)
                right += (accuracy or 0.0) * len(batch)
                count += len(batch)
        if self.ranks is not None and not alone:
            losses, right, without, count = self.ranks.total([losses, right, not has_accuracy, count])
            has_accuracy = not without
        return losses / count, right / count if has_accuracy else None

    def lent_average(self, wanted: bool = True) -> AbstractContextManager[None]:
        """A block in which the model has the running average of its weights, where that is wanted.

        Raises:
            InvalidSettingError: when no average is kept, or none is there yet.
        """
        if not wanted:
            return nullcontext()
        if self.average is None:
            raise InvalidSettingError("no average of the weights is kept; make the session with ema=0.999, say.")
        return self.average.lent()

    def checked_loss(self, outputs: Any, targets: Any, batch: Batch) -> Tensor:
        """The loss; bad labels are reported by sample id before they reach the kernel."""
        if self.checks_labels:
            check_labels(outputs, targets, batch)
        loss = self.loss(outputs, targets)
        if not isinstance(loss, Tensor):
            raise InvalidSettingError(f"loss must return a tensor, got {type(loss).__name__}.")
        return loss.float()

    def find_layers(self, example: Batch, names: list[str] | None = None) -> LayerModules:
        """The layer modules of the model, found by running a small batch through it.

        Raises:
            LayerError, UnknownNameError: when the model cannot be cut as asked.
            DataError: when the model cannot take the data at all.
        """
        content = self.to_device(example.content)
        with self.private_draws("trace", 0):
            self._check_takes(content)
            self.layers = layers(self.model, content, names=names, forward=lambda m, x: self.run_model(m, x)[0])
        return self.layers

    def _check_takes(self, content: Any) -> None:
        try:
            with undisturbed(self.model), torch.no_grad():
                self.run_model(self.model, content)
        except EgeriaLabError:
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in tree_leaves(content) if isinstance(leaf, Tensor))
            words = str(error).strip().partition("\n")[0]
            raise DataError(
                f"the model cannot take the data: a batch of tensors of shape {shapes or 'none'} gave "
                f"{type(error).__name__}: {words}. Fit the model to the data, or give forward=.{_hint(content)}"
            ) from error

    @contextmanager
    def private_draws(self, *purpose: str | int) -> Iterator[None]:
        """Seed the generators that modules draw from for the length of a block, then give them back."""
        devices = [self.device] if self.device.type == "cuda" else []
        seed = derive_seed(self.seed, *purpose)
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every accelerator as well
            if devices:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(seed)
            yield

    def _set_train_mode(self) -> None:
        if self.model.training:
            return  # modules that the user put into eval mode inside a training model stay so
        self.model.train()
        self._buffer_owners = []
        for module in self._kept_in_eval:
            module.training = False

    def _not_finite(self, value: float, number: int) -> str:
        rate = self.optimizer.param_groups[0]["lr"]
        broken = next((name for name, p in self.model.named_parameters() if not torch.isfinite(p).all()), None)
        if broken is not None:
            return (
                f"the loss is {value} at step {number}, and so are weights already ({broken}): a gradient of an "
                "earlier step was not finite. Go back with undo() or to the last checkpoint, and train with "
                'on_bad_loss="skip" or "roll_back", which look at gradients too.'
            )
        return (
            f"the loss is {value} at step {number} (learning rate {rate:.3g}). The step was not applied. "
            "Lower the learning rate (session.override('optimizer.lr', …)) or check the inputs for values "
            "that are not finite."
        )


def _held(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _hint(content: Any) -> str:
    """A word about columns of lists, as a data set of Hugging Face's gives them, where a model wants tensors."""
    lists = [str(key) for key, value in content.items() if isinstance(value, list)] if isinstance(content, dict) else []
    if not lists:
        return ""
    return f' {", ".join(lists)} came as lists: a Hugging Face data set gives tensors after .with_format("torch").'
