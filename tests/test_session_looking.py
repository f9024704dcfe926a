"""Questions a session answers without training: what if, attribution."""

from __future__ import annotations

import pytest
import torch

import egeria_lab as lab


def test_what_if_under_the_same_settings_is_what_happened() -> None:
    rule = lab.Plasticity(interval_steps=2, window=3, patience=2, tolerance=1.0, reference="fp32", monitor_budget=1.0)
    session = lab.Session("mlp", "digits", epochs=8, freeze=rule)
    session.run(progress=False)
    real = [(e.layer, e.step) for e in session.events if type(e).__name__ == "LayerFrozen"]  # type: ignore[attr-defined]
    assert real
    replayed = session.what_if()
    assert [(h.layer, h.step) for h in replayed.happenings if h.action == "freeze"] == real
    assert session.what_if(tolerance=0.0).frozen == ()
    assert session.steps_done == 96


def test_what_if_needs_the_plasticity_rule() -> None:
    session = lab.Session("mlp", "digits", freeze=None)
    with pytest.raises(lab.InvalidSettingError, match="Plasticity"):
        session.what_if(tolerance=0.1)


def test_attribution_of_training_samples_leaves_the_run_as_it_was() -> None:
    def trace(looking: bool) -> list[float]:
        session = lab.Session("mlp", "digits", epochs=2, freeze=None)
        session.step(5)
        session.freeze("layers.0")
        session.step(3)
        if looking:
            found = session.attribute([0, 5, 9], method="saliency")
            assert found.maps.shape == (3, *session.data.input_shape)
            assert {row.name: row.state for row in found.layers}["layers.0"] == "frozen"
            assert session.attribute(torch.zeros(2, *session.data.input_shape), method="saliency").maps.shape[0] == 2
        session.step(5)
        return [float(loss) for loss in session.history.steps["loss"]]

    assert trace(True) == trace(False)


def test_attribution_of_samples_that_do_not_exist_is_one_sentence() -> None:
    session = lab.Session("mlp", "digits", freeze=None)
    with pytest.raises(lab.DataError, match="99999"):
        session.attribute([99999])
    with pytest.raises(lab.UnknownNameError, match="saliency"):
        session.attribute([0], method="salience")


def test_attribution_of_what_the_model_cannot_take_is_one_sentence() -> None:
    session = lab.Session("mlp", "digits", freeze=None)
    with pytest.raises(lab.DataError, match=r"cannot take inputs of shape \(2, 3, 9\)"):
        session.attribute(torch.randn(2, 3, 9))
    with pytest.raises(lab.UnknownNameError, match="n_steps"):
        session.attribute([0], steps=3)


@pytest.mark.parametrize("lr", [0, -1, float("inf"), float("nan"), True, "fast"])
def test_a_learning_rate_that_is_none_is_one_sentence(lr: float) -> None:
    with pytest.raises(lab.InvalidSettingError, match="finite number > 0"):
        lab.Session("mlp", "digits", lr=lr)


def test_any_finite_learning_rate_is_allowed() -> None:
    assert lab.Session("mlp", "digits", lr=1e9).optimizer.param_groups[0]["lr"] == 1e9
