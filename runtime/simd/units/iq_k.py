"""Values of 32 elements of the IQ_K types, whose blocks have 256 and a scale for every 16. See
`units.plain` for what a unit is.
"""

from __future__ import annotations

import numpy as np

from ....formats import tables
from ....formats.kernel import inlined_function
from .. import vectors as v
from ..vectors import as_floats, bit_and, bit_or, load_bytes, mul, shift_right, splat
from .k import bits_of_bytes, nibble_at, nibbles, pairs


def signed_bytes(values) -> list[int]:
    """Return a table of whole numbers as a list, which constants of bytes are made of."""
    return np.asarray(values).astype(int).tolist()


def _halves(values, n: int):
    """The two halves of a table, of n entries each, repeated to 16."""
    values = signed_bytes(values)
    return v.table("i8", [values[i * n : i * n + n] * (16 // n) for i in range(2)])


def _quarters(values) -> list:
    """The first and the second 16 of the two halves of a table of 64 entries."""
    values = signed_bytes(values)
    return [v.table("i8", [values[at : at + 16], values[at + 32 : at + 48]]) for at in (0, 16)]


iq2_table, iq3_table = _halves(tables.IQ2NL_VALUES, 4), _halves(tables.IQ3NL_VALUES, 8)
iq4_table = _halves(tables.IQ4K_VALUES, 16)
_iq5_lower, _iq5_upper = _quarters(tables.IQ5NL_VALUES)
_iq6 = [v.constant("i8", signed_bytes(tables.IQ6NL_VALUES[16 * i : 16 * i + 16])) for i in range(4)]
_iq6_0, _iq6_1, _iq6_2, _iq6_3 = _iq6


@inlined_function
def _iq_scale(block, g):
    """The six-bit scale of group g of IQ4_K and IQ5_K."""
    high = v.byte_at(block + 4 + (g >> 2)) >> (2 * (g & 3)) & 3
    return np.float32((nibble_at(block + 8, g) | high << 4) - 32)


@inlined_function
def iq2_k_values(row, block, unit):
    """Return the entries of IQ2NL_VALUES for 32 codes of an IQ2_K block, without d and scales: two
    vectors of 16 float32.
    """
    extra = v.word_at(block + 2) >> (2 * unit)
    low, high = pairs(block + 12, unit)
    return (
        as_floats(v.lookup(low, iq2_table(extra & 1))),
        as_floats(v.lookup(high, iq2_table(extra >> 1 & 1))),
    )


def iq2_k(row, block, unit):
    """Return 32 values of an IQ2_K block of 76 bytes: y = d*(scale - 8) * IQ2NL_VALUES[4*half +
    q].
    """
    d, g = v.half_at(block), 2 * unit
    first = d * np.float32(nibble_at(block + 4, g) - 8)
    second = d * np.float32(nibble_at(block + 4, g + 1) - 8)
    low, high = iq2_k_values(row, block, unit)
    return mul(splat(first), low), mul(splat(second), high)


@inlined_function
def _iq3_scale(block, g):
    magnitude = 2 * nibble_at(block + 6, g) + 1
    return np.float32(-magnitude if v.word_at(block + 4) >> g & 1 else magnitude)


@inlined_function
def iq3_k_values(row, block, unit):
    """Return the entries of IQ3NL_VALUES for 32 codes of an IQ3_K block, without d and scales: two
    vectors of 16 float32.
    """
    extra = v.word_at(block + 2) >> (2 * unit)
    low, high = pairs(block + 14, unit)
    third_low, third_high = bits_of_bytes(block + 78, unit, 2)
    low, high = bit_or(low, third_low), bit_or(high, third_high)
    return (
        as_floats(v.lookup(low, iq3_table(extra & 1))),
        as_floats(v.lookup(high, iq3_table(extra >> 1 & 1))),
    )


def iq3_k(row, block, unit):
    """Return 32 values of an IQ3_K block of 110 bytes: y = d*(2*scale + 1)*sign *
    IQ3NL_VALUES[8*half + q].
    """
    d = v.half_at(block)
    low, high = iq3_k_values(row, block, unit)
    return (
        mul(splat(d * _iq3_scale(block, 2 * unit)), low),
        mul(splat(d * _iq3_scale(block, 2 * unit + 1)), high),
    )


@inlined_function
def iq4_k_values(row, block, unit):
    """Return the entries of IQ4K_VALUES for 32 codes of an IQ4_K block, without d and scales: two
    vectors of 16 float32.
    """
    extra, codes = v.word_at(block + 2) >> (2 * unit), load_bytes(block + 16 + 16 * unit)
    return (
        as_floats(v.lookup(bit_and(codes, 15), iq4_table(extra & 1))),
        as_floats(v.lookup(shift_right(codes, 4), iq4_table(extra >> 1 & 1))),
    )


def iq4_k(row, block, unit):
    """Return 32 values of an IQ4_K block of 144 bytes: y = d*(scale - 32) * IQ4K_VALUES[16*half +
    q].
    """
    d = v.half_at(block)
    low, high = iq4_k_values(row, block, unit)
    return (
        mul(splat(d * _iq_scale(block, 2 * unit)), low),
        mul(splat(d * _iq_scale(block, 2 * unit + 1)), high),
    )


@inlined_function
def lookup_32(codes, half):
    """Entries of half 0 or 1 of IQ5NL_VALUES for five-bit codes."""
    lower, upper = v.lookup(codes, _iq5_lower(half)), v.lookup(codes, _iq5_upper(half))
    return as_floats(v.where_set(upper, lower, codes, 16))


@inlined_function
def iq5_k_values(row, block, unit):
    """Return the entries of IQ5NL_VALUES for 32 codes of an IQ5_K block, without d and scales: two
    vectors of 16 float32.
    """
    extra = v.word_at(block + 2) >> (2 * unit)
    low, high = nibbles(block + 16, unit)
    fifth_low, fifth_high = bits_of_bytes(block + 144, unit, 4)
    low, high = bit_or(low, fifth_low), bit_or(high, fifth_high)
    return lookup_32(low, extra & 1), lookup_32(high, extra >> 1 & 1)


def iq5_k(row, block, unit):
    """Return 32 values of an IQ5_K block of 176 bytes: y = d*(scale - 32) * IQ5NL_VALUES[32*half +
    q].
    """
    d = v.half_at(block)
    low, high = iq5_k_values(row, block, unit)
    return (
        mul(splat(d * _iq_scale(block, 2 * unit)), low),
        mul(splat(d * _iq_scale(block, 2 * unit + 1)), high),
    )


@inlined_function
def _lookup_64(codes, half):
    """Entries of IQ6NL_VALUES for six-bit codes: the second half of the table is one more."""
    a, b = v.lookup(codes, _iq6_0()), v.lookup(codes, _iq6_1())
    c, d = v.lookup(codes, _iq6_2()), v.lookup(codes, _iq6_3())
    lower, upper = v.where_set(b, a, codes, 16), v.where_set(d, c, codes, 16)
    values = as_floats(v.where_set(upper, lower, codes, 32))
    return v.add(values, splat(np.float32(half)))


@inlined_function
def iq6_k_values(row, block, unit):
    """Return the entries of the table of 128 values that products use for 32 codes of an IQ6_K
    block, without d and scales: two vectors of 16 float32.
    """
    extra = v.word_at(block + 2) >> (2 * unit)
    low, high = nibbles(block + 20, unit)
    upper_low, upper_high = pairs(block + 148, unit)
    low = bit_or(low, v.shift_left(upper_low, 4))
    high = bit_or(high, v.shift_left(upper_high, 4))
    return _lookup_64(low, extra & 1), _lookup_64(high, extra >> 1 & 1)


def iq6_k(row, block, unit):
    """Return 32 values of an IQ6_K block of 212 bytes: y = d*scale * value, with the values of
    `iq6_k_values`.
    """
    d = v.half_at(block)
    low, high = iq6_k_values(row, block, unit)
    first = d * np.float32(v.signed_byte_at(block + 4 + 2 * unit))
    second = d * np.float32(v.signed_byte_at(block + 5 + 2 * unit))
    return mul(splat(first), low), mul(splat(second), high)


UNITS = {
    "IQ2_K": iq2_k,
    "IQ3_K": iq3_k,
    "IQ4_K": iq4_k,
    "IQ5_K": iq5_k,
    "IQ6_K": iq6_k,
}
