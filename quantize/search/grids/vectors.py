"""The closest entry of a grid to one vector: see `search.py`.

An entry is packed: the number of each element's value, in 2 bits (grids of three values) or 3 bits
(of eight), the first element lowest.
"""

from __future__ import annotations

import numpy as np

from ....formats.kernel import device_function, unbound

NEAR = 8  # entries compared, a power of two
# Free names of the templates below, bound per type by `grid_search`.
DIMS, BASE = 8, 3
POWERS = 3 ** np.arange(7, -1, -1, dtype=np.int32)
element = unbound


@device_function
def ordered(error, j):
    """Return an integer that has the order of `error` (not negative), with the number j < NEAR in
    its lowest bits. A minimum of integers may be taken in any order, so compilers use vector
    instructions.
    """
    return np.int32(np.int32(np.float32(error).view(np.int32) & -NEAR) | np.int32(j))


@device_function
def error_of(key):
    """Return the error in a key of `ordered`, without its lowest bits."""
    return np.int32(key & -NEAR).view(np.float32)


@device_function
def of_three(entry, i, one, two, last):
    """Return the value of element i of a packed entry, for grids of three values."""
    return last if entry & 2 << 2 * i else two if entry & 1 << 2 * i else one


@device_function
def of_eight(entry, i, one, two, last):
    """Return the same for grids of eight values: odd multiples of the first, except the last."""
    digit = entry >> 3 * i & 7
    return last if digit == 7 else one * np.float32(np.int32(2 * digit + 1))


def point_of(lanes, row, column, inverse, offset):
    """Return the point of the cube nearest to lanes[row, column:column+DIMS]: x * inverse + offset
    rounds down to the number of a value.
    """
    point = np.int32(0)
    for i in range(DIMS):
        t = lanes[row, column + i] * inverse + offset
        digit = np.int32(min(max(np.float32(0), t), np.float32(BASE) - np.float32(0.5)))
        point = np.int32(point + np.int32(digit * POWERS[i]))
    return point


def closest_entry(lanes, row, column, w, at, near, point, one, two, last):
    """Return which of the entries near[point] is closest to lanes[row, column:column+DIMS], with
    weights w[at:at+DIMS], as a key of `ordered`. The last three arguments describe the scaled and
    shifted values of the grid.
    """
    least = np.int32(0x7FFFFFFF)
    for j in range(NEAR):
        entry = near[point, j]
        error = np.float32(0)
        for i in range(DIMS):
            rest = lanes[row, column + i] - element(entry, i, one, two, last)
            error += (w[at + i] * rest) * rest
        least = min(least, ordered(error, j))
    return least
