"""Round rows with second moments on a GPU, a block of columns at a time, with the bytes of the CPU:
what all types share. Rows of several matrices of one size are rounded together, each with its own
moments, as small matrices leave most of a GPU free.

The errors of a block go to all later columns in one product, whose sums are in index order as on
the CPU; so do steps of a refinement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from ....cuda_kernels.rounding import MOST_COLUMNS, WARPS, From
from ....errors import UnsupportedTypeError
from ....formats.types import GGMLType
from ...cuda.encoder import section
from ...encode import prepare_weights
from ..factor import inverses, metric_of_blocks
from .device_rows import DeviceRows
from .factor import DeviceFactor
from .memory import Memory

Tables = TypeVar("Tables")

MOST_ELEMENTS = 1 << 26  # of the rows that are worked on together


class BlockRounder(DeviceRows, ABC):
    """Round rows to a plain type; used by one thread at a time. n_scales: of a block, or of a row
    where the type has a header. A type whose scales do not come from its search does not search,
    and refits the scale of a row as soon as its codes are known.
    """

    searches = True
    _choices: Any  # uint16[rows, groups], made by `_begin`

    def __init__(
        self,
        type: GGMLType,
        n_cols: int,
        factor: DeviceFactor,
        passes: int,
        memory: Memory,
        stream: Any,
        n_scales: int,
    ):
        super().__init__(n_cols, len(factor.weights), memory, stream)
        self.type, self.passes, self._n_scales = type, passes, n_scales
        self._factor = factor
        self._blocks = n_cols // type.block_size
        self._owners = 1 if type.header_bytes else self._blocks
        self._owner_width = n_cols // self._owners
        self._weights = memory.filled("weights", factor.weights.astype(np.float32), stream)
        if not self.searches:
            return
        self._encoder = self._device.encoder(type, self._owner_width, True)
        searched = np.stack(
            [
                prepare_weights(weights[at : at + self._owner_width], self._owner_width)
                for weights in factor.weights
                for at in range(0, n_cols, self._owner_width)
            ]
        )
        there = memory.filled("search weights", searched, stream)
        self._search_weights = [there[number] for number in range(len(searched))]

    def _invert_blocks(self, size: int) -> None:
        """Set metrics and inverses for `size` columns that are chosen together, by the CPU's
        functions, so that the CPU's bytes are made.
        """
        factor, memory, stream = self._factor, self._memory, self._stream
        feedback = self._blocks_of_diagonal(factor.feedback, size)
        inverse, metric = metric_of_blocks(feedback, factor.weights)
        self._inverse = memory.filled("inverse of feedback", inverse, stream)
        self._metric = memory.filled("metric", metric, stream)
        self._inverse_moments: Any = None
        if self.passes:
            made = inverses(self._blocks_of_diagonal(factor.moments, size))
            self._inverse_moments = memory.filled("inverse of moments", made, stream)

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None:
        """Round rows of one matrix, x float32[rows, n_cols], to out uint8[rows, row_bytes]."""
        step = max(1, MOST_ELEMENTS // self.n_cols)
        for start in range(0, len(x), step):
            rows = slice(start, min(start + step, len(x)))
            for _ in self._steps([x[rows]]):
                pass
            self._fetch(out[rows])

    def together(self, x: Sequence[np.ndarray]) -> np.ndarray:
        """Return the bytes uint8[matrices * rows, row_bytes] of as many rows of every matrix."""
        for _ in self._steps(x):
            pass
        return self._fetched()

    def stages(self, x: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the bytes of as many rows of every matrix after error feedback, and after each
        refinement.
        """
        for _ in self._steps(x):
            yield self._fetched()

    def _fetched(self) -> np.ndarray:
        out = np.empty((self._rows, self.type.row_bytes(self.n_cols)), dtype=np.uint8)
        self._fetch(out)
        return out

    def _steps(self, x: Sequence[np.ndarray]) -> Iterator[None]:
        self._matrix_rows = len(x[0])
        self._rows = rows = len(x) * len(x[0])
        n, new = self.n_cols, self._memory.array
        self._searched = new("w", (rows, n), np.float32)
        for index, one in enumerate(x):
            start = index * self._matrix_rows
            part = self._searched
            if len(x) > 1:
                part = part[start : start + self._matrix_rows]
            self._device.upload(np.ascontiguousarray(one, dtype=np.float32), part, self._stream)
        self._w = self._ordered(self._searched)
        self._g = new("gradient", (rows, n), np.float32)
        self._scales = new("scales", (rows, self._owners, self._n_scales), np.float32)
        self._bodies = new("bodies", (rows, self._blocks, self.type.block_bytes), np.uint8)
        self._heads: Any = None
        self._begin(x)
        self._feed_back()
        if not self.searches:
            self._measure()
            self._refit()
        yield
        if not self.passes:
            return
        if self.searches:
            self._measure()
        for _ in range(self.passes):
            self._descend()
            if self._n_scales:
                self._refit()
                self._descend()
            yield

    def _ordered(self, x: Any) -> Any:
        """Return float32[rows, n] with the columns in the order in which they are rounded."""
        return x

    @abstractmethod
    def _begin(self, x: Sequence[np.ndarray]) -> None:
        """Make the arrays of a type for the rows x of every matrix."""

    @abstractmethod
    def _read_block(self, number: int, bytes_of_block: Any) -> None:
        """Read scales and choices of a block as the search left them."""

    @abstractmethod
    def _round_block(self, number: int, piece: Any, delta: Any) -> None:
        """Round the columns of a block, float32[rows, block_size], and set what is left of them."""

    @abstractmethod
    def _errors(self, out: Any) -> None:
        """Set out float32[rows, n] to what is left of the weights."""

    @abstractmethod
    def _units(self, out: Any, first: int, which: int) -> None:
        """Set out float32[rows, owner width] to what scale `which` is multiplied by."""

    @abstractmethod
    def _descend_chunk(self, steps: Any, first: int, width: int) -> None:
        """Move codes of some columns, and set by how much values fell."""

    @abstractmethod
    def _write(self, there: Any) -> None:
        """Write the bytes of rows."""

    def _read_scales(
        self, number: int, bytes_of_block: Any, choice_bits: np.ndarray, *scales: int | np.int32
    ) -> None:
        """Read scales, stored as the last arguments of `read_block` say, and the choices of groups
        from their bits.
        """
        type, (groups, width) = self.type, choice_bits.shape
        self._start(
            "read_block",
            self._rows,
            WARPS,
            bytes_of_block,
            self._heads,
            self._bodies,
            self._scales,
            self._choices,
            self._given["choice_bits"],
            *map(np.int32, (self._rows, type.block_bytes, type.header_bytes, self._blocks)),
            *map(np.int32, (number, groups, width, *scales)),
        )

    def _search(self, first: int, width: int) -> list[Any]:
        """Return the encoder's results for the columns from `first` of what is to be rounded."""
        arrays = self._encoder.arrays(self._rows, self._memory.numbered("search"))
        whole = width == self.n_cols and self._owners == 1
        self._copy(self._searched if whole else self._g, arrays[0], first, width)
        for index in range(self._matrices):
            weights = self._search_weights[index * self._owners + first // width]
            own = section(arrays, index, self._matrices)
            self._encoder.launch(own, stream=self._stream, weights=weights)
        return arrays

    def _feed_back(self) -> None:
        n, size, has_head = self.n_cols, self.type.block_size, self.type.header_bytes > 0
        self._copy(self._w, self._g, 0, n)
        piece = self._memory.array("piece", (self._rows, size), np.float32)
        bytes_of_block: Any = None
        if has_head and self.searches:
            _, self._heads, self._bodies, *_ = self._search(0, n)
        delta = self._memory.array("delta", (self._rows, size), np.float32)
        for number, first in enumerate(range(0, n, size)):
            if has_head:
                self._copy(self._g, piece, first, size)
            else:
                piece, bytes_of_block, *_ = self._search(first, size)
            self._read_block(number, bytes_of_block)
            self._round_block(number, piece, delta)
            rows_of_block = From(self._factor.feedback, first * n)
            self._multiply(delta, rows_of_block, self._g, first + size, n, range(0))

    def _measure(self) -> None:
        """Set the gradient to (weights - values) H."""
        rest = self._memory.array("along", (self._rows, self.n_cols), np.float32)
        self._errors(rest)
        moments = From(self._factor.moments, 0)
        self._multiply(rest, moments, self._g, 0, self.n_cols, range(0), fresh=True)

    def _descend(self) -> None:
        n = self.n_cols
        for first in range(0, n, MOST_COLUMNS):
            width = min(MOST_COLUMNS, n - first)
            steps = self._memory.array("delta", (self._rows, width), np.float32)
            self._descend_chunk(steps, first, width)
            along = From(self._factor.moments, first * n)
            self._multiply(steps, along, self._g, 0, n, range(first, first + width))

    def _refit(self) -> None:
        n, width, half = self.n_cols, self._owner_width, self._scale_is_half
        units = self._memory.array("units", (self._rows, width), np.float32)
        along = self._memory.array("along", (self._rows, n), np.float32)
        moved = self._memory.array("moved", (self._rows,), np.float32)
        for owner, first in enumerate(range(0, n, width)):
            for which in range(self._n_scales):
                self._units(units, first, which)
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
                    *map(np.int32, (self._n_scales, which, half)),
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

    @property
    @abstractmethod
    def _scale_is_half(self) -> bool:
        """Return whether scales are halves, else float32."""

    def _fetch(self, out: np.ndarray) -> None:
        there = self._memory.array("rows", out.shape, np.uint8)
        self._write(there)
        made = out if out.flags.c_contiguous else np.empty_like(out)
        self._device.download(there, made, self._stream)
        self._device.wait(self._stream)
        if made is not out:
            out[...] = made


def required(tables: Tables | None, type: GGMLType) -> Tables:
    """Return the tables of a type, or raise an error where it has none."""
    if tables is None:
        raise UnsupportedTypeError(f"{type.name} cannot be rounded on a GPU")
    return tables
