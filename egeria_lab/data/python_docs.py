"""The Python documentation that comes with Python itself: prose to model, character by character."""

from __future__ import annotations

import string
from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from egeria_lab.data.datasets import ArrayDataset
from egeria_lab.data.token_data import UNKNOWN, TokenData
from egeria_lab.errors import MissingPackageError, is_whole, require

CHARACTERS = (*string.printable[:95], "\n", UNKNOWN)
"""The vocabulary, the same for every version of Python: printable ASCII, the end of a line, and all others."""

REPEATED = 60
"""A paragraph longer than this many characters is taken once, wherever it is repeated."""
GROUP, GROUPS = 16, 10
"""Every tenth group of 16 sequences is for validation."""


def python_docs(*, length: int = 64) -> TokenData:
    """English prose, 97 characters: the help topics of your Python, about 380,000 characters, each to be foretold.

    Inputs are `length` characters and targets the same shifted by one. Sequences do not overlap, and long
    paragraphs that stand in several topics are taken once, so that nothing of the validation text is trained on.
    """
    good = is_whole(length) and length >= 2 and length != len(CHARACTERS)
    # Scores of shape (batch, classes, length) could not be told from (batch, length, classes).
    require(good, "python-docs", "length", length, f"a whole number >= 2 other than {len(CHARACTERS)}")
    text = _characters(_topics())
    count = (len(text) - 1) // length
    require(count >= GROUP * GROUPS, "python-docs", "length", length, f"at most {len(text) // (GROUP * GROUPS + 1)}")
    inputs = text[: count * length].reshape(count, length)
    targets = text[1 : count * length + 1].reshape(count, length)
    held_out = torch.arange(count) // GROUP % GROUPS == GROUPS - 1
    return TokenData(
        name="python-docs",
        train=ArrayDataset(inputs[~held_out], targets[~held_out]),
        valid=ArrayDataset(inputs[held_out], targets[held_out]),
        num_classes=len(CHARACTERS),
        input_shape=(length,),
        tokens=CHARACTERS,
        source="Help topics of the Python documentation, as in the standard library's pydoc_data.topics",
        licence="PSF-2.0",
    )


def _topics() -> Mapping[str, str]:
    if find_spec("pydoc_data") is None:  # some distributions of Python leave it out
        raise MissingPackageError(
            "Data set 'python-docs' needs the module pydoc_data of the standard library, which this Python lacks: "
            "install a whole Python, such as the one of python.org."
        )
    from pydoc_data.topics import topics  # here, because it is half a megabyte of text

    return topics


def _characters(topics: Mapping[str, str]) -> Tensor:
    """All topics as one row of ids, by name, with repeated paragraphs left out."""
    seen: set[str] = set()
    kept = []
    for name in sorted(topics):
        for paragraph in topics[name].strip().split("\n\n"):
            words = " ".join(paragraph.split())
            if len(words) <= REPEATED or words not in seen:
                kept.append(paragraph.strip("\n"))
            seen.add(words)
    ids = {character: index for index, character in enumerate(CHARACTERS)}
    unknown = ids[UNKNOWN]
    return torch.tensor([ids.get(character, unknown) for character in "\n\n".join(kept)], dtype=torch.int64)
