"""Codes of K-quants, see `units.k`."""

from __future__ import annotations

from llvmlite import ir

from ..vectors.core import INT8, INT64
from .build import Build


def pairs(w: Build, at, offset, step):
    """Two-bit codes: byte 32 * (unit // 4) + i, bits 2 * (unit % 4)."""
    codes = w.bytes(at, offset + 32 * (step >> 1), 32)
    low = 4 * (step & 1)
    return w.fields(w.pieces(codes, [0, 1, 0, 1]), [low, low + 2], 3)


def bits_of_bytes(w, at, offset, step, place):
    """Bit `unit` of byte i, as bit `place`."""
    codes = w.pieces(w.bytes(at, offset, 32), [0, 1, 0, 1])
    return w.where(w.has_bits(codes, [1 << (2 * step), 2 << (2 * step)]), 1 << place)


def nibbles(w, at, offset, step):
    """Four-bit codes: byte 32 * (unit // 2) + i, the high ones where the unit is odd."""
    codes = w.bytes(at, offset + 32 * step, 32)
    return w.fields(w.pieces(codes, [0, 1, 0, 1]), [0, 4], 15)


def _q2_k_scales(w, row, at):
    codes = w.bytes(at, 0)
    factors = w.times(w.half(at, 80), w.floats(w.both(codes, 15)))
    minima = w.times(w.half(at, 82), w.floats(w.fields(codes, 4, 15)))
    return w.scales(factors, shifts=w.ir.fneg(minima))


def _q2_k(w, row, at, step):
    return pairs(w, at, 16, step)


def _q3_k_scales(w, row, at):
    low = w.fields(w.pieces(w.bytes(at, 96, 8), [0, 0], 8), [0, 4], 15)
    high = w.fields(w.pieces(w.bytes(at, 104, 4), [0] * 4, 4), [0, 2, 4, 6], 3)
    codes = w.plus(w.or_(low, w.raised(high, 4)), -32)
    return w.scales(w.times(w.half(at, 108), w.floats(codes, signed=True)), -4)


def _q3_k(w, row, at, step):
    return w.or_(pairs(w, at, 32, step), bits_of_bytes(w, at, 0, step, 2))


def _six_bits(w, row, at):
    """Q4_K and Q5_K, with four bytes at a time."""

    def joined(low, high, top):
        low = w.with_number("and_", low, 0x3F3F3F3F)
        top = w.with_number("and_", w.with_number("lshr", top, 6), 0x03030303)
        top = w.with_number("shl", top, 4)
        high = w.or_(w.with_number("and_", high, 0x0F0F0F0F), top)
        both = w.or_(low, w.with_number("shl", high, 32))
        return w.floats(w.ir.bitcast(both, ir.VectorType(INT8, 8)))

    a, b, c = (w.number(at, offset, 4) for offset in (4, 8, 12))
    minima = joined(b, w.ir.lshr(c, INT64(4)), b)
    return w.scales(
        w.times(w.half(at, 0), joined(a, c, a)),
        shifts=w.ir.fneg(w.times(w.half(at, 2), minima)),
    )


def _q4_k(w, row, at, step):
    return nibbles(w, at, 16, step)


def _q5_k(w, row, at, step):
    return w.or_(nibbles(w, at, 48, step), bits_of_bytes(w, at, 16, step, 4))


def _q6_k_scales(w, row, at):
    codes = w.floats(w.bytes(at, 192), signed=True)
    return w.scales(w.times(w.half(at, 208), codes), -32)


def _q6_k(w, row, at, step):
    low = w.fields(w.bytes(at, 64 * (step >> 1), 64), 4 * (step & 1), 15)
    return w.or_(low, w.raised(pairs(w, at, 128, step), 4))


CODES = {
    "Q2_K": (_q2_k_scales, _q2_k),
    "Q3_K": (_q3_k_scales, _q3_k),
    "Q4_K": (_six_bits, _q4_k),
    "Q5_K": (_six_bits, _q5_k),
    "Q6_K": (_q6_k_scales, _q6_k),
}
