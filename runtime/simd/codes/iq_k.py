"""Codes of the IQ_K, IQ_KS and IQ2_KL types and IQ4_XS, see `units.iq_k`,
`units.iq_ks` and `units.grid`.

Most types choose one of two tables for a group. The second one is the first plus a constant, which
is added to the shift of the group.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from ....formats import tables
from ..vectors.core import FLOAT, INT8, INT32
from .build import Build
from .k import bits_of_bytes, nibbles, pairs
from .plain import _IQ4NL


def _first(values) -> list[int]:
    """The first of two tables, plus 128."""
    values = np.asarray(values).astype(int)
    return (values[: len(values) // 2] + 128).tolist()


def _offset(values) -> int:
    """What the second of two tables has more."""
    return int(values[len(values) // 2] - values[0])


_IQ2, _IQ3, _IQ4, _IQ5, _IQ6 = (
    _first(values)
    for values in (
        tables.IQ2NL_VALUES,
        tables.IQ3NL_VALUES,
        tables.IQ4K_VALUES,
        tables.IQ5NL_VALUES,
        tables.IQ6NL_VALUES,
    )
)
_SHIFT_2, _SHIFT_3, _SHIFT_4, _SHIFT_5, _SHIFT_6 = (
    _offset(values)
    for values in (
        tables.IQ2NL_VALUES,
        tables.IQ3NL_VALUES,
        tables.IQ4K_VALUES,
        tables.IQ5NL_VALUES,
        tables.IQ6NL_VALUES,
    )
)
# Pairs of values for a code, the first and the second of each.
_IQ2_KL = (np.asarray(tables.IQ2KL_VALUES).astype(int).T.ravel() + 128).tolist()


def _with_tables(w: Build, factors, flags, shift):
    """Scales of groups, of which those with a flag have the second table."""
    type = ir.VectorType(FLOAT, factors.type.count)
    second, first = (ir.Constant(type, [float(x)] * type.count) for x in (shift - 128, -128))
    chosen = w.ir.select(flags, second, first)
    return w.scales(factors, shifts=w.ir.fmul(factors, chosen))


def _pairs_of_bits(w, number, n):
    """n two-bit numbers, the lowest first."""
    lanes = w.splat(w.ir.trunc(number, INT32), n)
    return w.narrowed(w.fields(lanes, [2 * i for i in range(n)], 3))


def _iq2_k_scales(w, row, at):
    codes = w.plus(w.nibbles_in_order(w.bytes(at, 4, 8)), -8)
    factors = w.times(w.half(at, 0), w.floats(codes, signed=True))
    return _with_tables(w, factors, w.flags(w.number(at, 2, 2), 16), _SHIFT_2)


def _iq2_k(w, row, at, step):
    return w.looked_up(pairs(w, at, 12, step), _IQ2)


def _iq3_k_scales(w, row, at):
    nibbles = w.nibbles_in_order(w.bytes(at, 6, 8))
    magnitudes = w.floats(w.plus(w.raised(nibbles, 1), 1))
    negative = w.flags(w.number(at, 4, 2), 16)
    signed = w.ir.select(negative, w.ir.fneg(magnitudes), magnitudes)
    factors = w.times(w.half(at, 0), signed)
    return _with_tables(w, factors, w.flags(w.number(at, 2, 2), 16), _SHIFT_3)


def _iq3_k(w, row, at, step):
    codes = w.or_(pairs(w, at, 14, step), bits_of_bytes(w, at, 78, step, 2))
    return w.looked_up(codes, _IQ3)


def _six_bits(w, at, offset):
    """Scales of IQ4_K and IQ5_K."""
    high = w.raised(_pairs_of_bits(w, w.number(at, 4, 4), 16), 4)
    codes = w.plus(w.or_(w.nibbles_in_order(w.bytes(at, 8, 8)), high), -32)
    factors = w.times(w.half(at, 0), w.floats(codes, signed=True))
    return _with_tables(w, factors, w.flags(w.number(at, 2, 2), 16), offset)


def _iq4_k_scales(w, row, at):
    return _six_bits(w, at, _SHIFT_4)


def _four_bits(w, at, offset, step, table):
    """16 bytes for each 32 elements, the low nibbles first."""
    codes = w.pieces(w.bytes(at, offset + 32 * step, 32), [0, 0, 1, 1])
    return w.looked_up(w.fields(codes, [0, 4, 0, 4], 15), table)


def _iq4_k(w, row, at, step):
    return _four_bits(w, at, 16, step, _IQ4)


def _iq5_k_scales(w, row, at):
    return _six_bits(w, at, _SHIFT_5)


def _iq5_k(w, row, at, step):
    codes = w.or_(nibbles(w, at, 16, step), bits_of_bytes(w, at, 144, step, 4))
    return w.looked_up(codes, _IQ5)


def _iq6_k_scales(w, row, at):
    factors = w.times(w.half(at, 0), w.floats(w.bytes(at, 4), signed=True))
    return _with_tables(w, factors, w.flags(w.number(at, 2, 2), 16), _SHIFT_6)


def _iq6_k(w, row, at, step):
    codes = w.or_(nibbles(w, at, 20, step), w.raised(pairs(w, at, 148, step), 4))
    return w.looked_up(codes, _IQ6)


def _split_nibbles(w, at, offset):
    """Nibble u // 4 of byte u % 4, of 8 units."""
    return w.fields(w.pieces(w.bytes(at, offset, 4), [0, 0], 4), [0, 4], 15)


