"""Rows in 8 bits that come from gates, or from other rows; see `simd.rounded_rows`."""

from __future__ import annotations

import numpy as np

from ....formats.kernel import inlined_function
from .. import vectors as v
from ..operations import operation
from ..rounded_rows import store_rounded
from ..step.activations import silu

_silu = inlined_function(silu)


def round_gated_rows(arguments, thread, threads):
    """Round silu(gate) * up. Arguments: addresses of gate and up, floats from row to row of both;
    the other arguments of `round_rows`.
    """
    gate, up, stride = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        4 * v.integer_at(arguments + 16),
    )
    rows, groups = v.integer_at(arguments + 24), v.integer_at(arguments + 32)
    codes, scales, starts = (
        v.integer_at(arguments + 40),
        v.integer_at(arguments + 48),
        v.integer_at(arguments + 56),
    )
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        for group in range(groups):
            at, i = r * stride + 128 * group, r * groups + group
            low = v.mul(_silu(v.load_floats(gate + at)), v.load_floats(up + at))
            high = v.mul(_silu(v.load_floats(gate + at + 64)), v.load_floats(up + at + 64))
            store_rounded(low, high, codes + 32 * i, scales + 4 * i, starts + 4 * i)


def gather_rounded_rows(arguments, thread, threads):
    """Copy rounded rows. Arguments: addresses of codes, scales and starts; address of the numbers
    of rows int64[rows]; rows, groups; addresses of their codes, scales and starts.
    """
    codes, scales, starts = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    numbers, rows, groups = (
        v.integer_at(arguments + 24),
        v.integer_at(arguments + 32),
        v.integer_at(arguments + 40),
    )
    codes_to, scales_to, starts_to = (
        v.integer_at(arguments + 48),
        v.integer_at(arguments + 56),
        v.integer_at(arguments + 64),
    )
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        source = v.integer_at(numbers + 8 * r)
        for i in range(0, 32 * groups, 8):
            at = codes + 32 * groups * source + i
            v.store_integer(codes_to + 32 * groups * r + i, v.integer_at(at))
        for i in range(0, 4 * groups, 4):
            at = 4 * groups * source + i
            v.store_float(scales_to + 4 * groups * r + i, v.float_at(scales + at))
            v.store_float(starts_to + 4 * groups * r + i, v.float_at(starts + at))


def gated_rounding(*arguments: int) -> tuple[int, np.ndarray]:
    """Return the operation `round_gated_rows`."""
    return operation(round_gated_rows), np.array(arguments, dtype=np.int64)


def gathering(*arguments: int) -> tuple[int, np.ndarray]:
    """Return the operation `gather_rounded_rows`."""
    return operation(gather_rounded_rows), np.array(arguments, dtype=np.int64)
