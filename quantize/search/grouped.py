"""Search for types whose groups share one scale d: y_i = (d * k_g) * (v_i + shift_g), with a small integer k_g per group.

IQ2_K, IQ3_K, IQ4_K, IQ4_KS, Q6_K and their relatives differ in the value set, in the integers a group scale can be, and in
whether d belongs to a block (half precision) or to a row (float32). They share this search:

1. `scan_group`: per group and shift, the best free scale s from a geometric ladder on both signs; each rung is judged with
   its own least-squares scale.
2. `choose_d`: several d are tried, such that the largest s meets the ends of the integer range; the one with the smallest
   total error after every s/d is rounded wins.
3. `finish_group`: with d fixed, the integers around s/d are tried exactly, for each shift.
4. With all integers and values fixed the least-squares d is known in closed form; it is rounded as it will be stored, and
   step 3 is repeated as long as that lowers the error.

Weights are the importances themselves: what is minimised is sum_i w_i (x_i - y_i)^2, the importance matrix's estimate of the
damage to the layer's output. Below four bits two corrections lower the measured KL divergence (`docs/benchmarks/quality.md`):
`emphasis` multiplies the weights by (mean x^2 + x_i^2)^(1/4), and `gain` stretches d slightly, because a least-squares fit
always comes out shorter than the values it fits, and the lost length adds up over layers.

Arrays: x, w, own float32[n], own being scratch for the weights in use and at the end the codes; groups float32[n / GROUP, 6] with columns best scale
per shift (2), integer and shift number (2), a trial of these (2); lanes float32[6, LANES] is scratch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats.codecs.scalars import float_to_half, half_to_float
from ...formats.kernel import device_function, specialize
from . import lanes as lane_functions
from .lanes import LANES

# Free names of the templates below, bound per type by `grouped_search`.
GROUP, LOW, HIGH, STEP = 16, -32, 31, 1
EMPHASIS, GAIN = False, 1.0
SHIFTS = np.zeros(1, dtype=np.float32)
LADDER = np.ones(LANES, dtype=np.float32)
TARGETS = np.ones(LANES, dtype=np.float32)
score_lanes = error_lanes = nearest = nearest_integer = weigh = scan_group = choose_d = finish_group = fit_sums = None
codes_of = round_d = None


@device_function
def as_half(d):
    """d as a half holds it. Beyond the largest half that one, not infinity, which no decoder would survive."""
    return half_to_float(float_to_half(min(max(np.float32(-65504), d), np.float32(65504))))


@device_function
def as_float(d):
    return np.float32(d)


def _nearest_integer(t):
    """The allowed group scale nearest to t."""
    k = np.floor((t - np.float32(LOW)) / np.float32(STEP) + np.float32(0.5))
    return np.float32(LOW) + np.float32(STEP) * min(max(k, np.float32(0)), np.float32((HIGH - LOW) // STEP))


def _scan_group(x, w, at, groups, g, lanes):
    """groups[g, h]: the free scale for x[at:at+GROUP] under shift h, 0 if the group is all zero."""
    extreme = np.float32(0)
    for i in range(at, at + GROUP):
        if abs(x[i]) > abs(extreme):
            extreme = x[i]
    for h in range(len(SHIFTS)):
        groups[g, h] = np.float32(0)
        if extreme == 0:
            continue
        top = np.float32(0)
        for side in range(2):
            sign = np.float32(1 - 2 * side)
            for c in range(LANES):
                lanes[0, c] = sign * LADDER[c] / extreme
            score_lanes(x, w, at, GROUP, SHIFTS[h], lanes[0], lanes[1], lanes[2])
            for c in range(LANES):
                if lanes[1, c] * lanes[1, c] > top * lanes[2, c]:
                    top = lanes[1, c] * lanes[1, c] / lanes[2, c]
                    groups[g, h] = lanes[1, c] / lanes[2, c]


def _choose_d(x, w, groups, lanes):
    """The d with the smallest total error over all groups, not yet rounded as it will be stored."""
    largest = np.float32(0)
    for g in range(len(x) // GROUP):
        for h in range(len(SHIFTS)):
            if abs(groups[g, h]) > abs(largest):
                largest = groups[g, h]
    if largest == 0:
        return np.float32(0)
    for c in range(LANES):
        lanes[5, c] = np.float32(0)
    for g in range(len(x) // GROUP):
        for c in range(LANES):
            lanes[4, c] = np.float32(np.inf)
        for h in range(len(SHIFTS)):
            for c in range(LANES):
                d = largest / TARGETS[c]
                scale = d * nearest_integer(groups[g, h] / d)
                lanes[0, c] = scale
                lanes[1, c] = np.float32(1) / scale if scale != 0 else np.float32(0)
                lanes[2, c] = SHIFTS[h]
            error_lanes(x, w, g * GROUP, GROUP, lanes[2], lanes[0], lanes[1], lanes[3])
            for c in range(LANES):
                lanes[4, c] = min(lanes[4, c], lanes[3, c])
        for c in range(LANES):
            lanes[5, c] += lanes[4, c]
    winner = 0
    for c in range(1, LANES):
        if lanes[5, c] < lanes[5, winner]:
            winner = c
    return largest / TARGETS[winner]


def _finish_group(x, w, at, d, groups, g, column, lanes):
    """With d fixed: groups[g, column:column+2] = integer scale and number of the shift; returns the weighted squared error."""
    per_shift = LANES // len(SHIFTS)
    inverse_d = np.float32(1) / d if d != 0 else np.float32(0)
    for c in range(LANES):
        h = c // per_shift
        middle = nearest_integer(groups[g, h] * inverse_d)
        k = nearest_integer(middle + np.float32(STEP) * np.float32(c % per_shift - per_shift // 2))
        scale = d * k
        lanes[0, c] = scale
        lanes[1, c] = np.float32(1) / scale if scale != 0 else np.float32(0)
        lanes[2, c] = SHIFTS[h]
        lanes[4, c] = k
    error_lanes(x, w, at, GROUP, lanes[2], lanes[0], lanes[1], lanes[3])
    winner = 0
    for c in range(1, LANES):
        if lanes[3, c] < lanes[3, winner]:
            winner = c
    groups[g, column] = lanes[4, winner]
    groups[g, column + 1] = np.float32(winner // per_shift)
    return lanes[3, winner]


def _fit_sums(x, w, at, d, k, shift, sxv, svv):
    """Add a group's share to the least-squares problem for d: sum w x (k v) and sum w (k v)^2, element i in lane i % LANES."""
    scale = d * k
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    for start in range(at, at + GROUP, LANES):
        for c in range(LANES):
            i = start + c
            v = k * (nearest(x[i] * inverse - shift) + shift)
            sxv[c] += (w[i] * x[i]) * v
            svv[c] += (w[i] * v) * v


