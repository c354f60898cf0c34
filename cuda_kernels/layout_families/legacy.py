"""Layouts of the blocks of 32 with a half-precision scale."""

from ...formats.codecs.bit_moves import u8, u16
from ..layouts import Layout


def q8_0(i):
    return [(u8(2 + i), "codes", u8(i)), (u16(0), "d", u16(0))]


LAYOUTS = {
    "Q8_0": Layout((("codes", 32), ("d", 2)), q8_0),
}
