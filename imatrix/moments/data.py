"""Second moments in memory: which inputs there are, who reads them, and packed triangles.

Matrices that read the same vectors share one input: query, key and value, or gate and up. An input
is named after the first tensor that reads it. Experts, and the heads of latent attention, have a
matrix of second moments each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

# `fit` rounds weights, `hold` judges how they were rounded: no chunk is in both.
FOLDS = ("fit", "hold")


@dataclass(frozen=True)
class MomentInput:
    """A distinct input: the tensors that read it, and the shape of its statistics, n_matrices times
    n_cols x n_cols.
    """

    name: str
    tensors: tuple[str, ...]
    n_matrices: int
    n_cols: int

    @property
    def triangle(self) -> int:
        """Return the number of elements of one packed triangle."""
        return self.n_cols * (self.n_cols + 1) // 2

    def stored_bytes(self, size: int) -> int:
        """Return the bytes of both folds in a file whose correlations take `size` bytes each."""
        return len(FOLDS) * self.n_matrices * (size * self.triangle + 4 * self.n_cols + 8)

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of both folds' sums while they are collected."""
        return len(FOLDS) * self.n_matrices * 4 * self.n_cols * self.n_cols


def total_sizes(inputs: Iterable[MomentInput], size: int) -> tuple[int, int]:
    """Return (bytes in memory while collecting, bytes of the file)."""
    found = list(inputs)
    return sum(one.memory_bytes for one in found), sum(one.stored_bytes(size) for one in found)


def pack(matrix: np.ndarray) -> np.ndarray:
    """Return the rows of the upper triangle of [n, n], one after another."""
    return np.concatenate([row[i:] for i, row in enumerate(matrix)])


def unpack(triangle: np.ndarray, n: int) -> np.ndarray:
    """Return the symmetric [n, n] of a packed upper triangle, in its dtype."""
    matrix, start = np.empty((n, n), dtype=triangle.dtype), 0
    for i in range(n):
        row = triangle[start : start + n - i]
        matrix[i, i:] = row
        matrix[i:, i] = row
        start += n - i
    return matrix


def correlations(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (diagonal float64[n], packed H_ij / sqrt(H_ii H_jj) float64) of a symmetric [n, n].

    A column that is always zero has the correlation 1 with itself and 0 with others.
    """
    sums = sums.astype(np.float64)
    diagonal = np.diagonal(sums).copy()
    scale = np.where(diagonal > 0, 1 / np.sqrt(np.maximum(diagonal, 1e-300)), 0.0)
    found = sums * scale[:, None] * scale[None, :]
    np.fill_diagonal(found, 1.0)
    return diagonal, pack(found)
