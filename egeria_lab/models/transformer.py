"""A small pre-norm Transformer encoder for images (cut into patches) and for sequences of tokens.

Pre-norm as in Xiong et al. 2020 (arXiv 2002.04745), patches as in Dosovitskiy et al. 2021 (arXiv 2010.11929).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from egeria_lab.errors import require

HEADS = ("classify", "tokens")
# Embeddings and positions start with the variance of the vectors they are added to. The customary 0.02
# leaves the mean over positions blind to place for many epochs of plain SGD.
EMBEDDING_STD = 1.0


class PatchEmbedding(nn.Module):
    """Images to vectors with learned positions; (batch, channels, h, w) -> (batch, h w / patch^2, dim)."""

    def __init__(self, input_shape: Sequence[int], dim: int, patch: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.project = nn.Conv2d(channels, dim, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(1, (height // patch) * (width // patch), dim))
        nn.init.kaiming_normal_(self.project.weight, nonlinearity="linear")
        nn.init.zeros_(self.project.bias)  # type: ignore[arg-type]
        nn.init.normal_(self.positions, std=EMBEDDING_STD)

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.project(x)
        return patches.flatten(2).transpose(1, 2) + self.positions

    def title(self) -> str:
        """What the layer is, in a few words."""
        size = self.project.kernel_size[0]
        return f"patches {size}x{size}→{self.project.out_channels}"


class TokenEmbedding(nn.Module):
    """Token ids to vectors with learned positions; int64 (batch, length) -> (batch, length, dim)."""

    def __init__(self, length: int, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.empty(1, length, dim))
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        nn.init.normal_(self.positions, std=EMBEDDING_STD)

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(x)
        return vectors + self.positions[:, : x.shape[1]]  # a sequence may be shorter than the longest

    def title(self) -> str:
        """What the layer is, in a few words."""
        return f"tokens {self.embedding.num_embeddings}→{self.embedding.embedding_dim}"


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward part, each normalised before and added to its input; shape kept.

    Args:
        dim: width of the vectors, divisible by `heads`.
        heads: number of attention heads.
        dropout: probability on attention weights and on both added parts, in [0, 1).
        causal: a position sees only itself and the positions before.
    """

    def __init__(self, dim: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm1 = nn.LayerNorm(dim)
        self.query_key_value = _linear(dim, 3 * dim)
        self.project = _linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(_linear(dim, 4 * dim), nn.GELU(), _linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self._attend(self.norm1(x)))
        out: Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        parts = self.query_key_value(x).reshape(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, dim / heads)
        probability = self.dropout.p if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=self.causal)
        out: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, dim))
        return out

    def title(self) -> str:
        """What the layer is, in a few words."""
        return "encoder layer"


class ClassifyHead(nn.Module):
    """Normalise, mean over the positions, linear; (batch, length, dim) -> (batch, num_classes)."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = _linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norm(x).mean(dim=1))
        return out

    def title(self) -> str:
        """What the layer is, in a few words."""
        return "head"


class TokensHead(ClassifyHead):
    """Normalise, linear at each position; (batch, length, dim) -> (batch, num_classes, length)."""

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(self.norm(x))
        return scores.transpose(1, 2)


class Transformer(nn.Module):
    """An embedding, `depth` encoder layers and a head.

    Images (batch, channels, h, w) or int64 tokens (batch, length) -> (batch, num_classes); with
    ``head="tokens"`` (batch, num_classes, length), the classes on dimension 1 as
    `torch.nn.functional.cross_entropy` takes them.

    Args:
        input_shape: (channels, height, width) of one image, or (length,) of the longest token sequence.
        num_classes: number of outputs, >= 1.
        dim: width of the vectors, divisible by `heads`.
        depth: number of encoder layers, >= 1.
        heads: number of attention heads, >= 1.
        dropout: probability, in [0, 1).
        patch: side of the square patches in pixels, dividing height and width; default 4, below 16 pixels 2.
        vocabulary: number of different tokens, >= 1; only for token sequences, and needed there.
        head: ``"classify"`` (one answer an input) or ``"tokens"`` (one answer a position, attention causal:
            language modelling; only for token sequences).

    Raises:
        InvalidSettingError: for a value out of range, or values that contradict each other.

    Example:
        >>> model = Transformer((1, 28, 28), 10, depth=1)
        >>> [layer.title() for layer in model.layers]
        ['patches 4x4→64', 'encoder layer', 'head']
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        *,
        dim: int = 64,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        patch: int | None = None,
        vocabulary: int | None = None,
        head: str = "classify",
    ) -> None:
        super().__init__()
        for field, value in (("dim", dim), ("depth", depth), ("heads", heads)):
            require(isinstance(value, int) and value >= 1, "transformer", field, value, "a whole number >= 1")
        require(dim % heads == 0, "transformer", "dim", dim, f"divisible by heads = {heads}")
        require(0 <= dropout < 1, "transformer", "dropout", dropout, "in [0, 1)")
        require(head in HEADS, "transformer", "head", head, "'classify' or 'tokens'")
        is_image = len(input_shape) == 3
        require(not (is_image and head == "tokens"), "transformer", "head", head, "'classify' for images")
        embedding = (
            _patches(input_shape, dim, patch, vocabulary) if is_image else _tokens(input_shape, dim, patch, vocabulary)
        )
        encoder = [EncoderLayer(dim, heads, dropout, causal=head == "tokens") for _ in range(depth)]
        last = (TokensHead if head == "tokens" else ClassifyHead)(dim, num_classes)
        self.layers = nn.Sequential(embedding, *encoder, last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def _patches(input_shape: Sequence[int], dim: int, patch: int | None, vocabulary: int | None) -> PatchEmbedding:
    require(vocabulary is None, "transformer", "vocabulary", vocabulary, "left out for images")
    height, width = input_shape[1:]
    size = patch if patch is not None else (4 if min(height, width) >= 16 else 2)
    fits = isinstance(size, int) and size >= 1 and height % size == 0 and width % size == 0
    require(fits, "transformer", "patch", size, f"a whole number that divides height {height} and width {width}")
    return PatchEmbedding(input_shape, dim, size)


def _tokens(input_shape: Sequence[int], dim: int, patch: int | None, vocabulary: int | None) -> TokenEmbedding:
    shapes = "(channels, height, width) for images or (length,) for tokens"
    require(len(input_shape) == 1, "transformer", "input_shape", tuple(input_shape), shapes)
    require(patch is None, "transformer", "patch", patch, "left out for tokens")
    allowed = "the number of different tokens, >= 1, when input_shape is (length,)"
    require(isinstance(vocabulary, int) and vocabulary >= 1, "transformer", "vocabulary", vocabulary, allowed)
    return TokenEmbedding(input_shape[0], vocabulary or 0, dim)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features)
    nn.init.normal_(linear.weight, std=in_features**-0.5)
    nn.init.zeros_(linear.bias)
    return linear
