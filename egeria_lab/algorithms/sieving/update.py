"""The record of one change of the kept set: which samples left it, which came back, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SieveUpdate:
    """One change of the kept set.

    Attributes:
        kind: ``"start"``, ``"swap"``, ``"one shot"``, ``"losses"``, ``"all"`` (everything is kept again),
            ``"discard"`` or ``"restore"``.
        removed: int64 ids that left the kept set.
        returned: int64 ids that entered it.
        by_hand: int64 ids that were discarded or restored; some of them may not have been kept before.
        num_kept: size of the kept set from now on.
        num_removed: samples that are left out by the rule from now on.
        num_discarded: samples that are left out by hand from now on.
        reason: one clause with the numbers.
        forgetting: number of kept samples by their forgetting events before the update: ``"0"``, ``"1"``, …,
            ``"never correct"``, ``"not presented"``; empty where predictions are not observed.
        classes: kept samples of each class from now on, by label; empty without labels.
        removed_classes: removed samples of each class in this update.
        returned_classes: returned samples of each class in this update.

    Example:
        >>> update = SieveUpdate(kind="discard", by_hand=torch.tensor([3]), removed=torch.tensor([3]), num_kept=9,
        ...                      num_removed=0, num_discarded=1, reason="1 sample discarded by hand")
        >>> update.to_dict()["removed"]
        [3]
    """

    kind: str
    removed: Tensor = field(default_factory=_no_ids)
    returned: Tensor = field(default_factory=_no_ids)
    by_hand: Tensor = field(default_factory=_no_ids)
    num_kept: int
    num_removed: int
    num_discarded: int
    reason: str
    forgetting: dict[str, int] = field(default_factory=dict)
    classes: dict[int, int] = field(default_factory=dict)
    removed_classes: dict[int, int] = field(default_factory=dict)
    returned_classes: dict[int, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-able plain data, all ids included."""
        ids = {name: getattr(self, name).tolist() for name in ("removed", "returned", "by_hand")}
        names = ("kind", "num_kept", "num_removed", "num_discarded", "reason")
        classes = ("classes", "removed_classes", "returned_classes")
        return {
            **{name: getattr(self, name) for name in names},
            **ids,
            "forgetting": dict(self.forgetting),
            **{name: {str(label): number for label, number in getattr(self, name).items()} for name in classes},
        }
