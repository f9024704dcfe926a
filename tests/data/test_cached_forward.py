"""`egeria_lab.data.cached_forward`: training with the cache is training without it, bit for bit, and less work."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from egeria_lab.algorithms.freezing import Freezer
from egeria_lab.algorithms.layers import layers
from egeria_lab.algorithms.prefix import PrefixRunner
from egeria_lab.data.activation_cache import ActivationCache, CachedPrefix, CacheStatistics
from egeria_lab.data.augment import Augment
from egeria_lab.data.cached_forward import CachedForward
from egeria_lab.models.registry import build

SAMPLES, BATCH, SIZE = 70, 16, 8  # four whole batches and a rest of 6
INPUTS = torch.randn(SAMPLES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(4, (SAMPLES,), generator=torch.Generator().manual_seed(1))


def resnet() -> nn.Module:
    return build("resnet8", input_shape=(1, SIZE, SIZE), num_classes=4)


def mlp() -> nn.Module:
    return build("mlp", input_shape=(1, SIZE, SIZE), num_classes=4, dropout=0.1)


def transformer() -> nn.Module:
    return build("transformer", input_shape=(1, SIZE, SIZE), num_classes=4, dim=16, depth=2, dropout=0.1, patch=4)


class Run:
    """A training loop by hand: what a session does with the cache, and nothing else."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        settings: ActivationCache | None,
        augment: Augment | None = None,
    ) -> None:
        self.model = make().train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.layers = layers(self.model, INPUTS[:2])
        self.freezer = Freezer(self.model, {x.name: (x.modules, x.parameters) for x in self.layers}, self.optimizer)
        self.augment = augment
        self.events: list[tuple[str, str]] = []
        self.losses: list[float] = []
        self.flops: list[int] = []
        self.used: list[Any] = []
        self.boundary: int | None = None
        self.steps = self.epochs = 0
        self.forward: CachedForward | None = None
        self.runner = PrefixRunner(self.model, self.layers, (INPUTS[:3], TARGETS[:3]), self.whole)
        if settings is not None:
            cache = CachedPrefix(
                settings, num_samples=SAMPLES, views=augment.views if augment else 1, on_event=self.on_event
            )
            self.forward = CachedForward(self.runner, cache, BATCH, on_event=self.on_event)

    def on_event(self, kind: str, message: str) -> None:
        self.events.append((kind, message))

    def whole(self, model: nn.Module, content: Any) -> Any:
        return model(content[0]), content[1]

    def freeze(self, boundary: int) -> None:
        for layer in self.layers[: boundary + 1]:
            self.freezer.freeze(layer.name)
        self.boundary = boundary

    def thaw(self) -> None:
        for layer in self.layers:
            self.freezer.thaw(layer.name)
        self.boundary = None
        if self.forward is not None:
            self.forward.invalidate("all layers were thawed")

    def epoch(self, batch_size: int = BATCH) -> None:
        generator = torch.Generator().manual_seed(self.epochs)
        batches = [(ids, self.views(ids)) for ids in torch.randperm(SAMPLES, generator=generator).split(batch_size)]
        if self.forward is not None:
            self.forward.cache.announce(batches)
        for ids, views in batches:
            self.step(ids, views)
        self.epochs += 1

    def views(self, ids: Tensor) -> Tensor:
        return self.augment.view_of(self.epochs, ids) if self.augment else torch.zeros_like(ids)

    def step(self, ids: Tensor, views: Tensor) -> None:
        inputs = self.augment(INPUTS[ids], ids, views) if self.augment else INPUTS[ids]
        content = (inputs, TARGETS[ids])
        torch.manual_seed(self.steps)
        self.optimizer.zero_grad()
        with FlopCounterMode(display=False) as counter:
            if self.forward is None:
                outputs, targets = self.whole(self.model, content)
            else:
                outputs, targets = self.forward(self.boundary, ids, views, content)
                self.used.append(self.forward.last)
            loss = F.cross_entropy(outputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.item())
        self.flops.append(counter.get_total_flops())
        self.steps += 1

    @property
    def statistics(self) -> CacheStatistics:
        assert self.forward is not None
        return self.forward.cache.statistics

    def close(self) -> None:
        if self.forward is not None:
            self.forward.cache.close()


