"""Compiled loops over rows for types that store a code for every element: rounding a block, moving
codes, refitting scales. `feedback.py` says what the arrays are.

`levels` float32[rows, groups, codes]: the value of every code in every group of `n / groups`
columns; `codes` uint8[rows, n].
"""

from __future__ import annotations

import numpy as np

from ....formats.codecs.scalars import nearest_half
from ....formats.kernel import CompiledLoop, device_function


@device_function
def _nearest(value, levels, ordered):
    """Return the code whose level is nearest. ordered: levels rise or fall with the code."""
    n = len(levels)
    if ordered:
        rising = levels[n - 1] >= levels[0]
        low = 0
        high = n - 1
        while high - low > 1:
            middle = (low + high) // 2
            if (levels[middle] <= value) == rising:
                low = middle
            else:
                high = middle
        return low if abs(value - levels[low]) <= abs(value - levels[high]) else high
    best = 0
    least = abs(value - levels[0])
    for c in range(1, n):
        error = abs(value - levels[c])
        if error < least:
            least = error
            best = c
    return best


def _round(w, t, a, levels, ordered, codes, delta, first):
    """Choose the codes of a block from column `first`, whose targets are t float32[rows, width]."""
    width = t.shape[1]
    group = width // levels.shape[1]
    for r in range(len(t)):
        for i in range(width):
            column = first + i
            code = _nearest(t[r, i], levels[r, i // group], ordered)
            codes[r, column] = code
            d = w[r, column] - levels[r, i // group, code]
            delta[r, column] = d
            for k in range(i + 1, width):
                t[r, k] += d * a[column, first + k]


def _round_settled(
    w, t, a, d, units, offsets, shifts, near, ordered, weights, codes, chosen, delta, first
):
    """`_round`, with the scale of each group chosen again for the values as they are when its turn
    comes.

    d: float32[rows]; units float32[groups, choices, codes], the values of the codes for d = 1;
    offsets float32[rows] and shifts float32[groups, choices], whose product is added; near
    int64[choices, n], the choices that are tried after each; weights float32[n]; chosen
    int64[rows, groups], which starts with the choices so far.
    """
    width = t.shape[1]
    groups = len(units)
    size = width // groups
    for r in range(len(t)):
        scale = d[r]
        inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
        for g in range(groups):
            start = chosen[r, g]
            best = start
            least = np.float32(np.inf)
            for turn in range(near.shape[1]):
                choice = near[start, turn]
                shift = offsets[r] * shifts[g, choice]
                total = np.float32(0)
                for i in range(g * size, (g + 1) * size):
                    value = t[r, i] - shift
                    code = _nearest(value * inverse, units[g, choice], ordered)
                    rest = value - scale * units[g, choice, code]
                    total += weights[first + i] * (rest * rest)
                    if total >= least:
                        break
                if total < least:
                    least = total
                    best = choice
            chosen[r, g] = best
            shift = offsets[r] * shifts[g, best]
            for i in range(g * size, (g + 1) * size):
                column = first + i
                code = _nearest((t[r, i] - shift) * inverse, units[g, best], ordered)
                codes[r, column] = code
                rest = w[r, column] - (shift + scale * units[g, best, code])
                delta[r, column] = rest
                for k in range(i + 1, width):
                    t[r, k] += rest * a[column, first + k]


def _descend(q, g, h, levels, ordered, codes):
    """Move single codes as long as tr(dW H dW^T) falls."""
    n = h.shape[0]
    group = n // levels.shape[1]
    for r in range(len(q)):
        for i in range(n):
            old = q[r, i]
            target = old + g[r, i] / h[i, i]
            code = _nearest(target, levels[r, i // group], ordered)
            new = levels[r, i // group, code]
            if abs(target - new) < abs(target - old):
                codes[r, i] = code
                q[r, i] = new
                step = new - old
                for k in range(n):
                    g[r, k] -= step * h[i, k]


def _refit(units, scales, q, g, h, half):
    """Move each scale to the value that is best with all codes as they are, as it is stored.

    units: float32[scales per block, rows, n], what a scale of 1 adds to each element; scales
    float32[rows, blocks, scales per block].
    """
    n = h.shape[0]
    blocks = scales.shape[1]
    size = n // blocks
    v = np.empty(n, dtype=np.float32)
    for r in range(len(q)):
        for b in range(blocks):
            for p in range(scales.shape[2]):
                v[:] = np.float32(0)
                for i in range(b * size, (b + 1) * size):
                    u = units[p, r, i]
                    for k in range(n):
                        v[k] += u * h[i, k]
                slope = 0.0
                curvature = 0.0
                for i in range(b * size, (b + 1) * size):
                    slope += np.float64(units[p, r, i]) * np.float64(g[r, i])
                    curvature += np.float64(units[p, r, i]) * np.float64(v[i])
                old = scales[r, b, p]
                if curvature <= 0:
                    continue
                new = np.float32(old + slope / curvature)
                if half:
                    new = nearest_half(new)
                if new * old <= 0:  # no scale changes its sign
                    continue
                step = np.float64(new) - np.float64(old)
                if step * (step * curvature - 2 * slope) >= 0:
                    continue
                scales[r, b, p] = new
                moved = np.float32(step)
                for i in range(b * size, (b + 1) * size):
                    q[r, i] += moved * units[p, r, i]
                for k in range(n):
                    g[r, k] -= moved * v[k]


round_block = CompiledLoop(_round)
round_settled = CompiledLoop(_round_settled)
descend = CompiledLoop(_descend)
refit = CompiledLoop(_refit)
