"""The device to train on."""

from __future__ import annotations

import torch

from egeria_lab.errors import InvalidSettingError


def choose_device(device: str | torch.device) -> torch.device:
    """The device to train on: ``"auto"`` takes a GPU when there is one.

    Raises:
        InvalidSettingError: when the device is not there.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidSettingError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidSettingError(f"device={device!r} was asked for, but torch finds no GPU; use 'auto' or 'cpu'.")
    return chosen
