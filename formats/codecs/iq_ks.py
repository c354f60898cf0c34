"""IQ_K types with the scale d in the row header: blocks of 256, one quantized scale per 32 elements
(group b).

IQ2_KS   70 bytes  (d f16) extra u16: bit b table half, bit 8+b fifth scale bit
                   | 4 bytes of scales, nibble b%2 of byte b//2 | 64 bytes bit pairs
                   y = (d * (scale - 16)) * IQ2NL_VALUES[4*half + q]
IQ3_KS  102 bytes  (d f16) extra u16: bit b fifth scale bit, bit 8+b table half
                   | 4 bytes of scales, nibble b//4 of byte b%4 | 64 bytes bit pairs
                   | 32 bytes third bits: byte i%32, bit b
                   y = (d * (scale - 16)) * IQ3NL_VALUES[8*half + q]
IQ4_KS  136 bytes  (d f32) 8 scale bytes, lowest bit = table half
                   | 128 bytes of nibbles: byte 16*b + i%16, low for the first 16
                   y = (d * ((scale & 254) - 127)) * IQ4K_VALUES[16*half + q]
IQ4_KSS 128 bytes  (d f32) 64 u16, eight per group. Their lowest bits, first word lowest, are the
                   scale byte of IQ4_KS; what is left of word n, v, gives four codes in the nibbles
                   of v ^ v>>1: elements 2n, 2n+16, 2n+1, 2n+17
IQ5_KS  168 bytes  (d f32) 8 scale bytes as IQ4_KS
                   | 128 bytes of nibbles: byte 32*(i//64) + i%32, high where b is odd
                   | 32 bytes fifth bits: byte i%32, bit b
                   y = (d * ((scale & 254) - 127)) * IQ5NL_VALUES[32*half + q]
IQ2_KL   86 bytes  (d f16) u16 high scale bits: pair b | 4 bytes of scales as in IQ3_KS
                   | 64 bytes of nibbles: byte 16*(i//64) + (i%32)//2, high where b is odd
                   | 16 bytes fifth bits: byte (i%32)//2, bit b
                   two neighbours share a code
                   y = (d * (scale - 32)) * IQ2KL_VALUES[q, i%2]

Bit pairs: byte 32*(i//128) + i%32, bits 2*(b%4).
"""

from __future__ import annotations

import numpy as np

from ..tables import IQ2KL_VALUES, IQ2NL_VALUES, IQ3NL_VALUES, IQ4K_VALUES, IQ5NL_VALUES
from .scalars import read_float, read_half, read_u16


