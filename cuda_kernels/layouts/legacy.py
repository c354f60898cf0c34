"""Layouts of the blocks of 32 with one or two half-precision scales."""

from ...formats.codecs.bit_moves import bits, nibble, u8, u16
from .layout import BlockLayout, nibbles, nibbles_by_byte, pairs_by_byte, singles_by_byte


def _nibbles(i, first):
    return nibble(first + i % 16, i // 16)


def q4_0(i):
    """Map elements i of a Q4_0 block, uint8[18], to planes (see `layout.py`): 4-bit codes, d."""
    return [(_nibbles(i, 2), "codes", nibbles_by_byte(i)), (u16(0), "d", u16(0))]


def q4_1(i):
    """Map elements i of a Q4_1 block, uint8[20], to planes (see `layout.py`): 4-bit codes, d and m
    in `scales`.
    """
    return [
        (_nibbles(i, 4), "codes", nibbles_by_byte(i)),
        (bits(0, 0, 32), "scales", bits(0, 0, 32)),
    ]


def q5_0(i):
    """Map elements i of a Q5_0 block, uint8[22], to planes (see `layout.py`): 4-bit codes, fifth
    bits in `high`, d.
    """
    return [
        (_nibbles(i, 6), "codes", nibbles_by_byte(i)),
        (bits(2 + i // 8, i % 8, 1), "high", singles_by_byte(i)),
        (u16(0), "d", u16(0)),
    ]


def q5_1(i):
    """Map elements i of a Q5_1 block, uint8[24], to planes (see `layout.py`): 4-bit codes, fifth
    bits in `high`, d and m in `scales`.
    """
    return [
        (_nibbles(i, 8), "codes", nibbles_by_byte(i)),
        (bits(4 + i // 8, i % 8, 1), "high", singles_by_byte(i)),
        (bits(0, 0, 32), "scales", bits(0, 0, 32)),
    ]


def q6_0(i):
    """Map elements i of a Q6_0 block, uint8[26], to planes (see `layout.py`): 4-bit codes, two more
    bits in `high`, d.
    """
    high = bits(2 + i % 8, 4 * (i % 16 // 8) + 2 * (i // 16), 2)
    return [
        (_nibbles(i, 10), "codes", nibbles_by_byte(i)),
        (high, "high", pairs_by_byte(i)),
        (u16(0), "d", u16(0)),
    ]


def iq4_nl(i):
    """Map elements i of an IQ4_NL block, uint8[18], to planes (see `layout.py`): 4-bit codes, d."""
    return [(_nibbles(i, 2), "codes", nibbles(i)), (u16(0), "d", u16(0))]


def q8_0(i):
    """Map elements i of a Q8_0 block, uint8[34], to planes (see `layout.py`): 8-bit codes, d."""
    return [(u8(2 + i), "codes", u8(i)), (u16(0), "d", u16(0))]


_Q5_0 = BlockLayout((("codes", 16), ("high", 4), ("d", 2)), q5_0)
_Q6_0 = BlockLayout((("codes", 16), ("high", 8), ("d", 2)), q6_0)

LAYOUTS = {
    "Q4_0": BlockLayout((("codes", 16), ("d", 2)), q4_0),
    "Q4_1": BlockLayout((("codes", 16), ("scales", 4)), q4_1),
    "Q5_0": _Q5_0,
    "Q5_0_R4": _Q5_0,  # its rows, once undone, are those of Q5_0, but its zeros have other signs
    "Q5_1": BlockLayout((("codes", 16), ("high", 4), ("scales", 4)), q5_1),
    "Q6_0": _Q6_0,
    "Q6_0_R4": _Q6_0,
    "Q8_0": BlockLayout((("codes", 32), ("d", 2)), q8_0),
    "IQ4_NL": BlockLayout((("codes", 16), ("d", 2)), iq4_nl),
}
