"""One group of a codebook type at one scale: the values that its entries are compared with, the
best entries, and the least-squares scale for them.

See `search.py` for what the arrays hold.
"""

from __future__ import annotations

import numpy as np

from ....formats.kernel import unbound
from .vectors import NEAR, closest_entry, error_of, point_of

# Free names of the templates below, bound per type by `grid_search`.
DIMS, GROUP = 8, 32
SLOPE, OFFSET = np.float32(1), np.float32(0)
SIGNED, PARITY, COMMON_SHIFT = False, False, True
SHIFTS = np.zeros(1, dtype=np.float32)
EMPHASIS = 0
VALUES = np.zeros(3, dtype=np.float32)  # the first, the second, and the last value in the grid
element = load_group = judge_group = unbound

LARGEST = np.float32(3e7)  # beyond what any of these types can hold; keeps sums of squares finite


def _weigh(x, importance, own):
    """own = the weights to use, from the importances."""
    mean = np.float32(0)
    for i in range(len(x)):
        top = min(abs(x[i]), LARGEST)
        mean += top * top
    mean /= np.float32(len(x))
    for i in range(len(x)):
        own[i] = importance[i]
        if EMPHASIS > 0 and mean > 0:
            top = min(abs(x[i]), LARGEST)
            ratio = np.float32(1) + top * top / mean
            for _ in range(EMPHASIS):
                ratio = np.sqrt(ratio)
            own[i] *= ratio


def _choose_flips(x, w, lanes):
    """lanes[4:6] = for every eight elements the one that gets the wrong sign, 8 if none."""
    for m in range(len(x) // 8):
        cheapest = 8
        odd = 0
        least = np.float32(np.inf)
        for i in range(8):
            t = x[8 * m + i]
            if t < 0:
                odd = 1 - odd
            cost = w[8 * m + i] * min(abs(t), LARGEST)
            if cost < least:
                least = cost
                cheapest = i
        lanes[4 + m // 16, m % 16] = np.float32(cheapest if odd else 8)


def _load_group(x, at, lanes):
    """lanes[1:3] = the values that entries are compared with: x[at:at+GROUP] itself, or its
    magnitudes, negative where the sign is stored wrong. Return the largest magnitude.
    """
    top = np.float32(0)
    for e in range(GROUP // 8):
        m = at // 8 + e
        flip = int(lanes[4 + m // 16, m % 16]) if PARITY else 8
        for i in range(8):
            l = 8 * e + i
            t = min(max(-LARGEST, x[at + l]), LARGEST)
            top = max(top, abs(t))
            if not SIGNED:
                t = abs(t)
                if PARITY and i == flip:
                    t = -t
            lanes[1 + l // 16, l % 16] = t
    return top


def _judge_group(lanes, w, at, scale, first_shift, last_shift, near):
    """Return the error of a group at a scale, each vector with its best entry and the best of the
    given shifts. lanes[0] = entries from 0 on, numbers of shifts from 8 on.
    """
    inverse = SLOPE / scale if scale > 0 else np.float32(0)
    error = np.float32(0)
    for m in range(GROUP // DIMS):
        row = 1 + m * DIMS // 16
        column = m * DIMS % 16
        best = np.float32(np.inf)
        for h in range(first_shift, last_shift):
            point = point_of(lanes, row, column, inverse, OFFSET - SHIFTS[h] * SLOPE)
            key = closest_entry(
                lanes,
                row,
                column,
                w,
                at + m * DIMS,
                near,
                point,
                scale * (VALUES[0] + SHIFTS[h]),
                scale * (VALUES[1] + SHIFTS[h]),
                scale * (VALUES[2] + SHIFTS[h]),
            )
            if h == first_shift or error_of(key) < best:
                best = error_of(key)
                lanes[0, m] = np.float32(near[point, key & NEAR - 1])
                lanes[0, 8 + m] = np.float32(h)
        error += best
    return error


def _fit_group(lanes, w, at):
    """Return (sum w x v, sum w v^2) of a group with the entries and shifts that `judge_group` left
    in lanes[0].
    """
    sxv = np.float32(0)
    svv = np.float32(0)
    for m in range(GROUP // DIMS):
        entry = int(lanes[0, m])
        shift = SHIFTS[int(lanes[0, 8 + m])]
        for i in range(DIMS):
            v = element(entry, i, VALUES[0] + shift, VALUES[1] + shift, VALUES[2] + shift)
            wv = w[at + m * DIMS + i] * v
            sxv += wv * lanes[1 + m * DIMS // 16, m * DIMS % 16 + i]
            svv += wv * v
    return sxv, svv


def settle_group(x, w, d, groups, g, lanes, near):
    """lanes[0] = the entries and shifts of group g (see `judge_group`) for the d and the integers
    that were found.
    """
    load_group(x, g * GROUP, lanes)
    h = int(groups[g, 3])
    judge_group(
        lanes, w, g * GROUP, d * groups[g, 2], h, h + 1 if COMMON_SHIFT else len(SHIFTS), near
    )


# Templates that others call, by free names without the underscore, in the order to bind them.
GROUP_CALLS = (
    _weigh,
    _choose_flips,
    _load_group,
    point_of,
    closest_entry,
    _judge_group,
    _fit_group,
)
