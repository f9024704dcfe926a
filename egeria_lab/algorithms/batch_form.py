"""A batch of any structure: how many samples it has, and some of them as a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from egeria_lab.errors import LayerError


class BatchForm:
    """Knows which tensors of a (nested) batch count samples in their first dimension.

    Those are the tensors as long as the first one.

    Args:
        example: one batch, of one sample or more.

    Raises:
        LayerError: when it holds no tensor with a sample.

    Example:
        >>> import torch
        >>> batch = {"tokens": torch.arange(6).view(3, 2), "scale": 0.5}
        >>> form = BatchForm(batch)
        >>> form.rows(batch), form.take(batch, torch.tensor([2, 0]))
        (3, {'tokens': tensor([[4, 5],
                [0, 1]]), 'scale': 0.5})
    """

    def __init__(self, example: Any) -> None:
        leaves, self.spec = tree_flatten(example)
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim() > 0]
        if not tensors or leaves[tensors[0]].shape[0] == 0:
            raise LayerError("the example batch holds no tensor with at least one sample.")
        self.lead = tensors[0]
        count = leaves[self.lead].shape[0]
        self.counting = {i for i in tensors if leaves[i].shape[0] == count}

    def rows(self, content: Any) -> int:
        """Number of samples.

        Raises:
            LayerError: when the batch has another structure than the example.
        """
        return int(self._leaves(content)[self.lead].shape[0])

    def take(self, content: Any, index: Tensor) -> Any:
        """The samples `index` (int64, one may come twice), as a batch."""
        leaves = self._leaves(content)
        taken = [x[index.to(x.device)] if i in self.counting else x for i, x in enumerate(leaves)]
        return tree_unflatten(taken, self.spec)

    def _leaves(self, content: Any) -> list[Any]:
        leaves, spec = tree_flatten(content)
        if spec != self.spec:
            raise LayerError("the batch has another structure than the example batch.")
        return leaves
