"""Loggers: what a session records, in TensorBoard, CSV files, MLflow or Weights & Biases. They watch, nothing else.

A logger is subscribed like any callback; its own thread then copies new rows of the history and new events, so
that a slow disk or server costs training nothing. Its package is imported when it is made, not before.

Example:
    >>> from tempfile import TemporaryDirectory
    >>> from egeria_lab.session import Session
    >>> with TemporaryDirectory() as folder:
    ...     session = Session("mlp", "digits", epochs=1)
    ...     with CSV(folder) as log:
    ...         _ = session.subscribe(log), session.step(2)
    ...     print((Path(folder) / "steps.csv").read_text()[:16])
    step,epoch,loss,
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from egeria_lab.engine.arguments import check_path
from egeria_lab.errors import InvalidSettingError, MissingPackageError, require
from egeria_lab.events import Event
from egeria_lab.history import VERDICTS
from egeria_lab.integrations.logger import Logger, Row
from egeria_lab.integrations.mlflow_store import no_store
from egeria_lab.session import Session

__all__ = ["CSV", "Logger", "MLflow", "TensorBoard", "WandB"]


def __dir__() -> list[str]:
    return __all__


class CSV(Logger):
    """One CSV file for each table of the history, and one for events, in a folder; needs no package.

    Args:
        folder: where they go; made when it is not there. Files of an earlier run in it are replaced.
        every_seconds: as in `Logger`.

    Raises:
        InvalidSettingError: when the folder cannot be made.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder, CSV(folder) as log:
        ...     _ = Session("mlp", "digits", epochs=1).subscribe(log)
    """

    def __init__(self, folder: str | os.PathLike[str], *, every_seconds: float = 2.0) -> None:
        super().__init__(every_seconds=every_seconds)
        self.folder = _made_folder("CSV", folder)
        self._files: dict[str, IO[str]] = {}

    def write_row(self, table: str, row: Row, layer: str | None) -> None:
        """One line of ``<table>.csv``; what is not known is empty."""
        cells = {name: "" if math.isnan(value) else _short(value) for name, value in row.items()}
        if cells.get("verdict", "") != "":
            cells["verdict"] = VERDICTS[int(row["verdict"])]
        if layer is not None:
            cells["layer"] = layer
        self._line(table, cells)

    def write_event(self, event: Event) -> None:
        """One line of ``events.csv``: step, event, by, sentence, and its fields as JSON."""
        fields = event.to_dict()
        line = {"step": event.step, "event": fields.pop("event"), "by": event.by, "sentence": event.sentence()}
        rest = {name: value for name, value in fields.items() if name not in ("step", "by")}
        self._line("events", {**line, "fields": json.dumps(rest)})

    def flush(self) -> None:
        """Give the lines to the system."""
        for file in self._files.values():
            file.flush()

    def end(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _line(self, table: str, cells: Mapping[str, object]) -> None:
        file = self._files.get(table)
        if file is None:
            file = self._files[table] = (self.folder / f"{table}.csv").open("w", encoding="utf-8", newline="")
            csv.writer(file).writerow(cells)
        csv.writer(file).writerow(cells.values())


class TensorBoard(Logger):
    """Scalars and events for TensorBoard.

    Tags are ``<table>/<column>``, for tables by layer ``<table>/<column>/<layer>``; events are texts under ``events``.

    Args:
        folder: log directory; `tensorboard --logdir` takes it or one above it.
        every_seconds: as in `Logger`.

    Raises:
        MissingPackageError: when tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every_seconds: float = 2.0) -> None:
        super().__init__(every_seconds=every_seconds)
        _package("TensorBoard", "tensorboard", "tensorboard")
        self.folder = _made_folder("TensorBoard", folder)
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(self.folder))

    def write_row(self, table: str, row: Row, layer: str | None) -> None:
        """One scalar for each column that has a value."""
        for tag, value in _scalars(table, row, layer).items():
            self._writer.add_scalar(tag, value, int(row["step"]))

    def write_event(self, event: Event) -> None:
        """The event in words."""
        self._writer.add_text(f"events/{type(event).__name__}", event.sentence(), event.step)

    def flush(self) -> None:
        """Give everything to the system."""
        self._writer.flush()

    def end(self) -> None:
        """Close the file."""
        self._writer.close()


