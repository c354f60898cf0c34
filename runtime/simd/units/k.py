"""Values of 32 elements of K-quants, whose blocks have 256. See `units.plain` for units."""

from __future__ import annotations

import numpy as np

from ....formats.kernel import inlined_function
from .. import vectors as v
from ..vectors import as_floats, bit_or, load_bytes, mul, plus, signed, splat


@inlined_function
def pairs(at, unit):
    """Two-bit codes of a unit: byte 32*(u//4) + i, bits 2*(u%4)."""
    at, by = at + 32 * (unit >> 2), 2 * (unit & 3)
    low, high = load_bytes(at), load_bytes(at + 16)
    return v.field(low, by, 3), v.field(high, by, 3)


@inlined_function
def bits_of_bytes(at, unit, place):
    """Bit u of byte i, moved to bit `place`."""
    bit, value = 1 << unit, 1 << place
    return (
        v.value_where_set(load_bytes(at), bit, value),
        v.value_where_set(load_bytes(at + 16), bit, value),
    )


@inlined_function
def nibble_at(at, n):
    """Nibble n of the bytes at an address."""
    return v.byte_at(at + (n >> 1)) >> (4 * (n & 1)) & 15


def q2_k(row, block, unit):
    """Return 32 values of a Q2_K block of 84 bytes: y = (d*scale)*q - dmin*minimum."""
    d, dmin = v.half_at(block + 80), v.half_at(block + 82)
    first, second = v.byte_at(block + 2 * unit), v.byte_at(block + 2 * unit + 1)
    low, high = pairs(block + 16, unit)
    return (
        v.sub(
            mul(splat(d * np.float32(first & 15)), as_floats(low)),
            splat(dmin * np.float32(first >> 4)),
        ),
        v.sub(
            mul(splat(d * np.float32(second & 15)), as_floats(high)),
            splat(dmin * np.float32(second >> 4)),
        ),
    )


@inlined_function
def _q3_scale(block, g):
    low = v.byte_at(block + 96 + (g & 7)) >> (4 * (g >> 3)) & 15
    high = v.byte_at(block + 104 + (g & 3)) >> (2 * (g >> 2)) & 3
    return np.float32((low | high << 4) - 32)


def q3_k(row, block, unit):
    """Return 32 values of a Q3_K block of 110 bytes: y = (d*(scale - 32))*(q - 4)."""
    d = v.half_at(block + 108)
    low, high = pairs(block + 32, unit)
    third_low, third_high = bits_of_bytes(block, unit, 2)
    low, high = plus(bit_or(low, third_low), -4), plus(bit_or(high, third_high), -4)
    return (
        mul(splat(d * _q3_scale(block, 2 * unit)), as_floats(signed(low))),
        mul(splat(d * _q3_scale(block, 2 * unit + 1)), as_floats(signed(high))),
    )


@inlined_function
def _six_bits(block, s):
    """The scale and the minimum of group s, see `formats.codecs.k`."""
    if s < 4:
        return v.byte_at(block + 4 + s) & 63, v.byte_at(block + 8 + s) & 63
    low, upper = v.byte_at(block + 8 + s), v.byte_at(block + 4 + s)
    return (low & 15) | (v.byte_at(block + s) >> 6) << 4, low >> 4 | (upper >> 6) << 4


@inlined_function
def nibbles(at, unit):
    """Four-bit codes of a unit: byte 32*(u//2) + i, the high ones where u is odd."""
    at, by = at + 32 * (unit >> 1), 4 * (unit & 1)
    low, high = load_bytes(at), load_bytes(at + 16)
    return v.field(low, by, 15), v.field(high, by, 15)


@inlined_function
def q4_k_values(row, block, unit):
    """Return 32 codes of a Q4_K block, 0..15, without scales: two vectors of 16 float32."""
    low, high = nibbles(block + 16, unit)
    return as_floats(low), as_floats(high)


def q4_k(row, block, unit):
    """Return 32 values of a Q4_K block of 144 bytes: y = (d*scale)*q - dmin*minimum."""
    six, minimum = _six_bits(block, unit)
    scale = splat(v.half_at(block) * np.float32(six))
    m = splat(v.half_at(block + 2) * np.float32(minimum))
    low, high = q4_k_values(row, block, unit)
    return v.sub(mul(scale, low), m), v.sub(mul(scale, high), m)


@inlined_function
def q5_k_values(row, block, unit):
    """Return 32 codes of a Q5_K block, 0..31, without scales: two vectors of 16 float32."""
    low, high = nibbles(block + 48, unit)
    fifth_low, fifth_high = bits_of_bytes(block + 16, unit, 4)
    return as_floats(bit_or(low, fifth_low)), as_floats(bit_or(high, fifth_high))


def q5_k(row, block, unit):
    """Return 32 values of a Q5_K block of 176 bytes: y = (d*scale)*q - dmin*minimum."""
    six, minimum = _six_bits(block, unit)
    scale = splat(v.half_at(block) * np.float32(six))
    m = splat(v.half_at(block + 2) * np.float32(minimum))
    low, high = q5_k_values(row, block, unit)
    return v.sub(mul(scale, low), m), v.sub(mul(scale, high), m)


@inlined_function
def q6_k_values(row, block, unit):
    """Return 32 codes of a Q6_K block, -32..31, without scales: two vectors of 16 float32."""
    half, g = unit >> 2, unit & 3
    at, by = block + 64 * half + 32 * (g & 1), 4 * (g >> 1)
    low, high = v.field(load_bytes(at), by, 15), v.field(load_bytes(at + 16), by, 15)
    upper_low, upper_high = pairs(block + 128, unit)
    low = plus(bit_or(low, v.shift_left(upper_low, 4)), -32)
    high = plus(bit_or(high, v.shift_left(upper_high, 4)), -32)
    return as_floats(signed(low)), as_floats(signed(high))


def q6_k(row, block, unit):
    """Return 32 values of a Q6_K block of 210 bytes: y = (d*scale)*(q - 32)."""
    d = v.half_at(block + 208)
    low, high = q6_k_values(row, block, unit)
    first = np.float32(v.signed_byte_at(block + 192 + 2 * unit))
    second = np.float32(v.signed_byte_at(block + 193 + 2 * unit))
    return mul(splat(d * first), low), mul(splat(d * second), high)


UNITS = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
