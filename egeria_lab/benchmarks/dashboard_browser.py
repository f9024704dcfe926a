"""The dashboard in real JupyterLab and headless Chromium: clicks, idle time, a conv net's training beside it, memory.

Needs the packages playwright and jupyterlab and a Chromium on this machine; without one of them the rows are
skipped and say so.
"""

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
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from egeria_lab.benchmarks.harness import goal

try:
    from playwright.sync_api import sync_playwright
except ImportError:  # an optional package
    sync_playwright = None  # type: ignore[assignment]

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
CELLS = (
    """
import dataclasses, time, torch
torch.set_num_threads(1)
import egeria_lab as lab
data = lab.data.load("fashion-mini")
data = dataclasses.replace(data, valid=torch.utils.data.Subset(data.valid, range(64)))  # evaluations would be noise
session = lab.Session(
    "resnet8", data, batch_size=16, epochs=1_000_000, seed=0, freeze=lab.Plasticity(tolerance=0.0), undo_bytes=0
)
for layer in session.layers.names:
    session.pin(layer)  # the slider that is moved is the tolerance: a net that froze would be too easy to train beside
stamps, put = [], session.commands.put
def noting(command):
    stamps.append(time.time())
    return put(command)
session.commands.put = noting
def pace():
    return session.steps_done, time.process_time(), time.perf_counter()
session.start()
""",
    "session.dashboard()",
)
IDLE = """() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === "idle" """
MOVE = """() => {
  const slider = document.querySelector(".egl-settings input[type=range]");
  slider.value = String((Number(slider.value) + 7) % 400);
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  const at = (performance.timeOrigin + performance.now()) / 1000;
  slider.dispatchEvent(new Event("change", { bubbles: true }));
  return at;
}"""
ASK = """async (code) => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const asked = {code: "", user_expressions: {answer: code}, store_history: false};
  return (await kernel.requestExecute(asked).done).content.user_expressions.answer;
}"""
Part = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def measure(quick: bool) -> Part:
    """Rows and goals of a real browser, or one row that says why there is none."""
    why = why_not()
    if why:
        return [{"name": "in a browser", "skipped": why}], []
    with TemporaryDirectory() as home, _server(Path(home)) as url, _page(url) as book:
        book.page.wait_for_function("() => document.querySelector('.egl-loss .egl-plot .main-svg')", timeout=90_000)
        time.sleep(3)
        clicks = _clicks(book, 40 if quick else 200)
        idle = _idle(book, 15 if quick else 60)
        beside = _beside(book, 3 if quick else 10)
        memory = _memory(book, 60 if quick else 1800)
    goals = [
        goal("browser: slider to queue, p95 milliseconds", clicks["p95_milliseconds"], 60, "<="),
        goal("browser: main thread idle", idle["idle_share"], 0.75, ">="),
        goal("browser: steps a kernel-CPU-second, open ÷ closed", beside["cpu_ratio"], 0.97, ">="),
        goal("browser: steps a second, open ÷ closed", beside["clock_ratio"], 0.9, ">="),
        goal("browser: growth of its memory, MB a minute", memory["browser_megabytes_a_minute"], 1, "<="),
    ]
    return [clicks, idle, beside, memory], goals


def why_not() -> str:
    """What is missing to measure in a browser; empty when nothing is."""
    if sync_playwright is None or find_spec("jupyterlab") is None:
        return "playwright or jupyterlab is not installed (pip install 'egeria-lab[test]')"
    if _chromium() is None:
        return "no chromium on this machine (Debian: apt-get install chromium)"
    return ""


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Book:
    """One notebook in one page, its kernel, and the browser's own counters."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self._devtools = page.context.new_cdp_session(page)
        # Processor time of the main thread: what other processes take of the machine is not ours.
        self._devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

    def ask(self, expression: str) -> Any:
        """A JSON-able expression in the kernel."""
        reply = self.page.evaluate(ASK, f"__import__('json').dumps({expression})")
        return json.loads(reply["data"]["text/plain"][1:-1])

    def run_cell(self, index: int) -> None:
        """Run one cell again."""
        self.page.evaluate(
            """async (index) => {
              window.jupyterapp.shell.currentWidget.content.activeCellIndex = index;
              await window.jupyterapp.commands.execute("notebook:run-cell");
            }""",
            index,
        )

    def counter(self, name: str) -> float:
        """One of Chromium's performance counters."""
        found = self._devtools.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in found if one["name"] == name))

    def heap(self) -> float:
        """Bytes of the page's heap after a collection."""
        self._devtools.send("HeapProfiler.collectGarbage")
        return self.counter("JSHeapUsedSize")


