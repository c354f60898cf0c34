"""The inner loop of every search: judge many candidate scales of one group side by side.

A group of values x with weights w is to be written as x_i ~ s * v_i with v_i from a small set of
values. For a given s the best v_i is the one nearest to x_i / s. The functions here try LANES
scales at once. Every lane adds up over the elements in index order, so a compiler may use vector
instructions across lanes without reordering any addition: the result is the same on any machine and
for any number of threads.

`nearest` is a free name, bound to the value set of a type by `specialize` (see `grouped.py`).
"""

from __future__ import annotations

import numpy as np

from ...formats.kernel import device_function, unbound

LANES = 16
nearest = unbound  # bound by specialize


@device_function
def largest_magnitude(x):
    """Return max |x|, 0 for no elements. Magnitudes have the order of their bits. Compilers find
    the largest integer with vector instructions, which they must not use for floats, where the
    order of comparisons could matter.
    """
    top = np.uint32(0)
    for i in range(len(x)):
        bits = np.float32(x[i]).view(np.uint32) & np.uint32(0x7FFFFFFF)
        top = bits if bits > top else top
    return np.uint32(top).view(np.float32)


@device_function
def lane_of_least(values):
    """Return the lane of the smallest of LANES numbers, none negative; the first of those that
    agree to 2^-19.

    Such numbers have the order of their bits; the last four bits hold the lane. Integers can be
    compared in any order, so compilers turn this loop into vector instructions, which they must not
    do with a loop that compares floats.
    """
    least = np.uint32(0xFFFFFFFF)
    for c in range(len(values)):
        key = np.uint32(
            (np.float32(values[c]).view(np.uint32) & np.uint32(0xFFFFFFF0)) | np.uint32(c)
        )
        least = key if key < least else least
    return np.int64(least & np.uint32(15))


@device_function
def lane_of_largest(values):
    """Return the lane of the largest of LANES numbers; negative numbers and NaN count as 0."""
    largest = np.uint32(0)
    for c in range(len(values)):
        value = max(np.float32(0), values[c])
        key = np.uint32(
            (np.float32(value).view(np.uint32) & np.uint32(0xFFFFFFF0)) | np.uint32(LANES - 1 - c)
        )
        largest = key if key > largest else largest
    return LANES - 1 - np.int64(largest & np.uint32(15))


@device_function
def largest_of(x):
    """Return the x of largest magnitude; of two, the positive one."""
    top = np.uint32(0)
    for i in range(len(x)):
        bits = np.float32(x[i]).view(np.uint32)
        key = np.uint32((bits << np.uint32(1) | bits >> np.uint32(31)) ^ np.uint32(1))
        top = key if key > top else top
    top = np.uint32(top ^ np.uint32(1))
    return np.uint32(top >> np.uint32(1) | top << np.uint32(31)).view(np.float32)


@device_function
def gains(sxv, svv, gain):
    """gain[c] = fall of the squared error with the least-squares scale sxv / svv."""
    for c in range(len(gain)):
        gain[c] = sxv[c] * sxv[c] / svv[c] if svv[c] > 0 else np.float32(0)


def score_lanes(x, w, at, n, shift, inverse, sxv, svv):
    """Set sxv[c] = sum w x v and svv[c] = sum w v^2 for each lane c, over x[at:at+n], with v
    nearest to x * inverse[c].

    `shift` moves the value set. With the least-squares scale s = sxv/svv the weighted squared error
    falls by sxv^2/svv.
    """
    for c in range(LANES):
        sxv[c] = np.float32(0)
        svv[c] = np.float32(0)
    for i in range(at, at + n):
        wi = w[i]
        wx = wi * x[i]
        for c in range(LANES):
            v = nearest(x[i] * inverse[c] - shift) + shift
            sxv[c] += wx * v
            svv[c] += (wi * v) * v


def error_lanes(x, w, at, n, shift, scale, inverse, error):
    """Set for each lane c error[c] = sum w (x - scale[c] v)^2 over x[at:at+n], v nearest to x *
    inverse[c], shift[c] per lane.

    Summed from the differences, not from sxv and svv: at 6 and 8 bits those would cancel to noise.
    """
    for c in range(LANES):
        error[c] = np.float32(0)
    for i in range(at, at + n):
        wi = w[i]
        for c in range(LANES):
            v = nearest(x[i] * inverse[c] - shift[c]) + shift[c]
            rest = x[i] - scale[c] * v
            error[c] += (wi * rest) * rest


def score_pairs(x, w, at, n, shift, inverse, sxv, svv):
    """`score_lanes` for value sets whose nearest value takes few instructions. It takes two
    elements at a time, so that sums stay in registers for longer; long chains of comparisons gain
    nothing from that.
    """
    for c in range(LANES):
        sxv[c] = np.float32(0)
        svv[c] = np.float32(0)
    for i in range(at, at + n, 2):
        x0, x1, w0, w1 = x[i], x[i + 1], w[i], w[i + 1]
        for c in range(len(sxv)):
            v0 = nearest(x0 * inverse[c] - shift) + shift
            v1 = nearest(x1 * inverse[c] - shift) + shift
            sxv[c] += (w0 * x0) * v0 + (w1 * x1) * v1
            svv[c] += (w0 * v0) * v0 + (w1 * v1) * v1


def error_pairs(x, w, at, n, shift, scale, inverse, error):
    """`error_lanes` for such value sets."""
    for c in range(LANES):
        error[c] = np.float32(0)
    for i in range(at, at + n, 2):
        x0, x1, w0, w1 = x[i], x[i + 1], w[i], w[i + 1]
        for c in range(len(error)):
            rest0 = x0 - scale[c] * (nearest(x0 * inverse[c] - shift[c]) + shift[c])
            rest1 = x1 - scale[c] * (nearest(x1 * inverse[c] - shift[c]) + shift[c])
            error[c] += (w0 * rest0) * rest0 + (w1 * rest1) * rest1


# The two functions for either kind of value set.
CHAINS = {"score_lanes": score_lanes, "error_lanes": error_lanes}
PAIRS = {"score_lanes": score_pairs, "error_lanes": error_pairs}
