"""A multi-layer perceptron: the smallest model, for first lessons and tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from egeria_lab.errors import require


class DenseLayer(nn.Module):
    """Linear, ReLU, dropout; (batch, ...) -> (batch, out_features), the input being flattened."""

    def __init__(self, in_features: int, out_features: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.activation = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        nn.init.kaiming_normal_(self.linear.weight, nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.activation(self.linear(x.flatten(1))))
        return out

    def title(self) -> str:
        """What the layer is, in a few words."""
        return f"dense {self.linear.in_features}→{self.linear.out_features}"


class Head(nn.Module):
    """The last linear map; (batch, ...) -> (batch, num_classes), the input being flattened."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes)
        nn.init.normal_(self.linear.weight, std=in_features**-0.5)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.flatten(1))
        return out

    def title(self) -> str:
        """What the layer is, in a few words."""
        return "head"


class Mlp(nn.Module):
    """Dense layers with ReLU, then a linear head; (batch, *input_shape) -> (batch, num_classes).

    Args:
        input_shape: shape of one input, flattened by the first layer.
        num_classes: number of outputs, >= 1.
        hidden: width of each hidden layer, each >= 1; empty for a linear model.
        dropout: probability after each hidden layer, in [0, 1).

    Raises:
        InvalidSettingError: for a value out of range.

    Example:
        >>> model = Mlp((1, 8, 8), 10, hidden=(32,))
        >>> [layer.title() for layer in model.layers]
        ['dense 64→32', 'head']
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        *,
        hidden: Sequence[int] = (256, 128, 64),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        whole = all(isinstance(width, int) and width >= 1 for width in hidden)
        require(whole, "mlp", "hidden", hidden, "whole numbers >= 1, such as (256, 128)")
        require(0 <= dropout < 1, "mlp", "dropout", dropout, "in [0, 1)")
        widths = [prod(input_shape), *hidden]
        dense = [DenseLayer(before, after, dropout) for before, after in pairwise(widths)]
        self.layers = nn.Sequential(*dense, Head(widths[-1], num_classes))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out
