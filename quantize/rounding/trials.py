"""Rows of some matrices that are rounded on trial, and their errors on held-out text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...formats.codecs.codec import decode, decode_plain
from ...formats.source import Source, TensorInfo
from ...formats.types import GGMLType
from .methods import ON_CPU, Rounders
from .tensor_moments import MatrixMoments, TensorMoments

_ROWS = 64  # of a matrix that are tried
_FACTOR_BYTES = 1 << 33  # of the factors that threads may hold together

Result = TypeVar("Result")


def in_threads(work: Sequence[Callable[[], Result]], threads: int, n_cols: int) -> list[Result]:
    """Return the results of all calls in order; fewer run together for long rows of `n_cols`, as
    each holds a few matrices of n_cols^2.
    """
    at_once = max(1, min(threads, len(work), _FACTOR_BYTES // (32 * n_cols * n_cols)))
    if at_once == 1:
        return [one() for one in work]
    with ThreadPoolExecutor(at_once, thread_name_prefix="trial") as pool:
        return list(pool.map(lambda one: one(), work))


@dataclass(frozen=True)
class Trial:
    """Rows of a matrix, its moments, and its importances. rounders: where they are rounded."""

    name: str
    x: np.ndarray
    moments: MatrixMoments
    tokens: int
    importance: np.ndarray | None
    rounders: Rounders = ON_CPU

    def searched(self, type: GGMLType) -> np.ndarray:
        """Return the bytes of the search with the importances."""
        n = self.x.shape[1]
        out = np.empty((len(self.x), type.row_bytes(n)), dtype=np.uint8)
        self.rounders.search(type, n, self.importance)(self.x, out)
        return out

    @functools.cached_property
    def energy(self) -> float:
        """tr(X H X^T) of the rows with the held-out moments."""
        return self.rounders.held_out_error(self.moments, self.x.astype(np.float64))

    def errors(self, type: GGMLType, shrink: float, passes: int) -> np.ndarray:
        """Return float64[2, passes + 1], after error feedback and after each refinement: logs of
        the held-out error relative to that of the search, zeros where the search has none; and
        which part of the products with the held-out inputs is missing, tr(E H X^T) / tr(X H X^T).
        """
        base = self._error(type, self.searched(type))
        if base <= 0 or (whole := self.energy) <= 0:
            return np.zeros((2, passes + 1))
        found, missing = [], []
        for made in self._stages(type, shrink, passes):
            values = decode_plain(type, made, self.x.shape[1]).astype(np.float64)
            error = self.rounders.held_out_error(self.moments, self.x - values)
            left = self.rounders.held_out_error(self.moments, values)
            found.append(error)
            missing.append((whole + error - left) / (2 * whole))
        return np.array([np.log(np.maximum(found, 1e-30 * base) / base), missing])

    def ratio_to_diagonal(self, type: GGMLType, shrink: float, passes: int) -> float:
        """Return the log of the held-out error tr(dW H dW^T) after rounding, relative to what the
        diagonal of H says of the search, which is how errors are estimated without moments.
        """
        rest = self.x - decode_plain(type, self.searched(type), self.x.shape[1])
        hold = self.moments.hold
        if hold is None:
            return 0.0
        base = float((rest.astype(np.float64) ** 2 @ np.diagonal(hold)).sum())
        if base <= 0:
            return 0.0
        *_, made = self._stages(type, shrink, passes)
        return float(np.log(max(self._error(type, made), 1e-30 * base) / base))

    def _stages(self, type: GGMLType, shrink: float, passes: int) -> Iterator[np.ndarray]:
        n = self.x.shape[1]
        return self.rounders.rounder(type, n, self.moments, shrink, passes, self.name).stages(
            self.x
        )

    def _error(self, type: GGMLType, made: np.ndarray) -> float:
        rest = self.x.astype(np.float64)
        rest -= decode_plain(type, made, self.x.shape[1])
        return self.rounders.held_out_error(self.moments, rest)


def trials(
    source: Source,
    usable: Sequence[tuple[TensorInfo, TensorMoments]],
    importance: Callable[[str, tuple[int, ...]], np.ndarray | None] | None,
    matrices: int,
    rows: int = _ROWS,
    rounders: Rounders = ON_CPU,
) -> Iterator[Trial]:
    """Yield `rows` rows of at most `matrices` evenly spaced matrices that have held-out moments."""
    all_matrices = [(info, m, index) for info, m in usable for index in range(info.n_matrices)]
    n = len(all_matrices)
    if not n:
        return
    picked = sorted({(2 * i + 1) * n // (2 * matrices) for i in range(matrices)})
    for info, m, index in (all_matrices[at] for at in picked):
        matrix, tokens = MatrixMoments(m, index), m.tokens(index)
        held = matrix.on_device(hold=True)
        hold = matrix.hold if held is None else held.diagonal
        if hold is None or not hold.any() or not tokens:
            continue
        x = some_rows(source, info, index, rows)
        if not np.isfinite(x).all():
            continue  # the run says so, or sets them to 0
        weights = None if importance is None else importance(info.name, info.shape)
        own = None if weights is None else weights[index]
        yield Trial(info.name, x, matrix, tokens, own, rounders)


def some_rows(source: Source, info: TensorInfo, index: int, rows: int = _ROWS) -> np.ndarray:
    """Return at most `rows` rows of matrix `index`, in a few groups that are evenly spaced."""
    per_matrix = info.n_rows // info.n_matrices
    group = info.type.group_rows
    take = max(group, rows // 4 // group * group)
    first = index * per_matrix
    starts = {
        min(i * per_matrix // 4 // group * group, max(0, per_matrix - take)) for i in range(4)
    }
    pieces = []
    for start in sorted(starts):
        stop = first + min(start + take, per_matrix)
        data = np.array(source.read_rows(info, first + start, stop))
        pieces.append(decode(info.type, data, info.n_cols))
    return np.concatenate(pieces)
