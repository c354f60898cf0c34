"""Products of matrices with many rows in 8-bit integers.

Weights and activations (`rounded_rows`) are rounded to 8 bits with a scale for every 32 of a row,
as Q8_0 has them: code = round(value * 127 / largest magnitude). Sums of 32 products are exact in
int32, and are added up in float32 in order of the columns, whatever the number of threads.

Weights are packed for VNNI: panels of `COLUMNS` rows of the matrix, in which every four weights of
a row lie together. Their codes are stored plus 128, without a sign, as the processor's instruction
wants one factor without a sign: what that adds is taken off by where sums begin.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from ...formats.kernel import inlined_function
from ...formats.types import GGMLType
from . import vectors as v
from .operations import operation
from .products import UNIT, Rows
from .rounded_rows import round_rows, scale_of
from .rounding import rounded
from .units import UNITS
from .vectors.core import FLOAT, INT8, INT32, INT64, NONE, called, function, has_feature, pointer

COLUMNS = 32  # rows of the matrix in a panel
TILE = 6  # rows of activations that are multiplied at a time
GROUP_BYTES = COLUMNS * (UNIT + 4)  # of a panel: codes and scales for 32 columns of the matrix

_FLOATS, _INTEGERS = (ir.VectorType(type, 16) for type in (FLOAT, INT32))
_BYTES = ir.VectorType(INT8, 64)

# What `operation` binds.
unit: Any = None
N_UNITS, BLOCK_BYTES, HEADER_BYTES = 1, 1, 0


@functools.cache
def available() -> bool:
    """Return whether the processor has 8-bit dot products of this size."""
    return all(map(has_feature, ("avx512vnni", "avx512bw", "avx512vl")))


def _dots(builder: ir.IRBuilder, sums: Any, unsigned: Any, signed: Any) -> Any:
    """Add four products of bytes to each of 16 sums. LLVM 22 names the operands' type bytes."""
    name = "llvm.x86.avx512.vpdpbusd.512"
    if binding.llvm_version_info[0] < 22:
        return called(builder, name, _INTEGERS, sums, unsigned, signed)
    a, b = (builder.bitcast(x, _BYTES) for x in (unsigned, signed))
    return called(builder, name, _INTEGERS, sums, a, b)


def _everywhere(builder: ir.IRBuilder, value: Any, type: ir.VectorType) -> Any:
    nothing = ir.Constant(type, ir.Undefined)
    one = builder.insert_element(nothing, value, INT32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(_INTEGERS, None))


