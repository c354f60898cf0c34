"""Products of encoded matrices with few vectors that are rounded to 8 bits.

A vector gets a scale for every 16 elements, of which the largest magnitude becomes 127. The codes
of a matrix are read as bytes without a sign, see `codes`, so that the processor's dot products of
bytes apply. Sums of 4 products are exact; they are added up in float32. Elements after the last
256 of a row are multiplied in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from ...formats.codecs.trellis import PRODUCT_FACTORS
from ...formats.kernel import inlined_function
from ...formats.types import GGMLType
from . import vectors as v
from .codes import CODES
from .codes.build import CHUNK, GROUP, GROUPS, STEP, Build, Scales
from .operations import operation, packed
from .products import AHEAD, UNIT, Rows, Vectors, own_rows, store_row, vector_of
from .rounding import largest_magnitude, store_codes
from .units import UNITS
from .vectors.core import FLOAT, function, has_feature

# A rounded chunk of a vector: codes, then scales, then what shifts are multiplied by.
SCALES_AT, OFFSETS_AT, CHUNK_BYTES = CHUNK, CHUNK + 4 * GROUPS, CHUNK + 8 * GROUPS

_FLOATS = ir.VectorType(FLOAT, GROUP)

ROUNDED_PLACE, OUT_PLACE = 15, 5  # of rounded vectors among arguments of products and of rounding

# What `operation` binds.
unit: Any = None
add_chunk: Any = None
CHUNK_STEP, BLOCK_BYTES, HEADER_BYTES, N_UNITS, FACTOR = 1, 1, 0, 1, np.float32(1)
RESTS = 1  # 1 if rows may have blocks after the last chunk


@functools.cache
def available() -> bool:
    """Return whether this processor has the instructions."""
    return all(map(has_feature, ("avx2", "fma", "f16c")))


def can_be_rounded(type: GGMLType, n_cols: int) -> bool:
    """Return whether rows of this type can be multiplied in 8 bits."""
    return type.name in CODES and n_cols >= CHUNK and available()


def rounded_bytes(n_cols: int) -> int:
    """Return the bytes of a rounded vector."""
    return n_cols // CHUNK * CHUNK_BYTES


_largest_magnitude = function(types.float32, v.F32)(largest_magnitude)
_store_codes = function(types.int64, types.int64, v.F32)(store_codes)


def round_vectors(arguments, thread, threads):
    """Every thread: round vectors to 8 bits. Arguments: address of x float32, bytes to the next
    vector, bytes to those of the next thread; number of vectors, chunks of each; address of rounded
    chunks, bytes to those of the next vector, bytes to those of the next thread.
    """
    x_first, x_step = v.integer_at(arguments), v.integer_at(arguments + 8)
    x_first += thread * v.integer_at(arguments + 16)
    n, chunks = v.integer_at(arguments + 24), v.integer_at(arguments + 32)
    out, out_step = v.integer_at(arguments + 40), v.integer_at(arguments + 48)
    out += thread * v.integer_at(arguments + 56)
    for i in range(n):
        x, to = x_first + i * x_step, out + i * out_step
        for _ in range(chunks):
            for group in range(GROUPS):
                values = v.load_floats(x + 4 * GROUP * group)
                largest = _largest_magnitude(values)
                inverse = np.float32(0)
                if largest > np.float32(0):
                    inverse = np.float32(127) / largest
                scale = largest / np.float32(127)
                total = _store_codes(to + GROUP * group, v.mul(values, v.splat(inverse)))
                v.store_float(to + SCALES_AT + 4 * group, scale)
                v.store_float(to + OFFSETS_AT + 4 * group, scale * np.float32(total))
            x += 4 * CHUNK
            to += CHUNK_BYTES


def multiply_rounded(arguments, thread, threads):
    """Products of one or more matrices with a rounded vector each.

    Arguments: those of `products.multiply`, of which the number of blocks is not used; number of
    chunks of a row, address of the first rounded vector, bytes to the next one, bytes to that of
    the next thread; number of blocks after the last chunk, for which x is read.
    """
    chunks, rest = v.integer_at(arguments + 112), v.integer_at(arguments + 144)
    rounded_first, rounded_step = v.integer_at(arguments + 120), v.integer_at(arguments + 128)
    rounded_first += thread * v.integer_at(arguments + 136)
    for product in range(v.integer_at(arguments + 88)):
        low, high, first_row, stride, y, biases, scale = own_rows(
            arguments, thread, threads, product
        )
        x, factor = vector_of(arguments, thread, product) + 4 * CHUNK * chunks, FACTOR * scale
        rounded = rounded_first + product * rounded_step
        for r in range(low, high, 2):  # two rows at a time, as additions take their time
            second = min(r + 1, high - 1)
            row_1, row_2 = first_row + r * stride, first_row + second * stride
            at_1, at_2, chunk = row_1 + HEADER_BYTES, row_2 + HEADER_BYTES, rounded
            a = v.splat(np.float32(0))
            b = a
            for _ in range(chunks):
                for line in range(AHEAD, AHEAD + CHUNK_STEP, 64):
                    v.prefetch(at_1 + line)
                    v.prefetch(at_2 + line)
                a, b = add_chunk(row_1, at_1, chunk, a), add_chunk(row_2, at_2, chunk, b)
                at_1 += CHUNK_STEP
                at_2 += CHUNK_STEP
                chunk += CHUNK_BYTES
            if RESTS == 1:
                at = x
                for _ in range(rest):
                    for u in range(N_UNITS):
                        x_low, x_high = v.load_floats(at), v.load_floats(at + 64)
                        low_1, high_1 = unit(row_1, at_1, u)
                        a = v.fma(high_1, x_high, v.fma(low_1, x_low, a))
                        low_2, high_2 = unit(row_2, at_2, u)
                        b = v.fma(high_2, x_high, v.fma(low_2, x_low, b))
                        at += 128
                    at_1 += BLOCK_BYTES
                    at_2 += BLOCK_BYTES
            y_1, y_2 = v.total(a) * factor, v.total(b) * factor
            store_row(y, biases, r, y_1)
            store_row(y, biases, second, y_2)


class Chunk(NamedTuple):
    """Scales and codes of 256 elements of a row."""

    scales: Scales
    codes: Iterable[Any]  # of each step


def chunk_of(w: Build, type: GGMLType, row: Any, at: Any) -> Chunk:
    """Read what products with a chunk need. Codes are read as they are iterated over."""
    scales_of, codes_of = CODES[type.name]
    steps = range(CHUNK // STEP)
    return Chunk(scales_of(w, row, at), (codes_of(w, row, at, step) for step in steps))


def with_products(w: Build, known: Chunk, chunk: Any, total: Any) -> Any:
    """Return the sums plus products with the rounded chunk at an address."""
    factors = w.ir.fmul(known.scales.factors, w.load(chunk, SCALES_AT, _FLOATS))
    total = w.fma(known.scales.shifts, w.load(chunk, OFFSETS_AT, _FLOATS), total)
    lanes = GROUP // (STEP // GROUP)  # of a sum of products, for each group
    for step, codes in enumerate(known.codes):
        found = w.ir.sitofp(w.dots(codes, w.bytes(chunk, STEP * step, STEP)), _FLOATS)
        groups = [STEP // GROUP * step + i // lanes for i in range(GROUP)]
        total = w.fma(found, w.shuffled(factors, factors, groups), total)
    return total


def _adding_chunk(type: GGMLType) -> Any:
    """Return the function (row, block, rounded chunk, sums) that adds products of a chunk."""

    @function(v.F32, types.int64, types.int64, types.int64, v.F32)
    def chunk_added(builder, row, at, chunk, total):
        w = Build(builder, type.block_bytes)
        return with_products(w, chunk_of(w, type, row, at), chunk, total)

    return chunk_added


@functools.cache
def names(type: GGMLType) -> dict[str, Any]:
    """What products in 8 bits need for a type."""
    return {
        "unit": inlined_function(UNITS[type.name]),
        "add_chunk": _adding_chunk(type),
        "CHUNK_STEP": CHUNK // type.block_size * type.block_bytes,
        "BLOCK_BYTES": type.block_bytes,
        "HEADER_BYTES": type.header_bytes,
        "N_UNITS": max(1, type.block_size // UNIT),
        "RESTS": int(type.block_size < CHUNK),
        "FACTOR": np.float32(PRODUCT_FACTORS.get(type.name, 1)),
    }


def rounding(x: Vectors, n: int, n_cols: int, out: Vectors) -> tuple[int, np.ndarray]:
    """Return the operation that rounds n vectors float32[n_cols]."""
    return operation(round_vectors), packed(*x, n, n_cols // CHUNK, *out)


def multiplications(
    rows: Rows,
    n_rows: int,
    x: Vectors,
    rounded: Vectors,
    y: Vectors,
    chosen: Vectors,
    n: int = 1,
    biases: int = 0,
    scales: int = 0,
) -> tuple[int, np.ndarray]:
    """Return the operation that computes what `Rows.multiplications` does, with vectors that
    `rounding` has rounded.
    """
    arguments = rows.arguments(n_rows, x, y, chosen, n, biases, scales)
    rest = rows.n_cols % CHUNK // rows.type.block_size
    name = f"multiply_rounded_{rows.type.name.lower()}"
    return operation(multiply_rounded, name, **names(rows.type)), np.concatenate(
        [arguments, packed(rows.n_cols // CHUNK, *rounded, rest)]
    )
