"""Vectors of 16 lanes in numba functions, for loops that numba's own vectorizer does not find.

A `Vector` is a value of numba's type system that lives in registers: 16 bytes, words or floats. The
functions here build LLVM instructions on whole vectors, which LLVM maps to whatever the processor
has (one AVX-512 register, two of AVX2, four of NEON). Only the lookup in a table of 16 bytes is an
instruction of the processor by name; others use a loop over the lanes.

Memory is given by addresses, int64. Nothing is checked: callers know what they read. Floats are
added and multiplied as written; only `fma` may round once or twice, as the processor has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 16

INT1, INT8, INT16, INT32, INT64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
FLOAT = ir.FloatType()
NONE = ir.Constant(ir.IntType(8).as_pointer(), None)  # what functions return that give nothing
ELEMENTS = {"u8": INT8, "i8": INT8, "u16": INT16, "i32": INT32, "f32": FLOAT}


class Vector(types.Type):
    """`LANES` values of an element type: u8, i8, u16, i32 or f32."""

    def __init__(self, element: str):
        self.element = element
        super().__init__(name=f"Vector({element})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, type):
        super().__init__(manager, type, vector_of(type.element))


U8, I8, U16, I32, F32 = (Vector(name) for name in ("u8", "i8", "u16", "i32", "f32"))


def vector_of(element: str, lanes: int = LANES) -> ir.VectorType:
    """Return the LLVM type of a vector of `lanes` elements; element: a key of ELEMENTS."""
    return ir.VectorType(ELEMENTS[element], lanes)


def splatted(builder: ir.IRBuilder, value: Any, element: str) -> Any:
    """Put a number in all 16 lanes."""
    nothing = ir.Constant(vector_of(element), ir.Undefined)
    one = builder.insert_element(nothing, value, INT32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(INT32, LANES), None))


def constant_of(element: str, value: float) -> ir.Constant:
    """Return a constant with the number in all 16 lanes."""
    return ir.Constant(vector_of(element), [value] * LANES)


def pointer(builder: ir.IRBuilder, address: Any, type: ir.Type) -> Any:
    """Make a pointer to `type` of an int64 address."""
    return builder.inttoptr(address, type.as_pointer())


def loaded(builder: ir.IRBuilder, address: Any, type: ir.Type) -> Any:
    """Load a value of `type` from an int64 address, without alignment."""
    return builder.load(pointer(builder, address, type), align=1)


def shuffled(builder: ir.IRBuilder, a: Any, b: Any, lanes: list[int]) -> Any:
    """Take lanes of two vectors, those of b counted after those of a."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), lanes))


def called(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: Any) -> Any:
    """Call the function `name` of LLVM or of a library."""
    type = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, type, name)
    return builder.call(function, arguments)


@functools.cache
def has_feature(feature: str) -> bool:
    """Return whether this processor has a feature by LLVM's name, such as `avx512f`."""
    return bool(binding.get_host_cpu_features().get(feature))


def is_arm() -> bool:
    """Return whether this processor is a 64-bit ARM."""
    return binding.get_process_triple().startswith(("aarch64", "arm64"))


# numba counts the parameters of what defines an intrinsic.
_BY_ARITY: list[Callable[[Callable], Callable]] = [
    lambda typed: lambda context: typed(),
    lambda typed: lambda context, a: typed(a),
    lambda typed: lambda context, a, b: typed(a, b),
    lambda typed: lambda context, a, b, c: typed(a, b, c),
    lambda typed: lambda context, a, b, c, d: typed(a, b, c, d),
    lambda typed: lambda context, a, b, c, d, e: typed(a, b, c, d, e),
    lambda typed: lambda context, a, b, c, d, e, f: typed(a, b, c, d, e, f),
    lambda typed: lambda context, a, b, c, d, e, f, g: typed(a, b, c, d, e, f, g),
    lambda typed: lambda context, a, b, c, d, e, f, g, h: typed(a, b, c, d, e, f, g, h),
    lambda typed: lambda context, a, b, c, d, e, f, g, h, i: typed(a, b, c, d, e, f, g, h, i),
]


def function(result: Any, *parameters: Any) -> Callable[[Callable], Any]:
    """Make a function of compiled code from one that builds its instructions from (builder,
    *values), of vectors or numbers of these types. A parameter None takes any vector; a result that
    is a number is of the type of that argument. The builder's attribute `elements` has the element
    types of the arguments.
    """

    def make(build: Callable) -> Any:
        def typed(*arguments):
            took = [a if p is None else p for a, p in zip(arguments, parameters, strict=True)]
            gave = took[result] if isinstance(result, int) else result
            elements = [getattr(t, "element", "") for t in took]

            def generate(_, builder, signature, values):
                builder.elements = elements
                return build(builder, *values)

            return gave(*took), generate

        define = _BY_ARITY[len(parameters)](typed)
        define.__name__, define.__doc__ = build.__name__, build.__doc__
        return intrinsic(define)

    return make


def constant(element: str, values: Sequence[float]) -> Any:
    """Return a function without parameters that gives a vector of these values."""

    @function(Vector(element))
    def numbers(builder):
        return ir.Constant(vector_of(element), values)

    return numbers


def table(element: str, rows: Sequence[Sequence[float]]) -> Any:
    """Return a function of an index that gives a vector of the values of that row. It reads memory:
    a choice between constants would be a branch, which mostly is mispredicted.
    """
    type = vector_of(element)
    values = ir.Constant(ir.ArrayType(type, len(rows)), [ir.Constant(type, row) for row in rows])

    @function(Vector(element), types.int64)
    def numbers(builder, index):
        stored = cgutils.global_constant(builder.module, "table", values)
        return builder.load(builder.gep(stored, [INT64(0), index]))

    return numbers
