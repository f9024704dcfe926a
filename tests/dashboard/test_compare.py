"""Several runs in one picture: the numbers, the names, the files, what is drawn anew, what is refused."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import told_session

import egeria_lab as lab
from egeria_lab.dashboard import compare as module
from egeria_lab.dashboard.compare import Comparison, compare
from egeria_lab.dashboard.compare_figure import MOST_POINTS, compare_figure, look
from egeria_lab.dashboard.compare_runs import MOST_RUNS, Run, gather, read_run
from egeria_lab.dashboard.compare_table import accuracy_points
from egeria_lab.errors import CheckpointError, EgeriaLabError, InvalidSettingError, UnknownNameError

RULE = lab.Plasticity(interval_steps=2, window=4, patience=3, tolerance=0.6, reference="fp32")


def made(**how: Any) -> lab.Session:
    torch.set_num_threads(1)
    return lab.Session("mlp", "digits", **{"epochs": 4, "lr": 0.05, "seed": 0, "freeze": None, **how})


def trained(steps: int = 0, **how: Any) -> lab.Session:
    session = made(**how)
    session.run(steps or None, progress=False)
    return session


@pytest.fixture(scope="module")
def pair() -> tuple[lab.Session, lab.Session]:
    by_hand = made()
    by_hand.freeze("layers.1")
    by_hand.run(progress=False)
    return trained(), by_hand


def test_the_table_says_what_the_histories_say(pair: tuple[lab.Session, lab.Session]) -> None:
    plain, by_hand = pair
    table = lab.compare(plain=plain, hand=by_hand).table
    assert table.index.tolist() == ["plain", "hand"]
    for name, session in zip(table.index, pair, strict=True):
        row, steps, valid = table.loc[name], session.history.steps, session.history.epochs["valid_accuracy"]
        assert row["final_accuracy"] == valid[-1]
        assert row["best_accuracy"] == valid.max()
        assert row["flops"] == steps["train_flops"].sum()
        assert row["seconds"] == steps["elapsed_seconds"][-1]
        assert row["frozen_layers"] == len(session.layers.frozen)
    assert table["flops_saved"]["plain"] == 0
    assert table["flops_saved"]["hand"] == pytest.approx(by_hand.savings().to_dict()["flops"]["saved_fraction"])


def test_a_thawed_layer_is_not_counted_as_frozen() -> None:
    session = made()
    session.freeze("layers.0")
    session.freeze("layers.1")
    session.step(3)
    session.thaw("layers.0")
    session.step(3)
    assert compare(session).table["frozen_layers"].tolist() == [1]


def test_settings_that_differ_are_named_and_no_others(pair: tuple[lab.Session, lab.Session]) -> None:
    other = made(seed=1, freeze=RULE, lr=0.1)
    differ = compare(a=pair[0], b=other).table.columns[9:].tolist()
    assert differ == ["freeze", "seed", "optimizer.lr"]
    spelled = compare(a=pair[0], b=other).table.loc["b", "freeze"]
    assert spelled.startswith("Plasticity(")
    assert "tolerance=0.6" in spelled
    assert "distance" not in spelled  # as usual
    moved = made(freeze=RULE)
    moved.override("freeze.tolerance", 0.3)
    moved.step()
    table = compare(a=made(freeze=RULE), b=moved).table
    assert table["freeze.tolerance"].tolist() == ["0.6", "0.3"]
    assert len(table.columns) == 10


def test_accuracy_lies_where_time_and_work_were(pair: tuple[lab.Session, lab.Session]) -> None:
    history = pair[1].history
    ends = history.epochs["step"].astype(int)
    x, y, valid = accuracy_points(Run("hand", pair[1]), "seconds")
    assert valid
    assert y.tolist() == history.epochs["valid_accuracy"].tolist()
    assert x == pytest.approx(history.steps["elapsed_seconds"][ends - 1])
    work, _, _ = accuracy_points(Run("hand", pair[1]), "flops")
    assert work == pytest.approx(history.steps["train_flops"].cumsum()[ends - 1])
    early, _, valid = accuracy_points(Run("early", trained(5)), "steps")
    assert (early.tolist(), valid) == ([1, 2, 3, 4, 5], False)


def test_the_figure_has_a_line_for_each_run_twice_and_the_frozen_stretches(
    pair: tuple[lab.Session, lab.Session],
) -> None:
    figure = lab.compare(plain=pair[0], hand=pair[1]).figure()
    assert [trace.name for trace in figure.data if trace.type == "scatter"] == ["plain", "hand"] * 2
    (frozen,) = [trace for trace in figure.data if trace.name == "frozen by hand"]
    assert list(frozen.y) == [1]
    assert (frozen.base[0], frozen.base[0] + frozen.x[0]) == (0, pair[1].steps_done)
    titles = [note.text for note in figure.layout.annotations]
    assert titles[2:] == ["freeze timeline: plain", "freeze timeline: hand"]
    with pytest.raises(UnknownNameError, match="x axis"):
        lab.compare(pair[0]).figure(x="hours")


def test_lines_are_told_apart_and_thin() -> None:
    assert len({look(i)[:2] for i in range(MOST_RUNS)}) == MOST_RUNS
    assert len({look(i)[1] for i in range(3)}) == 3  # not by colour alone
    figure = compare_figure([Run("long", told_session(60, steps=3000))])
    assert max(len(t.x) for t in figure.data if t.type == "scatter") <= MOST_POINTS


def test_nothing_to_draw_is_said() -> None:
    nothing = compare(made())
    assert "no step yet" in nothing.figure().layout.annotations[0].text
    assert "no step yet" in nothing._repr_html_()
    assert nothing.table["final_accuracy"].isna().all()


def test_names() -> None:
    one = made()
    names = [run.name for run in gather([one, one], {"mine": one})]
    assert names == ["mlp on digits (1)", "mlp on digits (2)", "mine"]


def test_names_are_distinct_in_every_mix(pair: tuple[lab.Session, lab.Session]) -> None:
    one, other = pair
    mixed = lab.compare(one, **{"mlp on digits": other})
    assert mixed.table.index.tolist() == ["mlp on digits (1)", "mlp on digits (2)"]
    names = [run.name for run in gather([one, one], {"mlp on digits (1)": other, "mlp on digits": other})]
    assert names == ["mlp on digits (2)", "mlp on digits (3)", "mlp on digits (1)", "mlp on digits (4)"]


def test_a_path_that_no_file_can_have_is_one_sentence() -> None:
    for path in ("a\0", "a" * 300, ""):
        with pytest.raises(InvalidSettingError, match=r"^lab\.compare: path "):
            compare(path)


def test_names_are_shown_as_text_not_as_html() -> None:
    page = compare(**{"<b>x</b>": trained(2)})._repr_html_()
    assert "<b>x</b>" not in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page


@pytest.mark.parametrize(
    ("given", "words"),
    [((), "lab.compare takes 1 to 12 runs, got 0"), ((3,), "takes sessions, checkpoints and run directories, got int")],
)
def test_bad_input_is_one_sentence(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InvalidSettingError, match=words) as caught:
        lab.compare(*given)
    assert "\n" not in str(caught.value)


def test_too_many_runs_are_refused() -> None:
    with pytest.raises(InvalidSettingError, match="got 13"):
        lab.compare(*[told_session(3, steps=100)] * (MOST_RUNS + 1))


def test_checkpoints_and_run_directories_are_read_and_left_alone(tmp_path: Path) -> None:
    session = made(run_dir=tmp_path / "run", freeze=RULE)
    session.freeze("layers.0")
    session.step(15)
    session.save(tmp_path / "one.ckpt")
    session.step(5)
    session.close()
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").iterdir())}
    found = lab.compare(tmp_path / "one.ckpt", str(tmp_path / "run"), live=session)
    assert [run.name for run in found.runs] == ["one.ckpt", "run", "live"]
    assert found.table["steps"].tolist() == [15, 20, 20]
    assert found.table["state"].tolist()[:2] == ["saved", "saved"]
    assert found.table["frozen_layers"].tolist()[0] == 1
    assert found.table.columns[9:].tolist() == []  # nothing differs
    assert {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").iterdir())} == before
    found.close()


def test_files_that_are_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_run(tmp_path / "missing.ckpt")
    (tmp_path / "bad.ckpt").write_text("no")
    with pytest.raises(CheckpointError):
        lab.compare(tmp_path / "bad.ckpt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        lab.compare(tmp_path / "empty")


def test_the_page_is_one_offline_file(pair: tuple[lab.Session, lab.Session], tmp_path: Path) -> None:
    path = lab.compare(plain=pair[0], hand=pair[1]).to_html(tmp_path / "c.html")
    page = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 6_000_000
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="http', page)
    assert "Settings that differ" in page
    assert "hand" in page
    with pytest.raises(EgeriaLabError, match="does not exist"):
        lab.compare(pair[0]).to_html(tmp_path / "nowhere" / "c.html")


def test_what_a_notebook_keeps_is_small_and_has_no_script(pair: tuple[lab.Session, lab.Session]) -> None:
    fragment = lab.compare(*pair, told_session(60, steps=2000))._repr_html_()
    assert len(fragment) < 150_000
    assert "<script" not in fragment
    assert fragment.count("Freeze timeline") >= 3


class Shown:
    """Takes what would be shown in a notebook."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[str, bool, str]] = []
        monkeypatch.setattr(module, "publish_display_data", self.take)
        monkeypatch.setattr(module, "REFRESH_SECONDS", 0.05)

    def take(self, data: dict[str, str], _metadata: object, *, transient: dict[str, str], update: bool) -> None:
        self.told.append((transient["display_id"], update, data["text/plain"]))


