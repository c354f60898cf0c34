"""Layouts of the IQ_K types whose d is in the row header: a byte of scale per unit."""

from ...formats.codecs.bit_moves import nibble, u8
from ..layouts import Layout, nibbles


def iq4_ks(i):
    u = i // 32
    return [
        (nibble(8 + 16 * u + i % 16, i // 16 % 2), "codes", nibbles(i)),
        (u8(u), "scales", u8(u)),
    ]


LAYOUTS = {
    "IQ4_KS": Layout((("codes", 128), ("scales", 8)), iq4_ks),
}
