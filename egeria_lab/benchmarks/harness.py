"""Timing that can be trusted on a busy machine, and the one form in which every suite reports.

Functions that are compared run in turn, in one process: what slows the machine down slows them all, and the
ratio within a round is what counts.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from egeria_lab.benchmarks.charts import Chart, as_svg
from egeria_lab.engine.threads import available_cores
from egeria_lab.errors import require
from egeria_lab.tables import html_table

Result = dict[str, Any]
"""``{"suite", "machine", "versions", "seeds", "rows", "goals", "plots"}``, all of it JSON."""

SENSES = ("<=", ">=")


@dataclass(frozen=True, slots=True)
class Timing:
    """What one function took, round by round.

    Attributes:
        seconds: one duration a round, in order; round i of every compared function ran side by side.
    """

    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        """The middle duration."""
        return median(self.seconds)

    @property
    def spread_seconds(self) -> float:
        """Distance between the first and third quartile; 0 for a single round."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return high - low

    def ratio_to(self, other: Timing) -> float:
        """How many times as long as `other` this took: the median over rounds of the ratio within a round.

        Example:
            >>> Timing((2.0, 8.0, 2.0)).ratio_to(Timing((1.0, 4.0, 1.0)))
            2.0
        """
        return median(self._ratios(other))

    def ratio_range(self, other: Timing) -> tuple[float, float]:
        """Between which ratios the true median lies in 19 of 20 measurements; whatever the noise is distributed like.

        Counted off the sorted ratios on both sides of their middle, as a sign test does. Few rounds give no bound that
        holds so often: then it is the smallest and the largest.

        Example:
            >>> ones = Timing((1.0,) * 100)
            >>> Timing(tuple(1 + i / 1000 for i in range(100))).ratio_range(ones)
            (1.039, 1.06)
        """
        ratios = sorted(self._ratios(other))
        many = len(ratios)
        aside = max(0, math.floor((many - 1.96 * math.sqrt(many)) / 2) - 1) if many > 5 else 0
        return ratios[aside], ratios[many - 1 - aside]

    def _ratios(self, other: Timing) -> list[float]:
        return [mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True)]


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 9,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time named functions in turn, the order turning with the rounds; one round before is not counted.

    Args:
        functions: name → function without arguments.
        rounds: how often each is timed, >= 1.
        clock: seconds; `time.thread_time` leaves out what other processes do, for work of one thread.

    Example:
        >>> timings = interleave({"a": lambda: sum(range(10)), "b": lambda: sum(range(10_000))}, rounds=5)
        >>> timings["b"].ratio_to(timings["a"]) > 1
        True
    """
    require(rounds >= 1, "interleave", "rounds", rounds, "a whole number >= 1")
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        functions[name]()
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = clock()
            functions[name]()
            seconds[name].append(clock() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def goal(name: str, value: float, wanted: float, sense: str) -> dict[str, Any]:
    """One goal and whether it is met; a value that is not a number meets none.

    Example:
        >>> goal("speed", 2.5, 2, ">=")
        {'name': 'speed', 'value': 2.5, 'goal': 2, 'sense': '>=', 'met': True}
    """
    require(sense in SENSES, "goal", "sense", sense, "'<=' or '>='")
    met = value <= wanted if sense == "<=" else value >= wanted
    return {"name": name, "value": value, "goal": wanted, "sense": sense, "met": bool(met)}


def machine() -> dict[str, Any]:
    """What the figures were measured on.

    Example:
        >>> sorted(machine())
        ['cores', 'cpu', 'cpu_capability', 'gpu', 'system', 'torch_threads']
    """
    return {
        "system": platform.platform(),
        "cpu": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": available_cores(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    """What the figures were measured with.

    Example:
        >>> sorted(versions())
        ['egeria-lab', 'numpy', 'python', 'torch']
    """
    found = {name: version(name) for name in ("egeria-lab", "torch", "numpy")}
    return {"python": platform.python_version(), **found}


def result(
    suite: str,
    rows: Sequence[Mapping[str, Any]],
    goals: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    plots: Sequence[Chart] = (),
) -> Result:
    """Put the figures of one suite into the common form.

    Args:
        suite: its name.
        rows: one mapping a measured thing, with "name" and figures whose names end in their unit.
        goals: from `goal`.
        seeds: the seeds used.
        plots: from `charts.chart`, drawn on the suite's page.

    Example:
        >>> sorted(result("demo", [{"name": "a", "seconds": 1.0}], [goal("a", 1.0, 2.0, "<=")], [0]))
        ['goals', 'machine', 'plots', 'rows', 'seeds', 'suite', 'versions']
    """
    return {
        "suite": suite,
        "machine": machine(),
        "versions": versions(),
        "seeds": list(seeds),
        "rows": [dict(row) for row in rows],
        "goals": [dict(each) for each in goals],
        "plots": list(plots),
    }


def write(found: Result, directory: str | Path = "bench") -> tuple[Path, Path]:
    """Write ``<suite>.json`` and a page without outside parts beside it; answers with both paths.

    Example:
        >>> from tempfile import mkdtemp
        >>> paths = write(result("demo", [{"name": "a", "seconds": 1.0}], [], [0]), mkdtemp())
        >>> [path.name for path in paths]
        ['demo.json', 'demo.html']
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_page = folder / f"{found['suite']}.json", folder / f"{found['suite']}.html"
    as_json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    as_page.write_text(page(found), encoding="utf-8")
    return as_json, as_page


def page(found: Result) -> str:
    """The figures as one small HTML page."""
    goals = [
        [each["name"], f"{each['value']:.4g}", f"{each['sense']} {each['goal']:g}", "yes" if each["met"] else "no"]
        for each in found["goals"]
    ]
    columns = list(dict.fromkeys(key for row in found["rows"] for key in row))
    rows = [[_cell(row.get(column)) for column in columns] for row in found["rows"]]
    facts = [[key, str(value)] for part in ("machine", "versions") for key, value in found[part].items()]
    parts = [
        f"<h1>{escape(found['suite'])}</h1>",
        html_table(["goal", "value", "wanted", "met"], goals) if goals else "",
        "<div class='plots'>" + "".join(as_svg(plot) for plot in found["plots"]) + "</div>" if found["plots"] else "",
        html_table([column.replace("_", " ") for column in columns], rows),
        html_table(["measured on", ""], facts),
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(found['suite'])}</title><style>"
        ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:2rem;overflow-x:auto}"
        ".plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:1rem 2rem;"
        "max-width:1300px}figure{margin:0}figcaption{font-weight:600}table{border-collapse:collapse;margin:1rem 0}"
        "td,th{padding:.2rem .8rem;border-bottom:1px solid #8884}"
        "</style></head><body>" + "".join(parts) + "</body></html>\n"
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)
