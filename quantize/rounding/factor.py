"""Prepare second moments for rounding: shrink, damp and factor them.

With H = R R^T, R upper triangular, tr(dW H dW^T) of one row is the sum over columns k of R_kk^2
(dw_k + sum_{j<k} dw_j R_jk / R_kk)^2. So each column is rounded to the value nearest to its weight
plus the errors of the columns before, times `feedback`, and R_kk^2 weighs what is left. This is the
feedback of GPTQ and LDLQ without an inverse.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from ...errors import ImatrixError
from .cholesky import lower_factor

log = logging.getLogger(__name__)

DAMPING = 0.01  # of the mean of the diagonal
TRIES = 4


@dataclass(frozen=True)
class Factor:
    """What rounding uses: `moments` float32[n, n], shrunk and damped; `feedback` float32[n, n],
    strictly upper; `weights` float64[n], the weight of each column's remaining error.
    """

    moments: np.ndarray
    feedback: np.ndarray
    weights: np.ndarray

    def ordered(self, order: np.ndarray) -> Factor:
        """Return the factor for columns in another order, int64[n]."""
        made = self.moments.astype(np.float64)[np.ix_(order, order)]
        return _of(made)


def _of(made: np.ndarray) -> Factor:
    """Return the factor of definite moments float64[n, n]; raise LinAlgError for others."""
    # The upper factor of H is the lower factor of H with both axes reversed.
    lower = np.ascontiguousarray(made[::-1, ::-1])
    if not lower_factor(lower):
        raise np.linalg.LinAlgError("not definite")
    r = lower[::-1, ::-1]
    pivots = np.diagonal(r)
    feedback = np.triu(r, 1) / pivots[None, :]
    return Factor(
        np.ascontiguousarray(made, dtype=np.float32),
        np.ascontiguousarray(feedback, dtype=np.float32),
        pivots**2,
    )


def shrunk(h: np.ndarray, shrink: float, damping: float = DAMPING) -> np.ndarray:
    """Return float64[n, n]: (1 - shrink) H + shrink diag(H), damped. A column that is always zero
    gets the mean of the diagonal and no correlation.
    """
    diagonal = np.diagonal(h)
    dead = diagonal <= 0
    mean = float(diagonal[~dead].mean()) if not dead.all() else 1.0
    made = h * (1 - shrink)
    made[dead] = 0
    made[:, dead] = 0
    np.fill_diagonal(made, np.where(dead, mean, diagonal) + damping * mean)
    return made


def factored(h: np.ndarray, shrink: float, name: str = "") -> Factor:
    """Return the factor of second moments float64[n, n], in float64; see `cholesky`.

    Where that fails the damping grows tenfold, which is said. Raise ImatrixError naming the tensor
    if the moments are not finite or nothing helps.
    """
    if not np.isfinite(h).all():
        raise ImatrixError("its second moments are not finite", tensor=name)
    damping = DAMPING
    for _ in range(TRIES):
        made = shrunk(h, shrink, damping)
        try:
            return _of(made)
        except np.linalg.LinAlgError:
            damping *= 10
            log.warning("%s: second moments are not definite; damping is now %g", name, damping)
    raise ImatrixError("its second moments cannot be factored", tensor=name)


def diagonal_blocks(matrix: np.ndarray, size: int) -> np.ndarray:
    """Return float64[n / size, size, size] of [n, n]."""
    n = len(matrix) // size
    return matrix.reshape(n, size, n, size)[np.arange(n), :, np.arange(n)]


def metric_of_words(factor: Factor, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (inverse, metric), float32[n / size, size, size]. With the feedback within a word B =
    I + feedback, the target is w + (compensation of the columns before) B^-1, and the metric of
    what is left is B diag(weights) B^T.
    """
    return metric_of_blocks(
        diagonal_blocks(factor.feedback.astype(np.float64), size), factor.weights
    )


def metric_of_blocks(feedback: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what `metric_of_words` does, for the blocks float64[words, size, size] of the feedback
    on the diagonal.
    """
    size = feedback.shape[-1]
    b = feedback + np.eye(size)
    metric = (b * weights.reshape(-1, 1, size)) @ b.transpose(0, 2, 1)
    return inverses(b), np.ascontiguousarray(metric, dtype=np.float32)


def inverses(blocks: np.ndarray) -> np.ndarray:
    """Return float32[words, size, size], the inverses of float64 blocks."""
    return np.ascontiguousarray(np.linalg.inv(blocks), dtype=np.float32)
