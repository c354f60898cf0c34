"""Memory in which blocks of a launch leave parts of a result for others: sources/step/parts.cuh."""

from __future__ import annotations

import torch

_NOT_THERE = -1  # as bits, in the place of a part that no block has left


def empty_parts(count: int, device: torch.device) -> torch.Tensor:
    """Return the memory of so many floats, as int32[count]; a part is two of them."""
    return torch.full((count,), _NOT_THERE, dtype=torch.int32, device=device)
