"""`attribute`: Captum on the live model at the paused step, and no trace of it afterwards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from egeria_lab.algorithms.activations import capture
from egeria_lab.algorithms.layers import LayerModules
from egeria_lab.errors import DataError, EgeriaLabError, InvalidSettingError, is_whole, require, unknown_name
from egeria_lab.interpret.methods import BY_NAME, PATH_METHODS, Case
from egeria_lab.interpret.no_trace import leaving_no_trace
from egeria_lab.interpret.records import Attribution, LayerAttribution
from egeria_lab.interpret.scores import Forward, Scores, Targets, target_classes

METHODS = tuple(BY_NAME)
"""Names of the methods; those that begin with ``layer_`` look at one layer."""


def attribute(
    model: nn.Module,
    inputs: Tensor,
    targets: Targets = None,
    *,
    method: str = "integrated_gradients",
    layer: str | None = None,
    layers: LayerModules | Mapping[str, nn.Module] | None = None,
    forward: Forward | None = None,
    baseline: float | Tensor = 0.0,
    n_steps: int = 32,
    seed: int = 0,
) -> Attribution:
    """Explain the scores of some samples by their inputs and by the layers, on the live model, leaving no trace.

    The model is run in eval mode; afterwards its gradients, flags, modes, buffers, hooks and frozen state, and the
    global random generators, are as before. Call it where no step is under way.

    Args:
        model: the live model.
        inputs: the samples, shape (samples, …); a copy is used, on the model's device.
        targets: the class to explain for each sample (or position); None for what the model predicts.
        method: one of `METHODS`: ``"integrated_gradients"``, ``"saliency"``, ``"input_x_gradient"``,
            ``"gradient_shap"``, ``"occlusion"`` (images), ``"layer_conductance"``, ``"layer_activation"``,
            ``"layer_gradcam"`` (convolutions).
        layer: the layer that a ``layer_`` method looks at; for the others, the layer whose output takes the place
            of the inputs, as token ids need it. A name in `layers`, or of any submodule.
        layers: the layer modules to compare: each gets a row with its conductance, and whether it is frozen.
        forward: ``forward(model, inputs)`` when ``model(inputs)`` is not how the model is called.
        baseline: the inputs that say nothing: a number (for token ids, the id of padding), or a tensor like one
            sample or all of them.
        n_steps: steps of the path from baseline to inputs, >= 1.
        seed: of the noise of gradient SHAP and of models that draw in eval mode.

    Raises:
        UnknownNameError: for an unknown method or layer.
        InvalidSettingError: for a method without the layer or the kind of input that it needs.
        DataError: for inputs or targets that do not fit the model.

    Source: Sundararajan et al. 2017 (integrated gradients), Lundberg & Lee 2017 (gradient SHAP), Zeiler & Fergus
    2014 (occlusion), Selvaraju et al. 2017 (Grad-CAM), Dhamdhere et al. 2019 (conductance); by Captum.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> found = attribute(model, torch.ones(2, 3), [0, 1], layers={"first": model[0], "head": model[2]})
        >>> found.maps.shape, [(row.name, row.state) for row in found.layers]
        (torch.Size([2, 3]), [('first', 'active'), ('head', 'active')])
        >>> model.training, model[0].weight.grad, len(model[0]._forward_hooks)
        (True, None, 0)
    """
    if method not in METHODS:
        raise unknown_name("attribution method", method, METHODS)
    require(is_whole(n_steps) and n_steps >= 1, "attribute", "n_steps", n_steps, "a whole number >= 1")
    if not isinstance(inputs, Tensor) or inputs.dim() == 0 or len(inputs) == 0:
        got = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise DataError(f"inputs must be one tensor of shape (samples, …) with a sample or more, got {got}.")
    modules = _modules_of(layers)
    states = _states_of(layers)
    chosen = _find(model, modules, layer, images=method == "layer_gradcam")
    start = _start(method, layer, chosen, modules, inputs)
    device = next((parameter.device for parameter in model.parameters()), inputs.device)
    with leaving_no_trace(model, seed):
        inputs = inputs.detach().to(device, copy=True)
        run = forward if forward is not None else _call
        _check_takes(model, run, inputs)
        nothing = _like(baseline, inputs)
        x, below = (_output_of(start, model, run, part) if start is not None else part for part in (inputs, nothing))
        scores = Scores(model, run, start)
        with torch.no_grad():
            classes = target_classes(scores.outputs(x, inputs), targets, len(inputs))
        case = Case(scores, x, below, classes, inputs, n_steps)
        maps = BY_NAME[method](case, chosen)
        conductances = case.conductances(modules)
        change = case.score_change()
    return Attribution(
        method=method,
        layer=layer,
        maps=_kept(maps),
        inputs=inputs.cpu(),
        targets=classes.cpu(),
        delta=_kept(maps.flatten(1).sum(1) - change) if method in PATH_METHODS else None,
        score_change=float(change.mean()),
        layers=tuple(_row(name, states[name], conductances.get(name)) for name in modules),
    )


def _check_takes(model: nn.Module, run: Forward, inputs: Tensor) -> None:
    try:
        with torch.no_grad():
            run(model, inputs.clone())  # its first module may work in place
    except EgeriaLabError:
        raise
    except Exception as error:
        words = str(error).strip().partition("\n")[0]
        raise DataError(
            f"the model cannot take inputs of shape {tuple(inputs.shape)} and type {inputs.dtype}: "
            f"{type(error).__name__}: {words}. Give inputs like those it is trained on, or forward=."
        ) from error


def _call(model: nn.Module, inputs: Tensor) -> object:
    return model(inputs)


def _modules_of(layers: LayerModules | Mapping[str, nn.Module] | None) -> dict[str, nn.Module]:
    if isinstance(layers, LayerModules):
        return {layer.name: layer.output for layer in layers}
    return dict(layers or {})


def _states_of(layers: LayerModules | Mapping[str, nn.Module] | None) -> dict[str, str]:
    if isinstance(layers, LayerModules):
        return {layer.name: _state(layer.parameters) for layer in layers}
    return {name: _state(list(module.parameters())) for name, module in (layers or {}).items()}


def _state(parameters: list[nn.Parameter]) -> str:
    if not parameters:
        return "no weights"
    return "active" if any(parameter.requires_grad for parameter in parameters) else "frozen"


def _find(
    model: nn.Module, modules: Mapping[str, nn.Module], layer: str | None, *, images: bool = False
) -> nn.Module | None:
    """The module whose output is meant: the cut behind a layer module, or a submodule itself.

    For `images` the submodule comes first: pooling and flattening may lie between it and the cut.
    """
    if layer is None:
        return None
    named: dict[str, nn.Module] = {name: module for name, module in model.named_modules() if name}
    known = {**modules, **named} if images else {**named, **modules}
    if layer not in known:
        raise unknown_name("layer", layer, dict.fromkeys([*modules, *named]))
    return known[layer]


def _start(
    method: str, layer: str | None, chosen: nn.Module | None, modules: Mapping[str, nn.Module], inputs: Tensor
) -> nn.Module | None:
    """The module whose output takes the place of the inputs; None to begin at the inputs themselves."""
    if method.startswith("layer_"):
        if chosen is None:
            known = f" Layers: {', '.join(modules)}." if modules else ""
            raise InvalidSettingError(f"{method} looks at one layer: say which by layer=.{known}")
        if inputs.is_floating_point():
            return None
        return next(iter(modules.values()), chosen if method != "layer_activation" else None)
    if method == "occlusion" and (chosen is not None or inputs.dim() != 4 or not inputs.is_floating_point()):
        given = f"layer={layer!r}" if chosen is not None else f"{inputs.dtype} of shape {tuple(inputs.shape)}"
        raise InvalidSettingError(
            "occlusion covers parts of images, floating point of shape (samples, channels, height, width), got "
            f"{given}; take integrated_gradients for other inputs."
        )
    if chosen is None and not inputs.is_floating_point():
        first = next(iter(modules), "the name of the embedding")
        raise InvalidSettingError(
            f"{method} needs inputs that have a gradient, and these are {str(inputs.dtype).removeprefix('torch.')} "
            f"(token ids?): say layer={first!r} to begin at what that layer puts out, or take a layer_ method."
        )
    return chosen


def _output_of(module: nn.Module, model: nn.Module, forward: Forward, inputs: Tensor) -> Tensor:
    with capture({"": module}) as outputs, torch.no_grad():
        forward(model, inputs)
    found = outputs.get("")
    if found is None or not found.is_floating_point() or found.dim() == 0 or len(found) != len(inputs):
        shape = "nothing" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
        raise InvalidSettingError(
            "attribution cannot begin at this layer: it must put out one floating-point row a sample, and gives "
            f"{shape}."
        )
    return found


def _like(baseline: float | Tensor, x: Tensor) -> Tensor:
    try:
        return torch.as_tensor(baseline, device=x.device).detach().to(x.dtype).expand_as(x).contiguous()
    except RuntimeError as error:
        shape = tuple(baseline.shape) if isinstance(baseline, Tensor) else baseline
        raise InvalidSettingError(
            f"baseline must be a number, or a tensor like one sample or all of {tuple(x.shape)}; got {shape}."
        ) from error


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _row(name: str, state: str, conductance: Tensor | None) -> LayerAttribution:
    if conductance is None:
        return LayerAttribution(name=name, state=state, conductance=None, mean_abs=None, total=None)
    return LayerAttribution(
        name=name, state=state, conductance=conductance, mean_abs=float(conductance.abs().mean()),
        total=float(conductance.flatten(1).sum(1).mean()),
    )  # fmt: skip
