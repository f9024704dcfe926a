"""One function for each method: what it asks of Captum, and with which settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from captum.attr import (
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    LayerActivation,
    LayerConductance,
    LayerGradCam,
    Occlusion,
    Saliency,
)
from torch import Tensor, nn

from egeria_lab.algorithms.activations import capture
from egeria_lab.errors import InvalidSettingError
from egeria_lab.interpret.conductance import MOST_ROWS, layer_conductances
from egeria_lab.interpret.scores import Scores

SHAP_SAMPLES = 16
SHAP_NOISE = 0.1
"""Standard deviation of the noise of gradient SHAP, as a share of that of the inputs."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """What is explained: `x` is the inputs, or what the start of the path put out for them."""

    scores: Scores
    x: Tensor
    baseline: Tensor
    targets: Tensor
    inputs: Tensor
    n_steps: int

    @property
    def extra(self) -> tuple[Tensor, Tensor]:
        return self.targets, self.inputs

    def leaf(self) -> Tensor:
        return self.x.detach().clone().requires_grad_()

    def rows(self) -> int:
        return max(MOST_ROWS, len(self.x))

    def conductances(self, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        if not modules or not self.x.is_floating_point():
            return {}
        return layer_conductances(self.scores, modules, self.x, self.baseline, self.extra, self.n_steps)

    def score_change(self) -> Tensor:
        """Of each sample, from the baseline to the inputs: what the maps of a path method should add up to."""
        with torch.no_grad():
            return self.scores(self.x, *self.extra) - self.scores(self.baseline, *self.extra)


PATH_METHODS = ("integrated_gradients", "gradient_shap", "layer_conductance")
"""Those whose maps should add up to the change of the score."""


def _integrated_gradients(case: Case, _layer: nn.Module | None) -> Tensor:
    maps: Tensor = IntegratedGradients(case.scores).attribute(
        case.leaf(), case.baseline, additional_forward_args=case.extra, n_steps=case.n_steps,
        internal_batch_size=case.rows(),
    )  # fmt: skip
    return maps


def _saliency(case: Case, _layer: nn.Module | None) -> Tensor:
    maps: Tensor = Saliency(case.scores).attribute(case.leaf(), additional_forward_args=case.extra)
    return maps


def _input_x_gradient(case: Case, _layer: nn.Module | None) -> Tensor:
    maps: Tensor = InputXGradient(case.scores).attribute(case.leaf(), additional_forward_args=case.extra)
    return maps


def _gradient_shap(case: Case, _layer: nn.Module | None) -> Tensor:
    noise = SHAP_NOISE * float(case.x.std(correction=0))
    maps: Tensor = GradientShap(case.scores).attribute(
        case.leaf(), case.baseline, n_samples=SHAP_SAMPLES, stdevs=noise, additional_forward_args=case.extra
    )
    return maps


def _occlusion(case: Case, _layer: nn.Module | None) -> Tensor:
    channels, *sides = case.x.shape[1:]
    window = (channels, *(max(1, side // 7) for side in sides))
    strides = (channels, *(max(1, side // 2) for side in window[1:]))
    maps: Tensor = Occlusion(case.scores).attribute(
        case.x, window, strides, case.baseline, additional_forward_args=case.extra,
        perturbations_per_eval=max(1, MOST_ROWS // len(case.x)),
    )  # fmt: skip
    return maps


def _layer_conductance(case: Case, layer: nn.Module | None) -> Tensor:
    maps = LayerConductance(case.scores, layer).attribute(
        case.leaf(), case.baseline, additional_forward_args=case.extra, n_steps=case.n_steps,
        method="riemann_trapezoid", internal_batch_size=case.rows(),
    )  # fmt: skip
    return _one(maps)


def _layer_activation(case: Case, layer: nn.Module | None) -> Tensor:
    return _one(LayerActivation(case.scores, layer).attribute(case.x, additional_forward_args=case.extra))


def _layer_gradcam(case: Case, layer: nn.Module | None) -> Tensor:
    assert layer is not None
    with capture({"": layer}) as outputs, torch.no_grad():
        case.scores(case.x, *case.extra)
    shape = tuple(outputs[""].shape) if outputs else ()
    if len(shape) != 4:
        raise InvalidSettingError(
            "layer_gradcam needs a layer that puts out images, shape (samples, channels, height, width); this one "
            f"gives {shape or 'no tensor'}. Take layer_conductance for it."
        )
    cam = LayerGradCam(case.scores, layer).attribute(
        case.leaf(), additional_forward_args=case.extra, relu_attributions=True
    )
    return _one(cam)


BY_NAME: dict[str, Callable[[Case, nn.Module | None], Tensor]] = {
    "integrated_gradients": _integrated_gradients,
    "saliency": _saliency,
    "input_x_gradient": _input_x_gradient,
    "gradient_shap": _gradient_shap,
    "occlusion": _occlusion,
    "layer_conductance": _layer_conductance,
    "layer_activation": _layer_activation,
    "layer_gradcam": _layer_gradcam,
}


def _one(found: Tensor | tuple[Tensor, ...]) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]
