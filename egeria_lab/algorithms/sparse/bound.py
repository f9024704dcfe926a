"""Whether a model, an optimizer and a saved state belong together, before masks are bound to them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria_lab.algorithms.sparse.masked_weight import MaskedWeight
from egeria_lab.algorithms.sparse.patterns import PATTERNS, Pattern
from egeria_lab.errors import InvalidSettingError, require

STATE_KEYS = ("masks", "locked", "gradient_sums", "gradient_steps", "generator")


def check_bound(model: object, optimizer: object, state: object) -> None:
    """Raise, in one sentence, for a model, optimizer or saved state that is none or belongs to another model.

    Raises:
        InvalidSettingError: as said.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> check_bound(model, torch.optim.SGD(model.parameters(), lr=0.1), None)    # they belong together
        >>> check_bound(3, None, None)
        Traceback (most recent call last):
        egeria_lab.errors.InvalidSettingError: SparseTraining.model must be a torch.nn.Module (see lab.models), got 3.
    """
    require(isinstance(model, nn.Module), "SparseTraining", "model", model, "a torch.nn.Module (see lab.models)")
    assert isinstance(model, nn.Module)
    known = optimizer is None or isinstance(optimizer, Optimizer)
    require(known, "SparseTraining", "optimizer", optimizer, "a torch.optim.Optimizer or None")
    if isinstance(optimizer, Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise InvalidSettingError(
                f"the optimizer ({type(optimizer).__name__}) holds none of this model's parameters, so its state could "
                "not be kept zero under masks; make it from model.parameters() of the same model."
            )
    if state is not None:
        missing = [key for key in STATE_KEYS if not isinstance(state, Mapping) or key not in state]
        if missing:
            got = f"one without {', '.join(missing)}" if isinstance(state, Mapping) else type(state).__name__
            raise InvalidSettingError(
                f"SparseTraining.state must be what SparseTraining.state_dict() gave, got {got}; leave it out to make "
                "new masks."
            )


def is_made_of_units(masked: MaskedWeight, mask: Tensor, soft_bound: bool = False) -> bool:
    """True when every unit of a mask lives or dies as a whole, and no group holds more than it may.

    Args:
        masked: tells weight and scheme.
        mask: bool, the weight's own shape.
        soft_bound: groups may hold more for a while.

    Example:
        >>> from egeria_lab.algorithms.sparse.masks import scheme_for
        >>> from egeria_lab.algorithms.sparse.weights import SparseWeight
        >>> weight = nn.Linear(1, 4).weight
        >>> scheme = scheme_for("block", "a", (4, 1), 2)
        >>> masked = MaskedWeight(SparseWeight("a", weight), scheme, 1, torch.ones(4, 1), 2)
        >>> [is_made_of_units(masked, torch.tensor(mask)[:, None] > 0) for mask in ([1, 1, 0, 0], [0, 1, 1, 0])]
        [True, False]
    """
    scheme, mask = masked.scheme, masked.weight.outputs_first(mask)
    if isinstance(scheme, Pattern) and scheme.patterned:
        kernels = mask.reshape(-1, scheme.kernel).cpu()
        known = (kernels[:, None, :] == PATTERNS).all(2).any(1)
        return bool((known | ~kernels.any(1)).all())
    units = scheme.units(mask)
    if scheme.group is not None and not soft_bound:
        return bool((units.reshape(-1, scheme.group).sum(1) <= scheme.quota).all())
    return bool(torch.equal(scheme.weights(units), mask))
