"""Layouts of interleaved K-quants. b = i//32, e = i%32, g = i//16; fields are (bits in the row's
block, bits in the merged block).
"""

from __future__ import annotations

import numpy as np

from .bit_moves import bits, c4, n4, nibble, u8, u16


def q2_k_r4(k, i):
    """List the fields of element i of row k < 4 of Q2_K_R4: d, dmin, scale and minimum, codes. A
    row's block has 84 bytes, a merged one 336.
    """
    return [
        (u16(80), u16(2 * k)),  # d
        (u16(82), u16(8 + 2 * k)),  # dmin
        (u8(i // 16), u8(16 + 4 * (i // 16) + k)),  # scale and minimum
        (
            bits(16 + 32 * (i // 128) + i % 32, 2 * (i // 32 % 4), 2),
            c4(80 + 32 * (i // 32), k, i % 32),
        ),
    ]


def q3_k_r4(k, i):
    """List the fields of element i of row k < 4 of Q3_K_R4: d, scales, codes with their third bits.
    A row's block has 110 bytes, a merged one 440.
    """
    b, e, g = i // 32, i % 32, i // 16
    n = 4 * g + k  # number of the scale
    return [
        (u16(108), u16(2 * k)),  # d
        (nibble(96 + g % 8, g // 8), nibble(24 + n % 32, n // 32)),  # scales
        (bits(104 + g % 4, 2 * (g // 4), 2), bits(8 + n % 16, 2 * (n // 16), 2)),
        (bits(32 + 32 * (i // 128) + e, 2 * (b % 4), 2), c4(184 + 32 * b, k, e)),
        (bits(e, b, 1), bits(56 + 16 * b + 4 * k + e % 4, e // 4, 1)),  # third bits
    ]


def _scales_of_32(k, b):
    """d, dmin and the six-bit scales and minimums of Q4_K and Q5_K, whose groups 4..7 spread theirs
    over the twelve bytes.
    """
    n = 4 * b + k
    spread = b >= 4
    return [
        (u16(0), u16(2 * k)),
        (u16(2), u16(8 + 2 * k)),
        (nibble(np.where(spread, 8 + b, 4 + b), 0), nibble(32 + n, 0)),
        (
            bits(np.where(spread, b, 4 + b), np.where(spread, 6, 4), 2),
            bits(16 + n % 16, 4 * (n // 16), 2),
        ),
        (nibble(8 + b, np.where(spread, 1, 0)), nibble(32 + n, 1)),
        (
            bits(np.where(spread, 4 + b, 8 + b), np.where(spread, 6, 4), 2),
            bits(16 + n % 16, 4 * (n // 16) + 2, 2),
        ),
    ]


def q4_k_r4(k, i):
    """List the fields of element i of row k < 4 of Q4_K_R4: d, dmin, scales and minimums, codes. A
    row's block has 144 bytes, a merged one 576.
    """
    b, e = i // 32, i % 32
    return [*_scales_of_32(k, b), (nibble(16 + 32 * (i // 64) + e, b % 2), n4(64 + 64 * b, k, e))]


def q5_k_r4(k, i):
    """List the fields of element i of row k < 4 of Q5_K_R4: d, dmin, scales and minimums, codes
    with their fifth bits. A row's block has 176 bytes, a merged one 704.
    """
    b, e = i // 32, i % 32
    fifth = bits(64 + 16 * b + 4 * k + e % 4, e % 16 // 8 + 2 * (e % 8 // 4) + 4 * (e // 16), 1)
    return [
        *_scales_of_32(k, b),
        (bits(16 + e, b, 1), fifth),
        (nibble(48 + 32 * (i // 64) + e, b % 2), n4(192 + 64 * b, k, e)),
    ]


def q6_k_r4(k, i):
    """List the fields of element i of row k < 4 of Q6_K_R4: d, scales, codes with their high bits.
    A row's block has 210 bytes, a merged one 840.
    """
    b, e = i // 32, i % 32
    quarter = i % 128 // 32
    high = bits(
        72 + 32 * b + 4 * k + e % 4 + 16 * (e // 16), 2 * (e % 16 // 8) + 4 * (e % 8 // 4), 2
    )
    return [
        (u16(208), u16(2 * k)),  # d
        (u8(192 + i // 16), u8(8 + 4 * (i // 16) + k)),  # scales
        (bits(128 + 32 * (i // 128) + e, 2 * quarter, 2), high),
        (nibble(64 * (i // 128) + 32 * (quarter % 2) + e, quarter // 2), n4(328 + 64 * b, k, e)),
    ]


LAYOUTS = {
    "Q2_K_R4": q2_k_r4,
    "Q3_K_R4": q3_k_r4,
    "Q4_K_R4": q4_k_r4,
    "Q5_K_R4": q5_k_r4,
    "Q6_K_R4": q6_k_r4,
}
