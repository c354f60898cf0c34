"""Layouts of one- and two-bit types. Bytes of several ternary digits stay whole."""

from ...formats.codecs.bit_moves import bits, u8, u16
from .layout import BlockLayout, pairs_by_byte, singles_by_byte


def q1_0_g128(i):
    """Map elements i of a Q1_0_G128 block, uint8[18], to planes (see `layout.py`): 1-bit codes,
    d.
    """
    return [(bits(2 + i // 8, i % 8, 1), "codes", singles_by_byte(i)), (u16(0), "d", u16(0))]


def q2_0(i):
    """Map elements i of a Q2_0 block, uint8[18], to planes (see `layout.py`): 2-bit codes, d."""
    return [(bits(2 + i // 4, 2 * (i % 4), 2), "codes", pairs_by_byte(i)), (u16(0), "d", u16(0))]


def tq1_0(i):
    """Map elements i of a TQ1_0 block, uint8[54], to planes (see `layout.py`): bytes of five digits
    in `codes` and `later`, of four in `tail` with d.
    """
    n = i % 32
    return [
        (u8(n), "codes", u8(n)),  # five units are in these bytes, a digit of each
        (u8(32 + i % 16), "later", u8(i % 16)),  # two and a half
        (u8(48 + i % 4), "tail", u8(i % 4)),  # half a unit
        (u16(52), "tail", u16(4)),  # d
    ]


def tq2_0(i):
    """Map elements i of a TQ2_0 block, uint8[66], to planes (see `layout.py`): 2-bit codes, d."""
    return [
        (bits(32 * (i // 128) + i % 32, 2 * (i % 128 // 32), 2), "codes", pairs_by_byte(i)),
        (u16(64), "d", u16(0)),
    ]


def iq1_bn(i):
    """Map elements i of an IQ1_BN block, uint8[13], to planes (see `layout.py`): bytes of five
    digits in `codes`, the block's last byte.
    """
    return [(u8(i % 12), "codes", u8(i % 12)), (u8(12), "last", u8(0))]


def iq2_bn(i):
    """Map elements i of an IQ2_BN block, uint8[16], to planes (see `layout.py`): 2-bit codes; d is
    in the row header.
    """
    return [(bits(i % 16, 2 * (i // 16), 2), "codes", pairs_by_byte(i))]


LAYOUTS = {
    "Q1_0_G128": BlockLayout((("codes", 16), ("d", 2)), q1_0_g128),
    "Q2_0": BlockLayout((("codes", 16), ("d", 2)), q2_0),
    "TQ1_0": BlockLayout((("codes", 32), ("later", 16), ("tail", 8)), tq1_0),
    "TQ2_0": BlockLayout((("codes", 64), ("d", 2)), tq2_0),
    "IQ1_BN": BlockLayout((("codes", 12), ("last", 1)), iq1_bn),
    "IQ2_BN": BlockLayout((("codes", 16),), iq2_bn),
}
