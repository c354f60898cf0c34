"""Layouts of the codebook i-quants whose grid is ternary. b = i//32, m = i//8, g = i//16."""

from ...formats.codecs.bit_moves import bits, nibble, u8, u16
from .layout import BlockLayout


def iq1_s(i):
    """Map elements i of an IQ1_S block, uint8[50], to planes (see `layout.py`): indices, a word per
    unit in `heads`, d.
    """
    b, m = i // 32, i // 8
    return [
        (u8(2 + m), "codes", u8(m)),
        (u16(34 + 2 * b), "heads", u16(2 * b)),
        (u16(0), "d", u16(0)),
    ]


def iq1_m(i):
    """Map elements i of an IQ1_M block, uint8[56], to planes (see `layout.py`): indices, their high
    bits and shifts in `heads`, scales with d.
    """
    m, g, part = i // 8, i // 16, i // 64
    return [
        (u8(m), "codes", u8(m)),  # indices
        (nibble(32 + m // 2, m % 2), "heads", nibble(m // 2, m % 2)),  # their high bits, and shifts
        (bits(48 + 2 * part, 12, 4), "scales", bits(0, 4 * part, 4)),  # d
        (bits(48 + 2 * (g // 4), 3 * (g % 4), 3), "scales", bits(2, 3 * g, 3)),
    ]


def iq1_s_r4(i):
    """Map elements i of an IQ1_S_R4 block, uint8[6], to planes (see `layout.py`): indices, a word
    in `heads`; d is in the row header.
    """
    m = i // 8
    return [(u8(m), "codes", u8(m)), (u16(4), "heads", u16(0))]


def iq1_m_r4(i):
    """Map elements i of an IQ1_M_R4 block, uint8[7], to planes (see `layout.py`): indices, their
    high bits and shifts in `heads`, scales; d is in the row header.
    """
    m = i // 8
    return [
        (u8(m), "codes", u8(m)),
        (u8(4 + m // 2), "heads", u8(m // 2)),
        (u8(6), "scales", u8(0)),
    ]


LAYOUTS = {
    "IQ1_S": BlockLayout((("codes", 32), ("heads", 16), ("d", 2)), iq1_s),
    "IQ1_M": BlockLayout((("codes", 32), ("heads", 16), ("scales", 8)), iq1_m),
    "IQ1_S_R4": BlockLayout((("codes", 4), ("heads", 2)), iq1_s_r4),
    "IQ1_M_R4": BlockLayout((("codes", 4), ("heads", 2), ("scales", 1)), iq1_m_r4),
}
