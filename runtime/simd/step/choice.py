"""The largest of many numbers."""

from __future__ import annotations

import numpy as np
from numba import types

from ....formats.kernel import part_function
from .. import vectors as v
from ..vectors.core import INT16, INT64, function, splatted


@function(types.int64, v.F32, types.float32)
def _has_larger(builder, vector, than):
    """Return whether a lane is larger than a number, or is not a number: not 0 if so."""
    flags = builder.fcmp_unordered(">", vector, splatted(builder, than, "f32"))
    return builder.zext(builder.bitcast(flags, INT16), INT64)


@part_function
def _insert(x, i, values, ids, count, k):
    """Put element i into its place among the largest so far, after those that are as large. Return
    how many there are.
    """
    found = v.float_at(x + 4 * i)
    at = count if count < k else k - 1
    if count == k and not found > v.float_at(values + 4 * at):
        return count
    while at > 0 and found > v.float_at(values + 4 * (at - 1)):
        v.store_float(values + 4 * at, v.float_at(values + 4 * (at - 1)))
        v.store_integer(ids + 8 * at, v.integer_at(ids + 8 * (at - 1)))
        at -= 1
    v.store_float(values + 4 * at, found)
    v.store_integer(ids + 8 * at, i)
    return min(count + 1, k)


def largest(arguments, thread, threads):
    """The first thread: the k largest of n numbers, in descending order, the first one first among
    equals. Arguments: address of float32[n], n, k; addresses of float32[k] and int64[k], of float32
    that becomes 0 if all numbers are finite, and NaN otherwise.
    """
    if thread:
        return
    x, n, k = (
        v.integer_at(arguments),
        v.integer_at(arguments + 8),
        v.integer_at(arguments + 16),
    )
    values, ids = v.integer_at(arguments + 24), v.integer_at(arguments + 32)
    count, least = 0, np.float32(-np.inf)
    proof, rest = v.splat(np.float32(0)), np.float32(0)
    for i in range(0, n, 16):
        looks = count < k
        if i + 16 <= n:
            vector = v.load_floats(x + 4 * i)
            proof = v.fma(vector, v.splat(np.float32(0)), proof)
            looks |= _has_larger(vector, least) != 0
        else:
            looks = True
            for j in range(i, n):
                rest += np.float32(0) * v.float_at(x + 4 * j)
        if looks:
            for j in range(i, min(i + 16, n)):
                count = _insert(x, j, values, ids, count, k)
            if count == k:
                least = v.float_at(values + 4 * (k - 1))
    v.store_float(v.integer_at(arguments + 40), v.total(proof) + rest)
