"""Layouts of interleaved IQ_K and IQ_KS types. b = i//32, e = i%32, g = i//16; fields are (bits in
the row's block, in the merged block).

The f32 scales of IQ4_KS_R4 and IQ5_KS_R4 are in the group header.
"""

from __future__ import annotations

from .bit_moves import bits, c4, n4, nibble, u8, u16


def _d_and_halves(k, i):
    """d, and the bit per 16 elements that chooses the half of the table: first halves of the
    32-groups in byte k, then 4+k.
    """
    return [
        (u16(0), u16(2 * k)),
        (bits(2, i // 16, 1), bits(8 + k + 4 * (i % 32 // 16), i // 32, 1)),
    ]


def _fifth(at, k, e):
    """Fifth bits of 32 elements of four rows in 16 bytes at `at`; not the order of Q5_K_R4."""
    return bits(at + 4 * k + e % 4, e % 16 // 8 + 2 * (e // 16) + 4 * (e % 8 // 4), 1)


def iq2_k_r4(k, i):
    """List the fields of element i of row k < 4 of IQ2_K_R4: d, table halves, scales, codes. A
    row's block has 76 bytes, a merged one 304.
    """
    b, e, g = i // 32, i % 32, i // 16
    n = 4 * g + k  # number of the scale, here and below
    return [
        *_d_and_halves(k, i),
        (nibble(4 + g // 2, g % 2), nibble(16 + n % 32, n // 32)),  # scales
        (bits(12 + 32 * (i // 128) + e, 2 * (b % 4), 2), c4(48 + 32 * b, k, e)),
    ]


def iq3_k_r4(k, i):
    """List the fields of element i of row k < 4 of IQ3_K_R4: d, table halves, scales with their
    signs, codes with their third bits. A row's block has 110 bytes, a merged one 440.
    """
    b, e, g = i // 32, i % 32, i // 16
    n = 4 * g + k
    return [
        *_d_and_halves(k, i),
        (bits(4, g, 1), bits(16 + n % 8, n // 8, 1)),  # signs of the scales
        (nibble(6 + g // 2, g % 2), nibble(24 + n % 32, n // 32)),  # scales
        (bits(14 + 32 * (i // 128) + e, 2 * (b % 4), 2), c4(56 + 32 * b, k, e)),
        (bits(78 + e, b, 1), bits(312 + 16 * b + 4 * k + e % 4, e // 4, 1)),  # third bits
    ]


def _six_bit_scales(k, g):
    n = 4 * g + k
    return [
        (nibble(8 + g // 2, g % 2), nibble(32 + n % 32, n // 32)),
        (bits(4 + g // 4, 2 * (g % 4), 2), bits(16 + n % 16, 2 * (n // 16), 2)),
    ]


def iq4_k_r4(k, i):
    """List the fields of element i of row k < 4 of IQ4_K_R4: d, table halves, scales, codes. A
    row's block has 144 bytes, a merged one 576.
    """
    b, e, g = i // 32, i % 32, i // 16
    return [
        *_d_and_halves(k, i),
        *_six_bit_scales(k, g),
        (nibble(16 + 16 * b + i % 16, g % 2), n4(64 + 64 * b, k, e)),
    ]


def iq5_k_r4(k, i):
    """List the fields of element i of row k < 4 of IQ5_K_R4: d, table halves, scales, codes with
    their fifth bits. A row's block has 176 bytes, a merged one 704.
    """
    b, e, g = i // 32, i % 32, i // 16
    return [
        *_d_and_halves(k, i),
        *_six_bit_scales(k, g),
        (nibble(16 + 32 * (i // 64) + e, b % 2), n4(64 + 64 * b, k, e)),
        (bits(144 + e, b, 1), _fifth(576 + 16 * b, k, e)),
    ]


def iq4_ks_r4(k, i):
    """List the fields of element i of row k < 4 of IQ4_KS_R4: scales, codes. A row's block has 136
    bytes, a merged one 544.
    """
    b, e = i // 32, i % 32
    return [(u8(b), u8(4 * b + k)), (nibble(8 + 16 * b + i % 16, e // 16), n4(32 + 64 * b, k, e))]


def iq5_ks_r4(k, i):
    """List the fields of element i of row k < 4 of IQ5_KS_R4: scales, codes with their fifth bits.
    A row's block has 168 bytes, a merged one 672.
    """
    b, e = i // 32, i % 32
    return [
        (u8(b), u8(4 * b + k)),  # scales
        (nibble(8 + 32 * (i // 64) + e, b % 2), n4(32 + 64 * b, k, e)),
        (bits(136 + e, b, 1), _fifth(544 + 16 * b, k, e)),
    ]


LAYOUTS = {
    "IQ2_K_R4": iq2_k_r4,
    "IQ3_K_R4": iq3_k_r4,
    "IQ4_K_R4": iq4_k_r4,
    "IQ5_K_R4": iq5_k_r4,
    "IQ4_KS_R4": iq4_ks_r4,
    "IQ5_KS_R4": iq5_ks_r4,
}
