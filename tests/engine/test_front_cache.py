"""The activation cache inside a session: bit-equal training, fewer FLOPs, and right after every change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import egeria_lab as lab
from egeria_lab.events import CacheBuilt, CacheNotice

SMALL = {"num_samples": 256, "num_valid": 64, "shape": (1, 12, 12), "noise": 0.3}


def session(cache: lab.ActivationCache | None, **options: Any) -> lab.Session:
    data = lab.data.load("synthetic", **SMALL)
    return lab.Session("resnet8", data, epochs=8, batch_size=64, freeze=None, cache=cache, **options)


def story(run: lab.Session) -> list[float]:
    """Freeze, freeze more, thaw, freeze again: 28 steps."""
    run.step(4)
    run.freeze("layers.0")
    run.step(8)
    run.freeze("layers.1")
    run.step(4)
    run.thaw("layers.1")
    run.step(4)
    run.freeze("layers.1")
    run.freeze("layers.2")
    run.step(8)
    return [float(loss) for loss in run.history.steps["loss"]]


def always_on(**options: Any) -> lab.ActivationCache:
    return lab.ActivationCache(self_profiling=False, **options)


@pytest.mark.parametrize("augment", [None, lab.Augment(crop_padding=2, flip=True, noise=0.1, views=2)])
def test_loss_trace_is_bit_equal_and_fewer_flops_are_executed(augment: lab.Augment | None) -> None:
    """Traps 85 and 90: exact, with replayable augmentation too, and counted."""
    plain, cached = session(None, augment=augment), session(always_on(), augment=augment)
    assert story(plain) == story(cached)
    assert cached.cache is not None
    assert cached.cache.statistics.hits > 0
    saved = [run.savings().book.flops_saved_fraction for run in (plain, cached)]
    assert saved[1] > saved[0] + 0.01
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, cached.model.state_dict()[name])
    cached.close()


def test_augmentation_changes_training_and_repeats_by_seed() -> None:
    augment = lab.Augment(noise=0.5)
    first, again, without = (session(None, augment=a) for a in (augment, augment, None))
    for run in (first, again, without):
        run.step(4)
    losses = [run.history.steps["loss"].tolist() for run in (first, again, without)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_weights_loaded_into_the_front_empty_the_cache() -> None:
    plain, cached = session(None), session(always_on())
    losses = []
    for run in (plain, cached):
        run.freeze("layers.0")
        run.step(8)
        state = {name: 1.1 * value if value.is_floating_point() else value
                 for name, value in run.model.state_dict().items()}  # fmt: skip
        run.model.load_state_dict(state)
        run.step(4)
        losses.append(run.history.steps["loss"].tolist())
    assert losses[0] == losses[1]
    notices = [e for e in cached.events.of(CacheNotice) if isinstance(e, CacheNotice)]
    assert any("weights or buffers of the frozen front were changed" in e.message for e in notices)
    cached.close()


def test_directory_deleted_mid_run_costs_one_warning_and_nothing_else(tmp_path: Path) -> None:
    """Trap 88: the run goes on by computing."""
    folder = tmp_path / "cache"
    folder.mkdir()
    plain, cached = session(None), session(always_on(directory=folder))
    for run in (plain, cached):
        run.freeze("layers.0")
        run.step(6)
    shutil.rmtree(folder)
    for run in (plain, cached):
        run.step(6)
        run.freeze("layers.1")
        run.step(6)
    assert plain.history.steps["loss"].tolist() == cached.history.steps["loss"].tolist()
    notices = [
        e for e in cached.events.of(CacheNotice) if isinstance(e, CacheNotice) and e.kind not in ("invalidated",)
    ]
    assert len(notices) <= 1
    cached.close()


def test_two_sessions_in_one_directory_do_not_meet(tmp_path: Path) -> None:
    alone = session(None)
    first, second = session(always_on(directory=tmp_path)), session(always_on(directory=tmp_path), seed=1)
    traces = []
    for run in (alone, first, second):
        run.freeze("layers.0")
        run.step(8)
        traces.append(run.history.steps["loss"].tolist())
    assert traces[0] == traces[1] != traces[2]
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


class Jittered(Dataset[tuple[torch.Tensor, int]]):
    """Draws its own noise at every call."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(1, 12, 12), index % 10


