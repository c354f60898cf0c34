"""Values of 32 elements of trellis types. See `units.plain` for what a unit is."""

from __future__ import annotations

import numpy as np

from ....formats.codecs.trellis import MULTIPLIER, OFFSET
from ....formats.kernel import inlined_function
from ....formats.tables import IQ4NL_VALUES
from .. import vectors as v
from ..vectors import as_floats, bit_and, load_bytes, mul, plus, shift_right, splat

_POWERS_8, _POWERS_4 = ([pow(MULTIPLIER, i % n + 1, 2**32) for i in range(v.LANES)] for n in (8, 4))
_powers_8, _powers_4 = v.constant("i32", _POWERS_8), v.constant("i32", _POWERS_4)
_ones = v.constant("i32", [0x01010101] * v.LANES)


@inlined_function
def _generated(starts, powers):
    """What the generator of the trellis gives after `starts`."""
    words = bit_and(v.times(starts, powers), 0x3F3F3F3F)
    return as_floats(plus(shift_right(v.times(words, _ones()), 24), -126))


@inlined_function
def _from_two(a, b):
    return _generated(v.integer_halves(a + OFFSET, b + OFFSET), _powers_8())


def iq1_kt(row, block, unit):
    """Return 32 values of an IQ1_KT block of 56 bytes: y = d*IQ4NL_VALUES[code] * value; d is in
    the row header.
    """
    group = v.byte_at(block + unit)
    scale = splat(v.float_at(row) * IQ4NL_VALUES[group & 15])
    m, by = 4 * unit & 15, 4 * (unit >> 2)
    at, high = block + 8 + 4 * unit, block + 40 + m
    a = v.byte_at(at) | (v.byte_at(high) >> by & 15) << 8 | (group >> 4 & 1) << 12
    b = v.byte_at(at + 1) | (v.byte_at(high + 1) >> by & 15) << 8 | (group >> 5 & 1) << 12
    c = v.byte_at(at + 2) | (v.byte_at(high + 2) >> by & 15) << 8 | (group >> 6 & 1) << 12
    e = v.byte_at(at + 3) | (v.byte_at(high + 3) >> by & 15) << 8 | (group >> 7) << 12
    return mul(scale, _from_two(a, b)), mul(scale, _from_two(c, e))


@inlined_function
def _kt_scale(block, unit):
    return v.byte_at(block + (unit & 3)) >> (4 * (unit >> 2)) & 15


def iq2_kt(row, block, unit):
    """Return 32 values of an IQ2_KT block of 68 bytes: y = d*IQ4NL_VALUES[code] * value; d is in
    the row header.
    """
    scale, at = splat(v.float_at(row) * IQ4NL_VALUES[_kt_scale(block, unit)]), block + 4 + 8 * unit
    return (
        mul(scale, _from_two(v.word_at(at), v.word_at(at + 2))),
        mul(scale, _from_two(v.word_at(at + 4), v.word_at(at + 6))),
    )


def iq3_kt(row, block, unit):
    """Return 32 values of an IQ3_KT block of 100 bytes: y = d*scale * |value| * sign; d is in the
    row header.
    """
    scale = splat(v.float_at(row) * np.float32(_kt_scale(block, unit)))
    at, signs = block + 4 + 8 * unit, block + 68
    low = mul(scale, v.magnitude(_from_two(v.word_at(at), v.word_at(at + 2))))
    high = mul(scale, v.magnitude(_from_two(v.word_at(at + 4), v.word_at(at + 6))))
    return (
        v.negate_where_set(low, load_bytes(signs), 1 << unit),
        v.negate_where_set(high, load_bytes(signs + 16), 1 << unit),
    )


@inlined_function
def _iq4_kt_start(block, word, m):
    middle = v.byte_at(block + 96 + (m & 31)) >> (4 * (m >> 5)) & 15
    index = v.byte_at(block + 32 + m) | middle << 8 | (word >> (8 + 3 * (m & 7)) & 7) << 12
    return index + OFFSET + 32768 * (word & 1)


@inlined_function
def _iq4_kt_half(block, word, m):
    starts = v.integer_quarters(
        _iq4_kt_start(block, word, m),
        _iq4_kt_start(block, word, m + 1),
        _iq4_kt_start(block, word, m + 2),
        _iq4_kt_start(block, word, m + 3),
    )
    return _generated(starts, _powers_4())


def iq4_kt(row, block, unit):
    """Return 32 values of an IQ4_KT block of 128 bytes: y = d*(scale - 64) * value; d is in the row
    header.
    """
    word = v.long_at(block + 4 * unit)
    scale = splat(v.float_at(row) * np.float32((word >> 1 & 127) - 64))
    return (
        mul(scale, _iq4_kt_half(block, word, 8 * unit)),
        mul(scale, _iq4_kt_half(block, word, 8 * unit + 4)),
    )


UNITS = {
    "IQ1_KT": iq1_kt,
    "IQ2_KT": iq2_kt,
    "IQ3_KT": iq3_kt,
    "IQ4_KT": iq4_kt,
}
