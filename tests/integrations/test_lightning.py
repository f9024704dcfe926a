"""The Lightning callback in a real Lightning `Trainer`."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import egeria_lab as lab
from egeria_lab.events import LayerFrozen
from egeria_lab.integrations import lightning as ours

lightning = pytest.importorskip("lightning")

RULE = lab.Plasticity(interval_steps=4, window=3, patience=2, tolerance=1.2, bootstrap_change=5.0, refresh_evals=30)
MARGIN = 0.03
pytestmark = pytest.mark.filterwarnings("ignore")


class Digits(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, kind: str = "sgd") -> None:
        super().__init__()
        self.net = lab.models.build("mlp", input_shape=(1, 8, 8), num_classes=10, seed=3)
        self.kind = kind
        self.trace: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.trace.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        if self.kind == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=2e-3)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    data = lab.data.load("digits")
    generator = torch.Generator().manual_seed(0)
    return DataLoader(data.train, batch_size=32, shuffle=True, generator=generator), DataLoader(
        data.valid, batch_size=360
    )


def fit(module: Any, *callbacks: Any, folder: Path | None = None, resume: Path | None = None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, default_root_dir=folder, callbacks=list(callbacks), **options,
        )  # fmt: skip
        trainer.fit(module, *loaders(), ckpt_path=None if resume is None else str(resume))
    return trainer


def test_a_module_is_fitted_freezes_saves_and_is_as_good() -> None:
    plain, frozen = Digits(), Digits()
    expected = fit(plain, max_epochs=6).callback_metrics["val_acc"]
    callback = ours.FreezeCallback(RULE)
    reached = fit(frozen, callback, max_epochs=6).callback_metrics["val_acc"]
    assert float(reached) >= float(expected) - MARGIN
    assert callback.freezer is not None
    assert callback.freezer.events.of(LayerFrozen)
    assert callback.freezer.recorder.book.flops_saved_fraction > 0.05
    assert callback.freezer.steps_done == 6 * 45
    assert plain.trace[:8] == frozen.trace[:8]
    assert all(p.requires_grad for p in frozen.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in frozen.modules())


class FreezeAt(lightning.Callback):  # type: ignore[misc,name-defined]
    def __init__(self, callback: ours.FreezeCallback, step: int) -> None:
        self.callback, self.step = callback, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and self.callback.freezer is not None:
            self.callback.freezer.freeze("net.layers.0")


def test_accumulated_batches_are_one_step() -> None:
    callback = ours.FreezeCallback(None)
    module = Digits()
    fit(module, callback, FreezeAt(callback, 2), max_epochs=1, accumulate_grad_batches=4)
    assert callback.freezer is not None
    assert callback.freezer.steps_done == 12  # 45 batches in windows of 4, the last one shorter
    assert callback.freezer.recorder.frozen_steps["net.layers.0"] == 10


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_checkpoints_go_on_frozen_and_load_without_the_callback(tmp_path: Path, kind: str) -> None:
    callback = ours.FreezeCallback(None)
    first = Digits(kind)
    trainer = fit(first, callback, FreezeAt(callback, 5), max_epochs=2)
    assert trainer.global_step == 90

    class SaveAt(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_epoch_end(self, trainer: Any, _module: nn.Module) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    again, second = ours.FreezeCallback(None), Digits(kind)
    fit(second, again, FreezeAt(again, 5), SaveAt(), max_epochs=2)
    saved = torch.load(tmp_path / "a.ckpt", weights_only=False)
    counts = [len(group["params"]) for group in saved["optimizer_states"][0]["param_groups"]]
    assert counts == [len(list(second.parameters()))]

    resumed, third = ours.FreezeCallback(None), Digits(kind)
    fit(third, resumed, resume=tmp_path / "a.ckpt", max_epochs=2)
    assert resumed.freezer is not None
    assert resumed.freezer.steps_done == 90
    assert resumed.freezer.recorder.frozen_steps["net.layers.0"] == 85
    before = saved["state_dict"]["net.layers.0.linear.weight"]
    assert torch.equal(third.net.get_submodule("layers.0").linear.weight, before)  # type: ignore[arg-type,union-attr]

    without = Digits(kind)
    fit(without, resume=tmp_path / "a.ckpt", max_epochs=2)
    assert not torch.equal(without.net.get_submodule("layers.0").linear.weight, before)  # type: ignore[arg-type,union-attr]


def test_a_checkpoint_after_fitting_goes_on_frozen_as_it_was_at_the_end(tmp_path: Path) -> None:
    callback = ours.FreezeCallback()  # the default rule, whose worker ends with fitting
    module = Digits()
    trainer = fit(module, callback, FreezeAt(callback, 5), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.validate(module, loaders()[1], verbose=False)  # nothing is counted any more
    resumed = ours.FreezeCallback()
    fit(Digits(), resumed, resume=tmp_path / "a.ckpt", max_epochs=2)
    assert resumed.freezer is not None
    assert resumed.freezer.steps_done == 90
    assert resumed.freezer.recorder.frozen_steps["net.layers.0"] == 85


def test_a_failing_step_leaves_the_module_as_it_was() -> None:
    class Failing(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 7:
                raise RuntimeError("mine")
            return super().training_step(batch, batch_idx)

    module, callback = Failing(), ours.FreezeCallback(None)
    with pytest.raises(RuntimeError, match="mine"):
        fit(module, callback, FreezeAt(callback, 3), max_epochs=1)
    assert all(p.requires_grad for p in module.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_without_lightning_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_Callback", None)
    with pytest.raises(lab.MissingPackageError, match=r'needs Lightning: pip install "egeria-lab\[integrations\]"'):
        ours.FreezeCallback()


def test_several_ranks_are_refused() -> None:
    with pytest.raises(lab.InvalidSettingError, match=r"one process, and there are 2: .* Session under torchrun"):
        ours.FreezeCallback().on_train_start(SimpleNamespace(world_size=2), Digits())
