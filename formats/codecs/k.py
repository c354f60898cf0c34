"""K-quants: blocks of 256 with quantized group scales.

Q4_K  144 bytes  d f16 | dmin f16 | 12 bytes: 8 six-bit scales and 8 six-bit minimums | 128 bytes of nibbles
                 group s of 32 elements; bytes of run j (64 elements): low nibbles = group 2j, high nibbles = group 2j+1
                 y = (d*scale) * q - dmin*minimum
Q6_K  210 bytes  128 bytes low nibbles | 64 bytes high bit pairs | 16 signed scales (one per 16 elements) | d f16
                 each half of 128 elements: byte l of its 64 holds elements l and l+64 (nibbles), pairs of 32 in the high bits
                 y = (d*scale) * (q - 32)
"""

from __future__ import annotations

import numpy as np

from ..kernel import device_function
from .scalars import read_half


@device_function
def packed_scale(block, s):
    """Six-bit scale of group s from the 12 bytes at 4: groups 4..7 keep their upper two bits in the bytes of groups 0..3."""
    if s < 4:
        return np.int64(block[4 + s]) & 63
    return (np.int64(block[8 + s]) & 15) | (np.int64(block[s]) >> 6) << 4


@device_function
def packed_minimum(block, s):
    """Six-bit minimum of group s, the twin of `packed_scale`."""
    if s < 4:
        return np.int64(block[8 + s]) & 63
    return np.int64(block[8 + s]) >> 4 | (np.int64(block[4 + s]) >> 6) << 4


def q4_k(block, out):
    d = read_half(block, 0)
    dmin = read_half(block, 2)
    for s in range(8):
        scale = d * np.float32(packed_scale(block, s))
        minimum = dmin * np.float32(packed_minimum(block, s))
        first = 16 + 32 * (s // 2)
        for l in range(32):
            q = (block[first + l] >> 4) if s & 1 else (block[first + l] & 15)
            out[32 * s + l] = scale * np.float32(q) - minimum


def q6_k(block, out):
    d = read_half(block, 208)
    for h in range(2):
        for g in range(4):
            for l in range(32):
                low = np.int64(block[64 * h + 32 * (g & 1) + l]) >> (4 * (g >> 1)) & 15
                high = np.int64(block[128 + 32 * h + l]) >> (2 * g) & 3
                i = 128 * h + 32 * g + l
                scale = np.float32(np.int8(block[192 + i // 16]))
                out[i] = (d * scale) * np.float32((low | high << 4) - 32)


BLOCK_DECODERS = {"Q4_K": q4_k, "Q6_K": q6_k}
