"""The best code word of a trellis type for one group of values at one scale.

For a scale s, a group x with weights w and a code word v: sum w (x - s v)^2 = s^2 (sum w t^2 + sum w v (v - 2 t)), t = x / s.
The second sum is the score of v. Boxes (`trellis_tree.py`) whose distance from t is not below that of the best word found are
left out, with a margin far above the rounding errors. So the result does not depend on the order of the visits: it is the
true optimum, the word with the least score as computed here, and of equals the one with the lowest index.

REACH below 1 gives that up for speed: boxes are left out that are farther than this part of the best distance (squared).

Free names, bound per type: DIM, LEAF, NODES, REACH, and the functions themselves.
"""

from __future__ import annotations

import numpy as np

DIM, LEAF, NODES, FAN = 8, 64, 64, 16
REACH = 1.0
MARGIN = 1e-5
BEST_FIRST = 1
box_distances = judge_leaf = visit_node = score_word = None


def _box_distances(boxes, t, w, n, out):
    """out[c] = sum w (distance of t from box c)^2 for the n boxes float32[lowest/highest, DIM, n]."""
    for c in range(n):
        total = np.float32(0)
        for i in range(DIM):
            gap = max(max(boxes[0, i, c] - t[i], t[i] - boxes[1, i, c]), np.float32(0))
            total += (w[i] * gap) * gap
        out[c] = total


def _judge_leaf(words, indices, twice, w, scores, best, index):
    """Let the words int8[DIM, LEAF] of a leaf compete with the best score so far; returns the better score, index[0] its index."""
    for c in range(LEAF):
        score = np.float32(0)
        for i in range(DIM):
            v = np.float32(words[i, c])
            score += (w[i] * v) * (v - twice[i])
        scores[c] = score
    found = np.int32(0)
    for c in range(LEAF):
        found |= np.int32(scores[c] <= best)
    if found:
        for c in range(LEAF):
            if scores[c] < best or (scores[c] == best and indices[c] < index[0]):
                best = scores[c]
                index[0] = indices[c]
    return best


def _score_word(index, start, twice, w):
    """The score of the word that the decoder makes of an index."""
    state = index + start
    score = np.float32(0)
    for i in range(DIM):
        state = trellis_step(state)
        v = np.float32(trellis_value(state))
        v = abs(v) if MAGNITUDES else v
        score += (w[i] * v) * (v - twice[i])
    return score


def _nearest_word(x, w, scale, budget, words, indices, leaf_boxes, node_boxes, start, work, index):
    """The least sum w (x - scale v)^2, if it is below `budget`; index[0] is the word's index, and on entry that of a word to
    begin with, or -1. Otherwise something not below `budget`.

    x, w: float32[DIM]; words, indices, leaf_boxes, node_boxes: one book of `search_tree`; start: the generator's state before
    index 0; work: float32[2 * DIM + NODES + FAN + LEAF].
    """
    t, twice = work[:DIM], work[DIM : 2 * DIM]
    node_distance, rest = work[2 * DIM : 2 * DIM + NODES], work[2 * DIM + NODES :]
    leaf_distance, scores = rest[:FAN], rest[FAN : FAN + LEAF]
    inverse = np.float32(1) / scale
    energy = np.float32(0)
    for i in range(DIM):
        t[i] = x[i] * inverse
        twice[i] = t[i] + t[i]
        energy += (w[i] * t[i]) * t[i]
    margin = np.float32(MARGIN) * energy
    allowed = budget * (inverse * inverse) + margin
    box_distances(node_boxes, t, w, NODES, node_distance)
    best = np.float32(np.inf)
    limit = allowed
    nearest = -1
    if index[0] >= 0:
        best = score_word(index[0], start, twice, w)
        limit = min(limit, np.float32(REACH) * (energy + best) + margin)
    else:  # nothing to begin with: the nearest leaf of the nearest node is judged first
        n = 0
        for m in range(1, NODES):
            if node_distance[m] < node_distance[n]:
                n = m
        box_distances(leaf_boxes[n], t, w, FAN, leaf_distance)
        c = 0
        for m in range(1, FAN):
            if leaf_distance[m] < leaf_distance[c]:
                c = m
        nearest = n * FAN + c
        best = judge_leaf(words[nearest], indices[nearest], twice, w, scores, best, index)
        limit = min(limit, np.float32(REACH) * (energy + best) + margin)
    for n in range(NODES):
        if node_distance[n] < limit:
            box_distances(leaf_boxes[n], t, w, FAN, leaf_distance)
            for c in range(FAN):
                if leaf_distance[c] < limit and n * FAN + c != nearest:
                    better = judge_leaf(words[n * FAN + c], indices[n * FAN + c], twice, w, scores, best, index)
                    if better < best:
                        best = better
                        limit = min(allowed, np.float32(REACH) * (energy + best) + margin)
    return (scale * scale) * max(energy + best, np.float32(0))


MAGNITUDES = False
trellis_step = trellis_value = None
