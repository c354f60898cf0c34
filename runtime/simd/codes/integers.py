"""Instructions that read blocks, and reorder and change vectors of integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ..vectors.core import FLOAT, INT1, INT8, INT16, INT32, INT64, pointer

GROUP = 16  # elements with the same scale
CHUNK = 256  # elements whose scales are read together
STEP = 64  # elements whose codes are read together
GROUPS = CHUNK // GROUP


class Integers:
    """Builds instructions. Addresses are int64, offsets from them in bytes.

    block_bytes: from one block of a row to the next.
    """

    def __init__(self, builder: ir.IRBuilder, block_bytes: int):
        self.ir, self.block_bytes = builder, block_bytes

    # Memory

    def load(self, at: Any, offset: int, type: ir.Type) -> Any:
        """Load a value of an LLVM type, without alignment."""
        address = self.ir.add(at, INT64(offset))
        return self.ir.load(pointer(self.ir, address, type), align=1)

    def bytes(self, at: Any, offset: int, n: int = 16) -> Any:
        """Load a vector of n bytes."""
        return self.load(at, offset, ir.VectorType(INT8, n))

    def words(self, at: Any, offset: int, n: int) -> Any:
        """Numbers of 16 bits."""
        return self.load(at, offset, ir.VectorType(INT16, n))

    def longs(self, at: Any, offset: int, n: int) -> Any:
        """Numbers of 32 bits."""
        return self.load(at, offset, ir.VectorType(INT32, n))

    def number(self, at: Any, offset: int, n_bytes: int) -> Any:
        """A number without sign, as int64."""
        found = self.load(at, offset, ir.IntType(8 * n_bytes))
        return found if n_bytes == 8 else self.ir.zext(found, INT64)

    def half(self, at: Any, offset: int) -> Any:
        """Load a float16 as float32."""
        return self.ir.fpext(self.load(at, offset, ir.HalfType()), FLOAT)

    def float(self, at: Any, offset: int) -> Any:
        """Load a float32."""
        return self.load(at, offset, FLOAT)

    def of_blocks(self, at: Any, offset: int, type: ir.Type, n: int) -> Any:
        """A number of each of n blocks."""
        found = ir.Constant(ir.VectorType(type, n), ir.Undefined)
        for i in range(n):
            one = self.load(at, i * self.block_bytes + offset, type)
            found = self.ir.insert_element(found, one, INT32(i))
        return found

    def halves_of_blocks(self, at: Any, offset: int, n: int = 8) -> Any:
        """An IEEE half of each of n blocks, as floats."""
        words = self.of_blocks(at, offset, INT16, n)
        halves = self.ir.bitcast(words, ir.VectorType(ir.HalfType(), n))
        return self.ir.fpext(halves, ir.VectorType(FLOAT, n))

    def bytes_of_blocks(self, at: Any, offset: int, n: int = 16) -> Any:
        """Bytes of two blocks, one after the other."""
        return self.joined(self.bytes(at, offset, n), self.bytes(at, self.block_bytes + offset, n))

    # Order

    def shuffled(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Take lanes of two vectors, those of b counted after those of a."""
        mask = ir.Constant(ir.VectorType(INT32, len(lanes)), [*lanes])
        return self.ir.shuffle_vector(a, b, mask)

    def joined(self, a: Any, b: Any) -> Any:
        """Join two vectors of n lanes to one of 2n."""
        return self.shuffled(a, b, range(2 * a.type.count))

    def pieces(self, vector: Any, order: Sequence[int], size: int = 16) -> Any:
        """Pieces of `size` lanes in this order."""
        lanes = [size * piece + i for piece in order for i in range(size)]
        return self.shuffled(vector, vector, lanes)

    def repeated(self, vector: Any, times: int) -> Any:
        """Each lane so many times."""
        lanes = [i // times for i in range(times * vector.type.count)]
        return self.shuffled(vector, vector, lanes)

    def splat(self, value: Any, n: int = GROUPS) -> Any:
        """Put a number in n lanes."""
        nothing = ir.Constant(ir.VectorType(value.type, n), ir.Undefined)
        one = self.ir.insert_element(nothing, value, INT32(0))
        return self.shuffled(one, nothing, [0] * n)

    # Integers

    def constant(self, like: Any, values: Sequence[int] | int) -> Any:
        """A constant of the type of `like`; fewer values than lanes are each used for several
        lanes that follow each other.
        """
        n = like.type.count
        values = [values] if isinstance(values, int) else [*values]
        return ir.Constant(like.type, [values[i * len(values) // n] for i in range(n)])

    def both(self, vector: Any, mask: Sequence[int] | int) -> Any:
        """And with one mask, or with one per lane."""
        return self.ir.and_(vector, self.constant(vector, mask))

    def fields(self, vector: Any, shifts: Sequence[int] | int, mask: int) -> Any:
        """The bits of `mask` of lanes that are shifted right, bytes at least in pairs. Bytes are
        shifted as words: the mask removes what comes from the next one.
        """
        type = vector.type
        if type.element == INT8:
            vector = self.ir.bitcast(vector, ir.VectorType(INT16, type.count // 2))
        shifted = self.ir.lshr(vector, self.constant(vector, shifts))
        return self.both(self.ir.bitcast(shifted, type), mask)

    def raised(self, vector: Any, by: int) -> Any:
        """Bytes shifted left. No bit leaves its byte."""
        words = self.ir.bitcast(vector, ir.VectorType(INT16, vector.type.count // 2))
        return self.ir.bitcast(self.ir.shl(words, self.constant(words, by)), vector.type)

    def doubled(self, vector: Any) -> Any:
        """Multiply by 2."""
        return self.ir.add(vector, vector)

    def plus(self, vector: Any, values: Sequence[int] | int) -> Any:
        """Add one number, or one per lane."""
        return self.ir.add(vector, self.constant(vector, values))

    def where(self, flags: Any, yes: int, no: int = 0, bits: int = 8) -> Any:
        """A number where a flag is set, another one elsewhere."""
        type = ir.VectorType(ir.IntType(bits), flags.type.count)
        first, second = (ir.Constant(type, [x] * type.count) for x in (yes, no))
        return self.ir.select(flags, first, second)

    def has_bits(self, vector: Any, bits: Sequence[int] | int) -> Any:
        """Flags: lanes in which one of the bits is set."""
        nothing = ir.Constant(vector.type, None)
        return self.ir.icmp_unsigned("!=", self.both(vector, bits), nothing)

    def flags(self, number: Any, n: int = STEP) -> Any:
        """The lowest n bits of a number, as flags."""
        if number.type.width > n:
            number = self.ir.trunc(number, ir.IntType(n))
        return self.ir.bitcast(number, ir.VectorType(INT1, n))

    def or_(self, a: Any, *others: Any) -> Any:
        """Or of two or more vectors."""
        for other in others:
            a = self.ir.or_(a, other)
        return a

    def with_number(self, op: str, number: Any, other: int) -> Any:
        """An operation of a number of 64 bits with a constant."""
        return getattr(self.ir, op)(number, INT64(other))

    def widened(self, vector: Any, bits: int) -> Any:
        """Extend lanes with zeros to `bits` bits."""
        return self.ir.zext(vector, ir.VectorType(ir.IntType(bits), vector.type.count))

    def narrowed(self, vector: Any) -> Any:
        """Lanes as bytes."""
        return self.ir.trunc(vector, ir.VectorType(INT8, vector.type.count))

    def negative_where(self, flags: Any, magnitudes: Any) -> Any:
        """128 + magnitude, or 128 - magnitude where a flag is set."""
        middle = self.constant(magnitudes, 128)
        return self.ir.select(
            flags, self.ir.sub(middle, magnitudes), self.ir.add(middle, magnitudes)
        )
