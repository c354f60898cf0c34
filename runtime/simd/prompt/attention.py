"""Softmax attention of many queries, without a matrix of scores (Dao et al., 2022).

`TILE` queries that share keys meet `KEYS` keys at a time. Both products, of queries with keys and
of shares with values, are tiles of TILE x KEYS sums in registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from ....formats.kernel import part_function
from .. import vectors as v
from ..operations import operation
from ..vectors.core import FLOAT, INT32, INT64, NONE, called, function, pointer

TILE = 6  # queries
KEYS = 64  # of a tile, and the elements of a value that are added up at a time
HIDDEN = np.float32(-1e30)  # a score that no sum of real ones reaches
# Of the scratch of a thread: scores, factors, highest scores and sums of each query, then results.
_FACTORS, _HIGHEST, _TOTALS, _RESULTS = 4 * TILE * KEYS, 4 * TILE * KEYS + 64, 0, 0
_TOTALS = _HIGHEST + 64
_RESULTS = _TOTALS + 64

_FLOATS = ir.VectorType(FLOAT, 16)


def scratch_bytes(value_length: int) -> int:
    """Return the bytes that a thread needs. value_length: a multiple of `KEYS`."""
    return _RESULTS + 4 * TILE * value_length


def _everywhere(builder: ir.IRBuilder, value: Any) -> Any:
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    one = builder.insert_element(nothing, value, INT32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(INT32, 16), None))


def _tile(builder, a, a_stride, b, b_stride, depth, c, c_stride, factors):
    """c[m] = factors[m] * c[m] + sum over d of a[m, d] * b[d], for `TILE` rows of `KEYS` floats;
    without factors, c[m] begins at 0.
    """
    quarters = range(KEYS // 16)
    places = [(m, i) for m in range(TILE) for i in quarters]

    def at(address: Any, offset: Any, type: ir.Type) -> Any:
        return builder.load(pointer(builder, builder.add(address, offset), type), align=1)

    def place(m: int, i: int) -> Any:
        offset = builder.add(builder.mul(c_stride, INT64(m)), INT64(64 * i))
        return pointer(builder, builder.add(c, offset), _FLOATS)

    sums = {key: cgutils.alloca_once(builder, _FLOATS) for key in places}
    for (m, i), total in sums.items():
        first = ir.Constant(_FLOATS, None)
        if factors is not None:
            factor = _everywhere(builder, at(factors, INT64(4 * m), FLOAT))
            first = builder.fmul(builder.load(place(m, i), align=1), factor)
        builder.store(first, total)
    rows = [builder.add(a, builder.mul(a_stride, INT64(m))) for m in range(TILE)]
    with cgutils.for_range(builder, depth) as loop:
        row = builder.add(b, builder.mul(b_stride, loop.index))
        found = [at(row, INT64(64 * i), _FLOATS) for i in quarters]
        word = builder.mul(loop.index, INT64(4))
        for m in range(TILE):
            one = _everywhere(builder, at(rows[m], word, FLOAT))
            for i in quarters:
                total = sums[m, i]
                product = called(
                    builder, "llvm.fma.v16f32", _FLOATS, one, found[i], builder.load(total)
                )
                builder.store(product, total)
    for (m, i), total in sums.items():
        builder.store(builder.load(total), place(m, i), align=1)
    return NONE


@function(types.none, *[types.int64] * 7)
def _multiply(builder, a, a_stride, b, b_stride, depth, c, c_stride):
    return _tile(builder, a, a_stride, b, b_stride, depth, c, c_stride, None)


@function(types.none, *[types.int64] * 8)
def _multiply_and_add(builder, a, a_stride, b, b_stride, depth, c, c_stride, factors):
    return _tile(builder, a, a_stride, b, b_stride, depth, c, c_stride, factors)


@function(v.F32, v.F32, types.int64, types.int64, types.float32)
def _within(builder, vector, first, stop, other):
    """Lanes first..stop of the vector, `other` elsewhere."""
    integers = ir.VectorType(INT32, 16)
    lanes, order = ir.Constant(integers, list(range(16))), ir.Constant(integers, None)

    def everywhere(value: Any) -> Any:
        nothing = ir.Constant(integers, ir.Undefined)
        one = builder.insert_element(nothing, builder.trunc(value, INT32), INT32(0))
        return builder.shuffle_vector(one, nothing, order)

    inside = builder.and_(
        builder.icmp_signed(">=", lanes, everywhere(first)),
        builder.icmp_signed("<", lanes, everywhere(stop)),
    )
    return builder.select(inside, vector, _everywhere(builder, other))


@part_function
def _shares(scratch, m, first, stop):
    """Scores of one query and `KEYS` keys, of which first..stop are visible, to shares of the
    highest score so far.
    """
    scores = scratch + 4 * KEYS * m
    highest = v.splat(HIDDEN)
    for i in range(KEYS // 16):
        x = v.load_floats(scores + 64 * i)
        highest = v.largest(highest, _within(x, first - 16 * i, stop - 16 * i, HIDDEN))
    before = v.float_at(scratch + _HIGHEST + 4 * m)
    now = max(before, v.highest(highest))
    level, total = v.splat(now), v.splat(np.float32(0))
    for i in range(KEYS // 16):
        x = v.exp(v.sub(v.load_floats(scores + 64 * i), level))
        share = _within(x, first - 16 * i, stop - 16 * i, np.float32(0))
        v.store_floats(scores + 64 * i, share)
        total = v.add(total, share)
    factor = v.total(v.exp(v.splat(before - now))) * np.float32(1 / 16)
    v.store_float(scratch + _FACTORS + 4 * m, factor)
    v.store_float(scratch + _HIGHEST + 4 * m, now)
    sums = v.float_at(scratch + _TOTALS + 4 * m) * factor + v.total(total)
    v.store_float(scratch + _TOTALS + 4 * m, sums)


def attend(arguments, thread, threads):
    """Arguments: scaled queries float32[kv_heads, n * group + TILE, d] (the last rows are only
    read), keys float32[kv_heads, panels, d, KEYS], values float32[kv_heads, panels * KEYS, dv];
    kv_heads, n, group, d, dv, panels, positions, window (0: none), address of the result
    float32[n, kv_heads * group, dv], scratch, its bytes for a thread. The n queries are those of
    the last positions. dv: a multiple of KEYS.
    """
    queries, keys, values = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    kv_heads, n, group = (
        v.integer_at(arguments + 24),
        v.integer_at(arguments + 32),
        v.integer_at(arguments + 40),
    )
    d, dv, panels = (
        v.integer_at(arguments + 48),
        v.integer_at(arguments + 56),
        v.integer_at(arguments + 64),
    )
    positions, window, out = (
        v.integer_at(arguments + 72),
        v.integer_at(arguments + 80),
        v.integer_at(arguments + 88),
    )
    scratch = v.integer_at(arguments + 96) + thread * v.integer_at(arguments + 104)
    rows = n * group
    tiles = -(-rows // TILE)
    for item in range(thread, kv_heads * tiles, threads):
        head, row = item // tiles, item % tiles * TILE
        q = queries + 4 * d * (head * (rows + TILE) + row)
        last = min(row + TILE, rows) - 1
        # positions that the first and the last query are at
        low, high = positions - n + row // group, positions - n + last // group
        begin = max(0, low - window + 1) // KEYS if window else 0
        for m in range(TILE):
            v.store_float(scratch + _HIGHEST + 4 * m, HIDDEN)
            v.store_float(scratch + _TOTALS + 4 * m, np.float32(0))
        for i in range(0, 4 * TILE * dv, 64):
            v.store_floats(scratch + _RESULTS + i, v.splat(np.float32(0)))
        for panel in range(begin, high // KEYS + 1):
            at = keys + 4 * d * KEYS * (head * panels + panel)
            _multiply(q, 4 * d, at, 4 * KEYS, d, scratch, 4 * KEYS)
            for m in range(TILE):
                position = positions - n + min(row + m, last) // group
                first = position - window + 1 - panel * KEYS if window else 0
                _shares(scratch, m, first, position + 1 - panel * KEYS)
            at = values + 4 * dv * KEYS * (head * panels + panel)
            for i in range(0, 4 * dv, 4 * KEYS):
                _multiply_and_add(
                    scratch,
                    4 * KEYS,
                    at + i,
                    4 * dv,
                    KEYS,
                    scratch + _RESULTS + i,
                    4 * dv,
                    scratch + _FACTORS,
                )
        for m in range(last - row + 1):
            r = row + m
            to = out + 4 * dv * (r // group * kv_heads * group + head * group + r % group)
            factor = v.splat(np.float32(1) / v.float_at(scratch + _TOTALS + 4 * m))
            for i in range(0, 4 * dv, 64):
                result = v.load_floats(scratch + _RESULTS + 4 * dv * m + i)
                v.store_floats(to + i, v.mul(result, factor))


def attention() -> int:
    """Return the operation `attend`."""
    return operation(attend)
