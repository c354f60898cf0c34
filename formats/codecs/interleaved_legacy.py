"""Layouts of interleaved types with small blocks. Per field: (bits in the row's block, bits in the
merged block).
"""

from __future__ import annotations

from .bit_moves import FLIPPED, bits, c4, n4, nibble, u8, u16


def q4_0_r8(k, i):
    """List the fields of element i of row k < 8 of Q4_0_R8: d, codes. A row's block has 18 bytes, a
    merged one 144.
    """
    return [
        (u16(0), u16(2 * k)),  # d
        (nibble(2 + i % 16, i // 16), nibble(16 + 32 * (i % 16 // 4) + 4 * k + i % 4, i // 16)),
    ]


def q5_0_r4(k, i):
    """List the fields of element i of row k < 4 of Q5_0_R4: d, codes with their fifth bits. A row's
    block has 22 bytes, a merged one 88.
    """
    return [
        (u16(0), u16(2 * k)),  # d
        # Fifth bits.
        (
            bits(2, i, 1),
            bits(8 + 4 * k + i % 4, i // 16 + 2 * (i % 8 // 4) + 4 * (i % 16 // 8), 1),
        ),
        (nibble(6 + i % 16, i // 16), n4(24, k, i)),
    ]


def q6_0_r4(k, i):
    """List the fields of element i of row k < 4 of Q6_0_R4: d, codes with their high bits. A row's
    block has 26 bytes, a merged one 104.
    """
    in_row = bits(2 + i % 8, 4 * (i % 16 // 8) + 2 * (i // 16), 2)
    return [
        (u16(0), u16(2 * k)),  # d
        # High pairs.
        (
            in_row,
            bits(8 + 4 * k + i % 4 + 16 * (i // 16), 2 * (i % 8 // 4) + 4 * (i % 16 // 8), 2),
        ),
        (nibble(10 + i % 16, i // 16), n4(40, k, i)),
    ]


def q8_0_r8(k, i):
    """List the fields of element i of row k < 8 of Q8_0_R8: d, codes. A row's block has 34 bytes, a
    merged one 272.
    """
    return [(u16(0), u16(2 * k)), (u8(2 + i), u8(16 + 32 * (i // 4) + 4 * k + i % 4))]


def iq4_nl_r4(k, i):
    """List the fields of element i of row k < 4 of IQ4_NL_R4: d, codes. A row's block has 18 bytes,
    a merged one 72.
    """
    return [(u16(0), u16(2 * k)), (nibble(2 + i % 16, i // 16), n4(8, k, i))]


def mxfp4_r8(k, i):
    """List the fields of element i of row k < 8 of MXFP4_R8: exponent, codes. A row's block has 17
    bytes, a merged one 136.
    """
    return [
        (u8(0), u8(k)),
        (nibble(1 + i % 16, i // 16), nibble(8 + 32 * (i % 16 // 4) + 4 * k + i % 4, i // 16)),
    ]


def iq2_bn_r4(k, i):
    """List the fields of element i of row k < 4 of IQ2_BN_R4: codes. A row's block has 16 bytes, a
    merged one 64.
    """
    # Four f32 scales in the group header; two runs of 32 elements in a block.
    return [(bits(i % 16, 2 * (i // 16), 2), c4(32 * (i // 32), k, i % 32))]


def q8_kv_r8(k, i):
    """List the fields of element i of row k < 8 of Q8_KV_R8: codes. A row's block has 32 bytes, a
    merged one 256.
    """
    # Eight f32 scales in the group header, without the sums of the rows.
    return [(u8(i), u8(32 * (i // 4) + 4 * k + i % 4))]


def q8_k_r8(k, i):
    """List the fields of element i of row k < 8 of Q8_K_R8: d, codes. A row's block has 258 bytes,
    a merged one 2064.
    """
    return [(u16(0), u16(2 * k)), (u8(2 + i), u8(16 + 32 * (i // 4) + 4 * k + i % 4))]


def q8_k_r16(k, i):
    """List the fields of element i of row k < 16 of Q8_K_R16: d, codes. A row's block has 258
    bytes, a merged one 4128.
    """
    return [(u16(0), u16(2 * k)), (u8(2 + i), u8(32 + 64 * (i // 4) + 4 * k + i % 4))]


def bf16_r16(k, i):
    """List the fields of element i of row k (0 to 15) of BF16_R16: its bits in the row and in 16
    merged rows.
    """
    return [(u16(2 * i), u16(4 * k + 2 * i))]


def _arm(rows: int, chunk: int):
    """Q4_0 for old ARM kernels: nibble bytes in chunks from row after row, codes as two's
    complement of q - 8.
    """

    def layout(k, i):
        n = i % 16
        merged = nibble(2 * rows + rows * chunk * (n // chunk) + chunk * k + n % chunk, i // 16)
        return [(u16(0), u16(2 * k)), (nibble(2 + n, i // 16), merged, FLIPPED)]

    return layout


LAYOUTS = {
    "Q4_0_4_4": _arm(4, 4),
    "Q4_0_4_8": _arm(4, 8),
    "Q4_0_8_8": _arm(8, 8),
    "Q4_0_R8": q4_0_r8,
    "Q5_0_R4": q5_0_r4,
    "Q6_0_R4": q6_0_r4,
    "Q8_0_R8": q8_0_r8,
    "IQ4_NL_R4": iq4_nl_r4,
    "MXFP4_R8": mxfp4_r8,
    "IQ2_BN_R4": iq2_bn_r4,
    "Q8_KV_R8": q8_kv_r8,
    "Q8_K_R8": q8_k_r8,
    "Q8_K_R16": q8_k_r16,
    "BF16_R16": bf16_r16,
}
