"""Search for types with a scale and a minimum per group: y_i = (d * k_g) * q_i - (dmin * m_g), q_i in 0..LEVELS.

Q4_K and its relatives. Per group, a number of starting intervals is laid over the values; each is improved by alternating
between nearest codes and the weighted least-squares line (scale and minimum together, the minimum kept from going positive).
Then d and dmin are taken from the largest scale and minimum, the integers around each group's optimum are tried exactly, and
the least-squares (d, dmin) for the chosen integers is kept if it lowers the error.

Arrays: x, w float32[n]; groups float32[n / GROUP, 6]: free scale and minimum, integers k and m, a trial of these;
lanes float32[6, LANES] is scratch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats.kernel import specialize
from .grouped import as_half
from .lanes import LANES

# Free names of the templates, bound per type by `affine_search`.
GROUP, LEVELS, TOP = 32, 15, 63
SIGNED = False
LOWER = UPPER = np.zeros(LANES, dtype=np.float32)
line_lanes = fit_group = round_group = grid_error = None


def _line_lanes(x, w, at, scale, minimum, sl, sll, sxl):
    """For each lane: codes l nearest to (x + minimum) / scale, then sl = sum w l, sll = sum w l^2, sxl = sum w x l."""
    for c in range(LANES):
        sl[c] = np.float32(0)
        sll[c] = np.float32(0)
        sxl[c] = np.float32(0)
    for i in range(at, at + GROUP):
        wi = w[i]
        wx = wi * x[i]
        for c in range(LANES):
            l = np.floor((x[i] + minimum[c]) * scale[c] + np.float32(0.5))
            l = min(max(l, np.float32(0)), np.float32(LEVELS))
            sl[c] += wi * l
            sll[c] += (wi * l) * l
            sxl[c] += wx * l


def _fit_group(x, w, at, groups, g, lanes):
    """groups[g, 0:2]: free scale and minimum of x[at:at+GROUP]; 0, 0 if nothing is gained by any. The scale is >= 0, and so
    is the minimum unless SIGNED; a minimum of either sign gives lines that need not pass zero."""
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
    top = np.float32(-np.inf)
    for _ in range(3):
        line_lanes(x, w, at, lanes[0], lanes[1], lanes[2], lanes[3], lanes[4])
        for c in range(LANES):
            sl, sll, sxl = lanes[2, c], lanes[3, c], lanes[4, c]
            if not sll > 0:
                continue
            determinant = sw * sll - sl * sl
            scale = (sw * sxl - sx * sl) / determinant
            minimum = (sl * sxl - sll * sx) / determinant
            if not (determinant > 0 and (SIGNED or minimum >= 0)):  # all codes alike, or the line would start above zero
                minimum = np.float32(0)
                scale = sxl / sll
            if not scale > 0:
                continue
            # fall of the squared error against y = 0
            gain = np.float32(2) * (scale * sxl - minimum * sx) - (
                (scale * scale) * sll + (minimum * minimum) * sw - np.float32(2) * (scale * minimum) * sl)
            if gain > top:
                top = gain
                groups[g, 0] = scale
                groups[g, 1] = minimum
            lanes[0, c] = np.float32(1) / scale
            lanes[1, c] = minimum


def _grid_error(x, w, at, d, dmin, groups, g, column, lanes):
    """Best integers around the free scale and minimum for given d, dmin: groups[g, column:column+2]; returns the error."""
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
    winner = 0
    for c in range(1, LANES):
        if lanes[5, c] < lanes[5, winner]:
            winner = c
    groups[g, column] = lanes[0, winner]
    groups[g, column + 1] = lanes[1, winner]
    return lanes[5, winner]


def _search_affine(x, w, groups, lanes):
    """Returns (d, dmin) as stored; groups[:, 2:4] holds the integers k and m."""
    n = len(x) // GROUP
    top_scale = np.float32(0)
    top_minimum = np.float32(0)
    for g in range(n):
        fit_group(x, w, g * GROUP, groups, g, lanes)
        top_scale = max(top_scale, groups[g, 0])
        top_minimum = max(top_minimum, groups[g, 1])
    d = as_half(top_scale / np.float32(TOP))
    dmin = as_half(top_minimum / np.float32(TOP))
    error = np.float32(0)
    for g in range(n):
        error += grid_error(x, w, g * GROUP, d, dmin, groups, g, 2, lanes)
    for _ in range(3):
        saa = sab = sbb = sxa = sxb = np.float32(0)
        for g in range(n):
            k, m = groups[g, 2], groups[g, 3]
            inverse = np.float32(1) / (d * k) if d * k > 0 else np.float32(0)
            for i in range(g * GROUP, g * GROUP + GROUP):
                l = np.floor((x[i] + dmin * m) * inverse + np.float32(0.5))
                a = k * min(max(l, np.float32(0)), np.float32(LEVELS))
                wa = w[i] * a
                wm = w[i] * m
                saa += wa * a
                sab += wa * m
                sbb += wm * m
                sxa += wa * x[i]
                sxb += wm * x[i]
        determinant = saa * sbb - sab * sab
        if determinant > 0:
            next_d = as_half((sbb * sxa - sab * sxb) / determinant)
            next_dmin = as_half((sab * sxa - saa * sxb) / determinant)
        elif saa > 0:
            next_d, next_dmin = as_half(sxa / saa), dmin
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
    return int(min(max(np.float32(0), l), np.float32(LEVELS)))  # in this order max drops a NaN, which int would not stand


def affine_search(name: str, *, group: int, levels: int, top: int,
                  reach: tuple[float, float] = (0.7, 1.1)) -> tuple[Callable, Callable]:
    """Compile the search for one type: (search(x, w, groups, lanes) -> (d, dmin), code_of(x, scale, minimum) -> int).

    levels: largest code; top: largest integer scale and minimum; reach: parts of the way from 0 to the smallest and to the
    largest value at which the starting intervals end (4 by 4 combinations).
    """
    names = _names(group, levels, reach, TOP=top)
    for template in (_line_lanes, _fit_group, _grid_error):
        step = template.__name__.lstrip("_")
        names[step] = specialize(template, f"{step}_{name}", **names)
    return specialize(_search_affine, f"search_{name}", **names), specialize(_code_of, f"code_{name}", **names)


def group_fit(name: str, *, group: int, levels: int, signed: bool, reach: tuple[float, float]) -> tuple[Callable, Callable, Callable]:
    """The parts of a search that work on one group: compiled `_fit_group`, `_line_lanes` and `_code_of`."""
    names = _names(group, levels, reach, SIGNED=signed)
    names["line_lanes"] = specialize(_line_lanes, f"line_lanes_{name}", **names)
    return specialize(_fit_group, f"fit_group_{name}", **names), names["line_lanes"], specialize(_code_of, f"code_{name}", **names)


def _names(group: int, levels: int, reach: tuple[float, float], **more: object) -> dict[str, object]:
    ends = np.linspace(*reach, 4).astype(np.float32)
    return {"GROUP": group, "LEVELS": levels, "LOWER": np.repeat(ends, 4), "UPPER": np.tile(ends, 4)} | more
