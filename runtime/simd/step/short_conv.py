"""Gated short convolutions for one token."""

from __future__ import annotations

import numpy as np

from .. import vectors as v
from .heads import SEQUENCE


def convolve_gated(arguments, thread, threads):
    """c * conv(b * x) for the last tokens and this one, whose b * x becomes the last.

    Arguments: the frame, bytes of the layer in what belongs to the sequence; b, c and x, float32[3,
    channels]; channels, a multiple of 16; taps; their weights float32[taps, channels]; the result.
    """
    frame = v.integer_at(arguments)
    layer = v.integer_at(frame + SEQUENCE) + v.integer_at(arguments + 8)
    source, channels = v.integer_at(arguments + 16), v.integer_at(arguments + 24)
    taps, weights = v.integer_at(arguments + 32), v.integer_at(arguments + 40)
    out, kept, n = v.integer_at(arguments + 48), v.integer_at(layer), channels // 16
    for i in range(n * thread // threads, n * (thread + 1) // threads):
        at = 64 * i
        total = v.splat(np.float32(0))
        for tap in range(taps - 1):
            x = v.load_floats(kept + 4 * channels * tap + at)
            total = v.add(total, v.mul(x, v.load_floats(weights + 4 * channels * tap + at)))
            if tap:
                v.store_floats(kept + 4 * channels * (tap - 1) + at, x)
        x = v.load_floats(source + 8 * channels + at)
        x = v.mul(v.load_floats(source + at), x)
        total = v.add(total, v.mul(x, v.load_floats(weights + 4 * channels * (taps - 1) + at)))
        if taps > 1:
            v.store_floats(kept + 4 * channels * (taps - 2) + at, x)
        v.store_floats(out + at, v.mul(v.load_floats(source + 4 * channels + at), total))
