"""Layouts of signed bytes with a scale per row or per 256 elements. The sum of the codes, which
Q8_KV has next to d in its row header, is left out, as it follows from the codes.
"""

from ...formats.codecs.bit_moves import u8, u16
from .layout import BlockLayout


def q8_kv(i):
    """Map elements i of a Q8_KV block, uint8[32], to planes (see `layout.py`): 8-bit codes; d is in
    the row header.
    """
    return [(u8(i), "codes", u8(i))]


def q8_k(i):
    """Map elements i of a Q8_K_R8 or Q8_K_R16 block, uint8[258], to planes (see `layout.py`): 8-bit
    codes, d.
    """
    return [(u8(2 + i), "codes", u8(i)), (u16(0), "d", u16(0))]


LAYOUTS = {
    "Q8_KV": BlockLayout((("codes", 32),), q8_kv, header_bytes=4),
    "Q8_K_R8": BlockLayout((("codes", 256), ("d", 2)), q8_k),
    "Q8_K_R16": BlockLayout((("codes", 256), ("d", 2)), q8_k),
}
