"""What to say when MLflow cannot open a store: which kinds there are depends on the package and on its version."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version

from egeria_lab.errors import EgeriaLabError, InvalidSettingError, MissingPackageError

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
"""Kinds of address that mlflow-skinny knows only with the packages that mlflow brings."""


def no_store(uri: str, error: Exception) -> EgeriaLabError:
    """Why MLflow cannot open a store, and what to do; passwords in the address are left out.

    Example:
        >>> print(no_store("what://me:secret@there", OSError("no such store")))
        lab.loggers.MLflow cannot open what://there (no such store); give another tracking_uri=.
    """
    kind, shown = uri.partition(":")[0].partition("+")[0], re.sub("//[^/@]*@", "//", uri)
    if kind in DATABASES and not is_installed("mlflow"):
        return MissingPackageError(
            f"lab.loggers.MLflow needs the package mlflow for the database {shown}, mlflow-skinny has none: "
            "pip install mlflow, or give a server's address."
        )
    folder = kind == "file" or (":" not in uri and not uri.startswith(("databricks", "uc")))
    if folder and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() != "true":
        return InvalidSettingError(
            f"lab.loggers.MLflow cannot open the folder {shown}: MLflow wants MLFLOW_ALLOW_FILE_STORE=true in the "
            "environment for it; set it, or give a server's address or a database."
        )
    why = next(iter(str(error).splitlines()), "").replace(uri, shown)[:200].rstrip(".") or type(error).__name__
    return InvalidSettingError(f"lab.loggers.MLflow cannot open {shown} ({why}); give another tracking_uri=.")


def is_installed(package: str) -> bool:
    """True for a distribution that is there, by the name that pip knows.

    Example:
        >>> is_installed("torch")
        True
    """
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
