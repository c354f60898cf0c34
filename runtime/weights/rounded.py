"""Products of many rows in 8-bit integers, on the CPU: see `simd.tiles`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...formats.types import GGMLType

if TYPE_CHECKING:
    from ..simd.products import Rows


@functools.cache
def _compiled():
    from ..simd import threads, tiles

    return tiles, threads


@functools.cache
def _prompt():
    from ..simd.prompt import rounded

    return rounded


def can_be_rounded(type: GGMLType, rows: int, cols: int) -> bool:
    """Return whether this processor multiplies matrices of this type and size in 8 bits. Those of
    float types would lose more than they do by being quantized.
    """
    if not type.is_quantized or cols % 32 or rows % 32:
        return False
    tiles, _ = _compiled()
    return tiles.available()


def packed_bytes(rows: int, cols: int) -> int:
    """Return the bytes of the packed matrix."""
    return rows * cols // 32 * 36


def packed(rows: Rows) -> torch.Tensor:
    """Return uint8[packed_bytes]: the rows in 8 bits, for `RoundedRows.products`."""
    tiles, _ = _compiled()
    out = torch.empty(packed_bytes(len(rows.data), rows.n_cols), dtype=torch.uint8)
    _run(tiles.packing(rows, out.data_ptr()))
    return out


class Rounded:
    """n rows of columns in 8 bits, in memory that is filled after it was taken."""

    def __init__(self, n: int, columns: int):
        tiles, _ = _compiled()
        self.n, self.groups = n, columns // 32
        n = self.n + tiles.TILE  # that many are read
        self._codes = torch.empty(n, columns, dtype=torch.int8)
        self._scales = torch.empty(n, self.groups)
        self._starts = torch.empty(n, self.groups, dtype=torch.int32)
        # Products of what memory had before take several times as long if they are subnormal.
        self._scales[self.n :] = 0
        self._starts[self.n :] = 0
        self._at = [t.data_ptr() for t in (self._codes, self._scales, self._starts)]

    @classmethod
    def gated(cls, gate: torch.Tensor, up: torch.Tensor) -> Rounded:
        """Return silu(gate) * up in 8 bits: float32[n, columns], or both halves of one tensor."""
        if gate.stride() != up.stride() or gate.stride(1) != 1:
            gate, up = gate.contiguous(), up.contiguous()
        found = cls(*gate.shape)
        addresses = gate.data_ptr(), up.data_ptr(), gate.stride(0)
        _run(_prompt().gated_rounding(*addresses, found.n, found.groups, *found._at))
        return found

    def gathered(self, numbers: torch.Tensor) -> Rounded:
        """Return the rows with these numbers, int64[n]."""
        found = Rounded(len(numbers), 32 * self.groups)
        rows = numbers.data_ptr(), found.n, found.groups
        _run(_prompt().gathering(*self._at, *rows, *found._at))
        return found

    def products(
        self, matrices: Sequence[tuple[torch.Tensor, int, int]], n_out: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y float32[n, n_out] and a proof, zeros if all of y is finite. matrices: packed
        ones of `n_out` rows with the first row of x and the number of rows that each is multiplied
        with. They cover x.
        """
        tiles, _ = _compiled()
        y, proof = torch.empty(self.n, n_out), torch.zeros(torch.get_num_threads(), 16)
        table = np.array(
            [(memory.data_ptr(), first, n) for memory, first, n in matrices], dtype=np.int64
        )
        operation = tiles.multiplication(
            table.ctypes.data,
            len(table),
            n_out // tiles.COLUMNS,
            self.groups,
            *self._at,
            y.data_ptr(),
            proof.data_ptr(),
        )
        _run(operation)
        return y, proof


class RoundedRows(Rounded):
    """Rows x float32[n, columns] in 8 bits."""

    def __init__(self, x: torch.Tensor):
        super().__init__(*x.shape)
        tiles, _ = _compiled()
        self.x, self._version = x, x._version
        x = x.contiguous()
        _run(tiles.rounding(x.data_ptr(), self.n, self.groups, *self._at))

    def are_of(self, x: torch.Tensor) -> bool:
        """Return whether these are the rows of x as it is now."""
        return x is self.x and x._version == self._version


def _run(operation: tuple[int, np.ndarray]) -> None:
    _, threads = _compiled()
    threads.run(threads.Program([operation]), torch.get_num_threads())
