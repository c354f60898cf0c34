"""Eight-bit types with one scale per row or per 256 elements. The rows of Q8_K_R8 and Q8_K_R16
exist only interleaved.

Q8_KV     32 bytes  (row header: d f32, sum of the row's codes i32) 32 signed bytes
                    y = d * q
Q8_K_R8  258 bytes  of one row, in plain form: d f16 | 256 signed bytes
                    y = d * q
Q8_K_R16 258 bytes  of one row, in plain form: d f16 | 256 bytes, 128 added to the code
                    y = d*q - 128*d
"""

from __future__ import annotations

import numpy as np

from .scalars import read_float, read_half


def q8_kv(block, head, out):
    """Decode a Q8_KV block, uint8[32], and its row header, uint8[8], to float32[32]: y = d*q."""
    d = read_float(head, 0)
    for i in range(32):
        out[i] = d * np.float32(np.int8(block[i]))


def q8_k_r8(block, out):
    """Decode one row's Q8_K_R8 block, uint8[258], to float32[256]: y = d*q."""
    d = read_half(block, 0)
    for i in range(256):
        out[i] = d * np.float32(np.int8(block[2 + i]))


def q8_k_r16(block, out):
    """Decode one row's Q8_K_R16 block, uint8[258], to float32[256]: y = d*q - 128*d."""
    d = read_half(block, 0)
    for i in range(256):
        out[i] = d * np.float32(block[2 + i]) + np.float32(-128) * d


BLOCK_DECODERS = {"Q8_KV": q8_kv, "Q8_K_R8": q8_k_r8, "Q8_K_R16": q8_k_r16}
