"""Search in one pass over the values: the best of sixteen scales, for types that are otherwise
written as fast as memory is read.

At eight bits the error depends on the scale almost at random, so the best of a row of candidates is
all that a search can find. The candidates are half-precision numbers at equal distances. They are
judged as they will be stored, without rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats.codecs.scalars import float_to_half
from ...formats.kernel import device_function, inlined_function, specialize, unbound
from .lanes import LANES, lane_of_least, largest_of

_LARGEST_HALF = 0x7BFF

# Free names of the templates below.
FIRST, LAST = -127, 127
TOP, STEP, BELOW, SIGNED = 127, 3, 0, False
rest = errors = unbound


@inlined_function
def _from_integer(t):
    """Return t minus the nearest integer."""
    return t - np.floor(t + np.float32(0.5))


def _from_code(t):
    """Return t minus the nearest code."""
    return t - min(max(np.floor(t + np.float32(0.5)), np.float32(FIRST)), np.float32(LAST))


def _errors(x, w, inverse, error):
    """Set for each lane c error[c] = sum w (x * inverse[c] - nearest code)^2. It takes four
    elements at a time, to keep sums in registers.
    """
    for c in range(LANES):
        error[c] = np.float32(0)
    for i in range(0, len(x), 4):
        x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
        w0, w1, w2, w3 = w[i], w[i + 1], w[i + 2], w[i + 3]
        for c in range(len(error)):
            r0, r1, r2, r3 = (
                rest(x0 * inverse[c]),
                rest(x1 * inverse[c]),
                rest(x2 * inverse[c]),
                rest(x3 * inverse[c]),
            )
            error[c] += ((w0 * r0) * r0 + (w1 * r1) * r1) + ((w2 * r2) * r2 + (w3 * r3) * r3)


@device_function
def least(scale, error):
    """Return the scale with the smallest error; `error` is in units of the scale."""
    inverse = np.float32(1) / scale[LANES - 1]
    for c in range(len(error)):
        relative = scale[c] * inverse
        error[c] = (error[c] * relative) * relative
    return scale[lane_of_least(error)]


def _half_scale(x, w, lanes):
    extreme = largest_of(x)
    bits = float_to_half(abs(extreme) / np.float32(TOP))
    if bits == 0:
        return np.float32(0)
    sign = np.float32(-1) if SIGNED and extreme > 0 else np.float32(1)
    # Not LANES: a loop of known length is unrolled before it can become vector instructions.
    for c in range(lanes.shape[1]):
        candidate = np.uint32(min(max(bits + STEP * (c - BELOW), 1), _LARGEST_HALF))
        # the value of that half
        lanes[0, c] = np.uint32(candidate << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
        lanes[1, c] = sign / lanes[0, c]
    errors(x, w, lanes[1], lanes[2])
    return sign * least(lanes[0], lanes[2])


def errors_of_codes(first: int, last: int, clipped: bool = True) -> Callable:
    """Compile errors(x, w, inverse, error), see `_errors`, for codes first..last. clipped: x *
    inverse may be beyond these.
    """
    nearest = specialize(_from_code, FIRST=first, LAST=last) if clipped else _from_integer
    return specialize(_errors, rest=nearest)


def half_search(first: int, last: int, *, step: int, below: int) -> Callable:
    """Compile search(x, w, lanes) -> d for codes first..last, where -first >= last; lanes:
    float32[6, LANES] scratch.

    The search tries LANES halves around max|x| / -first, `step` units of the last bit of a half
    apart (1/2048 to 1/1024 of the scale each), `below` of them smaller, and returns the one with
    the smallest error, as it is stored; 0 if that underflows. If there is one more code below zero
    than above, d has the sign that gives this code to the largest x.
    """
    return specialize(
        _half_scale,
        TOP=-first,
        STEP=step,
        BELOW=below,
        SIGNED=-first > last,
        errors=errors_of_codes(first, last, below > 0),
    )
