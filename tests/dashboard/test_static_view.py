"""The still picture: small, without scripts, well-formed, with every part of the dashboard."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from fakes import FakeSession, empty_session, told_session

from egeria_lab.dashboard.static_view import static_html
from egeria_lab.events import LayerPinned

PARTS = ("Loss", "Accuracy", "Plasticity", "Freeze timeline", "Savings", "Latest events")


def parse(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page.replace("<br>", "<br/>"))


@pytest.mark.parametrize("num_layers", [3, 5, 12, 60, 200])
def test_it_is_small_and_has_no_script(num_layers: int) -> None:
    page = static_html(told_session(num_layers, steps=2000))
    assert len(page.encode()) < 150_000
    assert not re.search(r"<script|<style|\son\w+=|https?://|url\(", page)


@pytest.mark.parametrize("make", [empty_session, told_session])
def test_it_is_well_formed_and_complete(make: type[FakeSession]) -> None:
    words = " ".join(parse(static_html(make())).itertext())
    for part in PARTS:
        assert part in words


def test_text_takes_the_colour_of_the_page() -> None:
    page = static_html(told_session(5))
    assert "color:var(--jp-content-font-color1,currentColor)" in page
    dark_or_light_only = re.findall(r'(?:fill|stroke)="(?:black|white|#000\w*|#fff\w*)"', page)
    assert dark_or_light_only == []


def test_pictures_are_described_for_who_cannot_see_them() -> None:
    pictures = [e for e in parse(static_html(told_session(5))).iter("svg") if e.get("role") == "img"]
    assert len(pictures) == 5
    assert all(picture.get("aria-label") for picture in pictures)


def test_the_timeline_has_a_bar_for_every_stretch() -> None:
    page = static_html(told_session(5))
    hovers = re.findall(r"<title>(layers\.\d), steps (\d+) to (\d+)", page)
    assert ("layers.2", "504", "1400") in hovers
    assert [layer for layer, _, _ in hovers].count("layers.0") == 2


def test_lines_are_lifted_at_a_refresh() -> None:
    session = told_session(3)
    strokes = re.findall(r'<path d="(M[^"]*)" stroke="#0072B2" stroke-width', static_html(session))
    generations = set(session.history.plasticity["generation"])
    assert len(generations) > 2
    assert max(path.count("M") for path in strokes) > 1
    assert strokes[0].count("M") == 1  # the loss is one line


def test_without_a_step_it_says_what_it_waits_for() -> None:
    page = static_html(empty_session())
    assert "no reading yet: bootstrapping until the loss settles" in page
    assert "no step yet" in page


def test_a_failure_is_told_and_names_stay_text() -> None:
    session = told_session(3, steps=200)
    session.error = ValueError("<img src=x>")
    session.events.append(LayerPinned(step=200, by="user", layer="<i>"))
    page = static_html(session)
    assert "ValueError: &lt;img src=x&gt;" in page
    assert "&lt;i&gt; pinned by user" in page
