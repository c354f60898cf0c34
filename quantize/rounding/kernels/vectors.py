"""Compiled loops over rows for types that store vectors of eight elements: indices into a table of
magnitudes, and signs. `feedback.py` says what the other arrays are.

A vector is chosen by the whole metric M of its eight columns: it minimizes (t - q) M (t - q)^T.
A table of vectors of four is used twice: the halves are chosen in turn, each with the other as it
is.
"""

from __future__ import annotations

import numpy as np

from ....formats.kernel import CompiledLoop, device_function

SIZE = 8


@device_function
def _choose(t, m, scale, table, even, found, q, scratch):
    """Set found int64[3] (indices of the halves, or of the whole and 0; sign bits) and q
    float32[8], the values, for the target t float32[8].

    table: float32[elements, entries]; even: the number of negative elements must be even; scratch:
    float32[7, at least 8 and entries].
    """
    size, count = table.shape
    x, sign, v, b = scratch[0], scratch[1], scratch[2], scratch[3]
    scores, sums, mm = scratch[4], scratch[5], scratch[6:]
    found[:] = 0
    if scale == 0:
        q[:] = np.float32(0)
        return
    negative = 0
    for i in range(SIZE):
        x[i] = t[i] / scale
        sign[i] = np.float32(1)
        if x[i] < 0:
            x[i] = -x[i]
            sign[i] = np.float32(-1)
            negative += 1
    if even and negative & 1:
        flipped = 0
        for i in range(1, SIZE):
            if m[i, i] * x[i] < m[flipped, flipped] * x[flipped]:
                flipped = i
        x[flipped] = -x[flipped]
        sign[flipped] = -sign[flipped]
    for i in range(SIZE):
        v[i] = x[i]
        if sign[i] < 0:
            found[2] |= 1 << i
    halves = SIZE // size
    for turn in range(2 * halves - 1):
        half = turn % halves
        first = half * size
        for i in range(size):
            total = np.float32(0)
            for j in range(SIZE):
                inside = first <= j < first + size
                value = x[j] if inside else x[j] - v[j]
                total += m[first + i, j] * sign[first + i] * sign[j] * value
            b[i] = total
            for j in range(i + 1):
                mm[0, j] = m[first + i, first + j] * sign[first + i] * sign[first + j]
            for c in range(count):
                sums[c] = mm[0, i] * table[i, c] - np.float32(2) * b[i]
            for j in range(i):
                twice = np.float32(2) * mm[0, j]
                for c in range(count):
                    sums[c] += twice * table[j, c]
            if i == 0:
                for c in range(count):
                    scores[c] = sums[c] * table[i, c]
            else:
                for c in range(count):
                    scores[c] += sums[c] * table[i, c]
        best = 0
        for c in range(1, count):
            if scores[c] < scores[best]:
                best = c
        found[half] = best
        for i in range(size):
            v[first + i] = table[i, best]
    for i in range(SIZE):
        q[i] = scale * sign[i] * v[i]


def _round_vectors(w, t, a, inverse, metric, scales, table, even, indices, signs, delta, first):
    """Choose the vectors of a block from column `first`. inverse, metric: float32[vectors, 8, 8] of
    all columns; scales float32[rows, vectors of the block]; indices int64[rows, n / elements of an
    index], signs int64[rows, vectors] of all columns.
    """
    width = t.shape[1]
    halves = SIZE // table.shape[0]
    scratch = np.empty((7, max(SIZE, table.shape[1])), dtype=np.float32)
    target, q = np.empty(SIZE, dtype=np.float32), np.empty(SIZE, dtype=np.float32)
    found = np.empty(3, dtype=np.int64)
    for r in range(len(t)):
        for vector in range(width // SIZE):
            start = vector * SIZE
            column = first + start
            number = column // SIZE
            for i in range(SIZE):
                total = np.float32(0)
                for j in range(SIZE):
                    total += (t[r, start + j] - w[r, column + j]) * inverse[number, j, i]
                target[i] = w[r, column + i] + total
            _choose(target, metric[number], scales[r, vector], table, even, found, q, scratch)
            signs[r, number] = found[2]
            for half in range(halves):
                indices[r, number * halves + half] = found[half]
            for i in range(SIZE):
                rest = w[r, column + i] - q[i]
                delta[r, column + i] = rest
                for k in range(start + i + 1, width):
                    t[r, k] += rest * a[column + i, first + k]


def _descend_vectors(q, g, h, inverse, scales, table, even, indices, signs):
    """Move single vectors as long as tr(dW H dW^T) falls. inverse: float32[vectors, 8, 8] of the
    blocks of `h` on its diagonal.
    """
    n = h.shape[0]
    halves = SIZE // table.shape[0]
    scratch = np.empty((7, max(SIZE, table.shape[1])), dtype=np.float32)
    target, new = np.empty(SIZE, dtype=np.float32), np.empty(SIZE, dtype=np.float32)
    found = np.empty(3, dtype=np.int64)
    for r in range(len(q)):
        for number in range(n // SIZE):
            column = number * SIZE
            for i in range(SIZE):
                total = np.float32(0)
                for j in range(SIZE):
                    total += g[r, column + j] * inverse[number, j, i]
                target[i] = q[r, column + i] + total
            metric = h[column : column + SIZE, column : column + SIZE]
            _choose(target, metric, scales[r, number], table, even, found, new, scratch)
            change = 0.0
            for i in range(SIZE):
                step = np.float64(new[i]) - np.float64(q[r, column + i])
                change -= 2 * step * g[r, column + i]
                for j in range(SIZE):
                    other = np.float64(new[j]) - np.float64(q[r, column + j])
                    change += step * other * h[column + i, column + j]
            if change >= 0:
                continue
            signs[r, number] = found[2]
            for half in range(halves):
                indices[r, number * halves + half] = found[half]
            for i in range(SIZE):
                moved = new[i] - q[r, column + i]
                q[r, column + i] = new[i]
                for k in range(n):
                    g[r, k] -= moved * h[column + i, k]


round_vectors = CompiledLoop(_round_vectors)
descend_vectors = CompiledLoop(_descend_vectors)
