"""IQ4_KSS: IQ4_KS in exactly four bits, with a constraint on every four codes. Byte map:
`formats/codecs/iq_ks.py`.

The 16 bits of four codes (of elements 2n, 2n+1, 2n+16, 2n+17 of a group) have an even number of
ones; the bit that this saves per word stores the scales. With the scale fixed, each element has a
best value among the codes of even parity and one among those of odd parity. The better of the two
for every element, with a change of the one element where it costs least if the parity is odd, is
the best of all allowed choices: this is no approximation.

The search is that of `grouped.py` with this choice in place of the nearest value.
"""

from __future__ import annotations

import numpy as np

from ...formats.codecs.scalars import write_u16
from ...formats.kernel import inlined_function
from ...formats.tables import IQ4NL_VALUES
from .grouped import grouped_steps
from .grouped_scan import CHOSEN
from .iq_ks import float_head
from .lanes import LANES
from .steps import RowSearch

_PARITY = np.array([code.bit_count() & 1 for code in range(16)])
_EVEN_CODES, _ODD_CODES = (
    np.flatnonzero(parity == _PARITY).astype(np.float32) for parity in (0, 1)
)
_EVEN, _ODD = IQ4NL_VALUES[_PARITY == 0], IQ4NL_VALUES[_PARITY == 1]
_EVEN_MIDDLES, _ODD_MIDDLES = ((values[1:] + values[:-1]) / 2 for values in (_EVEN, _ODD))


@inlined_function
def _nearest_even(t):
    v = _EVEN[0]
    for k in range(7):
        v = _EVEN[k + 1] if t > _EVEN_MIDDLES[k] else v
    return v


@inlined_function
def _nearest_odd(t):
    v = _ODD[0]
    for k in range(7):
        v = _ODD[k + 1] if t > _ODD_MIDDLES[k] else v
    return v


@inlined_function
def _even_code(t):
    code = _EVEN_CODES[0]
    for k in range(7):
        code = _EVEN_CODES[k + 1] if t > _EVEN_MIDDLES[k] else code
    return code


@inlined_function
def _odd_code(t):
    code = _ODD_CODES[0]
    for k in range(7):
        code = _ODD_CODES[k + 1] if t > _ODD_MIDDLES[k] else code
    return code


@inlined_function
def _add_score(x, w, inverse, shift, parity, least, sxv, svv, dxv, dvv):
    """Add one of four elements. parity: -1 while an odd number of codes is odd; least: the smallest
    cost of a change so far, which would add dxv and dvv to the sums sxv and svv.
    """
    t = x * inverse - shift
    even = _nearest_even(t)
    odd = _nearest_odd(t)
    delta = w * ((t - odd) * (t - odd) - (t - even) * (t - even))
    cost = abs(delta)
    v = (odd if delta < 0 else even) + shift
    other = (even if delta < 0 else odd) + shift
    wx = w * x
    by_xv = wx * (other - v)
    by_vv = w * (other * other - v * v)
    dxv = by_xv if cost < least else dxv
    dvv = by_vv if cost < least else dvv
    least = min(cost, least)
    turn = np.float32(-1) if delta < 0 else np.float32(1)
    return parity * turn, least, sxv + wx * v, svv + (w * v) * v, dxv, dvv


@inlined_function
def _four_scores(x0, x1, x2, x3, w0, w1, w2, w3, inverse, shift):
    """Return (sum w x v, sum w v^2) of four elements."""
    zero = np.float32(0)
    parity, least, sxv, svv, dxv, dvv = np.float32(1), np.float32(np.inf), zero, zero, zero, zero
    parity, least, sxv, svv, dxv, dvv = _add_score(
        x0, w0, inverse, shift, parity, least, sxv, svv, dxv, dvv
    )
    parity, least, sxv, svv, dxv, dvv = _add_score(
        x1, w1, inverse, shift, parity, least, sxv, svv, dxv, dvv
    )
    parity, least, sxv, svv, dxv, dvv = _add_score(
        x2, w2, inverse, shift, parity, least, sxv, svv, dxv, dvv
    )
    parity, least, sxv, svv, dxv, dvv = _add_score(
        x3, w3, inverse, shift, parity, least, sxv, svv, dxv, dvv
    )
    dxv = dxv if parity < 0 else zero
    dvv = dvv if parity < 0 else zero
    return sxv + dxv, svv + dvv


