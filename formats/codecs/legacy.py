"""Blocks of 32 with one half-precision scale: Q4_0, Q8_0, IQ4_NL.

Q4_0    18 bytes   d f16 | 16 bytes of nibbles: byte j holds element j (low) and j+16 (high)      y = d * (q - 8)
IQ4_NL  18 bytes   laid out as Q4_0                                                               y = d * IQ4NL_VALUES[q]
Q8_0    34 bytes   d f16 | 32 signed bytes                                                        y = d * q
"""

from __future__ import annotations

import numpy as np

from ..tables import IQ4NL_VALUES
from .scalars import read_half


def q4_0(block, out):
    d = read_half(block, 0)
    for j in range(16):
        out[j] = d * np.float32(np.int64(block[2 + j] & 15) - 8)
        out[j + 16] = d * np.float32(np.int64(block[2 + j] >> 4) - 8)


def iq4_nl(block, out):
    d = read_half(block, 0)
    for j in range(16):
        out[j] = d * IQ4NL_VALUES[block[2 + j] & 15]
        out[j + 16] = d * IQ4NL_VALUES[block[2 + j] >> 4]


def q8_0(block, out):
    d = read_half(block, 0)
    for j in range(32):
        out[j] = d * np.float32(np.int8(block[2 + j]))


BLOCK_DECODERS = {"Q4_0": q4_0, "IQ4_NL": iq4_nl, "Q8_0": q8_0}
