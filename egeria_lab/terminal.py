"""Training from a terminal: a run file is trained into a run directory, and a kept run becomes a page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from egeria_lab.checkpoint.folder import checkpoints
from egeria_lab.dashboard.report import check_destination
from egeria_lab.engine.arguments import check_path
from egeria_lab.engine.run_config import RunConfig
from egeria_lab.engine.run_file import read_config
from egeria_lab.errors import InvalidSettingError
from egeria_lab.events import Event, RunStarted
from egeria_lab.presets import PRESETS
from egeria_lab.session import Session
from egeria_lab.tables import percent

CONFIG_NAME = "run.toml"
REPORT_NAME = "report.html"


@dataclass(frozen=True, slots=True)
class Trained:
    """What became of a run.

    Attributes:
        figures: the result as JSON-able plain data.
        words: the same for a reader: accuracy, layers, savings, places; empty on ranks other than 0.
        run_dir: where checkpoints, configuration and report lie.
        finished: False when it was interrupted.
    """

    figures: dict[str, Any]
    words: str
    run_dir: Path
    finished: bool


def train(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    report: str | Path | None = None,
    say: Callable[[Event], None] | None = None,
    progress: bool = False,
) -> Trained:
    """Train what a run file asks for, to the end of its plan, saving into a run directory.

    Args:
        path: the run file, see `Session.from_config`.
        overrides: ``"key=value"`` texts that take the place of what it says.
        run_dir: where to save; default: what the file says, or a folder of the file's name beside it.
        report: the page; default: ``report.html`` in the run directory.
        say: called with each event.
        progress: show a progress bar on stderr.

    Raises:
        EgeriaLabError: for a file, a place or a run directory that cannot be used; before anything is trained.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = Path(folder, "run.toml")
        ...     _ = run.write_text('model = "mlp"\\ndata = "digits"\\nepochs = 1')
        ...     done = train(run, ["lr=0.05"])
        ...     done.finished, sorted(path.name for path in done.run_dir.iterdir() if path.suffix in (".html", ".toml"))
        (True, ['report.html', 'run.toml'])
    """
    config = read_config(Session, path, PRESETS, overrides)
    place = _new_run_dir(Path(path), config, run_dir)
    if report is not None:
        check_destination(report)
    session = Session.from_config(config, run_dir=place)
    if not session.is_first_rank:  # it trains, and rank 0 writes and speaks
        return _following(session, place)
    end = session.subscribe(say) if say is not None else None
    try:
        session.config.write(place / CONFIG_NAME)
        page = check_destination(place / REPORT_NAME if report is None else report)
        session.run(progress=progress)
        return _result(session, place, session.report(page))
    finally:
        session.close()
        if end is not None:
            end()


def _following(session: Session, place: Path) -> Trained:
    try:
        session.run(progress=False)
        return Trained({}, "", place, session.state == "finished")
    finally:
        session.close()


def _result(session: Session, run_dir: Path, page: Path) -> Trained:
    """Read off an open session: closing it thaws its layers."""
    found, ledger, finished = session.evaluate(), session.savings(), session.state == "finished"
    accuracy = found["accuracy"]
    figures = {
        "finished": finished,
        "steps": session.steps_done,
        "planned_steps": session.planned_steps,
        "final_loss": found["loss"],
        "final_accuracy": accuracy,
        "frozen_layers": list(session.layers.frozen),
        "flops_saved_fraction": ledger.book.flops_saved_fraction,
        "time_saved_fraction": ledger.book.time_saved_fraction,
        "events": [event.to_dict() for event in session.events],
        "run_dir": str(run_dir),
        "config": str(run_dir / CONFIG_NAME),
        "report": str(page),
    }
    shown = "" if accuracy is None else f", validation accuracy {percent(accuracy)}"
    head = f"{session.name}: step {session.steps_done:,} of {session.planned_steps:,}{shown}"
    places = f"Run directory: {run_dir}\nReport: {page}"
    return Trained(figures, "\n\n".join([head, repr(session.layers), repr(ledger), places]), run_dir, finished)


def report(path: str | Path, output: str | Path | None = None, **changes: Any) -> Path:
    """Write the page of a run directory or a checkpoint; what is there is only read, also while the run goes on.

    Args:
        path: the directory, whose newest whole checkpoint is taken, or one checkpoint.
        output: the page; default: ``report.html`` in the directory, or beside the checkpoint under its name.
        changes: arguments of `Session.load`, such as ``device=``.

    Raises:
        CheckpointError: when there is nothing to read.
        EgeriaLabError: when the page cannot be written.
    """
    place = check_path("report: path", path)
    if output is None:
        output = place / REPORT_NAME if place.is_dir() else place.with_suffix(".html")
    if place.exists():
        check_destination(output)
    session = Session.load(place, run_dir=None, **changes)
    try:
        return session.report(output)
    finally:
        session.close()


def say(event: Event) -> None:
    """One event as one line on stderr, above a progress bar if there is one."""
    if not isinstance(event, RunStarted) or event.step == 0:
        tqdm.write(f"step {event.step:>6}  {event.sentence()}", file=sys.stderr)


def _new_run_dir(path: Path, config: RunConfig, asked: str | Path | None) -> Path:
    """A directory without a run in it: two runs in one would be told apart by nobody."""
    named = asked if asked is not None else config["run_dir"]
    place = path.resolve().with_suffix("") if named is None else check_path("run_dir", named).resolve()
    if named is None and place == path.resolve():  # a file without a suffix
        place = place.with_name(f"{place.name}-run")
    if place.is_dir() and checkpoints(place):
        raise InvalidSettingError(
            f"{place} holds a run already: go on with it, egeria-lab resume {place}, or give another --run-dir."
        )
    return place
