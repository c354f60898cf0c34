"""The IQ_K family: blocks of 256, groups of 16, non-linear tables with two halves chosen per group.

IQ2_K   76 bytes  d f16 | extra u16 (bit g: table half of group g) | 8 bytes scale nibbles
                  | 64 bytes of bit pairs
                  y = (d * (scale - 8)) * IQ2NL_VALUES[4*half + q]
IQ3_K  110 bytes  d f16 | extra u16 | u16 scale signs | 8 bytes scale nibbles | 64 bytes bit pairs
                  | 32 bytes third bits
                  y = (d * (2*scale + 1) * sign) * IQ3NL_VALUES[8*half + q]
IQ4_K  144 bytes  d f16 | extra u16 | 4 bytes scale high bits | 8 bytes scale nibbles
                  | 128 bytes of nibbles
                  y = (d * (scale - 32)) * IQ4K_VALUES[16*half + q]
IQ5_K  176 bytes  as IQ4_K up to the nibbles, 128 bytes, but byte 32*(i//64) + i%32, high where
                  i//32 is odd | 32 bytes fifth bits: byte i%32, bit i//32
                  y = (d * (scale - 32)) * IQ5NL_VALUES[32*half + q]
IQ6_K  212 bytes  d f16 | extra u16 | 16 signed scales | 128 bytes of nibbles as in IQ5_K
                  | 64 bytes high pairs: byte 32*(i//128) + i%32, bits 2*((i//32)%4)
                  y = (d * scale) * IQ6NL_CUBIC[64*half + q] in ggml's row decoder; products use
                  IQ6NL_VALUES, its rounding

Bit pairs: byte 32*(i//128) + i%32, bits 2*((i//32)%4). Nibbles: byte 16*(i//32) + i%16, low for the
first 16 of 32.
"""

from __future__ import annotations

import numpy as np

from ..kernel import device_function
from ..tables import (
    IQ2NL_VALUES,
    IQ3NL_VALUES,
    IQ4K_VALUES,
    IQ5NL_VALUES,
    IQ6NL_CUBIC,
    IQ6NL_VALUES,
)
from .scalars import read_half, read_u16, select


def iq2_k(block, out):
    """Decode an IQ2_K block, uint8[76], to float32[256]: y = d*(scale - 8) * IQ2NL_VALUES[4*half +
    q].
    """
    d = read_half(block, 0)
    extra = read_u16(block, 2)
    for g in range(16):
        scale = d * np.float32((np.int64(block[4 + g // 2]) >> (4 * (g & 1)) & 15) - 8)
        half = 4 * (extra >> g & 1)
        for l in range(16):
            i = 16 * g + l
            q = np.int64(block[12 + 32 * (g // 8) + (i & 31)]) >> (2 * (g // 2 & 3)) & 3
            out[i] = scale * IQ2NL_VALUES[half + q]


@device_function
def iq3_k(block, out):
    """Decode an IQ3_K block, uint8[110], to float32[256]: y = d*(2*scale + 1)*sign *
    IQ3NL_VALUES[8*half + q].
    """
    d = read_half(block, 0)
    extra = read_u16(block, 2)
    signs = read_u16(block, 4)
    for g in range(16):
        magnitude = 2 * (np.int64(block[6 + g // 2]) >> (4 * (g & 1)) & 15) + 1
        scale = d * np.float32(select(signs >> g & 1, -magnitude, magnitude))
        half = 8 * (extra >> g & 1)
        for l in range(16):
            i = 16 * g + l
            low = np.int64(block[14 + 32 * (g // 8) + (i & 31)]) >> (2 * (g // 2 & 3)) & 3
            high = np.int64(block[78 + (i & 31)]) >> (g // 2) & 1
            out[i] = scale * IQ3NL_VALUES[half + (low | high << 2)]


def iq4_k(block, out):
    """Decode an IQ4_K block, uint8[144], to float32[256]: y = d*(scale - 32) * IQ4K_VALUES[16*half
    + q].
    """
    d = read_half(block, 0)
    extra = read_u16(block, 2)
    for g in range(16):
        low = np.int64(block[8 + g // 2]) >> (4 * (g & 1)) & 15
        high = np.int64(block[4 + g // 4]) >> (2 * (g & 3)) & 3
        scale = d * np.float32((low | high << 4) - 32)
        half = 16 * (extra >> g & 1)
        for l in range(16):
            q = np.int64(block[16 + 16 * (g // 2) + l]) >> (4 * (g & 1)) & 15
            out[16 * g + l] = scale * IQ4K_VALUES[half + q]


@device_function
def iq5_k(block, out):
    """Decode an IQ5_K block, uint8[176], to float32[256]: y = d*(scale - 32) * IQ5NL_VALUES[32*half
    + q].
    """
    d = read_half(block, 0)
    extra = read_u16(block, 2)
    for g in range(16):
        low = np.int64(block[8 + g // 2]) >> (4 * (g & 1)) & 15
        high = np.int64(block[4 + g // 4]) >> (2 * (g & 3)) & 3
        scale = d * np.float32((low | high << 4) - 32)
        half = 32 * (extra >> g & 1)
        for l in range(16):
            i = 16 * g + l
            nibble = np.int64(block[16 + 32 * (i >> 6) + (i & 31)]) >> (4 * (i >> 5 & 1)) & 15
            fifth = np.int64(block[144 + (i & 31)]) >> (i >> 5) & 1
            out[i] = scale * IQ5NL_VALUES[half + (nibble | fifth << 4)]


@device_function
def iq6_k_with(block, out, values):
    """Decode an IQ6_K block, uint8[212], to float32[256]: y = d*scale * values[64*half + q], with
    values float32[128].
    """
    d = read_half(block, 0)
    extra = read_u16(block, 2)
    for g in range(16):
        scale = d * np.float32(np.int8(block[4 + g]))
        half = 64 * (extra >> g & 1)
        for l in range(16):
            i = 16 * g + l
            nibble = np.int64(block[20 + 32 * (i >> 6) + (i & 31)]) >> (4 * (i >> 5 & 1)) & 15
            pair = np.int64(block[148 + 32 * (i >> 7) + (i & 31)]) >> (2 * (i >> 5 & 3)) & 3
            out[i] = scale * values[half + (nibble | pair << 4)]


def iq6_k(block, out):
    """Decode an IQ6_K block, uint8[212], to float32[256] with the cubic of ggml's row decoder."""
    iq6_k_with(block, out, IQ6NL_CUBIC)


def iq6_k_by_table(block, out):
    """Decode an IQ6_K block, uint8[212], to float32[256] with the table of ggml's matrix
    products.
    """
    iq6_k_with(block, out, IQ6NL_VALUES)


BLOCK_DECODERS = {"IQ2_K": iq2_k, "IQ3_K": iq3_k, "IQ4_K": iq4_k, "IQ5_K": iq5_k, "IQ6_K": iq6_k}
PRODUCT_DECODERS = {"IQ6_K": iq6_k_by_table}
