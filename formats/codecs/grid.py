"""Codebook i-quants: blocks of 256 whose codes are rows of a grid; and IQ4_XS, which is IQ4_NL with
group scales.

b = i//32, l = (i%32)//8, m = i//8. A sign code has 7 bits: those of 7 elements, and the eighth has
even parity.

IQ2_XXS  66 bytes  d f16 | per 32: four indices, then u32: 4 sign codes, scale (bits 28..31)
                   y = d*(scale + 0.5)*0.25 * IQ2_XXS_GRID[index, i%8] * sign
IQ2_XS   74 bytes  d f16 | 32 u16: index (9 bits), sign code | 8 bytes: scales of the halves of 32
                   y as IQ2_XXS
IQ2_S    82 bytes  d f16 | 32 index low bytes | 32 sign bytes | 8 bytes index high pairs
                   | 8 bytes scales
                   y as IQ2_XXS
IQ3_XXS  98 bytes  d f16 | 64 indices, one per 4 | 8 u32 as in IQ2_XXS
                   y = d*(scale + 0.5)*0.5 * IQ3_XXS_GRID[index, i%4] * sign
IQ3_S   110 bytes  d f16 | 64 index low bytes | 8 bytes ninth index bits | 32 sign bytes
                   | 4 bytes scales: nibble b%2 of b//2
                   y = d*(2*scale + 1) * IQ3_S_GRID[index, i%4] * sign
IQ1_S    50 bytes  d f16 | 32 index low bytes
                   | 8 u16, one per 32: 4 x 3 high index bits, scale (3 bits), sign of the shift
                   y = d*(2*scale + 1) * (IQ1_S_GRID[index, i%8] +- 1/8)
IQ1_M    56 bytes  32 index low bytes
                   | 16 bytes of nibbles per 8: 3 high index bits, sign of the shift
                   | 4 u16: 4 scales of 16 elements (3 bits each), and a nibble of d (f16, first
                   nibble lowest)
                   y as IQ1_S
IQ1_S_R4  6 bytes  of one row, in plain form, per 32 (d f16 in the row header): 4 index low bytes
                   | u16 as in IQ1_S
IQ1_M_R4  7 bytes  of one row, in plain form, per 32 (d f16 in the row header): 4 index low bytes
                   | 2 bytes of nibbles as in IQ1_M | scales of both halves (4 bits each)
                   y = d*scale * (IQ1_S_GRID[index, i%8] +- 1/8)
IQ4_XS  136 bytes  d f16 | u16 high scale bits: pair b | 4 bytes of scales: nibble b%2 of b//2
                   | nibbles as in IQ4_NL
                   y = d*(scale - 32) * IQ4NL_VALUES[q]
"""

from __future__ import annotations

import numpy as np

from ..grids import IQ1_S_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID
from ..kernel import device_function
from ..tables import IQ4NL_VALUES
from .scalars import half_to_float, read_half, read_u16, select


@device_function
def even_signs(code):
    """The 8 sign bits of a 7-bit code: bit 7 makes the number of set bits even."""
    parity = code ^ code >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return code | (parity & 1) << 7


@device_function
def put_signed(out, first, scale, grid, index, signs):
    """Set elements first.. of `out`: a grid row times `scale`, negated where `signs` has a 1."""
    for j in range(grid.shape[1]):
        value = scale * np.float32(grid[index, j])
        out[first + j] = select(signs >> j & 1, -value, value)


@device_function
def put_shifted(out, first, scale, index, negative):
    """Eight elements: a row of the ternary grid, moved by an eighth, times `scale`."""
    shift = select(negative, np.float32(-0.125), np.float32(0.125))
    for j in range(8):
        out[first + j] = scale * (np.float32(IQ1_S_GRID[index, j]) + shift)


def iq2_xxs(block, out):
    """Decode an IQ2_XXS block, uint8[66], to float32[256]: y = d*(scale + 0.5)*0.25 * grid *
    sign.
    """
    d = read_half(block, 0)
    for b in range(8):
        at = 2 + 8 * b
        word = read_u16(block, at + 4) | read_u16(block, at + 6) << 16
        scale = d * (np.float32(0.5) + np.float32(word >> 28)) * np.float32(0.25)
        for l in range(4):
            put_signed(
                out,
                32 * b + 8 * l,
                scale,
                IQ2_XXS_GRID,
                np.int64(block[at + l]),
                even_signs(word >> (7 * l) & 127),
            )


