"""Layouts of the codebook i-quants with signs, and of IQ4_XS. b = i//32, l = (i%32)//8, m = i//8.

The signs of a unit are a word: bit k of its bytes has those of the elements 4k to 4k + 3. Where the
file has 7 of 8 signs, the places of the missing ones (bits 1, 3, 5 and 7 of the last byte) take
four other bits.
"""

from ...formats.codecs.bit_moves import bits, nibble, u8, u16
from .layout import BlockLayout, nibbles


def _sign(at, i):
    """The place of the sign of element i in the word at byte `at`."""
    return bits(at + i % 4, i % 32 // 4, 1)


def _sign_codes(i, stored, plane, at):
    """Signs of seven of eight elements: the code of the eight begins at bit stored(i), the word of
    the unit is at byte at(i).
    """
    seven = i[i % 8 < 7]
    return bits(0, stored(seven) + seven % 8, 1), plane, _sign(at(seven), seven)


def iq2_xxs(i):
    """Map elements i of an IQ2_XXS block, uint8[66], to planes (see `layout.py`): indices in
    `codes` with signs and scale after each unit's, d.
    """
    b, l = i // 32, i % 32 // 8
    return [
        (u8(2 + 8 * b + l), "codes", u8(8 * b + l)),  # indices
        _sign_codes(
            i,
            lambda i: 8 * (6 + i // 32 * 8) + 7 * (i % 32 // 8),
            "codes",
            lambda i: i // 32 * 8 + 4,
        ),
        (bits(6 + 8 * b, 28 + l, 1), "codes", _sign(8 * b + 4, i // 8 * 8 + 7)),  # scale
        (u16(0), "d", u16(0)),
    ]


def iq2_xs(i):
    """Map elements i of an IQ2_XS block, uint8[74], to planes (see `layout.py`): indices and signs
    in `codes`, scales, d.
    """
    b, l, m = i // 32, i % 32 // 8, i // 8
    return [
        (u8(2 + 2 * m), "codes", u8(8 * b + l)),  # indices, but for
        (bits(2 + 2 * m, 8, 1), "codes", _sign(8 * b + 4, i // 8 * 8 + 7)),  # their ninth bits
        _sign_codes(i, lambda i: 8 * (2 + i // 8 * 2) + 9, "codes", lambda i: i // 32 * 8 + 4),
        (u8(66 + b), "scales", u8(b)),
        (u16(0), "d", u16(0)),
    ]


def iq2_s(i):
    """Map elements i of an IQ2_S block, uint8[82], to planes (see `layout.py`): indices and signs
    in `codes`, scales with the indices' high bits, d.
    """
    b, l, m = i // 32, i % 32 // 8, i // 8
    return [
        (u8(2 + m), "codes", u8(8 * b + l)),  # indices, but for
        (u8(66 + b), "scales", u8(2 * b + 1)),  # their high bits
        (bits(34 + m, i % 8, 1), "codes", _sign(8 * b + 4, i)),
        (u8(74 + b), "scales", u8(2 * b)),
        (u16(0), "d", u16(0)),
    ]


def iq3_xxs(i):
    """Map elements i of an IQ3_XXS block, uint8[98], to planes (see `layout.py`): indices, signs
    with the scale's bits, d.
    """
    b, l = i // 32, i % 32 // 8
    return [
        (u8(2 + i // 4), "codes", u8(i // 4)),  # indices
        _sign_codes(
            i, lambda i: 8 * (66 + i // 32 * 4) + 7 * (i % 32 // 8), "signs", lambda i: i // 32 * 4
        ),
        (bits(66 + 4 * b, 28 + l, 1), "signs", _sign(4 * b, i // 8 * 8 + 7)),  # scale
        (u16(0), "d", u16(0)),
    ]


def iq3_s(i):
    """Map elements i of an IQ3_S block, uint8[110], to planes (see `layout.py`): indices, signs,
    scales with d and the indices' ninth bits.
    """
    b = i // 32
    return [
        (u8(2 + i // 4), "codes", u8(i // 4)),  # indices, but for
        (u8(66 + b), "scales", u8(b)),  # their ninth bits
        (bits(74 + i // 8, i % 8, 1), "signs", _sign(4 * b, i)),
        (nibble(106 + b // 2, b % 2), "scales", nibble(8 + b // 2, b % 2)),
        (u16(0), "scales", u16(12)),  # d
    ]


def iq4_xs(i):
    """Map elements i of an IQ4_XS block, uint8[136], to planes (see `layout.py`): 4-bit codes, d
    and scales in `scales`.
    """
    b = i // 32
    return [
        (bits(0, 0, 64), "scales", bits(0, 0, 64)),
        (nibble(8 + 16 * b + i % 16, i % 32 // 16), "codes", nibbles(i)),
    ]


LAYOUTS = {
    "IQ2_XXS": BlockLayout((("codes", 64), ("d", 2)), iq2_xxs),
    "IQ2_XS": BlockLayout((("codes", 64), ("scales", 8), ("d", 2)), iq2_xs),
    "IQ2_S": BlockLayout((("codes", 64), ("scales", 16), ("d", 2)), iq2_s),
    "IQ3_XXS": BlockLayout((("codes", 64), ("signs", 32), ("d", 2)), iq3_xxs),
    "IQ3_S": BlockLayout((("codes", 64), ("signs", 32), ("scales", 16)), iq3_s),
    "IQ4_XS": BlockLayout((("codes", 128), ("scales", 8)), iq4_xs),
}
