"""The second moments of a tensor, whoever collected them."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy as np


class SumsOnDevice(Protocol):
    """Sums float32[n, n] in the memory of GPU number `device`, which are second moments M when they
    are divided by `count`. A `share` above 0 mixes them: (1 - share) M + share P, where P is
    `prior` float64[n, n] on the same GPU, or None for the diagonal of M. `diagonal` float64[n] of
    the result is on the host.
    """

    @property
    def sums(self) -> Any:
        """float32[n, n] on the GPU."""
        ...

    @property
    def count(self) -> int:
        """Tokens that were added up."""
        ...

    @property
    def share(self) -> float:
        """The share of P, from 0 to 1."""
        ...

    @property
    def prior(self) -> Any:
        """P, float64[n, n] on the GPU, or None."""
        ...

    @property
    def diagonal(self) -> np.ndarray:
        """float64[n] on the host."""
        ...

    @property
    def device(self) -> int:
        """The number of the GPU."""
        ...


class TensorMoments(Protocol):
    """Second moments of the inputs of a tensor, for each of its matrices."""

    def fit(self, index: int) -> np.ndarray:
        """Return float64[n_cols, n_cols], what matrix `index` is rounded with."""
        ...

    def hold(self, index: int) -> np.ndarray | None:
        """Return float64[n_cols, n_cols] of held-out text, or None if there is none."""
        ...

    def tokens(self, index: int) -> int:
        """Return how many vectors `fit` is the mean of."""
        ...

    def origin(self, index: int) -> str:
        """Return whose vectors `fit` is of, in words: "its own" or those of other matrices."""
        ...

    def on_device(self, index: int, hold: bool) -> SumsOnDevice | None:
        """Return what `fit` (or `hold`) of a matrix is made of, if it is on a GPU."""
        ...


class MatrixMoments:
    """The second moments of matrix `index` of a tensor, computed once."""

    def __init__(self, moments: TensorMoments, index: int):
        self.moments, self.index = moments, index

    @functools.cached_property
    def fit(self) -> np.ndarray:
        """Moments that the matrix is rounded with: float64[n_cols, n_cols]."""
        return self.moments.fit(self.index)

    @functools.cached_property
    def hold(self) -> np.ndarray | None:
        """Moments of held-out text, float64[n_cols, n_cols], or None."""
        return self.moments.hold(self.index)

    def on_device(self, hold: bool = False) -> SumsOnDevice | None:
        """Return what `fit` (or `hold`) is made of, if it is on a GPU."""
        return self.moments.on_device(self.index, hold)
