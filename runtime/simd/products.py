"""Products of encoded matrices with few rows, and decoding of rows: one loop for all types."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...formats.codecs.codec import has_block_decoder
from ...formats.codecs.interleaved import unpack_rows
from ...formats.codecs.trellis import PRODUCT_FACTORS
from ...formats.kernel import inlined_function
from ...formats.types import GGMLType
from . import vectors as v
from .operations import operation
from .units import UNITS

UNIT = 32  # elements

# What `operation` binds.
unit: Any = None
N_UNITS, BLOCK_BYTES, HEADER_BYTES, FACTOR = 1, 1, 0, np.float32(1)


def decode_rows(arguments, thread, threads):
    """Arguments: address of the encoded rows, bytes from row to row, number of rows, blocks of a
    row, address of float32[rows, blocks of N_UNITS * 32].
    """
    first_row, stride, rows = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    blocks, out = v.integer_at(arguments + 24), v.integer_at(arguments + 32)
    factor = v.splat(FACTOR)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        row, to = first_row + r * stride, out + 128 * N_UNITS * blocks * r
        for b in range(blocks):
            block = row + HEADER_BYTES + b * BLOCK_BYTES
            for u in range(N_UNITS):
                low, high = unit(row, block, u)
                v.store_floats(to, v.mul(low, factor))
                v.store_floats(to + 64, v.mul(high, factor))
                to += 128


def multiply(arguments, thread, threads):
    """Arguments: as for `decode_rows` up to the blocks, address of x float32[columns], address of
    y float32[rows].
    """
    first_row, stride, rows = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    blocks = v.integer_at(arguments + 24)
    x, y = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        row, at = first_row + r * stride, x
        a = v.splat(np.float32(0))
        b = v.splat(np.float32(0))
        for i in range(blocks):
            block = row + HEADER_BYTES + i * BLOCK_BYTES
            for u in range(N_UNITS):
                low, high = unit(row, block, u)
                a = v.fma(low, v.load_floats(at), a)
                b = v.fma(high, v.load_floats(at + 64), b)
                at += 128
        v.store_float(y + 4 * r, v.total(v.add(a, b)) * FACTOR)


@functools.cache
def _bound(template: Any, type: GGMLType) -> int:
    n_units = max(1, type.block_size // UNIT)
    return operation(
        template,
        f"{template.__name__}_{type.name.lower()}",
        unit=inlined_function(UNITS[type.name]),
        N_UNITS=n_units,
        BLOCK_BYTES=type.block_bytes * max(1, UNIT // type.block_size),  # floats have blocks of 1
        HEADER_BYTES=type.header_bytes,
        FACTOR=np.float32(PRODUCT_FACTORS.get(type.name, 1)),
    )


def plain_type(type: GGMLType) -> GGMLType:
    """Return the type of the rows that `plain_rows` makes of rows of `type`."""
    return type if not type.is_interleaved or has_block_decoder(type) else type.plain


def plain_rows(type: GGMLType, data: np.ndarray, n_cols: int) -> np.ndarray:
    """Return rows of `type`, uint8[rows, row_bytes], one after the other if they were
    interleaved.
    """
    return unpack_rows(type, data, n_cols) if type.is_interleaved else data


class Rows:
    """Encoded rows in memory, uint8[rows, row_bytes] of a type that is not interleaved.

    Products and decoding give the weights that matrix products use, `codec.decode` with
    `as_weights`, bit for bit but for the order in which products are added up.
    """

    def __init__(self, type: GGMLType, data: np.ndarray, n_cols: int):
        self.type, self.data, self.n_cols = type, data, n_cols
        blocks = n_cols // max(UNIT, type.block_size)
        self._head = [data.ctypes.data, data.strides[0], len(data), blocks]

    def part(self, start: int, stop: int) -> Rows:
        """Return rows start..stop, which share the memory."""
        return Rows(self.type, self.data[start:stop], self.n_cols)

    def multiplication(self, x: int, y: int) -> tuple[int, np.ndarray]:
        """Return the operation that reads float32[n_cols] at the address x and writes
        float32[rows] at y.
        """
        return _bound(multiply, self.type), np.array([*self._head, x, y], dtype=np.int64)

    def decoding(self, out: int) -> tuple[int, np.ndarray]:
        """Return the operation that writes float32[rows, n_cols] at an address."""
        return _bound(decode_rows, self.type), np.array([*self._head, out], dtype=np.int64)
