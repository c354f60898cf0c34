"""Layouts of the K-quants. Codes are by byte: they are numbers, not indices of a table."""

from ...formats.codecs.bit_moves import bits, nibble, u8, u16
from .layout import BlockLayout, nibbles_by_byte, pairs_by_byte, singles_by_byte


def six_bit_scales(first):
    """The 12 bytes of Q4_K and Q5_K to a byte per unit: its scale, and the lowest two bits of its
    minimum; then a nibble per unit: the rest of its minimum. `first`: where they are in the packed
    record.
    """
    fields = []
    for s in range(4):
        # Stored bytes of unit s and, the last, of unit s + 4.
        scale, minimum, late = (
            4 + s,
            8 + s,
            12 + s,
        )
        fields += [
            (bits(scale, 0, 6), bits(first + s, 0, 6)),
            (bits(minimum, 0, 2), bits(first + s, 6, 2)),
            (bits(minimum, 2, 4), nibble(first + 8 + s // 2, s % 2)),
            (bits(late, 0, 4), bits(first + 4 + s, 0, 4)),
            (bits(scale, 6, 2), bits(first + 4 + s, 4, 2)),
            (bits(late, 4, 2), bits(first + 4 + s, 6, 2)),
            (bits(late, 6, 2), bits(first + 10 + s // 2, 4 * (s % 2), 2)),
            (bits(minimum, 6, 2), bits(first + 10 + s // 2, 4 * (s % 2) + 2, 2)),
        ]
    return fields


def _record():
    """The 16 bytes of Q4_K and Q5_K: d, dmin, scales and minimums."""
    return [
        (u16(0), "scales", u16(0)),
        (u16(2), "scales", u16(2)),
        *((stored, "scales", packed) for stored, packed in six_bit_scales(4)),
    ]


def q2_k(i):
    """Map elements i of a Q2_K block, uint8[84], to planes (see `layout.py`): 2-bit codes, scales
    and minimums, d and dmin in `heads`.
    """
    return [
        (bits(16 + 32 * (i // 128) + i % 32, 2 * (i // 32 % 4), 2), "codes", pairs_by_byte(i)),
        (u8(i // 16), "scales", u8(i // 16)),
        (u16(80), "heads", u16(0)),
        (u16(82), "heads", u16(2)),
    ]


def q3_k(i):
    """Map elements i of a Q3_K block, uint8[110], to planes (see `layout.py`): 2-bit codes, third
    bits, scales, high bits of scales, d.
    """
    g = i // 16
    return [
        (bits(32 + 32 * (i // 128) + i % 32, 2 * (i // 32 % 4), 2), "codes", pairs_by_byte(i)),
        (bits(i % 32, i // 32, 1), "third", singles_by_byte(i)),
        (nibble(96 + g % 8, g // 8), "scales", nibble(g // 2, g % 2)),
        (bits(104 + g % 4, 2 * (g // 4), 2), "high", bits(g // 4, 2 * (g % 4), 2)),
        (u16(108), "d", u16(0)),
    ]


def q4_k(i):
    """Map elements i of a Q4_K block, uint8[144], to planes (see `layout.py`): 4-bit codes, a
    record of d, dmin, scales and minimums.
    """
    return [
        (nibble(16 + 32 * (i // 64) + i % 32, i // 32 % 2), "codes", nibbles_by_byte(i)),
        *_record(),
    ]


def q5_k(i):
    """Map elements i of a Q5_K block, uint8[176], to planes (see `layout.py`): 4-bit codes, fifth
    bits, a record of d, dmin, scales and minimums.
    """
    return [
        (nibble(48 + 32 * (i // 64) + i % 32, i // 32 % 2), "codes", nibbles_by_byte(i)),
        (bits(16 + i % 32, i // 32, 1), "fifth", singles_by_byte(i)),
        *_record(),
    ]


def q6_k(i):
    """Map elements i of a Q6_K block, uint8[210], to planes (see `layout.py`): low and high bits of
    codes, scales, d.
    """
    h, l = i // 128, i % 32
    return [
        (nibble(64 * h + 32 * (i // 32 % 2) + l, i // 64 % 2), "low", nibbles_by_byte(i)),
        (bits(128 + 32 * h + l, 2 * (i // 32 % 4), 2), "high", pairs_by_byte(i)),
        (u8(192 + i // 16), "scales", u8(i // 16)),
        (u16(208), "d", u16(0)),
    ]


LAYOUTS = {
    "Q2_K": BlockLayout((("codes", 64), ("scales", 16), ("heads", 4)), q2_k),
    "Q3_K": BlockLayout((("codes", 64), ("third", 32), ("scales", 8), ("high", 4), ("d", 2)), q3_k),
    "Q4_K": BlockLayout((("codes", 128), ("scales", 16)), q4_k),
    "Q5_K": BlockLayout((("codes", 128), ("fifth", 32), ("scales", 16)), q5_k),
    "Q6_K": BlockLayout((("low", 128), ("high", 64), ("scales", 16), ("d", 2)), q6_k),
}
