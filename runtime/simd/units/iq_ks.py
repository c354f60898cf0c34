"""Values of 32 elements of the IQ_KS types and IQ2_KL, whose blocks have 256 and a scale for every
32, with d in the row header. See `units.plain` for what a unit is.
"""

from __future__ import annotations

import numpy as np

from ....formats import tables
from ....formats.kernel import inlined_function
from .. import vectors as v
from ..vectors import as_floats, bit_and, bit_or, load_bytes, mul, shift_right, splat
from .iq_k import iq2_table, iq3_table, iq4_table, lookup_32, signed_bytes
from .k import bits_of_bytes, nibble_at, nibbles, pairs

_kl_even = [
    v.constant("i8", signed_bytes(tables.IQ2KL_VALUES[16 * i : 16 * i + 16, 0])) for i in range(2)
]
_kl_odd = [
    v.constant("i8", signed_bytes(tables.IQ2KL_VALUES[16 * i : 16 * i + 16, 1])) for i in range(2)
]
_kl_even_0, _kl_even_1, _kl_odd_0, _kl_odd_1 = *_kl_even, *_kl_odd


@inlined_function
def _split_nibble(at, unit):
    """Nibble u//4 of byte u%4."""
    return v.byte_at(at + (unit & 3)) >> (4 * (unit >> 2)) & 15


@inlined_function
def iq2_ks_values(row, block, unit):
    """Return the entries of IQ2NL_VALUES for 32 codes of an IQ2_KS block, without d and scales: two
    vectors of 16 float32.
    """
    table = iq2_table(v.word_at(block) >> unit & 1)
    low, high = pairs(block + 6, unit)
    return as_floats(v.lookup(low, table)), as_floats(v.lookup(high, table))


def iq2_ks(row, block, unit):
    """Return 32 values of an IQ2_KS block of 70 bytes: y = d*(scale - 16) * IQ2NL_VALUES[4*half +
    q]; d is in the row header.
    """
    d, extra = v.half_at(row), v.word_at(block) >> unit
    scale = splat(d * np.float32((nibble_at(block + 2, unit) | (extra >> 8 & 1) << 4) - 16))
    low, high = iq2_ks_values(row, block, unit)
    return mul(scale, low), mul(scale, high)


def iq3_ks(row, block, unit):
    """Return 32 values of an IQ3_KS block of 102 bytes: y = d*(scale - 16) * IQ3NL_VALUES[8*half +
    q]; d is in the row header.
    """
    d, extra = v.half_at(row), v.word_at(block) >> unit
    scale = splat(d * np.float32((_split_nibble(block + 2, unit) | (extra & 1) << 4) - 16))
    table = iq3_table(extra >> 8 & 1)
    low, high = pairs(block + 6, unit)
    third_low, third_high = bits_of_bytes(block + 70, unit, 2)
    return (
        mul(scale, as_floats(v.lookup(bit_or(low, third_low), table))),
        mul(scale, as_floats(v.lookup(bit_or(high, third_high), table))),
    )


@inlined_function
def iq4_ks_values(row, block, unit):
    """Return the entries of IQ4K_VALUES for 32 codes of an IQ4_KS block, without d and scales: two
    vectors of 16 float32.
    """
    table, codes = iq4_table(v.byte_at(block + unit) & 1), load_bytes(block + 8 + 16 * unit)
    return (
        as_floats(v.lookup(bit_and(codes, 15), table)),
        as_floats(v.lookup(shift_right(codes, 4), table)),
    )


def iq4_ks(row, block, unit):
    """Return 32 values of an IQ4_KS block of 136 bytes: y = d*((scale & 254) - 127) *
    IQ4K_VALUES[16*half + q]; d is in the row header.
    """
    byte = v.byte_at(block + unit)
    scale = splat(v.float_at(row) * np.float32((byte & 254) - 127))
    low, high = iq4_ks_values(row, block, unit)
    return mul(scale, low), mul(scale, high)


def iq4_kss(row, block, unit):
    """Return 32 values of an IQ4_KSS block of 128 bytes: y = d*((scale & 254) - 127) *
    IQ4K_VALUES[16*half + q]; d is in the row header.
    """
    words = v.load_8_words(block + 16 * unit)
    byte = v.lowest_bits(words) & 255
    scale = splat(v.float_at(row) * np.float32((byte & 254) - 127))
    words = bit_and(words, 0xFFFE)
    codes = v.as_bytes(v.bit_xor(words, shift_right(words, 1)))
    table = iq4_table(byte & 1)
    return (
        mul(scale, as_floats(v.lookup(bit_and(codes, 15), table))),
        mul(scale, as_floats(v.lookup(shift_right(codes, 4), table))),
    )


def iq5_ks(row, block, unit):
    """Return 32 values of an IQ5_KS block of 168 bytes: y = d*((scale & 254) - 127) *
    IQ5NL_VALUES[32*half + q]; d is in the row header.
    """
    byte = v.byte_at(block + unit)
    scale = splat(v.float_at(row) * np.float32((byte & 254) - 127))
    low, high = nibbles(block + 8, unit)
    fifth_low, fifth_high = bits_of_bytes(block + 136, unit, 4)
    return (
        mul(scale, lookup_32(bit_or(low, fifth_low), byte & 1)),
        mul(scale, lookup_32(bit_or(high, fifth_high), byte & 1)),
    )


def iq2_kl(row, block, unit):
    """Return 32 values of an IQ2_KL block of 86 bytes: y = d*(scale - 32) * IQ2KL_VALUES[q, i%2]; d
    is in the row header.
    """
    d, high = v.half_at(row), v.word_at(block) >> (2 * unit) & 3
    scale = splat(d * np.float32((_split_nibble(block + 2, unit) | high << 4) - 32))
    codes = v.field(load_bytes(block + 6 + 16 * (unit >> 1)), 4 * (unit & 1), 15)
    codes = bit_or(codes, v.value_where_set(load_bytes(block + 70), 1 << unit, 16))
    even = v.where_set(v.lookup(codes, _kl_even_1()), v.lookup(codes, _kl_even_0()), codes, 16)
    odd = v.where_set(v.lookup(codes, _kl_odd_1()), v.lookup(codes, _kl_odd_0()), codes, 16)
    return (
        mul(scale, as_floats(v.interleaved_lower(even, odd))),
        mul(scale, as_floats(v.interleaved_upper(even, odd))),
    )


UNITS = {
    "IQ2_KS": iq2_ks,
    "IQ3_KS": iq3_ks,
    "IQ4_KS": iq4_ks,
    "IQ4_KSS": iq4_kss,
    "IQ5_KS": iq5_ks,
    "IQ2_KL": iq2_kl,
}
