"""Start a few ranks as processes of their own, without a launcher that would end the others when one dies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")


def start(scenario: str, size: int, folder: Path) -> list[subprocess.Popen[str]]:
    """One process for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), scenario, str(folder)],
            env={**shared, "RANK": str(rank)} if size > 1 else dict(os.environ),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def ranks(scenario: str, size: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank wrote down; a rank that wrote nothing fails the test with what it printed."""
    processes = start(scenario, size, folder)
    printed = [process.communicate(timeout=300)[0] for process in processes]
    found = [folder / f"rank{rank}.json" for rank in range(size)]
    for path, text in zip(found, printed, strict=True):
        assert path.exists(), text
    return [json.loads(path.read_text()) for path in found]
