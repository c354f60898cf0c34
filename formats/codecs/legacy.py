"""Blocks of 32 with half-precision scales: Q4_0, Q4_1, Q5_0, Q5_1, Q6_0, Q8_0, IQ4_NL.

Q4_0    18 bytes   d f16 | 16 bytes of nibbles: byte j holds element j (low) and j+16 (high)
                   y = d * (q - 8)
Q4_1    20 bytes   d f16 | m f16 | nibbles
                   y = d * q + m
Q5_0    22 bytes   d f16 | 32 fifth bits, bit i of element i | nibbles
                   y = d * (q - 16)
Q5_1    24 bytes   d f16 | m f16 | 32 fifth bits | nibbles
                   y = d * q + m
Q6_0    26 bytes   d f16 | 8 bytes of high bit pairs | nibbles
                   y = d * (q - 32)
                   pair of element i: byte i%8, bits 4*((i%16)//8) + 2*(i//16)
IQ4_NL  18 bytes   laid out as Q4_0
                   y = d * IQ4NL_VALUES[q]
Q8_0    34 bytes   d f16 | 32 signed bytes
                   y = d * q

The rows of Q5_0_R4 and Q6_0_R4 decode as d*q + (-16 or -32)*d, which differs in the sign of zero
where d is negative.
"""

from __future__ import annotations

import numpy as np

from ..kernel import device_function
from ..tables import IQ4NL_VALUES
from .scalars import read_half


def q4_0(block, out):
    """Decode a Q4_0 block, uint8[18], to float32[32]: y = d*(q - 8)."""
    d = read_half(block, 0)
    for j in range(16):
        out[j] = d * np.float32(np.int64(block[2 + j] & 15) - 8)
        out[j + 16] = d * np.float32(np.int64(block[2 + j] >> 4) - 8)


def q4_1(block, out):
    """Decode a Q4_1 block, uint8[20], to float32[32]: y = d*q + m."""
    d = read_half(block, 0)
    m = read_half(block, 2)
    for j in range(16):
        out[j] = d * np.float32(block[4 + j] & 15) + m
        out[j + 16] = d * np.float32(block[4 + j] >> 4) + m


@device_function
def five_bits(block, high, low, i):
    """Code of element i from fifth bits at byte `high` and nibbles at byte `low`."""
    nibble = np.int64(block[low + (i & 15)]) >> (4 * (i >> 4)) & 15
    return nibble | (np.int64(block[high + (i >> 3)]) >> (i & 7) & 1) << 4


@device_function
def six_bits(block, i):
    """Code of element i of a Q6_0 block."""
    nibble = np.int64(block[10 + (i & 15)]) >> (4 * (i >> 4)) & 15
    return nibble | (np.int64(block[2 + (i & 7)]) >> (4 * (i >> 3 & 1) + 2 * (i >> 4)) & 3) << 4


@device_function
def q5_0(block, out):
    """Decode a Q5_0 block, uint8[22], to float32[32]: y = d*(q - 16)."""
    d = read_half(block, 0)
    for i in range(32):
        out[i] = d * np.float32(five_bits(block, 2, 6, i) - 16)


@device_function
def q5_0_r4(block, out):
    """Decode one row's Q5_0_R4 block, uint8[22], to float32[32]: y = d*q + (-16)*d."""
    d = read_half(block, 0)
    for i in range(32):
        out[i] = d * np.float32(five_bits(block, 2, 6, i)) + np.float32(-16) * d


@device_function
def q5_1(block, out):
    """Decode a Q5_1 block, uint8[24], to float32[32]: y = d*q + m."""
    d = read_half(block, 0)
    m = read_half(block, 2)
    for i in range(32):
        out[i] = d * np.float32(five_bits(block, 4, 8, i)) + m


@device_function
def q6_0(block, out):
    """Decode a Q6_0 block, uint8[26], to float32[32]: y = d*(q - 32)."""
    d = read_half(block, 0)
    for i in range(32):
        out[i] = d * np.float32(six_bits(block, i) - 32)


@device_function
def q6_0_r4(block, out):
    """Decode one row's Q6_0_R4 block, uint8[26], to float32[32]: y = d*q + (-32)*d."""
    d = read_half(block, 0)
    for i in range(32):
        out[i] = d * np.float32(six_bits(block, i)) + np.float32(-32) * d


def iq4_nl(block, out):
    """Decode an IQ4_NL block, uint8[18], to float32[32]: y = d*IQ4NL_VALUES[q]."""
    d = read_half(block, 0)
    for j in range(16):
        out[j] = d * IQ4NL_VALUES[block[2 + j] & 15]
        out[j + 16] = d * IQ4NL_VALUES[block[2 + j] >> 4]


def q8_0(block, out):
    """Decode a Q8_0 block, uint8[34], to float32[32]: y = d*q."""
    d = read_half(block, 0)
    for j in range(32):
        out[j] = d * np.float32(np.int8(block[2 + j]))


BLOCK_DECODERS = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_0_R4": q5_0_r4,
    "Q5_1": q5_1,
    "Q6_0": q6_0,
    "Q6_0_R4": q6_0_r4,
    "IQ4_NL": iq4_nl,
    "Q8_0": q8_0,
}
