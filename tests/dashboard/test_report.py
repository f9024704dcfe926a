"""The report: complete, self-contained, safe to write, safe against what users name their things."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from fakes import empty_session, told_session
from plotly.offline import get_plotlyjs

import egeria_lab as lab
from egeria_lab.dashboard.report import check_destination, render_report, write_report, write_whole
from egeria_lab.errors import EgeriaLabError, InvalidSettingError
from egeria_lab.events import LayerFrozen, LayerPinned


@pytest.fixture(scope="module")
def page() -> str:
    """A report without the five megabytes of plotly.js in it."""
    session = told_session(5)
    session.ledger["memory"] = {"saved_fraction": 0.0, "why": "0 MB: trainable layers lie before it"}
    return render_report(session).replace(get_plotlyjs(), "")


def test_plotly_is_embedded_once_and_nothing_is_loaded(page: str) -> None:
    whole = render_report(told_session(3, steps=200))
    assert whole.count(get_plotlyjs()) == 1
    assert not re.findall(r"""(?:src|href)\s*=\s*["']|@import|url\(|https?://""", page)


def test_all_parts_are_there(page: str) -> None:
    for name in ("learning", "plasticity", "timeline", "savings", "savings-over-time"):
        assert page.count(f'id="figure-{name}"') == 1
    for heading in (
        "Layers",
        "What happened",
        "Settings",
        "Versions",
        "Savings, and the reason for each zero",
    ):
        assert f"<h2>{heading}</h2>" in page
    for card in ("Validation accuracy", "Frozen layers", "Computation saved", "Time saved", "Monitoring"):
        assert f'<div class="label">{card}</div>' in page


def test_savings_stand_side_by_side_with_reasons(page: str) -> None:
    assert re.search(r"theoretical</th><th[^>]*>measured</th><th[^>]*>amount</th><th[^>]*>why", page)
    assert "0 MB: trainable layers lie before it" in page
    assert "Cost of monitoring" in page


def test_events_are_told_in_words(page: str) -> None:
    session = told_session(5)
    for event in session.events.of(LayerFrozen, LayerPinned):
        assert event.sentence().replace("<", "&lt;") in page


def test_settings_show_default_and_layers_that_differ(page: str) -> None:
    assert "freeze.tolerance" in page
    assert "layers.1: 0.05" in page


def test_a_session_without_a_step_can_be_reported() -> None:
    page = render_report(empty_session()).replace(get_plotlyjs(), "")
    assert "no reading yet: bootstrapping until the loss settles" in page
    assert "Nothing has happened yet." in page


def test_a_failed_run_says_so() -> None:
    session = told_session(3, steps=200)
    session.state, session.error = "failed", ValueError("loss is <nan>")
    page = render_report(session)
    assert "The run failed: ValueError: loss is &lt;nan&gt;." in page


def test_names_cannot_break_out_of_the_page() -> None:
    session = told_session(3, steps=200)
    evil = "</script><script>alert(1)</script>"
    session.name = session.layers[0].title = session.layers[0].reason = evil
    session.events.append(LayerPinned(step=200, by="user", layer=evil))
    assert evil not in render_report(session)


def test_the_file_is_replaced_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    target = tmp_path / "run.html"
    target.write_text("old")
    written = write_report(told_session(3, steps=200), target)
    assert written == target
    assert target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert os.listdir(tmp_path) == ["run.html"]


def test_a_failing_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run.html"
    target.write_text("old")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(EgeriaLabError, match=r"Permission denied\. Choose a folder"):
        write_report(told_session(3, steps=200), target)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["run.html"]


def test_a_missing_folder_and_a_folder_as_target_give_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EgeriaLabError, match=r"folder does not exist\. Create .*missing first\."):
        write_report(empty_session(), tmp_path / "missing" / "run.html")
    with pytest.raises(EgeriaLabError, match="it is a folder"):
        write_report(empty_session(), tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_path_that_no_file_can_have_is_one_sentence(tmp_path: Path) -> None:
    for name in ("a\0", "a" * 300 + ".html", "\ud800"):
        with pytest.raises(InvalidSettingError, match=r"^Cannot write the report: path "):
            check_destination(f"{tmp_path}/{name}")
    longest = tmp_path / ("a" * 250 + ".html")
    assert write_whole(check_destination(longest), "page").read_text() == "page"
    assert list(tmp_path.iterdir()) == [longest]


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    link.symlink_to(target)
    assert write_report(lab.Session("mlp", "digits"), link) == target
    assert link.is_symlink()
    assert target.is_file()


@pytest.mark.parametrize("kind", ["pipe", "write-protected", "empty"])
def test_what_is_no_plain_writable_file_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    path: Path | str = tmp_path / "run.html"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "write-protected":
        Path(path).write_text("mine", encoding="utf-8")
        Path(path).chmod(0o444)
    else:
        path = ""
    with pytest.raises(lab.EgeriaLabError, match="Cannot write the report"):
        check_destination(path)
    if kind == "write-protected":
        assert Path(path).read_text(encoding="utf-8") == "mine"
    assert not list(tmp_path.glob(".egeria-lab-*"))
