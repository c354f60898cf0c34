"""The best code word of a trellis type for one group of values at one scale.

For a scale s, a group x with weights w and a code word v: sum w (x - s v)^2 = s^2 (sum w t^2 + sum
w v (v - 2 t)), t = x / s. The second sum is the score of v. Boxes (`tree.py`) whose
distance from t is not below that of the best word so far are skipped, with a margin far above the
rounding errors. So the result does not depend on the order of visits: it is the true optimum, the
word with the least score as computed here, and of equals the one with the lowest index.

REACH below 1 trades that for speed: boxes farther than this part of the best (squared) distance are
skipped.

Free names, bound per type: DIM, LEAF, NODES, REACH, and the functions themselves.
"""

from __future__ import annotations

import numpy as np

from ....formats.kernel import unbound

DIM, LEAF, NODES, FAN = 8, 64, 64, 16
REACH = 1.0
MAGNITUDES = False
MARGIN = 1e-5
score_word = trellis_step = trellis_value = unbound
# Places in the scratch arrays `given`, which the loops read, and `work`, which they write. Few
# arrays in a single function leave LLVM little to check for overlaps before it uses vector
# instructions, and nothing to pass through memory.
T, TWICE, W = 0, 8, 16
SCORES, LEAVES, NODE = 0, 64, 80
GIVEN, WORK = 24, 144


def _score_word(index, start, given):
    """Return the score of the word that the decoder makes from an index."""
    state = index + start
    score = np.float32(0)
    for i in range(DIM):
        state = trellis_step(state)
        v = np.float32(trellis_value(state))
        v = abs(v) if MAGNITUDES else v
        score += (given[W + i] * v) * (v - given[TWICE + i])
    return score


def _nearest_word(
    x,
    w,
    at,
    scale,
    budget,
    book,
    start,
    words,
    indices,
    leaf_boxes,
    node_boxes,
    given,
    work,
    hits,
    hits_by_eight,
    index,
):
    """Return the least sum w (x - scale v)^2 over x[at : at+DIM] if it is below `budget`, otherwise
    a number that is not. index[0] = the word's index; on entry it is that of a first word, or -1.

    words, indices, leaf_boxes, node_boxes: see `search_tree`; start: the generator's state before
    index 0 of the book. Scratch: given float32[GIVEN], work float32[WORK], hits uint8[LEAF] and the
    same bytes as int64.
    """
    inverse = np.float32(1) / scale
    energy = np.float32(0)
    for i in range(DIM):
        t = x[at + i] * inverse
        given[T + i] = t
        given[TWICE + i] = t + t
        given[W + i] = w[at + i]
        energy += (w[at + i] * t) * t
    margin = np.float32(MARGIN) * energy
    allowed = budget * (inverse * inverse) + margin
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
            total += (given[W + i] * gap) * gap
        work[NODE + c] = total
    best = np.float32(np.inf)
    limit = np.float32(np.inf)
    first = 0
    if index[0] >= 0:
        best = score_word(index[0], start, given)
        limit = min(allowed, np.float32(REACH) * (energy + best) + margin)
    else:  # no first word: judge the nearest leaf of the nearest node first
        first = -1
    nearest = -1
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
                total += (given[W + i] * gap) * gap
            work[LEAVES + c] = total
        low = 0
        high = FAN
        if visit < 0:
            for c in range(1, FAN):
                if work[LEAVES + c] < work[LEAVES + low]:
                    low = c
            high = low + 1
        for child in range(low, high):
            leaf = node * FAN + child
            if not work[LEAVES + child] < limit or leaf == nearest:
                continue
            for c in range(LEAF):
                score = np.float32(0)
                for i in range(DIM):
                    v = np.float32(words[book, leaf, LEAF * i + c])
                    score += (given[W + i] * v) * (v - given[TWICE + i])
                work[SCORES + c] = score
                hits[c] = score <= best
            for eight in range(LEAF // 8):
                if hits_by_eight[eight] != 0:
                    for c in range(8 * eight, 8 * eight + 8):
                        score = work[SCORES + c]
                        if score < best or (score == best and indices[book, leaf, c] < index[0]):
                            best = score
                            index[0] = indices[book, leaf, c]
            limit = min(allowed, np.float32(REACH) * (energy + best) + margin)
            if visit < 0:
                nearest = leaf
    return (scale * scale) * max(energy + best, np.float32(0))
