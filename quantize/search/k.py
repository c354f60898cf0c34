"""Q4_K and Q6_K: search and packing. Byte maps: `formats/codecs/k.py`."""

from __future__ import annotations

import numpy as np

from ...formats.codecs.scalars import write_half
from .affine import affine_search
from .grouped import grouped_search

_q4_k, _q4_k_code = affine_search("q4_k", group=32, levels=15, top=63)
_q6_k, _q6_k_code = grouped_search("q6_k", np.arange(-32, 32), group=16, integers=range(-128, 128), reach=(0.9, 1.2),
                                   fill=(1.05, 0.85), half=True)


def q4_k(x, w, block, own, groups, lanes):
    d, dmin = _q4_k(x, w, groups, lanes)
    block[:] = 0
    write_half(block, 0, d)
    write_half(block, 2, dmin)
    for s in range(8):
        k = int(groups[s, 2])
        m = int(groups[s, 3])
        if s < 4:
            block[4 + s] |= k
            block[8 + s] |= m
        else:
            block[8 + s] |= (k & 15) | (m & 15) << 4
            block[s] |= k >> 4 << 6
            block[4 + s] |= m >> 4 << 6
        for l in range(32):
            q = _q4_k_code(x[32 * s + l], d * groups[s, 2], dmin * groups[s, 3])
            block[16 + 32 * (s // 2) + l] |= q << (4 * (s & 1))


def q6_k(x, w, block, own, groups, lanes):
    d = _q6_k(x, w, own, groups, lanes)
    block[:] = 0
    write_half(block, 208, d)
    for g in range(16):
        block[192 + g] = int(groups[g, 2]) & 255
        for l in range(16):
            i = 16 * g + l
            q = _q6_k_code(x[i], d * groups[g, 2], np.float32(0))
            half, run, at = i // 128, i // 32 % 4, i & 31
            block[64 * half + 32 * (run & 1) + at] |= (q & 15) << (4 * (run >> 1))
            block[128 + 32 * half + at] |= q >> 4 << (2 * run)


BLOCK_SEARCHES = {"Q4_K": q4_k, "Q6_K": q6_k}
