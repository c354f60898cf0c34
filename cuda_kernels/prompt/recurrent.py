"""What the kernels of recurrent layers over many tokens share (`prompt/recurrent.cuh`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

CHUNK, SLICE = 64, 32  # tokens taken together, columns of the memory of a block

# Memory by name, of a shape and dtype, whose content need not be kept.
Buffer = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]


def pitch(n: int, beyond: int) -> int:
    """Return the floats between rows of n, a multiple of 8: `beyond` more than a multiple of 32,
    so that rows begin in other banks (`prompt/tf32.cuh`).
    """
    return n + (beyond - n) % 32


def shared_limit(device: torch.device) -> int:
    """Return the bytes of shared memory that a block can have on a device, those that the system
    takes included.
    """
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
