"""One forward pass with the frozen prefix taken from the cache: the model, the cut and the rows together.

For each batch: rows that are held are loaded; missing ones are computed, from the nearest earlier boundary
that holds them or else from the inputs; all are put together and the rest of the model runs on them. Before a
boundary is used for the first time it must pass: a cut proved by replay, a prefix that repeats itself and
draws nothing, outputs that are the same in halves, rows that do not depend on their batch. What does not pass
runs as if there were no cache, and the reason is an event.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from egeria_lab.algorithms.prefix import PrefixRunner
from egeria_lab.algorithms.row_exactness import Compute, RowExactness
from egeria_lab.data.activation_cache import CachedPrefix, OnEvent
from egeria_lab.data.row_format import round_trip


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """How the prefix of one batch was come by.

    Attributes:
        boundary: the cut, or None when the whole model ran.
        loaded: rows that were loaded.
        computed: rows that were computed from the inputs, those that only fill up a size included.
        from_boundary: an earlier boundary that fed some rows, or None.
        from_earlier: rows that were computed from there.
    """

    boundary: int | None = None
    loaded: int = 0
    computed: int = 0
    from_boundary: int | None = None
    from_earlier: int = 0


@dataclass(slots=True)
class _Crossing:
    """What a boundary that has passed needs: the structure of its value, and the sizes that are proven."""

    spec: TreeSpec
    constants: list[Any]
    exactness: RowExactness

    def join(self, tensors: list[Tensor]) -> Any:
        parts = iter(tensors)
        leaves = [next(parts) if x is _TENSOR else x for x in self.constants]
        return tree_unflatten(leaves, self.spec)


_TENSOR = object()


class CachedForward:
    """Runs the model on a batch; with a frozen prefix, on what the cache holds of it.

    Args:
        runner: the model and its cuts.
        cache: the rows.
        batch_size: the usual number of samples in a batch: results of batches of this size are the standard
            that every other way of computing a row must meet.
        on_event: told when a boundary cannot be used, as a kind and one sentence.

    Example:
        >>> from torch import nn
        >>> from egeria_lab.algorithms.layers import layers
        >>> from egeria_lab.data.activation_cache import ActivationCache, CachedPrefix
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> batch, ids, views = torch.randn(16, 4), torch.arange(16), torch.zeros(16, dtype=torch.int64)
        >>> _ = model[0].requires_grad_(False)
        >>> cache = CachedPrefix(ActivationCache(), num_samples=16)
        >>> forward = CachedForward(PrefixRunner(model, layers(model, batch), batch), cache, 16)
        >>> for epoch in range(2):
        ...     print(torch.equal(forward(0, ids, views, batch), model(batch)), forward.last.loaded)
        True 0
        True 16
        >>> cache.close()
    """

    def __init__(
        self,
        runner: PrefixRunner,
        cache: CachedPrefix,
        batch_size: int,
        *,
        on_event: OnEvent | None = None,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.batch_size = batch_size
        self.last = PrefixUse()
        self._on_event: OnEvent = on_event or (lambda kind, message: None)
        self._crossings: dict[int, _Crossing | None] = {}  # None: refused
        self._kernels = _kernel_choice()

    def __call__(self, boundary: int | None, ids: Tensor, views: Tensor, content: Any) -> Any:
        """The outputs of the model for one batch, bit-equal to an ordinary forward pass when the cache is exact.

        Args:
            boundary: position of the last layer module of the frozen prefix; None when there is none.
            ids: int64 sample ids, shape ``(b,)``.
            views: int64 views, shape ``(b,)``.
            content: the batch, augmented as `views` say.
        """
        self.last = PrefixUse()
        crossing = None if boundary is None or not len(ids) else self._passed(boundary, content)
        if boundary is None or crossing is None:
            return self.runner.run(content)
        if not crossing.exactness.holds(len(ids), self._compute(boundary, content), len(ids)):
            return self.runner.run(content)
        tensors = self._tensors(boundary, crossing, ids, views, content)
        if tensors is None:
            return self.runner.run(content)
        return self.runner.run_from(boundary, crossing.join(tensors), content)

    def invalidate(self, reason: str) -> None:
        """Forget rows and proofs: after a thaw, a load of weights, another transform, precision or device."""
        self._crossings.clear()
        self.cache.invalidate(reason)

    def _passed(self, boundary: int, content: Any) -> _Crossing | None:
        """The boundary's crossing when it may be used now."""
        if self._kernels != _kernel_choice():
            self._kernels = _kernel_choice()
            self.invalidate("threads, precision or kernels were changed")
        if self.cache.is_off(boundary):
            return None
        if boundary not in self._crossings:
            made = self._examine(boundary, content)
            if isinstance(made, str):
                name = self.runner.layers[boundary].name
                self._on_event("refused", f"the activation cache cannot be used behind {name!r}: {made.rstrip('.')}.")
            self._crossings[boundary] = None if isinstance(made, str) else made
        return self._crossings[boundary]

    def _examine(self, boundary: int, content: Any) -> _Crossing | str:
        through = round_trip if self.cache.settings.exact else None
        reason = self.runner.verify(boundary, content, through)
        if reason:
            return reason
        leaves, spec = tree_flatten(self.runner.run_until(boundary, content))
        constants = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]
        exactness = RowExactness(self.batch_size, exact=self.cache.settings.exact)
        if not exactness.holds(self.batch_size, self._compute(boundary, content), self.runner.rows(content)):
            return "a sample's output depends on its place or its neighbours in the batch" + (
                " in the last bits; dtype='float16' accepts that" if self._nearly(boundary, content) else ""
            )
        return _Crossing(spec, constants, exactness)

    def _nearly(self, boundary: int, content: Any) -> bool:
        rough = RowExactness(self.batch_size, exact=False)
        return rough.holds(self.batch_size, self._compute(boundary, content), self.runner.rows(content))

    def _compute(self, boundary: int, content: Any) -> Compute:
        def compute(index: Tensor) -> list[Tensor]:
            return _tensors(self.runner.run_until(boundary, self.runner.take(content, index)))

        return compute

    def _tensors(
        self, boundary: int, crossing: _Crossing, ids: Tensor, views: Tensor, content: Any
    ) -> list[Tensor] | None:
        """What crosses the cut for this batch, put together from all there is; new rows are kept."""
        tensors, hit = self.cache.fetch(boundary, ids, views)
        missing = (~hit).nonzero().flatten()
        device = _device(content)
        loaded = None if tensors is None else [x.to(device, non_blocking=True) for x in tensors]
        if loaded is not None and not len(missing):
            self.last = PrefixUse(boundary, len(ids))
            return loaded
        compute = self._compute(boundary, content)
        size = crossing.exactness.size_for(len(missing), compute, len(ids))
        index = torch.arange(len(ids)) if size == len(ids) else missing[torch.arange(size) % len(missing)]
        computed = self._rows(boundary, ids, views, content, index, len(ids) - len(missing))
        needed = missing if size == len(ids) else torch.arange(len(missing))
        fresh = computed if len(needed) == len(computed[0]) else [x[needed.to(x.device)] for x in computed]
        self.cache.put(boundary, ids[missing], views[missing], fresh)
        if loaded is None or (size == len(ids) and self.cache.settings.exact):
            return computed
        for whole, part in zip(loaded, fresh, strict=True):
            whole[missing.to(whole.device)] = part
        return loaded

    def _rows(
        self, boundary: int, ids: Tensor, views: Tensor, content: Any, index: Tensor, loaded: int
    ) -> list[Tensor]:
        """Compute the rows `index`: from an earlier boundary when it holds them all, else from the inputs."""
        whole = len(index) == len(ids)
        part = content if whole else self.runner.take(content, index)
        earlier = self.cache.nearest(boundary - 1)
        crossing = None if earlier is None else self._crossings.get(earlier)
        if earlier is not None and crossing is not None:
            sizes = crossing.exactness
            if sizes.holds(len(index), self._compute(earlier, content), len(ids)):
                tensors, hit = self.cache.fetch(earlier, ids[index], views[index])
                if tensors is not None and bool(hit.all()):
                    device = _device(content)
                    value = crossing.join([x.to(device, non_blocking=True) for x in tensors])
                    made = self.runner.run_until(boundary, part, start=earlier, value=value)
                    self.last = PrefixUse(boundary, loaded, 0, earlier, len(index))
                    return _tensors(made)
        start = _now(part)
        made = self.runner.run_until(boundary, part)
        self.cache.note_recompute(_now(part) - start, len(index))
        self.last = PrefixUse(boundary, loaded, len(index))
        return _tensors(made)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]


def _device(content: Any) -> torch.device:
    return next((x.device for x in _tensors(content)), torch.device("cpu"))


def _now(content: Any) -> float:
    """Seconds, once the device has finished what it was given."""
    device = _device(content)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _kernel_choice() -> tuple[object, ...]:
    """What decides which kernels run, besides the shapes: when it changes, results may change in their last bits."""
    autocast = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
        for kind in ("cpu", "cuda")
    ]
    return (
        torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(), *autocast,
    )  # fmt: skip
