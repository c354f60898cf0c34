"""Matrices that are multiplied as they are stored, on the CPU.

The compiler of `simd` is imported when the first of them is used: a model on a GPU does not need
it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...formats.types import GGMLType

if TYPE_CHECKING:
    from ..simd.products import Rows

UNIT = 32  # weights that are decoded together
X_PLACE, Y_PLACE = 4, 7  # of the addresses among the arguments of a multiplication
TOGETHER = 64  # products of one operation, as it looks at all of them for each


@functools.cache
def _compiled():
    from ..simd import dots, products, threads, together

    return products, threads, dots, together


def can_be_kept(type: GGMLType, n_cols: int) -> bool:
    """Return whether rows of `n_cols` weights can be multiplied as they are stored."""
    return n_cols % UNIT == 0


def kept_rows(type: GGMLType, stored: np.ndarray, n_cols: int) -> Rows:
    """Return rows of `type`, uint8[rows, row_bytes], for products. Interleaved ones are copied one
    after the other, others are used where they are.
    """
    products, *_ = _compiled()
    rows = np.ascontiguousarray(products.plain_rows(type, stored, n_cols))
    return products.Rows(products.plain_type(type), rows, n_cols)


def decoded(type: GGMLType, stored: np.ndarray, n_cols: int) -> torch.Tensor:
    """Return float32[rows, n_cols] of rows of `type`, uint8[rows, row_bytes]: the weights that
    products use.
    """
    return _decoded(kept_rows(type, stored, n_cols))


def gathered(rows: Rows, numbers: np.ndarray) -> torch.Tensor:
    """Return float32[len(numbers), n_cols]: the rows with these numbers."""
    products, *_ = _compiled()
    return _decoded(products.Rows(rows.type, rows.data[numbers], rows.n_cols))


def _decoded(rows: Rows) -> torch.Tensor:
    _, threads, *_ = _compiled()
    out = torch.empty(len(rows.data), rows.n_cols)
    threads.run(threads.Program([rows.decoding(out.data_ptr())]), torch.get_num_threads())
    return out


def products_of_each(
    whole: Rows, n_rows: int, numbers: Sequence[int], x: torch.Tensor, *, rounds: bool
) -> torch.Tensor:
    """Return float32[n, n_rows]: row i of x float32[n, n_cols] times the matrix numbers[i] of
    `whole`, which has `n_rows` rows for each matrix. rounds: as for `Multiplication`, which gives
    the same digits. A matrix that several rows in a row are multiplied with is decoded once for
    them.
    """
    products, threads, dots, together = _compiled()
    n_threads, n_cols = torch.get_num_threads(), whole.n_cols
    x, chosen = x.contiguous(), np.array(numbers, dtype=np.int64)
    y, operations = x.new_empty(len(x), n_rows), []
    rounds = rounds and dots.can_be_rounded(whole.type, n_cols)
    most = together.MOST if rounds else together.FLOATS
    tables = [_groups(chosen[i : i + TOGETHER], most) for i in range(0, len(x), TOGETHER)]
    step = -(-dots.rounded_bytes(n_cols) // 64) * 64
    memory = np.empty(n_threads * TOGETHER * step + 64 if rounds else 0, np.uint8)
    rounded = products.Vectors(-(-memory.ctypes.data // 64) * 64, step, TOGETHER * step)
    for first, table in zip(range(0, len(x), TOGETHER), tables, strict=True):
        n = min(TOGETHER, len(x) - first)
        vectors = products.Vectors(x.data_ptr() + 4 * first * n_cols, 4 * n_cols)
        out = products.Vectors(y.data_ptr() + 4 * first * n_rows, 4 * n_rows)
        at = products.Vectors(chosen.ctypes.data + 8 * first)
        if rounds:
            operations.append(dots.rounding(vectors, n, n_cols, rounded))
        if len(table):
            operations.append(
                together.multiplications(
                    whole, n_rows, vectors, rounded if rounds else None, out, table
                )
            )
        if (chosen[first : first + n] < 0).all():
            continue
        if rounds:
            operations.append(dots.multiplications(whole, n_rows, vectors, rounded, out, at, n))
        else:
            operations.append(whole.multiplications(n_rows, vectors, out, at, n))
    # Each thread reads only what it has rounded itself.
    meets = [i == len(operations) - 1 for i in range(len(operations))]
    threads.run(threads.Program(operations, meets), n_threads)
    return y


def _groups(chosen: np.ndarray, most: int) -> np.ndarray:
    """Return a table int64[groups, 3]: a matrix of `chosen`, the first of several products with it,
    and how many there are, 2 to `most`. Their places in `chosen` become -1.
    """
    starts = np.flatnonzero(np.diff(chosen, prepend=-1))
    table = [
        (chosen[start], i, min(most, stop - i))
        for start, stop in pairwise([*starts, len(chosen)])
        for i in range(start, stop, most)
        if min(most, stop - i) > 1
    ]
    for _, start, n in table:
        chosen[start : start + n] = -1
    return np.array(table, dtype=np.int64).reshape(-1, 3)


class Multiplication:
    """Products of rows start..stop of `whole` with rows x, one by one. rounds: in 8 bits where that
    is possible.
    """

    def __init__(self, whole: Rows, start: int, stop: int, *, rounds: bool):
        products, threads, dots, _ = _compiled()
        self.whole, self.rows = whole, whole.part(start, stop)
        self._run, self._n_threads = threads.run, 0
        if rounds and dots.can_be_rounded(whole.type, whole.n_cols):
            self._step = -(-dots.rounded_bytes(whole.n_cols) // 64) * 64
            code, self._rounding = dots.rounding(
                products.Vectors(0), 1, whole.n_cols, products.Vectors(0, 0, self._step)
            )
            operation, self._arguments = dots.multiplications(
                self.rows,
                len(self.rows.data),
                *(products.Vectors(0), products.Vectors(0, 0, self._step), products.Vectors(0)),
                products.Vectors(products.FIRST),
            )
            self._program = threads.Program(
                [(code, self._rounding), (operation, self._arguments)], [False, True]
            )
        else:
            self._rounding = None
            operation, self._arguments = self.rows.multiplication(0, 0)
            self._program = threads.Program([(operation, self._arguments)])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32[n, columns] to float32[n, rows]."""
        x = x.contiguous()
        y = x.new_empty(len(x), len(self.rows.data))
        at, to, n_threads = x.data_ptr(), y.data_ptr(), torch.get_num_threads()
        rounded = self._rounding
        if rounded is not None and n_threads > self._n_threads:
            self._prepare(n_threads, rounded)
        for i in range(len(x)):
            self._arguments[X_PLACE] = at + 4 * i * x.shape[1]
            self._arguments[Y_PLACE] = to + 4 * i * y.shape[1]
            if rounded is not None:
                rounded[0] = self._arguments[X_PLACE]
            self._run(self._program, n_threads)
        return y

    def _prepare(self, n_threads: int, rounding: np.ndarray) -> None:
        """Take memory for rounded vectors of so many threads."""
        _, _, dots, _ = _compiled()
        self._memory = np.empty(n_threads * self._step + 64, np.uint8)
        self._n_threads = n_threads
        address = -(-self._memory.ctypes.data // 64) * 64
        self._arguments[dots.ROUNDED_PLACE] = rounding[dots.OUT_PLACE] = address
