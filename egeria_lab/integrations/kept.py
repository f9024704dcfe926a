"""A state as text and tensors, so that it fits into anybody's checkpoint and needs no pickle to be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from egeria_lab.checkpoint.tree import Tree, copied, join, split
from egeria_lab.errors import CheckpointError

FORMAT = "egeria_lab loop 1"


def kept(tree: Tree) -> dict[str, Any]:
    """A tree of plain values, arrays, events and tensors as one text and a dictionary of tensors.

    Example:
        >>> put_back(kept({"steps": 3}))
        {'steps': 3}
    """
    document, tensors = split(copied(tree))
    return {"format": FORMAT, "document": json.dumps(document), "tensors": dict(tensors)}


def put_back(state: Mapping[str, Any]) -> Any:
    """The tree again.

    Raises:
        CheckpointError: when it is none of ours.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise CheckpointError("the state is none that a LoopFreezer has written: give what its state_dict() gave.")
    return join(json.loads(state["document"]), state["tensors"])
