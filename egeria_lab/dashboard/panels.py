"""The panels: what each is called, what it shows in one line, and which columns of history it needs.

The page draws them in this order. A panel that needs a new column only names it here: the feed sends the
union of what all panels need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from egeria_lab.dashboard.explainer import METHODS

AXIS_COLUMNS = ("epoch", "samples", "flops", "elapsed_seconds")
"""Columns of the table ``steps`` from which the page knows where a step lies on its other x axes."""


class Panel:
    """One picture of a run; a subclass says what it needs, ``static/`` holds how it is drawn.

    Attributes:
        key: names the drawing function in the page.
        title: heading of the panel.
        hint: one line for somebody who sees the panel for the first time.
        needs: table name → columns, besides the step, which is always sent. The feed makes ``loss_mean``
            and ``accuracy_mean``, and ``flops``, the work up to each step.
        choices: names that the page offers in this panel, or none.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    hint: ClassVar[str]
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    choices: ClassVar[tuple[str, ...]] = ()


class PlasticityPanel(Panel):
    """How far each layer's output still moves, and how its trend compares with the tolerance."""

    key = "plasticity"
    title = "Plasticity"
    hint = "How much each layer still changes. When its trend stays under the tolerance, the layer is frozen."
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "plasticity": (
            "layer", "value", "smoothed", "slope", "tolerance", "stable", "verdict", "generation",
        ),
        "lanes": ("layer", "kind", "by"),
    }  # fmt: skip


class LossPanel(Panel):
    """Loss and accuracy, with a mark where a layer froze."""

    key = "loss"
    title = "Loss and accuracy"
    hint = "Freezing should not bend these curves. Marks show where a layer froze or thawed."
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "steps": ("loss", "loss_mean", "accuracy_mean", *AXIS_COLUMNS),
        "epochs": ("epoch", "train_loss", "train_accuracy", "valid_loss", "valid_accuracy"),
        "lanes": ("layer", "kind", "by"),
    }


class TimelinePanel(Panel):
    """One lane a layer: when it trained, when it was frozen, and by whom."""

    key = "timeline"
    title = "Freeze timeline"
    hint = "One lane a layer, front of the model first. Solid: frozen by the rule; hatched: frozen by hand."
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"lanes": ("layer", "kind", "by", "slope", "tolerance")}


class SavingsPanel(Panel):
    """What freezing saves in computation, time and memory, beside what watching costs."""

    key = "savings"
    title = "Savings"
    hint = "Share of what training would have taken without it: what theory says, and what was measured."


class WhatIfPanel(Panel):
    """What the recorded plasticity would have frozen under other settings of the rule."""

    key = "whatif"
    title = "What if?"
    hint = (
        "Move a setting: the lower bar of each layer shows when it would have been frozen. A fork tries it in earnest."
    )
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"lanes": ("layer", "kind", "by")}


class AttributionPanel(Panel):
    """What the model of this step looks at in some samples, by Captum, and how much flows through each layer."""

    key = "attribution"
    title = "Attribution"
    hint = "Why the model says what it says of a sample: its inputs, and the layers. Works while the run stands still."
    choices = METHODS


class SievePanel(Panel):
    """Which samples are trained on, set aside and discarded; shown where samples can be left out."""

    key = "sieve"
    title = "Samples"
    hint = "Which samples are trained on. Choose one to see what it is, to discard it or to restore it."
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "sieve": ("kept", "waiting", "discarded", "removed", "returned"),
    }


class SparsityPanel(Panel):
    """How many weights of each layer are live, and how many were exchanged; shown where weights are masked."""

    key = "sparsity"
    title = "Sparsity"
    hint = "Share of live weights in each layer, and the share of them that each mask update exchanged."
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"sparsity": ("layer", "density", "churn")}


PANELS: tuple[type[Panel], ...] = (
    PlasticityPanel, TimelinePanel, LossPanel, WhatIfPanel, SparsityPanel, SavingsPanel, SievePanel,
    AttributionPanel,
)  # fmt: skip
"""All panels, in the order in which the page shows them."""


def columns_needed(panels: Iterable[type[Panel]] = PANELS) -> dict[str, tuple[str, ...]]:
    """The union of what some panels need: table name → columns, in order of first mention.

    Example:
        >>> columns_needed([TimelinePanel])
        {'lanes': ('layer', 'kind', 'by', 'slope', 'tolerance')}
    """
    union: dict[str, dict[str, None]] = {}
    for panel in panels:
        for table, columns in panel.needs.items():
            union.setdefault(table, {}).update(dict.fromkeys(columns))
    return {table: tuple(columns) for table, columns in union.items()}


def describe(panels: Iterable[type[Panel]] = PANELS) -> list[dict[str, object]]:
    """What the page must know of the panels to lay them out."""
    return [
        {"key": panel.key, "title": panel.title, "hint": panel.hint, "choices": list(panel.choices)} for panel in panels
    ]
