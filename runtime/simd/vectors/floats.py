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
    """16 times the float32."""
    return splatted(builder, value, "f32")


@function(F32, types.float32, types.float32)
def halves(builder, low, high):
    """`low` in the first eight lanes, `high` in the others."""
    a, b = (splatted(builder, value, "f32") for value in (low, high))
    return shuffled(builder, a, b, [*range(8), *range(24, 32)])


@function(F32, F32, F32)
def mul(builder, a, b):
    """a * b, lane by lane."""
    return builder.fmul(a, b)


@function(F32, F32, F32)
def add(builder, a, b):
    """a + b, lane by lane."""
    return builder.fadd(a, b)


@function(F32, F32, F32)
def sub(builder, a, b):
    """a - b, lane by lane."""
    return builder.fsub(a, b)


@function(F32, F32, F32, F32)
def fma(builder, a, b, c):
    """a * b + c."""
    return called(builder, f"llvm.fmuladd.v{LANES}f32", vector_of("f32"), a, b, c)


@function(F32, F32)
def magnitude(builder, vector):
    """|x|, lane by lane."""
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


@function(F32, F32, F32)
def div(builder, a, b):
    """a / b, lane by lane."""
    return builder.fdiv(a, b)


@function(F32, F32, F32)
def largest(builder, a, b):
    """The larger of two lanes; the second one if they cannot be compared."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@function(F32, F32, F32)
def smallest(builder, a, b):
    """The smaller of two lanes; the second one if they cannot be compared."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@function(F32, F32, F32, F32)
def where_positive(builder, x, a, b):
    """Lanes of a where those of x are above 0, of b elsewhere."""
    return builder.select(builder.fcmp_ordered(">", x, constant_of("f32", 0)), a, b)


@function(F32, F32)
def root(builder, vector):
    """The square root, lane by lane."""
    return called(builder, f"llvm.sqrt.v{LANES}f32", vector_of("f32"), vector)


# exp(x) = 2^n * p(r) for the integer n next to x / ln 2 and the rest r, at most ln 2 / 2: Taylor's
# polynomial, with the constants of Cephes (Moshier, 1992), whose last bits balance its error.
_LOWEST, _HIGHEST, _LOG2_E = -87.3, 88.3, 1.44269504088896341
_LN_2 = (0.693359375, -2.12194440e-4)  # in two parts: the first times n is exact
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2)
_POLYNOMIAL = (*_POLYNOMIAL, 1.6666665459e-1, 5.0000001201e-1)


@function(F32, F32)
def exp(builder, x):
    """e^x to two units in the last place, between 1e-38 and 2e38."""
    for comparison, bound in (("<", _LOWEST), (">", _HIGHEST)):
        limit = constant_of("f32", bound)  # what is not a number stays so
        x = builder.select(builder.fcmp_ordered(comparison, x, limit), limit, x)
    n = builder.fmul(x, constant_of("f32", _LOG2_E))
    n = called(builder, f"llvm.rint.v{LANES}f32", vector_of("f32"), n)
    r = x
    for part in _LN_2:
        r = builder.fsub(r, builder.fmul(n, constant_of("f32", part)))
    p = constant_of("f32", _POLYNOMIAL[0])
    for factor in _POLYNOMIAL[1:]:
        p = builder.fadd(builder.fmul(p, r), constant_of("f32", factor))
    p = builder.fadd(builder.fmul(builder.fmul(p, r), r), r)
    p = builder.fadd(p, constant_of("f32", 1))
    power = builder.add(builder.fptosi(n, vector_of("i32")), constant_of("i32", 127))
    power = builder.bitcast(builder.shl(power, constant_of("i32", 23)), vector_of("f32"))
    return builder.fmul(p, power)


@function(F32, F32)
def butterflies(builder, x):
    """The Walsh-Hadamard transform of the lanes, not normalized: sums and differences of lanes at
    distances 1, 2, 4 and 8.
    """
    for distance in (1, 2, 4, 8):
        other = shuffled(builder, x, x, [lane ^ distance for lane in range(LANES)])
        signs = [-1.0 if lane & distance else 1.0 for lane in range(LANES)]
        x = builder.fadd(other, builder.fmul(x, ir.Constant(vector_of("f32"), signs)))
    return x


@function(types.float32, F32)
def total(builder, vector):
    """The sum of the lanes: upper half to lower half, four times."""
    for n in (8, 4, 2, 1):
        low = shuffled(builder, vector, vector, [*range(n)])
        high = shuffled(builder, vector, vector, [*range(n, 2 * n)])
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, INT32(0))


@function(types.float32, F32)
def highest(builder, vector):
    """The largest lane. Lanes that are not numbers may count or not."""
    for n in (8, 4, 2, 1):
        low = shuffled(builder, vector, vector, [*range(n)])
        high = shuffled(builder, vector, vector, [*range(n, 2 * n)])
        vector = builder.select(builder.fcmp_ordered(">", low, high), low, high)
    return builder.extract_element(vector, INT32(0))
