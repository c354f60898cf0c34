"""Layouts of interleaved i-quants. b = i//32, e = i%32, l = e//8, m = i//8; fields are (bits in the
row's block, in the merged block).

IQ1_S_R4 and IQ1_M_R4 have no plain type: "the row's block" is the form that `grid.py` decodes.
"""

from __future__ import annotations

from .bit_moves import SIGN_CODE, bits, nibble, u8, u16


def _signs_and_scale(k, i, word):
    """The u32 per 32 elements, at byte `word` in a row: each merged byte takes a bit of the scale
    and then a sign code.
    """
    b, l = i // 32, i % 32 // 8
    merged = 8 + 4 * (4 * b + k) + l
    return [
        (bits(word, 28 + l, 1), bits(merged, 0, 1)),
        (bits(word, 7 * l, 7), bits(merged, 1, 7), SIGN_CODE),
    ]


def iq2_xxs_r4(k, i):
    """List the fields of element i of row k < 4 of IQ2_XXS_R4: d, indices, signs and scale. A row's
    block has 66 bytes, a merged one 264.
    """
    b, l = i // 32, i % 32 // 8
    return [
        (u16(0), u16(2 * k)),  # d
        (u8(2 + 8 * b + l), u8(136 + 16 * b + 4 * k + l)),  # indices
        *_signs_and_scale(k, i, 6 + 8 * b),
    ]


def iq2_xs_r4(k, i):
    """List the fields of element i of row k < 4 of IQ2_XS_R4: d, index, sign code, scales. A row's
    block has 74 bytes, a merged one 296.
    """
    b, m = i // 32, i // 8
    merged = 8 + 2 * (16 * b + 4 * k + m % 4)
    return [
        (u16(0), u16(2 * k)),  # d
        (bits(2 + 2 * m, 0, 9), bits(merged, 0, 9)),  # index
        (bits(2 + 2 * m, 9, 7), bits(merged, 9, 7), SIGN_CODE),
        (u8(66 + b), u8(264 + 4 * b + k)),  # scales
    ]


def iq2_s_r4(k, i):
    """List the fields of element i of row k < 4 of IQ2_S_R4: d, indices with their high bits,
    signs, scales. A row's block has 82 bytes, a merged one 328.
    """
    b, m = i // 32, i // 8
    return [
        (u16(0), u16(2 * k)),  # d
        (u8(2 + m), u8(8 + 16 * b + 4 * k + m % 4)),  # indices
        (u8(34 + m), u8(168 + 16 * b + 4 * k + m % 4)),  # signs
        (u8(66 + b), u8(136 + 4 * b + k)),  # high bits of the indices
        (u8(74 + b), u8(296 + 4 * b + k)),  # scales
    ]


def iq3_xxs_r4(k, i):
    """List the fields of element i of row k < 4 of IQ3_XXS_R4: d, indices, signs and scale. A row's
    block has 98 bytes, a merged one 392.
    """
    b, e = i // 32, i % 32
    return [
        (u16(0), u16(2 * k)),  # d
        (u8(2 + i // 4), u8(136 + 32 * b + 8 * k + e // 4)),  # indices
        *_signs_and_scale(k, i, 66 + 4 * b),
    ]


def iq3_s_r4(k, i):
    """List the fields of element i of row k < 4 of IQ3_S_R4: d, indices with their ninth bits,
    signs, scales. A row's block has 110 bytes, a merged one 440.
    """
    b, e = i // 32, i % 32
    h, n = e // 4, 4 * b + k
    return [
        (u16(0), u16(2 * k)),  # d
        (u8(2 + i // 4), u8(8 + 32 * b + k + 8 * (h % 4) + 4 * (h // 4))),  # indices
        (u8(66 + b), u8(264 + n)),  # ninth bits of the indices
        (bits(74 + i // 8, i % 8, 1), bits(296 + 16 * b + 4 * k + e % 4, h, 1)),  # signs
        (nibble(106 + b // 2, b % 2), nibble(424 + n % 16, n // 16)),  # scales
    ]


def iq4_xs_r8(k, i):
    """List the fields of element i of row k < 8 of IQ4_XS_R8: d, scales, codes. A row's block has
    136 bytes, a merged one 1088.
    """
    b, e = i // 32, i % 32
    n = 8 * b + k
    return [
        (u16(0), u16(2 * k)),  # d
        (nibble(4 + b // 2, b % 2), nibble(32 + n % 32, n // 32)),  # scales
        (bits(2, 2 * b, 2), bits(16 + n % 16, 2 * (n // 16), 2)),
        (
            nibble(8 + 16 * b + i % 16, e // 16),
            nibble(64 + 128 * b + 4 * k + e % 4 + 32 * (e // 8), e % 8 // 4),
        ),
    ]


def iq1_s_r4(k, i):
    """List the fields of element i of row k < 4 of IQ1_S_R4: indices; the word of scale, high bits
    and shift. A row's block has 6 bytes, a merged one 24.
    """
    return [(u8(i // 8), u8(4 * (i // 8) + k)), (u16(4), u16(16 + 2 * k))]


def iq1_m_r4(k, i):
    """List the fields of element i of row k < 4 of IQ1_M_R4: indices, high bits and shifts, scales.
    A row's block has 7 bytes, a merged one 28.
    """
    return [
        (u8(i // 8), u8(4 * (i // 8) + k)),  # indices
        (u8(4 + i // 16), u8(16 + 4 * (i // 16) + k)),  # high bits and shifts
        (u8(6), u8(24 + k)),  # scales
    ]


LAYOUTS = {
    "IQ2_XXS_R4": iq2_xxs_r4,
    "IQ2_XS_R4": iq2_xs_r4,
    "IQ2_S_R4": iq2_s_r4,
    "IQ3_XXS_R4": iq3_xxs_r4,
    "IQ3_S_R4": iq3_s_r4,
    "IQ4_XS_R8": iq4_xs_r8,
    "IQ1_S_R4": iq1_s_r4,
    "IQ1_M_R4": iq1_m_r4,
}
