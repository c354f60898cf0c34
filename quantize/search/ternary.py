"""TQ1_0, TQ2_0, Q2_0, Q1_0_G128, IQ1_BN, IQ2_BN: one scale times codes of one or two bits. Byte
maps: `formats/codecs/ternary.py`.

These types are made for models that were trained with two or three values per weight. A search
stores such weights exactly, and any others with the smallest error. IQ1_BN and IQ2_BN have one
scale for the whole row. Without importances they follow their definition: the scale is max|x|, and
magnitudes below half of it become 0.
"""

from __future__ import annotations

import numpy as np

from ...formats.codecs.scalars import nearest_half, write_float, write_half
from ...formats.kernel import device_function, inlined_function
from .lanes import LANES, largest_magnitude
from .legacy import single_search

_ternary, _ternary_code = single_search(
    np.arange(-1, 2), reach=(1, 24), rungs=32, fine=0.15, sides=1
)
_ROW_THRESHOLDS = (0.5 / np.geomspace(1, 24, LANES)).astype(np.float32)  # in units of max|x|
_FINE = np.geomspace(0.85, 1.15, LANES).astype(np.float32)
_q2_0, _q2_0_code = single_search(np.arange(-1, 3), reach=(0.5, 4), rungs=32, fine=0.1)


@device_function
def _five_digits(digits):
    """Return the byte of five ternary digits, the most significant first: digits / 243 as a
    fraction of 256, rounded up.
    """
    return (digits * 256 + 242) // 243


def tq1_0(x, w, block, lanes):
    """Search a TQ1_0 block and write it: x, w float32[256], block uint8[54]; lanes: scratch, see
    `steps.py`.
    """
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
    """Search a TQ2_0 block and write it: x, w float32[256], block uint8[66]; lanes: scratch, see
    `steps.py`.
    """
    block[:] = 0
    d = write_half(block, 64, _ternary(x, w, lanes))
    for i in range(256):
        block[32 * (i >> 7) + (i & 31)] |= _ternary_code(x[i], d, np.float32(0)) << (
            2 * (i >> 5 & 3)
        )


def q2_0(x, w, block, lanes):
    """Search a Q2_0 block and write it: x, w float32[64], block uint8[18]; lanes: scratch, see
    `steps.py`.
    """
    block[:] = 0
    d = write_half(block, 0, _q2_0(x, w, lanes))
    for i in range(64):
        block[2 + (i >> 2)] |= _q2_0_code(x[i], d, np.float32(0)) << (2 * (i & 3))


def q1_0_g128(x, w, block, lanes):
    """Needs no search: with the signs of x the least-squares scale is the weighted mean of |x|."""
    sw = np.float32(0)
    swx = np.float32(0)
    for i in range(128):
        sw += w[i]
        swx += w[i] * abs(x[i])
    write_half(block, 0, nearest_half(swx / sw))
    for j in range(16):
        byte = 0
        for n in range(8):
            byte |= (1 if x[8 * j + n] >= 0 else 0) << n
        block[2 + j] = byte


@device_function
def _ternary_digit(x, threshold):
    """Return 0 for x <= -threshold, 2 for x >= threshold, else 1; without branches, which no
    processor could predict.
    """
    beyond = abs(x) >= threshold
    return 1 + (beyond & (x >= 0)) - (beyond & (x < 0))


@inlined_function
def _kept(u, w, threshold):
    return w if u >= threshold else np.float32(0)


@device_function
def _sums_beyond(x, w, inverse, threshold, sx, sw):
    """Compute for each lane c the sums of w |x| and of w over the elements with |x| * inverse >=
    threshold[c], |x| in units of 1/inverse.
    """
    for c in range(LANES):
        sx[c] = np.float32(0)
        sw[c] = np.float32(0)
    for i in range(0, len(x), 4):
        u0, u1, u2, u3 = (
            abs(x[i]) * inverse,
            abs(x[i + 1]) * inverse,
            abs(x[i + 2]) * inverse,
            abs(x[i + 3]) * inverse,
        )
        w0, w1, w2, w3 = w[i], w[i + 1], w[i + 2], w[i + 3]
        for c in range(len(sx)):
            t = threshold[c]
            k0, k1, k2, k3 = _kept(u0, w0, t), _kept(u1, w1, t), _kept(u2, w2, t), _kept(u3, w3, t)
            sx[c] += (k0 * u0 + k1 * u1) + (k2 * u2 + k3 * u3)
            sw[c] += (k0 + k1) + (k2 + k3)


