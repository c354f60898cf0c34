"""The normalized Walsh-Hadamard transform, which spreads outliers of a vector over all its
elements. It is its own inverse.
"""

from __future__ import annotations

import torch

from ...errors import UsageError

_BLOCKS = (512, 256, 128, 64)


def hadamard_block(n: int) -> int:
    """The block in which vectors of `n` elements are transformed: n if it is a power of two, else
    the largest usual one that divides it. Raise UsageError for sizes without one.
    """
    if n & (n - 1) == 0:
        return n
    for block in _BLOCKS:
        if n % block == 0:
            return block
    raise UsageError(
        f"a head size of {n} has no Hadamard transform: it is neither a power of two nor a multiple"
        f" of {_BLOCKS[-1]}"
    )


def hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """x float32[..., n] transformed in blocks: butterflies over distances 1, 2, 4, ..., then times
    block^-1/2.
    """
    shape, distance = x.shape, 1
    while distance < block:
        a, b = x.reshape(*shape[:-1], -1, 2, distance).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).reshape(shape)
        distance *= 2
    return x * block**-0.5
