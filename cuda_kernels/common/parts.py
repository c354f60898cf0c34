"""Memory in which blocks of a launch leave parts of a result for others: sources/step/parts.cuh."""

from __future__ import annotations

import torch

_NOT_THERE = -1  # as bits, in the place of a part that no block has left


def empty_parts(count: int, device: torch.device) -> torch.Tensor:
    """Return memory for `count` floats, as int32[count], without any part; a part is two floats."""
    return torch.full((count,), _NOT_THERE, dtype=torch.int32, device=device)
