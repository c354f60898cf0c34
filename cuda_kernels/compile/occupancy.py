"""How much shared memory a block of a step takes, so that blocks of two launches share a
multiprocessor, or do not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

RESERVED = 2048  # bytes of shared memory for what no plan sizes, and what the system takes


@dataclass(frozen=True)
class Occupancy:
    """Multiprocessors of a device, and bytes of shared memory: `shared` is what a block can have
    at most. A multiprocessor has one block at a time if each has `alone` bytes; `beside` is what
    another block can have next to such a block.
    """

    processors: int
    shared: int
    alone: int
    beside: int


@functools.cache
def occupancy(device: int) -> Occupancy:
    """Return the limits of a CUDA device, by number."""
    facts = torch.cuda.get_device_properties(device)
    half, most = facts.shared_memory_per_multiprocessor // 2, facts.shared_memory_per_block_optin
    # A block also has 1 KB of the system's: two of `alone` bytes do not fit, one of `beside` does.
    alone = min(half - 1024 + 128, most - RESERVED)
    # Kernels overlap from sm_90 on.
    beside = min(half, most - RESERVED) - RESERVED if facts.major >= 9 else most
    return Occupancy(facts.multi_processor_count, most, alone, beside)
