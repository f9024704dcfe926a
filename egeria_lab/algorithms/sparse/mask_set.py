"""The masks of one model: made, applied, locked, looked at, saved. When they change is decided elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria_lab.algorithms.sparse.bound import check_bound, is_made_of_units
from egeria_lab.algorithms.sparse.density import DENSITIES, live_units
from egeria_lab.algorithms.sparse.masked_weight import MaskedWeight
from egeria_lab.algorithms.sparse.masks import scheme_for
from egeria_lab.algorithms.sparse.mutation import first_mask
from egeria_lab.algorithms.sparse.settings import SparsitySettings
from egeria_lab.algorithms.sparse.weights import SparseWeight, named_weights, select_weights
from egeria_lab.errors import InvalidSettingError, unknown_name

Weights = Iterable[Tensor | int | str]
"""Parameters, their ``id()``, or their names."""


class MaskSet:
    """Masks on the leaf tensors of a model, beside the model; base of `masked_training.SparseTraining`.

    Attributes:
        model: the model.
        settings: what was asked for.
        optimizer: whose state is kept zero under masks, or None.
        dense: name → reason of each weight that could be masked and stays dense.

    Args and errors: as in `masked_training.SparseTraining`.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: SparsitySettings,
        *,
        optimizer: Optimizer | None = None,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(settings, SparsitySettings):
            raise InvalidSettingError(
                f"settings must be MEST(), SET(), RigL() or StaticSparsity(), got {type(settings).__name__}."
            )
        check_bound(model, optimizer, state)
        inner = getattr(model, "_orig_mod", None)  # a compiled model is a wrapper around the module that is meant
        self.model: nn.Module = inner if isinstance(inner, nn.Module) else model
        self.settings = settings
        self.optimizer = optimizer
        self.dense: dict[str, str] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._weights: dict[str, MaskedWeight] = {}
        if state is not None:
            self.load_state_dict(state)
            return
        selection = select_weights(self.model, settings)
        self.dense = selection.dense
        self._weights = self._bound(selection.sparse)
        counts = self.unit_counts(settings.sparsity_at(0.0))
        for masked in self._weights.values():
            self._make_mask(masked, counts[masked.name])
        self._apply(self._weights.values())

    def apply(self) -> None:
        """Zero what lies under masks (weights, optimizer state of their shape), except in frozen layers."""
        self._apply(self._active())

    @torch.no_grad()
    def _apply(self, weights: Iterable[MaskedWeight]) -> None:
        pairs = [(tensor, masked.keep_on(tensor)) for masked in weights for tensor in self._tensors_of(masked)]
        if pairs:
            torch._foreach_mul_([tensor for tensor, _ in pairs], [keep for _, keep in pairs])

    def unit_counts(self, sparsity: float, *, clip: bool = True) -> dict[str, int]:
        """Name → units that are live at a sparsity.

        Args:
            sparsity: share of zeros in the masked layers together.
            clip: where a scheme does not allow that density, as much as it does instead of an error.
        """
        schemes = {name: masked.scheme for name, masked in self._weights.items()}
        densities = DENSITIES[self.settings.density](
            {name: scheme.shape for name, scheme in schemes.items()},
            1 - sparsity,
            {name: scheme.max_density for name, scheme in schemes.items()},
            clip=clip,
        )
        sizes = {name: masked.keep.numel() for name, masked in self._weights.items()}
        return live_units(sizes, {name: scheme.unit_size for name, scheme in schemes.items()}, densities)

    # ---- freezing --------------------------------------------------------------------------------------

    def lock(self, weights: Weights) -> tuple[str, ...]:
        """Leave masks and values of frozen layers alone until they are unlocked.

        Lock what the optimizer leaves alone: a locked tensor is not even multiplied by its mask. What has no
        ``requires_grad`` (`freeze_layers`) is left alone by itself.

        Args:
            weights: parameters, their ``id()``, or their names; those that are not masked are passed over.

        Returns:
            Names of the weights that are newly locked.
        """
        found = [masked for masked in self._find(weights) if not masked.locked]
        for masked in found:
            masked.locked = True
            masked.forget_gradient()
        return tuple(masked.name for masked in found)

    def unlock(self, weights: Weights) -> tuple[str, ...]:
        """The inverse of `lock`; names of the weights that are newly unlocked."""
        found = [masked for masked in self._find(weights) if masked.locked]
        for masked in found:
            masked.locked = False
        self.apply()  # optimizer state that was parked before a pruning may hold values under the mask
        return tuple(masked.name for masked in found)

    # ---- looking ---------------------------------------------------------------------------------------

    @property
    def masks(self) -> dict[str, Tensor]:
        """Name → mask, bool, the weight's shape; copies."""
        return {name: masked.keep != 0 for name, masked in self._weights.items()}

    @property
    def locked(self) -> tuple[str, ...]:
        """Names of the locked weights."""
        return tuple(name for name, masked in self._weights.items() if masked.locked)

    @property
    def live(self) -> int:
        """Live weights in all masked tensors together."""
        return sum(masked.live for masked in self._weights.values())

    @property
    def total(self) -> int:
        """Weights in all masked tensors together."""
        return sum(masked.keep.numel() for masked in self._weights.values())

    def live_counts(self) -> dict[str, int]:
        """Name → live weights."""
        return {name: masked.live for name, masked in self._weights.items()}

    def densities(self) -> dict[str, float]:
        """Name → share of live weights; masked weights only."""
        return {name: masked.live / masked.keep.numel() for name, masked in self._weights.items()}

    def densities_at(self, sparsity: float) -> dict[str, float]:
        """Name → share of weights that would be live at another sparsity; masked weights only."""
        counts = self.unit_counts(sparsity)
        return {n: counts[n] * m.scheme.unit_size / m.keep.numel() for n, m in self._weights.items()}

    def target_densities(self) -> dict[str, float]:
        """Name → share of weights that is live at the asked sparsity; masked weights only."""
        return {n: m.target * m.scheme.unit_size / m.keep.numel() for n, m in self._weights.items()}

    def density(self, name: str) -> float:
        """Share of live weights of a parameter, or of a module's ``weight``; 1 where there is no mask.

        Raises:
            UnknownNameError: for a name that the model does not have.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        parameter = parameters.get(name, parameters.get(f"{name}.weight"))
        if parameter is None:
            raise unknown_name("weight", name, parameters)
        masked = next((m for m in self._weights.values() if m.weight.parameter is parameter), None)
        return masked.live / masked.keep.numel() if masked is not None else 1.0

    # ---- keeping and ending ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly, taken between two steps: tensors and plain values."""
        sums = {name: m.gradient_sum.clone() for name, m in self._weights.items() if m.gradient_sum is not None}
        return {
            "masks": self.masks,
            "locked": list(self.locked),
            "gradient_sums": sums,
            "gradient_steps": {name: self._weights[name].gradient_steps for name in sums},
            "generator": self._generator.get_state(),
            "settings": mask_settings(self.settings),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved masks and apply them; the model's own weights are loaded before.

        The saved masks decide which weights are masked. A mask whose count is not that of the settings is
        brought to it by the next update.

        Raises:
            UnknownNameError: for a mask of a weight that the model does not have.
            InvalidSettingError: for a mask of another shape or scheme; nothing is changed then.
        """
        masks: Mapping[str, Tensor] = state["masks"]
        weights = named_weights(self.model, masks)
        for weight in weights:
            given, own = tuple(masks[weight.name].shape), tuple(weight.parameter.shape)
            if given != own:
                raise InvalidSettingError(
                    f"the saved mask of {weight.name} has shape {given}, and the weight has {own}; load it into the "
                    "model that it was saved from."
                )
        bound = self._bound(weights)
        self._check_scheme(bound, state)
        self._weights = bound
        for name, masked in self._weights.items():
            masked.set_mask(masks[name])
            if name in state["gradient_sums"]:
                masked.gradient_sum = state["gradient_sums"][name].to(masked.keep.device, copy=True)
                masked.gradient_steps = int(state["gradient_steps"][name])
        self.apply()
        for name in state["locked"]:
            self._weights[name].locked = True
        self._generator.set_state(state["generator"])

    def _check_scheme(self, bound: Mapping[str, MaskedWeight], state: Mapping[str, Any]) -> None:
        """Raise for masks that are not made of the units of this scheme: blocks that are none, say."""
        own, saved = mask_settings(self.settings), state.get("settings")
        spoken = ("scheme", "block_size") if self.settings.scheme == "block" else ("scheme",)
        there = " and ".join(f"{name}={saved[name]!r}" for name in spoken) if saved is not None else "another scheme"
        differs = saved is not None and any(saved[name] != own[name] for name in spoken)
        soft, masks = getattr(self.settings, "soft_bound", False), state["masks"]
        unfit = next((m.name for m in bound.values() if not is_made_of_units(m, masks[m.name], soft)), None)
        if differs or unfit is not None:
            here = " and ".join(f"{name}={own[name]!r}" for name in spoken)
            raise InvalidSettingError(
                f"the saved masks are of {there} and cannot go on under {here}; give the settings that they were made "
                "with, or make new masks (leave state= out)."
            )

    def close(self) -> None:
        """Let go of model and optimizer: weights stay as they are, and nothing is masked any more."""
        self._weights = {}
        self.optimizer = None

    # ---- inside ----------------------------------------------------------------------------------------

    def _active(self) -> list[MaskedWeight]:
        return [masked for masked in self._weights.values() if not masked.held]

    def _tensors_of(self, masked: MaskedWeight) -> list[Tensor]:
        """The weight and its optimizer state of the same shape, looked up anew: freezing takes it out and back."""
        parameter = masked.weight.parameter
        state = self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}
        same = [x for x in state.values() if isinstance(x, Tensor) and x.shape == parameter.shape]
        return [parameter, *(x for x in same if x.is_floating_point())]

    def _find(self, weights: Weights) -> list[MaskedWeight]:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        wanted: set[int] = set()
        for weight in [weights] if isinstance(weights, (Tensor, int, str)) else weights:
            if isinstance(weight, str) and weight not in parameters:
                raise unknown_name("weight", weight, parameters)
            wanted.add(
                weight if isinstance(weight, int) else id(parameters[weight] if isinstance(weight, str) else weight)
            )
        return [masked for masked in self._weights.values() if id(masked.weight.parameter) in wanted]

    def _bound(self, weights: Iterable[SparseWeight]) -> dict[str, MaskedWeight]:
        """The weights with their schemes and target counts; everything live."""
        before = self._weights
        self._weights = {}
        try:
            for weight in weights:
                scheme = scheme_for(self.settings.scheme, weight.name, weight.shape, self.settings.block_size)
                keep = torch.ones_like(weight.parameter, requires_grad=False)
                self._weights[weight.name] = MaskedWeight(weight, scheme, 0, keep, scheme.num_units)
            targets = self.unit_counts(self.settings.sparsity, clip=False)
            for name, masked in self._weights.items():
                masked.target = targets[name]
            return self._weights
        finally:
            self._weights = before

    def _make_mask(self, masked: MaskedWeight, count: int) -> None:
        first = masked.weight.outputs_first
        values = first(masked.weight.parameter.detach().abs()) if self.settings.init == "magnitude" else None
        masked.set_mask(first(first_mask(masked.scheme, count, self._generator, values)))


def mask_settings(settings: SparsitySettings) -> dict[str, Any]:
    """What decides which masks there are and how many weights they keep, as plain values.

    Example:
        >>> from egeria_lab.algorithms.sparse.methods import StaticSparsity
        >>> mask_settings(StaticSparsity(sparsity=0.5))["scheme"]
        'unstructured'
    """
    values = {f.name: getattr(settings, f.name) for f in fields(SparsitySettings) if f.name != "init"}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
