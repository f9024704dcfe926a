"""Say in one clause, with the numbers, what a layer still lacks under the plasticity rule."""

from __future__ import annotations

from collections.abc import Mapping

from egeria_lab.algorithms.freeze_policy import PlasticityPolicy
from egeria_lab.algorithms.plasticity import Reading
from egeria_lab.engine.layer_board import LayerBoard


def explain_plasticity(layer: str, board: LayerBoard, policy: PlasticityPolicy, latest: Mapping[str, Reading]) -> str:
    """One clause on an active layer, with the numbers of its newest reading.

    Args:
        layer: name of the layer.
        board: states of all layers.
        policy: the rule.
        latest: the newest reading of each layer.
    """
    if layer == board.names[-1]:
        return "it is the head, which no rule freezes"
    if policy.bootstrapping:
        change = "not known yet" if policy.loss_change is None else f"{policy.loss_change:.1%}"
        epochs, share = policy.settings.bootstrap_epochs, policy.settings.bootstrap_rate
        low = "" if share is None else f", and the learning rate is down to {share:.0%} of its highest"
        return (
            "bootstrapping goes on until the loss changes by less than "
            f"{policy.settings.bootstrap_change:.0%} between two windows of {policy.settings.window} "
            f"readings (now {change}) and {epochs:g} epoch{'s are' if epochs != 1 else ' is'} done{low}"
        )
    begun = policy.settling.begun.get(layer)
    if begun is not None:
        return (
            f"it settles since epoch {begun.passes:.1f}: trained less and less over {begun.epochs:g} "
            "epochs, then it freezes"
        )
    front = next(row.name for row in board if not row.frozen and row.name not in policy.settling.begun)
    turn = "" if front == layer else f", and {front} before it has to freeze first"
    return _numbers(layer, policy, latest.get(layer)) + turn


def _numbers(layer: str, policy: PlasticityPolicy, reading: Reading | None) -> str:
    if reading is None:
        return "its plasticity has not been read yet"
    if reading.slope is None:
        return f"warming up, its slope is fitted after {policy.window} readings of one snapshot"
    limit = policy.limit_of(layer)
    if limit is None:
        return f"slope {reading.slope:.1e}, its tolerance is tuned on its first fits"
    sign = "<" if reading.slope < limit else "≥"
    return (
        f"slope {reading.slope:.1e} {sign} tolerance {limit:.1e} "
        f"for {policy.stable_of(layer)} of {policy.patience} readings"
    )
