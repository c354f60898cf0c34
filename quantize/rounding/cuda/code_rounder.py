"""Round rows with second moments on a GPU, for types with a code per element: the steps of
`rounding/rounder.py`, with the same bytes.

A block of columns is searched and rounded at a time. The errors of its codes go to all later
columns in one product, whose sums are in index order as on the CPU; so do steps of a refinement.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ....cuda_kernels.rounding import MOST_COLUMNS, TILE, WARPS, From
from ....errors import UnsupportedTypeError
from ....formats.types import GGMLType
from ...encode import prepare_weights
from .code_tables import CodeTables, code_tables
from .factor import DeviceFactor
from .memory import Memory

_GRID = 4096  # CUDA blocks of a kernel over all elements
_ROWS = 1 << 26  # elements of the rows that are worked on together


class CodeRounder:
    """Round rows to a plain type; used as `rounding.rounder.Rounder` is, by one thread at a
    time.
    """

    def __init__(
        self,
        type: GGMLType,
        n_cols: int,
        factor: DeviceFactor,
        passes: int,
        memory: Memory,
        stream: Any,
    ):
        tables = code_tables(type.name)
        if tables is None:
            raise UnsupportedTypeError(f"{type.name} cannot be rounded on a GPU")
        self.type, self.n_cols, self.passes = type, n_cols, passes
        self._tables: CodeTables = tables
        self._factor, self._memory, self._stream = factor, memory, stream
        self._device = memory.device
        self._blocks = n_cols // type.block_size
        self._owners = 1 if type.header_bytes else self._blocks
        self._owner_width = n_cols // self._owners
        self._encoder = self._device.encoder(type, self._owner_width, True)
        searched = np.concatenate(
            [
                prepare_weights(factor.weights[at : at + self._owner_width], self._owner_width)
                for at in range(0, n_cols, self._owner_width)
            ]
        )
        put = memory.filled
        there = put("search weights", searched.reshape(self._owners, -1), stream)
        self._search_weights = [there[number] for number in range(self._owners)]
        self._weights = put("weights", factor.weights.astype(np.float32), stream)
        names = ("factors", "shifts", "patterns", "levels", "near", "choice_bits", "fields")
        self._given = {name: put(name, getattr(tables, name), stream) for name in names}

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None:
        step = max(1, _ROWS // self.n_cols)
        for start in range(0, len(x), step):
            rows = slice(start, min(start + step, len(x)))
            for _ in self._steps(np.ascontiguousarray(x[rows], dtype=np.float32)):
                pass
            self._fetch(out[rows])

    def stages(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the bytes of rows after error feedback, and after each refinement."""
        for _ in self._steps(np.ascontiguousarray(x, dtype=np.float32)):
            out = np.empty((len(x), self.type.row_bytes(self.n_cols)), dtype=np.uint8)
            self._fetch(out)
            yield out

    def _steps(self, x: np.ndarray) -> Iterator[None]:
        self._rows = len(x)
        new = self._memory.array
        rows, n, layout, tables = len(x), self.n_cols, self._tables.layout, self._tables
        self._w = self._memory.filled("w", x, self._stream)
        self._g = new("gradient", (rows, n), np.float32)
        self._codes = new("codes", (rows, n), np.uint8)
        self._choices = new("choices", (rows, n // tables.group), np.uint16)
        self._scales = new("scales", (rows, self._owners, len(layout.scales)), np.float32)
        self._bodies = new("bodies", (rows, self._blocks, self.type.block_bytes), np.uint8)
        self._heads = None
        self._feed_back()
        yield
        if not self.passes:
            return
        self._measure()
        for _ in range(self.passes):
            self._descend()
            if layout.scales:
                self._refit()
                self._descend()
            yield

    def _start(self, kernel: str, count: int, per_block: int, *arguments: Any) -> None:
        threads = 128 if kernel == "refit_scale" else 256
        self._device.launch(kernel, -(-count // per_block), threads, self._stream, *arguments)

    def _over(self, kernel: str, elements: int, *arguments: Any) -> None:
        grid = min(_GRID, -(-elements // 256))
        self._device.launch(kernel, grid, 256, self._stream, *arguments)

    def _multiply(
        self, a: Any, b: From, c: Any, first: int, stop: int, skip: range, fresh: bool = False
    ) -> None:
        """Add a float32[rows, depth] times b, rows of n numbers from an element on, to the columns
        of c from `first` to `stop` that are not in `skip`.
        """
        columns = stop - first
        if columns <= 0:
            return
        n, depth = self.n_cols, a.shape[1]
        self._start(
            "add_products",
            -(-self._rows // TILE) * -(-columns // TILE),
            1,
            a,
            np.int64(depth),
            From(b.array, b.elements + first),
            np.int64(n),
            From(c, first),
            np.int64(n),
            *map(np.int32, (self._rows, depth, columns, skip.start - first, skip.stop - first)),
            np.int32(fresh),
        )

    def _search(self, first: int, width: int) -> list[Any]:
        """Return the encoder's results for the columns from `first` of what is to be rounded."""
        arrays = self._encoder.arrays(self._rows, _Named(self._memory, "search"))
        if width == self.n_cols and self._owners == 1:
            self._copy(self._w, arrays[0], 0, width)
        else:
            self._copy(self._g, arrays[0], first, width)
        weights = self._search_weights[first // width]
        self._encoder.launch(arrays, stream=self._stream, weights=weights)
        return arrays

    def _copy(self, source: Any, target: Any, first: int, width: int) -> None:
        self._over(
            "gather_columns",
            self._rows * width,
            source,
            target,
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, first, width)),
        )

    def _feed_back(self) -> None:
        type, tables, n = self.type, self._tables, self.n_cols
        size, t, given = type.block_size, self._g, self._given
        self._copy(self._w, t, 0, n)
        piece = self._memory.array("piece", (self._rows, size), np.float32)
        bytes_of_block: Any = None
        if type.header_bytes:
            _, self._heads, self._bodies, *_ = self._search(0, n)
        for number, first in enumerate(range(0, n, size)):
            if type.header_bytes:
                self._copy(t, piece, first, size)
            else:
                piece, bytes_of_block, *_ = self._search(first, size)
            delta = self._memory.array("delta", (self._rows, size), np.float32)
            self._start(
                "read_block",
                self._rows,
                WARPS,
                bytes_of_block,
                self._heads,
                self._bodies,
                self._scales,
                self._choices,
                given["choice_bits"],
                *map(np.int32, (self._rows, type.block_bytes, type.header_bytes, self._blocks)),
                *map(np.int32, (number, tables.groups, tables.choice_bits.shape[1])),
                *self._scale_numbers(),
            )
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
                given["near"],
                *map(np.int32, (self._rows, n, first, size, self._owners)),
                np.int32(0 if type.header_bytes else number),
                *map(np.int32, (len(tables.layout.scales), tables.groups)),
                *map(np.int32, (tables.factors.shape[1], tables.layout.n_codes)),
                *map(np.int32, (tables.levels.size, tables.layout.ordered)),
                np.int32(tables.near.shape[1]),
            )
            rows_of_block = From(self._factor.feedback, first * n)
            self._multiply(delta, rows_of_block, t, first + size, n, range(0))

    def _values(self) -> list[Any]:
        return [self._given[name] for name in ("factors", "shifts", "patterns", "levels")]

    def _scale_numbers(self) -> list[np.int32]:
        """Return how scales are stored: their number, whether they are halves, two offsets."""
        scales = self._tables.layout.scales
        offsets = [scale.offset for scale in scales] + [0, 0]
        half = not scales or scales[0].half
        return [np.int32(v) for v in (len(scales), half, offsets[0], offsets[1])]

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

    def _measure(self) -> None:
        """Set the gradient to (weights - values) H."""
        rest = self._memory.array("along", (self._rows, self.n_cols), np.float32)
        self._over(
            "errors_of_codes",
            self._rows * self.n_cols,
            self._w,
            rest,
            self._codes,
            self._choices,
            self._scales,
            *self._values(),
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, self._owner_width, len(self._tables.layout.scales))),
            *self._group_numbers(),
        )
        moments = From(self._factor.moments, 0)
        self._multiply(rest, moments, self._g, 0, self.n_cols, range(0), fresh=True)

    def _descend(self) -> None:
        n, tables = self.n_cols, self._tables
        for first in range(0, n, MOST_COLUMNS):
            width = min(MOST_COLUMNS, n - first)
            steps = self._memory.array("delta", (self._rows, width), np.float32)
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
                *map(np.int32, (self._rows, n, first, width, self._owner_width)),
                np.int32(len(tables.layout.scales)),
                *self._group_numbers(),
                *map(np.int32, (tables.levels.size, tables.layout.ordered)),
            )
            along = From(self._factor.moments, first * n)
            self._multiply(steps, along, self._g, 0, n, range(first, first + width))

    def _refit(self) -> None:
        n, tables, width = self.n_cols, self._tables, self._owner_width
        scales = tables.layout.scales
        units = self._memory.array("units", (self._rows, width), np.float32)
        along = self._memory.array("along", (self._rows, n), np.float32)
        moved = self._memory.array("moved", (self._rows,), np.float32)
        for owner, first in enumerate(range(0, n, width)):
            for which in range(len(scales)):
                self._over(
                    "units_of_scale",
                    self._rows * width,
                    units,
                    self._codes,
                    self._choices,
                    *self._values(),
                    np.int64(self._rows),
                    *map(np.int32, (n, first, width, which)),
                    *self._group_numbers(),
                )
                rows_of_block = From(self._factor.moments, first * n)
                self._multiply(units, rows_of_block, along, 0, n, range(0), fresh=True)
                self._start(
                    "refit_scale",
                    self._rows,
                    128,
                    units,
                    along,
                    self._g,
                    self._scales,
                    moved,
                    *map(np.int32, (self._rows, n, first, width, self._owners, owner)),
                    *map(np.int32, (len(scales), which, scales[0].half)),
                )
                self._over(
                    "follow_scale",
                    self._rows * n,
                    self._g,
                    along,
                    moved,
                    np.int64(self._rows),
                    np.int32(n),
                )

    def _fetch(self, out: np.ndarray) -> None:
        type, tables = self.type, self._tables
        there = self._memory.array("rows", out.shape, np.uint8)
        self._over(
            "write_rows",
            out.size,
            there,
            self._heads,
            self._bodies,
            self._codes,
            self._choices,
            self._scales,
            self._given["fields"],
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, type.block_bytes, type.header_bytes, self._blocks)),
            *map(np.int32, (type.block_size, tables.groups)),
            *self._scale_numbers(),
        )
        made = out if out.flags.c_contiguous else np.empty_like(out)
        self._device.download(there, made, self._stream)
        self._device.wait(self._stream)
        if made is not out:
            out[...] = made


class _Named:
    """new(shape, dtype) for the arrays of an encoder, by their order."""

    def __init__(self, memory: Memory, name: str):
        self._memory, self._name, self._taken = memory, name, 0

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Any:
        self._taken += 1
        return self._memory.array(f"{self._name} {self._taken}", shape, dtype)