def until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def refreshing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "egeria-lab-compare"]


def test_it_is_drawn_anew_in_place_while_a_run_trains_and_rests_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, session = Shown(monkeypatch), made(epochs=400)
    comparison = lab.compare(live=session, still=trained(3))
    comparison._ipython_display_()
    until(lambda: not refreshing())  # nothing trains: no thread
    assert len(shown.told) == 1
    session.start()
    until(lambda: len(shown.told) >= 4)
    session.pause()
    until(lambda: session.state == "paused" and not refreshing())
    assert f"{session.steps_done:,}" in shown.told[-1][2]  # the last picture is of the last step
    assert {name for name, _, _ in shown.told} == {shown.told[0][0]}
    assert [update for _, update, _ in shown.told] == [False] + [True] * (len(shown.told) - 1)
    pictures = len(shown.told)
    session.resume()
    until(lambda: len(shown.told) > pictures)
    comparison.close()
    until(lambda: not refreshing())
    session.close()


def test_it_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    Shown(monkeypatch)
    session = made(epochs=400)
    comparison = Comparison(gather([session], {}))
    comparison.show()
    session.start()
    mine = weakref.ref(comparison)
    del comparison
    until(lambda: gc.collect() >= 0 and mine() is None)
    until(lambda: not refreshing())
    assert len(session.events._subscribers) == 0
    session.close()


def test_watching_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Shown(monkeypatch)
    plain, seen = trained(20), made()
    comparison = compare(seen)
    for _ in range(4):
        seen.step(5)
        comparison.show()
        comparison.figure()
    assert plain.history.steps["loss"].tolist() == seen.history.steps["loss"].tolist()
    comparison.close()


def test_the_package_offers_it_without_loading_a_chart_library() -> None:
    code = "import sys, egeria_lab as lab; lab.compare; print({'plotly', 'IPython', 'anywidget'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
