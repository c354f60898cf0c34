"""Round rows with second moments on a GPU, for types that store words of a table: the steps of
`rounding/word_rounder.py`, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....cuda_kernels.rounding import WARPS
from ....formats.types import GGMLType
from .block_rounder import BlockRounder, required
from .factor import DeviceFactor, ordered_there
from .memory import Memory
from .word_tables import word_tables


class DeviceWordRounder(BlockRounder):
    """`BlockRounder` of types of words."""

    def __init__(
        self,
        type: GGMLType,
        n_cols: int,
        factor: DeviceFactor,
        passes: int,
        memory: Memory,
        stream: Any,
    ):
        self._tables = tables = required(word_tables(type.name), type)
        super().__init__(type, n_cols, factor, passes, memory, stream, 1)
        self._order = tables.layout.order_of(n_cols)
        if self._order is not None:  # the search has the weights of the columns as they are
            factor = ordered_there(factor, self._order, type.name, memory, stream)
            self._factor = factor
        self._give(tables, "factors", "book_of", "books", "near", "choice_bits", "fields")
        self._invert_blocks(tables.layout.dim)

    @property
    def _scale_is_half(self) -> bool:
        return self._tables.layout.scale.half

    def _ordered(self, x: Any) -> Any:
        if self._order is None:
            return x
        made = self._memory.array("ordered", (self._rows, self.n_cols), np.float32)
        order = self._memory.filled("order", self._order.astype(np.int32), self._stream)
        sizes = np.int64(self._rows), np.int32(self.n_cols)
        self._over("order_columns", self._rows * self.n_cols, x, order, made, *sizes)
        return made

    def _begin(self, x: Sequence[np.ndarray]) -> None:
        new, rows, n, tables = self._memory.array, self._rows, self.n_cols, self._tables
        self._found = new("words", (rows, n // tables.layout.dim), np.uint16)
        self._choices = new("choices", (rows, n // tables.group), np.uint16)

    def _read_block(self, number: int, bytes_of_block: Any) -> None:
        tables = self._tables
        scales = 1, tables.stored, 0, 0
        self._read_scales(number, bytes_of_block, tables.choice_bits, *scales)

    def _round_block(self, number: int, piece: Any, delta: Any) -> None:
        tables, size = self._tables, self.type.block_size
        self._start(
            "round_codes_of_words" if tables.in_codes else "round_words",
            self._rows,
            WARPS,
            self._w,
            piece,
            self._factor.feedback,
            self._inverse,
            self._metric,
            delta,
            self._found,
            self._choices,
            self._scales,
            *self._of("factors", "book_of", "near", "books"),
            *map(np.int32, (self._rows, self._matrix_rows, self.n_cols, number * size, size)),
            *map(np.int32, (self._owners, 0 if self.type.header_bytes else number)),
            *map(np.int32, (tables.groups, tables.count, tables.near.shape[1])),
            np.int32(tables.layout.dim),
        )

    def _values(self) -> list[Any]:
        return [self._scales, *self._of("factors", "book_of", "books")]

    def _errors(self, out: Any) -> None:
        self._elements(self._w, out, 0, self.n_cols)

    def _units(self, out: Any, first: int, which: int) -> None:
        self._elements(None, out, first, self._owner_width)

    def _elements(self, w: Any, out: Any, first: int, width: int) -> None:
        tables = self._tables
        self._over(
            "errors_of_words",
            self._rows * width,
            w,
            out,
            self._found,
            self._choices,
            *self._values(),
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, first, width, self._owner_width, tables.group)),
            *map(np.int32, (tables.count, tables.layout.dim, tables.in_codes)),
        )

    def _descend_chunk(self, steps: Any, first: int, width: int) -> None:
        tables = self._tables
        self._start(
            "descend_words",
            self._rows,
            WARPS,
            self._factor.moments,
            self._g,
            self._inverse_moments,
            steps,
            self._found,
            self._choices,
            *self._values(),
            *map(np.int32, (self._rows, self._matrix_rows, self.n_cols, first, width)),
            *map(np.int32, (self._owner_width, tables.group, tables.count, tables.layout.dim)),
        )

    def _write(self, there: Any) -> None:
        type, tables = self.type, self._tables
        self._over(
            "write_words",
            there.size,
            there,
            self._heads,
            self._bodies,
            self._found,
            self._choices,
            self._scales,
            self._given["fields"],
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, type.block_bytes, type.header_bytes, self._blocks)),
            *map(np.int32, (type.block_size, tables.groups, tables.layout.dim)),
            *map(np.int32, (tables.stored, tables.in_codes)),
        )
