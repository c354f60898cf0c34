"""K-quants: blocks of 256 with quantized group scales.

Q2_K   84 bytes  16 bytes, one per 16 elements: scale (low nibble), minimum (high)
                 | 64 bytes bit pairs | d f16 | dmin f16
                 y = (d*scale) * q - dmin*minimum
Q3_K  110 bytes  32 bytes third bits: byte i%32, bit i//32 | 64 bytes bit pairs
                 | 12 bytes: 16 six-bit scales | d f16
                 scale of group g (16 elements): nibble g//8 of byte g%8, high pair g//4 of byte 8 +
                 g%4
                 y = (d*(scale - 32)) * (q - 4)
Q4_K  144 bytes  d f16 | dmin f16 | 12 bytes: 8 six-bit scales and 8 six-bit minimums
                 | 128 bytes of nibbles
                 group s of 32 elements; bytes of run j (64 elements): low nibbles = group 2j, high
                 nibbles = group 2j+1
                 y = (d*scale) * q - dmin*minimum
Q5_K  176 bytes  as Q4_K up to the scales | 32 bytes fifth bits: bit s of byte i%32
                 | 128 bytes of nibbles as in Q4_K
Q6_K  210 bytes  128 bytes low nibbles | 64 bytes high bit pairs
                 | 16 signed scales (one per 16 elements) | d f16
                 each half of 128 elements: byte l of its 64 holds elements l and l+64 (nibbles),
                 pairs of 32 in the high bits
                 y = (d*scale) * (q - 32)

Bit pairs: byte 32*(i//128) + i%32, bits 2*((i//32)%4).
"""

from __future__ import annotations

import numpy as np

from ..kernel import device_function
from .scalars import read_half


@device_function
def packed_scale(block, s):
    """Six-bit scale of group s from the 12 bytes at 4: groups 4..7 keep their upper two bits in the
    bytes of groups 0..3.
    """
    if s < 4:
        return np.int64(block[4 + s]) & 63
    return (np.int64(block[8 + s]) & 15) | (np.int64(block[s]) >> 6) << 4


@device_function
def packed_minimum(block, s):
    """Six-bit minimum of group s, the twin of `packed_scale`."""
    if s < 4:
        return np.int64(block[8 + s]) & 63
    return np.int64(block[8 + s]) >> 4 | (np.int64(block[4 + s]) >> 6) << 4


def q2_k(block, out):
    """Decode a Q2_K block, uint8[84], to float32[256]: y = (d*scale)*q - dmin*minimum."""
    d = read_half(block, 80)
    dmin = read_half(block, 82)
    for g in range(16):
        scale = d * np.float32(block[g] & 15)
        minimum = dmin * np.float32(block[g] >> 4)
        for l in range(16):
            i = 16 * g + l
            q = np.int64(block[16 + 32 * (g // 8) + (i & 31)]) >> (2 * (g // 2 & 3)) & 3
            out[i] = scale * np.float32(q) - minimum


def q3_k(block, out):
    """Decode a Q3_K block, uint8[110], to float32[256]: y = (d*(scale - 32))*(q - 4)."""
    d = read_half(block, 108)
    for g in range(16):
        six = (
            np.int64(block[96 + (g & 7)]) >> (4 * (g >> 3)) & 15
            | (np.int64(block[104 + (g & 3)]) >> (2 * (g >> 2)) & 3) << 4
        )
        scale = d * np.float32(six - 32)
        for l in range(16):
            i = 16 * g + l
            low = np.int64(block[32 + 32 * (g // 8) + (i & 31)]) >> (2 * (g // 2 & 3)) & 3
            high = np.int64(block[i & 31]) >> (g // 2) & 1
            out[i] = scale * np.float32((low | high << 2) - 4)


def q4_k(block, out):
    """Decode a Q4_K block, uint8[144], to float32[256]: y = (d*scale)*q - dmin*minimum."""
    d = read_half(block, 0)
    dmin = read_half(block, 2)
    for s in range(8):
        scale = d * np.float32(packed_scale(block, s))
        minimum = dmin * np.float32(packed_minimum(block, s))
        first = 16 + 32 * (s // 2)
        for l in range(32):
            q = (block[first + l] >> 4) if s & 1 else (block[first + l] & 15)
            out[32 * s + l] = scale * np.float32(q) - minimum


def q5_k(block, out):
    """Decode a Q5_K block, uint8[176], to float32[256]: y = (d*scale)*q - dmin*minimum."""
    d = read_half(block, 0)
    dmin = read_half(block, 2)
    for s in range(8):
        scale = d * np.float32(packed_scale(block, s))
        minimum = dmin * np.float32(packed_minimum(block, s))
        for l in range(32):
            low = np.int64(block[48 + 32 * (s // 2) + l]) >> (4 * (s & 1)) & 15
            high = np.int64(block[16 + l]) >> s & 1
            out[32 * s + l] = scale * np.float32(low | high << 4) - minimum


@device_function
def q6_k(block, out):
    """Decode a Q6_K block, uint8[210], to float32[256]: y = (d*scale)*(q - 32)."""
    d = read_half(block, 208)
    for h in range(2):
        for g in range(4):
            for l in range(32):
                low = np.int64(block[64 * h + 32 * (g & 1) + l]) >> (4 * (g >> 1)) & 15
                high = np.int64(block[128 + 32 * h + l]) >> (2 * g) & 3
                i = 128 * h + 32 * g + l
                scale = np.float32(np.int8(block[192 + i // 16]))
                out[i] = (d * scale) * np.float32((low | high << 4) - 32)


BLOCK_DECODERS = {"Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}
