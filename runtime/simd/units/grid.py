"""Values of 32 elements of codebook types, and of IQ4_XS. See `units.plain` for what a unit is."""

from __future__ import annotations

import numpy as np

from ....formats import grids
from ....formats.codecs.grid import even_signs
from ....formats.kernel import inlined_function
from .. import vectors as v
from ..vectors import as_floats, bit_and, load_bytes, mul, shift_right, signed, splat
from .k import nibble_at
from .plain import iq4nl_table


def _rows(grid: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(grid.astype(np.int8))


_IQ2_XXS, _IQ2_XS, _IQ2_S, _IQ1_S = (
    _rows(grid)
    for grid in (grids.IQ2_XXS_GRID, grids.IQ2_XS_GRID, grids.IQ2_S_GRID, grids.IQ1_S_GRID)
)
_IQ3_XXS, _IQ3_S = _rows(grids.IQ3_XXS_GRID), _rows(grids.IQ3_S_GRID)


@inlined_function
def _two_rows(grid, a, b):
    """Two rows of eight of a grid."""
    at = grid.ctypes.data
    return as_floats(signed(v.load_8_bytes_twice(at + 8 * a, at + 8 * b)))


@inlined_function
def _four_rows(grid, a, b, c, d):
    """Four rows of four of a grid."""
    at = grid.ctypes.data
    return as_floats(signed(v.load_4_bytes_each(at + 4 * a, at + 4 * b, at + 4 * c, at + 4 * d)))


@inlined_function
def _half_scale(d, nibble, factor):
    return d * (np.float32(0.5) + np.float32(nibble)) * np.float32(factor)


def iq2_xxs(row, block, unit):
    """Return 32 values of an IQ2_XXS block of 66 bytes: y = d*(scale + 0.5)*0.25 * grid * sign."""
    at = block + 2 + 8 * unit
    word = v.long_at(at + 4)
    scale = splat(_half_scale(v.half_at(block), word >> 28, 0.25))
    low = even_signs(word & 127) | even_signs(word >> 7 & 127) << 8
    high = even_signs(word >> 14 & 127) | even_signs(word >> 21 & 127) << 8
    return (
        v.negate_where(mul(scale, _two_rows(_IQ2_XXS, v.byte_at(at), v.byte_at(at + 1))), low),
        v.negate_where(mul(scale, _two_rows(_IQ2_XXS, v.byte_at(at + 2), v.byte_at(at + 3))), high),
    )


@inlined_function
def _iq2_xs_half(block, m, nibble):
    a, b = v.word_at(block + 2 + 2 * m), v.word_at(block + 4 + 2 * m)
    scale = splat(_half_scale(v.half_at(block), nibble, 0.25))
    signs = even_signs(a >> 9) | even_signs(b >> 9) << 8
    return v.negate_where(mul(scale, _two_rows(_IQ2_XS, a & 511, b & 511)), signs)


def iq2_xs(row, block, unit):
    """Return 32 values of an IQ2_XS block of 74 bytes: y = d*(scale + 0.5)*0.25 * grid * sign."""
    byte = v.byte_at(block + 66 + unit)
    return (
        _iq2_xs_half(block, 4 * unit, byte & 15),
        _iq2_xs_half(block, 4 * unit + 2, byte >> 4),
    )


def iq2_s(row, block, unit):
    """Return 32 values of an IQ2_S block of 82 bytes: y = d*(scale + 0.5)*0.25 * grid * sign."""
    d, scales, high = v.half_at(block), v.byte_at(block + 74 + unit), v.byte_at(block + 66 + unit)
    at = block + 2 + 4 * unit
    a, b = v.byte_at(at) | (high & 3) << 8, v.byte_at(at + 1) | (high >> 2 & 3) << 8
    c, e = v.byte_at(at + 2) | (high >> 4 & 3) << 8, v.byte_at(at + 3) | (high >> 6) << 8
    low, upper = v.word_at(block + 34 + 4 * unit), v.word_at(block + 36 + 4 * unit)
    first, second = _half_scale(d, scales & 15, 0.25), _half_scale(d, scales >> 4, 0.25)
    return (
        v.negate_where(mul(splat(first), _two_rows(_IQ2_S, a, b)), low),
        v.negate_where(mul(splat(second), _two_rows(_IQ2_S, c, e)), upper),
    )


def iq3_xxs(row, block, unit):
    """Return 32 values of an IQ3_XXS block of 98 bytes: y = d*(scale + 0.5)*0.5 * grid * sign."""
    word, at = v.long_at(block + 66 + 4 * unit), block + 2 + 8 * unit
    scale = splat(_half_scale(v.half_at(block), word >> 28, 0.5))
    low = even_signs(word & 127) | even_signs(word >> 7 & 127) << 8
    high = even_signs(word >> 14 & 127) | even_signs(word >> 21 & 127) << 8
    b = v.integer_at(at)
    return (
        v.negate_where(
            mul(
                scale,
                _four_rows(_IQ3_XXS, b & 255, b >> 8 & 255, b >> 16 & 255, b >> 24 & 255),
            ),
            low,
        ),
        v.negate_where(
            mul(
                scale,
                _four_rows(_IQ3_XXS, b >> 32 & 255, b >> 40 & 255, b >> 48 & 255, b >> 56 & 255),
            ),
            high,
        ),
    )


def iq3_s(row, block, unit):
    """Return 32 values of an IQ3_S block of 110 bytes: y = d*(2*scale + 1) * grid * sign."""
    scale = splat(v.half_at(block) * np.float32(1 + 2 * nibble_at(block + 106, unit)))
    b, n = v.integer_at(block + 2 + 8 * unit), v.byte_at(block + 66 + unit) << 8
    low = _four_rows(
        _IQ3_S,
        b & 255 | n & 256,
        b >> 8 & 255 | n >> 1 & 256,
        b >> 16 & 255 | n >> 2 & 256,
        b >> 24 & 255 | n >> 3 & 256,
    )
    high = _four_rows(
        _IQ3_S,
        b >> 32 & 255 | n >> 4 & 256,
        b >> 40 & 255 | n >> 5 & 256,
        b >> 48 & 255 | n >> 6 & 256,
        b >> 56 & 255 | n >> 7 & 256,
    )
    signs = v.long_at(block + 74 + 4 * unit)
    return v.negate_where(mul(scale, low), signs), v.negate_where(mul(scale, high), signs >> 16)


@inlined_function
def _eighth(negative):
    return np.float32(-0.125) if negative else np.float32(0.125)


@inlined_function
def _shifted(scale, a, b, shift):
    return mul(scale, v.add(_two_rows(_IQ1_S, a, b), shift))


@inlined_function
def _iq1_s_values(d, at, word):
    scale, shift = splat(d * np.float32(2 * (word >> 12 & 7) + 1)), splat(_eighth(word >> 15))
    a, b = v.byte_at(at) | (word & 7) << 8, v.byte_at(at + 1) | (word >> 3 & 7) << 8
    c, e = v.byte_at(at + 2) | (word >> 6 & 7) << 8, v.byte_at(at + 3) | (word >> 9 & 7) << 8
    return _shifted(scale, a, b, shift), _shifted(scale, c, e, shift)


def iq1_s(row, block, unit):
    """Return 32 values of an IQ1_S block of 50 bytes: y = d*(2*scale + 1) * (grid ± 1/8)."""
    word = v.word_at(block + 34 + 2 * unit)
    return _iq1_s_values(v.half_at(block), block + 2 + 4 * unit, word)


def iq1_s_r4(row, block, unit):
    """Return 32 values of an IQ1_S_R4 block of 6 bytes: y = d*(2*scale + 1) * (grid ± 1/8); d is in
    the row header.
    """
    return _iq1_s_values(v.half_at(row), block, v.word_at(block + 4))


@inlined_function
def _iq1_m_half(scale, at, nibbles):
    shift = v.halves(_eighth(nibbles >> 3 & 1), _eighth(nibbles >> 7 & 1))
    a, b = v.byte_at(at) | (nibbles & 7) << 8, v.byte_at(at + 1) | (nibbles >> 4 & 7) << 8
    return _shifted(splat(scale), a, b, shift)


def iq1_m(row, block, unit):
    """Return 32 values of an IQ1_M block of 56 bytes: y = d*(2*scale + 1) * (grid ± 1/8)."""
    d = v.half_of_nibbles(block + 48)
    threes = v.word_at(block + 48 + 2 * (unit >> 1)) >> (6 * (unit & 1))
    at, nibbles = block + 4 * unit, block + 32 + 2 * unit
    first = d * np.float32(2 * (threes & 7) + 1)
    second = d * np.float32(2 * (threes >> 3 & 7) + 1)
    return (
        _iq1_m_half(first, at, v.byte_at(nibbles)),
        _iq1_m_half(second, at + 2, v.byte_at(nibbles + 1)),
    )


def iq1_m_r4(row, block, unit):
    """Return 32 values of an IQ1_M_R4 block of 7 bytes: y = d*scale * (grid ± 1/8); d is in the row
    header.
    """
    d, scales = v.half_at(row), v.byte_at(block + 6)
    first, second = d * np.float32(scales & 15), d * np.float32(scales >> 4)
    return (
        _iq1_m_half(first, block, v.byte_at(block + 4)),
        _iq1_m_half(second, block + 2, v.byte_at(block + 5)),
    )


@inlined_function
def iq4_xs_values(row, block, unit):
    """Return the entries of IQ4NL_VALUES for 32 codes of an IQ4_XS block, without d and scales: two
    vectors of 16 float32.
    """
    codes, table = load_bytes(block + 8 + 16 * unit), iq4nl_table()
    return (
        as_floats(v.lookup(bit_and(codes, 15), table)),
        as_floats(v.lookup(shift_right(codes, 4), table)),
    )


def iq4_xs(row, block, unit):
    """Return 32 values of an IQ4_XS block of 136 bytes: y = d*(scale - 32) * IQ4NL_VALUES[q]."""
    high = v.word_at(block + 2) >> (2 * unit) & 3
    scale = np.float32((nibble_at(block + 4, unit) | high << 4) - 32)
    scale = splat(v.half_at(block) * scale)
    low, high = iq4_xs_values(row, block, unit)
    return mul(scale, low), mul(scale, high)


UNITS = {
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "IQ1_S_R4": iq1_s_r4,
    "IQ1_M_R4": iq1_m_r4,
    "IQ4_XS": iq4_xs,
}
