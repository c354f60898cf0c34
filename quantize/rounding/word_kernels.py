"""Compiled loops over rows for types whose columns are stored as words: an index into a codebook
for every DIM columns, and a scale for every group of words. `kernels.py` says what the other arrays
are.

A word v with the scale s is chosen by the whole metric M of its columns: it minimizes (x - s v) M
(x - s v)^T = s^2 (t M t^T + v M v^T - 2 t M v^T), t = x / s. All scales of a group that are worth a
trial are tried, each with the errors of its words fed back, and the one with the least sum is kept.

Free names, bound per type: DIM, MAGNITUDES (a codebook of magnitudes, and a sign for each column),
those of the search in a tree (`quantize/search/trellis/nearest.py`), and the functions.
"""

from __future__ import annotations

import numpy as np

from ...formats.kernel import unbound

DIM, LEAF, NODES, FAN = 8, 64, 64, 16
MAGNITUDES = False
REACH = 1.0
RIGID = 0.5  # of the diagonal of the metric, what the distance to a box is measured with
MARGIN = 1e-5
nearest = candidates = prepare = score_one = put_word = unbound
# Places in the array `given`: the metric with doubled rows below the diagonal, twice t M, t, signs.
METRIC, TWICE, T, SIGN = 0, 64, 72, 80
GIVEN = 88
# Places in the array `work` of the search in a tree.
SCORES, LEAVES, NODE, WORK = 0, 64, 80, 144
MOST = 64  # scales that are tried for a group


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


def _candidates_near(t, w, d, start, near, factors, scratch, picks):
    """picks[:n] = the scales to try for a group after the one that the search chose. Return n."""
    for n in range(near.shape[1]):
        picks[n] = near[start, n]
    return near.shape[1]


TRIALS = 2
guess_scale = choose_trials = unbound
POSITIVE = NEGATIVE = np.ones(1, dtype=np.float32)


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


conditional = codes_in_turn = unbound
CODES = 16  # of an element of IQ4_KSS


def _conditional(m, given):
    """Put B and W of m = B diag(W) B^T, B upper with ones on its diagonal, into `given`."""
    for back in range(DIM):
        k = DIM - 1 - back
        weight = m[k, k]
        for l in range(k + 1, DIM):
            weight -= given[DIM * k + l] * given[DIM * k + l] * given[TWICE + l]
        given[TWICE + k] = weight
        for j in range(k):
            total = m[j, k]
            for l in range(k + 1, DIM):
                total -= given[DIM * j + l] * given[DIM * k + l] * given[TWICE + l]
            given[DIM * j + k] = total / weight


def _codes_in_turn(x, scale, values, flipped, given, work):
    """Return (codes, parity, error) of a word whose elements are chosen one after another.

    flipped: the element that takes the nearest code of the parity that its nearest code does not
    have; the last one then makes the parity even. DIM for none.
    """
    codes = 0
    parity = 0
    error = np.float32(0)
    for k in range(DIM):
        target = x[k]
        for j in range(k):
            target += work[j] * given[DIM * j + k]
        even_code = 0
        odd_code = 0
        even_least = np.float32(np.inf)
        odd_least = np.float32(np.inf)
        for c in range(CODES):
            rest = abs(target - scale * values[c])
            ones = c ^ c >> 2
            if (ones ^ ones >> 1) & 1:
                if rest < odd_least:
                    odd_least = rest
                    odd_code = c
            elif rest < even_least:
                even_least = rest
                even_code = c
        odd = 0 if even_least <= odd_least else 1
        if k == flipped:
            odd = 1 - odd
        if flipped < DIM and k == DIM - 1:
            odd = parity
        parity ^= odd
        code = odd_code if odd else even_code
        rest = odd_least if odd else even_least
        codes |= code << (4 * k)
        work[k] = x[k] - scale * values[code]
        error += given[TWICE + k] * (rest * rest)
    return codes, parity, error


def _nearest_even(x, m, scale, book, start, values, indices, a, b, given, work, hits, eights):
    """Return (codes, error) of about the best word with an even number of ones. values: float32[2,
    1, CODES].
    """
    conditional(m, given)
    codes, parity, error = codes_in_turn(x, scale, values[book, 0], DIM, given, work)
    if parity == 0:
        return codes, error
    least = np.float32(np.inf)
    for flipped in range(DIM):
        made, _, error = codes_in_turn(x, scale, values[book, 0], flipped, given, work)
        if error < least:
            codes = made
            least = error
    return codes, least


def _put_codes(scale, book, index, values, given, q):
    """Set q float32[DIM] to the values of codes."""
    for i in range(DIM):
        q[i] = scale * values[book, 0, index >> (4 * i) & 15]
    return 0
