"""Products of encoded matrices with several vectors each.

They are those that `products` and `dots` give for one vector, bit for bit, but what is stored of a
matrix is decoded once for all of its vectors.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils

from ...formats.types import GGMLType
from . import dots, products
from . import vectors as v
from .codes.build import CHUNK, Build
from .dots import CHUNK_BYTES
from .operations import operation, packed
from .products import AHEAD, Rows, Vectors
from .units.prepared import BUFFER
from .vectors.core import INT64, NONE, called, function, loaded, pointer, vector_of

MOST = 16  # vectors of a matrix that are multiplied together in 8 bits
FLOATS = 4  # and in float32
# Parts of vectors are multiplied with so many rows while they are in the nearest cache.
TALL = 8
CHUNKS_NEAR, UNITS_NEAR = 64, 32  # of all vectors, and of each of `FLOATS`

# What `operation` binds.
unit: Any = None
prepare: Any = None  # these two: see `units.prepared`
unit_with_buffer: Any = None
add_chunk_to_each: Any = None
CHUNK_STEP, BLOCK_BYTES, HEADER_BYTES, N_UNITS, FACTOR = 1, 1, 0, 1, np.float32(1)
RESTS = 1  # 1 if rows may have blocks after the last chunk

_buffer, _decoded = v.scratch(BUFFER), v.scratch(128 * UNITS_NEAR)
_sums = v.scratch(64 * TALL * max(MOST, 2 * FLOATS))


def _adding_products(n: int) -> Any:
    """Return the function (decoded units, number of units, address of the first vector, bytes from
    there to the second, third and fourth, address of sums) that adds products with n vectors to two
    sums of each.
    """

    @function(types.none, *[types.int64] * 7)
    def add_products(builder, weights, units, x, second, third, fourth, sums):
        type = vector_of("f32")
        starts = [x, *(builder.add(x, other) for other in (second, third, fourth))][:n]
        places = [builder.add(sums, INT64(64 * i)) for i in range(2 * n)]
        places = [pointer(builder, place, type) for place in places]
        totals = [cgutils.alloca_once(builder, type) for _ in places]
        for total, place in zip(totals, places, strict=True):
            builder.store(builder.load(place, align=64), total)
        with cgutils.for_range(builder, units) as loop:
            low = builder.mul(loop.index, INT64(128))
            for i, here in enumerate((low, builder.add(low, INT64(64)))):
                factor = loaded(builder, builder.add(weights, here), type)
                for start, total in zip(starts, totals[i::2], strict=True):
                    values = loaded(builder, builder.add(start, here), type)
                    more = (factor, values, builder.load(total))
                    found = called(builder, "llvm.fmuladd.v16f32", type, *more)
                    builder.store(found, total)
        for total, place in zip(totals, places, strict=True):
            builder.store(builder.load(total), place, align=64)
        return NONE

    return add_products


_add_two_products, _add_products = _adding_products(2), _adding_products(FLOATS)


def multiply_together(arguments, thread, threads):
    """Arguments: address of a table int64[groups, 3] of a matrix, its first vector and the number
    of its vectors; groups; address of the encoded rows, bytes from row to row, number of rows of a
    matrix, blocks of a row; address of x float32[columns] of the first vector, bytes to the next
    one; address of y float32[rows], bytes to the next one.
    """
    table, stride = v.integer_at(arguments), v.integer_at(arguments + 24)
    rows, blocks = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    x_step, y_step = v.integer_at(arguments + 56), v.integer_at(arguments + 72)
    low, high = rows * thread // threads, rows * (thread + 1) // threads
    sums, buffer, decoded, near = _sums(), _buffer(), _decoded(), UNITS_NEAR // N_UNITS
    for group in range(v.integer_at(arguments + 8)):
        entry = table + 24 * group
        first_row = v.integer_at(arguments + 16) + v.integer_at(entry) * rows * stride
        first, n = v.integer_at(entry + 8), v.integer_at(entry + 16)
        x = v.integer_at(arguments + 48) + first * x_step
        # The last one again where there are fewer.
        second, third = min(1, n - 1) * x_step, min(2, n - 1) * x_step
        fourth = min(3, n - 1) * x_step
        for top in range(low, high, TALL):
            tall = min(TALL, high - top)
            for place in range(sums, sums + 128 * FLOATS * tall, 64):
                v.store_floats(place, v.splat(np.float32(0)))
            for left in range(0, blocks, near):
                for r in range(tall):
                    row, to = first_row + (top + r) * stride, decoded
                    for b in range(left, min(left + near, blocks)):
                        block = row + HEADER_BYTES + b * BLOCK_BYTES
                        for line in range(block + AHEAD, block + AHEAD + BLOCK_BYTES, 64):
                            v.prefetch(line)
                        prepare(row, block, buffer)
                        for u in range(N_UNITS):
                            low_u, high_u = unit_with_buffer(row, block, u, buffer)
                            v.store_floats(to, low_u)
                            v.store_floats(to + 64, high_u)
                            to += 128
                    here, of_row = x + 128 * N_UNITS * left, sums + 128 * FLOATS * r
                    units = (to - decoded) // 128
                    if n > 2:
                        _add_products(decoded, units, here, second, third, fourth, of_row)
                    else:
                        _add_two_products(decoded, units, here, second, third, fourth, of_row)
            for r in range(tall):
                for i in range(n):
                    place = sums + 128 * (FLOATS * r + i)
                    total = v.total(v.add(v.load_floats(place), v.load_floats(place + 64)))
                    to = v.integer_at(arguments + 64) + (first + i) * y_step
                    v.store_float(to + 4 * (top + r), total * FACTOR)


def multiply_rounded_together(arguments, thread, threads):
    """Arguments: those of `multiply_together`, with the number of blocks after the last chunk, for
    which x is read; number of chunks of a row, address of the first rounded vector, bytes to the
    next one, bytes to that of the next thread. Groups have at most `MOST` vectors.
    """
    table, stride = v.integer_at(arguments), v.integer_at(arguments + 24)
    rows, rest = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    x, x_step = v.integer_at(arguments + 48), v.integer_at(arguments + 56)
    y, y_step = v.integer_at(arguments + 64), v.integer_at(arguments + 72)
    chunks, rounded_step = v.integer_at(arguments + 80), v.integer_at(arguments + 96)
    rounded = v.integer_at(arguments + 88) + thread * v.integer_at(arguments + 104)
    low, high = rows * thread // threads, rows * (thread + 1) // threads
    x += 4 * CHUNK * chunks
    sums = _sums()
    for group in range(v.integer_at(arguments + 8)):
        entry = table + 24 * group
        first_row = v.integer_at(arguments + 16) + v.integer_at(entry) * rows * stride
        first, n = v.integer_at(entry + 8), v.integer_at(entry + 16)
        near = CHUNKS_NEAR // n
        for top in range(low, high, TALL):
            tall = min(TALL, high - top)
            for place in range(sums, sums + 64 * n * tall, 64):
                v.store_floats(place, v.splat(np.float32(0)))
            for left in range(0, chunks, near):
                here = min(near, chunks - left)
                for r in range(tall):
                    row = first_row + (top + r) * stride
                    at = row + HEADER_BYTES + left * CHUNK_STEP
                    chunk = rounded + first * rounded_step + left * CHUNK_BYTES
                    for _ in range(here):
                        for line in range(at + AHEAD, at + AHEAD + CHUNK_STEP, 64):
                            v.prefetch(line)
                        add_chunk_to_each(row, at, chunk, rounded_step, n, sums + 64 * n * r)
                        at += CHUNK_STEP
                        chunk += CHUNK_BYTES
            for r in range(tall):
                row = first_row + (top + r) * stride
                for i in range(n):
                    a = v.load_floats(sums + 64 * (n * r + i))
                    block = row + HEADER_BYTES + chunks * CHUNK_STEP
                    here = x + (first + i) * x_step
                    if RESTS == 1:
                        for _ in range(rest):
                            for u in range(N_UNITS):
                                low_u, high_u = unit(row, block, u)
                                a = v.fma(low_u, v.load_floats(here), a)
                                a = v.fma(high_u, v.load_floats(here + 64), a)
                                here += 128
                            block += BLOCK_BYTES
                    v.store_float(y + (first + i) * y_step + 4 * (top + r), v.total(a) * FACTOR)


def _adding_chunk_to_each(type: GGMLType) -> Any:
    """Return the function (row, block, first rounded chunk, bytes to the next, number of chunks,
    address of their sums) that adds products of a chunk.
    """

    @function(types.none, *[types.int64] * 6)
    def chunk_added_to_each(builder, row, at, chunk, step, n, sums):
        w = Build(builder, type.block_bytes)
        known = dots.chunk_of(w, type, row, at)
        known = known._replace(codes=[*known.codes])
        with cgutils.for_range(builder, n) as loop:
            here = builder.add(chunk, builder.mul(loop.index, step))
            place = pointer(
                builder, builder.add(sums, builder.mul(loop.index, INT64(64))), vector_of("f32")
            )
            total = builder.load(place, align=64)
            builder.store(dots.with_products(w, known, here, total), place, align=64)
        return NONE

    return chunk_added_to_each


@functools.cache
def _names(type: GGMLType, rounds: bool) -> dict[str, Any]:
    """What the templates need for a type."""
    if not rounds:
        return products.names(type)
    return dots.names(type) | {"add_chunk_to_each": _adding_chunk_to_each(type)}


def operation_of(type: GGMLType, *, rounds: bool) -> int:
    """Return the operation for matrices of a type. rounds: for products in 8 bits."""
    template = multiply_rounded_together if rounds else multiply_together
    return operation(template, f"{template.__name__}_{type.name.lower()}", **_names(type, rounds))


def multiplications(
    rows: Rows, n_rows: int, x: Vectors, rounded: Vectors | None, y: Vectors, table: np.ndarray
) -> tuple[int, np.ndarray]:
    """Return the operation that multiplies matrices of `n_rows` of the rows each with several
    vectors. table: int64[groups, 3], which has to stay, see `multiply_together`; rounded: the
    vectors that `dots.rounding` has rounded, None for products in float32.
    """
    blocks, more = rows.blocks, ()
    if rounded is not None:
        blocks = rows.n_cols % CHUNK // rows.type.block_size
        more = (rows.n_cols // CHUNK, *rounded)
    head = (table.ctypes.data, len(table), rows.data.ctypes.data, rows.data.strides[0])
    arguments = packed(*head, n_rows, blocks, x.address, x.step, y.address, y.step, *more)
    return operation_of(rows.type, rounds=rounded is not None), arguments