def story(run: Run) -> Run:
    """Train, freeze, train, freeze more, train, thaw, train, freeze again, train."""
    run.epoch()
    run.freeze(0)
    run.epoch()
    run.epoch()
    run.freeze(1)
    run.epoch()
    run.epoch()
    run.thaw()
    run.epoch()
    run.freeze(1)
    run.epoch()
    run.epoch()
    run.close()
    return run


def settings(tmp_path: Path, **given: Any) -> ActivationCache:
    """Without self-profiling: on models this small, whether loading is faster is left to chance."""
    return ActivationCache(directory=tmp_path, self_profiling=False, **given)


AUGMENT = Augment(crop_padding=1, flip=True, cutout=2, noise=0.1, views=2)


@pytest.mark.parametrize("augment", [None, AUGMENT], ids=["plain", "augmented"])
@pytest.mark.parametrize("make", [resnet, mlp, transformer])
def test_loss_traces_are_bit_equal(make: Any, augment: Augment | None, tmp_path: Path) -> None:
    """Row 90: the same trace with the cache on or off, mixed batches, gap layers and a thaw included."""
    plain = story(Run(make, None, augment))
    cached = story(Run(make, settings(tmp_path), augment))
    assert plain.losses == cached.losses
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.model.state_dict().values(), cached.model.state_dict().values(), strict=True)
    )
    assert cached.statistics.hits > 100
    assert [kind for kind, _ in cached.events] == ["built", "built", "invalidated", "built"]
    assert not any("forward" in vars(module) for module in cached.model.modules())


def test_fewer_flops_are_executed(tmp_path: Path) -> None:
    plain, cached = Run(resnet, None), Run(resnet, settings(tmp_path))
    for run in (plain, cached):
        run.freeze(1)
        for _ in range(3):
            run.epoch()
        run.close()
    assert plain.losses == cached.losses
    last = slice(-5, None)
    assert [use.loaded for use in cached.used[last]] == [BATCH] * 4 + [6]
    model, runner = plain.model, plain.runner
    model.eval()
    assert runner.check(1) == ""  # the proof runs the model too
    with FlopCounterMode(display=False) as prefix:
        runner.run_until(1, (INPUTS, TARGETS))
    assert sum(plain.flops[last]) - sum(cached.flops[last]) == prefix.get_total_flops() > 0


def test_the_old_cache_feeds_the_gap_layers_only(tmp_path: Path) -> None:
    run = Run(resnet, settings(tmp_path))
    run.freeze(0)
    run.epoch()
    run.freeze(2)
    run.epoch()
    assert [(use.from_boundary, use.from_earlier, use.computed) for use in run.used[-5:]] == [
        (0, 16, 0), (0, 16, 0), (0, 16, 0), (0, 16, 0), (0, 6, 0),
    ]  # fmt: skip
    stem = run.model.get_submodule("layers.0.conv")
    stem.register_forward_pre_hook(lambda _m, _x: pytest.fail("the stem ran"))
    run.epoch()
    assert [use.loaded for use in run.used[-5:]] == [16, 16, 16, 16, 6]
    run.close()


def test_a_small_budget_computes_the_missing_rows_only(tmp_path: Path) -> None:
    plain, cached = Run(resnet, None), Run(resnet, settings(tmp_path, max_bytes=16 * SIZE * SIZE * 4 * 40))
    for run in (plain, cached):
        run.freeze(1)
        for _ in range(3):
            run.epoch()
        run.close()
    assert plain.losses == cached.losses
    assert sum(use.loaded for use in cached.used[5:]) > 0
    mixed = [use for use in cached.used[5:] if use.loaded]
    assert all(use.computed % 2 == 0 and use.computed <= BATCH for use in mixed)
    assert any(use.computed < BATCH for use in mixed)
    assert sum(cached.flops[-5:]) < sum(plain.flops[-5:])


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 5e-2)])
def test_small_dtypes_stay_close(dtype: str, bound: float, tmp_path: Path) -> None:
    plain, cached = Run(resnet, None), Run(resnet, settings(tmp_path, dtype=dtype))
    for run in (plain, cached):
        run.freeze(1)
        run.epoch()
        run.epoch()
        run.close()
    assert plain.losses[:5] == cached.losses[:5]  # what is computed is used as it is
    assert plain.losses[5:] != cached.losses[5:]
    assert plain.losses == pytest.approx(cached.losses, abs=bound)
    assert cached.statistics.relative_error > 0


