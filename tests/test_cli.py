"""The command line as a user types it: one JSON object on stdout, one sentence on stderr, honest exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import egeria_lab as lab
from egeria_lab.cli import main


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "egeria_lab", *arguments],
        capture_output=True, text=True, cwd=cwd, env=environment, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("demo")
    # a small run of the same command: digits settle within a few epochs, so that layers freeze by the rule
    done = run("demo", "--json", "--model", "mlp", "--data", "digits", "--epochs", "60", "--threads", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


def test_demo_prints_one_json_object_with_the_promised_keys(demo: tuple[dict[str, Any], Path]) -> None:
    result, folder = demo
    promised = {
        "final_accuracy", "baseline_accuracy", "frozen_layers", "events", "flops_saved_fraction",
        "time_saved_fraction", "steps", "report",
    }  # fmt: skip
    assert promised <= set(result)
    assert result["steps"] == 60 * 12
    assert (folder / result["report"]).read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html")


def test_demo_freezes_by_the_rule_and_keeps_the_accuracy(demo: tuple[dict[str, Any], Path]) -> None:
    result, _ = demo
    by_rule = [e for e in result["events"] if e["event"] == "LayerFrozen" and e["by"] == "rule"]
    assert [e["layer"] for e in by_rule] == result["frozen_layers"]
    assert result["frozen_layers"]
    assert abs(result["final_accuracy"] - result["baseline_accuracy"]) <= 0.01
    assert 0 < result["flops_saved_fraction"] < 1


RUN_FILE = """
model = "mlp"
data = "digits"
epochs = 3
batch_size = 64
run_dir = "kept"
[freeze]
interval_steps = 2
window = 4
patience = 4
tolerance = 0.5
"""


def test_train_makes_a_run_directory_that_goes_on_and_is_reported(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(RUN_FILE, encoding="utf-8")
    # bootstrapping ends early enough on any processor: 69 steps, rounded otherwise, must freeze something
    changes = ["freeze.tolerance=2.0", "freeze.bootstrap_change=0.5", "lr=0.05"]
    done = run("train", "my.toml", "--json", *[word for one in changes for word in ("--set", one)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    steps = result["steps"]
    assert result["finished"]
    assert steps == result["planned_steps"] == 3 * 23
    same = lab.Session(
        "mlp", "digits", epochs=3, batch_size=64, lr=0.05,
        freeze=lab.Plasticity(interval_steps=2, window=4, patience=4, tolerance=2.0, bootstrap_change=0.5),
    )  # fmt: skip
    same.step(steps)
    assert result["final_accuracy"] == same.evaluate()["accuracy"]
    assert result["frozen_layers"] == list(same.layers.frozen) != []
    assert result["flops_saved_fraction"] == same.savings().book.flops_saved_fraction > 0
    assert "layers.0 frozen by rule" in done.stderr  # events in words
    place = tmp_path / "kept"
    assert Path(result["report"]) == place / "report.html"
    assert "layers.0" in (place / "report.html").read_text(encoding="utf-8")
    assert lab.Session.from_config(place / "run.toml", run_dir=None).config["lr"] == 0.05
    loaded = lab.Session.load(place, run_dir=None)
    assert loaded.steps_done == steps

    (place / "report.html").unlink()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in place.iterdir())
    done = run("report", "kept", "--output", "page.html", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "page.html"
    assert json.loads(done.stdout) == {"report": str(page)}
    assert "frozen by rule" in page.read_text(encoding="utf-8")
    assert sorted((path.name, path.stat().st_mtime_ns) for path in place.iterdir()) == before  # only read
    assert main(["report", str(place / f"step-{steps:09d}.ckpt")]) == 0
    assert (place / f"step-{steps:09d}.html").is_file()

    done = run("train", "my.toml", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"egeria-lab: {place} holds a run already: go on with it, egeria-lab resume")
    done = run("resume", "kept", "--epochs", "1", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["steps"] == steps + 23


def test_train_in_words_with_its_own_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.toml").write_text(RUN_FILE.replace('run_dir = "kept"', ""), encoding="utf-8")
    page = tmp_path / "page.html"
    assert main(["train", str(tmp_path / "my.toml"), "--epochs", "0.5", "--device", "cpu", "--report", str(page)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("mlp on digits: step 12 of 12, validation accuracy ")
    assert "layers.0" in printed.out
    assert "FLOPs" in printed.out
    assert f"Run directory: {tmp_path / 'my'}" in printed.out
    assert page.is_file()
    assert len(lab.Session.load(tmp_path / "my", run_dir=None).history.steps) == 12


def test_an_interrupted_run_is_kept_and_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(RUN_FILE, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "egeria_lab", "train", "my.toml", "--epochs", "100000", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "Epoch 1" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"Go on with: egeria-lab resume {tmp_path / 'kept'}" in err
    assert "Traceback" not in err
    result = json.loads(out)
    assert not result["finished"]
    assert lab.Session.load(tmp_path / "kept", run_dir=None).steps_done == result["steps"] >= 23


def test_a_failing_run_is_one_sentence_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.toml").write_text(RUN_FILE, encoding="utf-8")
    file = str(tmp_path / "my.toml")
    assert main(["train", file, "--set", "lr=1e30"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("egeria-lab: ")
    assert "loss" in last
    with pytest.raises(lab.TrainingError):
        main(["train", file, "--set", "lr=1e30", "--run-dir", str(tmp_path / "other"), "--debug"])


def test_an_error_nobody_foresaw_is_one_sentence_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr("egeria_lab.cli.examine", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "egeria-lab: RuntimeError: out of luck (--debug shows where).\n"
    with pytest.raises(RuntimeError):
        main(["doctor", "--debug"])


def test_resume_goes_on_with_a_run(tmp_path: Path) -> None:
    whole = lab.Session("mlp", "digits", epochs=2, batch_size=64, seed=4)
    whole.step(46)
    session = lab.Session("mlp", "digits", epochs=2, batch_size=64, seed=4, run_dir=tmp_path / "run")
    session.step(20)
    session.close()
    done = run("resume", "run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["steps_before"], result["steps"]) == (20, 46)
    assert result["final_accuracy"] == whole.evaluate()["accuracy"]
    done = run("resume", "run", "--epochs", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("23 steps, now 69, validation accuracy ")
    assert "Loaded from run/step-000000046.ckpt" in done.stderr
    whole.close()


def test_resume_of_one_file_saves_beside_it(tmp_path: Path) -> None:
    session = lab.Session("mlp", "digits", epochs=1, freeze=None)
    session.step(4)
    path = session.save(tmp_path / "a.ckpt")
    content = path.read_bytes()
    done = run("resume", "a.ckpt", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    total = session.planned_steps
    assert result["saved"] == f"a-step-{total:09d}.ckpt"
    again = lab.Session.load(tmp_path / result["saved"])
    assert again.steps_done == result["steps"] == total
    assert again.evaluate()["accuracy"] == result["final_accuracy"]
    assert path.read_bytes() == content
    done = run("resume", result["saved"], cwd=tmp_path)
    assert done.stdout.endswith("Nothing new to save.\n")
    done = run("resume", "a.ckpt", "--run-dir", "run", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["saved"] == "run"
    assert lab.Session.load(tmp_path / "run").steps_done == total


def test_resume_errors_are_one_sentence(tmp_path: Path) -> None:
    done = run("resume", "nothing", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "egeria-lab: there is no checkpoint nothing.\n")
    (tmp_path / "a.ckpt").write_text("rubbish")
    done = run("resume", "a.ckpt", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("egeria-lab: a.ckpt is no checkpoint of egeria_lab.")


@pytest.mark.parametrize("epochs", ["-1", "0", "nan", "inf"])
def test_passes_to_resume_for_are_checked_before_anything_is_loaded(
    epochs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = lab.Session("mlp", "digits", epochs=1)
    made.step()
    made.save(tmp_path / "a.ckpt")
    assert main(["resume", str(tmp_path / "a.ckpt"), "--epochs", epochs]) == 1
    assert capsys.readouterr().err == f"egeria-lab: --epochs must be a number > 0, got {epochs}.\n"


def test_demo_without_baseline_and_in_words(tmp_path: Path) -> None:
    done = run(
        "demo", "--no-baseline", "--model", "mlp", "--data", "digits", "--epochs", "1", "--threads", "1",
        "--report", "page.html", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").is_file()
    assert "with freezing" in done.stdout
    assert "without " not in done.stdout
    assert "Saved: 0.0 % of the FLOPs" in done.stdout


def test_doctor_prints_json_with_the_promised_keys(tmp_path: Path) -> None:
    done = run("doctor", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert set(found) == {"device", "cores", "threads", "int8_engine", "versions", "widgets", "notes"}
    assert found["versions"]["torch"]
    assert found["widgets"] is True


def test_doctor_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "int8_engine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "--model", "resnet9"], "Unknown model 'resnet9'. Did you mean"),
        (["demo", "--data", "fashion-mni"], "Did you mean 'fashion-mini'?"),
        (["demo", "--model", "mlp", "--data", "digits", "--epochs", "0"], "epochs must be a number > 0"),
        (["demo", "--threads", "0"], "--threads must be a whole number from 1 to"),
        (["lab", "no-such-folder"], "there is no folder 'no-such-folder'"),
        (["train", "no.toml"], "there is no file no.toml"),
        (["train", "bad.toml"], "bad.toml: Unknown key 'epoch'. Did you mean 'epochs'?"),
        (["train", "good.toml", "--set", "freeze.tolerence=1"], "Did you mean 'tolerance'?"),
        (["train", "good.toml", "--set", "freeze.patience=0"], "Plasticity.patience must be a whole number >= 1"),
        (["train", "good.toml", "--set", "nonsense"], "--set takes key=value"),
        (["train", "good.toml", "--epochs", "0"], "epochs must be a number > 0"),
        (["train", "good.toml", "--device", "tpu"], "tpu"),
        (["train", "good.toml", "--report", "no/such/place.html"], "its folder does not exist"),
        (["report", "nothing"], "there is no checkpoint nothing."),
        (["report", "."], "holds no checkpoint"),
    ],
)
def test_errors_are_one_sentence_without_traceback(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("epoch = 3", encoding="utf-8")
    (tmp_path / "good.toml").write_text('model = "mlp"\ndata = "digits"', encoding="utf-8")
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err
    assert "Traceback" not in printed.err
    assert printed.err.count("\n") == 1


def test_report_that_cannot_be_written_is_said_before_training(tmp_path: Path) -> None:
    done = run(
        "demo",
        "--model",
        "mlp",
        "--data",
        "digits",
        "--epochs",
        "500",
        "--report",
        "no/such/folder/r.html",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "no/such/folder" in done.stderr
    assert "Epoch 1" not in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_command_exits_with_2(tmp_path: Path) -> None:
    assert run("dmeo", cwd=tmp_path).returncode == 2


def test_lab_opens_a_writable_copy_of_the_installed_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    installed = tmp_path / "prefix" / "share" / "egeria_lab" / "notebooks"
    installed.mkdir(parents=True)
    (installed / "01_first_session.ipynb").write_text("{}", encoding="utf-8")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path / "prefix"))
    monkeypatch.setattr("subprocess.call", lambda command: calls.append(command) or 0)
    assert main(["lab", "--no-browser", "--allow-root", "--port", "9999"]) == 0
    assert (work / "egeria-lab-notebooks" / "01_first_session.ipynb").is_file()
    assert calls[0][1:3] == ["-m", "jupyterlab"]
    assert "--no-browser" in calls[0]
    assert {"--port=9999", "--allow-root"} <= set(calls[0])
