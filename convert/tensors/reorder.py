"""Rearrange rows and their elements: heads transposed, rows and columns permuted, values
recomputed.

Like those in `rows.py`, these classes read only what the requested rows are made of.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...errors import UnsupportedTypeError
from ...formats.codecs.codec import decode
from ...formats.types import GGMLType
from .rows import Leaf, MovedRows, rebased
from .stored import TensorRows

_TILE_ROWS = 16


class SelectedRows(MovedRows):
    """Rows `order[0]`, `order[1]`, ... of another. Runs of consecutive rows are read at once."""

    def __init__(self, base: TensorRows, order: np.ndarray):
        self.n_rows, self.row_bytes = len(order), base.row_bytes
        self._base, self._order = base, order

    def read(self, start: int, stop: int) -> np.ndarray:
        wanted = self._order[start:stop]
        if len(wanted) == 0:
            return np.empty((0, self.row_bytes), np.uint8)
        cuts = [0, *(np.flatnonzero(np.diff(wanted) != 1) + 1).tolist(), len(wanted)]
        pieces = [
            self._base.read(int(wanted[begin]), int(wanted[end - 1]) + 1)
            for begin, end in zip(cuts, cuts[1:])
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def rebased(self, leaf: Leaf) -> TensorRows:
        return SelectedRows(rebased(self._base, leaf), self._order)

    def release(self) -> None:
        self._base.release()


class EveryOtherRow(MovedRows):
    """Rows `first`, `first` + 2, ... of another that has an even number of them."""

    def __init__(self, base: TensorRows, first: int):
        self.n_rows, self.row_bytes = base.n_rows // 2, base.row_bytes
        self._base, self._first = base, first

    def read(self, start: int, stop: int) -> np.ndarray:
        if start >= stop:
            return np.empty((0, self.row_bytes), np.uint8)
        return self._base.read(self._first + 2 * start, self._first + 2 * stop - 1)[::2]

    def rebased(self, leaf: Leaf) -> TensorRows:
        return EveryOtherRow(rebased(self._base, leaf), self._first)

    def release(self) -> None:
        self._base.release()


class TransposedMatrices:
    """Matrices stored one after the other as [n_rows, n_cols], as rows of [n_cols, n_rows] each;
    with `columns`, only these columns.

    Only the requested columns of each matrix are gathered.
    """

    def __init__(
        self, base: TensorRows, n_matrices: int, type: GGMLType, columns: slice = slice(None)
    ):
        if type.block_size != 1:
            raise UnsupportedTypeError(
                f"{type.name} rows cannot be transposed without changing values"
            )
        self.type = type
        self._n, self._size = base.n_rows // n_matrices, type.block_bytes
        self._n_cols = base.row_bytes // self._size
        self._columns = range(self._n_cols)[columns]
        self.n_rows, self.row_bytes = n_matrices * len(self._columns), self._n * self._size
        self._base = base

    def read(self, start: int, stop: int) -> np.ndarray:
        pieces, per_matrix = [], len(self._columns)
        while start < stop:
            matrix, first = divmod(start, per_matrix)
            last = min(per_matrix, first + stop - start)
            wanted = self._columns[first:last]
            stored = np.ascontiguousarray(
                self._base.read(matrix * self._n, (matrix + 1) * self._n)
            ).view(f"u{self._size}")
            piece = np.empty((len(wanted), self._n), stored.dtype)
            # Few rows at a time, so that the cache holds them.
            for row in range(0, self._n, _TILE_ROWS):
                piece[:, row : row + _TILE_ROWS] = stored[
                    row : row + _TILE_ROWS, wanted.start : wanted.stop : wanted.step
                ].T
            pieces.append(piece)
            start += last - first
        return (
            np.concatenate(pieces).view(np.uint8)
            if pieces
            else np.empty((0, self.row_bytes), np.uint8)
        )

    def release(self) -> None:
        self._base.release()


class SelectedColumns:
    """Elements `order[0]`, `order[1]`, ... of each row. `type` has one element per block."""

    def __init__(self, base: TensorRows, order: np.ndarray, type: GGMLType):
        if type.block_size != 1:
            raise UnsupportedTypeError(
                f"columns of {type.name} rows cannot be rearranged without changing values"
            )
        self.n_rows, self.row_bytes = base.n_rows, len(order) * type.block_bytes
        self.base, self.order, self._size = base, order, type.block_bytes

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = np.ascontiguousarray(self.base.read(start, stop)).reshape(
            stop - start, self.base.row_bytes // self._size, self._size
        )
        return rows[:, self.order].reshape(stop - start, self.row_bytes)

    def release(self) -> None:
        self.base.release()


class TransposedHeads:
    """The rows [n, n_cols] of each head, transposed to [n_cols, n]. `type` has one element per
    block.

    `base` has `stride` rows per head, of which the first `n` are used.
    """

    def __init__(self, base: TensorRows, n_heads: int, stride: int, n: int, type: GGMLType):
        if type.block_size != 1:
            raise UnsupportedTypeError(
                f"{type.name} rows cannot be transposed without changing values"
            )
        self._n_cols = base.row_bytes // type.block_bytes
        self.n_rows, self.row_bytes = n_heads * self._n_cols, n * type.block_bytes
        self._base, self._stride, self._n, self._size = base, stride, n, type.block_bytes

    def read(self, start: int, stop: int) -> np.ndarray:
        first, last = start // self._n_cols, -(-stop // self._n_cols)
        heads = [
            self._base.read(head * self._stride, head * self._stride + self._n)
            for head in range(first, last)
        ]
        if not heads:
            return np.empty((0, self.row_bytes), np.uint8)
        elements = np.stack(heads).reshape(len(heads), self._n, self._n_cols, self._size)
        rows = elements.transpose(0, 2, 1, 3).reshape(-1, self.row_bytes)
        return rows[start - first * self._n_cols : stop - first * self._n_cols]

    def release(self) -> None:
        self._base.release()


class ComputedRows:
    """`function` applied to the values of float rows, as float32. It maps float32[rows, n_cols] to
    the same shape.
    """

    def __init__(
        self,
        base: TensorRows,
        type: GGMLType,
        n_cols: int,
        function: Callable[[np.ndarray], np.ndarray],
    ):
        self.n_rows, self.row_bytes = base.n_rows, 4 * n_cols
        self._base, self._type, self._n_cols, self._function = base, type, n_cols, function

    def read(self, start: int, stop: int) -> np.ndarray:
        values = self._function(decode(self._type, self._base.read(start, stop), self._n_cols))
        return (
            np.ascontiguousarray(values, np.float32)
            .view(np.uint8)
            .reshape(stop - start, self.row_bytes)
        )

    def release(self) -> None:
        self._base.release()
