"""Real JupyterLab in headless Chromium: one server and one browser a test process, one notebook a test."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
KERNEL_IDLE = """() => {
  const widget = window.jupyterapp?.shell.currentWidget;
  return widget?.sessionContext?.session?.kernel?.status === "idle";
}"""
OUTPUTS = """() => {
  const cells = window.jupyterapp.shell.currentWidget.content.model.cells;
  return Array.from({length: cells.length}, (_, i) => cells.get(i)).map(
    (cell) => (cell.type === "code" ? cell.outputs.toJSON() : []));
}"""

POINTS = """() => Object.fromEntries(
  [...document.querySelector(".egl").querySelectorAll("[data-panel]")]
    .map((panel) => [panel.dataset.panel, panel.querySelector(".egl-plot")?.dataset.points])
    .filter(([, points]) => points !== undefined)
    .map(([name, points]) => [name, Number(points)]))"""


def give_up(sentence: str) -> None:
    """Skip the test; in CI fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(sentence)
    pytest.skip(sentence)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium; without one the tests are skipped, in CI they fail."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        give_up("no chromium on this machine (Debian: apt-get install chromium)")
    if find_spec("playwright") is None or find_spec("jupyterlab") is None:
        give_up("playwright or jupyterlab is not installed (pip install 'egeria-lab[test]')")
    return str(path)


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: $EGERIA_LAB_SCREENSHOTS, or a temporary folder."""
    wanted = os.environ.get("EGERIA_LAB_SCREENSHOTS")
    folder = Path(wanted) if wanted else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Lab:
    """A running JupyterLab server and a browser; opens notebooks made of cell sources."""

    def __init__(self, url: str, folder: Path, browser: Any) -> None:
        self.url, self.folder, self.browser = url, folder, browser

    def open(self, *cells: str, width: int = 1400, height: int = 1000) -> Notebook:
        """A page with a new notebook of these code cells, its kernel idle, nothing run yet."""
        return self._show(json.dumps(_notebook(cells)), width, height)

    def open_copy(self, path: Path, width: int = 1400, height: int = 1000) -> Notebook:
        """A page with a copy of that notebook, byte for byte, its kernel idle, nothing run yet."""
        return self._show(path.read_text(encoding="utf-8"), width, height)

    def _show(self, content: str, width: int, height: int) -> Notebook:
        name = f"{uuid.uuid4().hex[:8]}.ipynb"
        (self.folder / name).write_text(content, encoding="utf-8")
        page = self.browser.new_page(viewport={"width": width, "height": height})
        notebook = Notebook(page, f"{self.url}/lab/workspaces/{uuid.uuid4().hex}/tree/{name}", self.folder / name)
        notebook.load()
        return notebook


class Notebook:
    """One notebook in one browser page."""

    def __init__(self, page: Any, url: str, path: Path) -> None:
        self.page, self.url, self.path = page, url, path
        self.messages: list[str] = []
        page.on("pageerror", lambda error: self.messages.append(str(error)))

    def load(self) -> None:
        """Open or reload the page and wait until its kernel rests."""
        self.page.goto(self.url, timeout=180_000)
        self.page.wait_for_function(KERNEL_IDLE, timeout=180_000)

    def run_all(self) -> None:
        """Run every cell; returns when the kernel is idle again."""
        self.command("notebook:run-all-cells")
        self.page.wait_for_function(KERNEL_IDLE, timeout=180_000)

    def command(self, name: str, **arguments: Any) -> None:
        """Execute a command of JupyterLab."""
        self.page.evaluate("([n, a]) => window.jupyterapp.commands.execute(n, a)", [name, arguments])

    def outputs(self) -> list[list[dict[str, Any]]]:
        """The outputs of all cells as nbformat writes them."""
        return list(self.page.evaluate(OUTPUTS))

    def ask(self, expression: str) -> Any:
        """Evaluate a JSON-able Python expression in the kernel, beside whatever runs there."""
        reply = self.page.evaluate(
            """async (code) => {
              const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
              const asked = {code: "", user_expressions: {answer: code}, store_history: false};
              return (await kernel.requestExecute(asked).done).content.user_expressions.answer;
            }""",
            f"__import__('json').dumps({expression})",
        )
        assert reply["status"] == "ok", reply
        return json.loads(eval(reply["data"]["text/plain"]))

    def until(self, expression: str, seconds: float = 30) -> Any:
        """Ask until the answer is true."""
        end = time.monotonic() + seconds
        while not (answer := self.ask(expression)):
            assert time.monotonic() < end, f"not true within {seconds} s: {expression}"
            time.sleep(0.1)
        return answer

    def errors(self) -> list[str]:
        """Names of the errors that cells ended with."""
        return [one["ename"] for cell in self.outputs() for one in cell if one["output_type"] == "error"]

    @property
    def dashboard(self) -> Any:
        """The first dashboard on the page."""
        return self.page.locator(".egl").first

    def points(self) -> dict[str, int]:
        """How many points each chart of the first dashboard draws."""
        return dict(self.page.evaluate(POINTS))

    def close(self) -> None:
        """End the kernel and the page."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()


def _notebook(cells: tuple[str, ...]) -> dict[str, Any]:
    made = [
        {
            "cell_type": "code", "id": f"cell{i}", "source": source, "metadata": {}, "outputs": [],
            "execution_count": None,
        }
        for i, source in enumerate(cells)
    ]  # fmt: skip
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(home: Path) -> dict[str, str]:
    """Own folders for the server, and this interpreter as its kernel."""
    kernel = home / "data" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    settings = home / "config" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    root = str(Path(__file__).parents[2])
    return {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "IPYTHONDIR": str(home / "ipython"),
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
    }


@pytest.fixture(scope="session")
def lab_url(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A JupyterLab server of its own: its address and its folder of notebooks."""
    home, folder = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("notebooks")
    port = _free_port()
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
        "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True",
        f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=",
    ]  # fmt: skip
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=_environment(home), stdout=log, stderr=log, cwd=home)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/api", server, home / "server.log")
        yield url, folder
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def lab(lab_url: tuple[str, Path], chromium: str) -> Iterator[Lab]:
    """The server with a browser beside it."""
    with import_module("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield Lab(*lab_url, browser)
        browser.close()


@pytest.fixture
def notebook(lab: Lab) -> Iterator[Callable[..., Notebook]]:
    """Opens notebooks and closes them after the test."""
    opened: list[Notebook] = []

    def open_notebook(*cells: str, **size: int) -> Notebook:
        opened.append(lab.open(*cells, **size))
        return opened[-1]

    yield open_notebook
    for one in opened:
        one.close()


@pytest.fixture
def lesson(lab: Lab) -> Iterator[Callable[..., Notebook]]:
    """Opens copies of our notebooks, no cell edited, and closes them after the test."""
    opened: list[Notebook] = []

    def open_lesson(path: Path, **size: int) -> Notebook:
        opened.append(lab.open_copy(path, **size))
        return opened[-1]

    yield open_lesson
    for one in opened:
        one.close()
