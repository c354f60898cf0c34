"""Layouts of the IQ_K types: d and the table halves are fetched with the scales of a block where that makes one load."""

from ...formats.codecs.bit_moves import bits, nibble, u8, u16
from ..layouts import Layout, nibbles, pairs


def iq2_k(i):
    u = i // 32
    return [
        (bits(12 + 32 * (i // 128) + i % 32, 2 * (u % 4), 2), "codes", pairs(i)),
        (u8(4 + u), "scales", u8(u)),
        (u16(0), "heads", u16(0)),  # d
        (u16(2), "heads", u16(2)),  # table halves
    ]


def iq4_k(i):
    u = i // 32
    return [
        (nibble(16 + 16 * u + i % 16, i // 16 % 2), "codes", nibbles(i)),
        (u16(0), "scales", u16(0)),  # d
        (u16(2), "scales", u16(2)),  # table halves, two bits per unit
        (nibble(4 + u // 2, u % 2), "scales", nibble(4 + u // 2, u % 2)),  # high bits of both scales of the unit
        (u8(8 + u), "scales", u8(8 + u)),  # low bits
    ]


LAYOUTS = {
    "IQ2_K": Layout((("codes", 64), ("scales", 8), ("heads", 4)), iq2_k),
    "IQ4_K": Layout((("codes", 128), ("scales", 16)), iq4_k),
}
