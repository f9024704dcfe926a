"""Trees of plain values, tensors, arrays and events: copied in memory, or split into a document and tensors.

A *tree* is made of None, bool, int, float, str, lists, tuples, dictionaries, tensors, NumPy arrays and events.
Whatever else somebody wants to save is refused by name: nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria_lab.errors import CheckpointError
from egeria_lab.events import Event, event_from_dict

Tree = Any


def map_tensors(tree: Tree, function: Callable[[Tensor], Any]) -> Tree:
    """The same tree with each tensor replaced; containers are copied, arrays and events are shared.

    Example:
        >>> map_tensors({"a": [torch.ones(1), 2], "b": (None,)}, lambda x: float(x))
        {'a': [1.0, 2], 'b': (None,)}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_tensors(value, function) for value in tree]
    if isinstance(tree, tuple) and type(tree) is tuple:
        return tree if all(isinstance(x, Event) for x in tree) else tuple(map_tensors(x, function) for x in tree)
    return tree


def copied(tree: Tree) -> Tree:
    """A copy on the CPU that nobody else writes to.

    Example:
        >>> before = {"x": torch.zeros(1)}
        >>> after = copied(before)
        >>> _ = before["x"].add_(1)
        >>> after["x"]
        tensor([0.])
    """
    with torch.no_grad():
        return map_tensors(tree, lambda x: x.detach().clone() if x.device.type == "cpu" else x.detach().cpu())


def num_bytes(tree: Tree) -> int:
    """Bytes of the tensors and arrays in a tree, each storage counted once.

    Example:
        >>> num_bytes({"a": torch.zeros(3), "b": np.zeros(2)})
        28
    """
    return sum(storages(tree).values())


def storages(tree: Tree) -> dict[int, int]:
    """What the tensors and arrays in a tree lie in: something that names the memory while it is held → its bytes."""
    sizes: dict[int, int] = {}

    def visit(node: Tree) -> None:
        if isinstance(node, Tensor):
            sizes[node.untyped_storage().data_ptr() or id(node)] = node.untyped_storage().nbytes()
        elif isinstance(node, np.ndarray):
            whole = node if node.base is None else node.base
            sizes[id(whole)] = int(getattr(whole, "nbytes", node.nbytes))
        elif isinstance(node, Mapping):
            for value in node.values():
                visit(value)
        elif isinstance(node, (list, tuple)):
            for value in node:
                visit(value)

    visit(tree)
    return sizes


def split(tree: Tree) -> tuple[Any, dict[str, Tensor]]:
    """A JSON-able document, and the tensors it names by their place.

    Raises:
        CheckpointError: for a value that is no part of a tree, with its place.

    Example:
        >>> document, tensors = split({"rate": 0.1, "state": [torch.ones(2)], "betas": (0.9, 0.99)})
        >>> document
        {'rate': 0.1, 'state': [{'$tensor': 'state/0'}], 'betas': {'$tuple': [0.9, 0.99]}}
        >>> list(tensors)
        ['state/0']
    """
    tensors: dict[str, Tensor] = {}

    def place(path: str) -> str:
        name, count = path, 2
        while name in tensors:
            name, count = f"{path}#{count}", count + 1
        return name

    def visit(node: Tree, path: str) -> Any:
        if node is None or isinstance(node, (bool, int, float, str)):
            return _plain(node)
        if isinstance(node, Tensor):
            name, is_complex = place(path), node.is_complex()
            tensors[name] = torch.view_as_real(node.detach()) if is_complex else node.detach()
            return {"$complex" if is_complex else "$tensor": name}
        if isinstance(node, np.ndarray) and node.dtype == np.float64:
            name = place(path)
            tensors[name] = torch.from_numpy(np.array(node))
            return {"$array": name}
        if isinstance(node, Event):
            return {"$event": node.to_dict()}  # plain already; one may hold thousands of ids
        if isinstance(node, Mapping):
            return _visit_mapping(node, path)
        if isinstance(node, (list, tuple)):
            items = [visit(value, f"{path}/{i}" if path else str(i)) for i, value in enumerate(node)]
            return {"$tuple": items} if isinstance(node, tuple) else items
        raise CheckpointError(
            f"{path or 'the state'} is a {type(node).__name__}, which cannot be saved: a checkpoint holds numbers, "
            "texts, lists, dictionaries and tensors only."
        )

    def _visit_mapping(node: Mapping[Any, Any], path: str) -> Any:
        inside = {key: visit(value, f"{path}/{key}" if path else str(key)) for key, value in node.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in inside):
            return inside
        return {"$items": [[visit(key, path), value] for key, value in inside.items()]}

    return visit(tree, ""), tensors


def join(document: Any, tensors: Mapping[str, Tensor]) -> Tree:
    """The tree that `split` took apart.

    Raises:
        CheckpointError: when the document names what is not there.

    Example:
        >>> join({"x": {"$tuple": [1, {"$tensor": "x/1"}]}}, {"x/1": torch.zeros(1)})
        {'x': (1, tensor([0.]))}
    """

    def named(name: Any) -> Tensor:
        if not isinstance(name, str) or name not in tensors:
            raise CheckpointError(f"the document names a tensor {name!r} that is not there.")
        return tensors[name]

    special: dict[str, Callable[[Any], Any]] = {
        "$tensor": named,
        "$complex": lambda name: torch.view_as_complex(named(name).contiguous()),
        "$array": lambda name: named(name).numpy(),
        "$tuple": lambda items: tuple(visit(item) for item in items),
        "$event": lambda record: event_from_dict(visit(record)),
        "$items": lambda items: {visit(key): visit(value) for key, value in items},
    }

    def visit(node: Any) -> Any:
        if isinstance(node, list):
            return [visit(item) for item in node]
        if not isinstance(node, dict):
            return node
        if len(node) == 1:
            (key,) = node
            if key in special:
                return special[key](node[key])
        return {key: visit(value) for key, value in node.items()}

    return visit(document)


def _plain(value: Any) -> Any:
    """Subclasses of numbers and texts (NumPy's float64 is one) as what they are."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value
