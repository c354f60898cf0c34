"""Tables of the codebook searches: the grid entries closest to every point of the cube that
contains a grid.
"""

from __future__ import annotations

import numpy as np


def packed_digits(digits: np.ndarray, bits: int) -> np.ndarray:
    """Pack digits[..., dims] into uint16[...], the first in the lowest bits."""
    return (digits.astype(np.int64) << bits * np.arange(digits.shape[-1])).sum(-1).astype(np.uint16)


def closest_entries(grid: np.ndarray, near: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two tables for a grid int8[entries, dims] with `base` different values:

    uint16[base^dims, near]: the closest entries to every point (element 0 most significant),
    nearest first, as packed digits; uint16[2^(bits*dims)]: the number of an entry by its packed
    digits.
    """
    values, dims = np.unique(grid), grid.shape[1]
    base, bits = len(values), 2 if len(values) < 5 else 3
    digits = np.searchsorted(values, grid)
    points = np.arange(base**dims)[:, None] // base ** np.arange(dims)[::-1] % base
    v, e = values[points].astype(np.float32), grid.astype(np.float32)
    distance = (v * v).sum(1)[:, None] + (e * e).sum(1) - 2 * (v @ e.T)  # small integers: exact
    keys = distance.astype(np.int32) * len(grid) + np.arange(len(grid), dtype=np.int32)
    chosen = np.sort(np.partition(keys, near - 1, axis=1)[:, :near], axis=1) % len(grid)
    packed = packed_digits(digits, bits)
    index = np.zeros(1 << bits * dims, dtype=np.uint16)
    index[packed] = np.arange(len(grid))
    return packed[chosen], index
