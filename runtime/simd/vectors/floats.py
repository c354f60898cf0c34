"""Vectors of floats."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from .core import (
    F32,
    INT1,
    INT8,
    INT16,
    INT32,
    LANES,
    U8,
    called,
    constant_of,
    function,
    shuffled,
    splatted,
    vector_of,
)


@function(F32, None)
def as_floats(builder, vector):
    """The values of u8, i8, u16 or i32."""
    element = builder.elements[0]
    if element == "i32":
        return builder.sitofp(vector, vector_of("f32"))
    widen = builder.sext if element == "i8" else builder.zext
    return builder.sitofp(widen(vector, vector_of("i32")), vector_of("f32"))


@function(F32, types.float32)
def splat(builder, value):
    return splatted(builder, value, "f32")


@function(F32, types.float32, types.float32)
def halves(builder, low, high):
    """`low` in the first eight lanes, `high` in the others."""
    a, b = (splatted(builder, value, "f32") for value in (low, high))
    return shuffled(builder, a, b, [*range(8), *range(24, 32)])


@function(F32, F32, F32)
def mul(builder, a, b):
    return builder.fmul(a, b)


@function(F32, F32, F32)
def add(builder, a, b):
    return builder.fadd(a, b)


@function(F32, F32, F32)
def sub(builder, a, b):
    return builder.fsub(a, b)


@function(F32, F32, F32, F32)
def fma(builder, a, b, c):
    """a * b + c."""
    return called(builder, f"llvm.fmuladd.v{LANES}f32", vector_of("f32"), a, b, c)


@function(F32, F32)
def magnitude(builder, vector):
    return called(builder, f"llvm.fabs.v{LANES}f32", vector_of("f32"), vector)


@function(F32, F32, types.int64)
def negate_where(builder, vector, bits):
    """Lanes whose bit of the lowest 16 is set change their sign."""
    mask = builder.bitcast(builder.trunc(bits, INT16), ir.VectorType(INT1, LANES))
    return _negated(builder, vector, mask)


@function(F32, F32, U8, types.int64)
def negate_where_set(builder, vector, codes, bit):
    """Lanes change their sign where `bit` of the code is set."""
    mask = builder.and_(codes, splatted(builder, builder.trunc(bit, INT8), "u8"))
    mask = builder.icmp_unsigned("!=", mask, constant_of("u8", 0))
    return _negated(builder, vector, mask)


def _negated(builder: ir.IRBuilder, vector: Any, mask: Any) -> Any:
    words = builder.bitcast(vector, vector_of("i32"))
    flips = builder.select(mask, constant_of("i32", 0x80000000), constant_of("i32", 0))
    return builder.bitcast(builder.xor(words, flips), vector_of("f32"))


@function(types.float32, F32)
def total(builder, vector):
    """The sum of the lanes: upper half to lower half, four times."""
    for n in (8, 4, 2, 1):
        low = shuffled(builder, vector, vector, [*range(n)])
        high = shuffled(builder, vector, vector, [*range(n, 2 * n)])
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, INT32(0))
