"""Codes of codebook types, see `units.grid`: 128 plus a value, or minus it where a sign is set."""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from ....formats import grids
from ..vectors.core import FLOAT, INT8, INT16, INT32, INT64, called, has_feature
from .build import Build


def _rows(grid: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(grid.astype(np.int8))


_IQ2_XXS, _IQ2_XS, _IQ2_S = (
    _rows(grid) for grid in (grids.IQ2_XXS_GRID, grids.IQ2_XS_GRID, grids.IQ2_S_GRID)
)
_IQ3_XXS, _IQ3_S = _rows(grids.IQ3_XXS_GRID), _rows(grids.IQ3_S_GRID)
_IQ1_S = _rows(8 * grids.IQ1_S_GRID.astype(int) + 128)  # in eighths, as shifts are
_BYTES = 0x0101010101010101


def _numbers(w: Build, codes, bits=None):
    """int32 numbers of bytes, and of bits above."""
    numbers = w.widened(codes, 32)
    return numbers if bits is None else w.or_(numbers, bits)


def _even_signs(w, sevens):
    """Signs of 64 elements from seven bits for each 8, in bytes of a number: the eighth bit makes
    the number of set bits even.
    """
    parity = w.ir.xor(sevens, w.with_number("lshr", sevens, 4))
    parity = w.ir.xor(parity, w.with_number("lshr", parity, 2))
    parity = w.ir.xor(parity, w.with_number("lshr", parity, 1))
    parity = w.with_number("shl", w.with_number("and_", parity, _BYTES), 7)
    return w.flags(w.or_(sevens, parity))


def _sevens(w, low, high):
    """The lowest 28 bits of two numbers, seven in each byte."""
    low, high = (w.with_number("and_", x, (1 << 28) - 1) for x in (low, high))
    both = w.or_(low, w.with_number("shl", high, 28))
    if has_feature("bmi2"):
        return called(w.ir, "llvm.x86.bmi.pdep.64", INT64, both, INT64(127 * _BYTES))
    found = INT64(0)
    for i in range(8):
        seven = w.with_number("and_", w.with_number("lshr", both, 7 * i), 127)
        found = w.or_(found, w.with_number("shl", seven, 8 * i))
    return found


def _half_scales(w, d, nibbles, factor):
    """d * (nibble + 1/2) * factor."""
    numbers = w.floats(nibbles)
    half = ir.Constant(ir.VectorType(FLOAT, numbers.type.count), [0.5] * numbers.type.count)
    return w.scales(w.times(factor, w.times(d, w.ir.fadd(half, numbers))), -128)


def _iq2_xxs_scales(w, row, at):
    words = w.longs(at, 2, 16)
    words = w.shuffled(words, words, range(1, 16, 2))
    return _half_scales(w, w.half(at, 0), w.fields(words, 28, 15), 0.25)


def _iq2_xxs(w, row, at, step):
    codes = w.bytes(at, 2 + 16 * step)
    codes = w.pieces(codes, [0, 2], 4)
    signs = _sevens(w, *(w.number(at, 6 + 16 * step + i, 4) for i in (0, 8)))
    values = w.rows_of(w.table(_IQ2_XXS), _numbers(w, codes), 8)
    return w.negative_where(_even_signs(w, signs), values)


def _iq2_xs_scales(w, row, at):
    return _half_scales(w, w.half(at, 0), w.nibbles_in_order(w.bytes(at, 66, 8)), 0.25)


def _iq2_xs(w, row, at, step):
    words = w.words(at, 2 + 16 * step, 8)
    sevens = w.ir.bitcast(w.narrowed(w.fields(words, 9, 127)), INT64)
    values = w.rows_of(w.table(_IQ2_XS), w.widened(w.both(words, 511), 32), 8)
    return w.negative_where(_even_signs(w, sevens), values)


def _iq2_s_scales(w, row, at):
    return _half_scales(w, w.half(at, 0), w.nibbles_in_order(w.bytes(at, 74, 8)), 0.25)


def _above(w, number, bits, n):
    """`bits` bits for each of n numbers, above their bytes."""
    lanes = w.splat(w.ir.trunc(number, INT32), n)
    lanes = w.fields(lanes, [bits * i for i in range(n)], (1 << bits) - 1)
    return w.ir.shl(lanes, w.constant(lanes, 8))


def _iq2_s(w, row, at, step):
    above = _above(w, w.number(at, 66 + 2 * step, 2), 2, 8)
    numbers = _numbers(w, w.bytes(at, 2 + 8 * step, 8), above)
    signs = w.flags(w.number(at, 34 + 8 * step, 8))
    return w.negative_where(signs, w.rows_of(w.table(_IQ2_S), numbers, 8))


def _iq3_xxs_scales(w, row, at):
    return _half_scales(w, w.half(at, 0), w.fields(w.longs(at, 66, 8), 28, 15), 0.5)


def _iq3_xxs(w, row, at, step):
    signs = _sevens(w, *(w.number(at, 66 + 8 * step + i, 4) for i in (0, 4)))
    values = w.rows_of(w.table(_IQ3_XXS), _numbers(w, w.bytes(at, 2 + 16 * step)), 4)
    return w.negative_where(_even_signs(w, signs), values)


def _iq3_s_scales(w, row, at):
    codes = w.plus(w.raised(w.nibbles_in_order(w.bytes(at, 106, 4)), 1), 1)
    return w.scales(w.times(w.half(at, 0), w.floats(codes)), -128)


def _iq3_s(w, row, at, step):
    ninth = w.where(w.flags(w.number(at, 66 + 2 * step, 2), 16), 256, bits=32)
    numbers = _numbers(w, w.bytes(at, 2 + 16 * step), ninth)
    signs = w.flags(w.number(at, 74 + 8 * step, 8))
    return w.negative_where(signs, w.rows_of(w.table(_IQ3_S), numbers, 4))


def _shifted(w, numbers, negative):
    """Values of IQ1_S in eighths plus 128, each 8 plus one, or less one where a flag is set."""
    values = w.rows_of(w.table(_IQ1_S), numbers, 8)
    shifts = w.where(negative, -1, _BYTES, 64)
    return w.ir.add(values, w.ir.bitcast(shifts, values.type))


def _eighths(w, d, codes):
    """Scales d * code, in eighths."""
    return w.scales(w.times(0.125, w.times(d, w.floats(codes))), -128)


def _iq1_s_scales(w, row, at):
    codes = w.plus(w.doubled(w.fields(w.words(at, 34, 8), 12, 7)), 1)
    return _eighths(w, w.half(at, 0), codes)


def _iq1_s_step(w, codes, low, high):
    """low, high: the words of two units, with three bits for each code and the shift's sign."""
    lanes = w.joined(*(w.splat(w.ir.trunc(word, INT32), 4) for word in (low, high)))
    above = w.fields(lanes, [0, 3, 6, 9] * 2, 7)
    above = w.ir.shl(above, w.constant(above, 8))
    return _shifted(w, _numbers(w, codes, above), w.has_bits(lanes, 1 << 15))


def _iq1_s(w, row, at, step):
    words = (w.number(at, 34 + 4 * step + i, 2) for i in (0, 2))
    return _iq1_s_step(w, w.bytes(at, 2 + 8 * step, 8), *words)


def _iq1_s_r4_scales(w, row, at):
    words = w.of_blocks(at, 4, INT16, 8)
    codes = w.plus(w.doubled(w.fields(words, 12, 7)), 1)
    return _eighths(w, w.half(row, 0), codes)


def _iq1_s_r4(w, row, at, step):
    at = w.with_number("add", at, 2 * step * w.block_bytes)
    words = (w.number(at, 4 + i, 2) for i in (0, w.block_bytes))
    return _iq1_s_step(w, w.bytes_of_blocks(at, 0, 4), *words)


def _half_of_nibbles(w, words):
    """An IEEE half of the highest nibbles of four words."""
    bits = INT16(0)
    for i in range(4):
        word = w.ir.and_(w.ir.extract_element(words, INT32(i)), INT16(-4096))
        bits = w.ir.or_(bits, w.ir.lshr(word, INT16(12 - 4 * i)))
    return w.ir.fpext(w.ir.bitcast(bits, ir.HalfType()), FLOAT)


def _iq1_m_scales(w, row, at):
    words = w.words(at, 48, 4)
    codes = w.fields(w.repeated(words, 4), [0, 3, 6, 9] * 4, 7)
    codes = w.plus(w.doubled(codes), 1)
    return _eighths(w, _half_of_nibbles(w, words), codes)


def _iq1_m_step(w, codes, nibbles):
    """nibbles: a number with four bits for each code, the highest the shift's sign."""
    lanes = w.fields(w.splat(w.ir.trunc(nibbles, INT32), 8), [4 * i for i in range(8)], 15)
    above = w.both(lanes, 7)
    above = w.ir.shl(above, w.constant(above, 8))
    return _shifted(w, _numbers(w, codes, above), w.has_bits(lanes, 8))


def _iq1_m(w, row, at, step):
    return _iq1_m_step(w, w.bytes(at, 8 * step, 8), w.number(at, 32 + 4 * step, 4))


def _iq1_m_r4_scales(w, row, at):
    codes = w.nibbles_in_order(w.of_blocks(at, 6, INT8, 8))
    return _eighths(w, w.half(row, 0), codes)


def _iq1_m_r4(w, row, at, step):
    at = w.with_number("add", at, 2 * step * w.block_bytes)
    high = w.with_number("shl", w.number(at, w.block_bytes + 4, 2), 16)
    return _iq1_m_step(w, w.bytes_of_blocks(at, 0, 4), w.or_(w.number(at, 4, 2), high))


CODES = {
    "IQ2_XXS": (_iq2_xxs_scales, _iq2_xxs),
    "IQ2_XS": (_iq2_xs_scales, _iq2_xs),
    "IQ2_S": (_iq2_s_scales, _iq2_s),
    "IQ3_XXS": (_iq3_xxs_scales, _iq3_xxs),
    "IQ3_S": (_iq3_s_scales, _iq3_s),
    "IQ1_S": (_iq1_s_scales, _iq1_s),
    "IQ1_M": (_iq1_m_scales, _iq1_m),
    "IQ1_S_R4": (_iq1_s_r4_scales, _iq1_s_r4),
    "IQ1_M_R4": (_iq1_m_r4_scales, _iq1_m_r4),
}
