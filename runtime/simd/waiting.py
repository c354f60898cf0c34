"""How threads, and devices, wait for each other by polling memory."""

from __future__ import annotations

import os
import time

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .vectors.core import INT64, NONE, called, function, has_feature, is_arm, pointer

_VOID = ir.VoidType()


@function(types.int64, types.int64, types.int64)
def atomic_add(builder, address, value):
    """Add, and return what was there before."""
    return builder.atomic_rmw("add", pointer(builder, address, INT64), value, "seq_cst")


@function(types.int64, types.int64)
def atomic_load(builder, address):
    """Read the int64 at an aligned address, sequentially consistent."""
    return builder.load_atomic(pointer(builder, address, INT64), "seq_cst", 8)


@function(types.none, types.int64, types.int64)
def atomic_store(builder, address, value):
    """Write an int64 to an aligned address, sequentially consistent."""
    builder.store_atomic(value, pointer(builder, address, INT64), "seq_cst", 8)
    return NONE


@function(types.none)
def pause(builder):
    """Tell the processor that this is a loop that waits."""
    if has_feature("sse2"):
        called(builder, "llvm.x86.sse2.pause", _VOID)
    elif is_arm():
        called(builder, "llvm.aarch64.hint", _VOID, ir.IntType(32)(1))
    return NONE


@function(types.none)
def give_way(builder):
    """Let another thread have the processor."""
    if os.name == "posix":
        called(builder, "sched_yield", ir.IntType(32))
    elif os.name == "nt":
        called(builder, "SwitchToThread", ir.IntType(32))
    return NONE


@function(types.int64)
def nanoseconds(builder):
    """Return the time since some moment."""
    if os.name == "nt":
        milliseconds = called(builder, "GetTickCount64", INT64)
        return builder.mul(milliseconds, ir.Constant(INT64, 10**6))
    parts = [ir.Constant(ir.IntType(32), k) for k in (0, 1)]  # seconds, nanoseconds
    found = cgutils.alloca_once(builder, ir.LiteralStructType([INT64, INT64]))
    clock = ir.Constant(ir.IntType(32), time.CLOCK_MONOTONIC)
    called(builder, "clock_gettime", ir.IntType(32), clock, found)
    seconds, rest = (builder.load(builder.gep(found, [parts[0], part])) for part in parts)
    return builder.add(builder.mul(seconds, ir.Constant(INT64, 10**9)), rest)
