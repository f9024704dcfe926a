"""Freeze, thaw at the tenfold drop of the learning rate, freeze again by relaxed criteria: the whole story."""

from __future__ import annotations

import pytest

import egeria_lab as lab
from egeria_lab.events import LayerFrozen, LayerThawed

RULE = lab.Plasticity(interval_steps=4, window=6, patience=6, tolerance=0.4, reference="fp32")
BODY = ["layers.0", "layers.1", "layers.2"]


@pytest.fixture(scope="module")
def story() -> lab.Session:
    """An mlp on digits under the step schedule, whose rate falls tenfold at steps 480 and 720."""
    session = lab.Session("mlp", "digits", epochs=80, scheduler="step", lr=0.05, freeze=RULE)
    session.step(session.planned_steps)
    return session


def freezes(session: lab.Session) -> list[tuple[int, str]]:
    return [(e.step, e.layer) for e in session.events.of(LayerFrozen) if isinstance(e, LayerFrozen)]


def test_everything_the_rule_froze_thaws_at_the_drop(story: lab.Session) -> None:
    thaws = [e for e in story.events.of(LayerThawed) if isinstance(e, LayerThawed)]
    assert [(e.step, e.layer) for e in thaws] == [(721, name) for name in BODY]
    assert thaws[0].reason == "the learning rate fell from 0.005 to 0.0005"
    assert {e.by for e in thaws} == {"rule"}


def test_layers_freeze_again_and_faster(story: lab.Session) -> None:
    first, again = freezes(story)[:3], freezes(story)[3:]
    assert [layer for _, layer in first] == [layer for _, layer in again] == BODY
    assert all(step < 721 for step, _ in first)
    assert all(step > 721 for step, _ in again)
    # 12 readings from one freeze to the next at window and patience 6; half of that with both halved
    assert first[2][0] - first[1][0] == 12 * RULE.interval_steps
    assert again[2][0] - again[1][0] == 6 * RULE.interval_steps


def test_explain_tells_the_relaxed_criteria(story: lab.Session) -> None:
    assert "for 3 of 3 readings" in story.explain("layers.0")
    assert "for 6 of 6 readings" in story.events.of(LayerFrozen)[0].sentence()


def test_a_slow_worker_gives_the_same_freezes_at_the_same_steps() -> None:
    """The verdict of reading i lands at evaluation i + 1, whenever the worker is done with it."""
    found = []
    for delay in (0.0, 0.02):
        rule = lab.Plasticity(interval_steps=3, window=3, patience=2, tolerance=0.5)
        session = lab.Session("mlp", "digits", epochs=24, seed=3, freeze=rule, deterministic=True)
        session.rule.reader._bench._bench.delay_seconds = delay  # type: ignore[union-attr]
        session.step(session.planned_steps)
        found.append((freezes(session), session.history.frame("plasticity").values.tolist()))
        losses = session.history.steps["loss"].tolist()
        found.append((losses,))
        session.close()
    assert found[0][0]
    assert str(found[0]) == str(found[2])  # as text: NaN equals NaN there
    assert found[1] == found[3]
