"""Round rows with second moments on a GPU, for types that store vectors of eight: the steps of
`rounding/vector_rounder.py`, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....cuda_kernels.rounding import WARPS
from ....formats.types import GGMLType
from ..kernels.vectors import SIZE
from .block_rounder import BlockRounder, required
from .factor import DeviceFactor
from .memory import Memory
from .vector_tables import vector_tables


class DeviceVectorRounder(BlockRounder):
    """`BlockRounder` of types of vectors."""

    def __init__(
        self,
        type: GGMLType,
        n_cols: int,
        factor: DeviceFactor,
        passes: int,
        memory: Memory,
        stream: Any,
    ):
        self._tables = tables = required(vector_tables(type.name), type)
        super().__init__(type, n_cols, factor, passes, memory, stream, 1)
        self._give(tables, "factors", "entries", "choice_bits", "fields")
        self._invert_blocks(SIZE)

    @property
    def _scale_is_half(self) -> bool:
        return True

    def _begin(self, x: Sequence[np.ndarray]) -> None:
        new, rows, n, tables = self._memory.array, self._rows, self.n_cols, self._tables
        self._indices = new("indices", (rows, n // tables.size), np.uint16)
        self._signs = new("signs", (rows, n // SIZE), np.uint8)
        self._choices = new("choices", (rows, n // tables.group), np.uint16)

    def _read_block(self, number: int, bytes_of_block: Any) -> None:
        self._read_scales(number, bytes_of_block, self._tables.choice_bits, 1, True, 0, 0)

    def _chosen(self) -> list[Any]:
        return [self._indices, self._signs, self._choices, self._scales]

    def _values(self) -> list[Any]:
        return self._of("factors", "entries")

    def _round_block(self, number: int, piece: Any, delta: Any) -> None:
        tables, size = self._tables, self.type.block_size
        self._start(
            "round_vectors",
            self._rows,
            WARPS,
            self._w,
            piece,
            self._factor.feedback,
            self._inverse,
            self._metric,
            delta,
            *self._chosen(),
            *self._values(),
            *map(np.int32, (self._rows, self._matrix_rows, self.n_cols, number * size, size)),
            *map(np.int32, (self._owners, number, tables.groups, tables.count)),
            *map(np.int32, (tables.size, tables.even)),
        )

    def _errors(self, out: Any) -> None:
        self._elements(self._w, out, 0, self.n_cols)

    def _units(self, out: Any, first: int, which: int) -> None:
        self._elements(None, out, first, self._owner_width)

    def _elements(self, w: Any, out: Any, first: int, width: int) -> None:
        tables = self._tables
        self._over(
            "errors_of_vectors",
            self._rows * width,
            w,
            out,
            *self._chosen(),
            *self._values(),
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, first, width, self._owner_width, tables.group)),
            *map(np.int32, (tables.count, tables.size)),
        )

    def _descend_chunk(self, steps: Any, first: int, width: int) -> None:
        tables = self._tables
        self._start(
            "descend_vectors",
            self._rows,
            WARPS,
            self._factor.moments,
            self._g,
            self._inverse_moments,
            steps,
            *self._chosen(),
            *self._values(),
            *map(np.int32, (self._rows, self._matrix_rows, self.n_cols, first, width)),
            *map(np.int32, (self._owner_width, tables.group, tables.count)),
            *map(np.int32, (tables.size, tables.even)),
        )

    def _write(self, there: Any) -> None:
        self._over(
            "write_vectors",
            there.size,
            there,
            self._bodies,
            self._indices,
            self._signs,
            self._scales,
            self._given["fields"],
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, self.type.block_bytes, self._blocks)),
            *map(np.int32, (self.type.block_size, self._tables.size)),
        )
