"""Values of 32 elements of one- and two-bit types. See `units.plain` for what a unit is."""

from __future__ import annotations

import numpy as np

from ....formats.kernel import inlined_function
from .. import vectors as v
from ..vectors import as_floats, bit_and, load_bytes, mul, plus, shift_right, signed, splat


@inlined_function
def _ternary(d, codes):
    """d * (code - 1)."""
    return mul(splat(d), as_floats(signed(plus(codes, -1))))


def q1_0_g128(row, block, unit):
    """Return 32 values of a Q1_0_G128 block of 18 bytes: y = d*(2*q - 1)."""
    d, bits = v.half_at(block), v.long_at(block + 2 + 4 * unit)
    return _ternary(d, v.where_bits(bits, 2)), _ternary(d, v.where_bits(bits >> 16, 2))


@inlined_function
def _four_of_each(at):
    """Two-bit codes of four bytes, each byte's four in order."""
    return v.pairs_in_order(v.long_at(at))


def q2_0(row, block, unit):
    """Return 32 values of a Q2_0 block of 18 bytes: y = d*(q - 1)."""
    d, at = v.half_at(block), block + 2 + 8 * unit
    return _ternary(d, _four_of_each(at)), _ternary(d, _four_of_each(at + 4))


def tq2_0(row, block, unit):
    """Return 32 values of a TQ2_0 block of 66 bytes: y = d*(q - 1)."""
    d, at, by = v.half_at(block + 64), block + 32 * (unit >> 2), 2 * (unit & 3)
    low, high = v.field(load_bytes(at), by, 3), v.field(load_bytes(at + 16), by, 3)
    return _ternary(d, low), _ternary(d, high)


@inlined_function
def _digits(d, bytes, powers):
    """d * (digit - 1) of bytes that hold ternary digits as fractions of 256; powers of 3."""
    shifted = bit_and(v.times(v.as_integers(bytes), powers), 255)
    digits = shift_right(v.times(shifted, _threes()), 8)
    return mul(splat(d), as_floats(plus(digits, -1)))


_threes = v.constant("i32", [3] * v.LANES)
_powers_of_quarters = v.constant("i32", [3 ** (i // 4) for i in range(v.LANES)])
_powers_of_fives = [
    v.constant("i32", [3 ** (4 - i % 5) for i in range(15)] + [3 ** (4 - run)]) for run in range(4)
]
_fives_0, _fives_1, _fives_2, _fives_3 = _powers_of_fives
_POWERS = np.array([1, 3, 9, 27, 81], np.int64)


@inlined_function
def _power(digit):
    return v.integer_halves(_POWERS[digit], _POWERS[digit])


def tq1_0(row, block, unit):
    """Return 32 values of a TQ1_0 block of 54 bytes: y = d*(t - 1)."""
    d = v.half_at(block + 52)
    if unit < 5:
        powers = _power(unit)
        return (
            _digits(d, load_bytes(block), powers),
            _digits(d, load_bytes(block + 16), powers),
        )
    codes = load_bytes(block + 32)
    if unit < 7:
        return _digits(d, codes, _power(2 * unit - 10)), _digits(d, codes, _power(2 * unit - 9))
    last = v.load_4_bytes(block + 48)
    return _digits(d, codes, _power(4)), _digits(d, last, _powers_of_quarters())


def iq1_bn(row, block, unit):
    """Return 32 values of an IQ1_BN block of 13 bytes: y = d*(t - 1); d is in the row header."""
    d, at = v.half_at(row), block + 6 * unit
    low, high = (
        v.load_3_bytes_fivefold(at, block + 12),
        v.load_3_bytes_fivefold(at + 3, block + 12),
    )
    return (
        _digits(d, low, v.either(unit, _fives_2(), _fives_0())),
        _digits(d, high, v.either(unit, _fives_3(), _fives_1())),
    )


def iq2_bn(row, block, unit):
    """Return 32 values of an IQ2_BN block of 16 bytes: y = d*(q - 1); d is in the row header."""
    d, codes = v.float_at(row), load_bytes(block)
    return _ternary(d, v.field(codes, 4 * unit, 3)), _ternary(d, v.field(codes, 4 * unit + 2, 3))


UNITS = {
    "Q1_0_G128": q1_0_g128,
    "Q2_0": q2_0,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
    "IQ1_BN": iq1_bn,
    "IQ2_BN": iq2_bn,
}