@device_function
def _row_scale(x, w, lanes):
    """The scale of a row: the mean of what lies beyond a threshold, which is then half that mean.
    Sixteen thresholds, then sixteen around the best; max|x| if no other is better, so that rows of
    three values stay what they are to the last bit.
    """
    top = largest_magnitude(x)
    if not top > np.float32(4e-37):
        return top
    inverse = np.float32(1) / top
    for c in range(LANES):
        lanes[0, c] = _ROW_THRESHOLDS[c]
    gain = np.float32(0)  # fall of the squared error
    mean = np.float32(1)
    for part in range(2):
        _sums_beyond(x, w, inverse, lanes[0], lanes[1], lanes[2])
        if part == 0:
            # of max|x| itself; sums are not exact
            gain = (np.float32(2) * lanes[1, 0] - lanes[2, 0]) * np.float32(1.0001)
        for c in range(LANES):
            if lanes[1, c] * lanes[1, c] > gain * lanes[2, c]:
                mean = lanes[1, c] / lanes[2, c]
                gain = lanes[1, c] * mean
        for c in range(LANES):
            lanes[0, c] = np.float32(0.5) * mean * _FINE[c]
    return top * mean


@device_function
def _pack_iq1_bn(x, d, head, blocks, own):
    write_half(head, 0, nearest_half(d))
    threshold = np.float32(0.5) * d
    for i in range(len(x)):
        own[i] = np.float32(_ternary_digit(x[i], threshold))
    for b in range(len(blocks)):
        last = np.float32(0)
        for run in range(3, -1, -1):
            at = 64 * b + 16 * run
            for third in range(3):
                i = at + 5 * third
                digits = own[i] + np.float32(3) * (
                    own[i + 1]
                    + np.float32(3)
                    * (own[i + 2] + np.float32(3) * (own[i + 3] + np.float32(3) * own[i + 4]))
                )
                blocks[b, 3 * run + third] = _five_digits(int(digits))
            last = np.float32(3) * last + own[at + 15]
        blocks[b, 12] = _five_digits(int(last))


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
    """Search a row of IQ1_BN and write it: x, w float32[n], head uint8[2], blocks uint8[n/64, 13];
    own, groups, lanes: scratch, see `steps.py`.
    """
    _pack_iq1_bn(x, _row_scale(x, w, lanes), head, blocks, own)


def iq1_bn_plain(x, w, head, blocks, own, groups, lanes):
    """Write a row of IQ1_BN by the type's definition, without importances: x float32[n], head
    uint8[2], blocks uint8[n/64, 13]; w is not used.
    """
    _pack_iq1_bn(x, largest_magnitude(x), head, blocks, own)


def iq2_bn(x, w, head, blocks, own, groups, lanes):
    """Search a row of IQ2_BN and write it: x, w float32[n], head uint8[4], blocks uint8[n/64, 16];
    own, groups, lanes: scratch, see `steps.py`.
    """
    _pack_iq2_bn(x, _row_scale(x, w, lanes), head, blocks)


def iq2_bn_plain(x, w, head, blocks, own, groups, lanes):
    """Write a row of IQ2_BN by the type's definition, without importances: x float32[n], head
    uint8[4], blocks uint8[n/64, 16]; w is not used.
    """
    _pack_iq2_bn(x, largest_magnitude(x), head, blocks)


SINGLE_SEARCHES = {"TQ1_0": tq1_0, "TQ2_0": tq2_0, "Q2_0": q2_0, "Q1_0_G128": q1_0_g128}
ROW_SEARCHES = {"IQ1_BN": iq1_bn, "IQ2_BN": iq2_bn}
PLAIN_ROW_ENCODERS = {"IQ1_BN": iq1_bn_plain, "IQ2_BN": iq2_bn_plain}