def _iq2_ks_scales(w, row, at):
    extra = w.number(at, 0, 2)
    fifth = w.where(w.flags(w.with_number("lshr", extra, 8), 8), 16)
    codes = w.plus(w.or_(w.nibbles_in_order(w.bytes(at, 2, 4)), fifth), -16)
    factors = w.times(w.half(row, 0), w.floats(codes, signed=True))
    return _with_tables(w, factors, w.flags(extra, 8), _SHIFT_2)


def _iq2_ks(w, row, at, step):
    return w.looked_up(pairs(w, at, 6, step), _IQ2)


def _iq3_ks_scales(w, row, at):
    extra = w.number(at, 0, 2)
    fifth = w.where(w.flags(extra, 8), 16)
    codes = w.plus(w.or_(_split_nibbles(w, at, 2), fifth), -16)
    factors = w.times(w.half(row, 0), w.floats(codes, signed=True))
    return _with_tables(w, factors, w.flags(w.with_number("lshr", extra, 8), 8), _SHIFT_3)


def _iq3_ks(w, row, at, step):
    codes = w.or_(pairs(w, at, 6, step), bits_of_bytes(w, at, 70, step, 2))
    return w.looked_up(codes, _IQ3)


def _seven_bits(w, row, codes, offset):
    """Scales of IQ4_KS, IQ4_KSS and IQ5_KS, from a byte for each 32 elements."""
    wide = w.plus(w.both(w.widened(codes, 32), 254), -127)
    factors = w.times(w.float(row, 0), w.floats(wide))
    return _with_tables(w, factors, w.has_bits(codes, 1), offset)


def _iq4_ks_scales(w, row, at):
    return _seven_bits(w, row, w.bytes(at, 0, 8), _SHIFT_4)


def _iq4_ks(w, row, at, step):
    return _four_bits(w, at, 8, step, _IQ4)


def _iq4_kss_scales(w, row, at):
    """A byte's bits are the lowest ones of eight words."""
    found = []
    for offset in (0, 64):
        flags = w.has_bits(w.words(at, offset, 32), 1)
        bits = w.ir.bitcast(flags, INT32)
        found.append(w.ir.bitcast(bits, ir.VectorType(INT8, 4)))
    return _seven_bits(w, row, w.joined(*found), _SHIFT_4)


def _iq4_kss(w, row, at, step):
    words = w.both(w.words(at, 32 * step, 16), -2)
    words = w.ir.xor(words, w.ir.lshr(words, w.constant(words, 1)))
    codes = w.pieces(w.ir.bitcast(words, ir.VectorType(INT8, 32)), [0, 0, 1, 1])
    return w.looked_up(w.fields(codes, [0, 4, 0, 4], 15), _IQ4)


def _iq5_ks_scales(w, row, at):
    return _seven_bits(w, row, w.bytes(at, 0, 8), _SHIFT_5)


def _iq5_ks(w, row, at, step):
    codes = w.or_(nibbles(w, at, 8, step), bits_of_bytes(w, at, 136, step, 4))
    return w.looked_up(codes, _IQ5)


def _iq2_kl_scales(w, row, at):
    high = w.raised(_pairs_of_bits(w, w.number(at, 0, 2), 8), 4)
    codes = w.plus(w.or_(_split_nibbles(w, at, 2), high), -32)
    return w.scales(w.times(w.half(row, 0), w.floats(codes, signed=True)), -128)


def _iq2_kl(w, row, at, step):
    codes = w.pieces(w.bytes(at, 6 + 16 * step), [0, 0])
    fifth = w.pieces(w.bytes(at, 70), [0, 0])
    fifth = w.where(w.has_bits(fifth, [1 << (2 * step), 2 << (2 * step)]), 16)
    codes = w.repeated(w.or_(w.fields(codes, [0, 4], 15), fifth), 2)
    return w.looked_up(w.plus(codes, [0, 32] * 32), _IQ2_KL)


def _iq4_xs_scales(w, row, at):
    high = w.raised(_pairs_of_bits(w, w.number(at, 2, 2), 8), 4)
    codes = w.plus(w.or_(w.nibbles_in_order(w.bytes(at, 4, 4)), high), -32)
    return w.scales(w.times(w.half(at, 0), w.floats(codes, signed=True)), -128)


def _iq4_xs(w, row, at, step):
    return _four_bits(w, at, 8, step, _IQ4NL)


CODES = {
    "IQ2_K": (_iq2_k_scales, _iq2_k),
    "IQ3_K": (_iq3_k_scales, _iq3_k),
    "IQ4_K": (_iq4_k_scales, _iq4_k),
    "IQ5_K": (_iq5_k_scales, _iq5_k),
    "IQ6_K": (_iq6_k_scales, _iq6_k),
    "IQ2_KS": (_iq2_ks_scales, _iq2_ks),
    "IQ3_KS": (_iq3_ks_scales, _iq3_ks),
    "IQ4_KS": (_iq4_ks_scales, _iq4_ks),
    "IQ4_KSS": (_iq4_kss_scales, _iq4_kss),
    "IQ5_KS": (_iq5_ks_scales, _iq5_ks),
    "IQ2_KL": (_iq2_kl_scales, _iq2_kl),
    "IQ4_XS": (_iq4_xs_scales, _iq4_xs),
}