class MLflow(Logger):
    """Metrics, parameters and events for MLflow, in a run of its own; no global state of MLflow is touched.

    Args:
        tracking_uri: a server, such as ``"http://localhost:5000"``; a database, such as ``"sqlite:///runs.db"``, which
            needs the whole package (``pip install mlflow``: mlflow-skinny, which the extra ``integrations`` brings, has
            no databases); or a folder, ``"file:///…/runs"``, for which newer versions of MLflow want the environment
            variable ``MLFLOW_ALLOW_FILE_STORE=true``. None for what MLflow is set to, by default a database.
        experiment: name of the experiment; made when it is not there.
        run_name: name of the run, or None.
        every_seconds: as in `Logger`.

    Attributes:
        run_id: of the run, once a session is followed.

    Raises:
        MissingPackageError: when neither mlflow nor mlflow-skinny is installed, or only the latter for a database.
        InvalidSettingError: when the store cannot be opened. A server is asked when a session is followed: one that
            does not answer is that session's `SubscriberFailed` event.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "egeria_lab",
        run_name: str | None = None,
        *,
        every_seconds: float = 5.0,
    ) -> None:
        super().__init__(every_seconds=every_seconds)
        self._mlflow = _package("MLflow", "mlflow", "mlflow-skinny")
        self._entities = importlib.import_module("mlflow.entities")
        uri = tracking_uri
        require(uri is None or (isinstance(uri, str) and uri != ""), "MLflow", "tracking_uri", uri, "a text or None")
        named = isinstance(experiment, str) and experiment != ""
        require(named, "MLflow", "experiment", experiment, "a text that is not empty")
        self._uri = self._mlflow.get_tracking_uri() if uri is None else uri
        try:
            self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        except Exception as error:  # each kind of store fails in its own way
            raise no_store(self._uri, error) from error
        self._experiment, self._run_name = experiment, run_name
        self._metrics: list[Any] = []
        self._events: list[str] = []
        self.run_id: str | None = None

    def begin(self, session: Session) -> None:
        """Make experiment and run, and write the session's configuration as parameters."""
        try:
            found = self._client.get_experiment_by_name(self._experiment)
            number = found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
            self.run_id = self._client.create_run(number, run_name=self._run_name).info.run_id
        except Exception as error:  # as above
            raise no_store(self._uri, error) from error
        for name, value in session.config.items():
            self._client.log_param(self.run_id, name, str(value)[:500])

    def write_row(self, table: str, row: Row, layer: str | None) -> None:
        """One metric for each column that has a value, sent at the next flush."""
        now = int(time.time() * 1000)
        for tag, value in _scalars(table, row, layer).items():
            self._metrics.append(self._entities.Metric(tag, value, now, int(row["step"])))

    def write_event(self, event: Event) -> None:
        """One line of the artifact ``events.jsonl``, written at the end."""
        self._events.append(json.dumps(event.to_dict()))

    def flush(self) -> None:
        """Send the metrics, in batches of the most that a server takes."""
        while self._metrics:
            self._client.log_batch(self.run_id, metrics=self._metrics[:1000])
            del self._metrics[:1000]

    def end(self) -> None:
        """Send what is left and end the run."""
        if self.run_id is not None:
            self.flush()
            self._client.log_text(self.run_id, "\n".join(self._events) + "\n", "events.jsonl")
            self._client.set_terminated(self.run_id)


class WandB(Logger):
    """Metrics, configuration and events for Weights & Biases.

    Args:
        project: name of the project.
        options: further arguments of ``wandb.init``, such as ``mode="offline"``, ``dir=`` or ``name=``.
        every_seconds: as in `Logger`.

    Raises:
        MissingPackageError: when wandb is not installed.
    """

    def __init__(self, project: str = "egeria_lab", *, every_seconds: float = 5.0, **options: Any) -> None:
        super().__init__(every_seconds=every_seconds)
        self._wandb = _package("WandB", "wandb", "wandb")
        self._options = {"project": project, **options}
        self._run: Any = None

    def begin(self, session: Session) -> None:
        """Begin the run; every metric has the training step as its x axis."""
        config = {name: str(value) for name, value in session.config.items()}
        self._run = self._wandb.init(**{"config": config, **self._options})
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write_row(self, table: str, row: Row, layer: str | None) -> None:
        """One record with the columns that have a value."""
        self._run.log({**_scalars(table, row, layer), "step": int(row["step"])})

    def write_event(self, event: Event) -> None:
        """The event in words."""
        self._run.log({f"events/{type(event).__name__}": event.sentence(), "step": event.step})

    def end(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()


def _scalars(table: str, row: Row, layer: str | None) -> dict[str, float]:
    end = "" if layer is None else f"/{layer}"
    return {f"{table}/{name}{end}": v for name, v in row.items() if name != "step" and not math.isnan(v)}


def _short(value: float) -> int | float:
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _made_folder(owner: str, folder: str | os.PathLike[str]) -> Path:
    place = check_path(f"{owner}.folder", folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSettingError(
            f"{owner}: the folder {place} cannot be made ({error.strerror}); give another one."
        ) from error
    return place


def _package(owner: str, module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"lab.loggers.{owner} needs the package {package}, which is not installed: pip install {package}."
        ) from error
