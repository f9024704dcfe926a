"""Data made of tokens, and how a session trains on it.

Inputs are int64 token ids; targets are one id a position, `IGNORED_LABEL` where there is nothing to predict.
A model that gives scores of shape (batch, classes, length) or (batch, length, classes) then trains with the
session's own loss and accuracy, without `forward` or `loss`. Two sequences a sample, for an encoder-decoder,
need ``forward=teacher_forced``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from egeria_lab.data.datasets import IGNORED_LABEL, Data
from egeria_lab.errors import DataError, InvalidSettingError

PADDING = 0
"""Id of the padding of paired sequences, in source and target."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenData(Data):
    """Training and validation sequences of tokens.

    Attributes:
        tokens: what each id of the inputs stands for.
        target_tokens: what each id of the targets stands for, when that is another vocabulary; then inputs and
            targets are two sequences, for an encoder-decoder.

    Example:
        >>> from egeria_lab.data.python_docs import python_docs
        >>> data = python_docs(length=32)
        >>> data.decode(data.encode("a loop"))
        'a loop'
    """

    tokens: tuple[str, ...]
    target_tokens: tuple[str, ...] = ()

    def encode(self, text: Iterable[str]) -> Tensor:
        """The ids of a text's tokens (its characters, or the members of a list), int64, shape (length,).

        Raises:
            DataError: for a token that is not in the vocabulary, where that has none for unknown ones.
        """
        ids = {token: index for index, token in enumerate(self.tokens)}
        unknown = ids.get(UNKNOWN)
        found = [(token, ids.get(token, unknown)) for token in text]
        wrong = next((token for token, index in found if index is None), None)
        if wrong is not None:
            raise DataError(f"Data {self.name!r} has no token {wrong!r}; tokens: {' '.join(self.tokens)}.")
        return torch.tensor([index for _, index in found], dtype=torch.int64)

    def decode(self, ids: Sequence[int] | Tensor, *, targets: bool = False) -> str:
        """The text of some ids, those to ignore left out; words of a vocabulary are set apart by spaces.

        Args:
            ids: token ids.
            targets: they are ids of `target_tokens`.
        """
        tokens = self.target_tokens if targets and self.target_tokens else self.tokens
        indices = ids.tolist() if isinstance(ids, Tensor) else ids
        found = [tokens[index] for index in indices if index != IGNORED_LABEL]
        return (" " if any(len(token) > 1 for token in tokens) else "").join(found)

    def model_options(self, model: str) -> dict[str, Any]:
        """What `egeria_lab.models.build` needs to know beside shape and classes.

        Raises:
            InvalidSettingError: when no model of this name can be trained on this data.
        """
        if model != "transformer":
            raise InvalidSettingError(
                f"data set {self.name!r} is made of tokens, and model {model!r} does not take them; of the models by "
                "name only 'transformer' does."
            )
        if self.target_tokens:
            raise InvalidSettingError(
                f"data set {self.name!r} is made of pairs of sequences: give an encoder-decoder of your own with "
                "forward=teacher_forced, or load the set with form='joined' for 'transformer'."
            )
        return {"vocabulary": len(self.tokens), "head": "tokens"}


def teacher_forced(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
    """`forward` of a session that trains an encoder-decoder on paired sequences.

    The model is called with the source and with the target without its end, and is to predict the target without
    its beginning.

    Args:
        model: ``model(source, target)`` gives scores of shape (batch, length, classes).
        batch: ids of source (batch, source length) and target (batch, target length), filled up with `PADDING`.

    Returns:
        The scores, and the targets with `IGNORED_LABEL` in place of padding.

    Example:
        >>> source, target = torch.tensor([[5, 6]]), torch.tensor([[1, 7, 2, 0]])
        >>> teacher_forced(lambda source, target: target, (source, target))
        (tensor([[1, 7, 2]]), tensor([[   7,    2, -100]]))
    """
    source, target = batch
    labels = target[:, 1:]
    return model(source, target[:, :-1]), labels.masked_fill(labels == PADDING, IGNORED_LABEL)