@function(types.none, *[types.int64] * 9)
def _multiply_tile(builder, weights, groups, codes, scales, starts, out, stride, rows, proof):
    """Multiply `TILE` rows of activations with a panel, and store the first `rows` of them. codes:
    of the first row, scales and starts: those of its groups; out: float32 of the first row at the
    panel's first column, with rows every `stride` bytes. Products times 0 are added to 16 floats at
    `proof`, which stay 0 if all are finite.
    """
    halves = (0, 1)
    places = [(m, h) for m in range(TILE) for h in halves]
    totals = {place: cgutils.alloca_once(builder, _FLOATS) for place in places}
    for total in totals.values():
        builder.store(ir.Constant(_FLOATS, None), total)

    def at(address: Any, offset: Any, type: ir.Type) -> Any:
        return builder.load(pointer(builder, builder.add(address, offset), type), align=1)

    row_codes = builder.mul(groups, INT64(UNIT))
    row_scales = builder.mul(groups, INT64(4))
    first_code = [builder.add(codes, builder.mul(row_codes, INT64(m))) for m in range(TILE)]
    offset_of_row = [builder.mul(row_scales, INT64(m)) for m in range(TILE)]
    with cgutils.for_range(builder, groups) as loop:
        group = loop.index
        panel = builder.add(weights, builder.mul(group, INT64(GROUP_BYTES)))
        word = builder.mul(group, INT64(4))
        here = builder.mul(group, INT64(UNIT))
        sums = {}
        for m in range(TILE):
            start = at(starts, builder.add(offset_of_row[m], word), INT32)
            for h in halves:
                sums[m, h] = _everywhere(builder, start, _INTEGERS)
        for step in range(UNIT // 4):
            columns = [at(panel, INT64(4 * COLUMNS * step + 64 * h), _INTEGERS) for h in halves]
            for m in range(TILE):
                four = at(first_code[m], builder.add(here, INT64(4 * step)), INT32)
                four = _everywhere(builder, four, _INTEGERS)
                for h in halves:
                    sums[m, h] = _dots(builder, sums[m, h], columns[h], four)
        of_weights = [at(panel, INT64(COLUMNS * UNIT + 64 * h), _FLOATS) for h in halves]
        for m in range(TILE):
            scale = at(scales, builder.add(offset_of_row[m], word), FLOAT)
            scale = _everywhere(builder, scale, _FLOATS)
            for h in halves:
                total = builder.load(totals[m, h])
                found = builder.sitofp(sums[m, h], _FLOATS)
                factor = builder.fmul(of_weights[h], scale)
                builder.store(
                    called(builder, "llvm.fma.v16f32", _FLOATS, found, factor, total), totals[m, h]
                )
    for m in range(TILE):
        with builder.if_then(builder.icmp_signed(">", rows, INT64(m))):
            to = builder.add(out, builder.mul(stride, INT64(m)))
            proven = builder.load(pointer(builder, proof, _FLOATS), align=1)
            for h in halves:
                total = builder.load(totals[m, h])
                place = pointer(builder, builder.add(to, INT64(64 * h)), _FLOATS)
                builder.store(total, place, align=1)
                zero = builder.fmul(total, ir.Constant(_FLOATS, None))
                proven = builder.fadd(proven, zero)
            builder.store(proven, pointer(builder, proof, _FLOATS), align=1)
    return NONE


@function(types.none, types.int64, v.F32, types.int64, types.int64)
def _store_codes(builder, address, values, flip, distance):
    """Round 16 values to bytes, flip their bits as the byte `flip` says, and store each four of
    them `distance` bytes apart.
    """
    _, codes = rounded(builder, values)
    nothing = ir.Constant(ir.VectorType(INT8, 16), ir.Undefined)
    flips = builder.insert_element(nothing, builder.trunc(flip, INT8), INT32(0))
    flips = builder.shuffle_vector(flips, nothing, ir.Constant(_INTEGERS, None))
    words = builder.bitcast(builder.xor(codes, flips), ir.VectorType(INT32, 4))
    for i in range(4):
        to = builder.add(address, builder.mul(distance, INT64(i)))
        word = builder.extract_element(words, INT32(i))
        builder.store(word, pointer(builder, to, INT32), align=1)
    return NONE


def pack(arguments, thread, threads):
    """Arguments: address of the encoded rows, bytes from row to row, number of rows (a multiple of
    `COLUMNS`), blocks of a row, address of the panels.
    """
    first_row, stride, rows = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    blocks, out = v.integer_at(arguments + 24), v.integer_at(arguments + 32)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        row = first_row + r * stride
        panel = out + r // COLUMNS * (blocks * N_UNITS * GROUP_BYTES)
        to, scale_at = panel + r % COLUMNS * 4, panel + COLUMNS * UNIT + r % COLUMNS * 4
        for b in range(blocks):
            block = row + HEADER_BYTES + b * BLOCK_BYTES
            for u in range(N_UNITS):
                low, high = unit(row, block, u)
                scale, inverse = scale_of(low, high)
                factor = v.splat(inverse)
                _store_codes(to, v.mul(low, factor), 128, 4 * COLUMNS)
                _store_codes(to + 16 * COLUMNS, v.mul(high, factor), 128, 4 * COLUMNS)
                v.store_float(scale_at, scale)
                to += GROUP_BYTES
                scale_at += GROUP_BYTES


def multiply_tiles(arguments, thread, threads):
    """Arguments: address of a table int64[matrices, 3] of panels, first row and number of rows that
    are multiplied with this matrix; matrices, panels and groups of each; addresses of codes, scales
    and starts as `round_rows` stores them, of y float32[rows, panels * COLUMNS] and of
    float32[threads, 16], zeros that stay zero if all products are finite. Up to `TILE` - 1 rows
    after the last one are read.
    """
    table, matrices = v.integer_at(arguments), v.integer_at(arguments + 8)
    panels, groups = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    codes, scales, starts = (
        v.integer_at(arguments + 32),
        v.integer_at(arguments + 40),
        v.integer_at(arguments + 48),
    )
    y, proof = v.integer_at(arguments + 56), v.integer_at(arguments + 64) + 64 * thread
    n, stride = 0, 4 * COLUMNS * panels
    for e in range(matrices):
        n += panels * -(-v.integer_at(table + 24 * e + 16) // TILE)
    begin, end, before = n * thread // threads, n * (thread + 1) // threads, 0
    for e in range(matrices):
        at = table + 24 * e
        weights, first, rows = v.integer_at(at), v.integer_at(at + 8), v.integer_at(at + 16)
        tiles = -(-rows // TILE)
        here = panels * tiles
        for i in range(max(begin - before, 0), min(end - before, here)):
            panel, tile = i // tiles, i % tiles * TILE
            row = first + tile
            _multiply_tile(
                weights + panel * groups * GROUP_BYTES,
                groups,
                codes + row * groups * UNIT,
                scales + row * groups * 4,
                starts + row * groups * 4,
                y + row * stride + panel * 4 * COLUMNS,
                stride,
                rows - tile,
                proof,
            )
        before += here


@functools.cache
def _names(type: GGMLType) -> dict[str, Any]:
    """What `pack` needs for a type."""
    return {
        "unit": inlined_function(UNITS[type.name]),
        "N_UNITS": max(1, type.block_size // UNIT),
        "BLOCK_BYTES": type.block_bytes * max(1, UNIT // type.block_size),
        "HEADER_BYTES": type.header_bytes,
    }


def operations_of(type: GGMLType) -> list[int]:
    """Return the operations that products with matrices of a type need."""
    packing = operation(pack, f"pack_{type.name.lower()}", **_names(type))
    return [packing, operation(round_rows), operation(multiply_tiles)]


def packing(rows: Rows, out: int) -> tuple[int, np.ndarray]:
    """Return the operation that writes panels of encoded rows to an address."""
    blocks = rows.n_cols // max(UNIT, rows.type.block_size)
    data = rows.data
    head = [data.ctypes.data, data.strides[0], len(data), blocks, out]
    return operations_of(rows.type)[0], np.array(head, dtype=np.int64)


def rounding(*arguments: int) -> tuple[int, np.ndarray]:
    """Return the operation `round_rows`."""
    return operation(round_rows), np.array(arguments, dtype=np.int64)


def multiplication(*arguments: int) -> tuple[int, np.ndarray]:
    """Return the operation `multiply_tiles`."""
    return operation(multiply_tiles), np.array(arguments, dtype=np.int64)
