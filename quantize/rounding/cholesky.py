"""Factor second moments in float64, with the same roundings on every machine and on GPUs.

Every element of the factor is the element of the matrix minus products, one after the other in
index order, then divided by the pivot. Blocks only decide what is done when: neither their size nor
the number of threads changes a bit. `cuda_kernels/sources/rounding/factor.cu` does the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...formats.kernel import CompiledLoop

_BLOCK = 32  # columns that are factored together
_CHUNK = 128  # columns of the rest that are updated together
_THREADED = 1024  # columns from which threads share the work


def _factor_rows(a, t, start, stop, first, last, failed):
    """Factor the columns from start to stop of the rows from first to last, of which those before
    stop are the block on the diagonal. t: float64[stop - start, n], the transposed result.
    """
    for i in range(first, last):
        for j in range(start, min(stop, i + 1)):
            if i == j:
                if not a[i, i] > 0:
                    failed[0] = 1
                    return
                a[i, i] = np.sqrt(a[i, i])
                t[j - start, i] = a[i, i]
                break
            value = a[i, j] / t[j - start, j]
            a[i, j] = value
            t[j - start, i] = value
            for l in range(j + 1, min(stop, i)):
                a[i, l] -= value * t[j - start, l]
            if i < stop:
                a[i, i] -= value * value


def _subtract(a, t, start, stop, first, last):
    """Subtract the products of the columns from start to stop, which are _BLOCK, from the rows from
    first to last.
    """
    b = np.zeros((_BLOCK, _CHUNK))
    for chunk in range(stop, last, _CHUNK):
        end = min(chunk + _CHUNK, last)
        for k in range(_BLOCK):
            for j in range(end - chunk):
                b[k, j] = t[k, chunk + j]
        for i in range(max(first, chunk), last):
            row = a[i, chunk : min(end, i + 1)]
            for k in range(0, _BLOCK, 8):
                v0 = a[i, start + k]
                v1 = a[i, start + k + 1]
                v2 = a[i, start + k + 2]
                v3 = a[i, start + k + 3]
                v4 = a[i, start + k + 4]
                v5 = a[i, start + k + 5]
                v6 = a[i, start + k + 6]
                v7 = a[i, start + k + 7]
                for j in range(len(row)):
                    value = row[j] - v0 * b[k, j]
                    value = value - v1 * b[k + 1, j]
                    value = value - v2 * b[k + 2, j]
                    value = value - v3 * b[k + 3, j]
                    value = value - v4 * b[k + 4, j]
                    value = value - v5 * b[k + 5, j]
                    value = value - v6 * b[k + 6, j]
                    row[j] = value - v7 * b[k + 7, j]


factor_rows = CompiledLoop(_factor_rows)
subtract = CompiledLoop(_subtract)


def lower_factor(a: np.ndarray) -> bool:
    """Replace the lower triangle of float64[n, n] by its Cholesky factor. Return False, with what
    is undefined in it, if the matrix is not definite.
    """
    n = len(a)
    if n < _THREADED:
        return _factored(a, lambda work, first, last: work(first, last))
    workers = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, thread_name_prefix="factor") as pool:

        def share(work: Callable[[int, int], None], first: int, last: int) -> None:
            cuts = [first + (last - first) * i // (2 * workers) for i in range(2 * workers + 1)]
            list(pool.map(work, cuts[:-1], cuts[1:]))

        return _factored(a, share)


def _factored(a: np.ndarray, share: Callable[[Callable[[int, int], None], int, int], None]) -> bool:
    n = len(a)
    failed = np.zeros(1, dtype=np.int64)
    t = np.zeros((_BLOCK, n))
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        factor_rows(a, t, start, stop, start, stop, failed)
        if failed[0]:
            return False

        def finish(first: int, last: int, start: int = start, stop: int = stop) -> None:
            factor_rows(a, t, start, stop, first, last, failed)

        def update(first: int, last: int, start: int = start, stop: int = stop) -> None:
            subtract(a, t, start, stop, first, last)

        share(finish, stop, n)
        share(update, stop, n)
    return True
