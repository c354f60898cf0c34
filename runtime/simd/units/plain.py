"""Values of 32 elements at a time: floats, blocks of 32 with half-precision scales, 8-bit types and
4-bit floats.

A unit is a function (row, block, unit): the address of the row, that of the block, and the number
of the 32 elements within it. It returns their values as two vectors, bit for bit what
`formats.codecs` decodes; those modules have the layouts.
"""

from __future__ import annotations

import numpy as np

from ....formats.codecs.fp4 import half_e8m0, half_ue4m3
from ....formats.tables import FP4_VALUES, IQ4NL_VALUES
from .. import vectors as v
from ..vectors import as_floats, bit_and, bit_or, load_bytes, mul, plus, shift_right, signed, splat

iq4nl_table = v.constant("i8", IQ4NL_VALUES.astype(int).tolist())
_fp4_table = v.constant("i8", FP4_VALUES.astype(int).tolist())


def f32(row, block, unit):
    """Return 32 values of F32 at address `block`, 128 bytes."""
    return v.load_floats(block), v.load_floats(block + 64)


def f16(row, block, unit):
    """Return 32 values of F16 at address `block`, 64 bytes, widened to float32."""
    return v.load_halves(block), v.load_halves(block + 32)


def bf16(row, block, unit):
    """Return 32 values of BF16 at address `block`, 64 bytes, widened to float32."""
    return v.load_bf16(block), v.load_bf16(block + 32)


def q4_0(row, block, unit):
    """Return 32 values of a Q4_0 block of 18 bytes: y = d*(q - 8)."""
    d, codes = splat(v.half_at(block)), load_bytes(block + 2)
    low, high = plus(bit_and(codes, 15), -8), plus(shift_right(codes, 4), -8)
    return mul(d, as_floats(signed(low))), mul(d, as_floats(signed(high)))


def q4_1(row, block, unit):
    """Return 32 values of a Q4_1 block of 20 bytes: y = d*q + m."""
    d, m = splat(v.half_at(block)), splat(v.half_at(block + 2))
    codes = load_bytes(block + 4)
    low, high = as_floats(bit_and(codes, 15)), as_floats(shift_right(codes, 4))
    return v.add(mul(d, low), m), v.add(mul(d, high), m)


def q5_0(row, block, unit):
    """Return 32 values of a Q5_0 block of 22 bytes: y = d*(q - 16)."""
    d, fifth, codes = splat(v.half_at(block)), v.long_at(block + 2), load_bytes(block + 6)
    low = plus(bit_or(bit_and(codes, 15), v.where_bits(fifth, 16)), -16)
    high = plus(bit_or(shift_right(codes, 4), v.where_bits(fifth >> 16, 16)), -16)
    return mul(d, as_floats(signed(low))), mul(d, as_floats(signed(high)))


def q5_0_r4(row, block, unit):
    """Return 32 values of a Q5_0_R4 block of 22 bytes: y = d*q + (-16)*d."""
    d, fifth, codes = v.half_at(block), v.long_at(block + 2), load_bytes(block + 6)
    low = as_floats(bit_or(bit_and(codes, 15), v.where_bits(fifth, 16)))
    high = as_floats(bit_or(shift_right(codes, 4), v.where_bits(fifth >> 16, 16)))
    m = splat(np.float32(-16) * d)
    return v.add(mul(splat(d), low), m), v.add(mul(splat(d), high), m)


def q5_1(row, block, unit):
    """Return 32 values of a Q5_1 block of 24 bytes: y = d*q + m."""
    d, m = splat(v.half_at(block)), splat(v.half_at(block + 2))
    fifth, codes = v.long_at(block + 4), load_bytes(block + 8)
    low = as_floats(bit_or(bit_and(codes, 15), v.where_bits(fifth, 16)))
    high = as_floats(bit_or(shift_right(codes, 4), v.where_bits(fifth >> 16, 16)))
    return v.add(mul(d, low), m), v.add(mul(d, high), m)


def q6_0(row, block, unit):
    """Return 32 values of a Q6_0 block of 26 bytes: y = d*(q - 32)."""
    d, codes = splat(v.half_at(block)), load_bytes(block + 10)
    # the pairs of the elements 8 to 15 and 24 to 31 are four bits higher
    pairs = v.load_8_bytes_twice(block + 2, block + 2)
    pairs = v.first_half_else(pairs, shift_right(pairs, 4))
    low = bit_or(bit_and(codes, 15), v.shift_left(bit_and(pairs, 3), 4))
    high = bit_or(shift_right(codes, 4), v.shift_left(bit_and(shift_right(pairs, 2), 3), 4))
    return (
        mul(d, as_floats(signed(plus(low, -32)))),
        mul(d, as_floats(signed(plus(high, -32)))),
    )


