"""Rows of floats in 8 bits, for products with the matrices of `tiles`.

Every 32 values of a row get a scale; code = round(value * 127 / largest magnitude). With their sum
products begin, see `tiles`.
"""

from __future__ import annotations

import numpy as np
from numba import types

from ...formats.kernel import inlined_function
from . import vectors as v
from .rounding import largest_magnitude, store_codes
from .vectors.core import function

_largest_magnitude = function(types.float32, v.F32, v.F32)(largest_magnitude)
_store_row_codes = function(types.int64, types.int64, v.F32, v.F32)(store_codes)


@inlined_function
def scale_of(low, high):
    """The scale of 32 values and its inverse; the scale is not finite if a value is not."""
    largest = _largest_magnitude(low, high)
    if largest == np.float32(0):
        return np.float32(0), np.float32(0)
    return largest / np.float32(127), np.float32(127) / largest


@inlined_function
def store_rounded(low, high, codes, scale_at, start_at):
    """Round 32 values."""
    scale, inverse = scale_of(low, high)
    factor = v.splat(inverse)
    total = _store_row_codes(codes, v.mul(low, factor), v.mul(high, factor))
    v.store_float(scale_at, scale)
    v.store_long(start_at, -128 * total)


def round_rows(arguments, thread, threads):
    """Arguments: address of x float32[rows, 32 * groups], rows, groups, addresses of int8 codes
    like x, of scales float32[rows, groups] and of what sums begin with, int32[rows, groups].
    """
    x, rows, groups = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    codes, scales, starts = (
        v.integer_at(arguments + 24),
        v.integer_at(arguments + 32),
        v.integer_at(arguments + 40),
    )
    n = rows * groups
    for i in range(n * thread // threads, n * (thread + 1) // threads):
        low, high = v.load_floats(x + 128 * i), v.load_floats(x + 128 * i + 64)
        store_rounded(low, high, codes + 32 * i, scales + 4 * i, starts + 4 * i)