def _weigh(x, importance, own):
    """own = the weights to use, from the importances."""
    if not EMPHASIS:
        for i in range(len(x)):
            own[i] = importance[i]
        return
    mean = np.float32(0)
    for i in range(len(x)):
        mean += x[i] * x[i]
    mean /= np.float32(len(x))
    for i in range(len(x)):
        ratio = x[i] * x[i] / mean if mean > 0 else np.float32(0)
        own[i] = importance[i] * np.sqrt(np.sqrt(np.float32(1) + ratio))


def _search_groups(x, importance, own, groups, lanes):
    """All four steps for one block (or row). Returns d as stored; groups[:, 2:4] holds integers and shift numbers, own the
    codes, as float32."""
    n = len(x) // GROUP
    weigh(x, importance, own)
    w = own
    for g in range(n):
        scan_group(x, w, g * GROUP, groups, g, lanes)
    d = round_d(choose_d(x, w, groups, lanes))
    error = np.float32(0)
    for g in range(n):
        error += finish_group(x, w, g * GROUP, d, groups, g, 2, lanes)
    for _ in range(3):
        for c in range(LANES):
            lanes[4, c] = np.float32(0)
            lanes[5, c] = np.float32(0)
        for g in range(n):
            fit_sums(x, w, g * GROUP, d, groups[g, 2], SHIFTS[int(groups[g, 3])], lanes[4], lanes[5])
        sxv = np.float32(0)
        svv = np.float32(0)
        for c in range(LANES):
            sxv += lanes[4, c]
            svv += lanes[5, c]
        if svv == 0:
            break
        next_d = round_d(sxv / svv)
        if next_d == d:
            break
        next_error = np.float32(0)
        for g in range(n):
            next_error += finish_group(x, w, g * GROUP, next_d, groups, g, 4, lanes)
        if not next_error < error:
            break
        d, error = next_d, next_error
        for g in range(n):
            groups[g, 2] = groups[g, 4]
            groups[g, 3] = groups[g, 5]
    d = round_d(d * np.float32(GAIN))
    for g in range(n):
        codes_of(x, g * GROUP, GROUP, d * groups[g, 2], SHIFTS[int(groups[g, 3])], own)
    return d


