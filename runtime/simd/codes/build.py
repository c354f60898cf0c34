"""Instructions for the codes and scales of blocks, on vectors of 64 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils

from ..vectors.core import FLOAT, INT1, INT8, INT16, INT32, INT64, called, has_feature, pointer
from .integers import CHUNK, GROUP, GROUPS, STEP, Integers

__all__ = ["CHUNK", "GROUP", "GROUPS", "STEP", "Build", "Scales"]


class Scales(NamedTuple):
    """What codes of `GROUPS` groups are multiplied by, and what is added then, float[GROUPS]."""

    factors: Any
    shifts: Any


class Build(Integers):
    """Builds instructions, also of tables, scales and sums of products."""

    # Tables

    def table(self, values: Any) -> Any:
        """The address of a constant array."""
        values = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        stored = ir.Constant(ir.ArrayType(INT8, len(values)), bytearray(values.tobytes()))
        found: Any = cgutils.global_constant(self.ir.module, "codes", stored)
        found.align = 64
        return self.ir.ptrtoint(found, INT64)

    def looked_up(self, codes: Any, values: Sequence[int]) -> Any:
        """Entries of a table of at most 64 bytes for 64 codes, which are below its length."""
        values = [int(x) & 255 for x in values]
        if len(values) <= 16:
            values = values * (16 // len(values))
            return self._shuffled_bytes(codes, values)
        values = values * (64 // len(values))
        if has_feature("avx512vbmi"):
            table = ir.Constant(ir.VectorType(INT8, 64), values)
            name = "llvm.x86.avx512.permvar.qi.512"
            return called(self.ir, name, table.type, table, codes)
        low = self.both(codes, 15)
        parts = [self._shuffled_bytes(low, values[i : i + 16]) for i in range(0, 64, 16)]
        fifth, sixth = self.has_bits(codes, 16), self.has_bits(codes, 32)
        lower = self.ir.select(fifth, parts[1], parts[0])
        return self.ir.select(sixth, self.ir.select(fifth, parts[3], parts[2]), lower)

    def _shuffled_bytes(self, codes: Any, values: list[int]) -> Any:
        if has_feature("avx512bw"):
            table = ir.Constant(ir.VectorType(INT8, 64), values * 4)
            return called(self.ir, "llvm.x86.avx512.pshuf.b.512", table.type, table, codes)
        table = ir.Constant(ir.VectorType(INT8, 32), values * 2)
        halves = [self.shuffled(codes, codes, range(i, i + 32)) for i in (0, 32)]
        name = "llvm.x86.avx2.pshuf.b"
        return self.joined(*(called(self.ir, name, table.type, table, half) for half in halves))

    def rows_of(self, table: Any, numbers: Any, row_bytes: int) -> Any:
        """Rows of 4 or 8 bytes of a table for numbers int32[n], as n * row_bytes bytes."""
        n, type = numbers.type.count, ir.IntType(8 * row_bytes)
        vector = ir.VectorType(type, n)
        if has_feature("avx512f") and n * row_bytes == STEP:
            kind = "dpi" if row_bytes == 4 else "dpq"
            found = called(
                self.ir,
                f"llvm.x86.avx512.mask.gather.{kind}.512",
                vector,
                ir.Constant(vector, None),
                pointer(self.ir, table, INT8),
                numbers,
                ir.Constant(ir.VectorType(INT1, n), [1] * n),
                INT32(row_bytes),
            )
        else:
            found = ir.Constant(vector, ir.Undefined)
            for i in range(n):
                number = self.ir.zext(self.ir.extract_element(numbers, INT32(i)), INT64)
                at = self.ir.add(table, self.ir.mul(number, INT64(row_bytes)))
                found = self.ir.insert_element(found, self.load(at, 0, type), INT32(i))
        return self.ir.bitcast(found, ir.VectorType(INT8, n * row_bytes))

    # Scales

    def floats(self, vector: Any, *, signed: bool = False) -> Any:
        """Integers as floats."""
        wide = ir.VectorType(INT32, vector.type.count)
        if vector.type != wide:
            vector = (self.ir.sext if signed else self.ir.zext)(vector, wide)
        return self.ir.sitofp(vector, ir.VectorType(FLOAT, vector.type.count))

    def times(self, factor: Any, vector: Any) -> Any:
        """A number or a vector times a vector."""
        if isinstance(factor, (int, float)):
            factor = ir.Constant(vector.type, [float(factor)] * vector.type.count)
        elif not isinstance(factor.type, ir.VectorType):
            factor = self.splat(factor, vector.type.count)
        return self.ir.fmul(factor, vector)

    def scales(self, factors: Any, shift: float = 0, shifts: Any = None) -> Scales:
        """Scales whose shifts are `shift` times them, or `shifts`. Vectors have a lane for each
        scale, or are numbers.
        """
        if shifts is None:
            vector = isinstance(factors.type, ir.VectorType)
            shifts = self.times(shift, factors if vector else self.splat(factors, GROUPS))
        return Scales(self._of_groups(factors), self._of_groups(shifts))

    def _of_groups(self, numbers: Any) -> Any:
        if not isinstance(numbers.type, ir.VectorType):
            return self.splat(numbers, GROUPS)
        return self.repeated(numbers, GROUPS // numbers.type.count)

    def nibbles_in_order(self, vector: Any) -> Any:
        """Nibbles of each byte one after the other, the low one first."""
        low, n = self.both(vector, 15), vector.type.count
        high = self.ir.lshr(vector, self.constant(vector, 4))
        return self.shuffled(low, high, [i // 2 + n * (i % 2) for i in range(2 * n)])

    # Sums

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c."""
        return called(self.ir, f"llvm.fmuladd.v{a.type.count}f32", a.type, a, b, c)

    def dots(self, unsigned: Any, signed: Any) -> Any:
        """Sums of four products each of 64 bytes without sign and 64 with it, int32[16]."""
        sums = ir.VectorType(INT32, 16)
        if has_feature("avx512vnni"):
            return self._vnni("avx512.vpdpbusd.512", sums, unsigned, signed)
        half = ir.VectorType(INT32, 8)
        sides = [
            [self.shuffled(x, x, range(i, i + 32)) for i in (0, 32)] for x in (unsigned, signed)
        ]
        if has_feature("avxvnni"):
            found = [
                self._vnni("avx512.vpdpbusd.256", half, *pair) for pair in zip(*sides, strict=True)
            ]
            return self.joined(*found)
        found = []
        for i in range(0, STEP, 16):  # pairs of products fit 32 bits, and not 16
            lanes = range(i, i + 16)
            words = ir.VectorType(INT16, 16)
            a = self.ir.zext(self.shuffled(unsigned, unsigned, lanes), words)
            b = self.ir.sext(self.shuffled(signed, signed, lanes), words)
            found.append(called(self.ir, "llvm.x86.avx2.pmadd.wd", half, a, b))
        low, high = self.joined(found[0], found[1]), self.joined(found[2], found[3])
        even = self.shuffled(low, high, range(0, 32, 2))
        return self.ir.add(even, self.shuffled(low, high, range(1, 32, 2)))

    def _vnni(self, name: str, sums: ir.VectorType, unsigned: Any, signed: Any) -> Any:
        """LLVM 22 names the operands' type bytes, earlier ones integers."""
        if binding.llvm_version_info[0] < 22:
            unsigned, signed = (self.ir.bitcast(x, sums) for x in (unsigned, signed))
        zero = ir.Constant(sums, None)
        return called(self.ir, f"llvm.x86.{name}", sums, zero, unsigned, signed)
