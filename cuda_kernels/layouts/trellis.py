"""Layouts of the trellis types. b = i//32, m = i//8 (of IQ4_KT i//4); d is in the row header."""

import numpy as np

from ...formats.codecs.bit_moves import bits, nibble, u8, u16
from .layout import BlockLayout, singles


def iq1_kt(i):
    """Map elements i of an IQ1_KT block, uint8[56], to planes (see `layout.py`): low bytes of
    indices, high bits, scales with a bit of each index.
    """
    b, m = i // 32, i // 8
    return [
        (u8(8 + m), "codes", u8(m)),  # low bytes of the indices
        (nibble(40 + m % 16, m // 16), "high", nibble(m // 2, m % 2)),
        (u8(b), "scales", u8(b)),  # and a bit of each index
    ]


def iq2_kt(i):
    """Map elements i of an IQ2_KT block, uint8[68], to planes (see `layout.py`): 16-bit indices,
    4-bit scale codes.
    """
    b, m = i // 32, i // 8
    return [
        (u16(4 + 2 * m), "codes", u16(2 * m)),
        (nibble(b % 4, b // 4), "scales", nibble(b // 2, b % 2)),
    ]


def iq3_kt(i):
    """Map elements i of an IQ3_KT block, uint8[100], to planes (see `layout.py`): 16-bit indices,
    4-bit scales, signs.
    """
    return [*iq2_kt(i), (bits(68 + i % 32, i // 32, 1), "signs", singles(i))]


def iq4_kt(i):
    """Eight half words per unit: an index of 15 bits, and a bit of: the offset (bit 0), the scale
    (1..7).
    """
    b, m, bit = i // 32, i // 4, i % 8
    return [
        (u8(32 + m), "codes", u8(2 * m)),
        (nibble(96 + m % 32, m // 32), "codes", bits(2 * m, 8, 4)),
        (bits(4 * b, 8 + 3 * (m % 8), 3), "codes", bits(2 * m, 12, 3)),
        (
            bits(4 * b, bit, 1),
            "codes",
            bits(16 * b + np.where(bit < 4, 4 * bit, 4 * (bit - 4) + 2), 15, 1),
        ),
    ]


LAYOUTS = {
    "IQ1_KT": BlockLayout((("codes", 32), ("high", 16), ("scales", 8)), iq1_kt, spread=True),
    "IQ2_KT": BlockLayout((("codes", 64), ("scales", 4)), iq2_kt, spread=True),
    "IQ3_KT": BlockLayout((("codes", 64), ("signs", 32), ("scales", 4)), iq3_kt, signed=True),
    "IQ4_KT": BlockLayout((("codes", 128),), iq4_kt, spread=True),
}
