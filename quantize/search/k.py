"""The K-quants: search and packing. Byte maps: `formats/codecs/k.py`."""

from __future__ import annotations

import numpy as np

from ...formats.codecs.scalars import write_half
from ...formats.kernel import device_function
from .affine import affine_search
from .grouped import grouped_steps
from .grouped_scan import CHOSEN, STRETCHED
from .lanes import PAIRS
from .steps import BlockSearch

_q2_k, _q2_k_code = affine_search(group=16, levels=3, top=15)
_q3_k = grouped_steps(
    "q3_k",
    np.arange(-4, 4),
    group=16,
    integers=range(-32, 32),
    reach=(0.7, 1.8),
    fill=(1.1, 0.75),
    rungs=8,
    half=True,
    parts=PAIRS,
)
_q4_k, _q4_k_code = affine_search(group=32, levels=15, top=63)
_q5_k, _q5_k_code = affine_search(group=32, levels=31, top=63)
_q6_k = grouped_steps(
    "q6_k",
    np.arange(-32, 32),
    group=16,
    integers=range(-128, 128),
    reach=(0.93, 1.12),
    fill=(1.05, 0.85),
    rungs=8,
    half=True,
    parts=PAIRS,
)


def q2_k(x, w, block, own, groups, lanes):
    """Search a Q2_K block and write it: x, w float32[256], block uint8[84]; own, groups, lanes:
    scratch, see `steps.py`.
    """
    d, dmin = _q2_k(x, w, groups, lanes)
    block[:] = 0
    write_half(block, 80, d)
    write_half(block, 82, dmin)
    for g in range(16):
        block[g] = int(groups[g, 2]) | int(groups[g, 3]) << 4
        for l in range(16):
            i = 16 * g + l
            q = _q2_k_code(x[i], d * groups[g, 2], dmin * groups[g, 3])
            block[16 + 32 * (g // 8) + (i & 31)] |= q << (2 * (g // 2 & 3))


def q3_k(block, codes, groups):
    """Write a Q3_K block, uint8[110], from its codes, float32[256], and the rows of `groups`."""
    block[:] = 0
    write_half(block, 108, groups[16, STRETCHED])
    for g in range(16):
        six = int(groups[g, CHOSEN]) + 32
        block[96 + (g & 7)] |= (six & 15) << (4 * (g >> 3))
        block[104 + (g & 3)] |= six >> 4 << (2 * (g >> 2))
        for l in range(16):
            i = 16 * g + l
            q = int(codes[i])
            block[32 + 32 * (g // 8) + (i & 31)] |= (q & 3) << (2 * (g // 2 & 3))
            block[i & 31] |= q >> 2 << (g // 2)


@device_function
def _write_scales(block, d, dmin, groups):
    """Write d, dmin and the six-bit scales and minimums of eight groups to the cleared first 16
    bytes of Q4_K and Q5_K.
    """
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


def q4_k(x, w, block, own, groups, lanes):
    """Search a Q4_K block and write it: x, w float32[256], block uint8[144]; own, groups, lanes:
    scratch, see `steps.py`.
    """
    d, dmin = _q4_k(x, w, groups, lanes)
    block[:] = 0
    _write_scales(block, d, dmin, groups)
    for s in range(8):
        for l in range(32):
            q = _q4_k_code(x[32 * s + l], d * groups[s, 2], dmin * groups[s, 3])
            block[16 + 32 * (s // 2) + l] |= q << (4 * (s & 1))


def q5_k(x, w, block, own, groups, lanes):
    """Search a Q5_K block and write it: x, w float32[256], block uint8[176]; own, groups, lanes:
    scratch, see `steps.py`.
    """
    d, dmin = _q5_k(x, w, groups, lanes)
    block[:] = 0
    _write_scales(block, d, dmin, groups)
    for s in range(8):
        for l in range(32):
            q = _q5_k_code(x[32 * s + l], d * groups[s, 2], dmin * groups[s, 3])
            block[48 + 32 * (s // 2) + l] |= (q & 15) << (4 * (s & 1))
            block[16 + l] |= q >> 4 << s


def q6_k(block, codes, groups):
    """Write a Q6_K block, uint8[210], from its codes, float32[256], and the rows of `groups`."""
    block[:] = 0
    write_half(block, 208, groups[16, STRETCHED])
    for g in range(16):
        block[192 + g] = int(groups[g, CHOSEN]) & 255
        for l in range(16):
            i = 16 * g + l
            q = int(codes[i])
            half, run, at = i // 128, i // 32 % 4, i & 31
            block[64 * half + 32 * (run & 1) + at] |= (q & 15) << (4 * (run >> 1))
            block[128 + 32 * half + at] |= q >> 4 << (2 * run)


BLOCK_SEARCHES = {"Q2_K": q2_k, "Q4_K": q4_k, "Q5_K": q5_k}
STEPPED_SEARCHES = {
    "Q3_K": BlockSearch(_q3_k, q3_k, __file__),
    "Q6_K": BlockSearch(_q6_k, q6_k, __file__),
}
