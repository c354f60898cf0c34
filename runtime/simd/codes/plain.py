"""Codes of types with blocks of 32 or 64, 8-bit types and 4-bit floats; see `units.plain`."""

from __future__ import annotations

from llvmlite import ir

from ....formats.tables import FP4_VALUES, IQ4NL_VALUES
from ..vectors.core import FLOAT, INT8, INT32
from .build import Build

_IQ4NL = [int(x) + 128 for x in IQ4NL_VALUES]
_FP4 = [int(x) + 128 for x in FP4_VALUES]


def _half_scale(shift):
    def scales(w: Build, row, at):
        return w.scales(w.halves_of_blocks(at, 0), shift)

    return scales


def _half_scale_and_minimum(w, row, at):
    return w.scales(w.halves_of_blocks(at, 0), shifts=w.halves_of_blocks(at, 2))


def _pair(w, at, step):
    """The address of the two blocks of a step."""
    return w.with_number("add", at, 2 * step * w.block_bytes)


def _nibbles(w, at, offset):
    """Nibbles of 16 bytes of two blocks, those of each block low and high."""
    codes = w.bytes_of_blocks(at, offset)
    return w.fields(w.pieces(codes, [0, 0, 1, 1]), [0, 4, 0, 4], 15)


def _fifth(w, at, offset):
    """16 where a bit of the 32 of two blocks is set."""
    high = w.with_number("shl", w.number(at, w.block_bytes + offset, 4), 32)
    return w.where(w.flags(w.or_(w.number(at, offset, 4), high)), 16)


def _four_bits(offset, table=None):
    def codes(w, row, at, step):
        found = _nibbles(w, _pair(w, at, step), offset)
        return found if table is None else w.looked_up(found, table)

    return codes


def _five_bits(fifth, offset):
    def codes(w, row, at, step):
        at = _pair(w, at, step)
        return w.or_(_nibbles(w, at, offset), _fifth(w, at, fifth))

    return codes


def _q6_0(w, row, at, step):
    at = _pair(w, at, step)
    pairs = w.pieces(w.bytes_of_blocks(at, 2, 8), [0, 0, 0, 0, 1, 1, 1, 1], 8)
    pairs = w.fields(pairs, [0, 4, 2, 6] * 2, 3)
    return w.or_(_nibbles(w, at, 10), w.raised(pairs, 4))


def _unsigned(w, codes):
    """Signed bytes plus 128."""
    return w.ir.xor(codes, w.constant(codes, 128))


def _q8_0(w, row, at, step):
    return _unsigned(w, w.bytes_of_blocks(_pair(w, at, step), 2, 32))


def _row_scale(w, row, at):
    return w.scales(w.float(row, 0), -128)


def _q8_kv(w, row, at, step):
    return _unsigned(w, w.bytes(at, 64 * step, 64))


def _one_scale(w, row, at):
    return w.scales(w.half(at, 0), -128)


def _q8_k_r8(w, row, at, step):
    return _unsigned(w, w.bytes(at, 2 + 64 * step, 64))


def _q8_k_r16(w, row, at, step):
    return w.bytes(at, 2 + 64 * step, 64)


def _mxfp4_scales(w, row, at):
    """Half of 2^(e - 127), as bits of floats; the first two are subnormal."""
    e = w.widened(w.of_blocks(at, 0, INT8, 8), 32)
    small = w.ir.shl(w.constant(e, 0x200000), e)
    normal = w.ir.shl(w.plus(e, -1), w.constant(e, 23))
    bits = w.ir.select(w.ir.icmp_unsigned("<", e, w.constant(e, 2)), small, normal)
    return w.scales(w.ir.bitcast(bits, ir.VectorType(FLOAT, 8)), -128)


def _nvfp4_scales(w, row, at):
    """Half of UE4M3 numbers: see `formats.codecs.fp4`."""
    code = w.ir.bitcast(w.of_blocks(at, 0, INT32, 4), ir.VectorType(INT8, 16))
    code = w.widened(code, 32)
    mantissa, exponent = w.both(code, 7), w.fields(code, 3, 15)
    bits = w.or_(
        w.ir.shl(w.plus(exponent, 119), w.constant(code, 23)),
        w.ir.shl(mantissa, w.constant(code, 20)),
    )
    zero = ir.Constant(ir.VectorType(FLOAT, 16), None)
    value = w.ir.select(
        w.ir.icmp_unsigned("==", exponent, w.constant(code, 0)),
        w.times(2.0**-10, w.floats(mantissa)),
        w.ir.bitcast(bits, zero.type),
    )
    nothing = w.ir.icmp_unsigned("==", code, w.constant(code, 127))
    return w.scales(w.ir.select(nothing, zero, value), -128)


def _nvfp4(w, row, at, step):
    codes = w.bytes(at, step * w.block_bytes + 4, 32)
    codes = w.pieces(codes, [0, 0, 1, 1, 2, 2, 3, 3], 8)
    return w.looked_up(w.fields(codes, [0, 4] * 4, 15), _FP4)


CODES = {
    "Q4_0": (_half_scale(-8), _four_bits(2)),
    "Q4_1": (_half_scale_and_minimum, _four_bits(4)),
    "Q5_0": (_half_scale(-16), _five_bits(2, 6)),
    "Q5_0_R4": (_half_scale(-16), _five_bits(2, 6)),
    "Q5_1": (_half_scale_and_minimum, _five_bits(4, 8)),
    "Q6_0": (_half_scale(-32), _q6_0),
    "Q6_0_R4": (_half_scale(-32), _q6_0),
    "IQ4_NL": (_half_scale(-128), _four_bits(2, _IQ4NL)),
    "Q8_0": (_half_scale(-128), _q8_0),
    "Q8_KV": (_row_scale, _q8_kv),
    "Q8_K_R8": (_one_scale, _q8_k_r8),
    "Q8_K_R16": (_one_scale, _q8_k_r16),
    "MXFP4": (_mxfp4_scales, _four_bits(1, _FP4)),
    "NVFP4": (_nvfp4_scales, _nvfp4),
}
