"""The Python documentation as text to model: no validation text is trained on, and a session learns it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import egeria_lab as lab
from egeria_lab.data import ArrayDataset
from egeria_lab.data.python_docs import CHARACTERS, _characters, python_docs
from egeria_lab.data.token_data import UNKNOWN, TokenData
from egeria_lab.errors import InvalidSettingError, MissingPackageError


def parts(loaded: TokenData) -> tuple[ArrayDataset, ArrayDataset]:
    assert isinstance(loaded.train, ArrayDataset)
    assert isinstance(loaded.valid, ArrayDataset)
    return loaded.train, loaded.valid


@pytest.fixture(scope="module")
def docs() -> TokenData:
    return python_docs()


def test_each_target_is_the_character_that_follows(docs: TokenData) -> None:
    for part in parts(docs):
        assert part.inputs.dtype == part.targets.dtype == torch.int64
        assert part.inputs.shape == part.targets.shape == (len(part), 64)
        assert part.inputs[:, 1:].equal(part.targets[:, :-1])
    assert (docs.num_classes, docs.input_shape, len(docs.tokens)) == (97, (64,), 97)


def test_it_is_prose_of_the_expected_amount(docs: TokenData) -> None:
    train, valid = parts(docs)
    characters = train.inputs.numel() + valid.inputs.numel()
    assert 300_000 < characters < 600_000  # 378,496 with Python 3.11
    assert 0.08 < len(valid) / (len(train) + len(valid)) < 0.11
    text = docs.decode(train.inputs.flatten())
    assert text.count(" the ") > 2000
    assert docs.decode(train.inputs[0]).isprintable() or "\n" in docs.decode(train.inputs[0])
    assert float((train.inputs == CHARACTERS.index(UNKNOWN)).double().mean()) < 0.01


def test_long_paragraphs_are_taken_once() -> None:
    long, short = "a long paragraph " * 5, "See also"
    ids = _characters(
        {"b": f"{long}\n\n{short}\n\nB", "a": f"A\n\n{short}\n\n{long.replace(' ', '  ', 3)}", "c": "C\x00"}
    )
    text = "".join(CHARACTERS[i] for i in ids)
    assert text == f"A\n\n{short}\n\n{long.replace(' ', '  ', 3).strip()}\n\n{short}\n\nB\n\nC{UNKNOWN}"


def test_nothing_long_of_the_validation_text_is_trained_on(docs: TokenData) -> None:
    """As it would be by a sixth, were repeated paragraphs not left out; what remains are stock phrases and rules."""
    train, valid = parts(docs)
    text = " ".join(docs.decode(train.inputs.flatten()).split())
    found = sum(" ".join(docs.decode(row).split())[4:60] in text for row in valid.inputs)
    assert found / len(valid) < 0.06


def test_sequences_may_have_another_length() -> None:
    loaded = python_docs(length=200)
    assert loaded.input_shape == (200,)
    assert parts(loaded)[0].inputs[0, :64].equal(parts(python_docs())[0].inputs[0])
    for wrong in (1, 97, 2.5, "64"):
        with pytest.raises(InvalidSettingError, match=r"python-docs.length must be a whole number >= 2 other than 97"):
            python_docs(length=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match=r"python-docs.length must be at most \d+, got 100000"):
        python_docs(length=100_000)


def test_text_goes_to_ids_and_back(docs: TokenData) -> None:
    text = "for x in range(3):\n    print(x)  # ok"
    assert docs.decode(docs.encode(text)) == text
    assert docs.decode(docs.encode("naïve")) == f"na{UNKNOWN}ve"


def test_a_python_without_the_documentation_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "egeria_lab.data.python_docs.find_spec", lambda name: None if name == "pydoc_data" else found(name)
    )
    with pytest.raises(MissingPackageError, match="install a whole Python"):
        python_docs()


def test_a_session_learns_it_without_forward_or_loss(docs: TokenData) -> None:
    model = lab.models.build(
        "transformer", input_shape=docs.input_shape, num_classes=docs.num_classes or 0, depth=2, dim=32,
        **docs.model_options("transformer"),
    )  # fmt: skip
    session = lab.Session(model, docs, optimizer="adam", lr=3e-3, batch_size=32, epochs=1, freeze=None)
    first = session.step().loss
    last = session.step(59)
    assert first > 4  # ln 97 = 4.6
    assert last.loss < 3.2
    assert last.accuracy is not None
    assert last.accuracy > 0.15
    assert len(session.layers) == 4
    session.close()


def test_models_that_take_no_tokens_are_refused(docs: TokenData) -> None:
    with pytest.raises(InvalidSettingError, match="made of tokens, and model 'resnet8' does not take them"):
        docs.model_options("resnet8")
