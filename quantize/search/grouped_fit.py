"""The last two steps of the search in `grouped.py`: the integers of all groups for a fixed d, and
the least-squares d for fixed integers.

See `steps.py` for the arrays x, w, own, groups and lanes, and `grouped_scan.py` for the columns of
`groups`.
"""

from __future__ import annotations

import numpy as np

from ...formats.kernel import unbound
from .grouped_scan import (
    ACCEPTED,
    CHOSEN,
    ERROR,
    FREE,
    IMPROVING,
    NEXT,
    SCALE,
    STRETCHED,
    SVV,
    SXV,
    TRIAL,
)
from .lanes import LANES

# Free names of the templates below, bound per type by `grouped_steps`.
GROUP, STEP = 16, 1
GAIN = 1.0
SHIFTS = np.zeros(1, dtype=np.float32)
error_lanes = nearest = nearest_integer = neighbours = settle_with = unbound
fit_sums = codes_of = round_d = unbound


def _neighbours(first, last, d, k, scale, inverse):
    """k = integers around `first`, and with a second shift around `last` in the second half of the
    lanes; scale = d k, and its inverse.
    """
    per_shift = LANES // len(SHIFTS)
    for c in range(len(k)):
        middle = first if c < per_shift else last
        offset = c if c < per_shift else c - per_shift
        integer = nearest_integer(middle + np.float32(STEP) * np.float32(offset - per_shift // 2))
        k[c] = integer
        scale[c] = d * integer
        inverse[c] = np.float32(1) / (d * integer) if d * integer != 0 else np.float32(0)


def _settle_with(x, own, d, groups, g, column, lanes):
    """Set groups[g, column:column+2] to the integer scale and the number of the shift for a fixed
    d. Return the weighted squared error.
    """
    per_shift = LANES // len(SHIFTS)
    inverse_d = np.float32(1) / d if d != 0 else np.float32(0)
    first = nearest_integer(groups[g, FREE] * inverse_d)
    last = nearest_integer(groups[g, FREE + len(SHIFTS) - 1] * inverse_d)
    neighbours(first, last, d, lanes[4], lanes[0], lanes[1])
    for c in range(LANES):
        lanes[2, c] = SHIFTS[c // per_shift]
    error_lanes(x, own, g * GROUP, GROUP, lanes[2], lanes[0], lanes[1], lanes[3])
    least, k, number = lanes[3, 0], lanes[4, 0], 0
    for c in range(1, LANES):
        if lanes[3, c] < least:
            least, k, number = lanes[3, c], lanes[4, c], c // per_shift
    groups[g, column] = k
    groups[g, column + 1] = np.float32(number)
    return least


def _settle(x, w, own, groups, lanes, g):
    groups[g, ERROR] = settle_with(x, own, groups[len(x) // GROUP, SCALE], groups, g, CHOSEN, lanes)


def _total(x, w, own, groups, lanes, row):
    n = len(x) // GROUP
    groups[n, ERROR] = np.float32(0)
    for g in range(n):
        groups[n, ERROR] += groups[g, ERROR]
    groups[n, IMPROVING] = np.float32(1)
    groups[n, ACCEPTED] = np.float32(0)


def least_squares_sums(x, w, at, d, k, shift, sxv, svv):
    """Add a group's share of the least-squares problem for d: sum w x (k v) and sum w (k v)^2,
    element i in lane i % LANES.
    """
    scale = d * k
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    for start in range(at, at + GROUP, LANES):
        for c in range(LANES):
            i = start + c
            v = k * (nearest(x[i] * inverse - shift) + shift)
            sxv[c] += (w[i] * x[i]) * v
            svv[c] += (w[i] * v) * v


def _fit(x, w, own, groups, lanes, g):
    """Accept the last trial if it was better; then groups[g, SXV] = sum w x (k v) and groups[g,
    SVV] = sum w (k v)^2, the group's share of the least-squares problem for d.
    """
    common = groups[len(x) // GROUP]
    if common[ACCEPTED] != 0:
        groups[g, CHOSEN] = groups[g, TRIAL]
        groups[g, CHOSEN + 1] = groups[g, TRIAL + 1]
    if common[IMPROVING] == 0:
        return
    k, shift = groups[g, CHOSEN], SHIFTS[int(groups[g, CHOSEN + 1])]
    for c in range(LANES):
        lanes[0, c] = np.float32(0)
        lanes[1, c] = np.float32(0)
    fit_sums(x, own, g * GROUP, common[SCALE], k, shift, lanes[0], lanes[1])
    sxv = svv = np.float32(0)
    for c in range(LANES):
        sxv += lanes[0, c]
        svv += lanes[1, c]
    groups[g, SXV] = sxv
    groups[g, SVV] = svv


def _refit(x, w, own, groups, lanes, row):
    """common[NEXT] = the least-squares d for the integers and values chosen; stop if it is the
    same as before.
    """
    common = groups[len(x) // GROUP]
    common[ACCEPTED] = np.float32(0)
    if common[IMPROVING] == 0:
        return
    sxv = svv = np.float32(0)
    for g in range(len(x) // GROUP):
        sxv += groups[g, SXV]
        svv += groups[g, SVV]
    d = round_d(sxv / svv) if svv != 0 else common[SCALE]
    common[NEXT] = d
    if d == common[SCALE]:
        common[IMPROVING] = np.float32(0)


def _retry(x, w, own, groups, lanes, g):
    common = groups[len(x) // GROUP]
    if common[IMPROVING] != 0:
        groups[g, ERROR] = settle_with(x, own, common[NEXT], groups, g, TRIAL, lanes)


def _judge(x, w, own, groups, lanes, row):
    common = groups[len(x) // GROUP]
    if common[IMPROVING] == 0:
        return
    error = np.float32(0)
    for g in range(len(x) // GROUP):
        error += groups[g, ERROR]
    if error < common[ERROR]:
        common[SCALE], common[ERROR], common[ACCEPTED] = common[NEXT], error, np.float32(1)
    else:
        common[IMPROVING] = np.float32(0)


def _stretch(x, w, own, groups, lanes, row):
    common = groups[len(x) // GROUP]
    common[STRETCHED] = round_d(common[SCALE] * np.float32(GAIN))


def _encode(x, w, own, groups, lanes, g):
    """Accept the last trial if it was better; own = the codes, as float32. They are those of d
    before it is stretched, which are closer to the optimum than the nearest codes afterwards
    (measured: IQ2_K has 1.5 % less divergence).
    """
    common = groups[len(x) // GROUP]
    if common[ACCEPTED] != 0:
        groups[g, CHOSEN] = groups[g, TRIAL]
        groups[g, CHOSEN + 1] = groups[g, TRIAL + 1]
    codes_of(
        x,
        g * GROUP,
        GROUP,
        common[SCALE] * groups[g, CHOSEN],
        SHIFTS[int(groups[g, CHOSEN + 1])],
        own,
    )


# Templates that the steps call, by free names without the underscore, in the order to bind them.
SETTLE_CALLS = (_neighbours, _settle_with)
SETTLE_STEPS = (("group", _settle), ("row", _total))
REFIT_STEPS = (("group", _fit), ("row", _refit), ("group", _retry), ("row", _judge))
LAST_STEPS = (("row", _stretch), ("group", _encode))
