"""Q8_0, Q8_KV, Q8_K_R8, Q8_K_R16: eight bits with one scale per 32 or 256 elements or per row. Byte
maps: `formats/codecs/legacy.py`, `formats/codecs/q8.py`.

Without importances they follow their definition: the scale is max|x| / 127, kept in float32 while
codes are rounded. With importances the best of sixteen scales near that is used (`one_pass.py`).
"""

from __future__ import annotations

import numpy as np

from ...formats.codecs.scalars import write_float, write_half, write_u16
from ...formats.kernel import device_function
from .lanes import LANES, largest_magnitude
from .one_pass import errors_of_codes, half_search, least

# A float32 of this size has no bits below 1: adding it rounds, halves to even.
_TO_EVEN = np.float32(1.5 * 2**23)
_ROW_LADDER = np.linspace(0.985, 1.005, LANES).astype(np.float32)
_scale_of_32 = half_search(-127, 127, step=3, below=0)
_scale_of_256 = half_search(-127, 127, step=2, below=5)
_errors_of_row = errors_of_codes(-127, 127)


@device_function
def _inverse(d):
    # 1/d of a smaller d overflows.
    return np.float32(1) / d if abs(d) > np.float32(3e-39) else np.float32(0)


@device_function
def _inverse_of_largest(top):
    return np.float32(127) / top if top > np.float32(4e-37) else np.float32(0)


@device_function
def _row_scale(x, w, lanes):
    top = largest_magnitude(x) / np.float32(127)
    if not top > np.float32(4e-39):
        return top
    for c in range(LANES):
        lanes[0, c] = top * _ROW_LADDER[c]
        lanes[1, c] = np.float32(1) / lanes[0, c]
    _errors_of_row(x, w, lanes[1], lanes[2])
    return least(lanes[0], lanes[2])


@device_function
def _rounded(t):
    q = (t + _TO_EVEN) - _TO_EVEN
    return int(min(max(q, np.float32(-127)), np.float32(127)))


@device_function
def _write_row(x, inverse, head, blocks):
    total = 0
    for b in range(len(blocks)):
        for j in range(32):
            q = _rounded(x[32 * b + j] * inverse)
            total += q
            blocks[b, j] = q & 255
    write_u16(head, 4, total & 0xFFFF)
    write_u16(head, 6, total >> 16 & 0xFFFF)


def q8_kv(x, w, head, blocks, own, groups, lanes):
    """Search a row of Q8_KV and write it: x, w float32[n], head uint8[8], blocks uint8[n/32, 32];
    own, groups, lanes: scratch, see `steps.py`.
    """
    d = _row_scale(x, w, lanes)
    write_float(head, 0, d)
    _write_row(x, _inverse(d), head, blocks)


def q8_kv_plain(x, w, head, blocks, own, groups, lanes):
    """Write a row of Q8_KV by the type's definition, without importances: x float32[n], head
    uint8[8], blocks uint8[n/32, 32]; w is not used.
    """
    top = largest_magnitude(x)
    write_float(head, 0, top / np.float32(127))
    _write_row(x, _inverse_of_largest(top), head, blocks)


@device_function
def _write_codes(x, inverse, offset, block):
    for i in range(len(x)):
        block[2 + i] = (_rounded(x[i] * inverse) + offset) & 255


def q8_0(x, w, block, lanes):
    """Search a Q8_0 block and write it: x, w float32[32], block uint8[34]; lanes: scratch, see
    `steps.py`.
    """
    _write_codes(x, _inverse(write_half(block, 0, _scale_of_32(x, w, lanes))), 0, block)


def q8_0_plain(x, block):
    """Codes from the unrounded scale, halves away from zero."""
    top = largest_magnitude(x)
    d = top / np.float32(127)
    inverse = _inverse(d)  # a much larger d is already stored as 0
    write_half(block, 0, d)
    for j in range(32):
        t = x[j] * inverse
        q = int(t)
        rest = t - np.float32(q)
        if rest >= np.float32(0.5):
            q += 1
        elif rest <= np.float32(-0.5):
            q -= 1
        block[2 + j] = q & 255


def q8_k_r8(x, w, block, lanes):
    """Search a Q8_K_R8 block and write it: x, w float32[256], block uint8[258]; lanes: scratch, see
    `steps.py`.
    """
    _write_codes(x, _inverse(write_half(block, 0, _scale_of_256(x, w, lanes))), 0, block)


def q8_k_r8_plain(x, block):
    """Write a Q8_K_R8 block by the type's definition, without importances: x float32[256], block
    uint8[258].
    """
    top = largest_magnitude(x)
    write_half(block, 0, top / np.float32(127))
    _write_codes(x, _inverse_of_largest(top), 0, block)


def q8_k_r16(x, w, block, lanes):
    """Search a Q8_K_R16 block and write it: x, w float32[256], block uint8[258]; lanes: scratch,
    see `steps.py`.
    """
    _write_codes(x, _inverse(write_half(block, 0, _scale_of_256(x, w, lanes))), 128, block)


def q8_k_r16_plain(x, block):
    """Write a Q8_K_R16 block by the type's definition, without importances: x float32[256], block
    uint8[258].
    """
    top = largest_magnitude(x)
    write_half(block, 0, top / np.float32(127))
    _write_codes(x, _inverse_of_largest(top), 128, block)


SINGLE_SEARCHES = {"Q8_0": q8_0, "Q8_K_R8": q8_k_r8, "Q8_K_R16": q8_k_r16}
ROW_SEARCHES = {"Q8_KV": q8_kv}
PLAIN_ENCODERS = {"Q8_0": q8_0_plain, "Q8_K_R8": q8_k_r8_plain, "Q8_K_R16": q8_k_r16_plain}
PLAIN_ROW_ENCODERS = {"Q8_KV": q8_kv_plain}
