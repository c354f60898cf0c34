"""The gated delta rule token by token, see `runtime.layers.delta_rule`.

Every 16 columns of a head's memory are independent of the others, and stay in the processor's
nearest cache for all tokens.
"""

from __future__ import annotations

import math

import numpy as np

from .. import vectors as v
from ..operations import operation


def delta_rule(arguments, thread, threads):
    """Arguments: q and k float32[sequences, n, heads, d], values float32[sequences, n, heads, dv],
    decay and beta float32[sequences, n, heads], memory float32[sequences, heads, d, dv], which is
    changed; address of the result, like the values; sequences, n, heads, d, dv. dv: a multiple of
    16, d: one of 4.
    """
    queries, keys, values = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    decays, betas, memory, out = (
        v.integer_at(arguments + 24),
        v.integer_at(arguments + 32),
        v.integer_at(arguments + 40),
        v.integer_at(arguments + 48),
    )
    sequences, n, heads = (
        v.integer_at(arguments + 56),
        v.integer_at(arguments + 64),
        v.integer_at(arguments + 72),
    )
    d, dv = v.integer_at(arguments + 80), v.integer_at(arguments + 88)
    slices, row = dv // 16, 4 * dv
    items = sequences * heads * slices
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        sequence, head, part = item // (heads * slices), item // slices % heads, item % slices
        state = memory + (sequence * heads + head) * d * row + 64 * part
        for t in range(n):
            at = (sequence * n + t) * heads + head
            q, k = queries + 4 * d * at, keys + 4 * d * at
            keep = v.splat(np.float32(math.exp(v.float_at(decays + 4 * at))))
            a, b = v.splat(np.float32(0)), v.splat(np.float32(0))
            e, f = v.splat(np.float32(0)), v.splat(np.float32(0))
            for i in range(0, d, 4):
                s = state + row * i
                a = v.fma(v.load_floats(s), v.splat(v.float_at(k + 4 * i)), a)
                b = v.fma(v.load_floats(s + row), v.splat(v.float_at(k + 4 * i + 4)), b)
                e = v.fma(v.load_floats(s + 2 * row), v.splat(v.float_at(k + 4 * i + 8)), e)
                f = v.fma(v.load_floats(s + 3 * row), v.splat(v.float_at(k + 4 * i + 12)), f)
            seen = v.mul(v.add(v.add(a, b), v.add(e, f)), keep)
            error = v.sub(v.load_floats(values + row * at + 64 * part), seen)
            error = v.mul(error, v.splat(v.float_at(betas + 4 * at)))
            a, b = v.splat(np.float32(0)), v.splat(np.float32(0))
            for i in range(0, d, 2):
                s = state + row * i
                first = v.mul(v.load_floats(s), keep)
                first = v.fma(error, v.splat(v.float_at(k + 4 * i)), first)
                v.store_floats(s, first)
                a = v.fma(first, v.splat(v.float_at(q + 4 * i)), a)
                second = v.mul(v.load_floats(s + row), keep)
                second = v.fma(error, v.splat(v.float_at(k + 4 * i + 4)), second)
                v.store_floats(s + row, second)
                b = v.fma(second, v.splat(v.float_at(q + 4 * i + 4)), b)
            v.store_floats(out + row * at + 64 * part, v.add(a, b))


def rule() -> int:
    """Return the operation `delta_rule`."""
    return operation(delta_rule)
