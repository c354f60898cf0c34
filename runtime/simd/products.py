"""Products of encoded matrices with few rows, and decoding of rows: one loop for all types."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ...formats.codecs.codec import has_block_decoder
from ...formats.codecs.interleaved import unpack_rows
from ...formats.codecs.trellis import PRODUCT_FACTORS
from ...formats.kernel import inlined_function
from ...formats.types import GGMLType
from . import vectors as v
from .operations import operation, packed
from .units import UNITS
from .units.prepared import BUFFER, prepared

UNIT = 32  # elements
AHEAD = 2048  # bytes from a block to what is fetched meanwhile

# What `operation` binds.
unit: Any = None
prepare: Any = None  # these two: see `units.prepared`
unit_with_buffer: Any = None
N_UNITS, BLOCK_BYTES, HEADER_BYTES, FACTOR = 1, 1, 0, np.float32(1)

_scratch = v.scratch(BUFFER)


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


@inlined_function
def own_rows(arguments, thread, threads, product):
    """Return what a thread needs to know of a product, from the arguments of `multiply`: the first
    of its rows and the one after its last; address of the matrix, bytes from row to row; address of
    y; address of float32[rows] that is added, 0 for none; what multiplies before that. Threads
    share the rows of products with matrices that are not negative; others have none.
    """
    rows, n = v.integer_at(arguments + 16), v.integer_at(arguments + 88)
    chosen = v.integer_at(arguments + 72) + thread * v.integer_at(arguments + 80)
    before = after = 0  # products up to this one, and from it on
    for i in range(n):
        is_there = v.integer_at(chosen + 8 * i) >= 0
        before += is_there and i < product
        after += is_there and i >= product
    total = (before + after) * rows
    start, stop = total * thread // threads, total * (thread + 1) // threads
    low, high = max(start - before * rows, 0), min(stop - before * rows, rows)
    matrix, stride = v.integer_at(chosen + 8 * product), v.integer_at(arguments + 8)
    if matrix < 0:
        low, high, matrix = 0, 0, 0
    first_row = v.integer_at(arguments) + matrix * rows * stride
    y = v.integer_at(arguments + 56) + product * v.integer_at(arguments + 64)
    biases, scales = v.integer_at(arguments + 96), v.integer_at(arguments + 104)
    if biases:
        biases += 4 * matrix * rows
    scale = np.float32(1)
    if scales:
        scale = v.float_at(scales + 4 * matrix)
    return low, high, first_row, stride, y, biases, scale


@inlined_function
def vector_of(arguments, thread, product):
    """Return the address of x of a product."""
    first, step = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    return first + product * step + thread * v.integer_at(arguments + 48)


@inlined_function
def store_row(y, biases, row, value):
    """Store an element of a product, plus that of `biases` if there are any."""
    if biases:
        value += v.float_at(biases + 4 * row)
    v.store_float(y + 4 * row, value)


def multiply(arguments, thread, threads):
    """Products of one or more matrices with a vector each.

    Arguments: as for `decode_rows` up to the blocks, with the number of rows of one matrix; address
    of x float32[columns] of the first product, bytes to that of the next one, bytes to that of the
    next thread; address of y float32[rows], bytes to the next one; address of the numbers of the
    matrices int64[products], bytes to those of the next thread, number of products (where a number
    is negative, y stays as it is); addresses of
    float32[matrices, rows] that is added and of float32[matrices] that multiplies before, 0 for
    none.
    """
    blocks = v.integer_at(arguments + 24)
    buffer_1, buffer_2 = _scratch(), _scratch()
    for product in range(v.integer_at(arguments + 88)):
        low, high, first_row, stride, y, biases, scale = own_rows(
            arguments, thread, threads, product
        )
        x, factor = vector_of(arguments, thread, product), FACTOR * scale
        for r in range(low, high, 2):  # two rows at a time, as additions take their time
            second = min(r + 1, high - 1)
            row_1, row_2, at = first_row + r * stride, first_row + second * stride, x
            a = v.splat(np.float32(0))
            b, c, d = a, a, a
            for i in range(blocks):
                block_1 = row_1 + HEADER_BYTES + i * BLOCK_BYTES
                block_2 = row_2 + HEADER_BYTES + i * BLOCK_BYTES
                for line in range(AHEAD, AHEAD + BLOCK_BYTES, 64):
                    v.prefetch(block_1 + line)
                    v.prefetch(block_2 + line)
                prepare(row_1, block_1, buffer_1)
                prepare(row_2, block_2, buffer_2)
                for u in range(N_UNITS):
                    x_low, x_high = v.load_floats(at), v.load_floats(at + 64)
                    low_1, high_1 = unit_with_buffer(row_1, block_1, u, buffer_1)
                    a, b = v.fma(low_1, x_low, a), v.fma(high_1, x_high, b)
                    low_2, high_2 = unit_with_buffer(row_2, block_2, u, buffer_2)
                    c, d = v.fma(low_2, x_low, c), v.fma(high_2, x_high, d)
                    at += 128
            y_1, y_2 = v.total(v.add(a, b)) * factor, v.total(v.add(c, d)) * factor
            store_row(y, biases, r, y_1)
            store_row(y, biases, second, y_2)


@functools.cache
def names(type: GGMLType) -> dict[str, Any]:
    """What the templates need for a type."""
    unit = inlined_function(UNITS[type.name])
    before, with_buffer = prepared(type.name, unit)
    return {
        "unit": unit,
        "prepare": before,
        "unit_with_buffer": with_buffer,
        "N_UNITS": max(1, type.block_size // UNIT),
        "BLOCK_BYTES": type.block_bytes * max(1, UNIT // type.block_size),  # blocks of 1: floats
        "HEADER_BYTES": type.header_bytes,
        "FACTOR": np.float32(PRODUCT_FACTORS.get(type.name, 1)),
    }


def _bound(template: Any, type: GGMLType) -> int:
    return operation(template, f"{template.__name__}_{type.name.lower()}", **names(type))


def plain_type(type: GGMLType) -> GGMLType:
    """Return the type of the rows that `plain_rows` makes of rows of `type`."""
    return type if not type.is_interleaved or has_block_decoder(type) else type.plain


def plain_rows(type: GGMLType, data: np.ndarray, n_cols: int) -> np.ndarray:
    """Return rows of `type`, uint8[rows, row_bytes], one after the other if they were
    interleaved.
    """
    return unpack_rows(type, data, n_cols) if type.is_interleaved else data


_number = np.zeros(1, dtype=np.int64)
FIRST = _number.ctypes.data  # where the number of the first matrix is


class Vectors(NamedTuple):
    """Vectors in memory: the address of the first one, bytes from one to the next, and bytes to
    those of the next thread (0: all threads have the same).
    """

    address: int
    step: int = 0
    thread_step: int = 0


class Rows:
    """Encoded rows in memory, uint8[rows, row_bytes] of a type that is not interleaved.

    Products and decoding give the weights that matrix products use, `codec.decode` with
    `as_weights`, bit for bit but for the order in which products are added up.
    """

    def __init__(self, type: GGMLType, data: np.ndarray, n_cols: int):
        self.type, self.data, self.n_cols = type, data, n_cols
        self.blocks = n_cols // max(UNIT, type.block_size)

    def part(self, start: int, stop: int) -> Rows:
        """Return rows start..stop, which share the memory."""
        return Rows(self.type, self.data[start:stop], self.n_cols)

    def multiplication(self, x: int, y: int) -> tuple[int, np.ndarray]:
        """Return the operation that reads float32[n_cols] at the address x and writes
        float32[rows] at y.
        """
        return self.multiplications(len(self.data), Vectors(x), Vectors(y), Vectors(FIRST))

    def multiplications(
        self,
        n_rows: int,
        x: Vectors,
        y: Vectors,
        chosen: Vectors,
        n: int = 1,
        biases: int = 0,
        scales: int = 0,
    ) -> tuple[int, np.ndarray]:
        """Return the operation that multiplies `n` matrices of `n_rows` rows each, whose numbers
        int64[n] are at `chosen`, with a vector each; see `multiply`.
        """
        arguments = self.arguments(n_rows, x, y, chosen, n, biases, scales)
        return _bound(multiply, self.type), arguments

    def arguments(
        self,
        n_rows: int,
        x: Vectors,
        y: Vectors,
        chosen: Vectors,
        n: int = 1,
        biases: int = 0,
        scales: int = 0,
    ) -> np.ndarray:
        """Return the arguments of `multiply` for `multiplications`."""
        return packed(
            *(self.data.ctypes.data, self.data.strides[0], n_rows, self.blocks),
            *(x.address, x.step, x.thread_step, y.address, y.step),
            *(chosen.address, chosen.thread_step, n, biases, scales),
        )

    def decoding(self, out: int) -> tuple[int, np.ndarray]:
        """Return the operation that writes float32[rows, n_cols] at an address."""
        head = (self.data.ctypes.data, self.data.strides[0], len(self.data), self.blocks)
        return _bound(decode_rows, self.type), packed(*head, out)
