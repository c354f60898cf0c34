"""Vectors and numbers from memory, and back."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .core import (
    F32,
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    LANES,
    NONE,
    U8,
    U16,
    constant_of,
    function,
    has_feature,
    is_arm,
    loaded,
    pointer,
    shuffled,
    splatted,
    vector_of,
)


@function(U8, types.int64)
def load_bytes(builder, address):
    """Sixteen bytes."""
    return loaded(builder, address, vector_of("u8"))


@function(U16, types.int64)
def load_8_words(builder, address):
    """Eight 16-bit words in the lower lanes; the upper ones are those again."""
    words = loaded(builder, address, vector_of("u16", 8))
    return shuffled(builder, words, words, [*range(8)] * 2)


@function(U8, types.int64, types.int64)
def load_8_bytes_twice(builder, first, second):
    """Eight bytes at each of two addresses."""
    a, b = (loaded(builder, at, vector_of("u8", 8)) for at in (first, second))
    return shuffled(builder, a, b, [*range(16)])


@function(U8, types.int64)
def load_4_bytes(builder, address):
    """Four bytes, four times."""
    four = loaded(builder, address, vector_of("u8", 4))
    return shuffled(builder, four, four, [*range(4)] * 4)


@function(U8, types.int64, types.int64, types.int64, types.int64)
def load_4_bytes_each(builder, *addresses):
    """Four bytes at each of four addresses."""
    words = ir.Constant(ir.VectorType(INT32, 4), ir.Undefined)
    for i, address in enumerate(addresses):
        words = builder.insert_element(words, loaded(builder, address, INT32), INT32(i))
    return builder.bitcast(words, vector_of("u8"))


@function(U8, types.int64, types.int64)
def load_3_bytes_fivefold(builder, address, last):
    """Three bytes, each five times, and the byte at `last`."""
    four = ir.Constant(vector_of("u8", 4), ir.Undefined)
    for i in range(4):
        at = last if i == 3 else builder.add(address, INT64(i))
        four = builder.insert_element(four, loaded(builder, at, INT8), INT32(i))
    return shuffled(builder, four, four, [i // 5 for i in range(LANES)])


@function(F32, types.int64)
def load_floats(builder, address):
    """16 float32 from an address."""
    return loaded(builder, address, vector_of("f32"))


@function(F32, types.int64)
def load_bf16(builder, address):
    """Sixteen bf16 as floats."""
    words = builder.zext(loaded(builder, address, vector_of("u16")), vector_of("i32"))
    return builder.bitcast(builder.shl(words, constant_of("i32", 16)), vector_of("f32"))


@function(F32, types.int64)
def load_halves(builder, address):
    """Sixteen IEEE halves as floats. Exact, also for subnormals."""
    words = builder.zext(loaded(builder, address, vector_of("u16")), vector_of("i32"))
    if has_feature("f16c") or is_arm():
        narrow = builder.trunc(words, vector_of("u16"))
        halves = builder.bitcast(narrow, ir.VectorType(ir.HalfType(), LANES))
        return builder.fpext(halves, vector_of("f32"))
    return _floats_of_halves(builder, words)


@function(types.none, types.int64, F32)
def store_floats(builder, address, vector):
    """Store 16 float32 at an address."""
    builder.store(vector, pointer(builder, address, vector.type), align=1)
    return NONE


@function(types.none, types.int64, F32)
def store_halves(builder, address, vector):
    """Store floats as IEEE halves, rounded to nearest, ties to even."""
    halves = builder.fptrunc(vector, ir.VectorType(ir.HalfType(), LANES))
    builder.store(halves, pointer(builder, address, halves.type), align=1)
    return NONE


@function(types.none, types.int64, F32)
def store_bf16(builder, address, vector):
    """Store floats as bf16, rounded to nearest, ties to even."""
    words = builder.bitcast(vector, vector_of("i32"))
    odd = builder.and_(builder.lshr(words, constant_of("i32", 16)), constant_of("i32", 1))
    rounded = builder.add(builder.add(words, constant_of("i32", 0x7FFF)), odd)
    rounded = builder.select(
        builder.fcmp_unordered("uno", vector, vector), constant_of("i32", 0x7FC00000), rounded
    )
    words = builder.trunc(builder.lshr(rounded, constant_of("i32", 16)), vector_of("u16"))
    builder.store(words, pointer(builder, address, words.type), align=1)
    return NONE


@function(types.none, types.int64, types.int64)
def store_integer(builder, address, value):
    """Store an int64 at an address."""
    builder.store(value, pointer(builder, address, INT64), align=1)
    return NONE


@function(types.none, types.int64, types.int64)
def store_byte(builder, address, value):
    """Store the lowest 8 bits."""
    builder.store(builder.trunc(value, INT8), pointer(builder, address, INT8), align=1)
    return NONE


@function(types.none, types.int64, types.int64)
def store_long(builder, address, value):
    """Store the lowest 32 bits."""
    builder.store(builder.trunc(value, INT32), pointer(builder, address, INT32), align=1)
    return NONE


@function(types.none, types.int64, types.float32)
def store_half(builder, address, value):
    """Store a float as IEEE half, rounded to nearest, ties to even."""
    half = builder.bitcast(builder.fptrunc(value, ir.HalfType()), INT16)
    builder.store(half, pointer(builder, address, INT16), align=1)
    return NONE


@function(types.float64, types.int64)
def double_at(builder, address):
    """The float64 at an address."""
    return loaded(builder, address, ir.DoubleType())


@function(types.int64, types.int64)
def byte_at(builder, address):
    """The byte at an address, 0 to 255, as int64."""
    return builder.zext(loaded(builder, address, INT8), INT64)


@function(types.int64, types.int64)
def signed_byte_at(builder, address):
    """The byte at an address, -128 to 127, as int64."""
    return builder.sext(loaded(builder, address, INT8), INT64)


@function(types.int64, types.int64)
def word_at(builder, address):
    """A little-endian 16-bit word."""
    return builder.zext(loaded(builder, address, INT16), INT64)


@function(types.int64, types.int64)
def long_at(builder, address):
    """A little-endian 32-bit word, without sign."""
    return builder.zext(loaded(builder, address, INT32), INT64)


@function(types.int64, types.int64)
def integer_at(builder, address):
    """The int64 at an address."""
    return loaded(builder, address, INT64)


@function(types.float32, types.int64)
def float_at(builder, address):
    """The float32 at an address."""
    return loaded(builder, address, FLOAT)


@function(types.none, types.int64, types.float32)
def store_float(builder, address, value):
    """Store a float32 at an address."""
    builder.store(value, pointer(builder, address, FLOAT), align=1)
    return NONE


@function(types.float32, types.int64)
def half_at(builder, address):
    """An IEEE half as float. Exact, also for subnormals."""
    return _float_of_half(builder, loaded(builder, address, INT16))


@function(types.float32, types.int64)
def half_of_nibbles(builder, address):
    """An IEEE half of the highest nibbles of four 16-bit words, the lowest nibble first."""
    bits = INT16(0)
    for i in range(4):
        word = loaded(builder, builder.add(address, INT64(2 * i)), INT16)
        nibble = builder.and_(word, INT16(-4096))
        bits = builder.or_(bits, builder.lshr(nibble, INT16(12 - 4 * i)))
    return _float_of_half(builder, bits)


def _float_of_half(builder: ir.IRBuilder, bits: Any) -> Any:
    if has_feature("f16c") or is_arm():
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), FLOAT)
    words = splatted(builder, builder.zext(bits, INT32), "i32")
    return builder.extract_element(_floats_of_halves(builder, words), INT32(0))


def _floats_of_halves(builder: ir.IRBuilder, words: Any) -> Any:
    """What `formats.codecs.scalars.half_to_float` computes: subnormals are units of 2^-24."""
    exponent = builder.and_(builder.lshr(words, constant_of("i32", 10)), constant_of("i32", 31))
    mantissa = builder.and_(words, constant_of("i32", 1023))
    special = builder.icmp_unsigned("==", exponent, constant_of("i32", 31))
    biased = builder.select(
        special, constant_of("i32", 255), builder.add(exponent, constant_of("i32", 112))
    )
    biased = builder.shl(biased, constant_of("i32", 23))
    joined = builder.or_(biased, builder.shl(mantissa, constant_of("i32", 13)))
    small = builder.fmul(builder.sitofp(mantissa, vector_of("f32")), constant_of("f32", 2.0**-24))
    is_small = builder.icmp_unsigned("==", exponent, constant_of("i32", 0))
    value = builder.select(is_small, builder.bitcast(small, vector_of("i32")), joined)
    sign = builder.shl(builder.and_(words, constant_of("i32", 0x8000)), constant_of("i32", 16))
    return builder.bitcast(builder.or_(value, sign), vector_of("f32"))


def scratch(n: int) -> Any:
    """Return a function that gives the address of n bytes, aligned to vectors, which belong to the
    call of the compiled function.
    """

    @function(types.int64)
    def memory(builder):
        with builder.goto_entry_block():
            found = builder.alloca(ir.ArrayType(INT8, n))
        found.align = 64
        return builder.ptrtoint(found, INT64)

    return memory


@function(types.none, types.int64)
def prefetch(builder, address):
    """Ask for the cache line at an address, which may be anything."""
    type = ir.FunctionType(ir.VoidType(), [INT8.as_pointer(), INT32, INT32, INT32])
    name = "llvm.prefetch.p0i8"
    declared = cgutils.get_or_insert_function(builder.module, type, name)
    builder.call(declared, [pointer(builder, address, INT8), INT32(0), INT32(3), INT32(1)])
    return NONE
