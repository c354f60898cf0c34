"""Search for types whose groups share one scale d: y_i = (d * k_g) * (v_i + shift_g), with a small
integer k_g per group.

IQ2_K, IQ3_K, IQ4_K, IQ4_KS, Q6_K and their relatives differ in the value set, in the integers a
group scale can be, and in whether d belongs to a block (half precision) or to a row (float32). They
share this search:

1. `_scan`: per group and shift, the best free scale s from a geometric ladder on both signs; each
   rung is judged with its own least-squares scale.
2. `_try_scales`, `_pick_scale`: several d are tried, chosen so that the largest s meets the ends of
   the integer range; the d with the smallest total error after rounding every s/d wins.
3. `_settle`: with d fixed, the integers around s/d are tried exactly, for each shift.
4. `_fit`, `_refit`: with all integers and values fixed the least-squares d has a closed form. It is
   rounded as it will be stored, and step 3 is repeated (`_retry`, `_judge`) as long as that lowers
   the error.

Weights are the importances themselves: the search minimises sum_i w_i (x_i - y_i)^2, the importance
matrix's estimate of the error in the layer's output. Below four bits two corrections lower the
measured KL divergence (`docs/benchmarks/quality.md`): `emphasis` multiplies the weights by (mean
x^2 + x_i^2)^(1/4), and `gain` stretches d slightly, because a least-squares fit is always shorter
than the values it fits, and the lost length adds up over layers.

The steps follow the contract of `steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats.codecs.scalars import nearest_half
from ...formats.kernel import device_function, specialize, unbound
from . import lanes as lane_functions
from .lanes import LANES, largest_of
from .steps import SUPER, Steps
from .values import value_set

# Free names of the templates below, bound per type by `grouped_steps`.
GROUP, LOW, HIGH, STEP = 16, -32, 31, 1
EMPHASIS, GAIN = False, 1.0
SHIFTS = np.zeros(1, dtype=np.float32)
LADDER = np.ones(LANES, dtype=np.float32)
TARGETS = np.ones(LANES, dtype=np.float32)
score_lanes = error_lanes = nearest = nearest_integer = rounded_scales = neighbours = (
    settle_with
) = fit_sums = codes_of = round_d = unbound

# Columns of `groups`: the best scale per shift (2); integer scale and number of the shift (2) and a
# trial of these (2); error of the last of them; shares of the least-squares sums; mean square of a
# block, in its first group; errors by candidate d.
FREE, CHOSEN, TRIAL, ERROR, SXV, SVV, MEAN, ERRORS = 0, 2, 4, 6, 7, 8, 9, 10
# Columns of the last row, which also uses ERROR and ERRORS for the totals. SCALE, NEXT, STRETCHED:
# values of d. IMPROVING: whether step 4 is repeated. ACCEPTED: whether the last trial was better.
SCALE, NEXT, STRETCHED, LARGEST, IMPROVING, ACCEPTED = 0, 1, 2, 3, 4, 5


@device_function
def as_half(d):
    """Return d in half precision. Larger numbers become the largest half, not infinity, which would
    decode to NaN.
    """
    return nearest_half(d)


@device_function
def as_row_float(d):
    """Return d in single precision, limited so that its product with any two signed bytes is
    finite.
    """
    return min(max(np.float32(-2e34), d), np.float32(2e34))


@device_function
def as_float(d):
    """Return d as float32: the rounding of a d that the row header stores in float32."""
    return np.float32(d)


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


def _fit_sums(x, w, at, d, k, shift, sxv, svv):
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


def grouped_steps(
    name: str,
    values: np.ndarray,
    *,
    group: int,
    integers: range,
    shifts: tuple[float, ...] = (0,),
    reach: tuple[float, float],
    fill: tuple[float, float],
    half: bool,
    rungs: int = LANES,
    emphasis: bool = False,
    gain: float = 1.0,
    rounds: int = 1,
    parts: dict[str, Callable] | None = None,
) -> Steps:
    """The steps of the search for one type. In the end groups[:-1, CHOSEN:CHOSEN+2] hold integers
    and shift numbers, groups[-1, STRETCHED] holds d as stored, and `own` the codes, as float32.

    values: ascending value set; integers: what a group scale can be; shifts: the choices of moving
    the set; reach, rungs: the ladder for either sign, as multiples of (largest value) / (largest
    x); fill: the part of the integer range that the largest group scale is tried to occupy; half: d
    is stored in half precision (else float32); emphasis, gain: see above; rounds: how often step 4
    is repeated at most (more than once lowers the error by less than 0.1 %); parts: templates that
    take the place of `score_lanes`, `error_lanes`, `fit_sums`, `codes_of` where the choice of one
    value depends on others; such a `codes_of` finds the weights where it stores the codes.
    """
    low, high = integers[0], integers[-1]
    part, ladder = np.linspace(*fill, LANES // 2), np.geomspace(*reach, rungs)
    names = value_set(values)
    names |= {
        "GROUP": group,
        "LOW": low,
        "HIGH": high,
        "STEP": integers.step,
        "SHIFTS": np.array(shifts, dtype=np.float32),
        "EMPHASIS": emphasis,
        "GAIN": gain,
        "LADDER": (np.abs(values).max() * np.concatenate([ladder, -ladder])).astype(np.float32),
        "TARGETS": np.concatenate([low * part, high * part]).astype(np.float32),
        "round_d": as_half if half else as_row_float,
    }
    judges = {
        "score_lanes": lane_functions.score_lanes,
        "error_lanes": lane_functions.error_lanes,
        "fit_sums": _fit_sums,
    }
    for part, template in (judges | (parts or {})).items():
        names[part] = specialize(template, **names)
    for template in (_nearest_integer, _rounded_scales, _neighbours, _settle_with):
        step = template.__name__.lstrip("_")
        names[step] = specialize(template, **names)
    order = [
        ("group", _scan),
        ("row", _largest),
        ("group", _try_scales),
        ("lane", _sum_errors),
        ("row", _pick_scale),
        ("group", _settle),
        ("row", _total),
    ]
    if emphasis:
        order.insert(0, ("block", _mean_square))
    again = [("group", _fit), ("row", _refit), ("group", _retry), ("row", _judge)]
    numbers = range(len(order), len(order) + len(again))
    order += [*again, ("row", _stretch), ("group", _encode)]
    compiled = {template: specialize(template, **names) for _, template in order}
    return Steps(
        name, group, tuple((over, compiled[template]) for over, template in order), numbers, rounds
    )
