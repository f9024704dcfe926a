"""The progress bar of a blocking run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from egeria_lab.engine.recorder import StepRecord


class ProgressBar:
    """A tqdm bar that names loss and frozen layers; nothing at all when it is not wanted."""

    def __init__(self, steps: int, wanted: bool, title: str) -> None:
        self._bar: Any = None
        if wanted:
            # In a notebook tqdm brings widgets: importing egeria_lab must not.
            tqdm = importlib.import_module("tqdm.auto").tqdm
            self._bar = tqdm(total=steps, desc=title, unit="step", mininterval=0.5)

    def __enter__(self) -> Callable[[StepRecord], None]:
        return self.show

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, record: StepRecord) -> None:
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{record.loss:.3f}", frozen=len(record.frozen), refresh=False)
            self._bar.update()
