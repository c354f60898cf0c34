"""Rounding of scalars in searches, and choices among lanes, against numpy."""

from __future__ import annotations

import numpy as np
from iqforge.formats.codecs import scalars
from iqforge.quantize.search import lanes

from .from_python import from_python

nearest_half = from_python(scalars.nearest_half)
lane_of_largest, lane_of_least, largest_magnitude, largest_of = (
    from_python(function)
    for function in (
        lanes.lane_of_largest,
        lanes.lane_of_least,
        lanes.largest_magnitude,
        lanes.largest_of,
    )
)


def test_nearest_half_is_numpys_below_the_largest():
    generator = np.random.default_rng(1)
    x = (generator.standard_normal(20000) * 10.0 ** generator.uniform(-12, 4, 20000)).astype(
        np.float32
    )
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    # All halves, and all ties.
    x = np.concatenate([x, halves, -halves, (halves[1:] + halves[:-1]) / 2])
    assert np.array_equal(
        [nearest_half(v) for v in x],
        np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32),
    )
    assert [nearest_half(np.float32(v)) for v in (65519, 65520, 1e38, np.inf, -1e38)] == [
        65504,
        65504,
        65504,
        65504,
        -65504,
    ]


def test_lanes_of_the_least_and_the_largest():
    generator = np.random.default_rng(2)
    for _ in range(200):
        values = generator.gamma(1, 1, 16).astype(np.float32)
        assert (
            lane_of_least(values) == values.argmin() and lane_of_largest(values) == values.argmax()
        )
    equal = np.ones(16, dtype=np.float32)
    assert lane_of_least(equal) == 0 and lane_of_largest(equal) == 0
    assert lane_of_largest(np.where(np.arange(16) == 5, 1, np.nan).astype(np.float32)) == 5
    assert lane_of_least(np.where(np.arange(16) == 5, 1, np.inf).astype(np.float32)) == 5


def test_largest_of_values():
    x = np.random.default_rng(3).standard_normal(256).astype(np.float32)
    assert largest_of(x) == x[np.abs(x).argmax()] and largest_magnitude(x) == np.abs(x).max()
    assert largest_of(np.array([-2, 1, 2, -1] * 4, dtype=np.float32)) == 2
    assert (
        largest_of(np.zeros(16, dtype=np.float32)) == 0
        and largest_magnitude(np.full(16, -0.0, dtype=np.float32)) == 0
    )
