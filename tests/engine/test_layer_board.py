"""The table of layer states, and the sentence that says what a layer still lacks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from egeria_lab.algorithms.freeze_policy import Plasticity, PlasticityPolicy
from egeria_lab.algorithms.layers import layers
from egeria_lab.algorithms.plasticity import Reading
from egeria_lab.engine.explain import explain_plasticity
from egeria_lab.engine.layer_board import LayerBoard
from egeria_lab.errors import UnknownNameError


def board() -> LayerBoard:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    return LayerBoard(layers(model, torch.zeros(2, 4)))


def test_rows_by_name_by_position_and_in_order() -> None:
    made = board()
    assert made.names == ["0", "1", "2"]
    assert made[1] is made["1"]
    assert [row.name for row in made] == made.names
    assert len(made) == 3
    assert [row.num_parameters for row in made] == [20, 20, 10]
    with pytest.raises(UnknownNameError, match=r"Unknown layer '3'.*Known: 0, 1, 2"):
        made["3"]


def test_states_and_prefix() -> None:
    made = board()
    assert (made.frozen, made.pinned, made.prefix_length) == ((), (), 0)
    made["1"].frozen = True
    assert (made.frozen, made.prefix_length) == (("1",), 0)
    made["0"].frozen = True
    assert made.prefix_length == 2
    made["2"].frozen = True
    assert made.prefix_length == 3
    made["0"].pinned = True
    assert made.pinned == ("0",)
    assert made["0"].state == "frozen"
    made["0"].frozen = False
    assert [row.state for row in made] == ["pinned", "frozen", "frozen"]
    made["0"].set(7, "because", "user")
    assert (made["0"].since_step, made["0"].reason, made["0"].by) == (7, "because", "user")


def test_the_table_prints() -> None:
    made = board()
    made["0"].frozen = made["0"].pinned = True
    made["0"].set(1234, "<slope>", "rule")
    text, page = repr(made), made._repr_html_()
    assert "frozen, pinned" in text
    assert "1,234" in text
    assert "&lt;slope&gt;" in page
    assert page.count("<tr>") == 4


def reading(slope: float | None) -> Reading:
    return Reading(value=1.0, smoothed=1.0, slope=slope, tolerance=None, stable=0, verdict="moving")


def test_every_stage_has_its_sentence() -> None:
    made = board()
    policy = PlasticityPolicy(made.names, Plasticity(window=2, patience=3, tolerance=0.5))
    assert explain_plasticity("2", made, policy, {}) == "it is the head, which no rule freezes"
    assert "between two windows of 2 readings (now not known yet) and 1 epoch is done" in explain_plasticity(
        "0", made, policy, {}
    )
    policy.loss_change = 0.25
    assert "less than 10%" in explain_plasticity("0", made, policy, {})
    assert "(now 25.0%)" in explain_plasticity("0", made, policy, {})
    policy.bootstrapping = False
    assert explain_plasticity("0", made, policy, {}) == "its plasticity has not been read yet"
    warming = explain_plasticity("0", made, policy, {"0": reading(None)})
    assert warming == "warming up, its slope is fitted after 2 readings of one snapshot"
    assert "slope 3.0e-09, its tolerance is tuned" in explain_plasticity("0", made, policy, {"0": reading(3e-9)})
    policy._trends["0"].first_slopes[:] = [2e-8] * 5
    policy._trends["0"].stable = 2
    below = explain_plasticity("0", made, policy, {"0": reading(3e-9)})
    assert below == "slope 3.0e-09 < tolerance 1.0e-08 for 2 of 3 readings"
    above = explain_plasticity("0", made, policy, {"0": reading(4e-8)})
    assert above.startswith("slope 4.0e-08 ≥ tolerance 1.0e-08")
    behind = explain_plasticity("1", made, policy, {"1": reading(None)})
    assert behind.endswith(", and 0 before it has to freeze first")
    made["0"].frozen = True
    assert explain_plasticity("1", made, policy, {"1": reading(None)}) == warming


def test_a_layer_whose_owner_switched_gradients_off_says_so() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    reasons = [row.reason for row in LayerBoard(layers(model, torch.zeros(2, 2)))]
    assert "gradients off" in reasons[0]
    assert reasons[1] == "trained from the start"
