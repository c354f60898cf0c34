"""IQ2_KS, IQ3_KS, IQ4_KS, IQ5_KS, which have one scale per row: search and packing. Byte maps:
`formats/codecs/iq_ks.py`.

The writers follow `RowSearch` in `steps.py`: the row header; a block, its 256 codes and 8 groups.
"""

from __future__ import annotations

from ...formats.codecs.scalars import write_float, write_half
from ...formats.tables import IQ2NL_VALUES, IQ3NL_VALUES, IQ4NL_VALUES, IQ5NL_VALUES
from .grouped import grouped_steps
from .grouped_scan import CHOSEN, STRETCHED
from .steps import RowSearch

_iq2_ks = grouped_steps(
    "iq2_ks",
    IQ2NL_VALUES[:4],
    group=32,
    integers=range(-16, 16),
    shifts=(0, 5),
    reach=(0.6, 2.2),
    fill=(1.3, 0.8),
    rungs=8,
    half=True,
    emphasis=True,
    gain=1.02,
)
_iq3_ks = grouped_steps(
    "iq3_ks",
    IQ3NL_VALUES[:8],
    group=32,
    integers=range(-16, 16),
    shifts=(0, 4),
    reach=(0.7, 1.8),
    fill=(1.15, 0.7),
    rungs=8,
    half=True,
    emphasis=True,
    gain=1.01,
)
_iq4_ks = grouped_steps(
    "iq4_ks",
    IQ4NL_VALUES,
    group=32,
    integers=range(-127, 128, 2),
    shifts=(0, 4),
    reach=(0.8, 1.6),
    fill=(1.1, 0.75),
    rungs=8,
    half=False,
)
_iq5_ks = grouped_steps(
    "iq5_ks",
    IQ5NL_VALUES[:32],
    group=32,
    integers=range(-127, 128, 2),
    shifts=(0, 2),
    reach=(0.85, 1.3),
    fill=(1.1, 0.75),
    half=False,
)


def half_head(head, common):
    """Write the row's d, the stretched scale of `common`, to the row header as float16: head
    uint8[2].
    """
    write_half(head, 0, common[STRETCHED])


def float_head(head, common):
    """Write the row's d, the stretched scale of `common`, to the row header as float32: head
    uint8[4].
    """
    write_float(head, 0, common[STRETCHED])


def iq2_ks(block, codes, groups):
    """Write an IQ2_KS block, uint8[70], from its codes, float32[256], and the rows of `groups`."""
    block[:] = 0
    for b in range(8):
        k = int(groups[b, CHOSEN]) + 16
        block[0] |= int(groups[b, CHOSEN + 1]) << b
        block[1] |= k >> 4 << b
        block[2 + b // 2] |= (k & 15) << (4 * (b & 1))
        for l in range(32):
            block[6 + 32 * (b // 4) + l] |= int(codes[32 * b + l]) << (2 * (b & 3))


def iq3_ks(block, codes, groups):
    """Write an IQ3_KS block, uint8[102], from its codes, float32[256], and the rows of `groups`."""
    block[:] = 0
    for b in range(8):
        k = int(groups[b, CHOSEN]) + 16
        block[0] |= k >> 4 << b
        block[1] |= int(groups[b, CHOSEN + 1]) << b
        block[2 + (b & 3)] |= (k & 15) << (4 * (b // 4))
        for l in range(32):
            q = int(codes[32 * b + l])
            block[6 + 32 * (b // 4) + l] |= (q & 3) << (2 * (b & 3))
            block[70 + l] |= q >> 2 << b


def iq4_ks(block, codes, groups):
    """Write an IQ4_KS block, uint8[136], from its codes, float32[256], and the rows of `groups`."""
    block[:] = 0
    for b in range(8):
        block[b] = (int(groups[b, CHOSEN]) + 127) | int(groups[b, CHOSEN + 1])
        for l in range(32):
            block[8 + 16 * b + (l & 15)] |= int(codes[32 * b + l]) << (4 * (l >> 4))


def iq5_ks(block, codes, groups):
    """Write an IQ5_KS block, uint8[168], from its codes, float32[256], and the rows of `groups`."""
    block[:] = 0
    for b in range(8):
        block[b] = (int(groups[b, CHOSEN]) + 127) | int(groups[b, CHOSEN + 1])
        for l in range(32):
            q = int(codes[32 * b + l])
            block[8 + 32 * (b // 2) + l] |= (q & 15) << (4 * (b & 1))
            block[136 + l] |= q >> 4 << b


STEPPED_SEARCHES = {
    "IQ2_KS": RowSearch(_iq2_ks, half_head, iq2_ks, __file__),
    "IQ3_KS": RowSearch(_iq3_ks, half_head, iq3_ks, __file__),
    "IQ4_KS": RowSearch(_iq4_ks, float_head, iq4_ks, __file__),
    "IQ5_KS": RowSearch(_iq5_ks, float_head, iq5_ks, __file__),
}
