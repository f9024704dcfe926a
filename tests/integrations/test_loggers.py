"""Loggers copy everything, disturb nothing, and fail alone; TensorBoard, CSV and MLflow are run for real."""

from __future__ import annotations

import csv
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import egeria_lab as lab
from egeria_lab.events import Event, LayerPinned, SubscriberFailed
from egeria_lab.integrations import mlflow_store
from egeria_lab.integrations.logger import Logger

RULE = lab.Plasticity(interval_steps=2, window=4, patience=4, tolerance=2.0)


def session(**more: Any) -> lab.Session:
    return lab.Session("mlp", "digits", **{"epochs": 3, "batch_size": 64, "freeze": RULE, **more})


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class Broken(Logger):
    """Fails at its first row."""

    def write_row(self, table: str, row: Any, layer: str | None) -> None:
        raise OSError("disk full")

    def write_event(self, event: Event) -> None:
        pass


def test_csv_holds_the_whole_history_and_every_event(tmp_path: Path) -> None:
    made = session()
    made.step(5)
    with lab.loggers.CSV(tmp_path, every_seconds=0.01) as log:
        made.subscribe(log)  # what was before comes too
        made.step(made.planned_steps - 5)
    steps, frame = rows(tmp_path / "steps.csv"), made.history.frame("steps")
    assert [int(row["step"]) for row in steps] == frame["step"].tolist()
    assert [float(row["loss"]) for row in steps] == frame["loss"].tolist()
    readings, plasticity = rows(tmp_path / "plasticity.csv"), made.history.frame("plasticity")
    assert [row["layer"] for row in readings] == plasticity["layer"].tolist()
    assert [row["verdict"] for row in readings] == plasticity["verdict"].tolist()
    assert [row["event"] for row in rows(tmp_path / "events.csv")] == [type(e).__name__ for e in made.events]
    assert [row["sentence"] for row in rows(tmp_path / "events.csv")] == [e.sentence() for e in made.events]
    assert len(rows(tmp_path / "epochs.csv")) == 3
    assert made.layers.frozen


def test_a_logger_changes_nothing(tmp_path: Path) -> None:
    plain, watched = session(), session()
    with lab.loggers.CSV(tmp_path, every_seconds=0.01) as log:
        watched.subscribe(log)
        losses = [watched.step().loss for _ in range(watched.planned_steps)]
    assert losses == [plain.step().loss for _ in range(plain.planned_steps)]
    assert [e.to_dict() for e in plain.events] == [e.to_dict() for e in watched.events]


def test_a_failing_logger_is_detached_and_reported_and_training_goes_on() -> None:
    plain, watched = session(), session()
    log = Broken(every_seconds=0.01)
    watched.subscribe(log)
    losses = [watched.step().loss for _ in range(watched.planned_steps)]
    log.close()
    assert losses == [plain.step().loss for _ in range(plain.planned_steps)]
    failures = watched.events.of(SubscriberFailed)
    assert [(e.subscriber, e.error) for e in failures] == [("lab.loggers.Broken", "OSError: disk full")]
    assert isinstance(log.error, OSError)


def test_one_that_fails_at_the_very_end_is_reported_when_it_is_closed() -> None:
    made = session()
    log = Broken(every_seconds=1000.0)
    made.subscribe(log)
    log.close()  # no row yet: nothing to fail at
    assert log.error is None
    late = Broken(every_seconds=1000.0)
    made.subscribe(late)
    made.step()
    late.close()
    late.close()
    assert len(made.events.of(SubscriberFailed)) == 1


def test_after_an_undo_the_steps_that_are_trained_again_are_written_again(tmp_path: Path) -> None:
    made = session(freeze=None)
    with lab.loggers.CSV(tmp_path, every_seconds=0.001) as log:
        made.subscribe(log)
        made.step(3)
        made.freeze("layers.0")
        made.step(2)
        made.undo()
        made.step(4)
    last = {int(row["step"]): float(row["loss"]) for row in rows(tmp_path / "steps.csv")}
    frame = made.history.frame("steps")
    assert last == dict(zip(frame["step"], frame["loss"], strict=True))


def test_unsubscribe_ends_the_logger_and_its_thread(tmp_path: Path) -> None:
    made = session(freeze=None)
    end = made.subscribe(lab.loggers.CSV(tmp_path))
    made.step(2)
    end()
    end()
    made.step()
    assert len(rows(tmp_path / "steps.csv")) == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "egeria-lab-CSV"]


def test_one_kind_of_event_and_one_session_only(tmp_path: Path) -> None:
    made = session(freeze=None)
    with lab.loggers.CSV(tmp_path) as log:
        made.subscribe(log, LayerPinned)
        made.pin("layers.0")
        made.thaw("layers.1")
        with pytest.raises(lab.InvalidSettingError, match="follows a session already"):
            made.subscribe(log)
    assert [row["event"] for row in rows(tmp_path / "events.csv")] == ["LayerPinned"]


