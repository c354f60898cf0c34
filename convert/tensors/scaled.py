"""Rows of floats times numbers: matrices of models whose factors GGUF has no keys for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import UnsupportedTypeError
from ...formats.codecs.codec import decode
from ...formats.types import TYPES, GGMLType
from .reorder import TransposedMatrices
from .rows import Leaf, MovedRows, StoredRows, rebased
from .stored import TensorRows


class ScaledRows(MovedRows):
    """Rows of floats times `factors`, one after the other, as float32: each is a number, or
    float32[n_rows] with one for each row.

    They count as moved rows because an adapter B A is scaled by scaling the rows of B.
    """

    type = TYPES["F32"]

    def __init__(self, base: TensorRows, stored: GGMLType, factors: Sequence[np.ndarray | float]):
        self.n_rows = base.n_rows
        self._n_cols = base.row_bytes // stored.block_bytes * stored.block_size
        self.row_bytes = self.type.row_bytes(self._n_cols)
        self._base, self._stored = base, stored
        self._factors = [np.broadcast_to(np.float32(x), base.n_rows) for x in factors]

    def read(self, start: int, stop: int) -> np.ndarray:
        start, stop, _ = slice(start, stop).indices(self.n_rows)
        values = decode(self._stored, self._base.read(start, stop), self._n_cols)
        for factor in self._factors:
            values = values * factor[start:stop, None]
        return (
            np.ascontiguousarray(values, np.float32)
            .view(np.uint8)
            .reshape(stop - start, self.row_bytes)
        )

    def rebased(self, leaf: Leaf) -> TensorRows:
        rows = rebased(self._base, leaf)
        if not isinstance(rows, (StoredRows, TransposedMatrices)):
            raise UnsupportedTypeError(f"{type(rows).__name__} cannot be scaled")
        return ScaledRows(rows, rows.type, self._factors)

    def release(self) -> None:
        self._base.release()
