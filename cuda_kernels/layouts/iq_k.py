"""Layouts of the IQ_K types: codes as selectors of byte permutation; heads are d and the table
halves (two bits per unit).
"""

import numpy as np

from ...formats.codecs.bit_moves import FLIPPED, bits, nibble, u8, u16
from .layout import BlockLayout, nibbles, pairs, singles


def _heads():
    return [(u16(0), "heads", u16(0)), (u16(2), "heads", u16(2))]


def iq2_k(i):
    """Map elements i of an IQ2_K block, uint8[76], to planes (see `layout.py`): 2-bit codes,
    scales, heads.
    """
    u = i // 32
    return [
        (bits(12 + 32 * (i // 128) + i % 32, 2 * (u % 4), 2), "codes", pairs(i)),
        (u8(4 + u), "scales", u8(u)),
        *_heads(),
    ]


def iq3_k(i):
    """Map elements i of an IQ3_K block, uint8[110], to planes (see `layout.py`): 2-bit codes, third
    bits, scales, heads, signs of scales.
    """
    u = i // 32
    return [
        (bits(14 + 32 * (i // 128) + i % 32, 2 * (u % 4), 2), "codes", pairs(i)),
        (bits(78 + i % 32, u, 1), "third", singles(i)),
        (u8(6 + u), "scales", u8(u)),
        *_heads(),
        (u16(4), "signs", u16(0)),
    ]


def _record(u):
    """The 16 bytes of IQ4_K and IQ5_K: d, 48 bits of second scales (of four units in three bytes),
    then a byte for each unit, its table halves and its first scale. Scales are two's complement.
    """
    string = (24 * (u // 4) + 6 * (u % 4))[..., None] + np.arange(6)  # of the 48 bits
    # In the record: bytes 4 to 7, then 2 and 3.
    second = np.where(string < 32, 32 + string, string - 16)
    return [
        (u16(0), "scales", u16(0)),
        (bits(2 + u // 4, 2 * (u % 4), 2), "scales", bits(8 + u, 0, 2)),
        (nibble(8 + u, 0), "scales", bits(8 + u, 2, 4)),
        (bits(4 + u // 2, 4 * (u % 2), 2), "scales", bits(8 + u, 6, 2), FLIPPED),
        (nibble(8 + u, 1), "scales", second[..., :4]),
        (bits(4 + u // 2, 4 * (u % 2) + 2, 2), "scales", second[..., 4:], FLIPPED),
    ]


def iq4_k(i):
    """Map elements i of an IQ4_K block, uint8[144], to planes (see `layout.py`): 4-bit codes, a
    record of d, table halves and scales.
    """
    u = i // 32
    return [(nibble(16 + 16 * u + i % 16, i // 16 % 2), "codes", nibbles(i)), *_record(u)]


def iq5_k(i):
    """Map elements i of an IQ5_K block, uint8[176], to planes (see `layout.py`): 4-bit codes, fifth
    bits, a record of d, table halves and scales.
    """
    u = i // 32
    return [
        (nibble(16 + 32 * (i // 64) + i % 32, u % 2), "codes", nibbles(i)),
        (bits(144 + i % 32, u, 1), "fifth", singles(i)),
        *_record(u),
    ]


def iq6_k(i):
    """A half of a unit has its 16 codes as pairs of neighbours, in the same bits of both halves of
    its three words: of pairs 0 to 2 in bits 4 to 9 of a word, of 3 to 5 in bits 10 to 15. Bits 0 to
    3 of the first two words are low bits of pairs 6 and 7, of the third one their high bits.
    """
    p = i % 16 // 2

    def moved(stored, low: bool, n: int) -> list[tuple]:
        word = np.where(p < 6, p % 3, p - 6 if low else 2)
        bit = np.where(p < 3, 4, np.where(p < 6, 10, 0)) + (
            0 if low else np.where(p < 6, 4, 2 * (p - 6))
        )
        at = 32 * (i % 32 // 16 * 3 + word) + 16 * (i % 2) + bit
        first = at < 128
        u = i // 32
        return [
            (stored[first], "codes", bits(0, (128 * u + at)[first], n)),
            (stored[~first], "high", bits(0, (64 * u + at - 128)[~first], n)),
        ]

    u = i // 32
    return [
        *moved(nibble(20 + 32 * (i // 64) + i % 32, u % 2), True, 4),
        *moved(bits(148 + 32 * (i // 128) + i % 32, 2 * (u % 4), 2), False, 2),
        (u8(4 + i // 16), "scales", u8(i // 16)),
        *_heads(),
    ]


LAYOUTS = {
    "IQ2_K": BlockLayout((("codes", 64), ("scales", 8), ("heads", 4)), iq2_k),
    "IQ3_K": BlockLayout(
        (("codes", 64), ("third", 32), ("scales", 8), ("heads", 4), ("signs", 2)), iq3_k
    ),
    "IQ4_K": BlockLayout((("codes", 128), ("scales", 16)), iq4_k),
    "IQ5_K": BlockLayout((("codes", 128), ("fifth", 32), ("scales", 16)), iq5_k),
    "IQ6_K": BlockLayout((("codes", 128), ("high", 64), ("scales", 16), ("heads", 4)), iq6_k),
}
