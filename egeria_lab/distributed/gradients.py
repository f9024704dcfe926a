"""Average gradients over ranks by torch's own `DistributedDataParallel`, wrapped anew whenever the frozen set changes.

A wrapper decides once, when it is made, which parameters take part. Made anew after each freeze and thaw, frozen
layers are in no bucket and send no byte.
"""

import time
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from egeria_lab.distributed.group import Group, is_lost_rank, lost
from egeria_lab.errors import InvalidSettingError


class _ForwardPass(nn.Module):
    """A whole training forward pass as one module, whatever it does inside: skip a cached front, or run user code."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, *arguments: Any) -> Any:
        return self._run(*arguments)


class GradientExchange:
    """Runs forward passes so that the backward pass averages gradients over all ranks.

    Args:
        model: the model; the same weights are sent from rank 0 to all others when this is made.
        run: the forward pass.
        group: the ranks.
        device: where the model is.
        some_unused: some parameters may get no gradient in a step, which has to be looked for at each one.

    Attributes:
        bytes_sent: bytes of gradients put into all-reduces so far, counted by a communication hook.
        step_bytes: the same of the newest step.
        rewraps: how often the wrapper was made.
        rewrap_seconds: time that took.

    Raises:
        InvalidSettingError: for a model that is wrapped for several processes already.
    """

    def __init__(
        self, model: nn.Module, run: Callable[..., Any], group: Group, device: torch.device, some_unused: bool = False
    ) -> None:
        check_bare(model)
        self.model = model
        self.group = group
        self.bytes_sent = 0
        self.step_bytes = 0
        self.rewraps = 0
        self.rewrap_seconds = 0.0
        self._pass = _ForwardPass(model, run)
        self._device = device
        self._wrapped: Any = None
        self._trained: tuple[bool, ...] = ()
        self._some_unused = some_unused

    def __call__(self, *arguments: Any) -> Any:
        """One forward pass of the training."""
        self.step_bytes = 0
        trained = tuple(p.requires_grad for p in self.model.parameters())
        if self._wrapped is None or trained != self._trained:
            self._wrap(trained)
        return self._wrapped(*arguments)

    def guarded(self, work: Callable[[], Any]) -> Any:
        """Run a backward pass; a rank that is gone becomes one sentence."""
        try:
            return work()
        except RuntimeError as error:
            if is_lost_rank(error):
                raise lost(self.group.rank, self.group.size, "gradients", error) from error
            raise

    def close(self) -> None:
        """Take the wrapper off; the model is as it was."""
        self._wrapped = None

    def _wrap(self, trained: tuple[bool, ...]) -> None:
        start = time.perf_counter()
        self._wrapped = None  # the old one gives its hooks back before the new one hangs its own
        self._trained = trained
        wrapped = DistributedDataParallel(
            self._pass,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            init_sync=self.rewraps == 0,
            find_unused_parameters=self._some_unused,
            **_buffers_stay(self.rewraps == 0),
        )
        wrapped.register_comm_hook(None, self._count_and_average)
        self._wrapped = wrapped
        self.rewraps += 1
        self.rewrap_seconds += time.perf_counter() - start

    def _count_and_average(self, _state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        size = buffer.numel() * buffer.element_size()
        self.step_bytes += size
        self.bytes_sent += size
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def _buffers_stay(first: bool) -> dict[str, Any]:
    """Buffers are made equal once; later, running statistics are averaged after each step instead of overwritten."""
    known = signature(DistributedDataParallel).parameters
    wanted = {"forward_sync_buffers": False, "init_sync_buffers": first}
    found = {name: value for name, value in wanted.items() if name in known}
    return found or {"broadcast_buffers": False}


def check_bare(model: nn.Module) -> None:
    """Raise for a model that somebody has already wrapped for several processes.

    Raises:
        InvalidSettingError: naming the wrapper and the way out.
    """
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "DistributedDataParallel" in kinds:
            raise InvalidSettingError(
                "the model is wrapped in DistributedDataParallel, which fixes what is exchanged for good; give the "
                "bare module, it is wrapped here, and anew at each freeze."
            )
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise InvalidSettingError(
                "the model is sharded (FSDP): its flat units want all their parameters trained or all frozen, so "
                "single layers cannot freeze. Give the bare module; it is replicated on every rank."
            )


def running_statistics(model: nn.Module, frozen: set[nn.Module]) -> list[Tensor]:
    """Running statistics of batch norm that moved in a step; frozen ones stand still and are left out.

    Args:
        model: the model.
        frozen: modules that are frozen.
    """
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module not in frozen:
            found += [x for x in (module.running_mean, module.running_var) if x is not None]
    return found


def set_statistics(found: Sequence[Tensor], flat: Tensor) -> None:
    """Replace running statistics by their mean over ranks.

    The mean of variances leaves the variance between the ranks' means out, as every data-parallel training without
    synchronised batch norm does.

    Args:
        found: as from `running_statistics`.
        flat: the new values, one after another.
    """
    with torch.no_grad():
        for x, part in zip(found, torch.split(flat, [x.numel() for x in found]), strict=True):
            x.copy_(part.view_as(x))
