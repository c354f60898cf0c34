"""The gated delta rule token by token, see `runtime.layers.recurrent.delta_rule`.

The columns of a head's memory are independent of each other. A few of them stay in the processor's
nearest cache for all tokens.
"""

from __future__ import annotations

import math

import numpy as np

from .. import vectors as v
from ..operations import operation

# What `operation` binds: the vectors of columns that are taken together, 1 or 2. The sums of one
# alone wait for each other.
WIDE = 2


def delta_rule(arguments, thread, threads):
    """Arguments: q and k float32[sequences, n, key heads, d], values float32[sequences, n, heads,
    dv], decay and beta float32[sequences, n, heads], memory float32[sequences, heads, d, dv], which
    is changed; address of the result, like the values; sequences, n, heads, d, dv; key heads; 1 if
    head h has key head h % key heads, 0 if neighbours share one; floats from the values of a token
    to those of the next. dv: a multiple of 16 * WIDE, d: one of 4.
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
    key_heads, tiled = v.integer_at(arguments + 96), v.integer_at(arguments + 104)
    token = 4 * v.integer_at(arguments + 112)
    slices, row, zero = dv // (16 * WIDE), 4 * dv, v.splat(np.float32(0))
    items = sequences * heads * slices
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        sequence, head, part = item // (heads * slices), item // slices % heads, item % slices
        key_head = head % key_heads if tiled else head // (heads // key_heads)
        state = memory + (sequence * heads + head) * d * row + 64 * WIDE * part
        for t in range(n):
            at = (sequence * n + t) * heads + head
            of_key = 4 * d * ((sequence * n + t) * key_heads + key_head)
            q, k = queries + of_key, keys + of_key
            value = values + token * (sequence * n + t) + row * head + 64 * WIDE * part
            here = row * at + 64 * WIDE * part
            keep = v.splat(np.float32(math.exp(v.float_at(decays + 4 * at))))
            beta = v.splat(v.float_at(betas + 4 * at))
            a, b, e, f = zero, zero, zero, zero
            a_2, b_2, e_2, f_2 = zero, zero, zero, zero
            for i in range(0, d, 4):
                s = state + row * i
                k_0, k_1 = v.splat(v.float_at(k + 4 * i)), v.splat(v.float_at(k + 4 * i + 4))
                k_2, k_3 = v.splat(v.float_at(k + 4 * i + 8)), v.splat(v.float_at(k + 4 * i + 12))
                a, b = v.fma(v.load_floats(s), k_0, a), v.fma(v.load_floats(s + row), k_1, b)
                e = v.fma(v.load_floats(s + 2 * row), k_2, e)
                f = v.fma(v.load_floats(s + 3 * row), k_3, f)
                if WIDE == 2:
                    s += 64
                    a_2 = v.fma(v.load_floats(s), k_0, a_2)
                    b_2 = v.fma(v.load_floats(s + row), k_1, b_2)
                    e_2 = v.fma(v.load_floats(s + 2 * row), k_2, e_2)
                    f_2 = v.fma(v.load_floats(s + 3 * row), k_3, f_2)
            seen = v.mul(v.add(v.add(a, b), v.add(e, f)), keep)
            error, error_2 = v.mul(v.sub(v.load_floats(value), seen), beta), zero
            if WIDE == 2:
                seen = v.mul(v.add(v.add(a_2, b_2), v.add(e_2, f_2)), keep)
                error_2 = v.mul(v.sub(v.load_floats(value + 64), seen), beta)
            a, b, a_2, b_2 = zero, zero, zero, zero
            for i in range(0, d, 2):
                s = state + row * i
                k_0, k_1 = v.splat(v.float_at(k + 4 * i)), v.splat(v.float_at(k + 4 * i + 4))
                q_0, q_1 = v.splat(v.float_at(q + 4 * i)), v.splat(v.float_at(q + 4 * i + 4))
                first = v.fma(error, k_0, v.mul(v.load_floats(s), keep))
                second = v.fma(error, k_1, v.mul(v.load_floats(s + row), keep))
                v.store_floats(s, first)
                v.store_floats(s + row, second)
                a, b = v.fma(first, q_0, a), v.fma(second, q_1, b)
                if WIDE == 2:
                    s += 64
                    first = v.fma(error_2, k_0, v.mul(v.load_floats(s), keep))
                    second = v.fma(error_2, k_1, v.mul(v.load_floats(s + row), keep))
                    v.store_floats(s, first)
                    v.store_floats(s + row, second)
                    a_2, b_2 = v.fma(first, q_0, a_2), v.fma(second, q_1, b_2)
            v.store_floats(out + here, v.add(a, b))
            if WIDE == 2:
                v.store_floats(out + here + 64, v.add(a_2, b_2))


def rule(dv: int) -> int:
    """Return the operation `delta_rule` for values of dv elements, a multiple of 16."""
    wide = 1 if dv % 32 else 2
    return operation(delta_rule, f"delta_rule_{wide}", WIDE=wide)