def _codes_of(x, at, n, scale, shift, codes):
    """codes[i] = position, as a float32, of the value nearest to x[i] / scale in the value set, for n elements from `at` on."""
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    for i in range(at, at + n):
        t = x[i] * inverse - shift
        code = np.float32(0)
        for k in range(len(MIDDLES)):
            code += np.float32(1) if t > MIDDLES[k] else np.float32(0)
        codes[i] = code


def _codes_in_range(x, at, n, scale, shift, codes):
    """The same for a range of integers, where it needs no comparisons."""
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    for i in range(at, at + n):
        codes[i] = min(max(np.float32(0), nearest(x[i] * inverse - shift) - np.float32(FIRST)), np.float32(LAST - FIRST))


def _code_of(x, scale, shift):
    """Position of the value nearest to x / scale in the value set."""
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    t = x * inverse - shift
    code = 0
    for k in range(len(MIDDLES)):
        code += 1 if t > MIDDLES[k] else 0
    return code


def _code_in_range(x, scale, shift):
    """The same for a range of integers, where it needs no comparisons."""
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    return int(min(max(np.float32(FIRST), nearest(x * inverse - shift)), np.float32(LAST))) - FIRST


MIDDLES = np.zeros(1, dtype=np.float32)
FIRST, LAST = 0, 0


def value_set(name: str, values: np.ndarray) -> dict[str, object]:
    """The names that describe a set of ascending values: VALUES, MIDDLES, `nearest`, `code_of`(x, scale, shift) and
    `codes_of`(x, at, n, scale, shift, codes)."""
    values = np.asarray(values, dtype=np.float32)
    names: dict[str, object] = {"VALUES": values, "MIDDLES": ((values[1:] + values[:-1]) / 2).astype(np.float32)}
    if np.array_equal(values, np.arange(values[0], values[-1] + 1)):
        names |= {"FIRST": int(values[0]), "LAST": int(values[-1])}
        names["nearest"] = specialize(lane_functions.nearest_in_range, f"nearest_{name}", **names)
        names["code_of"] = specialize(_code_in_range, f"code_of_{name}", **names)
        names["codes_of"] = specialize(_codes_in_range, f"codes_of_{name}", **names)
    else:
        names["nearest"] = specialize(lane_functions.nearest_in_table, f"nearest_{name}", **names)
        names["code_of"] = specialize(_code_of, f"code_of_{name}", **names)
        names["codes_of"] = specialize(_codes_of, f"codes_of_{name}", **names)
    return names


def grouped_search(name: str, values: np.ndarray, *, group: int, integers: range, shifts: tuple[float, ...] = (0,),
                   reach: tuple[float, float], fill: tuple[float, float], half: bool, emphasis: bool = False,
                   gain: float = 1.0) -> Callable:
    """Compile the search for one type: search(x, w, own, groups, lanes) -> d.

    values: ascending value set; integers: what a group scale can be; shifts: the choices of moving the set;
    reach: the ladder, as multiples of (largest value) / (largest x); fill: the part of the integer range that the largest
    group scale is tried to occupy; half: d is stored in half precision (else float32); emphasis, gain: see above.
    """
    low, high = integers[0], integers[-1]
    part = np.linspace(*fill, LANES // 2)
    names = value_set(name, values)
    names |= {"GROUP": group, "LOW": low, "HIGH": high, "STEP": integers.step, "SHIFTS": np.array(shifts, dtype=np.float32),
              "EMPHASIS": emphasis, "GAIN": gain,
              "LADDER": (np.abs(values).max() * np.geomspace(*reach, LANES)).astype(np.float32),
              "TARGETS": np.concatenate([low * part, high * part]).astype(np.float32), "round_d": as_half if half else as_float}
    names["score_lanes"] = specialize(lane_functions.score_lanes, f"score_lanes_{name}", **names)
    names["error_lanes"] = specialize(lane_functions.error_lanes, f"error_lanes_{name}", **names)
    for template in (_nearest_integer, _weigh, _scan_group, _choose_d, _finish_group, _fit_sums):
        step = template.__name__.lstrip("_")
        names[step] = specialize(template, f"{step}_{name}", **names)
    return specialize(_search_groups, f"search_{name}", **names)
