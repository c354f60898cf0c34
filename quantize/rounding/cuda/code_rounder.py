"""Round rows with second moments on a GPU, for types with a code per element: the steps of
`rounding/rounder.py`, with the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....cuda_kernels.rounding import WARPS
from ....formats.types import GGMLType
from .block_rounder import BlockRounder, required
from .code_tables import code_tables
from .factor import DeviceFactor
from .memory import Memory


class CodeRounder(BlockRounder):
    """`BlockRounder` of types with a code per element."""

    def __init__(
        self,
        type: GGMLType,
        n_cols: int,
        factor: DeviceFactor,
        passes: int,
        memory: Memory,
        stream: Any,
    ):
        self._tables = tables = required(code_tables(type.name), type)
        super().__init__(type, n_cols, factor, passes, memory, stream, len(tables.layout.scales))
        self._give(
            tables, "factors", "shifts", "patterns", "levels", "near", "choice_bits", "fields"
        )

    def _begin(self, x: Sequence[np.ndarray]) -> None:
        new, rows, n = self._memory.array, self._rows, self.n_cols
        self._codes = new("codes", (rows, n), np.uint8)
        self._choices = new("choices", (rows, n // self._tables.group), np.uint16)

    def _read_block(self, number: int, bytes_of_block: Any) -> None:
        scales = self._scale_numbers()
        self._read_scales(number, bytes_of_block, self._tables.choice_bits, *scales)

    def _round_block(self, number: int, piece: Any, delta: Any) -> None:
        type, tables, layout = self.type, self._tables, self._tables.layout
        size = type.block_size
        self._start(
            "round_columns",
            self._rows,
            WARPS,
            self._w,
            piece,
            self._factor.feedback,
            self._weights,
            delta,
            self._codes,
            self._choices,
            self._scales,
            *self._values(),
            self._given["near"],
            *map(np.int32, (self._rows, self._matrix_rows, self.n_cols, number * size, size)),
            *map(np.int32, (self._owners, 0 if type.header_bytes else number)),
            *map(np.int32, (self._n_scales, tables.groups, tables.factors.shape[1])),
            *map(np.int32, (layout.n_codes, tables.levels.size, layout.ordered)),
            np.int32(tables.near.shape[1]),
        )

    def _values(self) -> list[Any]:
        return self._of("factors", "shifts", "patterns", "levels")

    @property
    def _scale_is_half(self) -> bool:
        scales = self._tables.layout.scales
        return not scales or scales[0].half

    def _scale_numbers(self) -> list[np.int32]:
        """Return how scales are stored: their number, whether they are halves, two offsets."""
        offsets = [scale.offset for scale in self._tables.layout.scales] + [0, 0]
        return [np.int32(v) for v in (self._n_scales, self._scale_is_half, offsets[0], offsets[1])]

    def _group_numbers(self) -> list[np.int32]:
        tables = self._tables
        return [
            np.int32(v)
            for v in (
                tables.group,
                tables.groups,
                tables.factors.shape[1],
                tables.layout.n_codes,
            )
        ]

    def _errors(self, out: Any) -> None:
        self._over(
            "errors_of_codes",
            self._rows * self.n_cols,
            self._w,
            out,
            self._codes,
            self._choices,
            self._scales,
            *self._values(),
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, self._owner_width, self._n_scales)),
            *self._group_numbers(),
        )

    def _descend_chunk(self, steps: Any, first: int, width: int) -> None:
        tables = self._tables
        self._start(
            "descend_columns",
            self._rows,
            WARPS,
            self._factor.moments,
            self._g,
            steps,
            self._codes,
            self._choices,
            self._scales,
            *self._values(),
            *map(np.int32, (self._rows, self._matrix_rows, self.n_cols, first, width)),
            *map(np.int32, (self._owner_width, self._n_scales)),
            *self._group_numbers(),
            *map(np.int32, (tables.levels.size, tables.layout.ordered)),
        )

    def _units(self, out: Any, first: int, which: int) -> None:
        self._over(
            "units_of_scale",
            self._rows * self._owner_width,
            out,
            self._codes,
            self._choices,
            *self._values(),
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, first, self._owner_width, which)),
            *self._group_numbers(),
        )

    def _write(self, there: Any) -> None:
        type = self.type
        self._over(
            "write_rows",
            there.size,
            there,
            self._heads,
            self._bodies,
            self._codes,
            self._choices,
            self._scales,
            self._given["fields"],
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, type.block_bytes, type.header_bytes, self._blocks)),
            *map(np.int32, (type.block_size, self._tables.groups)),
            *self._scale_numbers(),
        )
