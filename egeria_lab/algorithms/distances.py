"""How far two representations of the same samples are apart; each function works alone.

Shapes: b samples in rows; d and e features after flattening. Both tensors hold the same samples in the
same order; their feature counts may differ for the distances that compare Gram matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from egeria_lab.errors import InvalidSettingError, unknown_name

Distance = Callable[[Tensor, Tensor], Tensor]


def sp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Similarity-preserving (SP) distance: how differently two representations relate the same samples.

    ``G = A Aᵀ`` with each row divided by its L2 norm, then ``‖G_a − G_b‖²_F / b²``. Computed in float32 at
    least, whatever the precision of the inputs, because typical values are 1e-4 … 1e-8.

    Args:
        a: activations, shape ``(b, …)``.
        b: activations of the same samples, shape ``(b, …)``; the feature shape may differ.

    Returns:
        A scalar tensor in ``[0, 4 / b]`` (``[0, 2 / b]`` when no activation is negative). It does not
        change when either input is scaled by a positive number or its features are rotated.

    Raises:
        InvalidSettingError: when the two do not hold the same number of samples.

    Source: Tung & Mori, "Similarity-Preserving Knowledge Distillation", ICCV 2019, section 3.1; the
    plasticity measure of Egeria (EuroSys 2023), section 3.

    Example:
        >>> a = torch.eye(2)
        >>> b = torch.ones(2, 2)
        >>> f"{sp_distance(a, a):.4f} {sp_distance(a, b):.4f}"
        '0.0000 0.2929'
    """
    return sp_from_grams(normalised_gram(a), normalised_gram(b))


def sp_from_grams(a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape:
        raise InvalidSettingError(f"a distance compares the same samples: got {a.shape[0]} and {b.shape[0]} rows.")
    total: Tensor = (a - b).square().sum() / a.shape[0] ** 2
    return total


def normalised_gram(activations: Tensor) -> Tensor:
    rows = _as_rows(activations)
    # Scaling a row by a positive number scales its Gram row and column; dividing by the largest entry
    # first keeps the squares inside float32 for any input.
    rows = rows / rows.abs().amax().clamp_min(torch.finfo(rows.dtype).tiny)
    return torch.nn.functional.normalize(rows @ rows.T, dim=1, eps=1e-30)  # an all-zero row stays zero


def linear_cka_distance(a: Tensor, b: Tensor) -> Tensor:
    """One minus linear centred kernel alignment, in ``[0, 1]``; 0 means the same representation.

    Args and errors as `sp_distance`. Two constant representations count as equal.

    Source: Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019,
    section 3; used by SpFDE (NeurIPS 2022) as a diagnostic.

    Example:
        >>> a = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> f"{linear_cka_distance(a, 3 * a + 1):.4f}"
        '0.0000'
    """
    x, y = _as_rows(a), _as_rows(b)
    _same_rows(x, y)
    gram_x, gram_y = _centred_gram(x), _centred_gram(y)
    cross = (gram_x * gram_y).sum()
    norms = gram_x.norm() * gram_y.norm()
    if float(norms) == 0.0:
        both_constant = bool((gram_x == 0).all()) and bool((gram_y == 0).all())
        return cross.new_tensor(0.0 if both_constant else 1.0)
    return torch.clamp(1 - cross / norms, 0, 1)


def _centred_gram(rows: Tensor) -> Tensor:
    centred = rows - rows.mean(dim=0, keepdim=True)
    return centred @ centred.T


def cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """Mean over samples of one minus the cosine between the two feature vectors, in ``[0, 2]``.

    Two all-zero rows count as equal, an all-zero row against another as 1.

    Raises:
        InvalidSettingError: when the shapes after flattening differ.

    Example:
        >>> float(cosine_distance(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])))
        1.0
    """
    x, y = _same_shape(a, b)
    cosine = torch.nn.functional.cosine_similarity(x, y, dim=1, eps=1e-30)
    both_zero = (x == 0).all(dim=1) & (y == 0).all(dim=1)
    apart = (1 - cosine).clamp(0, 2)  # rounding goes beyond both ends by 1e-8
    return torch.where(both_zero, torch.zeros_like(cosine), apart).mean()


def relative_l2_distance(a: Tensor, b: Tensor) -> Tensor:
    """``‖A − B‖ / ‖B‖`` over the whole batch, >= 0; B is the reference.

    Against an all-zero reference it is 0 for zeros and 1 for anything else.

    Raises:
        InvalidSettingError: when the shapes after flattening differ.

    Example:
        >>> float(relative_l2_distance(torch.tensor([[3.0]]), torch.tensor([[2.0]])))
        0.5
    """
    x, y = _same_shape(a, b)
    if not bool(y.any()):
        return x.any().to(x.dtype)
    ratio: Tensor = (x - y).norm() / y.norm()
    return ratio


def _as_rows(activations: Tensor) -> Tensor:
    if activations.dim() == 0:
        raise InvalidSettingError("a distance needs tensors of shape (samples, …), got a scalar.")
    rows = activations.detach().flatten(1) if activations.dim() > 1 else activations.detach()[:, None]
    return rows if rows.dtype == torch.float64 else rows.float()


def _same_rows(x: Tensor, y: Tensor) -> None:
    if x.shape[0] != y.shape[0]:
        raise InvalidSettingError(f"a distance compares the same samples: got {x.shape[0]} and {y.shape[0]} rows.")


def _same_shape(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x, y = _as_rows(a), _as_rows(b)
    if x.shape != y.shape:
        raise InvalidSettingError(
            f"this distance needs equal shapes: got {tuple(a.shape)} and {tuple(b.shape)}; "
            "'sp' and 'cka' compare different feature counts."
        )
    return x, y


DISTANCES: dict[str, Distance] = {
    "sp": sp_distance,
    "cka": linear_cka_distance,
    "cosine": cosine_distance,
    "relative_l2": relative_l2_distance,
}


def distance(name: str) -> Distance:
    """The distance function called `name`: ``"sp"``, ``"cka"``, ``"cosine"`` or ``"relative_l2"``.

    Raises:
        UnknownNameError: for any other name.

    Example:
        >>> distance("sp") is sp_distance
        True
    """
    if name not in DISTANCES:
        raise unknown_name("distance", name, DISTANCES)
    return DISTANCES[name]
