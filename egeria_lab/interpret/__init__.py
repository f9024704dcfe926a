"""Why the model of this moment says what it says, by Captum. Loaded when first asked for: Captum is heavy."""

from egeria_lab.interpret.attribution import METHODS, attribute
from egeria_lab.interpret.records import Attribution, Drift, DriftRow, LayerAttribution, drift

__all__ = ["METHODS", "Attribution", "Drift", "DriftRow", "LayerAttribution", "attribute", "drift"]
