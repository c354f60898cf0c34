"""IQ2_K to IQ6_K and IQ4_XS: search and packing. Byte maps: `formats/codecs/iq_k.py`, `formats/codecs/grid.py`."""

from __future__ import annotations

from ...formats.codecs.scalars import write_half, write_u16
from ...formats.kernel import device_function
from ...formats.tables import IQ2NL_VALUES, IQ3NL_VALUES, IQ4NL_VALUES, IQ5NL_VALUES, IQ6NL_VALUES
from .grouped import grouped_search

_iq2_k = grouped_search("iq2_k", IQ2NL_VALUES[:4], group=16, integers=range(-8, 8), shifts=(0, 5),
                        reach=(0.6, 2.2), fill=(1.3, 0.8), half=True, emphasis=True, gain=1.02)
_iq3_k = grouped_search("iq3_k", IQ3NL_VALUES[:8], group=16, integers=range(-31, 32, 2), shifts=(0, 4),
                        reach=(0.7, 1.8), fill=(1.15, 0.7), half=True, emphasis=True, gain=1.01)
_iq4_k = grouped_search("iq4_k", IQ4NL_VALUES, group=16, integers=range(-32, 32), shifts=(0, 4),
                        reach=(0.7, 1.8), fill=(1.1, 0.75), half=True)
_iq4_xs = grouped_search("iq4_xs", IQ4NL_VALUES, group=32, integers=range(-32, 32),
                         reach=(0.8, 1.6), fill=(1.1, 0.75), half=True)
_iq5_k = grouped_search("iq5_k", IQ5NL_VALUES[:32], group=16, integers=range(-32, 32), shifts=(0, 2),
                        reach=(0.85, 1.3), fill=(1.1, 0.75), half=True)
_iq6_k = grouped_search("iq6_k", IQ6NL_VALUES[:64], group=16, integers=range(-128, 128), shifts=(0, 1),
                        reach=(0.9, 1.2), fill=(1.05, 0.85), half=True)


def iq2_k(x, w, block, own, groups, lanes):
    d = _iq2_k(x, w, own, groups, lanes)
    block[:] = 0
    write_half(block, 0, d)
    extra = 0
    for g in range(16):
        k = int(groups[g, 2])
        shift = int(groups[g, 3])
        extra |= shift << g
        block[4 + g // 2] |= (k + 8) << (4 * (g & 1))
        for l in range(16):
            i = 16 * g + l
            q = int(own[i])
            block[12 + 32 * (g // 8) + (i & 31)] |= q << (2 * (g // 2 & 3))
    write_u16(block, 2, extra)


def iq3_k(x, w, block, own, groups, lanes):
    d = _iq3_k(x, w, own, groups, lanes)
    block[:] = 0
    write_half(block, 0, d)
    extra = 0
    signs = 0
    for g in range(16):
        k = int(groups[g, 2])
        shift = int(groups[g, 3])
        extra |= shift << g
        if k < 0:
            signs |= 1 << g
        block[6 + g // 2] |= (abs(k) - 1) // 2 << (4 * (g & 1))
        for l in range(16):
            i = 16 * g + l
            q = int(own[i])
            block[14 + 32 * (g // 8) + (i & 31)] |= (q & 3) << (2 * (g // 2 & 3))
            block[78 + (i & 31)] |= (q >> 2) << (g // 2)
    write_u16(block, 2, extra)
    write_u16(block, 4, signs)


@device_function
def _write_six_bit_scales(block, d, groups):
    """d, the shift bits and sixteen scales in -32..31, into the cleared first 16 bytes of IQ4_K and IQ5_K."""
    write_half(block, 0, d)
    extra = 0
    for g in range(16):
        k = int(groups[g, 2]) + 32
        extra |= int(groups[g, 3]) << g
        block[8 + g // 2] |= (k & 15) << (4 * (g & 1))
        block[4 + g // 4] |= k >> 4 << (2 * (g & 3))
    write_u16(block, 2, extra)


def iq4_k(x, w, block, own, groups, lanes):
    d = _iq4_k(x, w, own, groups, lanes)
    block[:] = 0
    _write_six_bit_scales(block, d, groups)
    for g in range(16):
        for l in range(16):
            q = int(own[16 * g + l])
            block[16 + 16 * (g // 2) + l] |= q << (4 * (g & 1))


def iq5_k(x, w, block, own, groups, lanes):
    d = _iq5_k(x, w, own, groups, lanes)
    block[:] = 0
    _write_six_bit_scales(block, d, groups)
    for i in range(256):
        q = int(own[i])
        block[16 + 32 * (i >> 6) + (i & 31)] |= (q & 15) << (4 * (i >> 5 & 1))
        block[144 + (i & 31)] |= q >> 4 << (i >> 5)


def iq6_k(x, w, block, own, groups, lanes):
    """The values are those of the integer table, which products use, not ggml's row decoder's."""
    d = _iq6_k(x, w, own, groups, lanes)
    block[:] = 0
    write_half(block, 0, d)
    extra = 0
    for g in range(16):
        extra |= int(groups[g, 3]) << g
        block[4 + g] = int(groups[g, 2]) & 255
    write_u16(block, 2, extra)
    for i in range(256):
        q = int(own[i])
        block[20 + 32 * (i >> 6) + (i & 31)] |= (q & 15) << (4 * (i >> 5 & 1))
        block[148 + 32 * (i >> 7) + (i & 31)] |= q >> 4 << (2 * (i >> 5 & 3))


def iq4_xs(x, w, block, own, groups, lanes):
    d = _iq4_xs(x, w, own, groups, lanes)
    block[:] = 0
    write_half(block, 0, d)
    high = 0
    for b in range(8):
        k = int(groups[b, 2]) + 32
        block[4 + b // 2] |= (k & 15) << (4 * (b & 1))
        high |= k >> 4 << (2 * b)
        for l in range(32):
            q = int(own[32 * b + l])
            block[8 + 16 * b + (l & 15)] |= q << (4 * (l >> 4))
    write_u16(block, 2, high)


BLOCK_SEARCHES = {"IQ2_K": iq2_k, "IQ3_K": iq3_k, "IQ4_K": iq4_k, "IQ5_K": iq5_k, "IQ6_K": iq6_k, "IQ4_XS": iq4_xs}
