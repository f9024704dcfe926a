"""Cut a model into its ordered layer modules, from one traced batch and not from names.

A *layer module* is a segment of the model between two cut points, front (input) to back (head). Cuts are
proved by replay (`tracing.is_good_cut`), so none lies inside a skip connection. A segment starts with a
module that owns weights (convolution, linear, embedding, attention); norms, activations and pooling go
with the segment before them. The file is one piece because cutting and naming what was cut is one walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from egeria_lab.algorithms.given_back import seed_generators
from egeria_lab.algorithms.ownership import parameter_owners
from egeria_lab.algorithms.tracing import Call, is_good_cut, record, undisturbed
from egeria_lab.errors import LayerError, unknown_name
from egeria_lab.tables import html_table, text_table

MOST_NAMED = 4
"""Modules named in a note."""


@dataclass(slots=True, eq=False)
class LayerModule:
    """One freezable part of a model.

    Attributes:
        name: qualified name of its main submodule; what `freeze` takes.
        title: what it is, in words.
        output: the submodule whose output is the cut behind this layer module.
        modules: all submodules inside.
        parameters: all parameters that are used here for the last time, trainable or not.
        note: why it is special (tied weights, shared modules), or empty.
        untrained: those of `parameters` that did not require a gradient when the model was cut.
    """

    name: str
    title: str
    output: nn.Module
    modules: list[nn.Module] = field(repr=False)
    parameters: list[nn.Parameter] = field(repr=False)
    note: str = ""
    untrained: list[nn.Parameter] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.untrained = [parameter for parameter in self.parameters if not parameter.requires_grad]

    @property
    def num_parameters(self) -> int:
        """Number of weights, trainable or not."""
        return sum(parameter.numel() for parameter in self.parameters)


class LayerModules(Sequence[LayerModule]):
    """The layer modules of one model, front to back; prints as a table."""

    def __init__(self, items: Sequence[LayerModule]) -> None:
        self._items = list(items)

    @property
    def names(self) -> list[str]:
        """Names, front to back."""
        return [item.name for item in self._items]

    def find(self, name: str) -> LayerModule:
        """The layer module called `name`.

        Raises:
            UnknownNameError: when there is none.
        """
        for item in self._items:
            if item.name == name:
                return item
        raise unknown_name("layer", name, self.names)

    def index_of(self, name: str) -> int:
        """Position of the layer module called `name`, front to back, from 0."""
        return self._items.index(self.find(name))

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[LayerModule]:
        return iter(self._items)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._items[index]

    def _rows(self) -> list[list[str]]:
        return [[item.name, item.title, f"{item.num_parameters:,}", item.note] for item in self._items]

    def __repr__(self) -> str:
        return text_table(["layer", "what", "parameters", "note"], self._rows())

    def _repr_html_(self) -> str:
        return html_table(["layer", "what", "parameters", "note"], self._rows())


def layers(
    model: nn.Module,
    example: object,
    *,
    names: Sequence[str] | None = None,
    forward: Callable[[nn.Module, object], object] | None = None,
) -> LayerModules:
    """Find the layer modules of any model by running one batch through it.

    The model is left as it was: modes, buffers, generators and hooks.

    Args:
        model: any module.
        example: one batch of inputs; two samples are enough.
        names: qualified names of the modules at whose outputs to cut, front to back, to decide it yourself; the
            head is added when it is not named. Cuts are still proved, and each module must run only once.
        forward: ``forward(model, example)`` when ``model(example)`` is not how the model is called.

    Raises:
        LayerError: when the model has no parameter, or a named module is no good place to cut.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> layers(model, torch.zeros(2, 4)).names
        ['0', '2']
    """
    call = forward if forward is not None else (lambda m, x: m(x))
    with undisturbed(model):

        def run() -> object:
            seed_generators(0)  # inside a fork: a model that draws numbers draws the same in each replay
            return call(model, example)

        with torch.no_grad():
            calls, outputs = record(model, run)
        weighted = [i for i, c in enumerate(calls) if _owns_weights(c.module)]
        if next(model.parameters(), None) is None:
            raise LayerError("the model has no weights: there is nothing to train and nothing to freeze.")
        if not weighted and names is None:
            whole = LayerModule("model", _title(model), model, list(model.modules()), list(model.parameters()))
            return LayerModules([whole])  # nothing to cut: one layer module, the head
        if names is None:
            cuts = _automatic_cuts(model, calls, weighted, run, outputs)
        else:
            cuts = _named_cuts(calls, names, run, outputs)
        return _segments(model, calls, cuts, run)


def _once(calls: list[Call]) -> set[nn.Module]:
    """Modules that ran exactly once: only their output can be told apart by a hook."""
    ran = [call.module for call in calls]
    return {module for module in ran if ran.count(module) == 1}


def _owns_weights(module: nn.Module) -> bool:
    return any(p is not None and p.dim() >= 2 for p in module._parameters.values())


def _blocks(model: nn.Module) -> tuple[str, ...]:
    """Name prefixes of repeated blocks (encoder layer, residual block), which are never cut inside.

    A block is a composite member of a Sequential or ModuleList whose class occurs there at least twice
    and that holds no smaller block.
    """
    found = []
    for name, container in model.named_modules():
        if not isinstance(container, (nn.Sequential, nn.ModuleList)):
            continue
        kinds = [type(member) for member in container]
        for key, member in container.named_children():
            composite = next(member.children(), None) is not None and not isinstance(
                member, (nn.Sequential, nn.ModuleList)
            )
            if composite and kinds.count(type(member)) >= 2:
                found.append(f"{name}.{key}." if name else f"{key}.")
    return tuple(a for a in found if not any(b != a and b.startswith(a) for b in found))


def _automatic_cuts(
    model: nn.Module,
    calls: list[Call],
    weighted: list[int],
    run: Callable[[], object],
    outputs: object,
) -> list[int]:
    """Between two neighbouring weighted calls, the outermost and then latest good cut, if any."""
    cuts = []
    blocks = _blocks(model)
    once = _once(calls)
    for before, after in pairwise(weighted):
        places = [
            i
            for i in range(before, calls[after].first)
            if calls[i].module in once and tree_flatten(calls[i].output)[0] and not calls[i].name.startswith(blocks)
        ]
        places.sort(key=lambda i: (calls[i].name.count("."), -i))
        good = next((i for i in places if is_good_cut(calls, i, run, outputs)), None)
        if good is not None:
            cuts.append(good)
    return cuts


def _named_cuts(calls: list[Call], names: Sequence[str], run: Callable[[], object], outputs: object) -> list[int]:
    known = list(dict.fromkeys(call.name for call in calls))
    once = _once(calls)
    cuts, positions = [], []
    for name in names:
        if name not in known:
            raise unknown_name("submodule", name, known)
        position = max(i for i, call in enumerate(calls) if call.name == name)
        positions.append(position)
        behind = any(_owns_weights(call.module) for call in calls[position + 1 :])
        if behind and calls[position].module not in once:
            raise LayerError(
                f"{name!r} runs more than once in a forward pass, so its output is no place to cut. Name a "
                "module that runs once."
            )
        if behind and not is_good_cut(calls, position, run, outputs):
            raise LayerError(
                f"{name!r} is no place to cut: the part behind it needs more from the front than its "
                "output (a skip connection, for example). Name the module at which the paths meet."
            )
        if behind:
            cuts.append(position)
    if positions != sorted(set(positions)):
        raise LayerError(f"layers must be named front to back, in the order in which they run: got {names}.")
    return cuts


def _segments(model: nn.Module, calls: list[Call], cuts: list[int], run: Callable[[], object]) -> LayerModules:
    ends = [*cuts, len(calls) - 1]
    uses: dict[nn.Module, set[int]] = {}
    for position, call in enumerate(calls):
        segment = next(i for i, end in enumerate(ends) if position <= end)
        uses.setdefault(call.module, set()).add(segment)
    # A container belongs to a segment only if all that was called inside it does.
    for position, call in enumerate(calls):
        for inner in calls[call.first : position]:
            uses[call.module] |= uses[inner.module]
    owners = parameter_owners(model, calls, cuts, run, uses)
    result = []
    for index in range(len(ends)):
        inside = [module for module, segments in uses.items() if segments == {index}]
        names = {module: name for name, module in model.named_modules()}
        inside = _with_uncalled_children(inside, uses)
        parameters = [p for p in model.parameters() if owners.get(id(p)) == index]
        main = _main_module(inside, names)
        shared = any(
            owners.get(id(p), index) > index for module in inside for p in module._parameters.values() if p is not None
        )
        result.append(
            LayerModule(
                name=names[main] if main is not None else calls[ends[index]].name,
                title=_title(main),
                output=calls[ends[index]].module,
                modules=inside,
                parameters=parameters,
                note=_note(shared, _beside(main, inside, names)),
            )
        )
    return _unique(result)


def _with_uncalled_children(inside: list[nn.Module], uses: dict[nn.Module, set[int]]) -> list[nn.Module]:
    """Add submodules that were never called by themselves (a container used through its weights)."""
    found = dict.fromkeys(inside)
    for module in inside:
        for child in module.modules():
            if child not in uses:
                found.setdefault(child)
    return list(found)


def _main_module(inside: list[nn.Module], names: dict[nn.Module, str]) -> nn.Module | None:
    """The outermost module with weights, the first of them when several stand side by side."""
    with_weights = [m for m in inside if any(p.dim() >= 2 for p in m.parameters())]
    if not with_weights:
        return None
    order = list(names)
    return min(with_weights, key=lambda m: (names[m].count("."), order.index(m)))


def _beside(main: nn.Module | None, inside: list[nn.Module], names: dict[nn.Module, str]) -> list[str]:
    """Other outermost modules with weights in the same segment, by name."""
    held = sorted((names[m] for m in inside if any(p.dim() >= 2 for p in m.parameters())), key=len)
    outermost = [name for i, name in enumerate(held) if not any(name.startswith(f"{other}.") for other in held[:i])]
    order = list(names.values())
    return sorted((n for n in outermost if main is None or n != names[main]), key=order.index)


def _note(shared: bool, beside: list[str]) -> str:
    parts = ["shares weights with a later layer"] if shared else []
    if beside:
        more = f" and {len(beside) - MOST_NAMED} more" if len(beside) > MOST_NAMED else ""
        parts.append(
            f"holds {', '.join(beside[:MOST_NAMED])}{more} too: no cut between them, as what follows needs more than "
            "one output"
        )
    return "; ".join(parts)


def _title(module: nn.Module | None) -> str:
    if module is None:
        return "no weights of its own"
    own = getattr(module, "title", None)
    if callable(own):
        return str(own())
    kinds = [type(m).__name__ for m in module.modules() if _owns_weights(m)]
    inside = ", ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds) if k != type(module).__name__)
    return f"{type(module).__name__}" + (f" ({inside})" if inside else "")


def _unique(items: list[LayerModule]) -> LayerModules:
    seen: dict[str, int] = {}
    for item in items:
        seen[item.name] = seen.get(item.name, 0) + 1
        if seen[item.name] > 1:
            item.name = f"{item.name}#{seen[item.name]}"
    return LayerModules(items)
