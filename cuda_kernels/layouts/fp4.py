"""Layouts of four-bit floats: indices of a table, a byte of scale per unit or two."""

from ...formats.codecs.bit_moves import nibble, u8
from .layout import BlockLayout, nibbles


def mxfp4(i):
    """Map elements i of an MXFP4 block, uint8[17], to planes (see `layout.py`): 4-bit codes, a
    scale byte.
    """
    return [(nibble(1 + i % 16, i // 16), "codes", nibbles(i)), (u8(0), "scales", u8(0))]


def nvfp4(i):
    """Map elements i of an NVFP4 block, uint8[36], to planes (see `layout.py`): 4-bit codes, a
    scale byte per 16.
    """
    s = i // 16
    return [(nibble(4 + 8 * s + i % 8, i % 16 // 8), "codes", nibbles(i)), (u8(s), "scales", u8(s))]


LAYOUTS = {
    "MXFP4": BlockLayout((("codes", 16), ("scales", 1)), mxfp4),
    "NVFP4": BlockLayout((("codes", 32), ("scales", 4)), nvfp4),
}
