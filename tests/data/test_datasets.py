"""The data sets that come by name, and the two classes for one's own."""

from __future__ import annotations

import gzip
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from egeria_lab import data, models
from egeria_lab.data import ArrayDataset, Data
from egeria_lab.data.digits import DIGITS_MEAN, DIGITS_STD
from egeria_lab.data.fashion import FASHION_MEAN, FASHION_STD
from egeria_lab.errors import DataError, InvalidSettingError, MissingPackageError, UnknownNameError

WITHOUT_FILES = ("fashion-mini", "digits", "synthetic")
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
needs_debian_files = pytest.mark.skipif(not DEBIAN_FOLDER.is_dir(), reason="dataset-fashion-mnist not installed")


def arrays(loaded: Data) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All tensors of a set: training inputs and targets, validation inputs and targets."""
    assert isinstance(loaded.train, ArrayDataset)
    assert isinstance(loaded.valid, ArrayDataset)
    return loaded.train.inputs, loaded.train.targets, loaded.valid.inputs, loaded.valid.targets


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    """Write bytes in the IDX format of the MNIST family, gzipped when the name says so."""
    raw = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """A folder with a small Fashion-MNIST look-alike: two files gzipped, two not."""
    rng = np.random.default_rng(0)
    for split, count, ending in (("train", 30, ".gz"), ("t10k", 20, "")):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(tmp_path / f"{split}-images-idx3-ubyte{ending}", images)
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte{ending}", (np.arange(count) % 10).astype(np.uint8))
    return tmp_path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are faster on one thread, above all when tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- every set -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_shapes_types_and_labels(name: str) -> None:
    loaded = data.load(name)
    inputs, targets, valid_inputs, valid_targets = arrays(loaded)
    for x, y in ((inputs, targets), (valid_inputs, valid_targets)):
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        assert tuple(x.shape[1:]) == loaded.input_shape
        assert len(x) == len(y)
        assert y.min() == 0
        assert y.max() == 9
        assert torch.isfinite(x).all()
    assert loaded.name == name
    assert loaded.num_classes == 10
    assert loaded.source
    assert loaded.licence


@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_classes_are_balanced(name: str) -> None:
    _, targets, _, valid_targets = arrays(data.load(name))
    for y in (targets, valid_targets):
        shares = y.bincount(minlength=10) / len(y)
        assert shares.min() > 0.09
        assert shares.max() < 0.11


@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_loading_twice_is_equal_and_leaves_the_global_generators_alone(name: str) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()
    first = arrays(data.load(name))
    torch.rand(3)  # a set that drew from the global generator would now differ
    torch_moved = torch.get_rng_state()
    second = arrays(data.load(name))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), torch_moved)
    assert not torch.equal(torch_state, torch_moved)
    assert str(np.random.get_state()) == str(numpy_state)


def test_every_name_has_one_sentence() -> None:
    assert data.names() == (*WITHOUT_FILES, "fashion", "blue-marble", "python-docs", "pronounce")
    for name in data.names():
        sentence = data.describe(name)
        assert sentence.endswith(".")
        assert "\n" not in sentence


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown data set 'fashion_mini'. Did you mean 'fashion-mini'\?"):
        data.load("fashion_mini")
    with pytest.raises(UnknownNameError, match="Known: fashion-mini, digits, synthetic, fashion"):
        data.describe("cifar")


def test_an_unknown_option_names_the_allowed_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'noise'.* num_samples, num_valid, shape, num_classes"):
        data.load("synthetic", noize=2.0)
    with pytest.raises(UnknownNameError, match=r"option of data set 'digits': 'seed'\. Known: none"):
        data.load("digits", seed=1)


# ---- each set ------------------------------------------------------------------------------------


def test_fashion_mini_has_the_known_class_counts_and_is_normalised() -> None:
    inputs, targets, _, valid_targets = arrays(data.load("fashion-mini"))
    assert targets.bincount().tolist() == [942, 1027, 1016, 1019, 974, 989, 1021, 1022, 990, 1000]
    assert valid_targets.bincount().tolist() == [200, 203, 214, 190, 219, 195, 197, 200, 194, 188]
    assert abs(float(inputs.mean())) < 0.01
    assert abs(float(inputs.std()) - 1) < 0.01


@needs_debian_files
def test_fashion_is_whole_and_fashion_mini_is_its_beginning() -> None:
    whole, mini = arrays(data.load("fashion")), arrays(data.load("fashion-mini"))
    assert [len(part) for part in whole] == [60_000, 60_000, 10_000, 10_000]
    assert [len(part) for part in mini] == [10_000, 10_000, 2_000, 2_000]
    assert all(torch.equal(a[: len(b)], b) for a, b in zip(whole, mini, strict=True))
    pixels = whole[0] * FASHION_STD + FASHION_MEAN
    assert float(pixels.mean()) == pytest.approx(FASHION_MEAN, abs=1e-4)
    assert float(pixels.std()) == pytest.approx(FASHION_STD, abs=1e-4)


def test_fashion_reads_a_folder(idx_folder: Path) -> None:
    loaded = data.load("fashion", folder=idx_folder)
    inputs, targets, valid_inputs, _ = arrays(loaded)
    assert (len(inputs), len(valid_inputs), loaded.input_shape) == (30, 20, (1, 28, 28))
    raw = gzip.decompress((idx_folder / "train-images-idx3-ubyte.gz").read_bytes())
    pixels = ((inputs[0] * FASHION_STD + FASHION_MEAN) * 255).round().to(torch.uint8)
    assert pixels.numpy().tobytes() == raw[16 : 16 + 784]
    assert targets[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_fashion_says_what_to_install_or_pass(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="install the Debian package dataset-fashion-mnist, or pass folder="):
        data.load("fashion", folder=tmp_path / "nowhere")


def test_fashion_names_the_missing_and_the_damaged_file(idx_folder: Path) -> None:
    labels = idx_folder / "t10k-labels-idx1-ubyte"
    whole = labels.read_bytes()
    for damaged in (whole[:-3], whole[:2], b"", b"\0\0\x0d\x01" + whole[4:]):
        labels.write_bytes(damaged)
        with pytest.raises(DataError, match=r"cannot read .*t10k-labels-idx1-ubyte .*fetch the file again"):
            data.load("fashion", folder=idx_folder)
    labels.unlink()
    with pytest.raises(DataError, match=r"lacks the file t10k-labels-idx1-ubyte\.gz"):
        data.load("fashion", folder=idx_folder)
    (idx_folder / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b broken")
    with pytest.raises(DataError, match=r"cannot read .*train-images-idx3-ubyte\.gz"):
        data.load("fashion", folder=idx_folder)


def test_digits_are_those_of_scikit_learn_split_evenly() -> None:
    inputs, targets, valid_inputs, valid_targets = arrays(data.load("digits"))
    assert (len(targets), len(valid_targets)) == (1437, 360)
    pixels = (torch.cat([inputs, valid_inputs]) * DIGITS_STD + DIGITS_MEAN).flatten(1) * 16
    assert float(pixels.mean() / 16) == pytest.approx(DIGITS_MEAN, abs=1e-4)
    assert float(pixels.std() / 16) == pytest.approx(DIGITS_STD, abs=1e-4)
    ours = torch.cat([pixels.round(), torch.cat([targets, valid_targets]).unsqueeze(1)], dim=1)
    theirs = np.column_stack(load_digits(return_X_y=True))
    assert sorted(ours.long().tolist()) == sorted(theirs.astype(int).tolist())
    wanted = torch.cat([targets, valid_targets]).bincount() * 360 / 1797
    assert ((valid_targets.bincount() - wanted).abs() <= 1).all()


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # what makes Python refuse the import
    with pytest.raises(MissingPackageError, match="pip install scikit-learn"):
        data.load("digits")


def test_an_mlp_learns_digits_by_plain_sgd() -> None:
    loaded = data.load("digits")
    inputs, targets, valid_inputs, valid_targets = arrays(loaded)
    model = models.build("mlp", input_shape=loaded.input_shape, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ids = torch.randint(len(targets), (64,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(inputs[ids]), targets[ids]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert (model(valid_inputs).argmax(1) == valid_targets).float().mean() > 0.85


@pytest.mark.parametrize("shape", [(20,), (4, 5), (3, 32, 32), (1, 2, 9), (2, 4, 4, 4)])
def test_synthetic_has_any_shape(shape: tuple[int, ...]) -> None:
    loaded = data.load("synthetic", shape=shape, num_samples=50, num_valid=20, num_classes=4)
    inputs, targets, valid_inputs, _ = arrays(loaded)
    assert inputs.shape == (50, *shape)
    assert valid_inputs.shape == (20, *shape)
    assert targets.bincount().tolist() == [13, 13, 12, 12]


def nearest_pattern_accuracy(noise: float, shape: tuple[int, ...] = (1, 16, 16)) -> float:
    """Validation accuracy of a learner that averages the training inputs of each class."""
    x, y, valid_x, valid_y = (
        part.flatten(1) if part.dim() > 1 else part
        for part in arrays(data.load("synthetic", noise=noise, shape=shape, num_samples=5000))
    )
    means = torch.stack([x[y == label].mean(0) for label in range(10)])
    return float((torch.cdist(valid_x, means).argmin(1) == valid_y).float().mean())


def test_synthetic_is_learnable_and_gets_harder_with_noise() -> None:
    accuracies = [nearest_pattern_accuracy(noise) for noise in (0.0, 1.0, 4.0)]
    assert accuracies[0] == 1.0
    assert 0.85 < accuracies[1] < 0.99
    assert 0.15 < accuracies[2] < 0.6


def test_synthetic_follows_its_seed_only() -> None:
    first, same, other = (arrays(data.load("synthetic", seed=seed))[0] for seed in (3, 3, 4))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    valid_of_few = arrays(data.load("synthetic", seed=3, num_samples=7))[2]
    assert torch.equal(valid_of_few, arrays(data.load("synthetic", seed=3))[2])


@pytest.mark.parametrize(
    ("option", "value"),
    [("num_samples", 0), ("num_valid", 1.5), ("num_classes", 0), ("shape", ()), ("shape", (3, 0)),
     ("noise", -1.0), ("noise", float("nan")), ("seed", -1)],
)  # fmt: skip
def test_synthetic_refuses_a_setting_out_of_range(option: str, value: object) -> None:
    with pytest.raises(InvalidSettingError, match=f"synthetic.{option} must be"):
        data.load("synthetic", **{option: value})


# ---- ArrayDataset and Data -----------------------------------------------------------------------


def test_gather_is_the_same_as_item_by_item() -> None:
    dataset = ArrayDataset(torch.randn(9, 2, 3), torch.arange(9))
    ids = torch.tensor([4, 0, 8, 4])
    inputs, targets = dataset.gather(ids)
    assert torch.equal(inputs, torch.stack([dataset[int(i)][0] for i in ids]))
    assert targets.tolist() == [4, 0, 8, 4]
    assert len(list(iter(dataset))) == 9


def test_gathered_samples_are_copies() -> None:
    dataset = ArrayDataset(torch.zeros(3, 2), torch.zeros(3))
    dataset.gather(torch.tensor([0, 1]))[0].add_(1)
    assert not dataset.inputs.any()


def test_array_dataset_refuses_what_it_cannot_index() -> None:
    with pytest.raises(DataError, match="3 inputs and 2 targets"):
        ArrayDataset(torch.zeros(3, 1), torch.zeros(2))
    with pytest.raises(DataError, match="no sample"):
        ArrayDataset(torch.zeros(0, 1), torch.zeros(0))
    with pytest.raises(DataError, match="single number"):
        ArrayDataset(torch.tensor(1.0), torch.tensor(1))
    dataset = ArrayDataset(torch.zeros(3, 1), torch.zeros(3))
    for ids in (torch.tensor([0.0]), torch.tensor([[0]]), torch.tensor([0], dtype=torch.int32)):
        with pytest.raises(DataError, match="one-dimensional int64"):
            dataset.gather(ids)


def make(targets: Tensor, num_classes: int | None = 2, classes: tuple[str, ...] = ()) -> Data:
    good = ArrayDataset(torch.zeros(2, 3), torch.tensor([0, 0]))
    other = ArrayDataset(torch.zeros(len(targets), 3), targets)
    return Data(name="mine", train=good, valid=other, num_classes=num_classes, input_shape=(3,), classes=classes)


def test_data_refuses_a_label_out_of_range() -> None:
    with pytest.raises(DataError, match=r"'mine': label 2 of valid sample 1 is out of range; .* labels are 0 to 1"):
        make(torch.tensor([0, 2, 5]))
    with pytest.raises(DataError, match="label -1 of valid sample 0"):
        make(torch.tensor([[-1, 0], [1, 1]]))


def test_data_takes_padding_and_targets_that_are_no_labels() -> None:
    make(torch.tensor([[0, -100], [1, 1]]))
    make(torch.tensor([0.3, 7.0]))
    make(torch.tensor([5, 7]), num_classes=None)


def test_data_refuses_facts_that_contradict() -> None:
    with pytest.raises(DataError, match="3 class names for 2 classes"):
        make(torch.tensor([0]), classes=("a", "b", "c"))
    with pytest.raises(DataError, match="num_classes must be >= 1"):
        make(torch.tensor([0]), num_classes=0)


def test_data_refuses_what_is_not_map_style_or_empty() -> None:
    pairs = [(torch.zeros(3), 0)]
    assert len(Data(name="list", train=pairs, valid=pairs, num_classes=1, input_shape=(3,)).train) == 1
    with pytest.raises(DataError, match=r"train is an iterator \(list_iterator\), which can be read only"):
        Data(name="x", train=iter(pairs), valid=pairs, num_classes=1, input_shape=(3,))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"train must be map-style .* or iterable, got int"):
        Data(name="x", train=3, valid=pairs, num_classes=1, input_shape=(3,))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="valid is empty"):
        Data(name="x", train=pairs, valid=[], num_classes=1, input_shape=(3,))
