"""Norms, rotations and activations of many rows, 16 elements at a time."""

from __future__ import annotations

import numpy as np

from ....formats.kernel import inlined_function
from .. import vectors as v
from ..operations import operation
from ..step.activations import silu
from ..step.norms import rms_factor
from ..vectors.core import LANES, function, shuffled

# What `operation` binds.
SPLIT_HALVES = 0

_silu = inlined_function(silu)


def rms_norm(arguments, thread, threads):
    """Arguments: address of x float32[rows, n], rows, n, weights float32[n], address of the result,
    eps as the bits of a float32; the rows of a token, floats from there to the next one, and from
    one token to the next.
    """
    x, rows, n = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    weights, out = v.integer_at(arguments + 24), v.integer_at(arguments + 32)
    eps, heads = v.float_at(arguments + 40), v.integer_at(arguments + 48)
    step, token = 4 * v.integer_at(arguments + 56), 4 * v.integer_at(arguments + 64)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        row, to = x + r // heads * token + r % heads * step, out + 4 * n * r
        factor = v.splat(rms_factor(row, n, eps))
        for i in range(0, 4 * n, 64):
            normed = v.mul(v.load_floats(row + i), factor)
            v.store_floats(to + i, v.mul(normed, v.load_floats(weights + i)))


@function(v.F32, v.F32)
def _neighbours(builder, vector):
    """Lanes 1 0 3 2 ..."""
    return shuffled(builder, vector, vector, [i ^ 1 for i in range(LANES)])


def rotate_rows(arguments, thread, threads):
    """Arguments: address of x float32[rows, heads, n], rows, heads, n, rotated elements of a head,
    cos and sin float32[rows, rotated / 2], address of the result.
    """
    x, rows, heads, n = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
        v.integer_at(arguments + 24),
    )
    rotated = v.integer_at(arguments + 32)
    cosines, sines, out = (
        v.integer_at(arguments + 40),
        v.integer_at(arguments + 48),
        v.integer_at(arguments + 56),
    )
    zero = v.splat(np.float32(0))
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        angle = 2 * rotated * r
        for h in range(heads):
            at, to = x + 4 * n * (r * heads + h), out + 4 * n * (r * heads + h)
            for i in range(0, 2 * rotated, 64):
                cos = v.load_floats(cosines + angle + i)
                sin = v.load_floats(sines + angle + i)
                if SPLIT_HALVES:
                    half = 2 * rotated
                    a, b = v.load_floats(at + i), v.load_floats(at + half + i)
                    v.store_floats(to + i, v.sub(v.mul(a, cos), v.mul(b, sin)))
                    v.store_floats(to + half + i, v.add(v.mul(a, sin), v.mul(b, cos)))
                else:
                    other = v.sub(zero, sin)
                    a, b = v.load_floats(at + 2 * i), v.load_floats(at + 2 * i + 64)
                    low = v.mul(_neighbours(a), v.interleaved_lower(other, sin))
                    high = v.mul(_neighbours(b), v.interleaved_upper(other, sin))
                    low = v.add(v.mul(a, v.interleaved_lower(cos, cos)), low)
                    high = v.add(v.mul(b, v.interleaved_upper(cos, cos)), high)
                    v.store_floats(to + 2 * i, low)
                    v.store_floats(to + 2 * i + 64, high)
            for i in range(4 * rotated, 4 * n, 64):
                v.store_floats(to + i, v.load_floats(at + i))


def gate_silu(arguments, thread, threads):
    """gate = silu(gate) * up. Arguments: addresses of gate and up, floats from row to row of each,
    rows, n.
    """
    gate, up = v.integer_at(arguments), v.integer_at(arguments + 8)
    gate_stride, up_stride = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    rows, n = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        a, b = gate + 4 * gate_stride * r, up + 4 * up_stride * r
        for i in range(0, 4 * n, 64):
            v.store_floats(a + i, v.mul(_silu(v.load_floats(a + i)), v.load_floats(b + i)))


def convolve_silu(arguments, thread, threads):
    """silu of the causal convolution of each channel. Arguments: address of x
    float32[rows, channels], weights float32[taps, channels], address of the result
    float32[rows, channels], rows, taps, channels, address of the taps - 1 rows before x.
    """
    x, weights, out = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    rows, taps, row = (
        v.integer_at(arguments + 24),
        v.integer_at(arguments + 32),
        4 * v.integer_at(arguments + 40),
    )
    before = v.integer_at(arguments + 48)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        earlier = max(0, taps - 1 - r)  # rows that come before x
        for i in range(0, row, 64):
            total = v.splat(np.float32(0))
            for tap in range(taps):
                at = x + (r + tap - taps + 1) * row
                if tap < earlier:
                    at = before + (r + tap) * row
                found = v.mul(v.load_floats(at + i), v.load_floats(weights + tap * row + i))
                total = v.add(total, found)
            v.store_floats(out + r * row + i, _silu(total))


def rotation(split_halves: bool) -> int:
    """Return the operation `rotate_rows` for pairs of neighbours, or of halves of a head."""
    name = "rotate_halves" if split_halves else "rotate_neighbours"
    return operation(rotate_rows, name, SPLIT_HALVES=int(split_halves))


def norm() -> int:
    """Return the operation `rms_norm`."""
    return operation(rms_norm)


def convolution() -> int:
    """Return the operation `convolve_silu`."""
    return operation(convolve_silu)


def gate() -> int:
    """Return the operation `gate_silu`."""
    return operation(gate_silu)
