"""Codes of one- and two-bit types, see `units.ternary`: digits, one more than values."""

from __future__ import annotations

from .build import Build


def _q1_0_scales(w: Build, row, at):
    return w.scales(w.halves_of_blocks(at, 0, 2), -1)


def _q1_0(w, row, at, step):
    at = w.with_number("add", at, (step >> 1) * w.block_bytes)
    return w.where(w.flags(w.number(at, 2 + 8 * (step & 1), 8)), 2)


def _q2_0_scales(w, row, at):
    return w.scales(w.halves_of_blocks(at, 0, 4), -1)


def _q2_0(w, row, at, step):
    """Two-bit codes of bytes, each byte's four in order."""
    codes = w.repeated(w.bytes(at, step * w.block_bytes + 2), 4)
    found = [w.fields(codes, by, 3) for by in (0, 2, 4, 6)]
    even = w.shuffled(found[0], found[1], [i + 64 * (i % 2) for i in range(64)])
    odd = w.shuffled(found[2], found[3], [i + 64 * (i % 2) for i in range(64)])
    return w.shuffled(even, odd, [i + 64 * (i // 2 % 2) for i in range(64)])


def _tq2_0_scales(w, row, at):
    return w.scales(w.half(at, 64), -1)


def _tq2_0(w, row, at, step):
    codes = w.bytes(at, 32 * (step >> 1), 32)
    low = 4 * (step & 1)
    return w.fields(w.pieces(codes, [0, 1, 0, 1]), [low, low + 2], 3)


def _digits(w, codes, powers):
    """Digits of bytes that hold ternary ones as fractions of 256. powers: of 3, for each lane."""
    wide = w.widened(codes, 16)
    wide = w.both(w.ir.mul(wide, w.constant(wide, powers)), 255)
    digits = w.ir.mul(wide, w.constant(wide, 3))
    return w.narrowed(w.ir.lshr(digits, w.constant(digits, 8)))


def _tq1_0_scales(w, row, at):
    return w.scales(w.half(at, 52), -1)


def _tq1_0(w, row, at, step):
    """Elements 32 * k + i, k < 5: digit k of byte i; then 16 * k + i, of 16 bytes; then 4 * k + i,
    k < 4, of the last four.
    """
    if step < 2:
        codes = w.pieces(w.bytes(at, 0, 32), [0, 1, 0, 1])
        return _digits(w, codes, [9**step, 3 * 9**step])
    second, last = w.bytes(at, 32), w.pieces(w.bytes(at, 48, 4), [0] * 4, 4)
    if step == 2:
        first = w.pieces(w.bytes(at, 0, 32), [0, 1])
        codes = w.joined(first, w.pieces(second, [0, 0]))
        return _digits(w, codes, [81, 81, 1, 3])
    codes = w.joined(w.pieces(second, [0, 0]), w.joined(second, last))
    powers = [9] * 16 + [27] * 16 + [81] * 16 + [3 ** (i // 4) for i in range(16)]
    return _digits(w, codes, powers)


def _iq1_bn_scales(w, row, at):
    return w.scales(w.half(row, 0), -1)


def _iq1_bn(w, row, at, step):
    """Five digits of each of three bytes, and one of the last byte, four times."""
    offset = step * w.block_bytes
    both = w.joined(w.bytes(at, offset, 8), w.bytes(at, offset + 5, 8))
    lanes, powers = [], []
    for run in range(4):
        lanes += [b if b < 8 else b + 3 for b in (3 * run + i // 5 for i in range(15))]
        powers += [3 ** (4 - i % 5) for i in range(15)]
        lanes.append(15)
        powers.append(3 ** (4 - run))
    return _digits(w, w.shuffled(both, both, lanes), powers)


def _iq2_bn_scales(w, row, at):
    return w.scales(w.float(row, 0), -1)


def _iq2_bn(w, row, at, step):
    codes = w.bytes(at, step * w.block_bytes)
    return w.fields(w.pieces(codes, [0] * 4), [0, 2, 4, 6], 3)


CODES = {
    "Q1_0_G128": (_q1_0_scales, _q1_0),
    "Q2_0": (_q2_0_scales, _q2_0),
    "TQ1_0": (_tq1_0_scales, _tq1_0),
    "TQ2_0": (_tq2_0_scales, _tq2_0),
    "IQ1_BN": (_iq1_bn_scales, _iq1_bn),
    "IQ2_BN": (_iq2_bn_scales, _iq2_bn),
}
