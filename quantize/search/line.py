"""Q4_1, Q5_1: blocks of 32 with a scale and an offset in half precision, y = d*q + m. Byte maps:
`formats/codecs/legacy.py`.

The block is a single group of the search in `affine.py`, with a minimum (-m) of either sign. Its
result is rounded: the scale to a few neighbouring halves, with the offset that fits best to the
codes of each. The pair with the smallest error wins.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats.codecs.scalars import nearest_half, write_half
from ...formats.kernel import specialize, unbound
from . import affine
from .lanes import LANES
from .legacy import write_five_bits

# Free names of the template, bound per type by `line_search`.
LEVELS = 15
fit_group = line_lanes = unbound
STEPS = (np.arange(LANES, dtype=np.float32) - np.float32(LANES // 2)) * np.float32(2.0**-11)


def _search_line(x, w, lanes):
    """Return (d, m) as stored, for one block. lanes: float32[6, LANES] scratch."""
    fit_group(x, w, 0, lanes[5:6], 0, lanes)
    scale = lanes[5, 0]
    minimum = lanes[5, 1]
    sw = np.float32(0)
    sx = np.float32(0)
    for i in range(len(x)):
        sw += w[i]
        sx += w[i] * x[i]
    for c in range(LANES):
        lanes[5, c] = nearest_half(scale * (np.float32(1) + STEPS[c]))
        lanes[0, c] = np.float32(1) / lanes[5, c] if lanes[5, c] > 0 else np.float32(0)
        lanes[1, c] = minimum
    line_lanes(x, w, 0, lanes[0], lanes[1], lanes[2], lanes[3], lanes[4])
    for c in range(LANES):
        lanes[1, c] = nearest_half((lanes[5, c] * lanes[2, c] - sx) / sw)
        lanes[2, c] = np.float32(0)
    for i in range(len(x)):
        wi = w[i]
        for c in range(LANES):
            l = np.floor((x[i] + lanes[1, c]) * lanes[0, c] + np.float32(0.5))
            l = min(max(l, np.float32(0)), np.float32(LEVELS))
            rest = x[i] - (lanes[5, c] * l - lanes[1, c])
            lanes[2, c] += (wi * rest) * rest
    winner = LANES // 2
    for c in range(LANES):
        if lanes[2, c] < lanes[2, winner]:
            winner = c
    return lanes[5, winner], -lanes[1, winner]


def line_search(levels: int) -> tuple[Callable, Callable]:
    """Compile (search(x, w, lanes) -> (d, m), code_of(x, scale, minimum) -> int) for blocks of 32
    with codes 0..levels.
    """
    fit, line, code = affine.group_fit(group=32, levels=levels, signed=True, reach=(0.8, 1.08))
    return (
        specialize(_search_line, LEVELS=levels, fit_group=fit, line_lanes=line),
        code,
    )


_q4_1, _q4_1_code = line_search(15)
_q5_1, _q5_1_code = line_search(31)


def q4_1(x, w, block, lanes):
    """Search a Q4_1 block and write it: x, w float32[32], block uint8[20]; lanes: scratch, see
    `steps.py`.
    """
    d, m = _q4_1(x, w, lanes)
    block[:] = 0
    write_half(block, 0, d)
    write_half(block, 2, m)
    for i in range(32):
        block[4 + (i & 15)] |= _q4_1_code(x[i], d, -m) << (4 * (i >> 4))


def q5_1(x, w, block, lanes):
    """Search a Q5_1 block and write it: x, w float32[32], block uint8[24]; lanes: scratch, see
    `steps.py`.
    """
    d, m = _q5_1(x, w, lanes)
    block[:] = 0
    write_half(block, 0, d)
    write_half(block, 2, m)
    for i in range(32):
        write_five_bits(block, 4, 8, i, _q5_1_code(x[i], d, -m))


SINGLE_SEARCHES = {"Q4_1": q4_1, "Q5_1": q5_1}
