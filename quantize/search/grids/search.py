"""Search for the codebook types: y = (d * k_g) * (v + shift), where the vector v of 8 or 4 elements
is an entry of a grid.

1. `_scan_group`: per group, the best scale of a ladder, and then the least-squares scale s of the
   entries found with it.
2. `_choose_d`: the d for which the integers around s_g / d lose least, each group's loss near its
   s_g taken as a parabola.
3. `_finish_group`: with d fixed, the integers around s_g / d are tried exactly.
4. With all integers and entries fixed the least-squares d is known in closed form; step 3 is
   repeated with it as long as that lowers the error.

To judge a vector at a scale, each element is divided by the scale and rounded to a value that
occurs in the grid. The result is a point of a small cube; a table (`tables.py`) lists the NEAR
entries closest to each point, and these are compared exactly, with the weights. If signs are stored
separately, magnitudes are searched. If only 7 of 8 signs are stored, the cheapest element of a
vector with the wrong parity gets the wrong sign before the search.

Two corrections lower the measured KL divergence (`docs/benchmarks/quality.md`), as in
`../grouped.py`: `emphasis` raises the weights of large elements. A least-squares fit is shorter
than the values it fits, by the part e of their energy that is lost, so d is stretched by 1 + `gain`
* e after all entries are chosen; values that are represented exactly do not change.

Arrays: x, w, own float32[n], own holding the weights in use; groups float32[n / 16, >= 6]: scale,
curvature, integer, number of the shift, and a trial of these two; lanes float32[6, 16] is scratch:
entries and shifts of the current group (row 0), the values that its entries are compared with (1,
2), flipped element per eight of a block (4, 5).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....formats.codecs.scalars import nearest_half
from ....formats.kernel import specialize, unbound
from .group import GROUP_CALLS, LARGEST, settle_group
from .vectors import of_eight, of_three

# Free names of the templates below, bound per type by `grid_search`.
GROUP = 32
PARITY, COMMON_SHIFT = False, True
FIRST_STEP, STEP, LAST_STEP = 1, 2, 31
SHIFTS = np.zeros(1, dtype=np.float32)
LADDER = np.ones(16, dtype=np.float32)
TARGETS = np.ones(16, dtype=np.float32)
GAIN, ROUNDS = np.float32(0), 2
weigh = choose_flips = load_group = judge_group = fit_group = nearest_integer = unbound
scan_group = choose_d = finish_group = unbound


def _scan_group(x, w, at, groups, g, lanes, near):
    """groups[g, 0:2] = the free scale for x[at:at+GROUP], 0 if the group is all zero, and the
    curvature of the error around it; column 3 = the number of the shift, if the group has one.
    """
    groups[g, 0] = np.float32(0)
    groups[g, 1] = np.float32(0)
    groups[g, 3] = np.float32(0)
    top = load_group(x, at, lanes)
    if not top > 0:
        return
    least = np.float32(np.inf)
    for h in range(len(SHIFTS) if COMMON_SHIFT else 1):
        for c in range(len(LADDER)):
            error = judge_group(
                lanes, w, at, top * LADDER[c], h, h + 1 if COMMON_SHIFT else len(SHIFTS), near
            )
            if error < least:
                least = error
                sxv, svv = fit_group(lanes, w, at)
                groups[g, 0] = max(np.float32(0), sxv / svv) if svv > 0 else np.float32(0)
                groups[g, 1] = svv
                groups[g, 3] = np.float32(h)


def _nearest_integer(t):
    """Return the allowed group scale nearest to t."""
    k = np.floor((t - np.float32(FIRST_STEP)) / np.float32(STEP) + np.float32(0.5))
    return np.float32(FIRST_STEP) + np.float32(STEP) * min(
        max(np.float32(0), k), np.float32((LAST_STEP - FIRST_STEP) // STEP)
    )


def _choose_d(n, groups):
    """Return the d that loses least when the scales of n groups are rounded, fitted to them
    afterwards.
    """
    largest = np.float32(0)
    for g in range(n):
        largest = max(largest, groups[g, 0])
    best = np.float32(0)
    least = np.float32(np.inf)
    if not largest > 0:
        return best
    for c in range(len(TARGETS)):
        d = largest / TARGETS[c]
        inverse = np.float32(1) / d
        for _ in range(2):
            cost = np.float32(0)
            sks = np.float32(0)
            skk = np.float32(0)
            for g in range(n):
                k = nearest_integer(groups[g, 0] * inverse)
                rest = groups[g, 0] - d * k
                cost += (groups[g, 1] * rest) * rest
                ck = groups[g, 1] * k
                sks += ck * groups[g, 0]
                skk += ck * k
            if cost < least:
                least = cost
                best = d
            if skk > 0:
                d = sks / skk
                inverse = np.float32(1) / d if d > 0 else np.float32(0)
    return best


def _finish_group(x, w, at, d, groups, g, column, lanes, near):
    """Set groups[g, column:column+2] to the integer scale and the number of the shift for a fixed
    d. Return the weighted squared error and the sums for the least-squares d.
    """
    load_group(x, at, lanes)
    middle = nearest_integer(groups[g, 0] / d) if d > 0 else np.float32(FIRST_STEP)
    least = np.float32(np.inf)
    best_xv = np.float32(0)
    best_vv = np.float32(0)
    groups[g, column] = middle
    groups[g, column + 1] = groups[g, 3]
    second = middle + np.float32(STEP if d * middle < groups[g, 0] else -STEP)
    second = min(max(np.float32(FIRST_STEP), second), np.float32(LAST_STEP))
    for side in range(2):
        k = middle if side == 0 else second
        if side == 1 and second == middle:
            break
        for h in range(len(SHIFTS) if COMMON_SHIFT else 1):
            if COMMON_SHIFT and side == 1 and np.float32(h) != groups[g, column + 1]:
                continue
            error = judge_group(
                lanes, w, at, d * k, h, h + 1 if COMMON_SHIFT else len(SHIFTS), near
            )
            if error < least:
                least = error
                groups[g, column] = k
                groups[g, column + 1] = np.float32(h)
                sxv, svv = fit_group(lanes, w, at)
                best_xv = sxv * k
                best_vv = (svv * k) * k
    return least, best_xv, best_vv


def _search_grid(x, importance, own, groups, lanes, near):
    """Search one block (or row) in all four steps. Return d, and d stretched by the gain, which is
    stored. groups[:, 2:4] = integers and shift numbers, own = the weights, lanes[4:6] = the flipped
    elements.
    """
    n = len(x) // GROUP
    weigh(x, importance, own)
    if PARITY:
        choose_flips(x, own, lanes)
    for g in range(n):
        scan_group(x, own, g * GROUP, groups, g, lanes, near)
    d = nearest_half(choose_d(n, groups))
    error = np.float32(np.inf)
    kept = np.float32(0)
    for _ in range(ROUNDS):
        next_error = np.float32(0)
        sxv = np.float32(0)
        svv = np.float32(0)
        for g in range(n):
            this, xv, vv = finish_group(x, own, g * GROUP, d, groups, g, 4, lanes, near)
            next_error += this
            sxv += xv
            svv += vv
        if not next_error < error:
            break
        error = next_error
        kept = d
        for g in range(n):
            groups[g, 2] = groups[g, 4]
            groups[g, 3] = groups[g, 5]
        if not svv > 0:
            break
        d = nearest_half(sxv / svv)
        if d == kept:
            break
    energy = np.float32(0)
    for i in range(len(x)):
        t = min(abs(x[i]), LARGEST)
        energy += own[i] * t * t
    stretch = (
        np.float32(1) + GAIN * min(error / energy, np.float32(1)) if energy > 0 else np.float32(1)
    )
    return kept, kept * stretch


# What `_search_grid` calls, by free names without the underscore, in the order to bind them.
_CALLS = (*GROUP_CALLS, _nearest_integer, _scan_group, _choose_d, _finish_group)


def grid_search(
    grid: np.ndarray,
    unit: float = 1,
    *,
    group: int,
    integers: range,
    shifts: tuple[float, ...] = (0,),
    common_shift: bool = True,
    even_signs: bool = False,
    reach: tuple[float, float],
    rungs: int,
    fill: tuple[float, float] = (1.1, 0.75),
    emphasis: int = 0,
    gain: float = 0.0,
) -> tuple[Callable, Callable]:
    """Compile for one type: search(x, w, own, groups, lanes, near) -> (d, d to store), and
    settle(x, own, d, groups, g, lanes, near), which is called for each group afterwards and leaves
    its entries in `lanes`.

    grid: int8[entries, 8 or 4] of three or eight values, times `unit`; negative values mean that
    signs are part of the grid; group: elements per integer; shifts: the choices of moving all
    values, common to a group or one per vector; even_signs: the eighth sign follows from seven;
    reach, rungs: the ladder of scales, as multiples of (largest |x|) / (largest value); fill: the
    part of the integer range that the largest group scale is tried to occupy; emphasis: how often
    the square root is taken of 1 + x^2 / mean x^2, which multiplies the weights, 0 for not at all;
    gain: see above.
    """
    values = np.unique(grid).astype(np.float32) * np.float32(unit)
    step = values[1] - values[0]
    ladder = np.geomspace(*reach, rungs)
    names: dict[str, object] = {
        "DIMS": grid.shape[1],
        "BASE": len(values),
        "POWERS": (len(values) ** np.arange(grid.shape[1])[::-1]).astype(np.int32),
        "GROUP": group,
        "VALUES": values[[0, 1, -1]],
        "SLOPE": np.float32(1) / step,
        "OFFSET": np.float32(0.5) - values[0] / step,
        "SIGNED": bool(values[0] < 0),
        "PARITY": even_signs,
        "SHIFTS": np.array(shifts, dtype=np.float32),
        "COMMON_SHIFT": common_shift,
        "FIRST_STEP": integers[0],
        "STEP": integers.step,
        "LAST_STEP": integers[-1],
        "LADDER": (
            (ladder[np.argsort(np.abs(np.arange(rungs) - rungs / 2 + 0.4))] / values[-1]).astype(
                np.float32
            )
        ),
        "TARGETS": (
            np.linspace(integers[-1] * fill[0], integers[-1] * fill[1], 16).astype(np.float32)
        ),
        "EMPHASIS": emphasis,
        "GAIN": np.float32(gain),
        "element": of_three if len(values) == 3 else of_eight,
    }
    for template in _CALLS:
        step_name = template.__name__.lstrip("_")
        names[step_name] = specialize(template, **names)
    return specialize(_search_grid, **names), specialize(settle_group, **names)
