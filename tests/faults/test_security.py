"""Each claim of SECURITY.md that no other test shows: where is written, what is shown, what is read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import egeria_lab as lab
from egeria_lab.benchmarks.harness import page, result
from egeria_lab.checkpoint.file import read, write
from egeria_lab.dashboard.app import Dashboard
from egeria_lab.dashboard.report import render_report
from egeria_lab.engine.arguments import NOT_KEPT
from egeria_lab.errors import CheckpointError

ROOT = Path(__file__).parents[2]
EVIL = "<script>alert('x')<&\"script>"


@pytest.fixture
def evil() -> Iterator[lab.Session]:
    """A session in which everything is called like a script."""
    session = named(EVIL)
    yield session
    session.close()


def named(text: str) -> lab.Session:
    """A session in which model, layers, classes and data are called like that, and something has happened to them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(text, nn.Sequential(nn.Linear(6, 8), nn.ReLU()))
            self.add_module(f"second {text}", nn.Linear(8, 8))
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self.children():
                x = module(x)
            return x

    Net.__name__ = Net.__qualname__ = text
    data = lab.data.load("synthetic", num_samples=64, num_valid=16, shape=(6,), num_classes=3)
    called = replace(data, name=text, classes=(text, "b", "c"), source=text, licence=text)
    session = lab.Session(
        Net(), called, batch_size=16, epochs=4, freeze=lab.Plasticity(interval_steps=2), sieve=lab.RandomSieve(),
        sparsity=lab.MEST(sparsity=0.5),
    )  # fmt: skip
    session.step(4)
    session.freeze(text)
    session.override("freeze.tolerance", 0.3, layer=f"second {text}")
    session.commands.put(lab.commands.FreezeLayer(layer=f"no such {text}"))  # rejected, with its name in the reason
    session.step(4)
    return session


def scripts(html: str) -> list[str]:
    return re.findall(r"<script\b[^>]*>", html, flags=re.IGNORECASE)


def test_names_cannot_become_tags_in_the_report(evil: lab.Session) -> None:
    html = render_report(evil)
    assert "<script>alert(" not in html
    assert "&lt;script&gt;alert(" in html, "the names are there, escaped"
    assert scripts(html) == ["<script>"] * len(scripts(html))
    plain = named("tame")
    assert len(scripts(html)) == len(scripts(render_report(plain))), "a script that is not ours"
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"']?(https?:)?//", html)
    assert not re.search(r"<[a-z]+[^>]*\son\w+=", re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL))
    plain.close()


def test_names_cannot_become_tags_in_tables_of_a_notebook(evil: lab.Session) -> None:
    found = [evil.layers, evil.savings(), evil.layer_modules, evil.what_if()]
    for shown in found:
        html: str = shown._repr_html_()
        assert "<script" not in html.lower()
        assert "<table" in html
    assert "&lt;script&gt;" in evil.layers._repr_html_()


def test_names_cannot_become_tags_in_the_saved_picture(evil: lab.Session) -> None:
    dashboard = Dashboard(evil)
    shown, _ = dashboard._repr_mimebundle_()
    assert "&lt;script&gt;" in shown["text/html"]
    assert "<script" not in shown["text/html"].lower()
    dashboard.close()


def test_what_the_dashboard_writes_as_html_is_escaped() -> None:
    """A text that is put together for `innerHTML` takes names through `escapeHtml` or `tip` only."""
    static = ROOT / "egeria_lab" / "dashboard" / "static"
    everything = "".join(path.read_text(encoding="utf-8") for path in sorted(static.glob("*.js")))
    tip = re.search(r"(?:const tip = |function tip\().*?(?:;|\n\})", everything, flags=re.DOTALL)
    assert tip is not None
    assert "escapeHtml(" in tip.group(0)
    for attribute in re.findall(r"data-lane=\"\$\{(.*?)\}\"", everything):
        assert attribute.startswith("escapeHtml("), attribute
    assert not re.search(r"\beval\(|document\.write|insertAdjacentHTML|outerHTML", everything)


def test_names_cannot_become_tags_on_a_benchmarks_page() -> None:
    html = page(result("demo", [{"name": EVIL, EVIL: EVIL}], [], [0]))
    assert "<script" not in html


@pytest.mark.parametrize("name", [name for name in NOT_KEPT if name not in ("self", "paused", "undo_bytes")])
def test_a_checkpoint_that_says_where_to_save_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    session = lab.Session("mlp", "digits", epochs=1, freeze=None)
    session.step()
    tree = read(session.save("a.ckpt"))
    session.close()
    assert name not in tree["arguments"]
    tree["arguments"][name] = {"value": "../outside" if name == "run_dir" else 1}
    write("a.ckpt", tree)
    with pytest.raises(CheckpointError, match=rf"says {name}=, which no checkpoint may decide"):
        lab.Session.load("a.ckpt")
    with pytest.raises(CheckpointError, match=rf"says {name}=, which no checkpoint may decide"):
        lab.replay("a.ckpt")
    assert not (tmp_path / "outside").exists()


def test_names_are_no_parts_of_paths(evil: lab.Session, tmp_path: Path) -> None:
    """A layer may be called like a way out of a directory."""
    model = nn.Sequential()
    model.add_module("/tmp/out", nn.Linear(6, 4))
    model.add_module("/etc/passwd", nn.Linear(4, 3))
    data = replace(lab.data.load("synthetic", num_samples=64, shape=(6,), num_classes=3), name="../../data")
    run_dir = tmp_path / "deep" / "run"
    session = lab.Session(
        model, data, batch_size=16, epochs=4, freeze=None, run_dir=run_dir, save_every_steps=2,
        cache=lab.ActivationCache(directory=tmp_path / "deep" / "rows"),
    )  # fmt: skip
    session.step(4)
    session.freeze("/tmp/out")
    session.step(6)
    session.close()
    assert {path.name for path in tmp_path.iterdir()} == {"deep"}
    assert {path.name for path in (tmp_path / "deep").iterdir()} <= {"run", "rows"}


BETWEEN_RANKS = {"group.py"}
"""Where processes of one training hand values to each other, which none of them reads from a file."""


def test_nothing_that_executes_is_imported_for_reading() -> None:
    """No pickle, no `torch.load` that may unpickle, no `eval`; the search is in the syntax, not in words."""
    forbidden = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
    for path in sorted((ROOT / "egeria_lab").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Call):
                called, whole = ast.unparse(node.func), ast.unparse(node)
                assert called not in ("eval", "exec"), f"{path.name}:{node.lineno} calls {called}"
                if called == "torch.load":
                    assert "weights_only=True" in whole, f"{path.name}:{node.lineno} may unpickle anything"
                assert "allow_pickle=True" not in whole, f"{path.name}:{node.lineno} lets NumPy unpickle"
            assert path.name in BETWEEN_RANKS or not forbidden & set(names), (
                f"{path.name}:{node.lineno} imports {names}"
            )
