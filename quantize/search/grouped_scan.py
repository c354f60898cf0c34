"""The first two steps of the search in `grouped.py`: the free scale of every group, and a first d.

See `steps.py` for the arrays x, w, own, groups and lanes; the columns of `groups` are below.
"""

from __future__ import annotations

import numpy as np

from ...formats.kernel import unbound
from .lanes import LANES, largest_of
from .steps import SUPER

# Free names of the templates below, bound per type by `grouped_steps`.
GROUP, LOW, HIGH, STEP = 16, -32, 31, 1
EMPHASIS = False
SHIFTS = np.zeros(1, dtype=np.float32)
LADDER = np.ones(LANES, dtype=np.float32)
TARGETS = np.ones(LANES, dtype=np.float32)
score_lanes = error_lanes = nearest_integer = rounded_scales = round_d = unbound

# Columns of `groups`: the best scale per shift (2); integer scale and number of the shift (2) and a
# trial of these (2); error of the last of them; shares of the least-squares sums; mean square of a
# block, in its first group; errors by candidate d.
FREE, CHOSEN, TRIAL, ERROR, SXV, SVV, MEAN, ERRORS = 0, 2, 4, 6, 7, 8, 9, 10
# Columns of the last row, which also uses ERROR and ERRORS for the totals. SCALE, NEXT, STRETCHED:
# values of d. IMPROVING: whether step 4 is repeated. ACCEPTED: whether the last trial was better.
SCALE, NEXT, STRETCHED, LARGEST, IMPROVING, ACCEPTED = 0, 1, 2, 3, 4, 5


def _nearest_integer(t):
    """Return the allowed group scale nearest to t."""
    k = np.floor((t - np.float32(LOW)) / np.float32(STEP) + np.float32(0.5))
    return np.float32(LOW) + np.float32(STEP) * min(
        max(k, np.float32(0)), np.float32((HIGH - LOW) // STEP)
    )


def _mean_square(x, w, own, groups, lanes, b):
    """groups[first group of block b, MEAN] = mean x^2 of the block."""
    mean = np.float32(0)
    for i in range(b * SUPER, (b + 1) * SUPER):
        mean += x[i] * x[i]
    groups[b * (SUPER // GROUP), MEAN] = mean / np.float32(SUPER)


def _scan(x, w, own, groups, lanes, g):
    """own = the weights to use; groups[g, FREE + h]: the free scale of the group under shift h, 0
    if the group is all zero.
    """
    at = g * GROUP
    mean = groups[at // SUPER * (SUPER // GROUP), MEAN] if EMPHASIS else np.float32(0)
    for i in range(at, at + GROUP):
        own[i] = w[i]
        if EMPHASIS:
            ratio = x[i] * x[i] / mean if mean > 0 else np.float32(0)
            own[i] = w[i] * np.sqrt(np.sqrt(np.float32(1) + ratio))
    extreme = largest_of(x[at : at + GROUP])
    for h in range(len(SHIFTS)):
        groups[g, FREE + h] = np.float32(0)
        if extreme == 0:
            continue
        top = np.float32(0)
        for part in range(len(LADDER) // LANES):
            for c in range(LANES):
                lanes[0, c] = LADDER[part * LANES + c] / extreme
            score_lanes(x, own, at, GROUP, SHIFTS[h], lanes[0], lanes[1], lanes[2])
            for c in range(LANES):  # no index but c: a GPU keeps the lanes in registers
                if lanes[1, c] * lanes[1, c] > top * lanes[2, c]:
                    top = lanes[1, c] * lanes[1, c] / lanes[2, c]
                    groups[g, FREE + h] = lanes[1, c] / lanes[2, c]


def _largest(x, w, own, groups, lanes, row):
    """common[LARGEST] = the free scale of largest magnitude."""
    n = len(x) // GROUP
    largest = np.float32(0)
    for g in range(n):
        for h in range(len(SHIFTS)):
            if abs(groups[g, FREE + h]) > abs(largest):
                largest = groups[g, FREE + h]
    groups[n, LARGEST] = largest


def _rounded_scales(free, largest, scale, inverse):
    """Set for each lane c scale[c] = the multiple of d = largest / TARGETS[c] nearest to the free
    scale, and its inverse.
    """
    for c in range(len(scale)):
        d = largest / TARGETS[c]
        rounded = d * nearest_integer(free / d)
        scale[c] = rounded
        inverse[c] = np.float32(1) / rounded if rounded != 0 else np.float32(0)


def _try_scales(x, w, own, groups, lanes, g):
    """groups[g, ERRORS + c] = error of the group with d = largest / TARGETS[c] and its scale
    rounded to a multiple of that.
    """
    largest = groups[len(x) // GROUP, LARGEST]
    for c in range(LANES):
        lanes[4, c] = np.float32(0) if largest == 0 else np.float32(np.inf)
    for h in range(len(SHIFTS)):
        if largest == 0:
            break
        rounded_scales(groups[g, FREE + h], largest, lanes[0], lanes[1])
        for c in range(LANES):
            lanes[2, c] = SHIFTS[h]
        error_lanes(x, own, g * GROUP, GROUP, lanes[2], lanes[0], lanes[1], lanes[3])
        for c in range(LANES):
            lanes[4, c] = min(lanes[4, c], lanes[3, c])
    for c in range(LANES):
        groups[g, ERRORS + c] = lanes[4, c]


def _sum_errors(x, w, own, groups, lanes, c):
    total = np.float32(0)
    for g in range(len(x) // GROUP):
        total += groups[g, ERRORS + c]
    groups[len(x) // GROUP, ERRORS + c] = total


def _pick_scale(x, w, own, groups, lanes, row):
    """common[SCALE] = the d with the smallest total error, rounded as it will be stored."""
    common = groups[len(x) // GROUP]
    winner = 0
    for c in range(1, LANES):
        if common[ERRORS + c] < common[ERRORS + winner]:
            winner = c
    common[SCALE] = round_d(common[LARGEST] / TARGETS[winner])


# Templates that the steps call, by free names without the underscore, in the order to bind them.
SCAN_CALLS = (_nearest_integer, _rounded_scales)
EMPHASIS_STEP = ("block", _mean_square)  # before the others, with `emphasis`
SCAN_STEPS = (
    ("group", _scan),
    ("row", _largest),
    ("group", _try_scales),
    ("lane", _sum_errors),
    ("row", _pick_scale),
)