def iq2_ks(block, head, out):
    """Decode an IQ2_KS block, uint8[70], and its row header, uint8[2], to float32[256]: y =
    d*(scale - 16) * IQ2NL_VALUES[4*half + q].
    """
    d = read_half(head, 0)
    extra = read_u16(block, 0)
    for b in range(8):
        low = np.int64(block[2 + b // 2]) >> (4 * (b & 1)) & 15
        scale = d * np.float32((low | (extra >> (8 + b) & 1) << 4) - 16)
        half = 4 * (extra >> b & 1)
        for l in range(32):
            q = np.int64(block[6 + 32 * (b // 4) + l]) >> (2 * (b & 3)) & 3
            out[32 * b + l] = scale * IQ2NL_VALUES[half + q]


def iq3_ks(block, head, out):
    """Decode an IQ3_KS block, uint8[102], and its row header, uint8[2], to float32[256]: y =
    d*(scale - 16) * IQ3NL_VALUES[8*half + q].
    """
    d = read_half(head, 0)
    extra = read_u16(block, 0)
    for b in range(8):
        low = np.int64(block[2 + (b & 3)]) >> (4 * (b // 4)) & 15
        scale = d * np.float32((low | (extra >> b & 1) << 4) - 16)
        half = 8 * (extra >> (8 + b) & 1)
        for l in range(32):
            pair = np.int64(block[6 + 32 * (b // 4) + l]) >> (2 * (b & 3)) & 3
            third = np.int64(block[70 + l]) >> b & 1
            out[32 * b + l] = scale * IQ3NL_VALUES[half + (pair | third << 2)]


def iq4_ks(block, head, out):
    """Decode an IQ4_KS block, uint8[136], and its row header, uint8[4], to float32[256]: y =
    d*((scale & 254) - 127) * IQ4K_VALUES[16*half + q].
    """
    d = read_float(head, 0)
    for b in range(8):
        scale = d * np.float32((np.int64(block[b]) & 254) - 127)
        half = 16 * (np.int64(block[b]) & 1)
        for l in range(16):
            out[32 * b + l] = scale * IQ4K_VALUES[half + (block[8 + 16 * b + l] & 15)]
            out[32 * b + 16 + l] = scale * IQ4K_VALUES[half + (block[8 + 16 * b + l] >> 4)]


def iq4_kss(block, head, out):
    """Decode an IQ4_KSS block, uint8[128], and its row header, uint8[4], to float32[256]: y =
    d*((scale & 254) - 127) * IQ4K_VALUES[16*half + q].
    """
    d = read_float(head, 0)
    for b in range(8):
        scale_byte = 0
        for n in range(8):
            scale_byte |= (np.int64(block[16 * b + 2 * n]) & 1) << n
        scale = d * np.float32((scale_byte & 254) - 127)
        half = 16 * (scale_byte & 1)
        for n in range(8):
            word = read_u16(block, 16 * b + 2 * n) & 0xFFFE
            codes = word ^ word >> 1
            i = 32 * b + 2 * n
            out[i] = scale * IQ4K_VALUES[half + (codes & 15)]
            out[i + 16] = scale * IQ4K_VALUES[half + (codes >> 4 & 15)]
            out[i + 1] = scale * IQ4K_VALUES[half + (codes >> 8 & 15)]
            out[i + 17] = scale * IQ4K_VALUES[half + (codes >> 12)]


def iq5_ks(block, head, out):
    """Decode an IQ5_KS block, uint8[168], and its row header, uint8[4], to float32[256]: y =
    d*((scale & 254) - 127) * IQ5NL_VALUES[32*half + q].
    """
    d = read_float(head, 0)
    for b in range(8):
        scale = d * np.float32((np.int64(block[b]) & 254) - 127)
        half = 32 * (np.int64(block[b]) & 1)
        for l in range(32):
            nibble = np.int64(block[8 + 32 * (b // 2) + l]) >> (4 * (b & 1)) & 15
            fifth = np.int64(block[136 + l]) >> b & 1
            out[32 * b + l] = scale * IQ5NL_VALUES[half + (nibble | fifth << 4)]


def iq2_kl(block, head, out):
    """Decode an IQ2_KL block, uint8[86], and its row header, uint8[2], to float32[256]: y =
    d*(scale - 32) * IQ2KL_VALUES[q, i%2].
    """
    d = read_half(head, 0)
    high = read_u16(block, 0)
    for b in range(8):
        low = np.int64(block[2 + (b & 3)]) >> (4 * (b // 4)) & 15
        scale = d * np.float32((low | (high >> (2 * b) & 3) << 4) - 32)
        for p in range(16):
            nibble = np.int64(block[6 + 16 * (b // 2) + p]) >> (4 * (b & 1)) & 15
            q = nibble | (np.int64(block[70 + p]) >> b & 1) << 4
            out[32 * b + 2 * p] = scale * IQ2KL_VALUES[q, 0]
            out[32 * b + 2 * p + 1] = scale * IQ2KL_VALUES[q, 1]


BLOCK_DECODERS = {
    "IQ2_KS": iq2_ks,
    "IQ3_KS": iq3_ks,
    "IQ4_KS": iq4_ks,
    "IQ4_KSS": iq4_kss,
    "IQ5_KS": iq5_ks,
    "IQ2_KL": iq2_kl,
}
