"""Mask schemes by name: single weights, blocks, kernel patterns, N of M.

The schemes themselves are in `schemes` and `patterns`; `mutation` chooses their units.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from egeria_lab.algorithms.sparse.patterns import NOfM, Pattern
from egeria_lab.algorithms.sparse.schemes import Block, Scheme, Unstructured
from egeria_lab.errors import InvalidSettingError, unknown_name

SCHEMES = ("unstructured", "block", "pattern", "2:4")
"""Names of the schemes; any ``"N:M"`` with 0 < N < M works like ``"2:4"``."""


def n_of_m(scheme: str) -> tuple[int, int] | None:
    """N and M of a scheme written as ``"N:M"``, or None when it is another scheme.

    Raises:
        InvalidSettingError: when N is not in 1 … M − 1.
        UnknownNameError: when it is no scheme at all.

    Example:
        >>> n_of_m("2:4"), n_of_m("block")
        ((2, 4), None)
    """
    if scheme in SCHEMES[:3]:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", scheme) if isinstance(scheme, str) else None
    if match is None:
        raise unknown_name("scheme", scheme, SCHEMES)
    quota, group = int(match[1]), int(match[2])
    if not 0 < quota < group:
        raise InvalidSettingError(f"a scheme N:M needs 0 < N < M, got {scheme!r}; for example '2:4'.")
    return quota, group


def scheme_for(scheme: str, name: str, shape: Sequence[int], block_size: int = 4) -> Scheme:
    """The scheme of one weight.

    Args:
        scheme: ``"unstructured"``, ``"block"``, ``"pattern"``, or N of M such as ``"2:4"``.
        name: name of the layer, for messages.
        shape: shape of the weight, output dimension first, input dimension second.
        block_size: outputs in one block.

    Raises:
        InvalidSettingError: when the layer does not fit the scheme.
        UnknownNameError: for a scheme that does not exist.

    Example:
        >>> scheme_for("block", "layers.3", (10, 4))
        Traceback (most recent call last):
        egeria_lab.errors.InvalidSettingError: layers.3 has 10 output channels, and the block scheme needs ...
    """
    ratio = n_of_m(scheme)
    if ratio is not None:
        return NOfM(shape, name=name, quota=ratio[0], group=ratio[1])
    if scheme == "block":
        return Block(shape, name=name, rows=block_size)
    return Pattern(shape) if scheme == "pattern" else Unstructured(shape)
