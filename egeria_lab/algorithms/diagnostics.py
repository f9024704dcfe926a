"""What to look at while a model is trained sparse, frozen and sieved: plots, never decisions.

Pure functions of weights, masks, inputs and counts; none needs a session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from egeria_lab.algorithms.activations import capture
from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.algorithms.tracing import undisturbed
from egeria_lab.errors import InvalidSettingError, is_number, require

Masks = Mapping[str, Tensor]
"""Parameter name → which of its positions are live: a mask, or weights that are zero where they are not."""

TOP_SHARE = 0.5
"""The paper compares with the half of the final live positions that have the largest magnitude."""


@dataclass(frozen=True, slots=True)
class Density:
    """How many of the positions are live; exact counts.

    Example:
        >>> Density(live=1, total=4).share
        0.25
    """

    live: int
    total: int

    @property
    def share(self) -> float:
        """Density in [0, 1]."""
        return self.live / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Churn:
    """What an update of the masks exchanged.

    Attributes:
        dropped: positions that were live and are not any more.
        grown: positions that are live now and were not.
        live: positions that are live now.
        before: positions that were live before.
    """

    dropped: int
    grown: int
    live: int
    before: int

    @property
    def share(self) -> float:
        """Changed positions ÷ live positions before and after, in [0, 1]: 0.3 when 30 % were exchanged."""
        return (self.dropped + self.grown) / (self.live + self.before) if self.live + self.before else 0.0

    @property
    def warning(self) -> str:
        """What is suspicious about it, or empty."""
        if self.live == 0:
            return "no weight is live: nothing is trained under these masks"
        if self.dropped == self.grown == 0:
            return "the update exchanged no weight: the masks are static (or all ones)"
        return ""


def names_by_layer(model: nn.Module, layers: LayerModules) -> dict[str, tuple[str, ...]]:
    """The parameter names of each layer module, for the `groups` of the functions below.

    Example:
        >>> from egeria_lab.algorithms.layers import layers
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False))
        >>> names_by_layer(model, layers(model, torch.zeros(1, 2)))
        {'0': ('0.weight', '0.bias'), '2': ('2.weight',)}
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {layer.name: tuple(names[id(parameter)] for parameter in layer.parameters) for layer in layers}


def densities(masks: Masks, groups: Mapping[str, Sequence[str]] | None = None) -> dict[str, Density]:
    """Live positions of each masked parameter, or of each layer.

    Args:
        masks: the masks.
        groups: layer → parameter names; those without a mask are skipped, layers without any too. None: one
            entry a parameter, whose `share` is what `training_flops` takes.

    Example:
        >>> found = densities({"a.weight": torch.tensor([True, False]), "b.weight": torch.ones(3)})
        >>> {name: density.share for name, density in found.items()}
        {'a.weight': 0.5, 'b.weight': 1.0}
    """
    found = {name: Density(int(mask.count_nonzero()), mask.numel()) for name, mask in masks.items()}
    members = _grouped(found, groups)
    return {
        group: Density(sum(found[name].live for name in names), sum(found[name].total for name in names))
        for group, names in members.items()
    }


def mask_churn(before: Masks, after: Masks, groups: Mapping[str, Sequence[str]] | None = None) -> dict[str, Churn]:
    """What changed between two sets of masks, for each parameter or each layer.

    Args:
        before: the older masks.
        after: the newer ones, of the same parameters and shapes.
        groups: as in `densities`.

    Raises:
        InvalidSettingError: when the two do not hold the same parameters.

    Example:
        >>> old, new = torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 1, 0])
        >>> churn = mask_churn({"w": old}, {"w": new})["w"]
        >>> churn.dropped, churn.grown, churn.share
        (1, 1, 0.5)
    """
    _same_parameters(before, after)
    found = {}
    for name, old in before.items():
        was, now = old != 0, after[name].to(old.device) != 0
        dropped, grown = int((was & ~now).count_nonzero()), int((now & ~was).count_nonzero())
        found[name] = Churn(dropped, grown, int(now.count_nonzero()), int(was.count_nonzero()))
    return {
        group: Churn(*(sum(getattr(found[name], part) for name in names) for part in Churn.__slots__))
        for group, names in _grouped(found, groups).items()
    }


