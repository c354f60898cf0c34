"""The order of columns that grouped products take."""

from __future__ import annotations

import torch
from iqforge.cuda_kernels.prompt.grouped import GROUP


def permutation(n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return int64[n]: the index of the column at each place of a permuted row of n."""
    place = torch.arange(n, device=device)
    slot = place % 16
    return (
        place // GROUP * GROUP
        + slot % 8 // 2 * 32
        + place % GROUP // 16 * 4
        + slot % 2
        + slot // 8 * 2
    )
