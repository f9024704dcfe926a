"""Say in one sentence, with the numbers, why a layer is frozen or what it still lacks."""

from __future__ import annotations

from egeria_lab.algorithms.freeze_policy import PlasticityPolicy
from egeria_lab.engine.layer_board import LayerBoard
from egeria_lab.engine.monitor import PlasticityMonitor


def explain_layer(
    board: LayerBoard, layer: str, policy: PlasticityPolicy | None, monitor: PlasticityMonitor | None
) -> str:
    """One sentence on the state of one layer, with the numbers of its newest reading.

    Args:
        board: states of all layers.
        layer: name of the layer.
        policy: the rule, or None.
        monitor: holds the newest readings, or None.
    """
    row = board[layer]
    if row.frozen:
        return f"{layer} is frozen since step {row.since_step} by {row.by}: {row.reason}."
    if policy is None or monitor is None:
        return f"{layer} is trained; this session has no freezing rule (freeze=None), only freeze() by hand."
    if layer == board.names[-1]:
        return f"{layer} is trained: it is the head, which no rule freezes."
    pinned = " It is pinned, so no rule may freeze it." if row.pinned else ""
    if policy.bootstrapping:
        change = "not known yet" if policy.loss_change is None else f"{policy.loss_change:.1%}"
        return (
            f"{layer} is trained: bootstrapping goes on until the loss changes by less than "
            f"{policy.settings.bootstrap_change:.0%} between two windows of {policy.settings.window} "
            f"readings (now {change}) and one epoch is done.{pinned}"
        )
    return f"{layer} is trained: {_numbers(layer, policy, monitor)}{_turn(board, layer)}.{pinned}"


def _numbers(layer: str, policy: PlasticityPolicy, monitor: PlasticityMonitor) -> str:
    reading = monitor.latest.get(layer)
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


def _turn(board: LayerBoard, layer: str) -> str:
    front = board.names[board.prefix_length]
    return "" if front == layer else f", and {front} before it has to freeze first"
