"""Trellis types: blocks of 256 whose values come from a generator started by an index. The row
header is d f32.

IQ1_KT   56 bytes  8 bytes, one per 32 elements: scale code (low nibble), bit 4+l = bit 12 of the
                   index of 8-group l | 32 index low bytes
                   | 16 bytes with index bits 8..11: nibble m//16 of byte m%16 for 8-group m
                   y = (d * IQ4NL_VALUES[code]) * value
                   13-bit index per 8 elements
IQ2_KT   68 bytes  4 bytes of scale codes: nibble b//4 of byte b%4 for 32-group b | 32 u16 indices
                   y = (d * IQ4NL_VALUES[code]) * value
                   16-bit index per 8 elements
IQ3_KT  100 bytes  4 bytes of scales as in IQ2_KT | 32 u16 indices
                   | 32 bytes of signs: bit b of byte i%32
                   y = (d * scale) * |value| * sign
                   16-bit index per 8 elements
IQ4_KT  128 bytes  8 u32, one per 32 elements: bit 0 offset, bits 1..7 scale + 64, bits 8+3n..10+3n
                   = index bits 12..14 of 4-group n | 64 index low bytes
                   | 32 bytes with index bits 8..11: nibble m//32 of byte m%32 for 4-group m
                   y = (d * (scale - 64)) * value
                   15-bit index per 4 elements

The generator: x starts as index + 4096 (IQ4_KT: 36864 where the offset bit is set). Each element
multiplies x by 3417055213 modulo 2^32; its value is the sum of the four bytes of x & 0x3f3f3f3f,
less 126: an integer in -126..126.
"""

from __future__ import annotations

import numpy as np

from ..kernel import device_function
from ..tables import IQ4NL_VALUES
from .scalars import read_float, read_u16, select

# The same modulo 2^32, and a product with 32 bits does not leave 64.
MULTIPLIER = 3417055213 - 2**32
OFFSET = 4096


@device_function
def trellis_step(x):
    """The word after x."""
    return x * MULTIPLIER & 0xFFFFFFFF


@device_function
def trellis_value(x):
    """The integer in -126..126 that the word x encodes; one multiplication sums the four bytes."""
    return ((x & 0x3F3F3F3F) * 0x01010101 >> 24 & 255) - 126


def iq1_kt(block, head, out):
    """Decode an IQ1_KT block, uint8[56], and its row header, uint8[4], to float32[256]: y =
    d*IQ4NL_VALUES[code] * value.
    """
    d = read_float(head, 0)
    for m in range(32):
        group = np.int64(block[m // 4])
        scale = d * IQ4NL_VALUES[group & 15]
        high = np.int64(block[40 + (m & 15)]) >> (4 * (m >> 4)) & 15
        x = (np.int64(block[8 + m]) | high << 8 | (group >> (4 + (m & 3)) & 1) << 12) + OFFSET
        for j in range(8):
            x = trellis_step(x)
            out[8 * m + j] = scale * np.float32(trellis_value(x))


def iq2_kt(block, head, out):
    """Decode an IQ2_KT block, uint8[68], and its row header, uint8[4], to float32[256]: y =
    d*IQ4NL_VALUES[code] * value.
    """
    d = read_float(head, 0)
    for m in range(32):
        b = m // 4
        scale = d * IQ4NL_VALUES[np.int64(block[b & 3]) >> (4 * (b >> 2)) & 15]
        x = read_u16(block, 4 + 2 * m) + OFFSET
        for j in range(8):
            x = trellis_step(x)
            out[8 * m + j] = scale * np.float32(trellis_value(x))


def iq3_kt(block, head, out):
    """Decode an IQ3_KT block, uint8[100], and its row header, uint8[4], to float32[256]: y =
    d*scale * |value| * sign.
    """
    d = read_float(head, 0)
    for m in range(32):
        b = m // 4
        scale = d * np.float32(np.int64(block[b & 3]) >> (4 * (b >> 2)) & 15)
        x = read_u16(block, 4 + 2 * m) + OFFSET
        for j in range(8):
            x = trellis_step(x)
            magnitude = scale * np.float32(abs(trellis_value(x)))
            negative = np.int64(block[68 + 8 * (m & 3) + j]) >> b & 1
            out[8 * m + j] = select(negative, -magnitude, magnitude)


def iq4_kt(block, head, out):
    """Decode an IQ4_KT block, uint8[128], and its row header, uint8[4], to float32[256]: y =
    d*(scale - 64) * value.
    """
    d = read_float(head, 0)
    for m in range(64):
        at = 4 * (m // 8)
        word = read_u16(block, at) | read_u16(block, at + 2) << 16
        scale = d * np.float32((word >> 1 & 127) - 64)
        middle = np.int64(block[96 + (m & 31)]) >> (4 * (m >> 5)) & 15
        index = np.int64(block[32 + m]) | middle << 8 | (word >> (8 + 3 * (m & 7)) & 7) << 12
        x = index + OFFSET + 32768 * (word & 1)
        for j in range(4):
            x = trellis_step(x)
            out[4 * m + j] = scale * np.float32(trellis_value(x))


BLOCK_DECODERS = {"IQ1_KT": iq1_kt, "IQ2_KT": iq2_kt, "IQ3_KT": iq3_kt, "IQ4_KT": iq4_kt}

# Every matrix product of the reference multiplies by these; its row decoder does not. The others
# have theirs in the stored d.
PRODUCT_FACTORS = {"IQ2_KT": 1.05, "IQ3_KT": 1.01}