def structural_similarity(
    earlier: Masks,
    final: Mapping[str, Tensor],
    groups: Mapping[str, Sequence[str]] | None = None,
    top: float = TOP_SHARE,
) -> dict[str, float]:
    """Share of the final model's important positions that are live already, in [0, 1], for each layer.

    Important are the live positions of each final weight with the largest magnitude, `top` of them (rounded
    up); equal magnitudes are taken in order of position.

    Args:
        earlier: masks (or sparse weights) of the model at some time.
        final: the weights at the end, zero where they are not live.
        groups: as in `densities`.
        top: share of the live positions, in (0, 1].

    Raises:
        InvalidSettingError: when the two do not hold the same parameters, or `top` is out of range.

    Source: SpFDE (NeurIPS 2022), section 3 (structural similarity of subnetworks).

    Example:
        >>> final = torch.tensor([3.0, -2.0, 1.0, 0.5, 0.0])
        >>> structural_similarity({"w": torch.tensor([1, 0, 0, 1, 1])}, {"w": final})    # has the 3, not the −2
        {'w': 0.5}
    """
    require(is_number(top) and 0 < top <= 1, "structural_similarity", "top", top, "a share in (0, 1]")
    _same_parameters(earlier, final)
    hits, wanted = {}, {}
    for name, weight in final.items():
        magnitude = weight.detach().abs().flatten()
        live = int(magnitude.count_nonzero())
        wanted[name] = -int(-(live * top) // 1)
        best = magnitude.sort(descending=True, stable=True).indices[: wanted[name]]
        hits[name] = int(earlier[name].to(weight.device).flatten()[best].count_nonzero())
    return {
        group: sum(hits[name] for name in names) / max(1, sum(wanted[name] for name in names))
        for group, names in _grouped(wanted, groups).items()
    }


def representations(
    model: nn.Module,
    layers: LayerModules,
    inputs: object,
    forward: Callable[[nn.Module, object], object] | None = None,
) -> dict[str, Tensor]:
    """What each layer module makes of the same inputs, as centred Gram matrices; keep them to compare later.

    The model is left as it was; it runs in eval mode.

    Args:
        model: the model.
        layers: its layer modules.
        inputs: a batch of b samples, the same at every time; at least 3.
        forward: ``forward(model, inputs)`` when ``model(inputs)`` is not how the model is called.

    Returns:
        Layer → Gram matrix, shape ``(b, b)``, float64, on the CPU.

    Example:
        >>> from egeria_lab.algorithms.layers import layers
        >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(6, 4)
        >>> {name: tuple(gram.shape) for name, gram in representations(model, layers(model, x), x).items()}
        {'0': (6, 6), '2': (6, 6)}
    """
    call = forward if forward is not None else (lambda m, x: m(x))
    modules = {layer.name: layer.output for layer in layers}
    with undisturbed(model), torch.no_grad(), capture(modules, _centred_gram) as grams:
        call(model, inputs)
    return {name: grams[name] for name in modules if name in grams}


def representational_similarity(earlier: Mapping[str, Tensor], later: Mapping[str, Tensor]) -> dict[str, float]:
    """Linear CKA between two models, layer by layer, in [0, 1]; 1 means the same up to rotation and scale.

    Args:
        earlier: from `representations`, at some time.
        later: the same of the later (final) model, on the same inputs.

    Raises:
        InvalidSettingError: when the two do not hold the same layers or samples.

    Source: Kornblith et al., ICML 2019, section 3; used by SpFDE (NeurIPS 2022) as a diagnostic.

    Example:
        >>> gram = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
        >>> representational_similarity({"a": gram}, {"a": 4 * gram})
        {'a': 1.0}
    """
    _same_parameters(earlier, later)
    similarity = {}
    for name, x in earlier.items():
        y = later[name]
        norms = float(x.norm() * y.norm())
        both_constant = not bool(x.any()) and not bool(y.any())
        cka = float((x * y).sum()) / norms if norms else float(both_constant)
        similarity[name] = min(1.0, max(0.0, cka))
    return similarity


def forgetting_histogram(
    counts: Tensor | Sequence[int], never_correct: Tensor | None = None, most: int | None = None
) -> dict[str, int]:
    """How many samples were forgotten 0, 1, 2, … times, without a gap, and how many were never right.

    Args:
        counts: forgetting events of each sample, whole numbers >= 0, shape ``(samples,)``.
        never_correct: True for samples that were never right, same shape; they cannot be forgotten and are
            counted apart. None when there are none.
        most: the last column; samples with more events are counted there too, under ``"8+"`` for 8.

    Raises:
        InvalidSettingError: for counts that are negative or no whole numbers, or shapes that differ.

    Example:
        >>> forgetting_histogram([0, 0, 1, 3], torch.tensor([False, True, False, False]), most=2)
        {'0': 1, '1': 1, '2+': 1, 'never correct': 1}
    """
    counts = torch.as_tensor(counts)
    if counts.is_floating_point() or counts.dim() != 1 or bool((counts < 0).any()):
        raise InvalidSettingError(
            f"forgetting counts must be whole numbers >= 0 in one row, got {counts.dtype} of shape "
            f"{tuple(counts.shape)}{', some negative' if bool((counts < 0).any()) else ''}."
        )
    never = torch.zeros_like(counts, dtype=torch.bool) if never_correct is None else never_correct.bool()
    if never.shape != counts.shape:
        raise InvalidSettingError(
            f"never_correct must tell it for each of the {len(counts):,} samples, got shape {tuple(never.shape)}."
        )
    seen = counts[~never].long()
    bins = torch.bincount(seen if most is None else seen.clamp(max=most), minlength=1).tolist()
    named = {str(events): number for events, number in enumerate(bins)}
    if most is not None and bool((seen > most).any()):
        named[f"{most}+"] = named.pop(str(most))
    return named if never_correct is None else {**named, "never correct": int(never.count_nonzero())}


def _centred_gram(activations: Tensor) -> Tensor:
    rows = activations.detach().flatten(1) if activations.dim() > 1 else activations.detach()[:, None]
    centred = rows.double() - rows.double().mean(dim=0, keepdim=True)
    return (centred @ centred.T).cpu()


def _same_parameters(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    missing = sorted(a.keys() ^ b.keys())
    if missing:
        raise InvalidSettingError(f"both must hold the same names to be compared; only one has {', '.join(missing)}.")
    for name in a:
        if a[name].shape != b[name].shape:
            raise InvalidSettingError(
                f"{name!r} has shape {tuple(a[name].shape)} in one and {tuple(b[name].shape)} in the other; "
                "compare the same parameters (or the same samples)."
            )


def _grouped(found: Mapping[str, object], groups: Mapping[str, Sequence[str]] | None) -> dict[str, list[str]]:
    if groups is None:
        return {name: [name] for name in found}
    members = {group: [name for name in names if name in found] for group, names in groups.items()}
    return {group: names for group, names in members.items() if names}