def test_rows_reach_the_disk_when_the_program_ends_without_close(tmp_path: Path) -> None:
    code = (
        "import egeria_lab as lab\n"
        "s = lab.Session('mlp', 'digits', epochs=1)\n"
        f"s.subscribe(lab.loggers.CSV({str(tmp_path)!r}, every_seconds=1000.0)); s.step(4)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert len(rows(tmp_path / "steps.csv")) == 4


def test_tensorboard_for_real(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = session()
    with lab.loggers.TensorBoard(tmp_path) as log:
        made.subscribe(log)
        made.step(30)
    found = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    losses = [(item.step, item.value) for item in found.Scalars("steps/loss")]
    assert losses == [
        (step, pytest.approx(loss, rel=1e-6))  # TensorBoard keeps float32
        for step, loss in made.history.frame("steps")[["step", "loss"]].itertuples(index=False)
    ]
    assert "plasticity/value/layers.0" in found.Tags()["scalars"]
    assert "events/EpochFinished/text_summary" in found.Tags()["tensors"]


def test_mlflow_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = (tmp_path / "runs").as_uri()
    made = session()
    with lab.loggers.MLflow(place, "freezing", "first") as log:
        made.subscribe(log)
        made.step(made.planned_steps)
    assert log.error is None
    client = mlflow.MlflowClient(tracking_uri=place)
    run = client.get_run(log.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["model"] == "mlp"
    assert "tolerance=2.0" in run.data.params["freeze"]
    losses = {item.step: item.value for item in client.get_metric_history(log.run_id, "steps/loss")}
    frame = made.history.frame("steps")
    assert losses == dict(zip(frame["step"], frame["loss"], strict=True))
    assert mlflow.active_run() is None


def test_wandb_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the few calls that we make: the service itself needs an account or a process of its own."""
    said: list[Any] = []

    class Run:
        def define_metric(self, *names: str, **how: str) -> None:
            said.append(("metric", names, how))

        def log(self, record: dict[str, Any]) -> None:
            said.append(("log", record))

        def finish(self) -> None:
            said.append(("finish",))

    module = ModuleType("wandb")
    module.init = lambda **options: said.append(("init", options)) or Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    made = session()
    with lab.loggers.WandB("freezing", mode="offline") as log:
        made.subscribe(log)
        made.step(4)
        made.pin("layers.1")
    assert said[0][1]["project"] == "freezing"
    assert said[0][1]["mode"] == "offline"
    assert said[0][1]["config"]["model"] == "mlp"
    records = [entry[1] for entry in said if entry[0] == "log"]
    losses = [record["steps/loss"] for record in records if "steps/loss" in record]
    assert losses == made.history.frame("steps")["loss"].tolist()
    assert {"events/LayerPinned": "layers.1 pinned by user: no rule may freeze it", "step": 4} in records
    assert said[-1] == ("finish",)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("TensorBoard", "tensorboard", "tensorboard"),
        ("MLflow", "mlflow", "mlflow-skinny"),
        ("WandB", "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_one_sentence_when_it_is_used(
    name: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(lab.MissingPackageError, match=f"lab.loggers.{name} needs the package {package}"):
        getattr(lab.loggers, name)(str(tmp_path))


def test_importing_egeria_lab_imports_none_of_them() -> None:
    code = "import sys, egeria_lab; print(sorted({'tensorboard', 'mlflow', 'wandb'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_mlflow_store_that_cannot_be_opened_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from importlib import metadata

    def skinny_only(package: str) -> str:
        if package == "mlflow":
            raise metadata.PackageNotFoundError(package)
        return metadata.version(package)

    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(mlflow_store, "version", skinny_only)

    class Closed:
        def __init__(self, tracking_uri: str) -> None:
            raise OSError("no such store\nand a second line")

    made = session(freeze=None)
    with lab.loggers.MLflow("http://me:secret@127.0.0.1:9") as log:  # nobody listens there
        made.subscribe(log)
    said = made.events.of(SubscriberFailed)[0].error
    assert said.startswith("InvalidSettingError: lab.loggers.MLflow cannot open http://127.0.0.1:9 (")
    assert said.endswith("); give another tracking_uri=.")
    assert "secret" not in said

    monkeypatch.setattr("mlflow.MlflowClient", Closed)
    with pytest.raises(lab.MissingPackageError, match="mlflow-skinny has none: pip install mlflow, or give"):
        lab.loggers.MLflow(f"sqlite:///{tmp_path}/runs.db")
    with pytest.raises(lab.InvalidSettingError, match="MLflow wants MLFLOW_ALLOW_FILE_STORE=true"):
        lab.loggers.MLflow((tmp_path / "runs").as_uri())
    with pytest.raises(lab.InvalidSettingError, match=r"cannot open what://x \(no such store\); give another"):
        lab.loggers.MLflow("what://x")
    for wrong in (5, ""):
        with pytest.raises(lab.InvalidSettingError, match=r"MLflow\.tracking_uri must be a text or None"):
            lab.loggers.MLflow(wrong)  # type: ignore[arg-type]


def test_mlflow_skinny_says_what_a_database_needs(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    if mlflow_store.is_installed("mlflow"):
        pytest.skip("the whole package is installed: databases work")
    with pytest.raises(lab.MissingPackageError, match=r"needs the package mlflow for the database sqlite:///"):
        lab.loggers.MLflow(f"sqlite:///{tmp_path}/runs.db")


@pytest.mark.parametrize("seconds", [0, -1, "2", True, float("nan")])
def test_bad_arguments(seconds: Any, tmp_path: Path) -> None:
    with pytest.raises(lab.InvalidSettingError, match=r"CSV\.every_seconds must be a number > 0"):
        lab.loggers.CSV(tmp_path, every_seconds=seconds)
    for wrong in ("a\0", "a" * 300, "", 5):
        with pytest.raises(lab.InvalidSettingError, match=r"^CSV\.folder "):
            lab.loggers.CSV(wrong)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(lab.InvalidSettingError, match="cannot be made"):
        lab.loggers.CSV(tmp_path / "file" / "folder")
