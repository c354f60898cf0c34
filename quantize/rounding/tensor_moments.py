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
    def sums(self) -> Any: ...
    @property
    def count(self) -> int: ...
    @property
    def share(self) -> float: ...
    @property
    def prior(self) -> Any: ...
    @property
    def diagonal(self) -> np.ndarray: ...
    @property
    def device(self) -> int: ...


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
        return self.moments.fit(self.index)

    @functools.cached_property
    def hold(self) -> np.ndarray | None:
        return self.moments.hold(self.index)

    def on_device(self, hold: bool = False) -> SumsOnDevice | None:
        return self.moments.on_device(self.index, hold)