def test_turning_itself_off_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, cached = Run(resnet, None), Run(resnet, ActivationCache(directory=tmp_path))
    assert cached.forward is not None
    monkeypatch.setattr(cached.forward.cache, "note_recompute", lambda seconds, rows: None)
    # Computing costs nothing.
    for run in (plain, cached):
        run.freeze(1)
        for _ in range(4):
            run.epoch()
            if run.forward is not None:
                run.forward.cache._costs.computed(0.0, 1)
        run.close()
    assert plain.losses == cached.losses
    assert [kind for kind, _ in cached.events] == ["built", "off"]
    assert cached.used[-1].boundary is None


def test_a_directory_that_vanishes_changes_nothing(tmp_path: Path) -> None:
    """Row 88."""
    plain, cached = Run(resnet, None), Run(resnet, settings(tmp_path))
    for run in (plain, cached):
        run.freeze(1)
        run.epoch()
        run.epoch()
        shutil.rmtree(tmp_path, ignore_errors=True)
        run.epoch()
        run.close()
    assert plain.losses == cached.losses
    assert [kind for kind, _ in cached.events] == ["built", "lost"]
    assert cached.used[-1].boundary is None


def test_new_weights_in_the_prefix_are_not_served_from_old_rows(tmp_path: Path) -> None:
    plain, cached = Run(resnet, None), Run(resnet, settings(tmp_path))
    for run in (plain, cached):
        run.freeze(1)
        run.epoch()
        with torch.no_grad():
            run.layers[0].parameters[0].mul_(1.5)
        if run.forward is not None:
            run.forward.invalidate("weights were loaded")
        run.epoch()
        run.close()
    assert plain.losses == cached.losses


def test_another_number_of_threads_starts_afresh(tmp_path: Path) -> None:
    run = Run(mlp, settings(tmp_path))
    run.freeze(0)
    run.epoch()
    torch.set_num_threads(2)
    run.epoch()
    assert run.used[-5].loaded == 0
    assert "invalidated" in [kind for kind, _ in run.events]
    run.close()


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x.flatten(1)), 0.5, self.training)
        out: Tensor = self.head(self.second(x))
        return out


class Neighbours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        x = self.second(x - x.mean(0))
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize(
    ("make", "reason"), [(Drawing, "draws random numbers"), (Neighbours, "neighbours in the batch")]
)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_cannot_be_cached_runs_as_ever_and_says_why_once(
    make: Any, reason: str, dtype: str, tmp_path: Path
) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = make()
        return model

    plain, cached = Run(seeded, None), Run(seeded, settings(tmp_path, dtype=dtype))
    for run in (plain, cached):
        run.freeze(1)
        run.epoch()
        run.epoch()
        run.close()
    assert plain.losses == cached.losses
    assert [kind for kind, _ in cached.events] == ["refused"]
    assert reason in cached.events[0][1]
    assert "'second'" in cached.events[0][1]


class Wide(nn.Module):
    """Matrix products whose few rows take another kernel than many (on most processors)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 512), nn.Linear(512, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.first(x.flatten(1))))
        return out


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 35])
def test_any_batch_size_whatever_the_kernels_do(size: int, tmp_path: Path) -> None:
    """The rest of an epoch, or a loader with another batch size, in the middle of a run."""

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return Wide()

    plain, cached = Run(seeded, None), Run(seeded, settings(tmp_path))
    for run in (plain, cached):
        run.freeze(0)
        run.epoch()
        run.epoch(size)
        run.epoch()
        run.close()
    assert plain.losses == cached.losses
    assert cached.used[-5].loaded == BATCH
