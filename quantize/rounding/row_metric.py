"""Round rows of a matrix to make up for each other, by what later layers read of them.

The error E of a matrix is weighed by tr(G E H E^T), with the second moments H of its inputs and a
metric G of its rows, which `rows.py` finds. With G = L L^T, L upper, rows are rounded in blocks K,
one after the other, to W_K plus what the errors of the blocks J before it leave:

    W_K + L_KK^-T L_JK^T E_J

Within a block rows are rounded on their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...formats.codecs.codec import decode_plain
from ...formats.kernel import CompiledLoop
from ...formats.types import GGMLType
from .cholesky import lower_factor
from .kernels.feedback import compensate
from .methods import Encoder

log = logging.getLogger(__name__)

_LEAST_BLOCK = 16  # rows of the last blocks: what follows a block can make up for it


@dataclass(frozen=True)
class RowMetric:
    """How rows are rounded together: the rows at which blocks end, and what errors of earlier rows
    add to later ones, float32[rows, rows].
    """

    ends: tuple[int, ...]
    feedback: np.ndarray


class CoupledRounder:
    """Round all rows of a matrix by a metric of rows: called with x float32[rows, n_cols] and out
    uint8[rows, row_bytes]. run: rounds rows on their own.
    """

    def __init__(self, type: GGMLType, n_cols: int, run: Encoder, metric: RowMetric):
        self.type, self.n_cols, self.run, self.metric = type, n_cols, run, metric

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None:
        if len(x) != (expected := self.metric.ends[-1]):
            raise ValueError(f"{len(x)} rows, expected all {expected} of a matrix")
        errors = np.zeros((self.n_cols, len(x)), dtype=np.float32)
        start = 0
        for end in self.metric.ends:
            rows = slice(start, end)
            target = np.ascontiguousarray(x[rows], dtype=np.float32)
            if start:
                added = np.zeros((self.n_cols, end - start), dtype=np.float32)
                compensate(errors, self.metric.feedback, added, start)
                target = target + added.T
            made = np.empty((end - start, out.shape[1]), dtype=np.uint8)
            self.run(target, made)
            out[rows] = made
            errors[:, rows] = (x[rows] - decode_plain(self.type, made, self.n_cols)).T
            start = end


def row_metric(g: np.ndarray, name: str) -> RowMetric:
    """Return how rows are rounded by G float64[rows, rows]. If it cannot be factored each is
    rounded on its own, and a warning says so. name: the tensor's.
    """
    rows = len(g)
    ends = tuple(_ends(rows))
    # The upper factor of G is the lower factor of G with both axes reversed.
    lower = np.ascontiguousarray(g[::-1, ::-1])
    feedback = np.zeros((rows, rows), dtype=np.float32)
    if not lower_factor(lower):
        log.warning(
            "%s: what later layers read cannot be factored: its rows are rounded on their own",
            name,
        )
        return RowMetric(ends, feedback)
    factor = np.ascontiguousarray(np.triu(lower[::-1, ::-1]))
    start = 0
    for end in ends:
        if start:
            spread = factor[:start, start:end].copy()
            solve_upper(spread, factor[start:end, start:end].copy())
            feedback[:start, start:end] = spread
        start = end
    return RowMetric(ends, feedback)


def _ends(rows: int) -> Iterator[int]:
    """Yield where blocks end: two of a quarter of the rows, two of an eighth, and so on."""
    size, end = rows // 4, 0
    while end < rows:
        for _ in range(2):
            end = min(rows, end + max(_LEAST_BLOCK, size))
            yield end
            if end == rows:
                return
        size //= 2


def _solve_upper(x, r):
    """Replace x float64[rows, n] by X with X R = x, for R float64[n, n], upper."""
    n = r.shape[0]
    for row in range(len(x)):
        for k in range(n):
            value = x[row, k] / r[k, k]
            x[row, k] = value
            for i in range(k + 1, n):
                x[row, i] -= value * r[k, i]


solve_upper = CompiledLoop(_solve_upper)
