"""IQ1_S, IQ1_M, IQ1_S_R4, IQ1_M_R4: search and packing. Byte maps: `formats/codecs/grid.py`.

The entries of the grid are ternary, moved by an eighth up or down. IQ1_S_R4 and IQ1_M_R4 have one d
for the whole row.
"""

from __future__ import annotations

import functools

from ...formats.codecs.scalars import float_to_half, write_half, write_u16
from ...formats.grids import IQ1_S_GRID
from ...formats.kernel import device_function
from .grids.search import grid_search
from .grids.tables import closest_entries
from .grids.vectors import NEAR

_SHIFTS = (0.125, -0.125)
_iq1_s, _settle_iq1_s = grid_search(
    IQ1_S_GRID,
    group=32,
    integers=range(1, 16, 2),
    shifts=_SHIFTS,
    reach=(0.4, 0.8),
    rungs=6,
    emphasis=3,
    gain=0.85,
)
_iq1_s_r4, _settle_iq1_s_r4 = grid_search(
    IQ1_S_GRID,
    group=32,
    integers=range(1, 16, 2),
    shifts=_SHIFTS,
    reach=(0.4, 0.8),
    rungs=6,
    emphasis=3,
    gain=0.6,
)
_iq1_m, _settle_iq1_m = grid_search(
    IQ1_S_GRID,
    group=16,
    integers=range(1, 16, 2),
    shifts=_SHIFTS,
    common_shift=False,
    reach=(0.4, 0.8),
    rungs=6,
    emphasis=2,
    gain=0.7,
)
_iq1_m_r4, _settle_iq1_m_r4 = grid_search(
    IQ1_S_GRID,
    group=16,
    integers=range(16),
    shifts=_SHIFTS,
    common_shift=False,
    reach=(0.4, 0.8),
    rungs=6,
    emphasis=2,
    gain=0.6,
)


@device_function
def _write_indices(low, first, lanes, number, k, shift):
    """Write the low bytes of four indices to low[first:]. Return the u16 of their high bits, the
    scale and the shift.
    """
    word = k // 2 << 12 | shift << 15
    for l in range(4):
        index = int(number[int(lanes[0, l])])
        low[first + l] = index & 255
        word |= index >> 8 << (3 * l)
    return word


@device_function
def _write_pair(low, first, lanes, number):
    """Write the low bytes of two indices to low[first:]. Return their nibbles of high bits and
    shifts.
    """
    nibbles = 0
    for l in range(2):
        index = int(number[int(lanes[0, l])])
        low[first + l] = index & 255
        nibbles |= (index >> 8 | int(lanes[0, 8 + l]) << 3) << (4 * l)
    return nibbles


def iq1_s(x, w, block, own, groups, lanes, near, number):
    """Search an IQ1_S block and write it: x, w float32[256], block uint8[50]; own, groups, lanes:
    scratch, see `grids/search.py`; near, number: tables of the grid, see `grids/tables.py`.
    """
    d, stored = _iq1_s(x, w, own, groups, lanes, near)
    write_half(block, 0, stored)
    for b in range(8):
        _settle_iq1_s(x, own, d, groups, b, lanes, near)
        write_u16(
            block,
            34 + 2 * b,
            _write_indices(block, 2 + 4 * b, lanes, number, int(groups[b, 2]), int(groups[b, 3])),
        )


def iq1_m(x, w, block, own, groups, lanes, near, number):
    """Search an IQ1_M block and write it: x, w float32[256], block uint8[56]; own, groups, lanes:
    scratch, see `grids/search.py`; near, number: tables of the grid, see `grids/tables.py`.
    """
    d, stored = _iq1_m(x, w, own, groups, lanes, near)
    bits = float_to_half(stored)
    for g in range(16):
        _settle_iq1_m(x, own, d, groups, g, lanes, near)
        block[32 + g] = _write_pair(block, 2 * g, lanes, number)
    for part in range(4):
        word = (bits >> (4 * part) & 15) << 12
        for l in range(4):
            word |= int(groups[4 * part + l, 2]) // 2 << (3 * l)
        write_u16(block, 48 + 2 * part, word)


def iq1_s_r4(x, w, head, blocks, own, groups, lanes, near, number):
    """Search a row of IQ1_S_R4 and write it: x, w float32[n], head uint8[2], blocks uint8[n/32, 6];
    own, groups, lanes: scratch, see `grids/search.py`; near, number: tables of the grid, see
    `grids/tables.py`.
    """
    d, stored = _iq1_s_r4(x, w, own, groups, lanes, near)
    write_half(head, 0, stored)
    for b in range(len(blocks)):
        _settle_iq1_s_r4(x, own, d, groups, b, lanes, near)
        write_u16(
            blocks[b],
            4,
            _write_indices(blocks[b], 0, lanes, number, int(groups[b, 2]), int(groups[b, 3])),
        )


def iq1_m_r4(x, w, head, blocks, own, groups, lanes, near, number):
    """Search a row of IQ1_M_R4 and write it: x, w float32[n], head uint8[2], blocks uint8[n/32, 7];
    own, groups, lanes: scratch, see `grids/search.py`; near, number: tables of the grid, see
    `grids/tables.py`.
    """
    d, stored = _iq1_m_r4(x, w, own, groups, lanes, near)
    write_half(head, 0, stored)
    for b in range(len(blocks)):
        blocks[b, 6] = int(groups[2 * b, 2]) | int(groups[2 * b + 1, 2]) << 4
        for h in range(2):
            _settle_iq1_m_r4(x, own, d, groups, 2 * b + h, lanes, near)
            blocks[b, 4 + h] = _write_pair(blocks[b], 2 * h, lanes, number)


BLOCK_SEARCHES = {"IQ1_S": iq1_s, "IQ1_M": iq1_m}
ROW_SEARCHES = {"IQ1_S_R4": iq1_s_r4, "IQ1_M_R4": iq1_m_r4}
SEARCH_TABLES = dict.fromkeys(
    ["IQ1_S", "IQ1_M", "IQ1_S_R4", "IQ1_M_R4"], functools.partial(closest_entries, IQ1_S_GRID, NEAR)
)
