"""A copy of a model that takes over states and delivers the outputs of chosen layers, on any one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from egeria_lab.algorithms.activations import capture
from egeria_lab.algorithms.model_copy import TensorName, plain_copy, tensor_names, unwrapped
from egeria_lab.algorithms.private_draws import PrivateDraws
from egeria_lab.algorithms.reference import evaluating
from egeria_lab.errors import LayerError

Reduce = Callable[[Tensor], Tensor]


class Enough(Exception):  # noqa: N818 - a signal, not an error
    """Raised inside a forward pass when everything wanted has been computed."""


@contextmanager
def ending_after(module: nn.Module | None) -> Iterator[None]:
    """End a forward pass behind `module` and go on after the block.

    Example:
        >>> model = nn.Sequential(nn.Identity(), nn.Linear(1, 1))
        >>> with ending_after(model[0]):
        ...     _ = model("the second layer never sees this")
    """

    def stop(_module: nn.Module, _inputs: object, _output: object) -> None:
        raise Enough

    handle = module.register_forward_hook(stop) if module is not None else None
    try:
        yield
    except Enough:
        pass
    finally:
        if handle is not None:
            handle.remove()


class ModelTwin:
    """A plain copy of a model into which states are loaded; runs on any one thread.

    Args:
        model: the training model; it is read and never changed.
        outputs: name → submodule of `model` whose output is wanted, front to back.
        forward: ``forward(model, content)`` runs the model.
        seed: seed of the draws that the model makes in eval mode, the same in every run, >= 0.

    Raises:
        LayerError: when the model cannot be copied.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        >>> twin = ModelTwin(model, {"0": model[0]}, lambda m, x: m(x))
        >>> twin.load({("0", "weight"): torch.ones(1, 1), ("0", "bias"): torch.ones(1)})
        >>> twin.run(torch.ones(1, 1), ["0"])
        {'0': tensor([[2.]])}
    """

    def __init__(
        self,
        model: nn.Module,
        outputs: Mapping[str, nn.Module],
        forward: Callable[[nn.Module, object], object],
        *,
        seed: int = 0,
    ) -> None:
        self.source = unwrapped(model)
        self.model = plain_copy(self.source)
        self.names = tensor_names(self.model)
        counterparts = self.counterparts()
        for name, module in outputs.items():
            if module not in counterparts:
                raise LayerError(f"the output of layer {name!r} is no part of the model.")
        self.outputs = {name: counterparts[module] for name, module in outputs.items()}
        self.forward = forward
        self.seed = seed
        self._draws: bool | None = None
        self._own = {(p, n): getattr(self.model.get_submodule(p), n) for p, n in self.names}

    def counterparts(self) -> dict[nn.Module, nn.Module]:
        """The copy's module for each module of the training model that has one."""
        copies = dict(self.model.named_modules())
        return {module: copies[path] for path, module in self.source.named_modules() if path in copies}

    def load(self, state: Mapping[TensorName, Tensor]) -> None:
        """Take over the tensors of `cloned_state`; names that are missing keep their values."""
        with torch.no_grad():
            for name, value in state.items():
                self._own[name].copy_(value)

    def run(self, content: object, wanted: Sequence[str], reduce: Reduce | None = None) -> dict[str, Tensor]:
        """Outputs of the wanted submodules, without gradients; nothing behind the last of them is run.

        Args:
            content: a batch on the CPU, as `forward` takes it.
            wanted: names of outputs.
            reduce: applied to each output at once, so that large ones need not be kept.
        """
        names = [name for name in self.outputs if name in set(wanted)]
        if not names:
            return {}
        draws = PrivateDraws(self.seed)
        with torch.no_grad(), ExitStack() as stack:
            if self._draws is not False:  # one run under watch tells whether the model draws at all
                stack.enter_context(draws)
            found = stack.enter_context(capture({name: self.outputs[name] for name in names}, reduce))
            with ending_after(self.outputs[names[-1]]):
                self.forward(self.model, content)
        self._draws = draws.used if self._draws is None else self._draws
        return found


@contextmanager
def running_here(model: nn.Module, seed: int) -> Iterator[None]:
    """Run the training model itself on the thread that trains, as its twins are run elsewhere.

    Eval mode, no gradients, not compiled (compiled calls pass hooks by), draws from the twins' seed. All of it
    is put back behind the block.

    Args:
        model: the training model.
        seed: seed of its draws, >= 0.

    Example:
        >>> model = nn.Dropout()
        >>> with running_here(model, 0):
        ...     model.training
        False
    """
    with ExitStack() as stack:
        for module in model.modules():
            if module._compiled_call_impl is not None:
                stack.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
                module._compiled_call_impl = None
            if isinstance(module, nn.TransformerEncoder):  # nested tensors bypass its layers
                stack.callback(setattr, module, "use_nested_tensor", module.use_nested_tensor)
                module.use_nested_tensor = False
        devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        torch.default_generator.manual_seed(seed)
        for device in devices:
            stack.enter_context(torch.cuda.device(device))
            torch.cuda.manual_seed(seed)
        yield
