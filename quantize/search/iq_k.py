"""IQ2_K, IQ3_K, IQ4_K, IQ4_KS: search and packing. Byte maps: `formats/codecs/iq_k.py`."""

from __future__ import annotations

import numpy as np

from ...formats.codecs.scalars import write_float, write_half, write_u16
from ...formats.tables import IQ2NL_VALUES, IQ3NL_VALUES, IQ4NL_VALUES
from .grouped import grouped_search

_iq2_k, _iq2_k_code = grouped_search("iq2_k", IQ2NL_VALUES[:4], group=16, integers=range(-8, 8), shifts=(0, 5),
                                     reach=(0.6, 2.2), fill=(1.3, 0.8), half=True, emphasis=True, gain=1.02)
_iq3_k, _iq3_k_code = grouped_search("iq3_k", IQ3NL_VALUES[:8], group=16, integers=range(-31, 32, 2), shifts=(0, 4),
                                     reach=(0.7, 1.8), fill=(1.15, 0.7), half=True, emphasis=True, gain=1.01)
_iq4_k, _iq4_k_code = grouped_search("iq4_k", IQ4NL_VALUES, group=16, integers=range(-32, 32), shifts=(0, 4),
                                     reach=(0.7, 1.8), fill=(1.1, 0.75), half=True)
_iq4_ks, _iq4_ks_code = grouped_search("iq4_ks", IQ4NL_VALUES, group=32, integers=range(-127, 128, 2), shifts=(0, 4),
                                       reach=(0.8, 1.6), fill=(1.1, 0.75), half=False)
IQ2_K_SHIFT, IQ3_K_SHIFT, IQ4_K_SHIFT = np.float32(5), np.float32(4), np.float32(4)


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
            q = _iq2_k_code(x[i], d * np.float32(k), IQ2_K_SHIFT * np.float32(shift))
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
            q = _iq3_k_code(x[i], d * np.float32(k), IQ3_K_SHIFT * np.float32(shift))
            block[14 + 32 * (g // 8) + (i & 31)] |= (q & 3) << (2 * (g // 2 & 3))
            block[78 + (i & 31)] |= (q >> 2) << (g // 2)
    write_u16(block, 2, extra)
    write_u16(block, 4, signs)


def iq4_k(x, w, block, own, groups, lanes):
    d = _iq4_k(x, w, own, groups, lanes)
    block[:] = 0
    write_half(block, 0, d)
    extra = 0
    for g in range(16):
        k = int(groups[g, 2])
        shift = int(groups[g, 3])
        extra |= shift << g
        block[8 + g // 2] |= ((k + 32) & 15) << (4 * (g & 1))
        block[4 + g // 4] |= (k + 32) >> 4 << (2 * (g & 3))
        for l in range(16):
            q = _iq4_k_code(x[16 * g + l], d * np.float32(k), IQ4_K_SHIFT * np.float32(shift))
            block[16 + 16 * (g // 2) + l] |= q << (4 * (g & 1))
    write_u16(block, 2, extra)


def iq4_ks(x, w, head, blocks, own, groups, lanes):
    """One row: x, w float32[n]; head uint8[4]; blocks uint8[n/256, 136]."""
    d = _iq4_ks(x, w, own, groups, lanes)
    write_float(head, 0, d)
    blocks[:] = 0
    for g in range(len(x) // 32):
        block = blocks[g // 8]
        b = g % 8
        k = int(groups[g, 2])
        shift = int(groups[g, 3])
        block[b] = (k + 127) | shift
        for l in range(32):
            q = _iq4_ks_code(x[32 * g + l], d * np.float32(k), IQ4_K_SHIFT * np.float32(shift))
            block[8 + 16 * b + (l & 15)] |= q << (4 * (l >> 4))


BLOCK_SEARCHES = {"IQ2_K": iq2_k, "IQ3_K": iq3_k, "IQ4_K": iq4_k}
ROW_SEARCHES = {"IQ4_KS": iq4_ks}
