"""The project around the code: lint, types, dependency lists, notebooks, and what may not be in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONDA_NAMES = {"torch": "pytorch"}


def run_tool(*command: str) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_lint() -> None:
    run_tool("ruff", "check", ".")


def test_ruff_format() -> None:
    run_tool("ruff", "format", "--check", ".")


def test_mypy_strict() -> None:
    run_tool("mypy")


def test_environment_yml_has_the_dependencies_of_pyproject() -> None:
    lines = (ROOT / "environment.yml").read_text(encoding="utf-8").splitlines()
    entries = {line.strip().removeprefix("- ") for line in lines if line.startswith("  - ")}
    entries -= {"conda-forge", "pip", "pip:"}
    wanted = {f"python{PYPROJECT['project']['requires-python']}"}
    for dependency in PYPROJECT["project"]["dependencies"]:
        name, bounds = re.fullmatch(r"([\w-]+)(.*)", dependency).groups()  # type: ignore[union-attr]
        wanted.add(CONDA_NAMES.get(name, name) + bounds)
    assert entries == wanted


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.name)
def test_notebooks_have_no_saved_outputs(path: Path) -> None:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_there_are_notebooks() -> None:
    assert list((ROOT / "notebooks").glob("01_*.ipynb"))


def test_readme_has_its_two_commands_first() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    assert "egeria-lab demo" in blocks[0]
    assert "pytest" in blocks[1]
    assert all(len(block.strip().splitlines()) == 1 for block in blocks[:2])


def test_ci_runs_the_test_command_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    command = re.findall(r"```bash\n(.*?)```", text, re.S)[1].strip()
    assert "README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert command.startswith("python -m pip install")


def test_version_is_stated_once_more_in_the_package() -> None:
    init = (ROOT / "egeria_lab" / "__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{PYPROJECT["project"]["version"]}"' in init


def test_public_names_have_docstrings_with_examples() -> None:
    import egeria_lab as lab

    for name in lab.__all__:
        thing = getattr(lab, name)
        if not callable(thing) or (isinstance(thing, type) and issubclass(thing, Exception)):
            continue
        assert thing.__doc__, f"{name} has no docstring"
        assert ">>>" in thing.__doc__ or name == "StepRecord", f"{name} has no example"


def test_images_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text)
    assert images
    assert all((ROOT / image).is_file() for image in images)
