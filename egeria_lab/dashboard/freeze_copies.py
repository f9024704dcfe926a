"""The model as it was at its last freezes, so that a later look can say what has moved since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from egeria_lab.events import LayerFrozen

MOST_COPIES = 4
MOST_BYTES = 1 << 28
"""Of all copies together; a model that is larger is not copied."""


@dataclass(frozen=True)
class FreezeCopy:
    """Weights and buffers when a layer froze.

    Attributes:
        step: finished steps then.
        layer: the layer; the last one when several froze at this step.
        state: name → tensor, in main memory.
    """

    step: int
    layer: str
    state: dict[str, Tensor]


class FreezeCopies:
    """Copies of a session's model, the newest freezes only.

    Args:
        session: whose model is copied, in the moment in which a layer freezes; one without a model here has none.

    Example:
        >>> from egeria_lab.session import Session
        >>> session = Session("mlp", "digits", epochs=1, freeze=None)
        >>> copies = FreezeCopies(session)
        >>> _ = session.step(2), session.freeze("layers.0"), session.step(2)
        >>> copies.before(session.steps_done).step
        2
    """

    def __init__(self, session: Any) -> None:
        self._model = getattr(session, "model", None)
        self._copies: list[FreezeCopy] = []
        if isinstance(self._model, nn.Module):
            session.events.subscribe(self._take, LayerFrozen)

    def before(self, step: int) -> FreezeCopy | None:
        """The newest copy from before so many finished steps."""
        return next((copy for copy in reversed(self._copies) if copy.step < step), None)

    def forget_behind(self, step: int) -> None:
        """Forget what was copied behind a step: an undo took it back."""
        self._copies = [copy for copy in self._copies if copy.step <= step]

    def _take(self, event: LayerFrozen) -> None:
        assert isinstance(self._model, nn.Module)
        state = self._model.state_dict()
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        most = min(MOST_COPIES, MOST_BYTES // max(1, size))
        kept = [copy for copy in self._copies if copy.step < event.step]  # of layers that freeze at one step, one
        if most:
            copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
            kept.append(FreezeCopy(event.step, event.layer, copied))
        self._copies = kept[-most:] if most else []
