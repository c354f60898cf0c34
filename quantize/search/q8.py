"""Q8_KV, Q8_K_R8, Q8_K_R16: eight bits with one scale per row or per 256 elements. Byte maps: `formats/codecs/q8.py`.

Without importances they are written by their definition: the scale is max|x| / 127, kept in float32 while codes are rounded,
halves to even. With importances the scale is searched.
"""

from __future__ import annotations

import numpy as np

from ...formats.codecs.scalars import write_float, write_half, write_u16
from ...formats.kernel import device_function
from .lanes import largest_magnitude
from .legacy import single_search

_CODES = np.arange(-127, 128)
_q8_k, _ = single_search("q8_k", _CODES, reach=(0.97, 1.02), rungs=16, fine=0.002, sides=1)
_q8_kv, _ = single_search("q8_kv", _CODES, reach=(0.97, 1.02), rungs=16, fine=0.002, sides=1, half=False)
_TO_EVEN = np.float32(1.5 * 2**23)  # a float32 of this size has no bits below 1: adding it rounds, halves to even


@device_function
def _inverse(d):
    return np.float32(1) / d if abs(d) > np.float32(3e-39) else np.float32(0)  # below, 1/d overflows


@device_function
def _inverse_of_largest(top):
    return np.float32(127) / top if top > np.float32(4e-37) else np.float32(0)


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
    d = _q8_kv(x, w, lanes)
    write_float(head, 0, d)
    _write_row(x, _inverse(d), head, blocks)


def q8_kv_plain(x, w, head, blocks, own, groups, lanes):
    top = largest_magnitude(x)
    write_float(head, 0, top / np.float32(127))
    _write_row(x, _inverse_of_largest(top), head, blocks)


@device_function
def _write_block(x, inverse, offset, block):
    for i in range(256):
        block[2 + i] = (_rounded(x[i] * inverse) + offset) & 255


def q8_k_r8(x, w, block, lanes):
    _write_block(x, _inverse(write_half(block, 0, _q8_k(x, w, lanes))), 0, block)


def q8_k_r8_plain(x, block):
    top = largest_magnitude(x)
    write_half(block, 0, top / np.float32(127))
    _write_block(x, _inverse_of_largest(top), 0, block)


def q8_k_r16(x, w, block, lanes):
    _write_block(x, _inverse(write_half(block, 0, _q8_k(x, w, lanes))), 128, block)


def q8_k_r16_plain(x, block):
    top = largest_magnitude(x)
    write_half(block, 0, top / np.float32(127))
    _write_block(x, _inverse_of_largest(top), 128, block)


SINGLE_SEARCHES = {"Q8_K_R8": q8_k_r8, "Q8_K_R16": q8_k_r16}
ROW_SEARCHES = {"Q8_KV": q8_kv}
PLAIN_ENCODERS = {"Q8_K_R8": q8_k_r8_plain, "Q8_K_R16": q8_k_r16_plain}
PLAIN_ROW_ENCODERS = {"Q8_KV": q8_kv_plain}
