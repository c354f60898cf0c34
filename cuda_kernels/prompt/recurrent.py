"""What the kernels of recurrent layers over many tokens share (`prompt/recurrent.cuh`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

CHUNK, SLICE = 64, 32  # tokens taken together, columns of the memory of a block
_MOST_BLOCKS = 65_535  # of a grid in its second direction, where CUDA has no more

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


def launched_apart(
    n_sequences: int, blocks: int, tokens: int
) -> Iterator[tuple[int, slice, slice]]:
    """Yield how many sequences are launched together, which, and their rows, of `tokens` each.
    blocks: those of a sequence in the second direction of a grid. Nothing if one launch takes all.
    """
    most = max(1, _MOST_BLOCKS // blocks)
    for first in range(0, n_sequences if n_sequences > most else 0, most):
        last = min(first + most, n_sequences)
        yield last - first, slice(first, last), slice(first * tokens, last * tokens)


def parts_of(
    sequences: slice,
    past: torch.Tensor | None,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return what belongs to these sequences; None for None."""
    first, second, third = (None if x is None else x[sequences] for x in (past, before, after))
    return first, second, third
