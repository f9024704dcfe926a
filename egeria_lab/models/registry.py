"""The models that come by name, each built from its own seed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from egeria_lab.errors import require, unknown_name
from egeria_lab.models.mlp import Mlp
from egeria_lab.models.pretrained import EfficientNetLite0, MiniLm
from egeria_lab.models.resnet import DEPTHS, ResNet
from egeria_lab.models.transformer import Transformer

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "mlp": Mlp,
    **{f"resnet{depth}": partial(ResNet, depth) for depth in DEPTHS},
    "transformer": Transformer,
}
_PRETRAINED: dict[str, Callable[..., nn.Module]] = {"efficientnet-lite0": EfficientNetLite0, "minilm": MiniLm}


def names(*, pretrained: bool = True) -> tuple[str, ...]:
    """The name of every model that `build` knows.

    Args:
        pretrained: False leaves out those that come with weights, from packages of their own.

    Example:
        >>> names(pretrained=False)
        ('mlp', 'resnet8', 'resnet14', 'resnet20', 'resnet32', 'resnet56', 'transformer')
        >>> names()[-2:]
        ('efficientnet-lite0', 'minilm')
    """
    return (*_BUILDERS, *_PRETRAINED) if pretrained else tuple(_BUILDERS)


def build(name: str, *, input_shape: Sequence[int], num_classes: int, seed: int = 0, **options: Any) -> nn.Module:
    """Build a model on the CPU; the same seed gives the same weights, the global generator stays as it was.

    The model's `layers` is an `nn.Sequential` of its layer modules, front to back, so that they are called
    ``layers.0``, ``layers.1``, ...; each says what it is in `title()`.

    Args:
        name: one of `names()`.
        input_shape: shape of one input without the batch dimension, each size >= 1.
        num_classes: number of outputs, >= 1.
        seed: of the initial weights, >= 0.
        **options: ``mlp``: `hidden`, `dropout`; ``resnet…``: `width`, `shortcut`; ``transformer``: `dim`,
            `depth`, `heads`, `dropout`, `patch`, `vocabulary`, `head`; ``efficientnet-lite0``: `size`, `dropout`,
            `pretrained`; ``minilm``: `dropout`, `pretrained`. See the classes.

    Raises:
        UnknownNameError: for an unknown model or option.
        InvalidSettingError: for a value out of range.
        MissingPackageError: when a pretrained model's package is not installed.

    Example:
        >>> model = build("resnet8", input_shape=(1, 28, 28), num_classes=10)
        >>> len(model.layers), model.layers[0].title()
        (5, 'stem 1→16')
    """
    builders = {**_BUILDERS, **_PRETRAINED}
    if name not in builders:
        raise unknown_name("model", name, builders)
    builder = builders[name]
    known = [p.name for p in inspect.signature(builder).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise unknown_name(f"option of model {name!r}:", option, known)
    shape = tuple(input_shape)
    whole = bool(shape) and all(isinstance(size, int) and size >= 1 for size in shape)
    require(whole, name, "input_shape", shape, "one or more whole numbers >= 1, such as (1, 28, 28)")
    require(
        isinstance(num_classes, int) and num_classes >= 1,
        name,
        "num_classes",
        num_classes,
        "a whole number >= 1",
    )
    require(isinstance(seed, int) and seed >= 0, name, "seed", seed, "a whole number >= 0")
    # Only the CPU generator is forked and seeded: torch.manual_seed would seed every accelerator's as well.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return builder(input_shape=shape, num_classes=num_classes, **options)
