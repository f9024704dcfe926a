"""Which weights of a model are masked, which stay dense, and why.

Masked are the weights of convolutions and linear layers (also the joint projection inside
``nn.MultiheadAttention``). A tensor used in two places is one weight with one mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from egeria_lab.algorithms.sparse.settings import SparsitySettings
from egeria_lab.errors import InvalidSettingError, LayerError, unknown_name

SHORTCUT_WORDS = ("shortcut", "downsample", "skip", "identity")
"""A 1 x 1 convolution with one of these words in its name is taken for the shortcut of a residual block."""


@dataclass(frozen=True, slots=True)
class SparseWeight:
    """One masked weight.

    Attributes:
        name: its name in ``model.named_parameters()``.
        parameter: the tensor itself, a leaf, the one that the optimizer holds.
        out_dim: its output dimension: 0, but 1 for transposed convolutions.
    """

    name: str
    parameter: nn.Parameter
    out_dim: int = 0

    def outputs_first(self, tensor: Tensor) -> Tensor:
        """The tensor, of the weight's shape, with the output dimension in front (its own inverse)."""
        return tensor.transpose(0, self.out_dim) if self.out_dim else tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape with the output dimension first."""
        return tuple(self.outputs_first(self.parameter.detach()).shape)


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome for one model.

    Attributes:
        sparse: the weights to mask, in the order of the model.
        dense: name → reason of each weight that could be masked and is not.
    """

    sparse: tuple[SparseWeight, ...]
    dense: dict[str, str]


def select_weights(model: nn.Module, settings: SparsitySettings) -> Selection:
    """Choose the weights of a model that are masked under the given settings.

    By default the first convolution, 1 × 1 shortcut convolutions, depthwise convolutions and the last
    layer stay dense, as do norm layers, biases, embeddings, and weights that are not trained
    (``requires_grad=False``). ``settings.dense`` and ``settings.sparse`` name weights, modules, or modules
    that hold others, and go before every rule.

    Raises:
        UnknownNameError: for a name that is neither a module nor a parameter.
        InvalidSettingError: for a name that is both dense and sparse, or that has nothing to mask.
        LayerError: when nothing is left to mask.

    Example:
        >>> from egeria_lab.algorithms.sparse.methods import StaticSparsity
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> chosen = select_weights(model, StaticSparsity(sparsity=0.5))
        >>> [weight.name for weight in chosen.sparse], chosen.dense
        (['0.weight'], {'2.weight': 'the last layer (dense_last)'})
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    candidates = {names[id(w)]: SparseWeight(names[id(w)], w, out) for _, _, w, out in _weights(model)}
    forced = _named(model, settings.sparse, candidates, names)
    kept_dense = _named(model, settings.dense, candidates, names)
    both = forced.keys() & kept_dense.keys()
    if both:
        raise InvalidSettingError(f"{min(both)} is named in dense= and in sparse=; name it in one of them.")
    reasons = _default_reasons(model, settings, names) | dict.fromkeys(kept_dense, "named in dense=")
    chosen = {name: weight for name, weight in (candidates | forced).items() if name in forced or name not in reasons}
    if not chosen:
        held = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if name in candidates)
        raise LayerError(
            f"no weight of this model would be sparse ({held or 'it has no convolution and no linear layer'}); "
            "name some in sparse=(…)."
        )
    order = [name for name in names.values() if name in chosen]
    dense = {name: reason for name, reason in reasons.items() if name in candidates and name not in chosen}
    return Selection(tuple(chosen[name] for name in order), dense)


def named_weights(model: nn.Module, names: Iterable[str]) -> tuple[SparseWeight, ...]:
    """The weights of the given parameter names, whatever the rules say: those of saved masks.

    Raises:
        UnknownNameError: for a name that the model does not have.

    Example:
        >>> [weight.shape for weight in named_weights(nn.Sequential(nn.Linear(4, 8)), ["0.weight"])]
        [(8, 4)]
    """
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    candidates = {own[id(w)]: SparseWeight(own[id(w)], w, out) for _, _, w, out in _weights(model)}
    return tuple(_named(model, names, candidates, own).values())


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter, int]]:
    """Name of the module, module, weight and output dimension of all that can be masked, in order."""
    for name, module in model.named_modules():
        if isinstance(module, (_ConvNd, nn.Linear)):
            if isinstance(module.weight, nn.Parameter):
                yield name, module, module.weight, int(isinstance(module, _ConvTransposeNd))
        elif isinstance(module, nn.MultiheadAttention):
            for part in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                weight = getattr(module, part)
                if isinstance(weight, nn.Parameter):
                    yield name, module, weight, 0


def _default_reasons(model: nn.Module, settings: SparsitySettings, names: dict[int, str]) -> dict[str, str]:
    """Name → reason of each weight that a rule keeps dense."""
    reasons: dict[str, str] = {}
    found = list(_weights(model))
    convolutions = [entry for entry in found if isinstance(entry[1], _ConvNd)]
    for name, module, weight, _ in convolutions:
        if settings.dense_shortcuts and _is_shortcut(name, module):
            reasons[names[id(weight)]] = "a 1x1 shortcut convolution (dense_shortcuts)"
        if settings.dense_depthwise and _is_depthwise(module):
            reasons[names[id(weight)]] = "a depthwise convolution (dense_depthwise)"
    if settings.dense_first and convolutions:
        reasons[names[id(convolutions[0][2])]] = "the first convolution (dense_first)"
    if settings.dense_last and found:
        reasons[names[id(found[-1][2])]] = "the last layer (dense_last)"
    for _, _, weight, _ in found:
        if not weight.requires_grad:
            reasons[names[id(weight)]] = "it is not trained (requires_grad=False)"
    return reasons


def _is_shortcut(name: str, module: nn.Module) -> bool:
    assert isinstance(module, _ConvNd)
    return set(module.kernel_size) == {1} and any(word in name.lower() for word in SHORTCUT_WORDS)


def _is_depthwise(module: nn.Module) -> bool:
    assert isinstance(module, _ConvNd)
    return module.groups == module.in_channels > 1


def _named(
    model: nn.Module, given: Iterable[str], candidates: dict[str, SparseWeight], names: dict[int, str]
) -> dict[str, SparseWeight]:
    """The weights that the user's names mean; a module means every weight in it that can be masked."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    result: dict[str, SparseWeight] = {}
    for name in given:
        if name in parameters:
            parameter = parameters[name]
            own = names[id(parameter)]
            if parameter.dim() < 2:
                raise InvalidSettingError(
                    f"{name} has {parameter.dim()} dimension(s): only weights with two or more can be masked."
                )
            result[own] = candidates.get(own, SparseWeight(own, parameter))
        elif name in modules and name:
            inside = {id(p) for p in modules[name].parameters()}
            covered = {key: weight for key, weight in candidates.items() if id(weight.parameter) in inside}
            if not covered:
                raise InvalidSettingError(f"{name} holds no convolution and no linear layer; name a weight in it.")
            result |= covered
        else:
            raise unknown_name("layer", name, [*(n for n in modules if n), *parameters])
    return result
