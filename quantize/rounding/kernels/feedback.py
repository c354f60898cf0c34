"""Compiled loops over rows that rounding to every type uses: error feedback, and errors times
moments.

Every row is computed on its own, and sums are added in index order, so the results do not depend on
how rows are divided among threads. Arrays of all modules here: float32[rows, n] `w` (weights),
`delta` (w minus what is stored), `q` (what is stored), `g` (delta H); float32[n, n] `a` (feedback)
and `h` (moments).
"""

from __future__ import annotations

import numpy as np

from ....formats.kernel import CompiledLoop

_TILE = 32  # rows of a matrix that are used for all rows of weights before the next ones


def _compensate(delta, a, t, first):
    """Add the errors of the columns before `first`, fed back, to t float32[rows, width]."""
    width = t.shape[1]
    for start in range(0, first, _TILE):
        for r in range(len(t)):
            for j in range(start, min(start + _TILE, first)):
                d = delta[r, j]
                for k in range(width):
                    t[r, k] += d * a[j, first + k]


def _product(delta, h, g):
    """g = delta H."""
    n = h.shape[0]
    g[:] = np.float32(0)
    for start in range(0, n, _TILE):
        for r in range(len(g)):
            for j in range(start, min(start + _TILE, n)):
                d = delta[r, j]
                for k in range(n):
                    g[r, k] += d * h[j, k]


compensate = CompiledLoop(_compensate)
product = CompiledLoop(_product)
