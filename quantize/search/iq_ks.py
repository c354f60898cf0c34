"""IQ2_KS, IQ3_KS, IQ4_KS, IQ5_KS, whose scale belongs to the row: search and packing. Byte maps: `formats/codecs/iq_ks.py`.

A search gets one row: x, w float32[n]; head, the bytes in front of the row's blocks; blocks uint8[n/256, block bytes].
"""

from __future__ import annotations

from ...formats.codecs.scalars import write_float, write_half
from ...formats.tables import IQ2NL_VALUES, IQ3NL_VALUES, IQ4NL_VALUES, IQ5NL_VALUES
from .grouped import grouped_search

_iq2_ks = grouped_search("iq2_ks", IQ2NL_VALUES[:4], group=32, integers=range(-16, 16), shifts=(0, 5),
                         reach=(0.6, 2.2), fill=(1.3, 0.8), half=True, emphasis=True, gain=1.02)
_iq3_ks = grouped_search("iq3_ks", IQ3NL_VALUES[:8], group=32, integers=range(-16, 16), shifts=(0, 4),
                         reach=(0.7, 1.8), fill=(1.15, 0.7), half=True, emphasis=True, gain=1.01)
_iq4_ks = grouped_search("iq4_ks", IQ4NL_VALUES, group=32, integers=range(-127, 128, 2), shifts=(0, 4),
                         reach=(0.8, 1.6), fill=(1.1, 0.75), half=False)
_iq5_ks = grouped_search("iq5_ks", IQ5NL_VALUES[:32], group=32, integers=range(-127, 128, 2), shifts=(0, 2),
                         reach=(0.85, 1.3), fill=(1.1, 0.75), half=False)


def iq2_ks(x, w, head, blocks, own, groups, lanes):
    d = _iq2_ks(x, w, own, groups, lanes)
    write_half(head, 0, d)
    blocks[:] = 0
    for g in range(len(x) // 32):
        block = blocks[g // 8]
        b = g % 8
        k = int(groups[g, 2]) + 16
        shift = int(groups[g, 3])
        block[0] |= shift << b
        block[1] |= k >> 4 << b
        block[2 + b // 2] |= (k & 15) << (4 * (b & 1))
        for l in range(32):
            q = int(own[32 * g + l])
            block[6 + 32 * (b // 4) + l] |= q << (2 * (b & 3))


def iq3_ks(x, w, head, blocks, own, groups, lanes):
    d = _iq3_ks(x, w, own, groups, lanes)
    write_half(head, 0, d)
    blocks[:] = 0
    for g in range(len(x) // 32):
        block = blocks[g // 8]
        b = g % 8
        k = int(groups[g, 2]) + 16
        shift = int(groups[g, 3])
        block[0] |= k >> 4 << b
        block[1] |= shift << b
        block[2 + (b & 3)] |= (k & 15) << (4 * (b // 4))
        for l in range(32):
            q = int(own[32 * g + l])
            block[6 + 32 * (b // 4) + l] |= (q & 3) << (2 * (b & 3))
            block[70 + l] |= q >> 2 << b


def iq4_ks(x, w, head, blocks, own, groups, lanes):
    d = _iq4_ks(x, w, own, groups, lanes)
    write_float(head, 0, d)
    blocks[:] = 0
    for g in range(len(x) // 32):
        block = blocks[g // 8]
        b = g % 8
        block[b] = (int(groups[g, 2]) + 127) | int(groups[g, 3])
        for l in range(32):
            q = int(own[32 * g + l])
            block[8 + 16 * b + (l & 15)] |= q << (4 * (l >> 4))


def iq5_ks(x, w, head, blocks, own, groups, lanes):
    d = _iq5_ks(x, w, own, groups, lanes)
    write_float(head, 0, d)
    blocks[:] = 0
    for g in range(len(x) // 32):
        block = blocks[g // 8]
        b = g % 8
        block[b] = (int(groups[g, 2]) + 127) | int(groups[g, 3])
        for l in range(32):
            q = int(own[32 * g + l])
            block[8 + 32 * (b // 2) + l] |= (q & 15) << (4 * (b & 1))
            block[136 + l] |= q >> 4 << b


ROW_SEARCHES = {"IQ2_KS": iq2_ks, "IQ3_KS": iq3_ks, "IQ4_KS": iq4_ks, "IQ5_KS": iq5_ks}
