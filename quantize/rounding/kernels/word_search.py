"""Choose a word: in a table, or in a tree of boxes.

A word v with the scale s is chosen by the whole metric M of its columns: it minimizes (x - s v) M
(x - s v)^T = s^2 (t M t^T + v M v^T - 2 t M v^T), t = x / s.

Free names, bound per type: DIM, MAGNITUDES (a codebook of magnitudes, and a sign for each column),
those of the search in a tree (`quantize/search/trellis/nearest.py`), and the functions.
"""

from __future__ import annotations

import numpy as np

from ....formats.kernel import unbound

DIM, LEAF, NODES, FAN = 8, 64, 64, 16
MAGNITUDES = False
REACH = 1.0
RIGID = 0.5  # of the diagonal of the metric, what the distance to a box is measured with
MARGIN = 1e-5
prepare = score_one = unbound
# Places in the array `given`: the metric with doubled rows below the diagonal, twice t M, t, signs.
METRIC, TWICE, T, SIGN = 0, 64, 72, 80
GIVEN = 88
# Places in the array `work` of the search in a tree.
SCORES, LEAVES, NODE, WORK = 0, 64, 80, 144


def _prepare(x, m, scale, given):
    """Set `given` for the target x float32[DIM] and metric m float32[DIM, DIM]. Return t M t^T."""
    inverse = np.float32(1) / scale
    for i in range(DIM):
        t = x[i] * inverse
        given[SIGN + i] = np.float32(-1) if MAGNITUDES and t < 0 else np.float32(1)
        given[T + i] = t * given[SIGN + i]
    energy = np.float32(0)
    for i in range(DIM):
        total = np.float32(0)
        for j in range(DIM):
            entry = m[i, j] * (given[SIGN + i] * given[SIGN + j])
            total += entry * given[T + j]
            given[METRIC + DIM * i + j] = entry if i == j else entry + entry
        given[TWICE + i] = total + total
        energy += total * given[T + i]
    return energy


def _nearest_in_table(x, m, scale, book, start, books, indices, a, b, given, work, hits, eights):
    """Return (index of the best word, its error). books: float32[books, DIM, words]; work:
    float32[words]; the others are of the search in a tree.
    """
    energy = prepare(x, m, scale, given)
    table = books[book]
    count = table.shape[1]
    for c in range(count):
        score = np.float32(0)
        for i in range(DIM):
            inner = given[METRIC + DIM * i + i] * table[i, c] - given[TWICE + i]
            for j in range(i):
                inner += given[METRIC + DIM * i + j] * table[j, c]
            score += inner * table[i, c]
        work[c] = score
    best = 0
    for c in range(1, count):
        if work[c] < work[best]:
            best = c
    return best, (scale * scale) * max(energy + work[best], np.float32(0))


def _score_one(leaf_words, at, given):
    """Return the score of word `at` of a leaf."""
    score = np.float32(0)
    for i in range(DIM):
        inner = (
            given[METRIC + DIM * i + i] * np.float32(leaf_words[LEAF * i + at]) - given[TWICE + i]
        )
        for j in range(i):
            inner += given[METRIC + DIM * i + j] * np.float32(leaf_words[LEAF * j + at])
        score += inner * np.float32(leaf_words[LEAF * i + at])
    return score


def _nearest_in_tree(
    x, m, scale, book, start, words, indices, leaf_boxes, node_boxes, given, work, hits, eights
):
    """Return (index of the best word, its error). start: the place of a first word in the tree, or
    -1; the index is that place too. words, indices, leaf_boxes, node_boxes: see `search_tree`.

    Boxes that are farther than a part of the best error are skipped, which is not exact: see
    `quantize/search/trellis/nearest.py`.
    """
    energy = prepare(x, m, scale, given)
    margin = np.float32(MARGIN) * energy
    for c in range(NODES):
        total = np.float32(0)
        for i in range(DIM):
            gap = max(
                max(
                    node_boxes[book, 0, NODES * i + c] - given[T + i],
                    given[T + i] - node_boxes[book, 0, NODES * (DIM + i) + c],
                ),
                np.float32(0),
            )
            total += (given[METRIC + DIM * i + i] * gap) * gap
        work[NODE + c] = np.float32(RIGID) * total
    best = np.float32(np.inf)
    limit = np.float32(np.inf)
    found = start
    first = 0
    if start >= 0:
        best = score_one(words[book, start // LEAF], start % LEAF, given)
        limit = np.float32(REACH) * (energy + best) + margin
    else:  # no first word: judge the nearest leaf of the nearest node first
        first = -1
    visited = -1
    for visit in range(first, NODES):
        node = visit
        if visit < 0:
            node = 0
            for n in range(1, NODES):
                if work[NODE + n] < work[NODE + node]:
                    node = n
        if not work[NODE + node] < limit:
            continue
        for c in range(FAN):
            total = np.float32(0)
            for i in range(DIM):
                below = leaf_boxes[book, node, FAN * i + c] - given[T + i]
                above = given[T + i] - leaf_boxes[book, node, FAN * (DIM + i) + c]
                gap = max(max(below, above), np.float32(0))
                total += (given[METRIC + DIM * i + i] * gap) * gap
            work[LEAVES + c] = np.float32(RIGID) * total
        low = 0
        high = FAN
        if visit < 0:
            for c in range(1, FAN):
                if work[LEAVES + c] < work[LEAVES + low]:
                    low = c
            high = low + 1
        for child in range(low, high):
            leaf = node * FAN + child
            if not work[LEAVES + child] < limit or leaf == visited:
                continue
            leaf_words = words[book, leaf]
            for c in range(LEAF):
                score = np.float32(0)
                for i in range(DIM):
                    inner = (
                        given[METRIC + DIM * i + i] * np.float32(leaf_words[LEAF * i + c])
                        - given[TWICE + i]
                    )
                    for j in range(i):
                        inner += given[METRIC + DIM * i + j] * np.float32(leaf_words[LEAF * j + c])
                    score += inner * np.float32(leaf_words[LEAF * i + c])
                work[SCORES + c] = score
                hits[c] = score < best
            for eight in range(LEAF // 8):
                if eights[eight] != 0:
                    for c in range(8 * eight, 8 * eight + 8):
                        if work[SCORES + c] < best:
                            best = work[SCORES + c]
                            found = leaf * LEAF + c
            limit = np.float32(REACH) * (energy + best) + margin
            if visit < 0:
                visited = leaf
    return found, (scale * scale) * max(energy + best, np.float32(0))


def _put_word(scale, book, index, words, given, q):
    """Set q float32[DIM] to the values of a word, with the signs in `given`, of which the one that
    lowers the error most when it is turned is turned, as long as there is one. Return sign bits.
    """
    for i in range(DIM):
        q[i] = (
            words[book, index // LEAF, LEAF * i + index % LEAF] if LEAF else words[book, i, index]
        )
    if MAGNITUDES:
        for i in range(DIM):
            # v_i becomes -v_i: the score changes by -2 v_i (inner without v_i's own square).
            inner = -given[TWICE + i]
            for j in range(DIM):
                if j < i:
                    inner += given[METRIC + DIM * i + j] * q[j]
                elif j > i:
                    inner += given[METRIC + DIM * j + i] * q[j]
            if q[i] * inner > 0:
                q[i] = -q[i]
    bits = 0
    for i in range(DIM):
        q[i] = scale * (q[i] * given[SIGN + i])
        if MAGNITUDES and (q[i] < 0) != (scale < 0):
            bits |= 1 << i
    return bits
