"""Search for types with a scale and a minimum per group: y_i = (d * k_g) * q_i - (dmin * m_g), q_i
in 0..LEVELS.

Q4_K and its relatives. Each group starts from several intervals; each is improved by alternating
between nearest codes and the weighted least-squares line (scale and minimum together; the line must
not start above zero). Then d and dmin follow from the largest scale and minimum, the integers
around each group's optimum are tried exactly, and the least-squares (d, dmin) for the chosen
integers is kept if it lowers the error.

Arrays: x, w float32[n]; groups float32[n / GROUP, 6]: free scale and minimum, integers k and m, a
trial of these; lanes float32[6, LANES] is scratch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats.codecs.scalars import nearest_half
from ...formats.kernel import specialize, unbound
from .lanes import LANES, lane_of_largest, lane_of_least

# Free names of the templates, bound per type by `affine_search`.
GROUP, LEVELS, TOP = 32, 15, 63
SIGNED = False
LOWER = UPPER = np.zeros(LANES, dtype=np.float32)
ROUNDS = 3  # of lines and codes in a group
FITS = 1  # of (d, dmin) and integers; more lower the error by less than 0.1 %
line_lanes = fit_lines = fit_group = grid_error = add_fit = unbound


def _line_lanes(x, w, at, scale, minimum, sl, sll, sxl):
    """Compute for each lane the codes l nearest to (x + minimum) / scale, then sl = sum w l, sll =
    sum w l^2, sxl = sum w x l.
    """
    for c in range(LANES):
        sl[c] = np.float32(0)
        sll[c] = np.float32(0)
        sxl[c] = np.float32(0)
    for i in range(at, at + GROUP, 2):  # two at a time: sums stay in registers for longer
        x0, x1, w0, w1 = x[i], x[i + 1], w[i], w[i + 1]
        for c in range(len(sl)):
            k = np.floor((x0 + minimum[c]) * scale[c] + np.float32(0.5))
            l = np.floor((x1 + minimum[c]) * scale[c] + np.float32(0.5))
            k = min(max(k, np.float32(0)), np.float32(LEVELS))
            l = min(max(l, np.float32(0)), np.float32(LEVELS))
            sl[c] += w0 * k + w1 * l
            sll[c] += (w0 * k) * k + (w1 * l) * l
            sxl[c] += (w0 * x0) * k + (w1 * x1) * l


def _fit_group(x, w, at, groups, g, lanes):
    """groups[g, 0:2] = free scale and minimum of x[at:at+GROUP]; 0, 0 if none lowers the error.
    The scale is >= 0, and so is the minimum unless SIGNED; a minimum of either sign allows lines
    that do not pass zero.
    """
    low = x[at] if SIGNED else np.float32(0)
    high = low
    sw = np.float32(0)
    sx = np.float32(0)
    for i in range(at, at + GROUP):
        low = min(low, x[i])
        high = max(high, x[i])
        sw += w[i]
        sx += w[i] * x[i]
    groups[g, 0] = np.float32(0)
    groups[g, 1] = -low
    if high == low:
        return
    middle = np.float32(0.5) * (low + high) if SIGNED else np.float32(0)
    for c in range(LANES):
        start = (low - middle) * LOWER[c]
        lanes[0, c] = np.float32(LEVELS) / ((high - middle) * UPPER[c] - start)
        lanes[1, c] = -(middle + start)
    top = np.float32(-1)
    for _ in range(ROUNDS):
        line_lanes(x, w, at, lanes[0], lanes[1], lanes[2], lanes[3], lanes[4])
        winner = fit_lines(lanes[0], lanes[1], lanes[2], lanes[3], lanes[4], sw, sx)
        if winner >= 0 and lanes[2, winner] > top:
            top = lanes[2, winner]
            groups[g, 0] = np.float32(1) / lanes[0, winner]
            groups[g, 1] = lanes[1, winner]


def _fit_lines(inverse, minimum, sl, sll, sxl, sw, sx):
    """Fit the least-squares line for the codes of every lane, given their sums. Afterwards inverse
    = 1 / scale (0: no line), minimum, and sl = fall of the squared error against y = 0. Return the
    lane where that is largest, or -1.

    There are no branches, and each loop uses few arrays: compilers turn that into vector
    instructions.
    """
    for c in range(len(sl)):
        determinant = sw * sll[c] - sl[c] * sl[c]
        divisor = determinant if determinant > 0 else np.float32(1)
        scale = (sw * sxl[c] - sx * sl[c]) / divisor
        m = (sl[c] * sxl[c] - sll[c] * sx) / divisor
        # else all codes are equal, or the line would start above zero
        line = (determinant > 0) & ((m >= 0) | SIGNED)
        through_zero = sxl[c] / (sll[c] if sll[c] > 0 else np.float32(1))
        scale = scale if line else through_zero
        inverse[c] = scale if (sll[c] > 0) & (scale > 0) else np.float32(0)
        minimum[c] = m if line else np.float32(0)
    for c in range(len(sl)):
        scale, m = inverse[c], minimum[c]
        sl[c] = np.float32(2) * (scale * sxl[c] - m * sx) - (
            (scale * scale) * sll[c] + (m * m) * sw - np.float32(2) * (scale * m) * sl[c]
        )
        sl[c] = max(np.float32(0), sl[c]) if scale > 0 else np.float32(0)
        inverse[c] = np.float32(1) / scale if scale > 0 else np.float32(0)
    winner = lane_of_largest(sl)
    return winner if inverse[winner] > 0 else -1


def _grid_error(x, w, at, d, dmin, groups, g, column, lanes):
    """groups[g, column:column+2] = the best integers around the free scale and minimum for given d
    and dmin. Return the error.
    """
    k0 = np.floor(groups[g, 0] / d) if d > 0 else np.float32(0)
    m0 = np.floor(groups[g, 1] / dmin) if dmin > 0 else np.float32(0)
    for c in range(LANES):
        lanes[0, c] = min(max(k0 + np.float32(c % 4 - 1), np.float32(0)), np.float32(TOP))
        lanes[1, c] = min(max(m0 + np.float32(c // 4 - 1), np.float32(0)), np.float32(TOP))
        lanes[2, c] = d * lanes[0, c]
        lanes[3, c] = dmin * lanes[1, c]
        lanes[4, c] = np.float32(1) / lanes[2, c] if lanes[2, c] > 0 else np.float32(0)
        lanes[5, c] = np.float32(0)
    for i in range(at, at + GROUP):
        wi = w[i]
        for c in range(LANES):
            l = np.floor((x[i] + lanes[3, c]) * lanes[4, c] + np.float32(0.5))
            l = min(max(l, np.float32(0)), np.float32(LEVELS))
            rest = x[i] - (lanes[2, c] * l - lanes[3, c])
            lanes[5, c] += (wi * rest) * rest
    winner = lane_of_least(lanes[5])
    groups[g, column] = lanes[0, winner]
    groups[g, column + 1] = lanes[1, winner]
    return lanes[5, winner]


def _add_fit(x, w, at, d, dmin, k, m, saa, sab, sbb, sxa, sxb):
    """Add a group's share of the least-squares problem for (d, dmin), y = d a - dmin m with a = k
    l; element i in lane i % LANES.
    """
    inverse = np.float32(1) / (d * k) if d * k > 0 else np.float32(0)
    for start in range(at, at + GROUP, LANES):
        for c in range(LANES):
            i = start + c
            l = np.floor((x[i] + dmin * m) * inverse + np.float32(0.5))
            a = k * min(max(l, np.float32(0)), np.float32(LEVELS))
            wa = w[i] * a
            wm = w[i] * m
            saa[c] += wa * a
            sab[c] += wa * m
            sbb[c] += wm * m
            sxa[c] += wa * x[i]
            sxb[c] += wm * x[i]


def _search_affine(x, w, groups, lanes):
    """Return (d, dmin) as stored; groups[:, 2:4] = the integers k and m."""
    n = len(x) // GROUP
    top_scale = np.float32(0)
    top_minimum = np.float32(0)
    for g in range(n):
        fit_group(x, w, g * GROUP, groups, g, lanes)
        top_scale = max(top_scale, groups[g, 0])
        top_minimum = max(top_minimum, groups[g, 1])
    d = nearest_half(top_scale / np.float32(TOP))
    dmin = nearest_half(top_minimum / np.float32(TOP))
    error = np.float32(0)
    for g in range(n):
        error += grid_error(x, w, g * GROUP, d, dmin, groups, g, 2, lanes)
    for _ in range(FITS):
        for c in range(LANES):
            lanes[0, c] = lanes[1, c] = lanes[2, c] = lanes[3, c] = lanes[4, c] = np.float32(0)
        for g in range(n):
            add_fit(
                x,
                w,
                g * GROUP,
                d,
                dmin,
                groups[g, 2],
                groups[g, 3],
                lanes[0],
                lanes[1],
                lanes[2],
                lanes[3],
                lanes[4],
            )
        saa = sab = sbb = sxa = sxb = np.float32(0)
        for c in range(LANES):
            saa += lanes[0, c]
            sab += lanes[1, c]
            sbb += lanes[2, c]
            sxa += lanes[3, c]
            sxb += lanes[4, c]
        determinant = saa * sbb - sab * sab
        if determinant > 0:
            next_d = nearest_half((sbb * sxa - sab * sxb) / determinant)
            next_dmin = nearest_half((sab * sxa - saa * sxb) / determinant)
        elif saa > 0:
            next_d, next_dmin = nearest_half(sxa / saa), dmin
        else:
            break
        if not next_d > 0 or next_dmin < 0 or (next_d == d and next_dmin == dmin):
            break
        next_error = np.float32(0)
        for g in range(n):
            next_error += grid_error(x, w, g * GROUP, next_d, next_dmin, groups, g, 4, lanes)
        if not next_error < error:
            break
        d, dmin, error = next_d, next_dmin, next_error
        for g in range(n):
            groups[g, 2] = groups[g, 4]
            groups[g, 3] = groups[g, 5]
    return d, dmin


def _code_of(x, scale, minimum):
    inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
    l = np.floor((x + minimum) * inverse + np.float32(0.5))
    # In this order max drops a NaN, which cannot become an integer.
    return int(min(max(np.float32(0), l), np.float32(LEVELS)))


def affine_search(
    *, group: int, levels: int, top: int, reach: tuple[float, float] = (0.7, 1.1)
) -> tuple[Callable, Callable]:
    """Compile the search for one type: (search(x, w, groups, lanes) -> (d, dmin), code_of(x, scale,
    minimum) -> int).

    levels: largest code; top: largest integer scale and minimum; reach: where the starting
    intervals end, as parts of the smallest and of the largest value (4 by 4 combinations).
    """
    names = _names(group, levels, reach, TOP=top)
    for template in (_line_lanes, _fit_lines, _fit_group, _grid_error, _add_fit):
        step = template.__name__.lstrip("_")
        names[step] = specialize(template, **names)
    return specialize(_search_affine, **names), specialize(_code_of, **names)


def group_fit(
    *, group: int, levels: int, signed: bool, reach: tuple[float, float]
) -> tuple[Callable, Callable, Callable]:
    """Compile the functions of a search that work on one group: `_fit_group`, `_line_lanes` and
    `_code_of`.
    """
    names = _names(group, levels, reach, SIGNED=signed)
    names["line_lanes"] = specialize(_line_lanes, **names)
    names["fit_lines"] = specialize(_fit_lines, **names)
    return (
        specialize(_fit_group, **names),
        names["line_lanes"],
        specialize(_code_of, **names),
    )


def _names(
    group: int, levels: int, reach: tuple[float, float], **more: object
) -> dict[str, object]:
    ends = np.linspace(*reach, 4).astype(np.float32)
    return {
        "GROUP": group,
        "LEVELS": levels,
        "LOWER": np.repeat(ends, 4),
        "UPPER": np.tile(ends, 4),
    } | more
