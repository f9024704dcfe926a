"""The house keeps its order: imports point down, stand at the top of the file, and bring no widgets."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "egeria_lab"
ORDER = [
    "errors", "tables", "algorithms", "models", "events", "commands", "history", "config", "data",
    "distributed", "checkpoint", "interpret", "engine", "presets", "session", "integrations", "dashboard", "demo",
    "doctor", "benchmarks", "terminal", "cli", "__main__",
]  # fmt: skip
VIEW_PACKAGES = {"ipywidgets", "anywidget", "plotly", "IPython", "jupyterlab", "ipykernel"}
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports_of(tree: ast.AST) -> list[tuple[str, ast.stmt]]:
    """Every imported module of a file, names that are modules themselves included."""
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            inner = [name for name in names if name in MODULES]
            found += [(name, node) for name in (inner or [node.module])]
    return found


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_file_has_its_place_in_the_order() -> None:
    assert {room(name) for name in MODULES} <= set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down_and_stand_at_the_top(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = ORDER.index(room(module_name(path)))
    for name, node in imports_of(tree):
        if name.split(".")[0] != "egeria_lab":
            continue
        assert node in tree.body, f"line {node.lineno}: {name} is imported inside a function"
        assert name != "egeria_lab", f"line {node.lineno}: import the module that is meant"
        assert ORDER.index(room(name)) <= own, f"line {node.lineno}: {name} stands above {path.name}"


def test_no_circular_imports() -> None:
    graph = {
        name: {n for n, _ in imports_of(ast.parse(path.read_text(encoding="utf-8"))) if n in MODULES and n != name}
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join((*trail, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_only_dashboard_imports_view_packages() -> None:
    for name, path in MODULES.items():
        if room(name) == "dashboard":
            continue
        used = {n.split(".")[0] for n, _ in imports_of(ast.parse(path.read_text(encoding="utf-8")))}
        assert not used & VIEW_PACKAGES, f"{name} imports {used & VIEW_PACKAGES}"


def test_algorithms_need_torch_and_the_standard_library_only() -> None:
    allowed = {"torch", "egeria_lab", *sys.stdlib_module_names}
    for name, path in MODULES.items():
        if room(name) == "algorithms":
            used = {n.split(".")[0] for n, _ in imports_of(ast.parse(path.read_text(encoding="utf-8")))}
            assert used <= allowed, f"{name} imports {used - allowed}"


def test_late_imports_are_the_known_few() -> None:
    """`importlib.import_module` goes round the order; only doors to the dashboard and to optional packages use it."""
    users = {str(path.relative_to(PACKAGE)) for path in FILES if "import_module(" in path.read_text(encoding="utf-8")}
    known = {
        "session.py",
        "engine/progress.py",
        "data/digits.py",
        "integrations/loggers.py",
        "integrations/__init__.py",
        "integrations/cluster.py",
        "integrations/cluster_link.py",
    }
    assert users <= known


def test_importing_and_training_loads_no_widget_library() -> None:
    code = (
        "import sys, egeria_lab as lab\n"
        "s = lab.Session('mlp', 'digits', epochs=1); s.step(); s.freeze('layers.0'); s.savings()\n"
        f"print(sorted({VIEW_PACKAGES!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_files_stay_readable() -> None:
    """A file over 300 lines must say at its top why it is one piece."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 300:
            assert "one piece because" in text[:1500], f"{path.name} has {text.count(chr(10))} lines"
