"""Bits, order and tables of integer vectors."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from .core import (
    ELEMENTS,
    I8,
    I32,
    INT1,
    INT8,
    INT16,
    INT32,
    INT64,
    LANES,
    U8,
    U16,
    called,
    constant_of,
    function,
    has_feature,
    is_arm,
    shuffled,
    splatted,
    vector_of,
)


@function(0, None, types.int64)
def bit_and(builder, vector, mask):
    """And of each lane with the mask, an int64 of which the low bits count."""
    type = vector.type.element
    return builder.and_(vector, splatted(builder, builder.trunc(mask, type), builder.elements[0]))


@function(0, None, None)
def bit_or(builder, a, b):
    """a | b, lane by lane."""
    return builder.or_(a, b)


@function(0, None, None)
def bit_xor(builder, a, b):
    """a ^ b, lane by lane."""
    return builder.xor(a, b)


@function(0, None, types.int64)
def shift_right(builder, vector, by):
    """Zeros come in from above."""
    element = builder.elements[0]
    return builder.lshr(vector, splatted(builder, _narrow(builder, by, element), element))


@function(U8, U8, types.int64, types.int64)
def field(builder, vector, by, mask):
    """The bits of `mask`, at most 255 >> by, of bytes that are shifted right. Words are shifted:
    processors do not shift single bytes, and the mask removes what comes from the next one.
    """
    words = builder.bitcast(vector, vector_of("u16", 8))
    count = splatted(builder, builder.trunc(by, INT16), "u16")
    count = shuffled(builder, count, count, [*range(8)])
    shifted = builder.bitcast(builder.lshr(words, count), vector_of("u8"))
    return builder.and_(shifted, splatted(builder, builder.trunc(mask, INT8), "u8"))


@function(U8, U8, types.int64, types.int64)
def value_where_set(builder, codes, bit, value):
    """`value` in the lanes in which `bit` of the code is set, 0 in others."""
    mask = builder.and_(codes, splatted(builder, builder.trunc(bit, INT8), "u8"))
    mask = builder.icmp_unsigned("!=", mask, constant_of("u8", 0))
    chosen = splatted(builder, builder.trunc(value, INT8), "u8")
    return builder.select(mask, chosen, constant_of("u8", 0))


@function(0, None, types.int64)
def shift_left(builder, vector, by):
    """Shift all lanes left by the same number of bits."""
    element = builder.elements[0]
    return builder.shl(vector, splatted(builder, _narrow(builder, by, element), element))


def _narrow(builder: ir.IRBuilder, value: Any, element: str) -> Any:
    return builder.trunc(value, ELEMENTS[element])


@function(0, None, types.int64)
def plus(builder, vector, number):
    """Add a number to each lane, with wrapping."""
    element = builder.elements[0]
    return builder.add(vector, splatted(builder, _narrow(builder, number, element), element))


@function(0, None, None)
def times(builder, a, b):
    """Products of integer lanes, with wrapping."""
    return builder.mul(a, b)


@function(U8, types.int64, types.int64)
def where_bits(builder, bits, value):
    """`value` in the lanes whose bit of the lowest 16 is set, 0 in others."""
    mask = builder.bitcast(builder.trunc(bits, INT16), ir.VectorType(INT1, LANES))
    chosen = splatted(builder, builder.trunc(value, INT8), "u8")
    return builder.select(mask, chosen, constant_of("u8", 0))


@function(types.int64, U16)
def lowest_bits(builder, vector):
    """Bit i: the lowest bit of lane i."""
    ones = builder.trunc(vector, ir.VectorType(INT1, LANES))
    return builder.zext(builder.bitcast(ones, INT16), INT64)


@function(U8, types.int64)
def pairs_in_order(builder, bits):
    """Lane i: bits 2i and 2i + 1 of a 32-bit word."""
    word = builder.trunc(bits, INT32)
    lanes = splatted(builder, word, "i32")
    places = ir.Constant(vector_of("i32"), [2 * i for i in range(LANES)])
    pairs = builder.and_(builder.lshr(lanes, places), constant_of("i32", 3))
    return builder.trunc(pairs, vector_of("u8"))


@function(U8, types.int64)
def bytes_of(builder, number):
    """The bytes of a number, the lowest first, twice."""
    both = ir.Constant(ir.VectorType(INT64, 2), ir.Undefined)
    for lane in range(2):
        both = builder.insert_element(both, number, INT32(lane))
    return builder.bitcast(both, vector_of("u8"))


@function(I8, U8)
def signed(builder, vector):
    """The same bytes as two's complement."""
    return vector