def _clicks(book: Book, number: int) -> dict[str, Any]:
    """From the slider's change in the page to the command in the kernel's queue, while training runs."""
    sent = []
    for _ in range(number):
        sent.append(book.page.evaluate(MOVE))
        time.sleep(0.25)
    stamps = book.ask("stamps")
    took = [1e3 * (there - here) for here, there in zip(sent, stamps[-number:], strict=False)]
    return {
        "name": "browser: slider to queue", "milliseconds": median(took), "moves": number, "lost": number - len(stamps),
        "p95_milliseconds": quantiles(took, n=20, method="inclusive")[-1],
    }  # fmt: skip


def _idle(book: Book, seconds: float) -> dict[str, Any]:
    """Share of the page's main thread that nothing runs on, all of JupyterLab included."""
    start, busy = time.perf_counter(), book.counter("TaskDuration")
    time.sleep(seconds)
    return {
        "name": "browser: main thread",
        "idle_share": 1 - (book.counter("TaskDuration") - busy) / (time.perf_counter() - start),
    }


def _beside(book: Book, rounds: int) -> dict[str, Any]:
    """Steps with the dashboard open in the page and closed, in turn, browser and training on the same cores."""
    ratios: list[tuple[float, float]] = []
    for _ in range(rounds):
        opened = _pace(book)
        book.ask("session.dashboard().close()")
        time.sleep(2)
        closed = _pace(book)
        book.run_cell(1)
        book.page.wait_for_function("() => document.querySelector('.egl-loss .egl-plot .main-svg')", timeout=60_000)
        time.sleep(3)
        ratios.append((opened[0] / closed[0], opened[1] / closed[1]))
    return {
        "name": "browser: training beside it",
        "cpu_ratio": median(ratio[0] for ratio in ratios), "clock_ratio": median(ratio[1] for ratio in ratios),
    }  # fmt: skip


def _pace(book: Book, seconds: float = 5.0) -> tuple[float, float]:
    before = book.ask("pace()")
    time.sleep(seconds)
    steps, cpu, clock = (later - earlier for later, earlier in zip(book.ask("pace()"), before, strict=True))
    return steps / cpu, steps / clock


def _memory(book: Book, seconds: float) -> dict[str, Any]:
    """Memory of the page and of the kernel over some minutes of training, from the first third to the last."""
    samples = []
    for _ in range(12):
        samples.append((book.heap(), book.ask("__import__('resource').getrusage(0).ru_maxrss * 1024")))
        time.sleep(seconds / 12)
    minutes = seconds * 8 / 12 / 60
    page, kernel = (
        (median(s[i] for s in samples[-4:]) - median(s[i] for s in samples[:4])) / 1e6 / minutes for i in (0, 1)
    )
    return {
        "name": "browser: memory", "seconds": seconds, "browser_megabytes": samples[-1][0] / 1e6,
        "browser_megabytes_a_minute": page, "kernel_megabytes_a_minute": kernel,
        "steps": book.ask("session.steps_done"),
    }  # fmt: skip


@contextmanager
def _page(url: str) -> Iterator[Book]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1200})
        page.goto(f"{url}/lab/workspaces/bench/tree/bench.ipynb")
        page.wait_for_function(IDLE, timeout=120_000)
        book = Book(page)
        page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
        yield book
        page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        browser.close()


@contextmanager
def _server(home: Path) -> Iterator[str]:
    """A JupyterLab of its own, with this interpreter as its kernel and own folders for everything."""
    kernel, books = home / "data" / "kernels" / "python3", home / "books"
    kernel.mkdir(parents=True)
    books.mkdir()
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    (books / "bench.ipynb").write_text(json.dumps(_notebook()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
        "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True",
        f"--ServerApp.root_dir={books}", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=",
    ]  # fmt: skip
    folders = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    environment = {**os.environ, **folders, "IPYTHONDIR": str(home / "ipython")}
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=home)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=30)


def _wait_for(url: str, server: subprocess.Popen[bytes], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not answer within {seconds:g} s.")


def _notebook() -> dict[str, Any]:
    cells: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "id": f"cell{i}",
            "source": source,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for i, source in enumerate(CELLS)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
