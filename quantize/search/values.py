"""Sets of values and the nearest of them: `nearest`(t), and the position of the nearest as a code.

There are three forms with the same results. Consecutive integers are rounded and clamped. Sets of
up to 16 values are compared with one midpoint after another, which compilers turn into selects
without branches. Longer sets are cut into cells of equal width that hold one midpoint at most, so
that a table lookup and one comparison suffice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats.kernel import specialize, unbound

_LONGEST_CHAIN = 16
_LONGEST_DEVICE_CHAIN = 8  # table lookups are cheaper on a GPU than on a CPU

# Free names of the templates, bound per set by `value_set`.
VALUES = np.zeros(2, dtype=np.float32)
MIDDLES = np.zeros(1, dtype=np.float32)
FIRST, LAST = 0, 0
CELLS = np.zeros(1, dtype=np.uint32)
ORIGIN, PER_UNIT, LAST_CELL, MASK = 0.0, 1.0, 0, np.int32(0)
nearest = cell_of = unbound


def _nearest_in_range(t):
    """Return the integer in FIRST..LAST nearest to t."""
    return min(max(np.floor(t + np.float32(0.5)), np.float32(FIRST)), np.float32(LAST))


def _nearest_by_chain(t):
    v = VALUES[0]
    for k in range(len(MIDDLES)):
        v = VALUES[k + 1] if t > MIDDLES[k] else v
    return v


def _cell_of(t):
    """Return the cell of t: its lowest value + 128 in bits 0-7, its highest in bits 8-15, the code
    of the lowest in bits 16-23.
    """
    # In this order max drops a NaN, which cannot become an int32; the mask tells the compiler that
    # the index is not negative.
    place = min(
        max(np.float32(0), (t - np.float32(ORIGIN)) * np.float32(PER_UNIT)), np.float32(LAST_CELL)
    )
    return CELLS[np.int32(place) & MASK]


def _nearest_by_cell(t):
    cell = cell_of(t)
    low = np.float32(np.int32(cell & np.uint32(255))) - np.float32(128)
    high = np.float32(np.int32(cell >> np.uint32(8) & np.uint32(255))) - np.float32(128)
    return high if t > np.float32(0.5) * (low + high) else low


def _code_in_range(x, scale, shift):
    """Return the position of the value nearest to x / scale in the value set."""
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    return int(min(max(np.float32(FIRST), nearest(x * inverse - shift)), np.float32(LAST))) - FIRST


def _code_by_chain(x, scale, shift):
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    t = x * inverse - shift
    code = 0
    for k in range(len(MIDDLES)):
        code += 1 if t > MIDDLES[k] else 0
    return code


def _code_by_cell(x, scale, shift):
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    t = x * inverse - shift
    cell = cell_of(t)
    low = np.float32(np.int32(cell & np.uint32(255))) - np.float32(128)
    return int(cell >> np.uint32(16)) + (1 if nearest(t) > low else 0)


def _codes_in_range(x, at, n, scale, shift, codes):
    """codes[i] = position, as a float32, of the value nearest to x[i] / scale in the value set, for
    n elements from `at` on.
    """
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    for i in range(at, at + n):
        codes[i] = min(
            max(np.float32(0), nearest(x[i] * inverse - shift) - np.float32(FIRST)),
            np.float32(LAST - FIRST),
        )


def _codes_by_chain(x, at, n, scale, shift, codes):
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    for i in range(at, at + n):
        t = x[i] * inverse - shift
        code = np.float32(0)
        for k in range(len(MIDDLES)):
            code += np.float32(1) if t > MIDDLES[k] else np.float32(0)
        codes[i] = code


def _codes_by_cell(x, at, n, scale, shift, codes):
    inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
    for i in range(at, at + n):
        t = x[i] * inverse - shift
        cell = cell_of(t)
        low = np.float32(np.int32(cell & np.uint32(255))) - np.float32(128)
        code = np.float32(np.int32(cell >> np.uint32(16)))
        codes[i] = code + np.float32(1) if nearest(t) > low else code


def cells(values: np.ndarray) -> dict[str, Any]:
    """Return the names that `_cell_of` needs for a set of ascending integers in -128..127, given as
    float32.

    Midpoints are multiples of 1/2 and cells begin at a quarter, so that rounding never moves a
    midpoint into another cell. Raise ValueError if cells do not separate the values.
    """
    middles = (values[1:] + values[:-1]) / 2
    width = 2.0 ** np.floor(np.log2(np.diff(middles).min()))
    origin = np.floor(middles[0]) - 0.25
    count = int(np.ceil((middles[-1] - origin) / width)) + 1
    # The number of midpoints below a cell is the code of its lowest value.
    low = np.searchsorted(middles, origin + width * np.arange(count))
    high = np.append(low[1:], len(middles))
    if (high - low).max() > 1 or middles[-1] >= origin + width * count:
        raise ValueError(f"cells of {width} do not separate the values {values}")
    entries = low << 16 | (values[high].astype(int) + 128) << 8 | (values[low].astype(int) + 128)
    table = np.zeros(1 << (count - 1).bit_length(), dtype=np.uint32)
    table[:count] = entries
    return {
        "CELLS": table,
        "ORIGIN": float(origin),
        "PER_UNIT": 1 / width,
        "LAST_CELL": count - 1,
        "MASK": np.int32(len(table) - 1),
    }


def value_set(values: np.ndarray) -> dict[str, Any]:
    """Return the names that describe a set of ascending values: VALUES, MIDDLES, `nearest`(t),
    `code_of`(x, scale, shift) and `codes_of`(x, at, n, scale, shift, codes).
    """
    values = np.asarray(values, dtype=np.float32)
    by_chain = {
        "nearest": _nearest_by_chain,
        "code_of": _code_by_chain,
        "codes_of": _codes_by_chain,
    }
    by_cell = {
        "cell_of": _cell_of,
        "nearest": _nearest_by_cell,
        "code_of": _code_by_cell,
        "codes_of": _codes_by_cell,
    }
    names: dict[str, Any] = {
        "VALUES": values,
        "MIDDLES": ((values[1:] + values[:-1]) / 2).astype(np.float32),
    }
    if np.array_equal(values, np.arange(values[0], values[-1] + 1)):
        names |= {"FIRST": int(values[0]), "LAST": int(values[-1])}
        forms = {
            "nearest": _nearest_in_range,
            "code_of": _code_in_range,
            "codes_of": _codes_in_range,
        }
    elif len(values) <= _LONGEST_CHAIN:
        forms = by_chain
    else:
        names |= cells(values)
        forms = by_cell
    for form, template in forms.items():
        names[form] = specialize(template, **names)
    if forms is by_chain and len(values) > _LONGEST_DEVICE_CHAIN:
        in_cells = names | cells(values)
        for form, template in by_cell.items():
            in_cells[form] = specialize(template, **in_cells)
            if form in names:
                names[form].device_form = in_cells[form]
    return names