@function(U8, U16)
def as_bytes(builder, vector):
    """The bytes of the lower eight words, in order of memory."""
    lower = shuffled(builder, vector, vector, [*range(8)])
    return builder.bitcast(lower, vector_of("u8"))


@function(I32, U8)
def as_integers(builder, vector):
    """Unsigned lanes as i32."""
    return builder.zext(vector, vector_of("i32"))


@function(I32, types.int64, types.int64)
def integer_halves(builder, low, high):
    """i32 lanes: 8 times `low`, then 8 times `high`."""
    a, b = (splatted(builder, _narrow(builder, value, "i32"), "i32") for value in (low, high))
    return shuffled(builder, a, b, [*range(8), *range(24, 32)])


@function(I32, types.int64, types.int64, types.int64, types.int64)
def integer_quarters(builder, *numbers):
    """i32 lanes: each of four numbers 4 times."""
    a, b, c, d = (splatted(builder, _narrow(builder, n, "i32"), "i32") for n in numbers)
    low = shuffled(builder, a, b, [*range(4), *range(20, 24)] * 2)
    high = shuffled(builder, c, d, [*range(4), *range(20, 24)] * 2)
    return shuffled(builder, low, high, [*range(8), *range(24, 32)])


@function(I8, U8, I8)
def lookup(builder, codes, table):
    """The entry of a table of 16 for the lowest four bits of each code. Codes are below 128."""
    if has_feature("ssse3"):
        return called(builder, "llvm.x86.ssse3.pshuf.b.128", vector_of("i8"), table, codes)
    low = builder.and_(codes, constant_of("u8", 15))
    if is_arm():
        return called(builder, "llvm.aarch64.neon.tbl1.v16i8", vector_of("i8"), table, low)
    found = ir.Constant(vector_of("i8"), ir.Undefined)
    for lane in range(LANES):
        at = builder.zext(builder.extract_element(low, INT32(lane)), INT32)
        found = builder.insert_element(found, builder.extract_element(table, at), INT32(lane))
    return found


@function(0, None, None, U8, types.int64)
def where_set(builder, yes, no, codes, bit):
    """Lanes of `yes` where `bit` of the code is set, those of `no` elsewhere."""
    mask = builder.and_(codes, splatted(builder, builder.trunc(bit, INT8), "u8"))
    return builder.select(builder.icmp_unsigned("!=", mask, constant_of("u8", 0)), yes, no)


@function(1, types.int64, None, None)
def either(builder, condition, yes, no):
    """One of two vectors."""
    return builder.select(builder.icmp_signed("!=", condition, INT64(0)), yes, no)


@function(0, None, None)
def first_half_else(builder, a, b):
    """The first eight lanes of a, and the last eight of b."""
    return shuffled(builder, a, b, [*range(8), *range(24, 32)])


@function(0, None, None)
def lower_halves(builder, a, b):
    """The first eight lanes of a, then the first eight of b."""
    return shuffled(builder, a, b, [*range(8), *range(16, 24)])


@function(0, None, None)
def upper_halves(builder, a, b):
    """The last eight lanes of a, then the last eight of b."""
    return shuffled(builder, a, b, [*range(8, 16), *range(24, 32)])


@function(0, None, None)
def interleaved_lower(builder, a, b):
    """Lanes a0 b0 a1 b1 ... of the first eight."""
    return shuffled(builder, a, b, [i // 2 + LANES * (i % 2) for i in range(LANES)])


@function(0, None, None)
def interleaved_upper(builder, a, b):
    """Lanes a8 b8 a9 b9 ... of the last eight."""
    return shuffled(builder, a, b, [8 + i // 2 + LANES * (i % 2) for i in range(LANES)])
