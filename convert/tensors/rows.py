"""Compute rows of output tensors from rows of stored tensors. Every change of layout in a
conversion is computed on demand.

A `TensorRows` reads any range of its rows from only the stored rows that it needs, so stacking 256
experts or permuting a matrix takes no memory beyond the requested rows. Values change only where
the name says so.

Classes that only move whole rows derive from `MovedRows`. An adapter B A to a matrix is converted
by moving the rows of B as the conversion moves those of the matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from ...errors import UnsupportedTypeError
from ...formats.codecs.codec import decode
from ...formats.types import GGMLType
from .decoded import DecodedTensor, ggml_type_of
from .stored import WIDENED_DTYPES, StoredTensor, TensorReader, TensorRows

Leaf = Callable[[StoredTensor], TensorRows]


class MovedRows(ABC):
    """Rows that are whole rows of stored tensors, in another order or place."""

    @abstractmethod
    def rebased(self, leaf: Leaf) -> TensorRows:
        """Return the same arrangement of the rows that `leaf` gives for each stored tensor."""


def rebased(rows: TensorRows, leaf: Leaf) -> TensorRows:
    """Return `rows.rebased(leaf)`. Raise UnsupportedTypeError for rows whose values are changed or
    come from several rows.
    """
    if not isinstance(rows, MovedRows):
        raise UnsupportedTypeError(
            f"the conversion changes more than the order of its rows ({type(rows).__name__})"
        )
    return rows.rebased(leaf)


class StoredRows(MovedRows):
    """A stored or decoded tensor as `n_rows` equal rows, by default rows of its last dimension.
    Wide floats and integers are read as F32.
    """

    def __init__(self, reader: TensorReader, tensor: StoredTensor, n_rows: int | None = None):
        if n_rows is None:
            n_rows = tensor.n_elements // tensor.shape[-1] if tensor.n_elements else 0
        self.n_rows, self._stored_bytes = n_rows, tensor.n_bytes // max(n_rows, 1)
        self._wide = WIDENED_DTYPES.get(tensor.dtype)
        self.row_bytes = (
            self._stored_bytes
            if self._wide is None
            else self._stored_bytes // np.dtype(self._wide).itemsize * 4
        )
        self._reader, self._tensor = reader, tensor

    @property
    def type(self) -> GGMLType:
        """The type of its rows. UnsupportedTypeError for dtypes without one."""
        return ggml_type_of(self._tensor)

    def read(self, start: int, stop: int) -> np.ndarray:
        start, stop, _ = slice(start, stop).indices(self.n_rows)
        if isinstance(self._tensor, DecodedTensor):
            return self._decoded(self._tensor.rows, start, stop)
        data = self._reader.read(
            self._tensor, start * self._stored_bytes, stop * self._stored_bytes
        )
        if self._wide is not None:
            with np.errstate(over="ignore"):  # values beyond F32 become infinite, as in PyTorch
                data = data.view(self._wide).astype("<f4").view(np.uint8)
        return data.reshape(max(stop - start, 0), self.row_bytes)

    def rebased(self, leaf: Leaf) -> TensorRows:
        return leaf(self._tensor)

    def _decoded(self, rows: TensorRows, start: int, stop: int) -> np.ndarray:
        if (rows.n_rows, rows.row_bytes) == (self.n_rows, self.row_bytes):
            return rows.read(start, stop)
        # A vector, element by element.
        return rows.read(0, rows.n_rows).reshape(self.n_rows, self.row_bytes)[start:stop]

    def release(self) -> None:
        if isinstance(self._tensor, DecodedTensor):
            self._tensor.rows.release()
        else:
            self._reader.release(self._tensor)


class RowRange(MovedRows):
    """Rows [first, first + n_rows) of another."""

    def __init__(self, base: TensorRows, first: int, n_rows: int):
        self.n_rows, self.row_bytes = n_rows, base.row_bytes
        self._base, self._first = base, first

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._base.read(self._first + start, self._first + stop)

    def rebased(self, leaf: Leaf) -> TensorRows:
        return RowRange(rebased(self._base, leaf), self._first, self.n_rows)

    def release(self) -> None:
        self._base.release()


class ConcatenatedRows(MovedRows):
    """The rows of several `TensorRows` in turn: stacked experts, or gate followed by up."""

    def __init__(self, parts: Sequence[TensorRows]):
        self._parts = parts
        self._ends = list(accumulate(part.n_rows for part in parts))
        self.n_rows, self.row_bytes = self._ends[-1], parts[0].row_bytes

    def read(self, start: int, stop: int) -> np.ndarray:
        pieces = []
        number = bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[number] - self._parts[number].n_rows
            end = min(stop, self._ends[number])
            pieces.append(self._parts[number].read(start - begin, end - begin))
            start, number = end, number + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty((0, self.row_bytes), np.uint8)

    def rebased(self, leaf: Leaf) -> TensorRows:
        return ConcatenatedRows([rebased(part, leaf) for part in self._parts])

    def release(self) -> None:
        for part in self._parts:
            part.release()


class PaddedRows(MovedRows):
    """The rows of another, then rows of zeros up to `n_rows`."""

    def __init__(self, base: TensorRows, n_rows: int):
        self.n_rows, self.row_bytes = n_rows, base.row_bytes
        self._base = base

    def read(self, start: int, stop: int) -> np.ndarray:
        n_stored = self._base.n_rows
        found = self._base.read(min(start, n_stored), min(stop, n_stored))
        return np.pad(found, ((0, stop - start - len(found)), (0, 0)))

    def rebased(self, leaf: Leaf) -> TensorRows:
        return PaddedRows(rebased(self._base, leaf), self.n_rows)

    def release(self) -> None:
        self._base.release()


class PairedRotaryRows(MovedRows):
    """Query or key rows in the order of GGUF's `llama`, with rotary partners side by side.

    Hugging Face rotates row s * d/2 + j of a head (s = 0, 1) with its partner d/2 rows away; GGUF
    has the two as rows 2j and 2j + 1. So row 2j + s of a head is row s * d/2 + j of the stored one.
    """

    def __init__(self, base: TensorRows, n_heads: int):
        self.n_rows, self.row_bytes = base.n_rows, base.row_bytes
        self._base, self._head = base, base.n_rows // n_heads

    def read(self, start: int, stop: int) -> np.ndarray:
        wanted = np.arange(start, stop)
        head, row = np.divmod(wanted, self._head)
        stored = head * self._head + row % 2 * (self._head // 2) + row // 2
        first = start - start % self._head  # whole heads cover every row that is needed
        last = min(self.n_rows, stop + -stop % self._head)
        return self._base.read(first, last)[stored - first]

    def rebased(self, leaf: Leaf) -> TensorRows:
        return PairedRotaryRows(rebased(self._base, leaf), self.n_rows // self._head)

    def release(self) -> None:
        self._base.release()


class OneRow:
    """All rows of another as a single row, for a vector whose elements were treated as rows."""

    def __init__(self, base: TensorRows):
        self.n_rows, self.row_bytes = 1, base.n_rows * base.row_bytes
        self._base = base

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._base.read(0, self._base.n_rows).reshape(1, self.row_bytes)[start:stop]

    def release(self) -> None:
        self._base.release()


class PlusOneRows:
    """1 + rows of floats of `type`, as float32[n_rows, n_cols]: norms of models that store weights
    minus 1.
    """

    def __init__(self, base: TensorRows, type: GGMLType, n_cols: int):
        self.n_rows, self.row_bytes = base.n_rows, 4 * n_cols
        self._base, self._type, self._n_cols = base, type, n_cols

    def read(self, start: int, stop: int) -> np.ndarray:
        values = decode(self._type, self._base.read(start, stop), self._n_cols)
        return (
            np.ascontiguousarray(values + np.float32(1))
            .view(np.uint8)
            .reshape(stop - start, self.row_bytes)
        )

    def release(self) -> None:
        self._base.release()


class GeneratedRow:
    """A vector that no file holds, such as rotary frequency factors."""

    def __init__(self, values: np.ndarray):
        self._data = np.ascontiguousarray(values).view(np.uint8).reshape(1, -1)
        self.n_rows, self.row_bytes = self._data.shape

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._data[start:stop]

    def release(self) -> None:
        pass
