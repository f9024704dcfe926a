"""What this machine has and what will be used."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from egeria_lab.engine.devices import choose_device
from egeria_lab.engine.threads import available_cores

PACKAGES = (
    "egeria-lab", "torch", "numpy", "pandas", "plotly", "ipywidgets", "anywidget", "jupyterlab", "captum",
    "scikit-learn", "tqdm",
)  # fmt: skip


def examine() -> dict[str, Any]:
    """Device, cores, threads, int8 engine, versions, widget packages and notes, as plain data.

    Example:
        >>> sorted(examine())
        ['cores', 'device', 'int8_engine', 'notes', 'threads', 'versions', 'widgets']
    """
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    engines = [engine for engine in torch.backends.quantized.supported_engines if engine != "none"]
    engine = torch.backends.quantized.engine
    widgets = {name: versions[name] is not None for name in ("ipywidgets", "anywidget", "jupyterlab")}
    device = choose_device("auto")
    return {
        "device": _device_in_words(device),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "int8_engine": engine if engine in engines else None,
        "versions": versions,
        "widgets": all(widgets.values()),
        "notes": _notes(device, widgets, engines),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_in_words(device: torch.device) -> str:
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def _notes(device: torch.device, widgets: dict[str, bool], engines: list[str]) -> list[str]:
    notes = []
    if device.type == "cpu":
        notes.append("torch finds no GPU: training runs on the CPU.")
    missing = [name for name, there in widgets.items() if not there]
    if missing:
        notes.append(f"the live dashboard needs {', '.join(missing)}: pip install {' '.join(missing)}")
    if not engines:
        notes.append("this build of torch has no int8 engine: the reference model is kept in float32.")
    capability = torch.backends.cpu.get_cpu_capability()
    if device.type == "cpu" and "AVX512" not in capability and platform.machine() in ("x86_64", "AMD64"):
        notes.append(f"this CPU ({capability}) has no fast bfloat16: precision='bf16' would be slower.")
    if available_cores() <= 2:
        notes.append(
            f"{available_cores()} core(s): a small model is often faster, and a browser beside it smoother, "
            "with torch.set_num_threads(1); `egeria-lab demo` measures and chooses."
        )
    return notes
