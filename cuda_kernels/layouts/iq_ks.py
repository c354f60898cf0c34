"""Layouts of the IQ_K types whose d is in the row header. A scale is a byte per unit, or a nibble
and what does not fit into it.
"""

from ...formats.codecs.bit_moves import bits, nibble, u8, u16
from .layout import BlockLayout, nibbles, pairs, singles


def iq2_ks(i):
    """Map elements i of an IQ2_KS block, uint8[70], to planes (see `layout.py`): 2-bit codes,
    scales, extra bits.
    """
    u = i // 32
    return [
        (bits(6 + 32 * (i // 128) + i % 32, 2 * (u % 4), 2), "codes", pairs(i)),
        (nibble(2 + u // 2, u % 2), "scales", nibble(u // 2, u % 2)),
        (u16(0), "extra", u16(0)),
    ]


def iq3_ks(i):
    """Map elements i of an IQ3_KS block, uint8[102], to planes (see `layout.py`): 2-bit codes,
    third bits, scales, extra bits.
    """
    u = i // 32
    return [
        (bits(6 + 32 * (i // 128) + i % 32, 2 * (u % 4), 2), "codes", pairs(i)),
        (bits(70 + i % 32, u, 1), "third", singles(i)),
        (nibble(2 + u % 4, u // 4), "scales", nibble(u // 2, u % 2)),
        (u16(0), "extra", u16(0)),
    ]


def iq4_ks(i):
    """Map elements i of an IQ4_KS block, uint8[136], to planes (see `layout.py`): 4-bit codes, a
    scale byte per unit.
    """
    u = i // 32
    return [
        (nibble(8 + 16 * u + i % 16, i // 16 % 2), "codes", nibbles(i)),
        (u8(u), "scales", u8(u)),
    ]


def iq4_kss(i):
    """Map elements i of an IQ4_KSS block, uint8[128], to planes (see `layout.py`): 16-bit words of
    codes and scale bits.
    """
    return [(u8(i // 2), "codes", u8(i // 2))]  # the scale is among the codes


def iq5_ks(i):
    """Map elements i of an IQ5_KS block, uint8[168], to planes (see `layout.py`): 4-bit codes,
    fifth bits, a scale byte per unit.
    """
    u = i // 32
    return [
        (nibble(8 + 32 * (i // 64) + i % 32, u % 2), "codes", nibbles(i)),
        (bits(136 + i % 32, u, 1), "fifth", singles(i)),
        (u8(u), "scales", u8(u)),
    ]


def iq2_kl(i):
    """Map elements i of an IQ2_KL block, uint8[86], to planes (see `layout.py`): 4-bit codes of
    pairs, their fifth bits, scales with their high bits.
    """
    u, p = i // 32, i % 32 // 2  # two neighbours share code p of the unit
    return [
        (nibble(6 + 16 * (i // 64) + p, u % 2), "codes", nibble(8 * u + p // 2, p % 2)),
        # Bit k of a nibble: codes 4k to 4k + 3.
        (
            bits(70 + p, u, 1),
            "fifth",
            bits(2 * u + p % 4 // 2, 4 * (p % 2) + p // 4, 1),
        ),
        (nibble(2 + u % 4, u // 4), "scales", nibble(u // 2, u % 2)),
        (u16(0), "extra", u16(0)),
    ]


LAYOUTS = {
    "IQ2_KS": BlockLayout((("codes", 64), ("scales", 4), ("extra", 2)), iq2_ks),
    "IQ3_KS": BlockLayout((("codes", 64), ("third", 32), ("scales", 4), ("extra", 2)), iq3_ks),
    "IQ4_KS": BlockLayout((("codes", 128), ("scales", 8)), iq4_ks),
    "IQ4_KSS": BlockLayout((("codes", 128),), iq4_kss),
    "IQ5_KS": BlockLayout((("codes", 128), ("fifth", 32), ("scales", 8)), iq5_ks),
    "IQ2_KL": BlockLayout((("codes", 64), ("fifth", 16), ("scales", 4), ("extra", 2)), iq2_kl),
}
