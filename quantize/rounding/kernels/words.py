"""Compiled loops over rows for types whose columns are stored as words: an index into a codebook
for every DIM columns, and a scale for every group of words. `feedback.py` says what the other
arrays are, `word_search.py` and `even_words.py` choose a word.

All scales of a group that are worth a trial are tried, each with the errors of its words fed back,
and the one with the least sum is kept.

Free names, bound per type: DIM, and the functions.
"""

from __future__ import annotations

import numpy as np

from ....formats.kernel import unbound
from .word_search import GIVEN, WORK

DIM = 8
MOST = 64  # scales that are tried for a group
TRIALS = 2
POSITIVE = NEGATIVE = np.ones(1, dtype=np.float32)
nearest = candidates = put_word = guess_scale = choose_trials = unbound


def _candidates_near(t, w, d, start, near, factors, scratch, picks):
    """picks[:n] = the scales to try for a group after the one that the search chose. Return n."""
    for n in range(near.shape[1]):
        picks[n] = near[start, n]
    return near.shape[1]


def _candidates_by_norm(t, w, d, start, near, factors, scratch, picks):
    """picks[:n] = the scales around a guess from a norm of the group's values. near: int64[books,
    256], the number of the scale for each multiple + 128. Return n.
    """
    guess = guess_scale(t, w) / abs(d)
    n = 0
    for side in range(2):
        table = POSITIVE if side == 0 else NEGATIVE
        if len(table) == 0:
            continue
        choose_trials(table, guess, scratch)
        for book in range(len(near)):
            for j in range(TRIALS):
                multiple = int(scratch[j]) if side == 0 else -int(scratch[j])
                picks[n] = near[book, multiple + 128]
                n += 1
    return n


def _round_words(
    w,
    t,
    a,
    inverse,
    metric,
    weights,
    d,
    factors,
    book_of,
    near,
    words,
    indices,
    leaf_boxes,
    node_boxes,
    chosen,
    found,
    signs,
    delta,
    first,
):
    """Choose scales and words of a block from column `first`. inverse, metric: float32[words, DIM,
    DIM] and weights float32[n] of all columns; d float32[rows]; factors float32[scales], what d is
    multiplied by, and book_of int64[scales]; chosen int64[rows, groups], which starts with what the
    search chose; found int64[rows, n / DIM] and signs, of the same shape, of all columns.
    """
    width = t.shape[1]
    groups = chosen.shape[1]
    size = width // groups
    per_group = size // DIM
    given = np.empty(GIVEN, dtype=np.float32)
    work = np.empty(max(WORK, words.shape[2]), dtype=np.float32)
    eights = np.empty(8, dtype=np.int64)
    hits = eights.view(np.uint8)
    target, q = np.empty(DIM, dtype=np.float32), np.empty(DIM, dtype=np.float32)
    now, rest = np.empty(size, dtype=np.float32), np.empty(size, dtype=np.float32)
    best_rest = np.empty(size, dtype=np.float32)
    trial, best = np.zeros(per_group, dtype=np.int64), np.zeros(per_group, dtype=np.int64)
    trial_signs, best_signs = (
        np.zeros(per_group, dtype=np.int64),
        np.zeros(per_group, dtype=np.int64),
    )
    picks, scratch = np.empty(MOST, dtype=np.int64), np.empty(MOST, dtype=np.float32)
    for r in range(len(t)):
        for g in range(groups):
            at = g * size
            column = first + at
            number = column // DIM
            least = np.float32(np.inf)
            pick = chosen[r, g]
            trial[:] = -1
            count = 0
            if d[r] != 0:
                count = candidates(
                    t[r, at : at + size],
                    weights[column : column + size],
                    d[r],
                    chosen[r, g],
                    near,
                    factors,
                    scratch,
                    picks,
                )
            for turn in range(count):
                scale = d[r] * factors[picks[turn]]
                if scale == 0:
                    continue
                book = book_of[picks[turn]]
                total = np.float32(0)
                now[:] = t[r, at : at + size]
                for v in range(per_group):
                    here = DIM * v
                    for i in range(DIM):
                        moved = np.float32(0)
                        for j in range(DIM):
                            moved += (now[here + j] - w[r, column + here + j]) * inverse[
                                number + v, j, i
                            ]
                        target[i] = w[r, column + here + i] + moved
                    same = turn > 0 and book_of[picks[turn - 1]] == book
                    index, error = nearest(
                        target,
                        metric[number + v],
                        scale,
                        book,
                        trial[v] if same else -1,
                        words,
                        indices,
                        leaf_boxes,
                        node_boxes,
                        given,
                        work,
                        hits,
                        eights,
                    )
                    trial[v] = index
                    trial_signs[v] = put_word(scale, book, index, words, given, q)
                    total += error
                    if not total < least:  # cannot win
                        break
                    for i in range(DIM):
                        off = w[r, column + here + i] - q[i]
                        rest[here + i] = off
                        for k in range(here + i + 1, size):
                            now[k] += off * a[column + here + i, column + k]
                if total < least:
                    least = total
                    pick = picks[turn]
                    best_rest[:] = rest
                    best[:] = trial
                    best_signs[:] = trial_signs
            if least == np.inf:
                best[:] = 0
                best_signs[:] = 0
                best_rest[:] = w[r, column : column + size]
            chosen[r, g] = pick
            for v in range(per_group):
                found[r, number + v] = best[v]
                signs[r, number + v] = best_signs[v]
            for i in range(size):
                off = best_rest[i]
                delta[r, column + i] = off
                for k in range(at + size, width):
                    t[r, k] += off * a[column + i, first + k]


def _descend_words(
    q, g, h, inverse, scales, books, words, indices, leaf_boxes, node_boxes, found, signs
):
    """Move single words as long as tr(dW H dW^T) falls. inverse: float32[words, DIM, DIM] of the
    blocks of `h` on its diagonal; scales float32[rows, groups], books int64[rows, groups].
    """
    n = h.shape[0]
    per_group = n // DIM // scales.shape[1]
    given = np.empty(GIVEN, dtype=np.float32)
    work = np.empty(max(WORK, words.shape[2]), dtype=np.float32)
    eights = np.empty(8, dtype=np.int64)
    hits = eights.view(np.uint8)
    target, new = np.empty(DIM, dtype=np.float32), np.empty(DIM, dtype=np.float32)
    for r in range(len(q)):
        for number in range(n // DIM):
            scale = scales[r, number // per_group]
            book = books[r, number // per_group]
            if scale == 0:
                continue
            column = number * DIM
            for i in range(DIM):
                total = np.float32(0)
                for j in range(DIM):
                    total += g[r, column + j] * inverse[number, j, i]
                target[i] = q[r, column + i] + total
            index, _ = nearest(
                target,
                h[column : column + DIM, column : column + DIM],
                scale,
                book,
                found[r, number],
                words,
                indices,
                leaf_boxes,
                node_boxes,
                given,
                work,
                hits,
                eights,
            )
            bits = put_word(scale, book, index, words, given, new)
            change = 0.0
            for i in range(DIM):
                step = np.float64(new[i]) - np.float64(q[r, column + i])
                change -= 2 * step * g[r, column + i]
                for j in range(DIM):
                    other = np.float64(new[j]) - np.float64(q[r, column + j])
                    change += step * other * h[column + i, column + j]
            if change >= 0:
                continue
            found[r, number] = index
            signs[r, number] = bits
            for i in range(DIM):
                moved = new[i] - q[r, column + i]
                q[r, column + i] = new[i]
                for k in range(n):
                    g[r, k] -= moved * h[column + i, k]
