"""The documentation: built with warnings as errors, complete, and with figures that stand somewhere else too."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import egeria_lab as lab

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CARDS = sorted((DOCS / "methods").glob("*.md"))


def modules() -> list[ModuleType]:
    names = {getattr(getattr(lab, name), "__module__", "") for name in lab.__all__}
    return [importlib.import_module(name) for name in sorted(names) if str(name).startswith("egeria_lab")]


@pytest.mark.timeout(600)
def test_documentation_builds_with_warnings_as_errors(tmp_path: Path) -> None:
    for package in ("mkdocs", "mkdocs_jupyter", "mkdocstrings", "material"):
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    settings = (tmp_path / "site" / "api" / "settings.html").read_text(encoding="utf-8")
    assert "a layer freezes" in settings or "Egeria&#39;s rule" in settings or "Egeria's rule" in settings
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert (tmp_path / "site" / "notebooks" / f"{path.stem}.html").is_file(), f"{path.name} is not in mkdocs.yml"


def test_every_public_name_has_a_docstring_with_an_example() -> None:
    for name in lab.__all__:
        thing = getattr(lab, name)
        if name == "__version__":
            continue
        assert thing.__doc__, f"{name} has no docstring"
        assert ">>>" in thing.__doc__, f"{name} has no example"


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    words = set(re.findall(r"\w+", pages))
    whole = {"data", "models", "presets", "loggers", "integrations"}
    errors = {name for name, _ in inspect.getmembers(importlib.import_module("egeria_lab.errors"), inspect.isclass)}
    missing = [n for n in lab.__all__ if n not in words and n not in whole | errors and n != "__version__"]
    assert missing == []


@pytest.mark.parametrize("path", [p for p in CARDS if p.stem != "index"], ids=lambda p: p.stem)
def test_method_cards_say_when_it_does_not_pay_and_whose_idea_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for heading in ("What ", "When ", "do not.**|does not.**", "**Source.**", "**Our figures.**"):
        assert any(part in text for part in heading.split("|")), f"{path.name} lacks {heading}"


@pytest.mark.parametrize("path", CARDS, ids=lambda p: p.stem)
def test_figures_of_method_cards_stand_in_readme_or_a_docstring(path: Path) -> None:
    """A figure in a card is a copy: where it was measured is said in README or beside the setting it is about."""
    known = (ROOT / "README.md").read_text(encoding="utf-8") + "".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "egeria_lab").rglob("*.py")
    )
    figures = path.read_text(encoding="utf-8").partition("**Our figures.**")[2]
    numbers = re.findall(r"\d+\.\d+", figures)
    assert [number for number in numbers if number not in known] == []


def test_the_glossary_has_one_sentence_a_term_in_order() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.M)[2:]
    assert len(rows) >= 30
    for term, meaning in rows:
        assert meaning.endswith("."), term
        assert ". " not in meaning, f"{term}: more than one sentence"
    terms = [term.lower() for term, _ in rows]
    assert len(set(terms)) == len(terms)
    assert terms == sorted(terms)


def test_the_citation_names_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {lab.__version__}\n" in text
    assert "cff-version: 1.2.0" in text


def test_paths_named_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = [name for name in re.findall(r"`([\w./-]+)`", text) if "/" in name or name.endswith(".py")]
    assert named
    for name in named:
        assert any((base / name).exists() for base in (ROOT, ROOT / "egeria_lab")), name