def q6_0_r4(row, block, unit):
    """Return 32 values of a Q6_0_R4 block of 26 bytes: y = d*q + (-32)*d."""
    d, codes = v.half_at(block), load_bytes(block + 10)
    pairs = v.load_8_bytes_twice(block + 2, block + 2)
    pairs = v.first_half_else(pairs, shift_right(pairs, 4))
    low = bit_or(bit_and(codes, 15), v.shift_left(bit_and(pairs, 3), 4))
    high = bit_or(shift_right(codes, 4), v.shift_left(bit_and(shift_right(pairs, 2), 3), 4))
    m = splat(np.float32(-32) * d)
    return (
        v.add(mul(splat(d), as_floats(low)), m),
        v.add(mul(splat(d), as_floats(high)), m),
    )


def iq4_nl(row, block, unit):
    """Return 32 values of an IQ4_NL block of 18 bytes: y = d*IQ4NL_VALUES[q]."""
    d, codes, table = splat(v.half_at(block)), load_bytes(block + 2), iq4nl_table()
    low, high = v.lookup(bit_and(codes, 15), table), v.lookup(shift_right(codes, 4), table)
    return mul(d, as_floats(low)), mul(d, as_floats(high))


def q8_0(row, block, unit):
    """Return 32 values of a Q8_0 block of 34 bytes: y = d*q."""
    d = splat(v.half_at(block))
    low, high = signed(load_bytes(block + 2)), signed(load_bytes(block + 18))
    return mul(d, as_floats(low)), mul(d, as_floats(high))


def q8_kv(row, block, unit):
    """Return 32 values of a Q8_KV block of 32 bytes: y = d*q; d is in the row header."""
    d = splat(v.float_at(row))
    low, high = signed(load_bytes(block)), signed(load_bytes(block + 16))
    return mul(d, as_floats(low)), mul(d, as_floats(high))


def q8_k_r8(row, block, unit):
    """Return 32 values of a Q8_K_R8 block of 258 bytes: y = d*q."""
    d, at = splat(v.half_at(block)), block + 2 + 32 * unit
    low, high = signed(load_bytes(at)), signed(load_bytes(at + 16))
    return mul(d, as_floats(low)), mul(d, as_floats(high))


def q8_k_r16(row, block, unit):
    """Return 32 values of a Q8_K_R16 block of 258 bytes: y = d*q - 128*d."""
    d, at = v.half_at(block), block + 2 + 32 * unit
    m = splat(np.float32(-128) * d)
    low, high = as_floats(load_bytes(at)), as_floats(load_bytes(at + 16))
    return v.add(mul(splat(d), low), m), v.add(mul(splat(d), high), m)


def mxfp4(row, block, unit):
    """Return 32 values of an MXFP4 block of 17 bytes: y = 2^(e-128) * FP4_VALUES[q]."""
    scale, codes = splat(half_e8m0(v.byte_at(block))), load_bytes(block + 1)
    table = _fp4_table()
    low, high = v.lookup(bit_and(codes, 15), table), v.lookup(shift_right(codes, 4), table)
    return mul(scale, as_floats(low)), mul(scale, as_floats(high))


def nvfp4(row, block, unit):
    """Return 32 values of an NVFP4 block of 36 bytes: y = scale/2 * FP4_VALUES[q]."""
    first, second = (
        half_ue4m3(v.byte_at(block + 2 * unit)),
        half_ue4m3(v.byte_at(block + 2 * unit + 1)),
    )
    codes, table = load_bytes(block + 4 + 16 * unit), _fp4_table()
    low, high = v.lookup(bit_and(codes, 15), table), v.lookup(shift_right(codes, 4), table)
    # eight bytes hold the first eight of 16 elements low and the next eight high
    return (
        mul(splat(first), as_floats(v.lower_halves(low, high))),
        mul(splat(second), as_floats(v.upper_halves(low, high))),
    )


UNITS = {
    "F32": f32,
    "F16": f16,
    "BF16": bf16,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_0_R4": q5_0_r4,
    "Q5_1": q5_1,
    "Q6_0": q6_0,
    "Q6_0_R4": q6_0_r4,
    "IQ4_NL": iq4_nl,
    "Q8_0": q8_0,
    "Q8_KV": q8_kv,
    "Q8_K_R8": q8_k_r8,
    "Q8_K_R16": q8_k_r16,
    "MXFP4": mxfp4,
    "NVFP4": nvfp4,
}