def iq2_xs(block, out):
    """Decode an IQ2_XS block, uint8[74], to float32[256]: y = d*(scale + 0.5)*0.25 * grid *
    sign.
    """
    d = read_half(block, 0)
    for m in range(32):
        word = read_u16(block, 2 + 2 * m)
        nibble = np.int64(block[66 + m // 4]) >> (4 * (m >> 1 & 1)) & 15
        scale = d * (np.float32(0.5) + np.float32(nibble)) * np.float32(0.25)
        put_signed(out, 8 * m, scale, IQ2_XS_GRID, word & 511, even_signs(word >> 9))


def iq2_s(block, out):
    """Decode an IQ2_S block, uint8[82], to float32[256]: y = d*(scale + 0.5)*0.25 * grid * sign."""
    d = read_half(block, 0)
    for m in range(32):
        index = np.int64(block[2 + m]) | (np.int64(block[66 + m // 4]) >> (2 * (m & 3)) & 3) << 8
        nibble = np.int64(block[74 + m // 4]) >> (4 * (m >> 1 & 1)) & 15
        scale = d * (np.float32(0.5) + np.float32(nibble)) * np.float32(0.25)
        put_signed(out, 8 * m, scale, IQ2_S_GRID, index, np.int64(block[34 + m]))


def iq3_xxs(block, out):
    """Decode an IQ3_XXS block, uint8[98], to float32[256]: y = d*(scale + 0.5)*0.5 * grid *
    sign.
    """
    d = read_half(block, 0)
    for b in range(8):
        word = read_u16(block, 66 + 4 * b) | read_u16(block, 68 + 4 * b) << 16
        scale = d * (np.float32(0.5) + np.float32(word >> 28)) * np.float32(0.5)
        for l in range(4):
            signs = even_signs(word >> (7 * l) & 127)
            for h in range(2):
                put_signed(
                    out,
                    32 * b + 8 * l + 4 * h,
                    scale,
                    IQ3_XXS_GRID,
                    np.int64(block[2 + 8 * b + 2 * l + h]),
                    signs >> (4 * h),
                )


def iq3_s(block, out):
    """Decode an IQ3_S block, uint8[110], to float32[256]: y = d*(2*scale + 1) * grid * sign."""
    d = read_half(block, 0)
    for b in range(8):
        scale = d * np.float32(1 + 2 * (np.int64(block[106 + b // 2]) >> (4 * (b & 1)) & 15))
        for h in range(8):
            index = np.int64(block[2 + 8 * b + h]) | (np.int64(block[66 + b]) >> h & 1) << 8
            signs = np.int64(block[74 + 4 * b + h // 2]) >> (4 * (h & 1))
            put_signed(out, 32 * b + 4 * h, scale, IQ3_S_GRID, index, signs)


def iq1_s(block, out):
    """Decode an IQ1_S block, uint8[50], to float32[256]: y = d*(2*scale + 1) * (grid ± 1/8)."""
    d = read_half(block, 0)
    for b in range(8):
        word = read_u16(block, 34 + 2 * b)
        scale = d * np.float32(2 * (word >> 12 & 7) + 1)
        for l in range(4):
            index = np.int64(block[2 + 4 * b + l]) | (word >> (3 * l) & 7) << 8
            put_shifted(out, 32 * b + 8 * l, scale, index, word >> 15)


def iq1_m(block, out):
    """Decode an IQ1_M block, uint8[56], to float32[256]: y = d*(2*scale + 1) * (grid ± 1/8)."""
    bits = 0
    for part in range(4):
        bits |= (read_u16(block, 48 + 2 * part) >> 12) << (4 * part)
    d = half_to_float(bits)
    for m in range(32):
        three = read_u16(block, 48 + 2 * (m // 8)) >> (3 * (m // 2 & 3)) & 7
        nibble = np.int64(block[32 + m // 2]) >> (4 * (m & 1)) & 15
        put_shifted(
            out,
            8 * m,
            d * np.float32(2 * three + 1),
            np.int64(block[m]) | (nibble & 7) << 8,
            nibble >> 3,
        )


def iq1_s_r4(block, head, out):
    """Decode one row's IQ1_S_R4 block, uint8[6], and its row header, uint8[2], to float32[32]: y =
    d*(2*scale + 1) * (grid ± 1/8).
    """
    word = read_u16(block, 4)
    scale = read_half(head, 0) * np.float32(2 * (word >> 12 & 7) + 1)
    for l in range(4):
        put_shifted(out, 8 * l, scale, np.int64(block[l]) | (word >> (3 * l) & 7) << 8, word >> 15)


def iq1_m_r4(block, head, out):
    """Decode one row's IQ1_M_R4 block, uint8[7], and its row header, uint8[2], to float32[32]: y =
    d*scale * (grid ± 1/8).
    """
    d = read_half(head, 0)
    for l in range(4):
        nibble = np.int64(block[4 + l // 2]) >> (4 * (l & 1)) & 15
        scale = d * np.float32(np.int64(block[6]) >> (4 * (l // 2)) & 15)
        put_shifted(out, 8 * l, scale, np.int64(block[l]) | (nibble & 7) << 8, nibble >> 3)


def iq4_xs(block, out):
    """Decode an IQ4_XS block, uint8[136], to float32[256]: y = d*(scale - 32) * IQ4NL_VALUES[q]."""
    d = read_half(block, 0)
    high = read_u16(block, 2)
    for b in range(8):
        low = np.int64(block[4 + b // 2]) >> (4 * (b & 1)) & 15
        scale = d * np.float32((low | (high >> (2 * b) & 3) << 4) - 32)
        for l in range(16):
            out[32 * b + l] = scale * IQ4NL_VALUES[block[8 + 16 * b + l] & 15]
            out[32 * b + 16 + l] = scale * IQ4NL_VALUES[block[8 + 16 * b + l] >> 4]


BLOCK_DECODERS = {
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "IQ1_S_R4": iq1_s_r4,
    "IQ1_M_R4": iq1_m_r4,
    "IQ4_XS": iq4_xs,
}
