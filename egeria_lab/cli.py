"""The command line: ``lab``, ``demo``, ``train``, ``resume``, ``report``, ``bench``, ``doctor``; 0 only on success.

The file is one piece because it is a table of contents: what can be asked for, and the few lines that answer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from egeria_lab import __version__, data, models, terminal
from egeria_lab.benchmarks.harness import write
from egeria_lab.benchmarks.suites import KEEPS_PARTS, SUITES, suite
from egeria_lab.demo import DemoResult, run_demo
from egeria_lab.doctor import examine
from egeria_lab.engine.threads import available_cores
from egeria_lab.errors import EgeriaLabError, InvalidSettingError
from egeria_lab.session import Session
from egeria_lab.tables import percent, text_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Example:
        >>> main(["doctor", "--json"])  # doctest: +SKIP
        0
    """
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except KeyboardInterrupt:
        print("egeria-lab: interrupted.", file=sys.stderr)
        return 130
    except (EgeriaLabError, OSError) as error:
        if options.debug:
            raise
        print(f"egeria-lab: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # not foreseen; still one sentence, and the way to all of it
        if options.debug:
            raise
        first = next(iter(str(error).splitlines()), "")
        print(f"egeria-lab: {type(error).__name__}: {first} (--debug shows where).", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = argparse.ArgumentParser(
        prog="egeria-lab", description="Watch and steer layer freezing while a PyTorch model trains."
    )
    parser.add_argument("--version", action="version", version=f"egeria-lab {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    lab = commands.add_parser("lab", parents=[common], help="open JupyterLab on the notebooks")
    lab.add_argument("folder", nargs="?", help="folder with the notebooks; default: ./notebooks, or a copy")
    lab.add_argument("--no-browser", action="store_true", help="start the server only")
    lab.add_argument("--allow-root", action="store_true", help="also as the superuser, as in a container")
    lab.add_argument("--port", type=int, help="port of the server")
    lab.set_defaults(command=_lab)

    demo = commands.add_parser("demo", parents=[common], help="train the embedded default and its baseline")
    demo.add_argument("--model", default="resnet8", help="one of " + ", ".join(models.names()))
    demo.add_argument("--data", default="fashion-mini", help="one of " + ", ".join(data.names()))
    demo.add_argument("--epochs", type=float, default=8, help="passes over the training data (default 8)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--threads", type=int, help="torch threads; default: chosen by measuring")
    demo.add_argument("--no-baseline", action="store_true", help="leave out the run without freezing")
    demo.add_argument("--report", default="report.html", help="where the offline page goes")
    demo.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    demo.set_defaults(command=_demo)

    train = commands.add_parser("train", parents=[common], help="train what a run file asks for, into a run directory")
    train.add_argument("file", help="TOML file; session.config.write(FILE) makes one")
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another value, as in freeze.tolerance=0.3"
    )
    train.add_argument("--epochs", type=float, help="passes over the training data, in place of the file's")
    train.add_argument("--device", help="auto, cpu, cuda or cuda:N, in place of the file's")
    train.add_argument("--run-dir", help="where to save; default: as in the file, or a folder of its name beside it")
    train.add_argument("--report", help="where the offline page goes; default: report.html in the run directory")
    train.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    train.set_defaults(command=_train)

    resume = commands.add_parser("resume", parents=[common], help="go on with a run from its newest checkpoint")
    resume.add_argument("folder", help="run directory (run_dir= of the session), or one checkpoint file")
    resume.add_argument("--epochs", type=float, help="so many passes from here; default: to the end of the plan")
    resume.add_argument("--device", help="auto, cpu, cuda or cuda:N; default: as it was asked for before")
    resume.add_argument(
        "--run-dir", help="where to save; default: the run directory itself, or a file beside the given one"
    )
    resume.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    resume.set_defaults(command=_resume)

    report = commands.add_parser("report", parents=[common], help="write the offline page of a kept run")
    report.add_argument("place", metavar="dir", help="run directory, or one checkpoint file; it is only read")
    report.add_argument("--output", help="the page; default: report.html in the directory, or beside the file")
    report.add_argument("--device", help="auto, cpu, cuda or cuda:N; default: as it was trained")
    report.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    report.set_defaults(command=_report)

    bench = commands.add_parser("bench", parents=[common], help="measure on this machine, interleaved")
    known = "; ".join(f"{name}: {about}" for name, (_, about) in SUITES.items())
    bench.add_argument("suites", nargs="*", metavar="suite", help=f"default: all. {known}")
    bench.add_argument("--quick", action="store_true", help="minutes instead of publication quality")
    bench.add_argument("--output", default="bench", help="folder for <suite>.json and <suite>.html (default bench)")
    bench.add_argument("--json", action="store_true", help="print one JSON object a suite on stdout, one a line")
    bench.set_defaults(command=_bench)

    doctor = commands.add_parser("doctor", parents=[common], help="what this machine has and what is used")
    doctor.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    doctor.set_defaults(command=_doctor)
    return parser


def _demo(options: argparse.Namespace) -> int:
    most = 4 * available_cores()
    if options.threads is not None and not 1 <= options.threads <= most:
        raise InvalidSettingError(f"--threads must be a whole number from 1 to {most}, got {options.threads}.")
    shown = 0
    bar: Any = None

    def on_block(session: Session) -> None:
        nonlocal bar, shown
        if bar is None:
            bar = tqdm(total=session.planned_steps, desc=session.name, unit="step", file=sys.stderr)
        bar.update(session.steps_done - bar.n)
        for event in session.events.since(shown):
            bar.write(f"step {event.step:>5}  {event.sentence()}", file=sys.stderr)
        shown = len(session.events)

    result = run_demo(
        model=options.model,
        data=options.data,
        epochs=options.epochs,
        seed=options.seed,
        baseline=not options.no_baseline,
        report=options.report,
        threads=options.threads,
        on_block=on_block,
    )
    if bar is not None:
        bar.close()
    print(json.dumps(result.to_dict()) if options.json else _demo_in_words(result))
    return 0


def _train(options: argparse.Namespace) -> int:
    asked = {"epochs": options.epochs, "device": options.device}
    overrides = [*options.set, *(f"{name}={value}" for name, value in asked.items() if value is not None)]
    done = terminal.train(
        options.file, overrides, run_dir=options.run_dir, report=options.report, say=terminal.say, progress=True
    )
    if done.words:
        print(json.dumps(done.figures) if options.json else done.words)
    return 0 if done.finished else _interrupted(done.run_dir)


def _interrupted(run_dir: Path | None) -> int:
    go_on = "" if run_dir is None else f" Go on with: egeria-lab resume {run_dir}"
    print(f"egeria-lab: interrupted before the end of the plan.{go_on}", file=sys.stderr)
    return 130


def _report(options: argparse.Namespace) -> int:
    changes = {} if options.device is None else {"device": options.device}
    page = terminal.report(options.place, options.output, **changes)
    print(json.dumps({"report": str(page)}) if options.json else f"Report: {page}")
    return 0


def _resume(options: argparse.Namespace) -> int:
    if options.epochs is not None and not 0 < options.epochs < float("inf"):  # before anything is read or said
        raise InvalidSettingError(f"--epochs must be a number > 0, got {options.epochs:g}.")
    asked = {"device": options.device, "run_dir": options.run_dir}
    session = Session.load(options.folder, **{name: value for name, value in asked.items() if value is not None})
    try:
        before, loaded = session.steps_done, session.events[-1].sentence()
        if session.is_first_rank:
            print(loaded, file=sys.stderr)
        if options.epochs is not None or before < session.planned_steps:
            session.run(epochs=options.epochs, progress=session.is_first_rank)
        if not session.is_first_rank:  # rank 0 saves and speaks
            return 0
        saved = _saved_after_resuming(session, Path(options.folder), options.run_dir, before)
        accuracy = session.evaluate()["accuracy"]
        result = {
            "loaded": loaded, "steps_before": before, "steps": session.steps_done, "saved": saved,
            "frozen_layers": list(session.layers.frozen), "final_accuracy": accuracy,
        }  # fmt: skip
        if options.json:
            print(json.dumps(result))
        else:
            shown = "" if accuracy is None else f", validation accuracy {percent(accuracy)}"
            print(f"{session.steps_done - before:,} steps, now {session.steps_done:,}{shown}\n\n{session.layers!r}")
            print(f"\nSaved: {saved}" if saved is not None else "\nNothing new to save.")
        paused = session.state == "paused"
    finally:
        session.close()
    return _interrupted(None if saved is None else Path(saved)) if paused else 0


def _saved_after_resuming(session: Session, given: Path, run_dir: str | None, before: int) -> str | None:
    """Where what was trained is kept: in the run directory, or else in a file beside the one that was given."""
    if run_dir is not None or given.is_dir():
        return str(run_dir if run_dir is not None else given)
    if session.steps_done == before:
        return None
    return str(session.save(given.with_name(f"{given.stem}-step-{session.steps_done:09d}{given.suffix}")))


def _demo_in_words(result: DemoResult) -> str:
    session = result.session
    compared = [["with freezing", percent(result.final_accuracy), f"{_seconds(session):.1f}"]]
    if result.baseline_accuracy is not None:
        saved = result.time_saved_fraction or 0.0
        compared.append(["without", percent(result.baseline_accuracy), f"{_seconds(session) / (1 - saved):.1f}"])
    parts = [
        text_table(["run", "validation accuracy", "seconds, watching included"], compared),
        f"Saved: {percent(result.flops_saved_fraction)} of the FLOPs (counted), "
        f"{percent(result.time_saved_fraction)} of the time (measured"
        + (" beside the run without freezing)." if result.baseline_accuracy is not None else ")."),
        repr(session.layers),
        repr(session.savings()),
        f"Threads: {result.threads}.",
        f"Report: {result.report}",
    ]
    return "\n\n".join(parts)


def _seconds(session: Session) -> float:
    book = session.savings().book
    return book.train_seconds + book.monitor_seconds


def _bench(options: argparse.Namespace) -> int:
    names = options.suites or list(SUITES)
    chosen = {name: suite(name) for name in names}  # all names are checked before the first is run
    for name, run in chosen.items():
        found = run(options.quick, options.output) if name in KEEPS_PARTS else run(options.quick)
        pages = write(found, options.output)
        if options.json:
            print(json.dumps(found), flush=True)
            continue
        heads = list(dict.fromkeys(key for row in found["rows"] for key in row))
        rows = [[_figure(row.get(head, "")) for head in heads] for row in found["rows"]]
        goals = [
            [goal["name"], _figure(goal["value"]), f"{goal['sense']} {goal['goal']}", "yes" if goal["met"] else "no"]
            for goal in found["goals"]
        ]
        print(f"{name}\n\n{text_table(heads, rows)}\n\n{text_table(['goal', 'value', 'wanted', 'met'], goals)}")
        print("\nwritten: " + ", ".join(str(page) for page in pages) + "\n", flush=True)
    return 0


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _doctor(options: argparse.Namespace) -> int:
    found = examine()
    if options.json:
        print(json.dumps(found))
        return 0
    rows = [[key, str(found[key])] for key in ("device", "cores", "threads", "int8_engine", "widgets")]
    rows += [[name, str(number or "not installed")] for name, number in found["versions"].items()]
    print(text_table(["what", "found"], rows))
    for note in found["notes"]:
        print(f"- {note}")
    return 0


def _lab(options: argparse.Namespace) -> int:
    folder = _notebook_folder(options.folder)
    command = [sys.executable, "-m", "jupyterlab", f"--notebook-dir={folder}"]
    if options.no_browser:
        command.append("--no-browser")
    if options.allow_root:
        command.append("--allow-root")
    if options.port is not None:
        command.append(f"--port={options.port}")
    first = next(iter(sorted(folder.glob("01_*.ipynb"))), None)
    if first is not None:
        command.append(f"--LabApp.default_url=/lab/tree/{first.name}")
    return subprocess.call(command)


def _notebook_folder(asked: str | None) -> Path:
    """The folder to open: the one asked for, the checkout's, or a writable copy of the installed ones.

    Raises:
        InvalidSettingError: when there is no such folder.
    """
    if asked is not None:
        if not Path(asked).is_dir():
            raise InvalidSettingError(f"there is no folder {asked!r}; give one with notebooks, or none.")
        return Path(asked)
    here = Path("notebooks")
    if any(here.glob("01_*.ipynb")):
        return here
    installed = Path(sysconfig.get_path("data")) / "share" / "egeria_lab" / "notebooks"
    copy = Path("egeria-lab-notebooks")
    if not copy.exists():
        if not installed.is_dir():
            raise InvalidSettingError("no notebooks were found; give their folder: egeria-lab lab FOLDER")
        shutil.copytree(installed, copy)
    return copy


if __name__ == "__main__":
    sys.exit(main())
