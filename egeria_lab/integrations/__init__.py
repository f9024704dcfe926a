"""Egeria Lab in other people's tools: loggers that watch a session, and freezing in other people's training loops.

`lightning` and `hugging_face` are imported when they are first asked for: they bring their packages with them.

Example:
    >>> LoopFreezer.__name__
    'LoopFreezer'
"""

from __future__ import annotations

import importlib
from types import ModuleType

from egeria_lab.errors import unknown_name
from egeria_lab.integrations.loop import LoopFreezer

_LATE = ("lightning", "hugging_face")

__all__ = ["LoopFreezer"]


def __dir__() -> list[str]:
    return [*__all__, *_LATE, "loggers"]


def __getattr__(name: str) -> ModuleType:
    if name.startswith("_"):
        raise AttributeError(name)
    if name not in _LATE:
        raise AttributeError(str(unknown_name("integration", name, [*__all__, *_LATE, "loggers"])))
    return importlib.import_module(f"egeria_lab.integrations.{name}")
