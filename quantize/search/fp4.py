"""MXFP4 and NVFP4: four-bit floats with a scale that is a one-byte float. Byte maps:
`formats/codecs/fp4.py`.

MXFP4's scale is a power of two. Without importances it follows the definition, 2^(floor(log2
max|x|) - 2); with them its neighbours are tried too. NVFP4 tries sixteen scales around the one that
meets the largest value.
"""

from __future__ import annotations

import numpy as np

from ...formats.codecs.fp4 import half_e8m0, half_ue4m3
from ...formats.kernel import device_function, specialize
from ...formats.tables import FP4_VALUES
from . import lanes as lane_functions
from .lanes import LANES
from .values import value_set

_SORTED = np.unique(FP4_VALUES)
_names = value_set(_SORTED)
error_lanes = specialize(lane_functions.error_lanes, **_names)


@device_function
def _code(t):
    """Return the code of the doubled value nearest to t; of two equally near values, the smaller in
    magnitude.
    """
    a = abs(t)
    q = (
        (1 if a > np.float32(0.5) else 0)
        + (1 if a > np.float32(1.5) else 0)
        + (1 if a > np.float32(2.5) else 0)
        + (1 if a > np.float32(3.5) else 0)
        + (1 if a > np.float32(5) else 0)
        + (1 if a > np.float32(7) else 0)
        + (1 if a > np.float32(10) else 0)
    )
    return q | (8 if t < 0 else 0) if q > 0 else 0


@device_function
def _size(t):
    """Return the magnitude of the doubled value nearest to t."""
    a = abs(t)
    v = np.float32(1) if a > np.float32(0.5) else np.float32(0)
    v = np.float32(2) if a > np.float32(1.5) else v
    v = np.float32(3) if a > np.float32(2.5) else v
    v = np.float32(4) if a > np.float32(3.5) else v
    v = np.float32(6) if a > np.float32(5) else v
    v = np.float32(8) if a > np.float32(7) else v
    return np.float32(12) if a > np.float32(10) else v


@device_function
def _exponent(x):
    """Return the scale byte of the definition."""
    top = np.float32(0)
    for j in range(32):
        top = max(top, abs(x[j]))
    return max(int(np.int64(np.float32(top).view(np.uint32)) >> 23) - 2, 0)


@device_function
def _write_mxfp4(x, e, block):
    block[0] = e
    scale = half_e8m0(e)
    for j in range(16):
        block[1 + j] = _code(x[j] / scale) | _code(x[j + 16] / scale) << 4


def mxfp4_plain(x, block):
    """Write an MXFP4 block by the type's definition, without importances: x float32[32], block
    uint8[17].
    """
    _write_mxfp4(x, _exponent(x), block)


def mxfp4(x, w, block, lanes):
    """Errors are added up in sixteen parallel sums, which are then added in order."""
    first = max(_exponent(x) - 1, 0)
    best = first
    least = np.float32(np.inf)
    for e in range(first, min(first + 3, 255)):
        scale = half_e8m0(e)
        for c in range(LANES):
            rest = abs(x[c]) - scale * _size(x[c] / scale)
            more = abs(x[c + 16]) - scale * _size(x[c + 16] / scale)
            lanes[0, c] = (w[c] * rest) * rest + (w[c + 16] * more) * more
        error = np.float32(0)
        for c in range(LANES):
            error += lanes[0, c]
        if error < least:
            least = error
            best = e
    _write_mxfp4(x, best, block)


@device_function
def _nearest_ue4m3(v):
    """Return the byte of the scale nearest to v >= 0, at most 126."""
    if v < np.float32(2.0**-6):
        return int(np.floor(v * np.float32(512) + np.float32(0.5)))
    bits = np.int64(np.float32(v).view(np.uint32))
    return min(((bits + 0x80000) >> 20) - (120 << 3), 126)


def nvfp4(x, w, block, lanes):
    """Search an NVFP4 block and write it: x, w float32[64], block uint8[36]; lanes: scratch, see
    `steps.py`.
    """
    for s in range(4):
        top = np.float32(0)
        for i in range(16 * s, 16 * s + 16):
            top = max(top, abs(x[i]))
        middle = _nearest_ue4m3(top / np.float32(6))
        for c in range(LANES):
            scale = half_ue4m3(min(max(middle + c - 6, 0), 126))
            lanes[0, c] = scale
            lanes[1, c] = np.float32(1) / scale if scale > 0 else np.float32(0)
            lanes[2, c] = np.float32(0)
        error_lanes(x, w, 16 * s, 16, lanes[2], lanes[0], lanes[1], lanes[3])
        winner = 6
        for c in range(LANES):
            if lanes[3, c] < lanes[3, winner]:
                winner = c
        block[s] = min(max(middle + winner - 6, 0), 126)
        inverse = lanes[1, winner]
        for r in range(8):
            i = 16 * s + r
            block[4 + 8 * s + r] = _code(x[i] * inverse) | _code(x[i + 8] * inverse) << 4


SINGLE_SEARCHES = {"MXFP4": mxfp4, "NVFP4": nvfp4}
PLAIN_ENCODERS = {"MXFP4": mxfp4_plain}
