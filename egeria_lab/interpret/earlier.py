"""Look at a model as it was: other weights for the time of a look, and the present ones again afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from egeria_lab.errors import InvalidSettingError


@contextmanager
def weights_of(model: nn.Module, state: Mapping[str, Tensor] | None) -> Iterator[None]:
    """The model with the weights and buffers of `state` inside the block, and bit for bit as before behind it.

    Args:
        model: the model; no step may be under way.
        state: a whole `state_dict` of this model, on any device, or None for the present one.

    Raises:
        InvalidSettingError: when the state does not fit the model.

    Example:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> now = model.weight.item()
        >>> with weights_of(model, {"weight": torch.tensor([[2.0]])}):
        ...     model.weight.item()
        2.0
        >>> model.weight.item() == now
        True
    """
    if state is None:
        yield
        return
    now = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    try:
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            what = str(error).splitlines()[-1].strip()
            raise InvalidSettingError(f"the given state is not one of this model: {what}") from error
        yield
    finally:
        model.load_state_dict(now)
