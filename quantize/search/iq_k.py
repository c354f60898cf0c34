"""IQ2_K to IQ6_K and IQ4_XS: search and packing. Byte maps: `formats/codecs/iq_k.py`,
`formats/codecs/grid.py`.

The writers follow `BlockSearch` in `steps.py`: a block, its 256 codes, its groups and a last row
for all groups together.
"""

from __future__ import annotations

from ...formats.codecs.scalars import write_half, write_u16
from ...formats.kernel import device_function
from ...formats.tables import IQ2NL_VALUES, IQ3NL_VALUES, IQ4NL_VALUES, IQ5NL_VALUES, IQ6NL_VALUES
from .grouped import grouped_steps
from .grouped_scan import CHOSEN, STRETCHED
from .steps import BlockSearch

_iq2_k = grouped_steps(
    "iq2_k",
    IQ2NL_VALUES[:4],
    group=16,
    integers=range(-8, 8),
    shifts=(0, 5),
    reach=(0.6, 2.2),
    fill=(1.3, 0.8),
    rungs=8,
    half=True,
    emphasis=True,
    gain=1.04,
)
_iq3_k = grouped_steps(
    "iq3_k",
    IQ3NL_VALUES[:8],
    group=16,
    integers=range(-31, 32, 2),
    shifts=(0, 4),
    reach=(0.7, 1.8),
    fill=(1.15, 0.7),
    rungs=8,
    half=True,
    emphasis=True,
    gain=1.01,
)
_iq4_k = grouped_steps(
    "iq4_k",
    IQ4NL_VALUES,
    group=16,
    integers=range(-32, 32),
    shifts=(0, 4),
    reach=(0.7, 1.8),
    fill=(1.1, 0.75),
    half=True,
)
_iq4_xs = grouped_steps(
    "iq4_xs",
    IQ4NL_VALUES,
    group=32,
    integers=range(-32, 32),
    reach=(0.8, 1.6),
    fill=(1.1, 0.75),
    half=True,
)
_iq5_k = grouped_steps(
    "iq5_k",
    IQ5NL_VALUES[:32],
    group=16,
    integers=range(-32, 32),
    shifts=(0, 2),
    reach=(0.85, 1.3),
    fill=(1.1, 0.75),
    half=True,
)
_iq6_k = grouped_steps(
    "iq6_k",
    IQ6NL_VALUES[:64],
    group=16,
    integers=range(-128, 128),
    shifts=(0, 1),
    reach=(0.9, 1.2),
    fill=(1.05, 0.85),
    half=True,
)


def iq2_k(block, codes, groups):
    """Write an IQ2_K block, uint8[76], from its codes, float32[256], and the rows of `groups`."""
    block[:] = 0
    write_half(block, 0, groups[16, STRETCHED])
    extra = 0
    for g in range(16):
        k = int(groups[g, CHOSEN])
        shift = int(groups[g, CHOSEN + 1])
        extra |= shift << g
        block[4 + g // 2] |= (k + 8) << (4 * (g & 1))
        for l in range(16):
            i = 16 * g + l
            q = int(codes[i])
            block[12 + 32 * (g // 8) + (i & 31)] |= q << (2 * (g // 2 & 3))
    write_u16(block, 2, extra)


def iq3_k(block, codes, groups):
    """Write an IQ3_K block, uint8[110], from its codes, float32[256], and the rows of `groups`."""
    block[:] = 0
    write_half(block, 0, groups[16, STRETCHED])
    extra = 0
    signs = 0
    for g in range(16):
        k = int(groups[g, CHOSEN])
        shift = int(groups[g, CHOSEN + 1])
        extra |= shift << g
        if k < 0:
            signs |= 1 << g
        block[6 + g // 2] |= (abs(k) - 1) // 2 << (4 * (g & 1))
        for l in range(16):
            i = 16 * g + l
            q = int(codes[i])
            block[14 + 32 * (g // 8) + (i & 31)] |= (q & 3) << (2 * (g // 2 & 3))
            block[78 + (i & 31)] |= (q >> 2) << (g // 2)
    write_u16(block, 2, extra)
    write_u16(block, 4, signs)


@device_function
def _write_six_bit_scales(block, groups):
    """Write the scale, the shift bits and sixteen scales in -32..31 to the cleared first 16 bytes
    of IQ4_K and IQ5_K.
    """
    write_half(block, 0, groups[16, STRETCHED])
    extra = 0
    for g in range(16):
        k = int(groups[g, CHOSEN]) + 32
        extra |= int(groups[g, CHOSEN + 1]) << g
        block[8 + g // 2] |= (k & 15) << (4 * (g & 1))
        block[4 + g // 4] |= k >> 4 << (2 * (g & 3))
    write_u16(block, 2, extra)


def iq4_k(block, codes, groups):
    """Write an IQ4_K block, uint8[144], from its codes, float32[256], and the rows of `groups`."""
    block[:] = 0
    _write_six_bit_scales(block, groups)
    for g in range(16):
        for l in range(16):
            q = int(codes[16 * g + l])
            block[16 + 16 * (g // 2) + l] |= q << (4 * (g & 1))


def iq5_k(block, codes, groups):
    """Write an IQ5_K block, uint8[176], from its codes, float32[256], and the rows of `groups`."""
    block[:] = 0
    _write_six_bit_scales(block, groups)
    for i in range(256):
        q = int(codes[i])
        block[16 + 32 * (i >> 6) + (i & 31)] |= (q & 15) << (4 * (i >> 5 & 1))
        block[144 + (i & 31)] |= q >> 4 << (i >> 5)


def iq6_k(block, codes, groups):
    """The values are those of the integer table, which products use, not of ggml's row decoder."""
    block[:] = 0
    write_half(block, 0, groups[16, STRETCHED])
    extra = 0
    for g in range(16):
        extra |= int(groups[g, CHOSEN + 1]) << g
        block[4 + g] = int(groups[g, CHOSEN]) & 255
    write_u16(block, 2, extra)
    for i in range(256):
        q = int(codes[i])
        block[20 + 32 * (i >> 6) + (i & 31)] |= (q & 15) << (4 * (i >> 5 & 1))
        block[148 + 32 * (i >> 7) + (i & 31)] |= q >> 4 << (2 * (i >> 5 & 3))


def iq4_xs(block, codes, groups):
    """Write an IQ4_XS block, uint8[136], from its codes, float32[256], and the rows of `groups`."""
    block[:] = 0
    write_half(block, 0, groups[8, STRETCHED])
    high = 0
    for b in range(8):
        k = int(groups[b, CHOSEN]) + 32
        block[4 + b // 2] |= (k & 15) << (4 * (b & 1))
        high |= k >> 4 << (2 * b)
        for l in range(32):
            q = int(codes[32 * b + l])
            block[8 + 16 * b + (l & 15)] |= q << (4 * (l >> 4))
    write_u16(block, 2, high)


STEPPED_SEARCHES = {
    "IQ2_K": BlockSearch(_iq2_k, iq2_k, __file__),
    "IQ3_K": BlockSearch(_iq3_k, iq3_k, __file__),
    "IQ4_K": BlockSearch(_iq4_k, iq4_k, __file__),
    "IQ5_K": BlockSearch(_iq5_k, iq5_k, __file__),
    "IQ6_K": BlockSearch(_iq6_k, iq6_k, __file__),
    "IQ4_XS": BlockSearch(_iq4_xs, iq4_xs, __file__),
}
