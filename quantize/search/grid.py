"""IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S: search and packing. Byte maps:
`formats/codecs/grid.py`.
"""

from __future__ import annotations

import functools

from ...formats.codecs.scalars import write_half, write_u16
from ...formats.grids import IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID
from ...formats.kernel import device_function
from .grids.search import grid_search
from .grids.tables import closest_entries
from .grids.vectors import NEAR

_SCALES = range(1, 32, 2)
_iq2_xxs, _settle_iq2_xxs = grid_search(
    IQ2_XXS_GRID,
    1 / 8,
    group=32,
    integers=_SCALES,
    even_signs=True,
    reach=(0.75, 1.3),
    rungs=8,
    emphasis=2,
    gain=0.5,
)
_iq2_xs, _settle_iq2_xs = grid_search(
    IQ2_XS_GRID,
    1 / 8,
    group=16,
    integers=_SCALES,
    even_signs=True,
    reach=(0.75, 1.3),
    rungs=8,
    emphasis=2,
    gain=0.5,
)
_iq2_s, _settle_iq2_s = grid_search(
    IQ2_S_GRID,
    1 / 8,
    group=16,
    integers=_SCALES,
    reach=(0.75, 1.3),
    rungs=8,
    emphasis=2,
    gain=0.5,
)
_iq3_xxs, _settle_iq3_xxs = grid_search(
    IQ3_XXS_GRID,
    1 / 4,
    group=32,
    integers=_SCALES,
    even_signs=True,
    reach=(0.85, 1.25),
    rungs=8,
    emphasis=2,
    gain=0.5,
)
_iq3_s, _settle_iq3_s = grid_search(
    IQ3_S_GRID,
    group=32,
    integers=_SCALES,
    reach=(0.85, 1.25),
    rungs=8,
    emphasis=2,
    gain=0.5,
)


@device_function
def _signs(x, m):
    """Return a bit for each of eight elements: 1 for negative."""
    bits = 0
    for i in range(8):
        bits |= (1 if x[8 * m + i] < 0 else 0) << i
    return bits


@device_function
def _seven_signs(x, m, lanes):
    """Return the signs without the eighth, which follows from them as the parity is even."""
    return (_signs(x, m) ^ 1 << int(lanes[4 + m // 16, m % 16])) & 127


@device_function
def _write_signs_and_scale(block, at, x, b, k, lanes):
    """Write 32 bits: the sign codes of the b-th 32 elements, and their scale."""
    word = k // 2 << 28
    for l in range(4):
        word |= _seven_signs(x, 4 * b + l, lanes) << (7 * l)
    write_u16(block, at, word & 0xFFFF)
    write_u16(block, at + 2, word >> 16)


def iq2_xxs(x, w, block, own, groups, lanes, near, number):
    """Search an IQ2_XXS block and write it: x, w float32[256], block uint8[66]; own, groups, lanes:
    scratch, see `grids/search.py`; near, number: tables of the grid, see `grids/tables.py`.
    """
    d, stored = _iq2_xxs(x, w, own, groups, lanes, near)
    write_half(block, 0, stored)
    for b in range(8):
        _settle_iq2_xxs(x, own, d, groups, b, lanes, near)
        for l in range(4):
            block[2 + 8 * b + l] = number[int(lanes[0, l])]
        _write_signs_and_scale(block, 6 + 8 * b, x, b, int(groups[b, 2]), lanes)


def iq2_xs(x, w, block, own, groups, lanes, near, number):
    """Search an IQ2_XS block and write it: x, w float32[256], block uint8[74]; own, groups, lanes:
    scratch, see `grids/search.py`; near, number: tables of the grid, see `grids/tables.py`.
    """
    d, stored = _iq2_xs(x, w, own, groups, lanes, near)
    write_half(block, 0, stored)
    for b in range(8):
        block[66 + b] = int(groups[2 * b, 2]) // 2 | int(groups[2 * b + 1, 2]) // 2 << 4
    for g in range(16):
        _settle_iq2_xs(x, own, d, groups, g, lanes, near)
        for l in range(2):
            m = 2 * g + l
            write_u16(
                block, 2 + 2 * m, int(number[int(lanes[0, l])]) | _seven_signs(x, m, lanes) << 9
            )


def iq2_s(x, w, block, own, groups, lanes, near, number):
    """Search an IQ2_S block and write it: x, w float32[256], block uint8[82]; own, groups, lanes:
    scratch, see `grids/search.py`; near, number: tables of the grid, see `grids/tables.py`.
    """
    d, stored = _iq2_s(x, w, own, groups, lanes, near)
    block[:] = 0
    write_half(block, 0, stored)
    for g in range(16):
        _settle_iq2_s(x, own, d, groups, g, lanes, near)
        block[74 + g // 2] |= int(groups[g, 2]) // 2 << (4 * (g & 1))
        for l in range(2):
            m = 2 * g + l
            index = int(number[int(lanes[0, l])])
            block[2 + m] = index & 255
            block[34 + m] = _signs(x, m)
            block[66 + m // 4] |= index >> 8 << (2 * (m & 3))


def iq3_xxs(x, w, block, own, groups, lanes, near, number):
    """Search an IQ3_XXS block and write it: x, w float32[256], block uint8[98]; own, groups, lanes:
    scratch, see `grids/search.py`; near, number: tables of the grid, see `grids/tables.py`.
    """
    d, stored = _iq3_xxs(x, w, own, groups, lanes, near)
    write_half(block, 0, stored)
    for b in range(8):
        _settle_iq3_xxs(x, own, d, groups, b, lanes, near)
        for h in range(8):
            block[2 + 8 * b + h] = number[int(lanes[0, h])]
        _write_signs_and_scale(block, 66 + 4 * b, x, b, int(groups[b, 2]), lanes)


def iq3_s(x, w, block, own, groups, lanes, near, number):
    """Search an IQ3_S block and write it: x, w float32[256], block uint8[110]; own, groups, lanes:
    scratch, see `grids/search.py`; near, number: tables of the grid, see `grids/tables.py`.
    """
    d, stored = _iq3_s(x, w, own, groups, lanes, near)
    block[:] = 0
    write_half(block, 0, stored)
    for b in range(8):
        _settle_iq3_s(x, own, d, groups, b, lanes, near)
        block[106 + b // 2] |= int(groups[b, 2]) // 2 << (4 * (b & 1))
        for h in range(8):
            index = int(number[int(lanes[0, h])])
            block[2 + 8 * b + h] = index & 255
            block[66 + b] |= index >> 8 << h
        for l in range(4):
            block[74 + 4 * b + l] = _signs(x, 4 * b + l)


_GRIDS = {
    "IQ2_XXS": IQ2_XXS_GRID,
    "IQ2_XS": IQ2_XS_GRID,
    "IQ2_S": IQ2_S_GRID,
    "IQ3_XXS": IQ3_XXS_GRID,
    "IQ3_S": IQ3_S_GRID,
}
SEARCH_TABLES = {
    name: functools.partial(closest_entries, grid, NEAR) for name, grid in _GRIDS.items()
}
BLOCK_SEARCHES = {
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
}
