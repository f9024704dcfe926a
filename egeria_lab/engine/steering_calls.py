"""The calls that steer a run, each of them one command: the same for a session here and for one on a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from egeria_lab import commands as c
from egeria_lab.engine.building import checked_sample_ids
from egeria_lab.engine.layer_board import LayerRows
from egeria_lab.errors import is_number, require
from egeria_lab.events import Scalar


class SteeringCalls(ABC):
    """What people may ask of a run while it trains; each call leaves one event when it lands.

    Attributes:
        layers: the states of the layer modules.
    """

    layers: LayerRows

    def freeze(self, layer: str) -> c.Receipt:
        """Stop training a layer module, completely, from the next step on."""
        return self._put(c.FreezeLayer(layer=self.layers[layer].name))

    def thaw(self, layer: str) -> c.Receipt:
        """Train a frozen layer module again, exactly where it had been left."""
        return self._put(c.ThawLayer(layer=self.layers[layer].name))

    def pin(self, layer: str) -> c.Receipt:
        """Forbid every rule to freeze a layer module; by hand it can still be frozen."""
        return self._put(c.PinLayer(layer=self.layers[layer].name))

    def unpin(self, layer: str) -> c.Receipt:
        """Allow rules to freeze a layer module again."""
        return self._put(c.UnpinLayer(layer=self.layers[layer].name))

    def override(self, name: str, value: Scalar, layer: str | None = None) -> c.Receipt:
        """Give a setting a new value from the next step boundary on, for all layers or for one.

        Raises:
            UnknownNameError, InvalidSettingError: for an unknown setting or layer, or a value out of range.
        """
        if layer is not None:
            layer = self.layers[layer].name
        self._check_override(name, value, layer)
        return self._put(c.Override(name=name, value=value, layer=layer))

    def reset(self, name: str, layer: str | None = None) -> c.Receipt:
        """Give a setting back the value that the session started with, or a layer the value for all layers."""
        if layer is not None:
            layer = self.layers[layer].name
        self._check_reset(name, layer)
        return self._put(c.Reset(name=name, layer=layer))

    def extend(self, epochs: float) -> c.Receipt:
        """Lengthen the budget; the schedule is planned again over the new length."""
        require(is_number(epochs) and epochs > 0, "Session.extend", "epochs", epochs, "a number > 0")
        return self._put(c.Extend(epochs=epochs))

    def discard(self, sample_ids: Iterable[int]) -> c.Receipt:
        """Take samples out of training until they are restored; with a circulant sieve others take their places."""
        return self._put(c.Discard(ids=checked_sample_ids("discard", sample_ids)))

    def restore(self, sample_ids: Iterable[int]) -> c.Receipt:
        """Give discarded samples back to training."""
        return self._put(c.Restore(ids=checked_sample_ids("restore", sample_ids)))

    def undo(self) -> c.Receipt:
        """Go back to the state right before the newest command landed, exactly, steps made since included."""
        return self._put(c.Undo())

    def redo(self) -> c.Receipt:
        """Take the newest `undo` back."""
        return self._put(c.Redo())

    @abstractmethod
    def _put(self, command: c.Command) -> c.Receipt:
        """Hand a command to whoever lands it."""

    @abstractmethod
    def _check_override(self, name: str, value: Scalar, layer: str | None) -> None:
        """Raise what landing the override would raise."""

    @abstractmethod
    def _check_reset(self, name: str, layer: str | None) -> None:
        """Raise what landing the reset would raise."""
