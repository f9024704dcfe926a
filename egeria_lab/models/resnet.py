"""Residual networks for small images, in the CIFAR style of He et al. 2016 (arXiv 1512.03385, section 4.2).

Three stages of n = (depth - 2) / 6 basic blocks; the second and third stage halve the image and
double the channels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import pad

from egeria_lab.errors import require

DEPTHS = (8, 14, 20, 32, 56)
STAGE_WIDTHS = (16, 32, 64)
SHORTCUTS = ("conv", "pad")


class Stem(nn.Module):
    """3x3 convolution, batch norm, ReLU; (batch, channels, h, w) -> (batch, width, h, w)."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = _conv(in_channels, out_channels, kernel=3, stride=1)
        self.norm = nn.BatchNorm2d(out_channels)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.norm(self.conv(x)))
        return out

    def title(self) -> str:
        """What the layer is, in a few words."""
        return f"stem {self.conv.in_channels}→{self.conv.out_channels}"


class PadShortcut(nn.Module):
    """The shortcut without parameters: take every `stride`-th pixel, and zeros for the new channels."""

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels = new_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; (batch, in, h, w) -> (batch, out, h / stride, w / stride)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, out_channels, kernel=3, stride=stride)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.activation1 = nn.ReLU()
        self.conv2 = _conv(out_channels, out_channels, kernel=3, stride=1)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.activation2 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            if shortcut == "conv":
                conv = _conv(in_channels, out_channels, kernel=1, stride=stride)
                self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(out_channels))
            else:
                self.shortcut = PadShortcut(out_channels - in_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation1(self.norm1(self.conv1(x)))
        out: Tensor = self.activation2(self.norm2(self.conv2(hidden)) + self.shortcut(x))
        return out

    def title(self) -> str:
        """What the layer is, in a few words."""
        stride = self.conv1.stride[0]
        return f"block {self.conv1.in_channels}→{self.conv1.out_channels}" + (f" /{stride}" if stride > 1 else "")


class PoolHead(nn.Module):
    """Mean over the image, then a linear map; (batch, channels, h, w) -> (batch, num_classes)."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(in_channels, num_classes)
        nn.init.normal_(self.linear.weight, std=in_channels**-0.5)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.flatten(self.pool(x)))
        return out

    def title(self) -> str:
        """What the layer is, in a few words."""
        return "head"


class ResNet(nn.Module):
    """A stem, 3 n residual blocks and a head; (batch, channels, h, w) -> (batch, num_classes).

    Args:
        depth: number of weighted layers on the main path: 8, 14, 20, 32 or 56.
        input_shape: (channels, height, width) of one image.
        num_classes: number of outputs, >= 1.
        width: factor on the 16, 32 and 64 channels of the stages, >= 1; 2 is the variant of the sparse
            training papers.
        shortcut: where a block changes the shape, ``"conv"`` (1x1 convolution and batch norm) or ``"pad"``
            (zeros, no parameters).

    Raises:
        InvalidSettingError: for a value out of range.

    Example:
        >>> model = ResNet(8, (1, 28, 28), 10)
        >>> [layer.title() for layer in model.layers]
        ['stem 1→16', 'block 16→16', 'block 16→32 /2', 'block 32→64 /2', 'head']
    """

    def __init__(
        self,
        depth: int,
        input_shape: Sequence[int],
        num_classes: int,
        *,
        width: int = 1,
        shortcut: str = "conv",
    ) -> None:
        super().__init__()
        owner = f"resnet{depth}"
        require(depth in DEPTHS, "ResNet", "depth", depth, f"one of {DEPTHS}")
        require(len(input_shape) == 3, owner, "input_shape", tuple(input_shape), "(channels, height, width)")
        require(isinstance(width, int) and width >= 1, owner, "width", width, "a whole number >= 1")
        require(shortcut in SHORTCUTS, owner, "shortcut", shortcut, "'conv' or 'pad'")
        channels = width * STAGE_WIDTHS[0]
        layers: list[nn.Module] = [Stem(input_shape[0], channels)]
        for stage, stage_width in enumerate(STAGE_WIDTHS):
            for block in range((depth - 2) // 6):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(ResidualBlock(channels, width * stage_width, stride, shortcut))
                channels = width * stage_width
        self.layers = nn.Sequential(*layers, PoolHead(channels, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> nn.Conv2d:
    """A convolution that keeps the size but for its stride; no bias, as batch norm has one."""
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
