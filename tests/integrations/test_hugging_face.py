"""The Hugging Face callback in a real `Trainer`, on a tiny BERT and a tiny ViT built from their configurations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import egeria_lab as lab
from egeria_lab.events import LayerFrozen
from egeria_lab.integrations import hugging_face as ours

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

RULE = lab.Plasticity(interval_steps=4, window=4, patience=3, tolerance=0.2, bootstrap_change=5.0, refresh_evals=30)
MARGIN = 0.06
"""Accuracy that the frozen model may lie below the plain one, on 1,000 sentences."""


class Words(Dataset[dict[str, Tensor]]):
    """Which of two words comes more often; learned in a moment."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, 6, (count, 12), generator=generator)
        self.labels = ((self.ids == 2).sum(1) > (self.ids == 3).sum(1)).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ones = torch.ones(12, dtype=torch.int64)
        return {"input_ids": self.ids[index], "attention_mask": ones, "labels": self.labels[index]}


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=2,
    )  # fmt: skip
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def trainer(model: nn.Module, folder: Path, *callbacks: Any, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=16, learning_rate=2e-3, report_to=[], use_cpu=True,
        disable_tqdm=True, seed=0, logging_strategy="no", **{"save_strategy": "no", "num_train_epochs": 2, **options},
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=Words(256, 0), callbacks=list(callbacks))


def accuracy(model: nn.Module) -> float:
    data = Words(1000, 1)
    model.eval()
    with torch.no_grad():
        return float((model(input_ids=data.ids).logits.argmax(1) == data.labels).float().mean())


class FreezeAt(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    def __init__(self, callback: ours.FreezeCallback, step: int) -> None:
        self.callback, self.step = callback, step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and self.callback.freezer is not None:
            self.callback.freezer.freeze(self.callback.freezer.layers[0].name)


def test_a_model_is_trained_freezes_saves_and_is_as_good(tmp_path: Path) -> None:
    plain, frozen = bert(), bert()
    trainer(plain, tmp_path / "a", num_train_epochs=16).train()
    callback = ours.FreezeCallback(RULE)
    trainer(frozen, tmp_path / "b", callback, num_train_epochs=16).train()
    assert accuracy(frozen) >= accuracy(plain) - MARGIN
    freezer = callback.freezer
    assert freezer is not None
    assert freezer.steps_done == 256
    assert freezer.events.of(LayerFrozen)
    assert freezer.recorder.book.flops_saved_fraction > 0.02
    losses = [float(x) for x in freezer.history.steps["loss"]]
    assert losses[-1] < losses[0]
    assert all(p.requires_grad for p in frozen.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in frozen.modules())


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    callback = ours.FreezeCallback(None)
    trainer(bert(), tmp_path, callback, FreezeAt(callback, 1), gradient_accumulation_steps=4).train()
    assert callback.freezer is not None
    assert callback.freezer.steps_done == 8
    assert max(callback.freezer.recorder.frozen_steps.values()) == 7


def test_checkpoints_go_on_frozen_and_load_without_the_callback(tmp_path: Path) -> None:
    callback = ours.FreezeCallback(None)
    options: dict[str, Any] = {"save_strategy": "epoch", "num_train_epochs": 2}
    whole = bert()
    trainer(whole, tmp_path, callback, FreezeAt(callback, 4), **options).train()
    place = tmp_path / "checkpoint-16"
    state = torch.load(place / "optimizer.pt", weights_only=True)
    assert sum(len(group["params"]) for group in state["param_groups"]) == len(list(whole.parameters()))

    again, resumed = ours.FreezeCallback(None), bert()
    trainer(resumed, tmp_path, again, **options).train(resume_from_checkpoint=str(place))
    assert again.freezer is not None
    assert again.freezer.steps_done == 32
    assert max(again.freezer.recorder.frozen_steps.values()) == 28
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name

    without = bert()
    trainer(without, tmp_path, **options).train(resume_from_checkpoint=str(place))
    assert not torch.equal(without.bert.embeddings.word_embeddings.weight, whole.bert.embeddings.word_embeddings.weight)


def test_without_transformers_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_Callback", None)
    with pytest.raises(lab.MissingPackageError, match=r'needs transformers: pip install "egeria-lab\[integrations\]"'):
        ours.FreezeCallback()


def test_several_ranks_are_refused() -> None:
    with pytest.raises(lab.InvalidSettingError, match=r"one process, and there are 2: .* Session under torchrun"):
        ours.FreezeCallback().on_train_begin(SimpleNamespace(world_size=2), None, None)
