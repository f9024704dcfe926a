"""Which technique saves how much of a run on paper: kept as stretches of steps in which nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from egeria_lab.algorithms.cost_model import floor_share
from egeria_lab.algorithms.costs import StepFlops
from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.algorithms.memory_model import MemoryRun, layer_sizes
from egeria_lab.algorithms.run_costs import Interval, RunFlops


class TechniqueCosts:
    """Counts freezing, cache, sieve and sparsity one after the other, and memory as the papers count it.

    Args:
        step: FLOPs of one step with nothing frozen, with its products.
        model: the model.
        layers: its layer modules.
        batch_size: samples a step.
    """

    def __init__(self, step: StepFlops, model: nn.Module, layers: LayerModules, batch_size: int) -> None:
        self.step = step
        self.names = layers.names
        self.floor = floor_share(step)
        self._sizes = layer_sizes(model, layers, step)
        self._run = RunFlops()
        self._memory = MemoryRun(batch_size=batch_size)
        self._key: tuple[Any, ...] | None = None
        self._open: dict[str, Any] = {}
        self._samples = 0.0
        self._dense_samples = 0.0
        self._served: dict[str, float] = {}

    def count(
        self,
        samples: int,
        *,
        frozen: Sequence[str],
        shares: Sequence[float],
        sieved: float,
        version: int = 0,
        sparse: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Count one step.

        Args:
            samples: samples that it trained on.
            frozen: names of frozen layers.
            shares: share of each layer's forward pass that really ran; the rest was served from the cache.
            sieved: share of the data set that is left out.
            version: another number whenever what `sparse` answers is something else.
            sparse: gives densities, unfrozen and targets of an `Interval`, and ``dense_gradients``: whether the
                step that is counted computed dense weight gradients. Asked when something changed, so whoever
                answers True there has given that step another `version`.
        """
        key = (tuple(frozen), sieved, version)
        if key != self._key:
            self._close()
            self._key = key
            more = dict(sparse()) if sparse is not None else {}
            self._dense_samples += samples if more.pop("dense_gradients", False) else 0
            self._open = {"frozen": tuple(frozen), "sieved": sieved, **more}
        self._samples += samples / (1 - sieved)
        for name, share in zip(self.names, shares, strict=True):
            if share < 1 and name in frozen:
                self._served[name] = self._served.get(name, 0.0) + (1 - share) * samples / (1 - sieved)

    def totals(self) -> tuple[RunFlops, MemoryRun]:
        """The totals so far, copies."""
        run, memory = RunFlops(), MemoryRun()
        run.load_state_dict(self._run.state_dict())
        memory.load_state_dict(self._memory.state_dict())
        interval = self._interval()
        if interval is not None:
            run.add(self.step, interval)
            memory.add(self._sizes, interval)
        return run, memory

    def state_dict(self) -> dict[str, Any]:
        """The totals; the stretch under way is closed first."""
        self._close()
        return {"run": self._run.state_dict(), "memory": self._memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self._key, self._samples, self._dense_samples, self._served = None, 0.0, 0.0, {}
        self._run.load_state_dict(state["run"])
        self._memory.load_state_dict(state["memory"])

    def _interval(self) -> Interval | None:
        if not self._samples:
            return None
        cached = {name: min(1.0, served / self._samples) for name, served in self._served.items()}
        return Interval(
            samples=self._samples, cached=cached, dense_gradient_samples=self._dense_samples, **self._open
        )  # fmt: skip

    def _close(self) -> None:
        interval = self._interval()
        if interval is not None:
            self._run.add(self.step, interval)
            self._memory.add(self._sizes, interval)
        self._samples, self._dense_samples, self._served = 0.0, 0.0, {}