class RandomCrop:
    """Stands for a transform with a random name of its own."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_data_set_that_draws_its_own_numbers_is_refused_with_the_fix() -> None:
    model = lab.models.build("mlp", input_shape=(1, 12, 12), num_classes=10)
    with pytest.raises(lab.InvalidSettingError, match=r"Jittered returned two different results.*Augment"):
        lab.Session(model, (Jittered(), Jittered()), freeze=None, cache=lab.ActivationCache())


def test_a_transform_that_cannot_be_replayed_is_named_with_the_fix() -> None:
    """Trap 86: the message names the transform and what to do."""
    with pytest.raises(lab.InvalidSettingError, match=r"RandomCrop.*Augment"):
        session(None, augment=RandomCrop())


def test_the_first_rows_are_announced_as_an_event() -> None:
    cached = session(always_on())
    cached.freeze("layers.0")
    cached.step(2)
    assert len(cached.events.of(CacheBuilt)) == 1
    cached.close()


def test_cache_settings_are_checked() -> None:
    with pytest.raises(lab.InvalidSettingError, match="dtype"):
        lab.ActivationCache(dtype="float8")
    with pytest.raises(lab.InvalidSettingError, match="cache"):
        session({"dtype": "float32"})  # type: ignore[arg-type]


class Scaled(Dataset[tuple[torch.Tensor, int]]):
    """Has a transform that its owner may exchange."""

    def __init__(self, data: lab.Data) -> None:
        self.plain = data.train
        self.transform: Any = None

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.plain[index]
        return (image if self.transform is None else self.transform(image)), int(label)


class Twice:
    """A transform without randomness, declared so."""

    replayable = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_a_transform_exchanged_mid_run_empties_the_cache() -> None:
    data = lab.data.load("synthetic", **SMALL)
    traces = []
    for cache in (None, always_on()):
        dataset = Scaled(data)
        model = lab.models.build("resnet8", input_shape=(1, 12, 12), num_classes=10)
        run = lab.Session(model, (dataset, data.valid), epochs=8, batch_size=64, freeze=None, cache=cache)
        run.freeze("layers.0")
        run.step(8)
        dataset.transform = Twice()
        run.step(4)
        traces.append(run.history.steps["loss"].tolist())
        if cache is not None:
            assert any("transform" in e.sentence() for e in run.events.of(CacheNotice))
        run.close()
    assert traces[0] == traces[1]


def test_the_ledger_tells_what_the_cache_served_and_cost() -> None:
    cached = session(always_on())
    cached.freeze("layers.0")
    cached.step(8)
    ledger = cached.savings()
    told = ledger.to_dict()["cache"]
    assert told["hits"] == 4 * 64
    assert "256 of 512 rows served" in repr(ledger)
    cached.close()


def test_cache_and_augmentation_together_on_a_tensor_data_set() -> None:
    """Batches of a list, as torch collates them, keep their form when they are augmented."""
    data = lab.data.load("synthetic", **SMALL)
    dataset = torch.utils.data.TensorDataset(data.train.inputs, data.train.targets)  # type: ignore[attr-defined]
    traces = []
    for cache in (None, always_on()):
        model = lab.models.build("resnet8", input_shape=(1, 12, 12), num_classes=10)
        augment = lab.Augment(flip=True, views=2)
        run = lab.Session(model, (dataset, dataset), epochs=8, batch_size=64, freeze=None, cache=cache, augment=augment)
        run.freeze("layers.0")
        run.step(10)
        traces.append(run.history.steps["loss"].tolist())
        run.close()
    assert traces[0] == traces[1]


def test_a_front_that_was_thawed_trained_and_frozen_again_is_not_read_from_old_rows() -> None:
    traces = []
    for cache in (None, always_on()):
        run = session(cache)
        run.freeze("layers.0")
        run.step(8)
        run.thaw("layers.0")
        run.step(4)
        run.freeze("layers.0")
        run.step(8)
        traces.append(run.history.steps["loss"].tolist())
        if cache is not None:  # at once and with the true reason, not only when changed tensors are noticed
            assert any("layers.0 was thawed" in e.sentence() for e in run.events.of(CacheNotice))
        run.close()
    assert traces[0] == traces[1]
