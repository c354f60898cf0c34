"""Codes of trellis types, see `units.trellis`: the generator's sums of four bytes, without the 126
that is subtracted from them.
"""

from __future__ import annotations

from llvmlite import ir

from ....formats.codecs.trellis import MULTIPLIER, OFFSET
from ....formats.tables import IQ4NL_VALUES
from ..vectors.core import INT8
from .build import STEP, Build

_MIDDLE = 126
_NONLINEAR = [int(x) for x in IQ4NL_VALUES]


def _generated(w: Build, starts):
    """64 codes from 8 or 16 starts."""
    length = 64 // starts.type.count
    powers = [pow(MULTIPLIER, i % length + 1, 2**32) for i in range(16)]
    n, found = 16 // length, []
    for i in range(4):
        part = w.repeated(w.shuffled(starts, starts, range(n * i, n * i + n)), length)
        words = w.both(w.ir.mul(part, w.constant(part, powers)), 0x3F3F3F3F)
        codes = w.ir.bitcast(words, ir.VectorType(INT8, STEP))
        found.append(w.narrowed(w.dots(codes, w.constant(codes, 1))))
    return w.joined(w.joined(*found[:2]), w.joined(*found[2:]))


def _four_bit_scales(w, row, at):
    """Nibble u // 4 of byte u % 4."""
    return w.fields(w.pieces(w.bytes(at, 0, 4), [0, 0], 4), [0, 4], 15)


def _nonlinear(w, row, codes):
    """Scales d * IQ4NL_VALUES[code] of 8 codes."""
    values = w.looked_up(w.pieces(codes, [0] * 8, 8), _NONLINEAR)
    values = w.floats(w.shuffled(values, values, range(8)), signed=True)
    return w.scales(w.times(w.float(row, 0), values), -_MIDDLE)


def _iq1_kt_scales(w, row, at):
    return _nonlinear(w, row, w.fields(w.bytes(at, 0, 8), 0, 15))


def _iq1_kt(w, row, at, step):
    """Groups 8 * step + j of 8 elements, two units of four."""
    low = w.widened(w.bytes(at, 8 + 8 * step, 8), 32)
    middle = w.widened(w.bytes(at, 40 + 8 * (step & 1), 8), 32)
    middle = w.fields(middle, 4 * (step >> 1), 15)
    top = w.repeated(w.widened(w.bytes(at, 2 * step, 2), 32), 4)
    top = w.fields(top, [4, 5, 6, 7] * 2, 1)
    middle, top = (w.ir.shl(x, w.constant(x, by)) for x, by in ((middle, 8), (top, 12)))
    return _generated(w, w.plus(w.or_(low, middle, top), OFFSET))


def _iq2_kt_scales(w, row, at):
    return _nonlinear(w, row, _four_bit_scales(w, row, at))


def _from_words(w, at, step):
    return _generated(w, w.plus(w.widened(w.words(at, 4 + 16 * step, 8), 32), OFFSET))


def _iq2_kt(w, row, at, step):
    return _from_words(w, at, step)


def _iq3_kt_scales(w, row, at):
    codes = w.floats(_four_bit_scales(w, row, at))
    return w.scales(w.times(w.float(row, 0), codes), -128)


def _iq3_kt(w, row, at, step):
    sums = _from_words(w, at, step)
    middle = w.constant(sums, _MIDDLE)
    below = w.ir.icmp_unsigned("<", sums, middle)
    values = w.ir.select(below, w.ir.sub(middle, sums), w.ir.sub(sums, middle))
    signs = w.pieces(w.bytes(at, 68, 32), [0, 1, 0, 1])
    return w.negative_where(w.has_bits(signs, [1 << (2 * step), 2 << (2 * step)]), values)


def _iq4_kt_scales(w, row, at):
    codes = w.plus(w.fields(w.longs(at, 0, 8), 1, 127), -64)
    return w.scales(w.times(w.float(row, 0), w.floats(codes)), -_MIDDLE)


def _iq4_kt(w, row, at, step):
    """Groups 16 * step + j of 4 elements, two units of eight."""
    words = w.repeated(w.longs(at, 8 * step, 2), 8)
    low = w.widened(w.bytes(at, 32 + 16 * step), 32)
    middle = w.fields(w.widened(w.bytes(at, 96 + 16 * (step & 1)), 32), 4 * (step >> 1), 15)
    top = w.fields(words, [8 + 3 * i for i in range(8)] * 2, 7)
    other = w.both(words, 1)
    middle, top, other = (
        w.ir.shl(x, w.constant(x, by)) for x, by in ((middle, 8), (top, 12), (other, 15))
    )
    starts = w.ir.add(w.plus(w.or_(low, middle, top), OFFSET), other)
    return _generated(w, starts)


CODES = {
    "IQ1_KT": (_iq1_kt_scales, _iq1_kt),
    "IQ2_KT": (_iq2_kt_scales, _iq2_kt),
    "IQ3_KT": (_iq3_kt_scales, _iq3_kt),
    "IQ4_KT": (_iq4_kt_scales, _iq4_kt),
}
