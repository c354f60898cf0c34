"""TQ1_0, TQ2_0, Q2_0, Q1_0_G128, IQ1_BN, IQ2_BN: one scale times codes of one or two bits. Byte maps: `formats/codecs/ternary.py`.

These types are made for models whose weights have two or three values by training; a search gives these back unchanged, and
any others with the smallest error. IQ1_BN and IQ2_BN have one scale for the whole row. Without importances they are written by
their definition: the scale is max|x|, and what is below half of it becomes 0.
"""

from __future__ import annotations

import numpy as np

from ...formats.codecs.scalars import write_float, write_half
from ...formats.kernel import device_function
from .grouped import as_half
from .lanes import largest_magnitude
from .legacy import single_search

_ternary, _ternary_code = single_search("ternary", np.arange(-1, 2), reach=(1, 24), rungs=32, fine=0.15, sides=1)
_ternary_row, _ = single_search("ternary_row", np.arange(-1, 2), reach=(1, 24), rungs=32, fine=0.15, sides=1, half=False)
_q2_0, _q2_0_code = single_search("q2_0", np.arange(-1, 3), reach=(0.5, 4), rungs=32, fine=0.1)


@device_function
def _five_digits(digits):
    """The byte of five ternary digits, the most significant first: digits / 243 as a fraction of 256, rounded up."""
    return (digits * 256 + 242) // 243


def tq1_0(x, w, block, lanes):
    d = write_half(block, 52, _ternary(x, w, lanes))
    for j in range(52):
        count = 5 if j < 48 else 4
        step = 32 if j < 32 else 16 if j < 48 else 4
        first = j if j < 32 else 128 + j if j < 48 else 192 + j
        digits = 0
        for n in range(count):
            digits = 3 * digits + _ternary_code(x[first + step * n], d, np.float32(0))
        block[j] = _five_digits(digits if count == 5 else 3 * digits)


def tq2_0(x, w, block, lanes):
    block[:] = 0
    d = write_half(block, 64, _ternary(x, w, lanes))
    for i in range(256):
        block[32 * (i >> 7) + (i & 31)] |= _ternary_code(x[i], d, np.float32(0)) << (2 * (i >> 5 & 3))


def q2_0(x, w, block, lanes):
    block[:] = 0
    d = write_half(block, 0, _q2_0(x, w, lanes))
    for i in range(64):
        block[2 + (i >> 2)] |= _q2_0_code(x[i], d, np.float32(0)) << (2 * (i & 3))


def q1_0_g128(x, w, block, lanes):
    """No search: with the signs of x the least-squares scale is the weighted mean of |x|."""
    sw = np.float32(0)
    swx = np.float32(0)
    for i in range(128):
        sw += w[i]
        swx += w[i] * abs(x[i])
    write_half(block, 0, as_half(swx / sw))
    for j in range(16):
        byte = 0
        for n in range(8):
            byte |= (1 if x[8 * j + n] >= 0 else 0) << n
        block[2 + j] = byte


@device_function
def _ternary_digit(x, threshold):
    return 1 if abs(x) < threshold else 2 if x >= 0 else 0


@device_function
def _row_error(x, w, d):
    """Weighted squared error of the row with scale d."""
    error = np.float32(0)
    for i in range(len(x)):
        rest = x[i] - d * np.float32(_ternary_digit(x[i], np.float32(0.5) * d) - 1)
        error += (w[i] * rest) * rest
    return error


@device_function
def _row_scale(x, w, lanes):
    """The scale of a row; max|x| if no other is better, so that rows of three values stay what they are to the last bit."""
    top = largest_magnitude(x)
    d = abs(_ternary_row(x, w, lanes))
    return d if _row_error(x, w, d) < _row_error(x, w, top) else top


@device_function
def _pack_iq1_bn(x, d, head, blocks):
    write_half(head, 0, as_half(d))
    threshold = np.float32(0.5) * d
    for b in range(len(blocks)):
        last = 0
        power = 1
        for run in range(4):
            at = 64 * b + 16 * run
            for third in range(3):
                digits = 0
                for n in range(4, -1, -1):
                    digits = 3 * digits + _ternary_digit(x[at + 5 * third + n], threshold)
                blocks[b, 3 * run + third] = _five_digits(digits)
            last += power * _ternary_digit(x[at + 15], threshold)
            power *= 3
        blocks[b, 12] = _five_digits(last)


@device_function
def _pack_iq2_bn(x, d, head, blocks):
    write_float(head, 0, d)
    threshold = np.float32(0.5) * d
    for b in range(len(blocks)):
        for j in range(16):
            byte = 0
            for run in range(4):
                byte |= _ternary_digit(x[64 * b + 16 * run + j], threshold) << (2 * run)
            blocks[b, j] = byte


def iq1_bn(x, w, head, blocks, own, groups, lanes):
    _pack_iq1_bn(x, _row_scale(x, w, lanes), head, blocks)


def iq1_bn_plain(x, w, head, blocks, own, groups, lanes):
    _pack_iq1_bn(x, largest_magnitude(x), head, blocks)


def iq2_bn(x, w, head, blocks, own, groups, lanes):
    _pack_iq2_bn(x, _row_scale(x, w, lanes), head, blocks)


def iq2_bn_plain(x, w, head, blocks, own, groups, lanes):
    _pack_iq2_bn(x, largest_magnitude(x), head, blocks)


SINGLE_SEARCHES = {"TQ1_0": tq1_0, "TQ2_0": tq2_0, "Q2_0": q2_0, "Q1_0_G128": q1_0_g128}
ROW_SEARCHES = {"IQ1_BN": iq1_bn, "IQ2_BN": iq2_bn}
PLAIN_ROW_ENCODERS = {"IQ1_BN": iq1_bn_plain, "IQ2_BN": iq2_bn_plain}
