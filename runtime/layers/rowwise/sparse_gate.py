"""Gates of which few elements are left: those far above the mean (Gemma 3n, Google, 2025)."""

from __future__ import annotations

from collections.abc import Callable

import torch

PARTS = 3  # numbers of a rank's elements of a gate: how many, their mean, their squared deviations
Gather = Callable[[torch.Tensor], torch.Tensor]
"""Returns the numbers of all ranks, float32[rows, PARTS * ranks], for those of this rank,
float32[rows, PARTS].
"""


class SparseGate:
    """relu(x - mean(x) - cutoff * deviation(x)) for gates x float32[rows, n]. With normal x these
    are as many elements as `cutoff` leaves of a normal distribution; the deviation is that of all
    elements, divided by n.

    gather: joins the numbers of all tensor-parallel ranks, each of which has some elements.
    """

    def __init__(self, cutoff: float, gather: Gather | None = None):
        self.cutoff, self._gather = cutoff, gather

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        squares = (x - mean).square().sum(-1, keepdim=True)
        n = x.shape[-1]
        if self._gather is not None:
            own = torch.cat([torch.full_like(mean, n), mean, squares], dim=-1)
            counts, means, parts = self._gather(own).unflatten(-1, (-1, PARTS)).unbind(-1)
            n = counts.sum(-1, keepdim=True)
            mean = (counts * means).sum(-1, keepdim=True) / n
            squares = (parts + counts * (means - mean).square()).sum(-1, keepdim=True)
        return torch.relu(x - (mean + self.cutoff * (squares / n).sqrt()))


class AbsentSparseFFN:
    """A feed-forward layer with a sparse gate on a rank that has none of its elements: it adds
    nothing, and tells the others so.
    """

    experts_used, expert_share = 1, 1.0

    def __init__(self, gather: Gather):
        self._gather = gather

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._gather(x.new_zeros(len(x), PARTS))
        return torch.zeros_like(x)
