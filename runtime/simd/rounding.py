"""Instructions that round vectors of floats to bytes, for products in 8 bits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .vectors.core import (
    FLOAT,
    INT32,
    INT64,
    LANES,
    called,
    constant_of,
    pointer,
    vector_of,
)


def largest_magnitude(builder: ir.IRBuilder, first: Any, *others: Any) -> Any:
    """Return the largest magnitude in the lanes of vectors; not finite if one of them is not."""
    largest = _magnitude_bits(builder, first)
    for other in others:
        bits = _magnitude_bits(builder, other)
        largest = called(builder, f"llvm.umax.v{LANES}i32", bits.type, largest, bits)
    found = called(builder, f"llvm.vector.reduce.umax.v{LANES}i32", INT32, largest)
    return builder.bitcast(found, FLOAT)


def _magnitude_bits(builder: ir.IRBuilder, vector: Any) -> Any:
    bits = builder.bitcast(vector, vector_of("i32"))
    return builder.and_(bits, constant_of("i32", 0x7FFFFFFF))


def rounded(builder: ir.IRBuilder, vector: Any) -> tuple[Any, Any]:
    """Return the nearest integers, and these as bytes."""
    nearest = called(builder, f"llvm.rint.v{LANES}f32", vector.type, vector)
    integers = builder.fptosi(nearest, vector_of("i32"))
    return integers, builder.trunc(integers, vector_of("i8"))


def store_codes(builder: ir.IRBuilder, address: Any, *vectors: Any) -> Any:
    """Store the nearest integers as bytes, one vector after the other, and return their sum."""
    total = None
    for i, vector in enumerate(vectors):
        integers, codes = rounded(builder, vector)
        to = pointer(builder, builder.add(address, INT64(LANES * i)), codes.type)
        builder.store(codes, to, align=1)
        total = integers if total is None else builder.add(total, integers)
    found = called(builder, f"llvm.vector.reduce.add.v{LANES}i32", INT32, total)
    return builder.sext(found, INT64)
