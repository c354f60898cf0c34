"""Weights and second moments to round with."""

from __future__ import annotations

import numpy as np
from iqforge.quantize.rounding.tensor_moments import MatrixMoments

N = 512


def correlated(n: int = N, seed: int = 0) -> np.ndarray:
    """Return second moments of vectors with a few strong directions."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(4 * n, n)) * generator.lognormal(0, 0.5, n)
    x += generator.normal(size=(4 * n, 8)) @ generator.normal(size=(8, n)) * 2
    return x.T @ x / len(x)


def weights(rows: int = 24, n: int = N, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, (rows, n)).astype(np.float32)


class Given:
    """`TensorMoments` of one matrix that is given; `there`: as sums on a device."""

    def __init__(self, h, hold=None, there=None):
        self.h, self.held, self.there = h, hold, there

    def fit(self, index):
        return self.h

    def hold(self, index):
        return self.held

    def tokens(self, index):
        return 1000

    def origin(self, index):
        return "its own"

    def on_device(self, index, hold):
        return self.there


def moments_of(h, **given):
    return MatrixMoments(Given(h, **given), 0)