def _score_lanes(x, w, at, n, shift, inverse, sxv, svv):
    for c in range(LANES):
        sxv[c] = np.float32(0)
        svv[c] = np.float32(0)
    for i in range(at, at + 16, 2):
        x0, x1, x2, x3 = x[i], x[i + 1], x[i + 16], x[i + 17]
        w0, w1, w2, w3 = w[i], w[i + 1], w[i + 16], w[i + 17]
        for c in range(LANES):
            a, b = _four_scores(x0, x1, x2, x3, w0, w1, w2, w3, inverse[c], shift)
            sxv[c] += a
            svv[c] += b


@inlined_function
def _add_error(x, w, inverse, scale, shift, parity, least, error):
    t = x * inverse - shift
    even = x - scale * (_nearest_even(t) + shift)
    odd = x - scale * (_nearest_odd(t) + shift)
    even_error = (w * even) * even
    odd_error = (w * odd) * odd
    return (
        -parity if odd_error < even_error else parity,
        min(least, abs(odd_error - even_error)),
        error + min(even_error, odd_error),
    )


def _error_lanes(x, w, at, n, shift, scale, inverse, error):
    for c in range(LANES):
        error[c] = np.float32(0)
    for i in range(at, at + 16, 2):
        x0, x1, x2, x3 = x[i], x[i + 1], x[i + 16], x[i + 17]
        w0, w1, w2, w3 = w[i], w[i + 1], w[i + 16], w[i + 17]
        for c in range(LANES):
            parity, least, four = np.float32(1), np.float32(np.inf), np.float32(0)
            parity, least, four = _add_error(
                x0, w0, inverse[c], scale[c], shift[c], parity, least, four
            )
            parity, least, four = _add_error(
                x1, w1, inverse[c], scale[c], shift[c], parity, least, four
            )
            parity, least, four = _add_error(
                x2, w2, inverse[c], scale[c], shift[c], parity, least, four
            )
            parity, least, four = _add_error(
                x3, w3, inverse[c], scale[c], shift[c], parity, least, four
            )
            error[c] += four + (least if parity < 0 else np.float32(0))


def _fit_sums(x, w, at, d, k, shift, sxv, svv):
    scale = d * k
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    for c in range(8):
        i = at + 2 * c
        a, b = _four_scores(
            x[i],
            x[i + 1],
            x[i + 16],
            x[i + 17],
            w[i],
            w[i + 1],
            w[i + 16],
            w[i + 17],
            inverse,
            shift,
        )
        sxv[c] += k * a
        svv[c] += (k * b) * k


@inlined_function
def _costs(x, w, inverse, shift):
    """Return (code, cost of the other parity, its code, 1 if the first code is odd)."""
    t = x * inverse - shift
    even = t - _nearest_even(t)
    odd = t - _nearest_odd(t)
    delta = w * (odd * odd - even * even)
    if delta < 0:
        return _odd_code(t), -delta, _even_code(t), 1
    return _even_code(t), delta, _odd_code(t), 0


def _codes_of(x, at, n, scale, shift, codes):
    """codes holds the weights on entry."""
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    for i in range(at, at + 16, 2):
        odd = 0
        least = np.float32(np.inf)
        change = i
        other = np.float32(0)
        for e in (i, i + 1, i + 16, i + 17):
            codes[e], cost, second, one = _costs(x[e], codes[e], inverse, shift)
            odd ^= one
            if cost < least:
                least, change, other = cost, e, second
        if odd:
            codes[change] = other


def iq4_kss(block, codes, groups):
    """Write an IQ4_KSS block, uint8[128], from its codes, float32[256], and the rows of
    `groups`.
    """
    for b in range(8):
        scale = (int(groups[b, CHOSEN]) + 127) | int(groups[b, CHOSEN + 1])
        for n in range(8):
            i = 32 * b + 2 * n
            word = (
                int(codes[i])
                | int(codes[i + 16]) << 4
                | int(codes[i + 1]) << 8
                | int(codes[i + 17]) << 12
            )
            # Each bit becomes the sum modulo 2 of itself and all higher bits: the inverse of
            # v ^ v >> 1.
            for shift in (1, 2, 4, 8):
                word ^= word >> shift
            write_u16(block, 16 * b + 2 * n, (word & 0xFFFE) | (scale >> n & 1))


_steps = grouped_steps(
    "iq4_kss",
    IQ4NL_VALUES,
    group=32,
    integers=range(-127, 128, 2),
    shifts=(0, 4),
    reach=(0.8, 1.6),
    fill=(1.1, 0.75),
    half=False,
    parts={
        "score_lanes": _score_lanes,
        "error_lanes": _error_lanes,
        "fit_sums": _fit_sums,
        "codes_of": _codes_of,
    },
)
STEPPED_SEARCHES = {"IQ4_KSS": RowSearch(_steps, float_head, iq4_kss, __file__)}
