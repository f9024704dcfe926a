"""Files of optional packages, found without importing the package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from egeria_lab.errors import DataError, MissingPackageError


def package_file(data_set: str, package: str, path: str) -> Path:
    """Where a file of an installed package lies; nothing of the package is run.

    Args:
        data_set: who needs it, for the message.
        package: name of the distribution, as pip knows it.
        path: path of the file inside it, with slashes.

    Raises:
        MissingPackageError: when the package is not installed; one sentence with the command that does it.
        DataError: when it is installed without that file.

    Example:
        >>> package_file("mine", "numpy", "numpy/version.py").name
        'version.py'
    """
    try:
        place = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError as error:
        raise MissingPackageError(
            f'Data set {data_set!r} needs the package {package}: pip install "egeria_lab[data]".'
        ) from error
    if not place.is_file():
        raise DataError(
            f"Data set {data_set!r} finds no {path} in the installed package {package}: "
            f"pip install --force-reinstall {package}."
        )
    return place
